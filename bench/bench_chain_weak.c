/*
 * What chain-weak costs and gains. First processor seconds (of all threads) and memory against the number of stages and
 * of slots, with those of chain-exact, which is part of it, in the same run; then how often and by how much exhaustive
 * search beats it, and how often it beats chain-exact, on tiny random chains.
 *
 *     bench_chain_weak [--quick] [tiny chains of each kind]
 */
#include <cairn/cairn.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/bench.h"

enum { STAGES_MAX = 160, OPTIONS = 3, TINY_STAGES = 5, BUDGETS = 6 };

/* What chains are like: the largest size and time; forwards that save nothing differ; workspaces; options. */
typedef struct kind {
    const char *name;
    int64_t bytes_max, ns_max;
    bool differ;
    int64_t workspace_min, workspace_max;
    int32_t options;
} kind;

static void random_option(const kind *k, uint64_t *state, int64_t output, cairn_stage_option *option)
{
    int64_t forward = next_number(state, 0, k->ns_max);
    *option = (cairn_stage_option){.name = "keep",
                                   .saved_bytes = output + next_number(state, 0, 2 * k->bytes_max),
                                   .forward_ns = forward,
                                   .backward_ns = next_number(state, 0, 2 * k->ns_max),
                                   .forward_workspace_bytes = next_number(state, k->workspace_min, k->workspace_max),
                                   .backward_workspace_bytes = next_number(state, k->workspace_min, k->workspace_max)};
}

static cairn_problem *random_chain(const kind *k, int32_t n, uint64_t *state)
{
    static cairn_stage stages[STAGES_MAX];
    static cairn_stage_option options[STAGES_MAX][OPTIONS];
    cairn_chain chain = {.stage_count = n, .stages = stages};
    cairn_problem *problem;
    cairn_error error;
    for (int32_t i = 0; i < n; i++) {
        int64_t output = next_number(state, 0, k->bytes_max);
        for (int32_t o = 0; o < k->options; o++)
            random_option(k, state, output, &options[i][o]);
        stages[i] = (cairn_stage){.name = "",
                                  .output_bytes = output,
                                  .grad_bytes = output,
                                  .forward_only_ns = options[i][0].forward_ns,
                                  .forward_only_workspace_bytes = options[i][0].forward_workspace_bytes,
                                  .option_count = k->options,
                                  .options = options[i]};
        if (k->differ) {
            stages[i].forward_only_ns = next_number(state, 0, k->ns_max);
            stages[i].forward_only_workspace_bytes = next_number(state, k->workspace_min, k->workspace_max);
        }
    }
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    return problem;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget, int64_t slots)
{
    cairn_options *options;
    cairn_info info;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", solver, &error), &error);
    if (cairn_solver_has_option(solver, "slots"))
        must(cairn_options_set_int(options, "slots", slots, &error), &error);
    must(cairn_options_set_int(options, "budget", budget, &error), &error);
    must(cairn_solve(NULL, problem, options, NULL, &info, &error), &error);
    cairn_options_free(options);
    return info;
}

static cairn_limits limits_of(const cairn_problem *problem, const char *solver)
{
    cairn_options *options;
    cairn_limits limits;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", solver, &error), &error);
    must(cairn_limits_of(NULL, problem, options, &limits, &error), &error);
    cairn_options_free(options);
    return limits;
}

/* ---- seconds and memory ---- */

static cairn_info timed(const cairn_problem *problem, const char *solver, int64_t budget, int64_t slots,
                        double *seconds)
{
    double before = processor_seconds();
    cairn_info info = solve(problem, solver, budget, slots);
    *seconds = processor_seconds() - before;
    return info;
}

static void measure(const kind *k, int32_t n, int64_t slots)
{
    uint64_t state = 2024;
    cairn_problem *problem = random_chain(k, n, &state);
    cairn_limits limits = limits_of(problem, "chain-exact");
    int64_t budget = limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) / 4;
    double exact_s, weak_s;
    cairn_info exact = timed(problem, "chain-exact", budget, slots, &exact_s);
    cairn_info weak = timed(problem, "chain-weak", budget, slots, &weak_s);
    printf("%-22s %4" PRId32 " %6" PRId64 " %9.3f %8.1f %9.3f %8.1f  %s\n", k->name, n, slots, exact_s,
           0x1p-20 * (double)exact.solver_peak_bytes, weak_s, 0x1p-20 * (double)weak.solver_peak_bytes,
           weak.optimal_in[0] ? "bytes" : "slots");
    cairn_info_clear(&exact);
    cairn_info_clear(&weak);
    cairn_problem_free(problem);
}

