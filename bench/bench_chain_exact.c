/*
 * What chain-exact costs against the number of stages and of distinct stages, and how much less that is than for the plain
 * program: the same recurrence on the same step functions, with the steps of all splits merged one after the other. Then
 * revolve and the lower bound of chains against the number of stages. Prints one line per case.
 *
 * Times are of the processor, on one thread, so that other programs disturb little; best of several runs where runs are
 * short.
 *
 *     bench_chain_exact [--quick]
 */
#include <cairn/cairn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support/bench.h"

/* ---- chains ---- */

/* n stages of which so many are different; measured: each takes its time by up to 3 % more or less. */
static cairn_problem *chain_of(int32_t n, int32_t distinct, bool measured)
{
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n, sizeof(*options));
    cairn_chain chain = {1000000, 1000000, n, stages};
    cairn_problem *problem;
    cairn_error error;
    uint64_t state = 20191125, noise = 1;
    for (int32_t i = 0; i < n; i++) {
        int64_t output = next_number(&state, 500000, 2000000), forward = next_number(&state, 100000, 2000000);
        cairn_stage_option made = {"keep", output + next_number(&state, 0, 6000000), forward, 2 * forward, 0, 0};
        stages[i] = (cairn_stage){"", output, output, 0, forward, 0, false, 1, &options[i]};
        if (i >= distinct) {
            made = options[i % distinct];
            stages[i] = stages[i % distinct];
            stages[i].options = &options[i];
        }
        options[i] = made;
    }
    for (int32_t i = 0; measured && i < n; i++) {
        options[i].forward_ns = options[i].forward_ns / 1000 * next_number(&noise, 970, 1030);
        options[i].backward_ns = options[i].backward_ns / 1000 * next_number(&noise, 970, 1030);
        stages[i].forward_only_ns = options[i].forward_ns;
    }
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    free(options);
    free(stages);
    return problem;
}

/* ---- the plain program ---- */

typedef struct step {
    int64_t bytes, ns;
} step;

typedef struct steps {
    step *list;
    int32_t count;
} steps;

typedef struct plain {
    const cairn_chain *chain;
    int32_t n;
    int64_t top;   /* steps above are of no use */
    steps *tables; /* of (s, t), from 1 */
    step *made, *merged;
    int32_t made_count, capacity;
} plain;

static int64_t output_of(const plain *p, int32_t l)
{
    return l > 0 ? p->chain->stages[l - 1].output_bytes : p->chain->input_bytes;
}

static const steps *table_of(const plain *p, int32_t s, int32_t t)
{
    static step origin = {0, 0};
    static const steps none = {&origin, 1};
    return s > t ? &none : &p->tables[(size_t)s * (size_t)(p->n + 1) + (size_t)t];
}

/* Where the sum of two tables, the first moved, changes next after bytes. */
static int64_t next_change(const plain *p, const steps *a, int64_t shift, const steps *b, int32_t i, int32_t j)
{
    int64_t first = i + 1 < a->count ? a->list[i + 1].bytes + shift : p->top + 1;
    int64_t second = j + 1 < b->count ? b->list[j + 1].bytes : p->top + 1;
    return first < second ? first : second;
}

static void put(plain *p, int32_t *count, int64_t bytes, int64_t ns)
{
    if (*count > 0 && p->merged[*count - 1].ns <= ns)
        return;
    if (*count > 0 && p->merged[*count - 1].bytes == bytes)
        (*count)--;
    p->merged[(*count)++] = (step){bytes, ns};
}

static void make_room(plain *p, int32_t count)
{
    if (count <= p->capacity)
        return;
    p->capacity = 2 * count;
    p->made = realloc(p->made, (size_t)p->capacity * sizeof(*p->made));
    p->merged = realloc(p->merged, (size_t)p->capacity * sizeof(*p->merged));
    if (!p->made || !p->merged)
        exit(3);
}

