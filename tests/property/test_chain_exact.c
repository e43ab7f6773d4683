/*
 * chain-exact against others: with as many slots as there are bytes chain-dp finds the same optimum, exhaustive search
 * nothing worse; at any number of slots chain-dp is no better; one session answers all budgets as many sessions do.
 * cairn_solve has every schedule judged by the simulator and fails when it is not valid, so that is tested all along.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/chain/subchain.h"
#include "support/ask.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_options *options_for(const char *solver, int64_t budget_bytes, int64_t slots)
{
    cairn_options *options = test_options(solver, budget_bytes, "threads=1");
    if (slots > 0)
        assert_int_equal(cairn_options_set_int(options, "slots", slots, NULL), CAIRN_OK);
    return options;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes, int64_t slots)
{
    return test_solve(problem, options_for(solver, budget_bytes, slots), NULL);
}

static cairn_limits limits(const cairn_problem *problem, const char *solver)
{
    return test_limits(problem, options_for(solver, -1, 0));
}

/* Bytes that are not always there: as many slots make every slot a byte. */
static int64_t free_bytes(const cairn_problem *problem, int64_t budget_bytes)
{
    return budget_bytes - cairn_problem_chain(problem)->input_bytes - cairn_problem_info_of(problem)->fixed_bytes;
}

static test_chain_shape shape_of(int round)
{
    test_chain_shape shape = test_chain_of_everything(5);
    if (round % 3 == 0)
        shape = (test_chain_shape){.stages_max = 5, .equal_forwards = true, .plain_grads = true};
    if (round % 3 == 1)
        shape = (test_chain_shape){.stages_max = 5, .weight_grads = true, .signed_workspaces = true, .bytes_max = 20};
    shape.machine = false;
    return shape;
}

static void check_budget(const cairn_problem *problem, int64_t budget_bytes, bool with_brute)
{
    cairn_info exact = solve(problem, "chain-exact", budget_bytes, 0);
    int64_t slots = free_bytes(problem, budget_bytes);
    if (slots >= 1) {
        cairn_info fine = solve(problem, "chain-dp", budget_bytes, slots);
        assert_int_equal(exact.makespan_ns, fine.makespan_ns);
    }
    cairn_info coarse = solve(problem, "chain-dp", budget_bytes, 13);
    assert_int_equal(exact.makespan_ns < 0, coarse.makespan_ns < 0);
    assert_true(exact.makespan_ns <= coarse.makespan_ns);
    assert_int_equal(exact.least_bytes, coarse.least_bytes);
    if (exact.makespan_ns >= 0)
        assert_true(exact.peak_bytes <= budget_bytes);
    if (with_brute) {
        cairn_info best = solve(problem, "brute-chain", budget_bytes, 0);
        if (exact.makespan_ns >= 0)
            assert_true(best.makespan_ns <= exact.makespan_ns);
        assert_true(best.least_bytes <= exact.least_bytes);
    }
}

static void optimum_is_that_of_bytes(void **state)
{
    test_random random = test_random_seeded(41);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(1500); round++) {
        test_chain_shape shape = shape_of(round);
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_limits found = limits(problem, "chain-exact");
        if (found.least_bytes >= 0) {
            int64_t span = found.store_all_bytes - found.least_bytes;
            check_budget(problem, found.least_bytes, true);
            check_budget(problem, found.least_bytes - 1, false);
            check_budget(problem, found.least_bytes + test_random_between(&random, 0, span), true);
            check_budget(problem, found.store_all_bytes + 3, false);
        }
        cairn_problem_free(problem);
    }
}

/* Long enough for blocks, cells and repeated sub-chains to matter. */
static void longer_chains_too(void **state)
{
    test_random random = test_random_seeded(42);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(60); round++) {
        test_chain_shape shape = {.stages_min = 12,
                                  .stages_max = 30,
                                  .bytes_max = round % 2 ? 12 : 60,
                                  .ns_max = round % 3 ? 1000 : 12,
                                  .options_max = 1 + round % 3,
                                  .homogeneous = round % 5 == 0,
                                  .weight_grads = round % 4 == 0,
                                  .no_recompute = round % 7 == 0,
                                  .signed_workspaces = round % 4 < 2};
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_limits found = limits(problem, "chain-exact");
        if (found.least_bytes >= 0) {
            for (int i = 0; i < 4; i++)
                check_budget(problem, found.least_bytes + 90 * i, false);
        }
        cairn_problem_free(problem);
    }
}