/* ---- how good ---- */

typedef struct tally {
    int cases, above_brute, above_weak;
    double worst_weak, worst_exact; /* against exhaustive search, as a part of its time */
} tally;

static double excess(int64_t ns, int64_t best_ns)
{
    return best_ns > 0 ? (double)(ns - best_ns) / (double)best_ns : 0;
}

static void compare(const cairn_problem *problem, int64_t budget, tally *count)
{
    cairn_info best = solve(problem, "brute-chain", budget, 500), weak = solve(problem, "chain-weak", budget, 500);
    cairn_info exact = solve(problem, "chain-exact", budget, 500);
    count->cases++;
    count->above_brute += weak.makespan_ns != best.makespan_ns;
    count->above_weak += exact.makespan_ns != weak.makespan_ns;
    if (weak.makespan_ns >= 0 && excess(weak.makespan_ns, best.makespan_ns) > count->worst_weak)
        count->worst_weak = excess(weak.makespan_ns, best.makespan_ns);
    if (exact.makespan_ns >= 0 && excess(exact.makespan_ns, best.makespan_ns) > count->worst_exact)
        count->worst_exact = excess(exact.makespan_ns, best.makespan_ns);
    cairn_info_clear(&best);
    cairn_info_clear(&weak);
    cairn_info_clear(&exact);
}

static void compare_kind(const kind *k, int chains)
{
    uint64_t state = 41;
    tally count = {0, 0, 0, 0, 0};
    for (int i = 0; i < chains; i++) {
        cairn_problem *problem = random_chain(k, (int32_t)next_number(&state, 3, TINY_STAGES), &state);
        cairn_limits limits = limits_of(problem, "brute-chain");
        int64_t span = limits.store_all_bytes - limits.least_bytes;
        for (int b = 0; b < BUDGETS; b++)
            compare(problem, limits.least_bytes + span * b / BUDGETS, &count);
        cairn_problem_free(problem);
    }
    printf("%-22s %6d  %6.2f %% up to %3.0f %%  %6.2f %% up to %3.0f %%\n", k->name, count.cases,
           100.0 * count.above_brute / count.cases, 100 * count.worst_weak, 100.0 * count.above_weak / count.cases,
           100 * count.worst_exact);
}

int main(int argc, char **argv)
{
    static const kind large[] = {{"forwards alike", 2000000, 2000000, false, 0, 0, 1},
                                 {"forwards differ", 2000000, 2000000, true, 0, 1000000, 1}};
    static const kind tiny[] = {
        {"forwards alike", 100, 100, false, 0, 0, 1},      {"forwards differ", 100, 100, true, 0, 0, 1},
        {"with workspaces", 100, 100, true, 0, 100, 1},    {"signed workspaces", 100, 100, true, -100, 100, 1},
        {"three options", 100, 100, false, 0, 0, OPTIONS}, {"options, workspaces", 100, 100, true, -100, 100, OPTIONS}};
    bool quick = take_quick(&argc, argv, 1);
    int chains = argc > 1 ? atoi(argv[1]) : quick ? 2 : 200;
    printf("%-22s %4s %6s %9s %8s %9s %8s\n", "", "n", "slots", "exact s", "MiB", "weak s", "MiB");
    for (size_t k = 0; k < sizeof(large) / sizeof(large[0]); k++) {
        for (int32_t n = 20; n <= (quick ? 20 : 80); n += 20)
            measure(&large[k], n, 500);
        if (quick)
            continue;
        for (int64_t slots = 125; slots <= 500; slots *= 2)
            measure(&large[k], 100, slots);
        measure(&large[k], 150, 250);
    }
    printf("\n%-22s %6s  %-20s  %s\n", "", "cases", "weak above brute", "exact above weak, brute");
    for (size_t k = 0; k < sizeof(tiny) / sizeof(tiny[0]); k++)
        compare_kind(&tiny[k], chains);
    return 0;
}
