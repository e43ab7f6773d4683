/*
 * chain-states finds the optimum of exhaustive search, which shares no code with it, on chains of everything that the
 * format allows but transfers; and what it cannot end it does not answer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_info ask(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, test_options(solver, budget_bytes, "threads=1"), NULL);
}

/* Saved sets that take less time or memory to make than outputs can serve as outputs. */
static test_chain_shape shape_of(int round)
{
    test_chain_shape shape = test_chain_of_everything(round % 3 == 0 ? 3 : 5);
    if (round % 3 == 1)
        shape = (test_chain_shape){.stages_min = 4, .stages_max = 6, .signed_workspaces = true, .bytes_max = 20};
    if (round % 9 == 2)
        shape = (test_chain_shape){.stages_min = 5, .stages_max = 6, .bytes_max = 3, .ns_max = 3, .no_recompute = true};
    shape.machine = false;
    return shape;
}

static void finds_the_optimum_of_exhaustive_search(void **state)
{
    test_random random = test_random_seeded(81);
    int asked = 0, slowed = 0;
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(1500); round++) {
        test_chain_shape shape = shape_of(round);
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_limits limits = test_limits(problem, test_options("brute-chain", -1, "threads=1"));
        int64_t span = limits.store_all_bytes - limits.least_bytes;
        for (int i = 0; i < 3; i++, asked++) {
            int64_t budget_bytes = limits.least_bytes + span * i / 4;
            cairn_info best = ask(problem, "brute-chain", budget_bytes);
            cairn_info info = ask(problem, "chain-states", budget_bytes);
            if (info.makespan_ns != best.makespan_ns)
                fail_msg("round %d, budget %lld: %lld ns, the optimum is %lld", round, (long long)budget_bytes,
                         (long long)info.makespan_ns, (long long)best.makespan_ns);
            slowed += best.makespan_ns > limits.store_all_ns;
            assert_true(info.least_bytes <= budget_bytes);
        }
        assert_int_equal(ask(problem, "chain-states", limits.least_bytes - 1).outcome, CAIRN_OUTCOME_INFEASIBLE);
        cairn_problem_free(problem);
    }
    print_message("%d budgets, of which %d slow a schedule down\n", asked, slowed);
    assert_true(slowed * 3 > asked);
}

/* With transfers less time may do: the best without is an answer, but no claim. */
static void with_a_link_nothing_is_claimed(void **state)
{
    test_random random = test_random_seeded(86);
    int slowed = 0;
    (void)state;
    for (int round = 0; round < 40; round++) {
        test_chain_shape shape = {.stages_min = 4, .stages_max = 5, .positive = true, .machine = true, .bytes_max = 30};
        cairn_problem *problem = test_random_chain(&random, &shape);
        int64_t budget_bytes = test_limits(problem, test_options("chain-weak", -1, "threads=1")).least_bytes;
        cairn_info best = ask(problem, "brute-chain", budget_bytes), info = ask(problem, "chain-states", budget_bytes);
        assert_int_equal(info.makespan_ns, best.makespan_ns);
        assert_int_equal(info.outcome, best.outcome);
        assert_string_equal(info.optimal_in, "");
        assert_int_equal(info.lower_bound_ns, best.lower_bound_ns);
        slowed += info.outcome == CAIRN_OUTCOME_FEASIBLE;
        cairn_problem_free(problem);
    }
    assert_true(slowed > 0);
}