enum { BUDGETS = 12 };

static void one_session_answers_all_budgets(void **state)
{
    test_random random = test_random_seeded(43);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(100); round++) {
        test_chain_shape shape = {.stages_min = 4, .stages_max = 16, .bytes_max = 50, .ns_max = 50, .options_max = 2};
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_limits found = limits(problem, "chain-exact");
        cairn_options *options = options_for("chain-exact", -1, 0);
        cairn_info infos[BUDGETS];
        int64_t budgets[BUDGETS];
        for (int i = 0; i < BUDGETS - 1; i++)
            budgets[i] = found.least_bytes + 40 * i;
        budgets[BUDGETS - 1] = CAIRN_NONE;
        assert_int_equal(cairn_solve_many(NULL, problem, options, budgets, BUDGETS, NULL, infos, NULL), CAIRN_OK);
        int64_t last_ns = INT64_MAX;
        for (int i = 0; i < BUDGETS - 1; i++) {
            cairn_info alone = solve(problem, "chain-exact", budgets[i], 0);
            assert_int_equal(infos[i].makespan_ns, alone.makespan_ns);
            assert_int_equal(infos[i].peak_bytes, alone.peak_bytes);
            assert_true(infos[i].makespan_ns <= last_ns);
            last_ns = infos[i].makespan_ns;
            cairn_info_clear(&infos[i]);
        }
        assert_int_equal(infos[BUDGETS - 1].recompute_ns, 0);
        cairn_options_free(options);
        cairn_problem_free(problem);
    }
}

/* All bytes there are: two stages that need 2^63 - 1 together, or a little less beside others, and one byte less. */
static void the_largest_sizes_are_solved(void **state)
{
    (void)state;
    static const char *const solvers[] = {"chain-exact", "chain-weak"};
    for (int64_t spare = 0; spare < 1000; spare = 2 * spare + 1) {
        cairn_stage_option options[] = {{"keep", INT64_MAX / 2 + 1 - spare, 1, 1, 0, 0},
                                        {"keep", INT64_MAX / 2, 1, 1, 0, 0}};
        cairn_stage stages[] = {{"", 0, 0, 0, 1, 0, false, 1, &options[0]}, {"", 0, 0, 0, 1, 0, false, 1, &options[1]}};
        cairn_problem *problem;
        assert_int_equal(cairn_problem_new_chain(NULL, &(cairn_chain){0, 0, 2, stages}, NULL, &problem, NULL),
                         CAIRN_OK);
        for (int i = 0; i < 2; i++)
            for (int64_t less = 0; less < 2; less++) {
                int64_t budget_bytes = INT64_MAX - spare - less;
                assert_int_equal(solve(problem, solvers[i], budget_bytes, 0).makespan_ns,
                                 solve(problem, "brute-chain", budget_bytes, 0).makespan_ns);
            }
        cairn_problem_free(problem);
    }
}

enum { MANY_WAYS = 60 };

/* The first of three stages can be saved in ways that take less time, the more scratch they have: first, first + step, ... */
static cairn_info with_ways(int32_t first, int32_t step, int32_t count, const char *solver, int64_t budget_bytes)
{
    cairn_stage_option options[MANY_WAYS], two = {"", 500, 1000, 1000, 0, 0}, three = {"", 4500, 1000, 1000, 0, 0};
    cairn_stage stages[] = {{"", 10, 10, 0, 50000, 0, false, count, options},
                            {"", 10, 10, 0, 1000, 0, false, 1, &two},
                            {"", 10, 10, 0, 1000, 0, false, 1, &three}};
    cairn_problem *problem;
    for (int32_t i = 0, way = first; i < count; i++, way += step)
        options[i] = (cairn_stage_option){"", 4000, 40000 - 500 * way, 1000, 50 * way, 0};
    assert_int_equal(cairn_problem_new_chain(NULL, &(cairn_chain){10, 10, 3, stages}, NULL, &problem, NULL), CAIRN_OK);
    cairn_info info = solve(problem, solver, budget_bytes, 0);
    cairn_problem_free(problem);
    return info;
}