/* Lowers what is made by ns + a(m - shift) + b(m) for m >= from. */
static void lower(plain *p, const steps *a, int64_t shift, const steps *b, int64_t from, int64_t ns)
{
    int32_t i = 0, j = 0, k = 0, count = 0;
    if (a->count == 0 || b->count == 0)
        return;
    make_room(p, p->made_count + a->count + b->count + 1);
    int64_t bytes = from;
    bytes = a->list[0].bytes + shift > bytes ? a->list[0].bytes + shift : bytes;
    bytes = b->list[0].bytes > bytes ? b->list[0].bytes : bytes;
    while (bytes <= p->top) {
        while (i + 1 < a->count && a->list[i + 1].bytes + shift <= bytes)
            i++;
        while (j + 1 < b->count && b->list[j + 1].bytes <= bytes)
            j++;
        for (; k < p->made_count && p->made[k].bytes <= bytes; k++)
            put(p, &count, p->made[k].bytes, p->made[k].ns);
        put(p, &count, bytes, ns + a->list[i].ns + b->list[j].ns);
        bytes = next_change(p, a, shift, b, i, j);
    }
    for (; k < p->made_count; k++)
        put(p, &count, p->made[k].bytes, p->made[k].ns);
    step *swap = p->made;
    p->made = p->merged;
    p->merged = swap;
    p->made_count = count;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The recurrence for one option a stage, no workspaces, gradients as large as outputs. */
static void fill(plain *p, int32_t s, int32_t t)
{
    const cairn_stage_option *option = &p->chain->stages[s - 1].options[0];
    steps *table = &p->tables[(size_t)s * (size_t)(p->n + 1) + (size_t)t];
    int64_t grad = output_of(p, t), forward_ns = 0, peak = grad + output_of(p, s);
    int64_t backward = output_of(p, s) + option->saved_bytes + output_of(p, s - 1);
    p->made_count = 0;
    lower(p, table_of(p, s + 1, t), s < t ? option->saved_bytes : 0, table_of(p, t + 1, t),
          larger(grad + option->saved_bytes, backward), option->forward_ns + option->backward_ns);
    for (int32_t split = s + 1; split <= t; split++) {
        forward_ns += p->chain->stages[split - 2].forward_only_ns;
        if (split - 1 > s)
            peak = larger(peak, grad + output_of(p, split - 2) + output_of(p, split - 1));
        lower(p, table_of(p, split, t), output_of(p, split - 1), table_of(p, s, split - 1), peak, forward_ns);
    }
    table->count = p->made_count;
    table->list = must_allocate((size_t)p->made_count, sizeof(step));
    memcpy(table->list, p->made, (size_t)p->made_count * sizeof(step));
}

static int64_t plain_solve(const cairn_chain *chain, int64_t budget_bytes)
{
    plain p = {.chain = chain, .n = chain->stage_count, .top = budget_bytes - chain->input_bytes};
    size_t count = (size_t)(p.n + 2) * (size_t)(p.n + 1);
    p.tables = must_allocate(count, sizeof(*p.tables));
    for (int32_t length = 0; length < p.n; length++)
        for (int32_t s = 1; s + length <= p.n; s++)
            fill(&p, s, s + length);
    const steps *all = table_of(&p, 1, p.n);
    int64_t found = all->count > 0 ? all->list[all->count - 1].ns : CAIRN_NONE;
    for (size_t i = 0; i < count; i++)
        free(p.tables[i].list);
    free(p.tables);
    free(p.made);
    free(p.merged);
    return found;
}

/* ---- measuring ---- */

static int wrong_count; /* of answers that differ from the plain program's */

static cairn_status solve(const cairn_problem *problem, const char *solver, int64_t budget, cairn_info *info,
                          double *seconds)
{
    cairn_options *options;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", solver, &error), &error);
    must(cairn_options_set(options, "threads", "1", &error), &error);
    must(cairn_options_set(options, "memory-limit", "4GiB", &error), &error);
    must(cairn_options_set_int(options, "budget", budget, &error), &error);
    double begin = processor_seconds();
    cairn_status status = cairn_solve(NULL, problem, options, NULL, info, &error);
    *seconds = processor_seconds() - begin;
    if (status != CAIRN_MEMORY_LIMIT)
        must(status, &error);
    else
        printf("  refused: %s\n", error.message);
    cairn_options_free(options);
    return status;
}

static int64_t third_of_store_all(const cairn_problem *problem)
{
    cairn_info info;
    double seconds;
    must(solve(problem, "store-all", INT64_MAX, &info, &seconds), NULL);
    return info.store_all_bytes / 3;
}

static void measure_exact(int32_t n, int32_t distinct, bool measured, bool with_plain)
{
    cairn_problem *problem = chain_of(n, distinct, measured);
    int64_t budget = third_of_store_all(problem);
    cairn_info info;
    double seconds, other;
    printf("chain-exact  stages %5" PRId32 "  distinct %5" PRId32 "%s", n, measured ? n : distinct,
           measured ? " (alike but for their times)" : "");
    fflush(stdout);
    if (solve(problem, "chain-exact", budget, &info, &seconds) == CAIRN_OK) {
        for (int run = 0; run < 2 && seconds < 2; run++)
            if (solve(problem, "chain-exact", budget, &info, &other) == CAIRN_OK && other < seconds)
                seconds = other;
        printf("  %8.3f s  %8.1f MiB  gap %.2f %%", seconds, (double)info.solver_peak_bytes / 1048576, 100 * info.gap);
        if (with_plain) {
            double begin = processor_seconds();
            int64_t found_ns = plain_solve(cairn_problem_chain(problem), budget);
            other = processor_seconds() - begin;
            printf("  plain %8.3f s (%.1f times)%s", other, other / seconds,
                   found_ns == info.makespan_ns ? "" : "  and another answer!");
            wrong_count += found_ns != info.makespan_ns;
        }
        printf("\n");
    }
    fflush(stdout);
    cairn_problem_free(problem);
}

/* Stages that are all alike; c outputs are kept. */
static void measure_revolve(int32_t n, int32_t kept)
{
    cairn_problem *problem = chain_of(n, 1, false);
    const cairn_chain *chain = cairn_problem_chain(problem);
    int64_t output = chain->stages[0].output_bytes, saved = chain->stages[0].options[0].saved_bytes;
    cairn_info info;
    double seconds;
    must(solve(problem, "revolve", chain->input_bytes + (kept + 3) * output + saved, &info, &seconds), NULL);
    printf("revolve      stages %8" PRId32 "  kept %3" PRId32 "  %8.3f s  forwards %.2f n\n", n, kept, seconds,
           1 + (double)info.recompute_ns / ((double)n * (double)chain->stages[0].forward_only_ns));
    cairn_problem_free(problem);
}

static void measure_bound(int32_t n)
{
    cairn_problem *problem = chain_of(n, n, false);
    cairn_options *options;
    cairn_bound bound;
    cairn_error error;
    int64_t budget = third_of_store_all(problem);
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set_int(options, "budget", budget, &error), &error);
    double begin = processor_seconds();
    must(cairn_bound_of(NULL, problem, options, &bound, &error), &error);
    printf("chain-bound  stages %8" PRId32 "  %8.3f s\n", n, processor_seconds() - begin);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

int main(int argc, char **argv)
{
    if (take_quick(&argc, argv, 0)) {
        measure_exact(15, 15, false, true);
        measure_exact(15, 3, true, false);
        measure_revolve(100, 20);
        measure_bound(100);
        return wrong_count > 0;
    }
    for (int32_t n = 25; n <= 100; n *= 2)
        measure_exact(n, n, false, true);
    measure_exact(150, 150, false, false);
    for (int32_t distinct = 1; distinct <= 12; distinct += distinct < 3 ? 1 : 3)
        measure_exact(339, distinct, false, false);
    for (int32_t n = 50; n <= 200; n *= 2)
        measure_exact(n, 3, true, false);
    measure_exact(1000, 3, true, false);
    for (int32_t n = 1000; n <= 1000000; n *= 10)
        measure_revolve(n, 20);
    for (int32_t n = 100; n <= 10000; n *= 10)
        measure_bound(n);
    return wrong_count > 0;
}