static void is_never_worse_than_chain_weak(void **state)
{
    test_random random = test_random_seeded(82);
    int better = 0;
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(60); round++) {
        test_chain_shape shape = {.stages_min = 7, .stages_max = 12, .bytes_max = 30, .ns_max = 30, .options_max = 2};
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_limits limits = test_limits(problem, test_options("chain-weak", -1, "threads=1"));
        for (int i = 0; i < 4; i++) {
            int64_t budget_bytes = limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) * i / 4;
            cairn_info weak = ask(problem, "chain-weak", budget_bytes), all = ask(problem, "auto", budget_bytes);
            cairn_info info = ask(problem, "chain-states", budget_bytes);
            assert_int_equal(info.outcome, CAIRN_OUTCOME_OPTIMAL);
            assert_int_equal(all.outcome, CAIRN_OUTCOME_OPTIMAL);
            assert_true(info.makespan_ns <= weak.makespan_ns);
            assert_int_equal(info.makespan_ns, all.makespan_ns);
            better += info.makespan_ns < weak.makespan_ns;
        }
        cairn_problem_free(problem);
    }
    print_message("better than chain-weak %d times\n", better);
}

/* One more stage than it takes, and more states than it leaves. */
static void what_it_cannot_end_it_does_not_answer(void **state)
{
    test_random random = test_random_seeded(83);
    int unknown = 0;
    (void)state;
    for (int32_t n = 16; n <= 17; n++)
        for (int round = 0; round < 8; round++) {
            test_chain_shape shape = {.stages_min = n, .stages_max = n, .positive = true, .options_max = 3};
            cairn_problem *problem = test_random_chain(&random, &shape);
            cairn_limits limits = test_limits(problem, test_options("chain-weak", -1, "threads=1"));
            int64_t budget_bytes = limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) / 10;
            cairn_options *options = test_options("chain-states", budget_bytes, "threads=1");
            cairn_error error;
            if (n == 16) {
                cairn_info info = ask(problem, "chain-states", budget_bytes);
                assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL || info.outcome == CAIRN_OUTCOME_UNKNOWN);
                unknown += info.outcome == CAIRN_OUTCOME_UNKNOWN;
                assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL || strstr(info.reason, "within 200000 states"));
            } else {
                assert_int_equal(cairn_solver_accepts("chain-states", problem, options, &error), CAIRN_UNSUPPORTED);
                assert_non_null(strstr(error.message, "at most 16 stages"));
            }
            cairn_options_free(options);
            cairn_problem_free(problem);
        }
    print_message("%d of 8 not answered\n", unknown);
    assert_true(unknown > 0);
}

/* ---- failures ---- */

static cairn_status solve_once(const cairn_env *env, void *problem)
{
    int64_t budget_bytes = test_limits(problem, test_options("chain-weak", -1, "threads=1")).least_bytes;
    return test_solve_status(env, problem, test_options("chain-states", budget_bytes, "threads=1"));
}

static void failing_allocations_are_reported(void **state)
{
    test_random random = test_random_seeded(84);
    test_chain_shape shape = {.stages_min = 7, .stages_max = 7, .positive = true, .options_max = 2};
    cairn_problem *problem = test_random_chain(&random, &shape);
    (void)state;
    test_every_allocation_fails(solve_once, problem);
    cairn_problem_free(problem);
}

static void stops_when_asked(void **state)
{
    test_random random = test_random_seeded(85);
    test_chain_shape shape = {.stages_min = 14, .stages_max = 14, .positive = true, .options_max = 2};
    cairn_problem *problem = test_random_chain(&random, &shape);
    int64_t budget_bytes = test_limits(problem, test_options("chain-weak", -1, "threads=1")).least_bytes;
    int polls = 1;
    const cairn_env env = {.poll = test_stop_after, .poll_context = &polls};
    (void)state;
    assert_int_equal(test_solve_status(&env, problem, test_options("chain-states", budget_bytes, "threads=1")),
                     CAIRN_CANCELLED);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_the_optimum_of_exhaustive_search),
        cmocka_unit_test(with_a_link_nothing_is_claimed),
        cmocka_unit_test(is_never_worse_than_chain_weak),
        cmocka_unit_test(what_it_cannot_end_it_does_not_answer),
        cmocka_unit_test(failing_allocations_are_reported),
        cmocka_unit_test(stops_when_asked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
