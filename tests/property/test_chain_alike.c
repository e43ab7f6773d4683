/*
 * chain-alike on chains of repeated blocks whose times differ a little: a schedule of the true chain within the budget,
 * no faster than chain-exact's and not much slower, with the same least memory; and what it refuses.
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
#include "support/random_source.h"
#include "support/rounds.h"

enum { STAGES = 24, KINDS = 3, SPREAD_PERCENT = 10 };

typedef struct network {
    cairn_stage stages[STAGES];
    cairn_stage_option options[STAGES];
    cairn_chain chain;
} network;

static int64_t jittered(test_random *random, int64_t ns)
{
    return ns + ns * test_random_between(random, 0, SPREAD_PERCENT) / 100;
}

/* Blocks of KINDS kinds, one after the other; their times differ if `spread`. */
static void make_network(network *net, test_random *random, bool spread)
{
    int64_t output = test_random_between(random, 1, 6), saved[KINDS], forward[KINDS], backward[KINDS];
    for (int k = 0; k < KINDS; k++) {
        saved[k] = output + test_random_between(random, 0, 30);
        forward[k] = test_random_between(random, 100, 900);
        backward[k] = test_random_between(random, 100, 900);
    }
    for (int i = 0; i < STAGES; i++) {
        int64_t ns = spread ? jittered(random, forward[i % KINDS]) : forward[i % KINDS];
        net->options[i] =
            (cairn_stage_option){.saved_bytes = saved[i % KINDS], .forward_ns = ns, .backward_ns = backward[i % KINDS]};
        net->stages[i] = (cairn_stage){.output_bytes = output,
                                       .grad_bytes = output,
                                       .forward_only_ns = ns,
                                       .option_count = 1,
                                       .options = &net->options[i]};
    }
    net->chain =
        (cairn_chain){.input_bytes = output, .input_grad_bytes = output, .stage_count = STAGES, .stages = net->stages};
}

static cairn_problem *problem_of(const network *net)
{
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &net->chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "threads=1");
}

static cairn_status solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes, cairn_info *info,
                          cairn_error *error)
{
    cairn_options *options = options_for(solver, budget_bytes);
    cairn_status status = cairn_solve(NULL, problem, options, NULL, info, error);
    cairn_options_free(options);
    return status;
}

static void check_budget(const cairn_problem *problem, int64_t budget_bytes)
{
    cairn_info alike, exact;
    assert_int_equal(solve(problem, "chain-alike", budget_bytes, &alike, NULL), CAIRN_OK);
    assert_int_equal(solve(problem, "chain-exact", budget_bytes, &exact, NULL), CAIRN_OK);
    assert_int_equal(alike.least_bytes, exact.least_bytes);
    assert_int_equal(alike.makespan_ns < 0, exact.makespan_ns < 0);
    assert_int_equal(exact.makespan_ns < 0, budget_bytes < exact.least_bytes);
    if (exact.makespan_ns < 0)
        return;
    assert_true(alike.peak_bytes <= budget_bytes);
    assert_true(alike.makespan_ns >= exact.makespan_ns);
    /* Every time is within a tenth of its kind's median, so the schedules' times are within a fifth of each other. */
    assert_true(10 * (alike.makespan_ns - exact.makespan_ns) <= 2 * exact.makespan_ns);
}

static void schedules_hold_for_the_true_chain(void **state)
{
    test_random random = test_random_seeded(61);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(60); round++) {
        network net;
        cairn_info info;
        make_network(&net, &random, true);
        cairn_problem *problem = problem_of(&net);
        assert_int_equal(solve(problem, "chain-exact", 0, &info, NULL), CAIRN_OK);
        check_budget(problem, info.least_bytes - 1);
        check_budget(problem, info.least_bytes);
        for (int i = 1; i <= 6; i++)
            check_budget(problem, info.least_bytes + (info.store_all_bytes - info.least_bytes) * i / 6);
        cairn_problem_free(problem);
    }
}

static void multiplied_times_change_nothing(void **state)
{
    test_random random = test_random_seeded(62);
    int answers = 0;
    (void)state;
    for (int round = 0; round < 20; round++) {
        network net;
        cairn_info once, thrice;
        make_network(&net, &random, true);
        cairn_problem *problem = problem_of(&net);
        for (int i = 0; i < STAGES; i++) {
            net.options[i].forward_ns *= 3;
            net.options[i].backward_ns *= 3;
            net.stages[i].forward_only_ns *= 3;
        }
        cairn_problem *slower = problem_of(&net);
        assert_int_equal(solve(problem, "chain-alike", 150, &once, NULL), CAIRN_OK);
        assert_int_equal(solve(slower, "chain-alike", 150, &thrice, NULL), CAIRN_OK);
        if (once.makespan_ns >= 0)
            assert_int_equal(3 * once.makespan_ns, thrice.makespan_ns);
        answers += once.makespan_ns >= 0;
        assert_int_equal(once.peak_bytes, thrice.peak_bytes);
        cairn_problem_free(slower);
        cairn_problem_free(problem);
    }
    assert_true(answers > 10);
}

static void what_has_nothing_to_merge_is_refused(void **state)
{
    test_random random = test_random_seeded(63);
    network net;
    cairn_info info;
    cairn_error error;
    (void)state;
    make_network(&net, &random, false);
    cairn_problem *equal = problem_of(&net);
    assert_int_equal(solve(equal, "chain-alike", 1000, &info, &error), CAIRN_UNSUPPORTED);
    assert_non_null(strstr(error.message, "chain-exact"));
    cairn_problem_free(equal);
    for (int i = 0; i < STAGES; i++)
        net.options[i].saved_bytes += i;
    cairn_problem *different = problem_of(&net);
    assert_int_equal(solve(different, "chain-alike", 1000, &info, &error), CAIRN_UNSUPPORTED);
    cairn_problem_free(different);
}

/* Times near 2^63: typical ones may add up to more than the true ones. */
static void sums_that_overflow_are_refused(void **state)
{
    test_random random = test_random_seeded(64);
    network net;
    cairn_info info;
    cairn_error error;
    (void)state;
    make_network(&net, &random, false);
    for (int i = 0; i < STAGES; i++) {
        net.options[i].forward_ns = net.options[i].backward_ns = net.stages[i].forward_only_ns = 1;
        net.options[i].saved_bytes = 40;
    }
    /* The median of the three is the largest: typical times add up to 1.05 of what fits, the true ones to 0.96. */
    int64_t large = INT64_MAX / 100 * 35;
    net.options[3].forward_ns = net.options[5].forward_ns = large;
    net.options[4].forward_ns = large / 4 * 3;
    cairn_problem *problem = problem_of(&net);
    cairn_status status = solve(problem, "chain-alike", 2000, &info, &error);
    assert_int_equal(status, CAIRN_UNSUPPORTED);
    cairn_problem_free(problem);
}

static cairn_status solve_and_free(const cairn_env *env, void *context)
{
    return test_solve_status(env, context, options_for("chain-alike", 120));
}

static void failed_allocations_leave_nothing_behind(void **state)
{
    test_random random = test_random_seeded(65);
    network net;
    (void)state;
    make_network(&net, &random, true);
    net.chain.stage_count = 7;
    cairn_problem *problem = problem_of(&net);
    test_every_allocation_fails(solve_and_free, problem);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_hold_for_the_true_chain),       cmocka_unit_test(multiplied_times_change_nothing),
        cmocka_unit_test(what_has_nothing_to_merge_is_refused),    cmocka_unit_test(sums_that_overflow_are_refused),
        cmocka_unit_test(failed_allocations_leave_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
