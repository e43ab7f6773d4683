/*
 * chain-lagrangian: schedules that fit and are no faster than the best persistent ones nor than the bound allows, close to
 * them on plain chains; at its least budget as well; with its answer so far when it is stopped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "threads=1");
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, options_for(solver, budget_bytes), NULL);
}

/* Sums over many budgets: what the two solvers take. */
typedef struct totals {
    double exact_ns, priced_ns;
    int answers;
} totals;

static void check_budget(const cairn_problem *problem, int64_t budget_bytes, totals *sum)
{
    cairn_info priced = solve(problem, "chain-lagrangian", budget_bytes);
    cairn_info exact = solve(problem, "chain-exact", budget_bytes);
    assert_int_equal(priced.makespan_ns < 0, budget_bytes < priced.least_bytes);
    assert_true(priced.least_bytes >= exact.least_bytes);
    if (priced.makespan_ns < 0)
        return;
    assert_true(priced.peak_bytes <= budget_bytes);
    assert_true(priced.makespan_ns >= priced.lower_bound_ns);
    assert_true(priced.makespan_ns >= exact.makespan_ns);
    sum->exact_ns += (double)exact.makespan_ns;
    sum->priced_ns += (double)priced.makespan_ns;
    sum->answers++;
}

static void is_close_to_the_best_persistent_schedules(void **state)
{
    static const test_chain_shape shape = {.stages_min = 30,
                                           .stages_max = 50,
                                           .bytes_max = 100000,
                                           .ns_max = 100000,
                                           .positive = true,
                                           .equal_forwards = true,
                                           .plain_grads = true};
    test_random random = test_random_seeded(81);
    totals sum = {0, 0, 0};
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(12); round++) {
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "chain-lagrangian", INT64_MAX);
        int64_t least = all.least_bytes, span = all.store_all_bytes - least;
        check_budget(problem, least, &sum);
        check_budget(problem, least - 1, &sum);
        for (int i = 2; i <= 8; i++)
            check_budget(problem, least + span * i / 8, &sum);
        cairn_problem_free(problem);
    }
    print_message("%d answers, %.3f %% slower than chain-exact\n", sum.answers,
                  100 * (sum.priced_ns / sum.exact_ns - 1));
    assert_true(sum.priced_ns <= 1.01 * sum.exact_ns);
}

/* Options, workspaces of either sign, weight gradients, stages that must not be recomputed. */
static void holds_for_everything_that_the_format_allows(void **state)
{
    test_random random = test_random_seeded(82);
    totals sum = {0, 0, 0};
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(300); round++) {
        test_chain_shape shape = test_chain_of_everything(9);
        shape.machine = false;
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "chain-lagrangian", INT64_MAX);
        int64_t least = all.least_bytes, span = all.store_all_bytes - least;
        for (int i = -1; i <= 4; i++) {
            cairn_info info =
                solve(problem, "chain-lagrangian", i < 0 ? least - 1 : least + (span > 0 ? span * i / 4 : 0));
            assert_int_equal(info.makespan_ns < 0, i < 0);
            sum.answers += info.makespan_ns >= 0;
        }
        cairn_problem_free(problem);
    }
    assert_true(sum.answers > 0);
}

/* Hundreds of stages that all differ, at a quarter and at half of the way: the gap to the bound of all schedules. */
static void long_chains_are_within_a_small_gap(void **state)
{
    static const test_chain_shape shape = {.stages_min = 300,
                                           .stages_max = 300,
                                           .bytes_max = 1000000,
                                           .ns_max = 1000000,
                                           .positive = true,
                                           .equal_forwards = true,
                                           .plain_grads = true};
    test_random random = test_random_seeded(83);
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_info all = solve(problem, "chain-lagrangian", INT64_MAX);
    (void)state;
    for (int quarter = 1; quarter <= 2; quarter++) {
        int64_t budget = all.least_bytes + (all.store_all_bytes - all.least_bytes) * quarter / 4;
        cairn_info info = solve(problem, "chain-lagrangian", budget);
        print_message("gap %.3f %%\n", 100 * info.gap);
        assert_true(info.gap >= 0 && info.gap <= 0.003);
    }
    cairn_problem_free(problem);
}

enum { NARROWING_STAGES = 200 };

