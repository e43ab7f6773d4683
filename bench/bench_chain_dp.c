/*
 * How fast chain-dp is: seconds and memory against the number of stages and of slots, and how many times faster than the
 * plain program that the recurrence suggests at first (time innermost over splits, one table per amount of memory),
 * measured in the same run. Prints one line per case. On one thread, the processor's time: other programs disturb it little;
 * on two, the clock's.
 *
 *     bench_chain_dp [--quick] [stages [slots]]
 */
#include <cairn/cairn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/bench.h"

/* Stages of random sizes and times, gradients as large as outputs. */
static cairn_problem *random_chain(int32_t n)
{
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n, sizeof(*options));
    cairn_chain chain = {1000000, 1000000, n, stages};
    cairn_problem *problem;
    cairn_error error;
    uint64_t state = 20191125;
    for (int32_t i = 0; i < n; i++) {
        int64_t output = next_number(&state, 500000, 2000000), forward = next_number(&state, 100000, 2000000);
        options[i] = (cairn_stage_option){"keep", output + next_number(&state, 0, 6000000), forward, 2 * forward, 0, 0};
        stages[i] = (cairn_stage){"", output, output, 0, forward, 0, false, 1, &options[i]};
    }
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    free(options);
    free(stages);
    return problem;
}

/* ---- the plain program ---- */

typedef struct plain {
    const cairn_chain *chain;
    int32_t n, slots;
    double slot_bytes;
    int64_t *table; /* C(s,t,m) at ((m * n) + s) * n + t, from 0 */
} plain;

#define PLAIN_INFINITE (INT64_MAX / 4)

static int32_t slots_of(const plain *p, int64_t bytes)
{
    double slots = (double)bytes / p->slot_bytes;
    int32_t whole = (int32_t)slots;
    return whole + (whole < slots);
}

static int64_t *cell(const plain *p, int32_t s, int32_t t, int32_t m)
{
    return p->table + ((size_t)m * (size_t)p->n + (size_t)s) * (size_t)p->n + (size_t)t;
}

/* The recurrence of theorem 1 for one option, no workspaces; outputs, saved sets and gradients in slots. */
static int64_t plain_value(const plain *p, const int32_t *output, const int32_t *saved, int32_t s, int32_t t, int32_t m)
{
    const cairn_stage *stages = p->chain->stages;
    int64_t best = PLAIN_INFINITE, forward_ns = 0;
    int32_t grad = output[t], input = s > 0 ? output[s - 1] : output[0], peak = grad + output[s];
    int32_t save = grad + saved[s], backward = output[s] + saved[s] + input;
    if (m >= save && m >= backward && (s == t || m >= saved[s]))
        best = stages[s].options[0].forward_ns + stages[s].options[0].backward_ns +
               (s < t ? *cell(p, s + 1, t, m - saved[s]) : 0);
    for (int32_t split = s + 1; split <= t; split++) {
        forward_ns += stages[split - 1].forward_only_ns;
        if (split - 1 > s && grad + output[split - 2] + output[split - 1] > peak)
            peak = grad + output[split - 2] + output[split - 1];
        if (m < peak || m < output[split - 1])
            continue;
        int64_t value = forward_ns + *cell(p, split, t, m - output[split - 1]) + *cell(p, s, split - 1, m);
        best = value < best ? value : best;
    }
    return best;
}

static int64_t plain_solve(const cairn_chain *chain, int32_t slots, int64_t available_bytes)
{
    plain p = {chain, chain->stage_count, slots, (double)available_bytes / slots, NULL};
    size_t n = (size_t)p.n;
    int32_t *output = must_allocate(n, sizeof(*output)), *saved = must_allocate(n, sizeof(*saved));
    p.table = must_allocate(((size_t)slots + 1) * n * n, sizeof(*p.table));
    for (int32_t l = 0; l < p.n; l++) {
        output[l] = slots_of(&p, chain->stages[l].output_bytes);
        saved[l] = slots_of(&p, chain->stages[l].options[0].saved_bytes);
    }
    for (int32_t m = 0; m <= slots; m++)
        for (int32_t length = 0; length < p.n; length++)
            for (int32_t s = 0; s + length < p.n; s++)
                *cell(&p, s, s + length, m) = plain_value(&p, output, saved, s, s + length, m);
    int64_t value = *cell(&p, 0, p.n - 1, slots);
    free(p.table);
    free(saved);
    free(output);
    return value;
}

/* ---- measuring ---- */

static int worse_count; /* of answers that the plain program beats */

static cairn_info solve(const cairn_problem *problem, int64_t budget, int64_t slots, const char *threads)
{
    cairn_options *options;
    cairn_info info;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", "chain-dp", &error), &error);
    must(cairn_options_set(options, "threads", threads, &error), &error);
    must(cairn_options_set_int(options, "slots", slots, &error), &error);
    must(cairn_options_set_int(options, "budget", budget, &error), &error);
    must(cairn_solve(NULL, problem, options, NULL, &info, &error), &error);
    cairn_options_free(options);
    return info;
}

/* Of several runs: the processor's time where there is one thread, else the clock's. */
static cairn_info best_of(int runs, const cairn_problem *problem, int64_t budget, int64_t slots, const char *threads,
                          double *seconds)
{
    cairn_info info;
    *seconds = 0;
    for (int i = 0; i < runs; i++) {
        double begin = processor_seconds();
        info = solve(problem, budget, slots, threads);
        double own = threads[0] == '1' ? processor_seconds() - begin : (double)info.solve_ns * 1e-9;
        *seconds = i == 0 || own < *seconds ? own : *seconds;
    }
    return info;
}

static void measure(int32_t n, int64_t slots, bool with_plain)
{
    cairn_problem *problem = random_chain(n);
    int64_t store_all = solve(problem, INT64_MAX, 1, "1").store_all_bytes;
    for (int percent = 15; percent <= 60; percent *= 2) {
        int64_t budget = store_all / 100 * percent;
        double one, two;
        cairn_info info = best_of(3, problem, budget, slots, "1", &one);
        best_of(3, problem, budget, slots, "2", &two);
        printf("stages %5" PRId32 "  slots %5" PRId64
               "  budget %2d %% of store-all  %8.4f s on 1 thread  %8.4f s on 2  "
               "%7.1f MiB  overhead %5.2f %%",
               n, slots, percent, one, two, (double)info.solver_peak_bytes / 1048576,
               100.0 * (double)(info.makespan_ns - info.store_all_ns) / (double)info.store_all_ns);
        if (with_plain) {
            const cairn_chain *chain = cairn_problem_chain(problem);
            double begin = processor_seconds();
            int64_t value = plain_solve(chain, (int32_t)slots, budget - chain->input_bytes);
            double seconds = processor_seconds() - begin;
            printf("  plain %8.3f s (%.1f times)%s", seconds, seconds / one,
                   value < info.makespan_ns ? "  plain is better!" : "");
            worse_count += value < info.makespan_ns;
        }
        printf("\n");
        fflush(stdout);
    }
    cairn_problem_free(problem);
}

int main(int argc, char **argv)
{
    bool quick = take_quick(&argc, argv, 2);
    if (argc > 1 || quick) {
        measure(argc > 1 ? (int32_t)atoi(argv[1]) : 20, argc > 2 ? atoi(argv[2]) : 500, true);
        return worse_count > 0;
    }
    measure(50, 500, true);
    measure(100, 500, true);
    measure(339, 100, true);
    measure(339, 500, true);
    measure(100, 5000, false);
    measure(600, 500, false);
    return worse_count > 0;
}