/* What is claimed to be the best of its class is no worse than what there is with fewer ways. */
static void what_was_given_up_is_not_claimed(void **state)
{
    static const char *const solvers[] = {"chain-exact", "chain-weak"};
    int claimed = 0, refrained = 0;
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int64_t budget_bytes = 4600; budget_bytes < 8000; budget_bytes += 150)
            for (int32_t count = 2; count <= MANY_WAYS; count += 4) {
                cairn_info all = with_ways(1, 1, count, solvers[i], budget_bytes);
                bool claims = all.optimal_in[0] != '\0';
                for (int32_t other = 2; claims && all.makespan_ns >= 0 && other <= count; other++) {
                    cairn_info two = with_ways(1, other - 1, 2, solvers[i], budget_bytes);
                    assert_true(two.makespan_ns < 0 || all.makespan_ns <= two.makespan_ns);
                }
                claimed += claims;
                refrained += all.outcome == CAIRN_OUTCOME_FEASIBLE && !claims;
            }
    assert_true(claimed > 20 && refrained > 20);
}

/* How many kinds of sub-chains there are at least is known without looking at them all: exactly so where all differ. */
static void kinds_are_counted_from_below(void **state)
{
    static const cairn_env env;
    static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE};
    test_random random = test_random_seeded(44);
    int distinct = 0, repeated = 0;
    (void)state;
    for (int round = 0; round < 100; round++) {
        test_chain_shape shape = {.stages_max = 20, .bytes_max = round % 2 ? 1000 : 1, .ns_max = round % 2 ? 1000 : 1};
        shape.homogeneous = round % 3 == 0;
        cairn_problem *problem = test_random_chain(&random, &shape);
        const crn_task task = {
            .env = &env, .problem = problem, .settings = &settings, .budget_max_bytes = -1, .deadline_ns = -1};
        crn_chain_model model;
        crn_subchains all, least;
        assert_int_equal(crn_chain_model_init(&model, &task, NULL), CAIRN_OK);
        assert_int_equal(crn_subchains_init(&all, &model, &model.arena, NULL), CAIRN_OK);
        assert_int_equal(crn_subchains_count_least(&least, &model, &model.arena, NULL), CAIRN_OK);
        assert_int_equal(least.distinct_count, all.distinct_count);
        for (int32_t length = 1; length <= model.n; length++) {
            int32_t kinds = all.begin[length + 1] - all.begin[length];
            int32_t known = least.begin[length + 1] - least.begin[length];
            assert_true(known >= 1 && known <= kinds);
            assert_true(all.distinct_count < model.n || known == kinds);
        }
        distinct += all.distinct_count == model.n;
        repeated += all.distinct_count < model.n / 2;
        crn_chain_model_clear(&model);
        cairn_problem_free(problem);
    }
    assert_true(distinct > 20 && repeated > 20);
}

/* All stages differ. */
static cairn_problem *long_chain(int32_t count)
{
    test_random random = test_random_seeded(45);
    cairn_stage *stages = calloc((size_t)count, sizeof(*stages));
    cairn_stage_option *options = calloc((size_t)count, sizeof(*options));
    const cairn_chain chain = {.input_bytes = 100, .stage_count = count, .stages = stages};
    cairn_problem *problem;
    assert_true(stages && options);
    for (int32_t i = 0; i < count; i++) {
        int64_t ns = test_random_between(&random, 100, 100000);
        options[i] = (cairn_stage_option){.saved_bytes = 1000 + i, .forward_ns = ns, .backward_ns = 2 * ns};
        stages[i] = (cairn_stage){
            .output_bytes = 500, .grad_bytes = 500, .forward_only_ns = ns, .option_count = 1, .options = &options[i]};
    }
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    free(options);
    free(stages);
    return problem;
}

/* What the costly solvers would take is not what time goes into. */
static void a_short_time_is_for_an_answer(void **state)
{
    cairn_problem *problem = long_chain(10000);
    cairn_limits found = limits(problem, "store-all");
    int64_t budget = found.least_lower_bytes + (found.store_all_bytes - found.least_lower_bytes) / 2;
    (void)state;
    clock_t begun = clock();
    cairn_info info = test_solve(problem, test_options("auto", budget, "time-limit=1s threads=1"), NULL);
    assert_true(clock() - begun < CLOCKS_PER_SEC * 3 / 2);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimum_is_that_of_bytes),         cmocka_unit_test(longer_chains_too),
        cmocka_unit_test(one_session_answers_all_budgets),  cmocka_unit_test(the_largest_sizes_are_solved),
        cmocka_unit_test(kinds_are_counted_from_below),     cmocka_unit_test(a_short_time_is_for_an_answer),
        cmocka_unit_test(what_was_given_up_is_not_claimed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
