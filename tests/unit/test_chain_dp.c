/*
 * chain-dp by itself: against the recurrence written down plainly, in bytes; instances of the papers; measured chains;
 * what it does with large problems. Its general properties are those of test_solvers.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/io.h>
#include <cairn/solve.h>

#include "support/ask.h"
#include "support/random_problem.h"

typedef struct reply {
    cairn_info info;
    cairn_schedule *schedule;
} reply;

static reply solve_with(const cairn_problem *problem, const char *solver, int64_t budget, int64_t slots)
{
    reply r;
    cairn_options *options = test_options(solver, budget, "");
    if (cairn_solver_has_option(solver, "slots"))
        assert_int_equal(cairn_options_set_int(options, "slots", slots, NULL), CAIRN_OK);
    r.info = test_solve(problem, options, &r.schedule);
    return r;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget, int64_t slots)
{
    reply r = solve_with(problem, solver, budget, slots);
    cairn_schedule_free(r.schedule);
    return r.info;
}

static cairn_problem *chain_of(const cairn_chain *chain)
{
    cairn_problem *problem;
    cairn_error error;
    if (cairn_problem_new_chain(NULL, chain, NULL, &problem, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
    return problem;
}

/* ---- the recurrence of theorem 1, corrected, for one option and equal forwards, in bytes, without any table ---- */

enum { REFERENCE_STAGES = 7, REFERENCE_BYTES = 400 };
#define NEVER (INT64_MAX / 4)

typedef struct reference {
    const cairn_chain *chain;
    int64_t memo[REFERENCE_STAGES + 2][REFERENCE_STAGES + 2][REFERENCE_BYTES + 1]; /* -1 = not known yet */
} reference;

static const cairn_stage *stage_of(const reference *r, int32_t l)
{
    return &r->chain->stages[l - 1];
}

static int64_t grad_of(const reference *r, int32_t l)
{
    return l > 0 ? stage_of(r, l)->grad_bytes : r->chain->input_grad_bytes;
}

static int64_t at_least_zero(int64_t value)
{
    return value > 0 ? value : 0;
}