/* Sizes fall towards the end, as in a convolutional network: all times `ns` and all sizes `bytes` times as large. */
static cairn_problem *narrowing_chain(int64_t bytes, int64_t ns)
{
    cairn_stage_option options[NARROWING_STAGES];
    cairn_stage stages[NARROWING_STAGES];
    cairn_problem *problem;
    test_random random = test_random_seeded(85);
    for (int32_t l = 0; l < NARROWING_STAGES; l++) {
        int64_t left = NARROWING_STAGES - l;
        int64_t output = left * left * test_random_between(&random, 70, 130) + 1000;
        int64_t saved = output + output * test_random_between(&random, 50, 300) / 100;
        int64_t forward = test_random_between(&random, 500000, 1500000);
        options[l] = (cairn_stage_option){
            .saved_bytes = bytes * saved, .forward_ns = ns * forward, .backward_ns = ns * 2 * forward};
        stages[l] = (cairn_stage){.output_bytes = bytes * output,
                                  .grad_bytes = bytes * output,
                                  .forward_only_ns = ns * forward,
                                  .options = &options[l],
                                  .option_count = 1};
    }
    const cairn_chain chain = {.stage_count = NARROWING_STAGES,
                               .stages = stages,
                               .input_bytes = bytes * 1000000,
                               .input_grad_bytes = bytes * 1000000};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

/* The budget at a share of the way from the least to that of storing everything. */
static int64_t percent_of_the_way(const cairn_problem *problem, int percent)
{
    cairn_info all = solve(problem, "chain-lagrangian", INT64_MAX);
    return all.least_bytes + (all.store_all_bytes - all.least_bytes) * percent / 100;
}

/* Where memory is scarce, in the best schedules a recomputed piece is recomputed in part once more. */
static void is_close_to_the_best_where_memory_is_scarce(void **state)
{
    cairn_problem *problem = narrowing_chain(1, 1);
    (void)state;
    for (int percent = 4; percent <= 6; percent++) {
        int64_t budget = percent_of_the_way(problem, percent);
        double priced = (double)solve(problem, "chain-lagrangian", budget).makespan_ns;
        double exact = (double)solve(problem, "chain-exact", budget).makespan_ns;
        print_message("%d %% of the way: %.3f %% slower than chain-exact\n", percent, 100 * (priced / exact - 1));
        assert_true(priced <= 1.002 * exact);
    }
    cairn_problem_free(problem);
}

static void scales_change_nothing(void **state)
{
    static const int64_t scales[][2] = {{1000, 1}, {1, 1000}, {12345, 777}, {1048576, 3}};
    cairn_problem *problem = narrowing_chain(1, 1);
    (void)state;
    for (int percent = 4; percent <= 16; percent += 12) {
        int64_t budget = percent_of_the_way(problem, percent);
        cairn_info plain = solve(problem, "chain-lagrangian", budget);
        for (size_t i = 0; i < sizeof(scales) / sizeof(scales[0]); i++) {
            cairn_problem *scaled = narrowing_chain(scales[i][0], scales[i][1]);
            cairn_info info = solve(scaled, "chain-lagrangian", scales[i][0] * budget);
            assert_int_equal(info.makespan_ns, scales[i][1] * plain.makespan_ns);
            assert_int_equal(info.peak_bytes, scales[i][0] * plain.peak_bytes);
            cairn_problem_free(scaled);
        }
    }
    cairn_problem_free(problem);
}

static cairn_problem *chain_for_plans_within_plans(int64_t *budget_bytes)
{
    static const test_chain_shape shape = {.stages_min = 24, .stages_max = 24, .homogeneous = true, .positive = true};
    test_random random = test_random_seeded(84);
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_info all = solve(problem, "chain-lagrangian", INT64_MAX);
    *budget_bytes = all.least_bytes + (all.store_all_bytes - all.least_bytes) / 20;
    return problem;
}

static cairn_status solve_and_free(const cairn_env *env, void *context)
{
    int64_t budget_bytes;
    cairn_problem *other = chain_for_plans_within_plans(&budget_bytes);
    cairn_problem_free(other);
    return test_solve_status(env, context, options_for("chain-lagrangian", budget_bytes));
}

static void failed_allocations_leave_nothing_behind(void **state)
{
    int64_t budget_bytes;
    cairn_problem *problem = chain_for_plans_within_plans(&budget_bytes);
    (void)state;
    test_every_allocation_fails(solve_and_free, problem);
    cairn_problem_free(problem);
}

static void has_an_answer_when_it_is_stopped(void **state)
{
    int64_t budget_bytes;
    cairn_problem *problem = chain_for_plans_within_plans(&budget_bytes);
    cairn_options *options = options_for("chain-lagrangian", budget_bytes);
    (void)state;
    test_stops_at_any_poll(problem, options);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_close_to_the_best_persistent_schedules),
        cmocka_unit_test(holds_for_everything_that_the_format_allows),
        cmocka_unit_test(long_chains_are_within_a_small_gap),
        cmocka_unit_test(is_close_to_the_best_where_memory_is_scarce),
        cmocka_unit_test(scales_change_nothing),
        cmocka_unit_test(failed_allocations_leave_nothing_behind),
        cmocka_unit_test(has_an_answer_when_it_is_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
