/*
 * chain-lagrangian on long chains whose stages all differ: its gap to the lower bound, its time and its memory, at shares of
 * the way from the least budget of all schedules to what storing everything takes. Prints one line per case.
 *
 * Times are of the processor, on one thread, bound and simulation included.
 *
 *     bench_chain_lagrangian [--quick]
 */
#include <cairn/cairn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/bench.h"

/* How far sizes and times spread: by a factor of 4 to 20, or by a tenth. */
typedef enum spread { SPREAD_WIDE, SPREAD_NARROW } spread;

static void make_stage(cairn_stage *stage, cairn_stage_option *option, uint64_t *state, spread kind)
{
    bool wide = kind == SPREAD_WIDE;
    int64_t output = wide ? next_number(state, 500000, 2000000) : next_number(state, 1000000, 1100000);
    int64_t rest = wide ? next_number(state, 0, 6000000) : next_number(state, 2900000, 3100000);
    int64_t forward = wide ? next_number(state, 100000, 2000000) : next_number(state, 900000, 1100000);
    *option = (cairn_stage_option){"keep", output + rest, forward, 2 * forward, 0, 0};
    *stage = (cairn_stage){"", output, output, 0, forward, 0, false, 1, option};
}

static cairn_problem *chain_of(int32_t n, spread kind)
{
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n, sizeof(*options));
    cairn_chain chain = {1000000, 1000000, n, stages};
    cairn_problem *problem;
    cairn_error error;
    uint64_t state = 20191125;
    for (int32_t i = 0; i < n; i++)
        make_stage(&stages[i], &options[i], &state, kind);
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    free(options);
    free(stages);
    return problem;
}

static cairn_options *options_for(int64_t budget_bytes)
{
    cairn_error error;
    cairn_options *options;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", "chain-lagrangian", &error), &error);
    must(cairn_options_set(options, "threads", "1", &error), &error);
    must(cairn_options_set_int(options, "budget", budget_bytes, &error), &error);
    return options;
}

static cairn_info solve(const cairn_problem *problem, int64_t budget_bytes, double *seconds)
{
    cairn_error error;
    cairn_info info;
    cairn_options *options = options_for(budget_bytes);
    double begin = processor_seconds();
    must(cairn_solve(NULL, problem, options, NULL, &info, &error), &error);
    *seconds = processor_seconds() - begin;
    cairn_options_free(options);
    return info;
}

static void measure(int32_t n, spread kind)
{
    static const int percent[] = {5, 10, 25, 50, 75};
    cairn_problem *problem = chain_of(n, kind);
    double seconds;
    cairn_info all = solve(problem, INT64_MAX, &seconds);
    for (size_t i = 0; i < sizeof(percent) / sizeof(percent[0]); i++) {
        int64_t least = all.least_lower_bytes;
        cairn_info info = solve(problem, least + (all.store_all_bytes - least) / 100 * percent[i], &seconds);
        printf("chain-lagrangian  stages %5" PRId32
               "  %s  budget %2d %% of the way  gap %6.3f %%  %7.2f s  %6.1f MiB\n",
               n, kind == SPREAD_WIDE ? "all different" : "nearly alike ", percent[i], 100 * info.gap, seconds,
               (double)info.solver_peak_bytes / (1 << 20));
        fflush(stdout);
    }
    cairn_problem_free(problem);
}

int main(int argc, char **argv)
{
    static const int32_t lengths[] = {150, 1000, 5000};
    size_t count = take_quick(&argc, argv, 0) ? 1 : sizeof(lengths) / sizeof(lengths[0]);
    for (size_t i = 0; i < count; i++) {
        measure(lengths[i], SPREAD_WIDE);
        measure(lengths[i], SPREAD_NARROW);
    }
    return 0;
}