static int64_t smallest(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t largest(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t best_time(reference *r, int32_t s, int32_t t, int64_t m);

static int64_t time_of_save(reference *r, int32_t s, int32_t t, int64_t m)
{
    const cairn_stage_option *o = &stage_of(r, s)->options[0];
    int64_t forward = grad_of(r, t) + o->saved_bytes + at_least_zero(o->forward_workspace_bytes);
    int64_t backward = grad_of(r, s) + o->saved_bytes + at_least_zero(grad_of(r, s - 1) + o->backward_workspace_bytes);
    if (m < forward || m < backward)
        return NEVER;
    return o->forward_ns + o->backward_ns + (s < t ? best_time(r, s + 1, t, m - o->saved_bytes) : 0);
}

static int64_t time_of_checkpoint(reference *r, int32_t s, int32_t t, int32_t split, int64_t m)
{
    int64_t peak = 0, ns = 0;
    for (int32_t j = s; j < split; j++) {
        int64_t before = j > s ? stage_of(r, j - 1)->output_bytes : 0, result = stage_of(r, j)->output_bytes;
        int64_t after = before + result + stage_of(r, j)->forward_only_workspace_bytes;
        peak = largest(peak, largest(largest(before, result), after));
        ns += stage_of(r, j)->forward_only_ns;
    }
    if (m < grad_of(r, t) + peak)
        return NEVER;
    return ns + best_time(r, split, t, m - stage_of(r, split - 1)->output_bytes) + best_time(r, s, split - 1, m);
}

static int64_t best_time(reference *r, int32_t s, int32_t t, int64_t m)
{
    if (m < 0)
        return NEVER;
    int64_t *known = &r->memo[s][t][m];
    if (*known >= 0)
        return *known;
    int64_t best = time_of_save(r, s, t, m);
    for (int32_t split = s + 1; split <= t; split++)
        best = smallest(best, time_of_checkpoint(r, s, t, split, m));
    return *known = smallest(best, NEVER);
}

static void it_equals_the_plain_recurrence_where_nothing_is_rounded(void **state)
{
    (void)state;
    reference *r = malloc(sizeof(*r));
    int found = 0;
    assert_non_null(r);
    for (uint64_t seed = 0; seed < 600; seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = {.stages_max = REFERENCE_STAGES,
                                  .equal_forwards = true,
                                  .plain_grads = seed % 2 == 0,
                                  .positive = seed % 3 == 0};
        cairn_problem *problem = test_random_chain(&random, &shape);
        r->chain = cairn_problem_chain(problem);
        memset(r->memo, -1, sizeof(r->memo));
        for (int64_t m = 5; m <= 200; m += 13) {
            int64_t expected = best_time(r, 1, r->chain->stage_count, m);
            cairn_info info = solve(problem, "chain-dp", m + r->chain->input_bytes, m);
            if (info.makespan_ns != (expected == NEVER ? CAIRN_NONE : expected))
                fail_msg("seed %llu, m %lld: %lld, not %lld", (unsigned long long)seed, (long long)m,
                         (long long)info.makespan_ns, (long long)expected);
            found += expected != NEVER;
        }
        cairn_problem_free(problem);
    }
    assert_true(found > 3000);
    free(r);
}

/* ---- cuts ---- */

/* Stages whose forwards and sizes vary tenfold, so that much of the table is cut. */
static cairn_problem *varied_chain(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    test_chain_shape shape = {
        .stages_min = 24, .stages_max = 24, .bytes_max = 40, .ns_max = 1000, .equal_forwards = true};
    return test_random_chain(&random, &shape);
}

/* chain-exact has the same optimum from a program without slots, and so without these cuts. */
static void what_is_cut_is_in_no_optimum(void **state)
{
    (void)state;
    int compared = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        cairn_problem *problem = varied_chain(seed);
        int64_t input = cairn_problem_chain(problem)->input_bytes;
        cairn_info info = solve(problem, "chain-dp", 0, 1);
        for (int64_t quarter = 1; quarter < 4; quarter++) {
            int64_t budget = info.least_bytes + (info.store_all_bytes - info.least_bytes) * quarter / 4;
            cairn_info exact = solve(problem, "chain-exact", budget, 1);
            if (exact.optimal_in[0] == '\0')
                continue;
            cairn_info slotted = solve(problem, "chain-dp", budget, budget - input);
            assert_int_equal(slotted.makespan_ns, exact.makespan_ns);
            compared++;
        }
        cairn_problem_free(problem);
    }
    assert_true(compared > 90);
}

/* ---- instances ---- */

enum { WEAK_STAGES_MAX = 12 };

/*
 * A chain on which keeping a value and replacing it later by another one pays: outputs 0, 1, 2, 3, ..., 3, 4, saved sets
 * like outputs but A[2] = 5, no gradients; forwards n - 1, 2, 0, 0, ..., backwards 0; n + 2 stages, budget 8.
 */
static cairn_problem *weak_instance(int32_t n)
{
    cairn_stage stages[WEAK_STAGES_MAX];
    cairn_stage_option options[WEAK_STAGES_MAX];
    int32_t count = n + 2;
    for (int32_t l = 1; l <= count; l++) {
        int64_t output = l == 1 ? 1 : l == 2 ? 2 : l == count ? 4 : 3, ns = l == 1 ? n - 1 : l == 2 ? 2 : 0;
        options[l - 1] = (cairn_stage_option){"keep", l == 2 ? 5 : output, ns, 0, 0, 0};
        stages[l - 1] = (cairn_stage){"", output, 0, 0, ns, 0, false, 1, &options[l - 1]};
    }
    return chain_of(&(cairn_chain){0, 0, count, stages});
}

static void persistent_schedules_of_the_weak_instance_take_3n_and_1(void **state)
{
    (void)state;
    for (int32_t n = 3; n + 2 <= WEAK_STAGES_MAX; n++) {
        cairn_problem *problem = weak_instance(n);
        cairn_info info = solve(problem, "chain-dp", 8, 8);
        assert_int_equal(info.makespan_ns, 3 * n + 1);
        assert_string_equal(info.optimal_in, n == 3 ? "" : "persistent"); /* of three stages it is the optimum */
        if (n == 4)
            assert_int_equal(solve(problem, "brute-chain", 8, 8).makespan_ns, 2 * n + 4);
        cairn_problem_free(problem);
    }
}

/* Two stages whose plain forward is slow, or needs much memory: saving, then dropping, serves as well. */
static void saving_forwards_serve_as_plain_ones(void **state)
{
    (void)state;
    cairn_stage_option option = {"keep", 4, 1, 1, 0, 0}, last = {"keep", 20, 1, 1, 0, 0};
    for (int slow = 0; slow < 2; slow++) {
        cairn_stage plain = {"", 4, 0, 0, slow ? 100 : 1, slow ? 0 : 100, false, 1, &option};
        cairn_stage stages[] = {plain, plain, {"", 20, 0, 0, 1, 0, false, 1, &last}};
        cairn_problem *problem = chain_of(&(cairn_chain){0, 0, 3, stages});
        for (int64_t budget = 20; budget <= 30; budget++) {
            cairn_info info = solve(problem, "chain-dp", budget, budget);
            assert_int_equal(info.makespan_ns, solve(problem, "brute-chain", budget, budget).makespan_ns);
            assert_true(slow || info.makespan_ns < 100);
        }
        cairn_problem_free(problem);
    }
}

static void the_fastest_options_that_fit_are_taken(void **state)
{
    (void)state;
    cairn_stage_option options[] = {{"slow", 10, 9, 9, 0, 0}, {"fast", 30, 1, 1, 0, 0}, {"middle", 20, 2, 2, 0, 0}};
    cairn_stage stage = {"", 10, 0, 0, 9, 0, false, 3, options};
    cairn_stage stages[] = {stage, stage, stage};
    cairn_problem *problem = chain_of(&(cairn_chain){0, 0, 3, stages});
    static const int64_t expected[][2] = {{90, 6}, {89, 8}, {80, 8}, {79, 10}, {70, 10}, {60, 12}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
        assert_int_equal(solve(problem, "chain-dp", expected[i][0], expected[i][0]).makespan_ns, expected[i][1]);
    cairn_problem_free(problem);
}

static void a_pinned_stage_is_saved_once(void **state)
{
    (void)state;
    test_random random = test_random_seeded(3);
    test_chain_shape shape = {.stages_min = 6, .stages_max = 6, .positive = true};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_chain chain = *cairn_problem_chain(problem);
    cairn_stage stages[6];
    memcpy(stages, chain.stages, sizeof(stages));
    stages[2].no_recompute = true;
    chain.stages = stages;
    cairn_problem *pinned = chain_of(&chain);
    int64_t least = solve(pinned, "chain-dp", 0, 100).least_bytes;
    reply r = solve_with(pinned, "chain-dp", least, 1000);
    int forwards = 0;
    assert_non_null(r.schedule);
    for (int64_t i = 0; i < cairn_schedule_count(r.schedule); i++) {
        cairn_op op = cairn_schedule_ops(r.schedule)[i];
        if (op.index == 3 && op.code <= CAIRN_OP_FORWARD_DROP) {
            assert_int_equal(op.code, CAIRN_OP_FORWARD_SAVE);
            forwards++;
        }
    }
    assert_int_equal(forwards, 1);
    assert_true(least >= solve(problem, "chain-dp", 0, 100).least_bytes);
    cairn_schedule_free(r.schedule);
    cairn_problem_free(pinned);
    cairn_problem_free(problem);
}

/* ---- measured chains ---- */

static cairn_problem *read_chain(const char *name)
{
    char path[400], *text;
    size_t length;
    cairn_problem *problem = NULL;
    cairn_error error;
    snprintf(path, sizeof(path), "%s/chains/%s.json", CAIRN_TEST_DATA, name);
    if (cairn_file_read(NULL, path, &text, &length, &error) != CAIRN_OK ||
        cairn_problem_read(NULL, text, length, &problem, &error) != CAIRN_OK)
        fail_msg("%s: %s", path, error.message);
    cairn_text_free(NULL, text, length);
    return problem;
}

/* Quarters of the way from the least budget to store-all, 500 slots. A change here is a change of answers: explain it. */
static const struct golden {
    const char *name;
    int64_t least_bytes, makespan_ns[5], peak_bytes[5];
} golden[] = {
    {"gpt2",
     1153066592,
     {6325398409, 5993265420, 5772918494, 5552794896, 5222936272},
     {1153066592, 1300994508, 1433230908, 1563894444, 1759103396}},
    {"mlp",
     25650952,
     {920037176, 559100475, 523872857, 489301492, 450696261},
     {25650952, 99008648, 167668608, 240077152, 331070376}},
    {"resnet50",
     253097000,
     {1127580015, 861406333, 816285563, 795598693, 763409181},
     {253097000, 276281168, 302016232, 327128472, 359931240}},
    {"vgg",
     278898544,
     {1664419884, 1250113228, 1241569166, 1230057251, 1217446114},
     {278898544, 278900776, 282846024, 287040280, 293336088}},
};

static void measured_chains_give_what_they_gave(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(golden) / sizeof(golden[0]); i++) {
        const struct golden *g = &golden[i];
        cairn_problem *problem = read_chain(g->name);
        int64_t store_all = solve(problem, "chain-dp", 0, 1).store_all_bytes;
        for (int step = 0; step <= 4; step++) {
            int64_t budget = g->least_bytes + (store_all - g->least_bytes) / 4 * step;
            cairn_info info = solve(problem, "chain-dp", step < 4 ? budget : store_all, 500);
            assert_int_equal(info.least_bytes, g->least_bytes);
            if (info.makespan_ns != g->makespan_ns[step] || info.peak_bytes != g->peak_bytes[step])
                fail_msg("%s, step %d: makespan %lld, peak %lld", g->name, step, (long long)info.makespan_ns,
                         (long long)info.peak_bytes);
        }
        cairn_problem_free(problem);
    }
}

/* ---- large ones ---- */

static cairn_problem *deep_chain(int32_t n)
{
    test_random random = test_random_seeded((uint64_t)n);
    test_chain_shape shape = {.stages_min = n, .stages_max = n, .bytes_max = 1000000, .ns_max = 1000000};
    return test_random_chain(&random, &shape);
}

static void more_slots_are_not_worse_by_much_and_cost_more(void **state)
{
    (void)state;
    cairn_problem *problem = deep_chain(60);
    int64_t store_all = solve(problem, "chain-dp", 0, 1).store_all_bytes, before = INT64_MAX;
    for (int64_t slots = 50; slots <= 3200; slots *= 8) { /* a multiple rounds each size to no more */
        cairn_info info = solve(problem, "chain-dp", store_all / 3, slots);
        assert_true(info.makespan_ns <= before);
        before = info.makespan_ns;
    }
    cairn_problem_free(problem);
}

static void check_longer_steps(const cairn_problem *problem, const char *solver, int64_t budget)
{
    int64_t makespan_ns = solve(problem, solver, budget, 500).makespan_ns;
    for (int64_t factor = 2; factor <= 1 << 14; factor *= 2) {
        cairn_problem *longer;
        assert_int_equal(cairn_problem_scale(NULL, problem, factor, 1, &longer, NULL), CAIRN_OK);
        assert_int_equal(solve(longer, solver, factor * budget, 500).makespan_ns, factor * makespan_ns);
        cairn_problem_free(longer);
    }
}

/* From milliseconds to minutes: the table's rows become wider, whether the time beyond the least needs that or not. */
static void long_steps_get_the_schedules_of_short_ones(void **state)
{
    (void)state;
    static const char *const solvers[] = {"chain-dp", "revolve-hetero"};
    cairn_problem *problem = deep_chain(4);
    for (int i = 0; i < 2; i++) {
        cairn_info info = solve(problem, solvers[i], INT64_MAX, 1);
        for (int64_t eighth = 0; eighth < 8; eighth++)
            check_longer_steps(problem, solvers[i],
                               info.least_bytes + (info.store_all_bytes - info.least_bytes) * eighth / 8);
    }
    cairn_problem_free(problem);
}

static void what_is_too_deep_is_refused_with_numbers(void **state)
{
    (void)state;
    cairn_problem *problem = deep_chain(4000);
    cairn_options *options;
    cairn_info info;
    cairn_error error;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    cairn_options_set(options, "solver", "chain-dp", NULL);
    cairn_options_set(options, "budget", "100MB", NULL);
    cairn_options_set(options, "memory-limit", "4GiB", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_MEMORY_LIMIT);
    assert_non_null(strstr(error.message, "may use 4294967296"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/*
 * Twice what it takes is enough to be allowed to begin, with few slots and with many. By revolve-hetero, which cuts no rows:
 * those that chain-dp will cut are not known before.
 */
static void what_it_says_it_needs_is_near_what_it_takes(void **state)
{
    (void)state;
    static const int64_t slots[] = {1, 10, 100, 500};
    test_random random = test_random_seeded(120);
    test_chain_shape shape = {
        .stages_min = 120, .stages_max = 120, .bytes_max = 1000000, .ns_max = 1000000, .equal_forwards = true};
    cairn_problem *problem = test_random_chain(&random, &shape);
    int64_t budget = solve(problem, "revolve-hetero", 0, 1).store_all_bytes / 4;
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        cairn_options *options;
        cairn_info info;
        cairn_error error;
        assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
        cairn_options_set(options, "solver", "revolve-hetero", NULL);
        cairn_options_set_int(options, "budget", budget, NULL);
        cairn_options_set_int(options, "slots", slots[i], NULL);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_OK);
        cairn_options_set_int(options, "memory-limit", info.solver_peak_bytes * 2, NULL);
        if (cairn_solve(NULL, problem, options, NULL, &info, &error) != CAIRN_OK)
            fail_msg("%lld slots: %s", (long long)slots[i], error.message);
        cairn_options_free(options);
    }
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_equals_the_plain_recurrence_where_nothing_is_rounded),
        cmocka_unit_test(what_is_cut_is_in_no_optimum),
        cmocka_unit_test(persistent_schedules_of_the_weak_instance_take_3n_and_1),
        cmocka_unit_test(saving_forwards_serve_as_plain_ones),
        cmocka_unit_test(the_fastest_options_that_fit_are_taken),
        cmocka_unit_test(a_pinned_stage_is_saved_once),
        cmocka_unit_test(measured_chains_give_what_they_gave),
        cmocka_unit_test(more_slots_are_not_worse_by_much_and_cost_more),
        cmocka_unit_test(long_steps_get_the_schedules_of_short_ones),
        cmocka_unit_test(what_is_too_deep_is_refused_with_numbers),
        cmocka_unit_test(what_it_says_it_needs_is_near_what_it_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
