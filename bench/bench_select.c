/*
 * How the checkpoint selection solvers scale with the number of layers, on random sizes and on a network whose outputs
 * shrink as a convolutional one's do. Prints one line per case, best of several runs: the processor's time of the whole
 * call (storing everything once, choice, schedule, simulation), the same per layer, and the solver's memory per layer.
 *
 *     bench_select [--quick]
 */
#include <cairn/solve.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/bench.h"

enum { RUNS = 3 };

static int64_t shrinking(int32_t l, int32_t n)
{
    return (int64_t)1 << (30 - 10 * (int64_t)l / (n + 1));
}

static cairn_problem *chain_of(int32_t n, bool is_random)
{
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n, sizeof(*options));
    uint64_t state = 1;
    for (int32_t l = 1; l <= n; l++) {
        int64_t bytes = is_random ? next_number(&state, 1, 1 << 30) : shrinking(l, n);
        options[l - 1] = (cairn_stage_option){"keep", bytes, 1000, 2000, 0, 0};
        stages[l - 1] = (cairn_stage){"", bytes, bytes, 0, 1000, 0, false, 1, &options[l - 1]};
    }
    const cairn_chain chain = {1 << 20, 1 << 20, n, stages};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    free(stages);
    free(options);
    return problem;
}

static cairn_options *options_for(const char *solver)
{
    cairn_options *options;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "minimize", "memory", &error), &error);
    must(cairn_options_set(options, "solver", solver, &error), &error);
    return options;
}

static void measure(const char *solver, int32_t n, bool is_random)
{
    cairn_problem *problem = chain_of(n, is_random);
    cairn_options *options = options_for(solver);
    int64_t best_ns = INT64_MAX, peak_bytes = 0, objective_bytes = 0;
    for (int run = 0; run < RUNS; run++) {
        cairn_info info;
        cairn_error error;
        clock_t begin = clock();
        must(cairn_solve(NULL, problem, options, NULL, &info, &error), &error);
        int64_t ns = (int64_t)(clock() - begin) * (1000000000 / CLOCKS_PER_SEC);
        best_ns = ns < best_ns ? ns : best_ns;
        peak_bytes = info.solver_peak_bytes;
        objective_bytes = info.objective_bytes;
        cairn_info_clear(&info);
    }
    printf("%-16s %-9s n=%-8" PRId32 " %10.3f ms %8.1f ns/layer %6" PRId64 " B/layer  objective %" PRId64 "\n", solver,
           is_random ? "random" : "shrinking", n, 1e-6 * (double)best_ns, (double)best_ns / n, peak_bytes / n,
           objective_bytes);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

int main(int argc, char **argv)
{
    bool quick = take_quick(&argc, argv, 0);
    static const struct {
        const char *solver;
        int32_t least, most;
    } cases[] = {{"select-linear", 1000, 1000000}, {"select-quadratic", 1000, 10000}, {"select-cubic", 100, 1000}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int32_t n = cases[i].least; n <= (quick ? cases[i].least : cases[i].most); n *= 10)
            for (int is_random = 0; is_random <= 1; is_random++)
                measure(cases[i].solver, n, is_random);
    return 0;
}
