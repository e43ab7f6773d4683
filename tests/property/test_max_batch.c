/*
 * The largest batch against trying every batch by exhaustive search: the answer is possible, nothing that is called
 * refuted is, and where the solver is exact, no larger multiple of the measured batch is possible.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { BATCHES_MAX = 40 };

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "iterations=200 threads=1");
}

static cairn_status find(const cairn_problem *problem, const char *solver, int64_t budget_bytes, int64_t measured,
                         cairn_max_batch *found)
{
    cairn_error error = {.status = CAIRN_OK};
    cairn_options *options = options_for(solver, budget_bytes);
    cairn_status status = cairn_max_batch_of(NULL, problem, options, measured, found, &error);
    if (status != CAIRN_OK && status != CAIRN_OVERFLOW)
        fail_msg("%s: %s", solver, error.message);
    cairn_options_free(options);
    return status;
}

static int64_t one_forward_ns(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    const cairn_graph *graph = cairn_problem_graph(problem);
    int64_t sum_ns = 0;
    for (int32_t i = 0; chain && i < chain->stage_count; i++)
        sum_ns += chain->stages[i].options[0].forward_ns;
    for (int32_t v = 0; graph && v < graph->backward_begins_at; v++)
        sum_ns += graph->nodes[v].cost_ns;
    return sum_ns;
}

static bool is_possible(const cairn_problem *problem, const char *brute, int64_t budget_bytes, int64_t batch,
                        int64_t measured)
{
    cairn_problem *scaled;
    cairn_info info;
    cairn_options *options = options_for(brute, budget_bytes);
    assert_int_equal(cairn_problem_scale(NULL, problem, batch, measured, &scaled, NULL), CAIRN_OK);
    assert_int_equal(cairn_solve(NULL, scaled, options, NULL, &info, NULL), CAIRN_OK);
    bool possible = info.makespan_ns != CAIRN_NONE && info.recompute_ns <= one_forward_ns(scaled);
    cairn_options_free(options);
    cairn_problem_free(scaled);
    return possible;
}

typedef struct tally {
    int proved, answers;
} tally;

/* exact: the solver misses nothing. What is possible at a multiple of the measured batch is possible at those below. */
static void check(const cairn_problem *problem, const char *solver, const char *brute, int64_t measured, bool exact,
                  int64_t budget_bytes, tally *count)
{
    cairn_max_batch found;
    if (find(problem, solver, budget_bytes, measured, &found) == CAIRN_OVERFLOW) { /* nothing grows */
        assert_true(is_possible(problem, brute, budget_bytes, (int64_t)1 << 40, measured));
        return;
    }
    int64_t batch = found.batch == CAIRN_NONE ? 0 : found.batch;
    assert_int_equal(found.budget_bytes, budget_bytes);
    assert_true(found.refuted_batch == CAIRN_NONE || found.refuted_batch > batch);
    assert_true(batch == 0 || is_possible(problem, brute, budget_bytes, batch, measured));
    assert_true(batch == 0 || (found.peak_bytes <= budget_bytes && found.recompute_ns <= found.forward_ns));
    for (int64_t b = 1; b <= BATCHES_MAX; b++) {
        bool possible = is_possible(problem, brute, budget_bytes, b, measured);
        if (possible && found.refuted_batch != CAIRN_NONE)
            assert_true(b < found.refuted_batch);
        if (exact && b % measured == 0)
            assert_int_equal(possible, b <= batch);
    }
    count->answers++;
    count->proved += found.refuted_batch == batch + 1;
}

static void check_budgets(const cairn_problem *problem, const char *solver, const char *brute, int64_t measured,
                          bool exact, tally *count)
{
    cairn_limits limits;
    cairn_options *options = options_for(brute, 0);
    assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_OK);
    cairn_options_free(options);
    for (int i = 1; i <= 4; i++)
        check(problem, solver, brute, measured, exact, limits.store_all_bytes * i * i / 4, count);
}

static cairn_problem *tiny_graph(uint64_t seed, bool machine)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = test_graph_of_everything(6);
    shape.training = true;
    shape.machine = machine;
    return test_random_graph(&random, &shape);
}

static void graphs(void **state)
{
    static const char *const solvers[] = {"brute-graph", "graph-search", "auto", "store-all"};
    tally count[4] = {{0}};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++) {
        cairn_problem *problem = tiny_graph(seed, false);
        for (int i = 0; i < 4; i++) {
            check_budgets(problem, solvers[i], "brute-graph", 1, i == 0, &count[i]);
            check_budgets(problem, solvers[i], "brute-graph", 3, i == 0, &count[i]);
        }
        cairn_problem_free(problem);
    }
    for (int i = 0; i < 4; i++)
        print_message("%-12s proved in %d of %d\n", solvers[i], count[i].proved, count[i].answers);
    for (int i = 0; i < 3; i++) /* storing everything alone misses what recomputation gains */
        assert_true(count[i].answers > TEST_ROUNDS(400) && count[i].proved * 100 > count[i].answers * 95);
}

static void chains(void **state)
{
    const test_chain_shape shape = {
        .stages_max = 4, .equal_forwards = true, .workspaces = true, .weight_grads = true, .fixed = true};
    tally count = {0};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_chain(&random, &shape);
        check_budgets(problem, "brute-chain", "brute-chain", 1, true, &count);
        check_budgets(problem, "auto", "brute-chain", 4, false, &count);
        cairn_problem_free(problem);
    }
    print_message("chains: proved in %d of %d\n", count.proved, count.answers);
    assert_true(count.answers > TEST_ROUNDS(400) && count.proved * 100 > count.answers * 85);
}

/* What is negative and rounded up makes batches impossible below some that are not. */
static void signed_workspaces(void **state)
{
    const test_chain_shape shape = {.stages_max = 4, .equal_forwards = true, .signed_workspaces = true, .fixed = true};
    tally count = {0};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_chain(&random, &shape);
        check_budgets(problem, "brute-chain", "brute-chain", 13, true, &count);
        cairn_problem_free(problem);
    }
    assert_true(count.answers > TEST_ROUNDS(200));
}

/* Several options, signed workspaces, a machine: whatever is found is possible by the simulator's word. */
static void everything_is_taken(void **state)
{
    int found_count = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(40); seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = test_chain_of_everything(5);
        shape.machine = seed % 2 == 0;
        cairn_problem *problems[] = {test_random_chain(&random, &shape), tiny_graph(seed, seed % 2 == 1)};
        for (int i = 0; i < 2; i++) {
            cairn_max_batch found;
            if (find(problems[i], "auto", 100, 2, &found) == CAIRN_OK && found.batch != CAIRN_NONE) {
                assert_true(found.peak_bytes <= 100 && found.recompute_ns <= found.forward_ns);
                assert_true(found.refuted_batch == CAIRN_NONE || found.refuted_batch > found.batch);
                found_count++;
            }
            cairn_problem_free(problems[i]);
        }
    }
    assert_true(found_count > TEST_ROUNDS(40));
}

static void no_largest_is_said(void **state)
{
    const cairn_node node = {.name = "", .cost_ns = 1, .alias_of = -1};
    const cairn_graph graph = {1, &node, 1};
    cairn_problem *problem;
    cairn_max_batch found;
    (void)state;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(find(problem, "auto", 10, 1, &found), CAIRN_OVERFLOW);
    assert_int_equal(found.batch, CAIRN_NONE);
    cairn_problem_free(problem);
    const cairn_problem_info info = {.fixed_bytes = 11};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, &info, &problem, NULL), CAIRN_OK);
    assert_int_equal(find(problem, "auto", 10, 1, &found), CAIRN_OK);
    assert_int_equal(found.batch, CAIRN_NONE);
    assert_int_equal(found.refuted_batch, 1);
    cairn_problem_free(problem);
}

/* Sizes near the limit: the largest batch that can be written is not taken for the largest that is possible. */
static void large_numbers(void **state)
{
    const cairn_node node = {.name = "", .cost_ns = 1, .bytes = INT64_MAX / 5, .alias_of = -1};
    const cairn_graph graph = {1, &node, 1};
    cairn_problem *problem;
    cairn_max_batch found;
    (void)state;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(find(problem, "auto", INT64_MAX / 5 * 3, 1, &found), CAIRN_OK);
    assert_int_equal(found.batch, 3);
    assert_int_equal(found.refuted_batch, 4);
    assert_int_equal(find(problem, "auto", INT64_MAX, 1, &found), CAIRN_OK);
    assert_int_equal(found.batch, 5);
    assert_int_equal(found.refuted_batch, 6);
    assert_int_equal(find(problem, "auto", INT64_MAX, INT64_MAX, &found), CAIRN_OVERFLOW);
    cairn_problem_free(problem);
}

static void what_makes_no_sense_is_refused(void **state)
{
    const cairn_node node = {.name = "", .cost_ns = 1, .bytes = 1, .alias_of = -1};
    const cairn_graph graph = {1, &node, -1};
    cairn_problem *problem;
    cairn_max_batch found;
    cairn_error error;
    cairn_options *options = options_for("auto", 10);
    (void)state;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(cairn_max_batch_of(NULL, problem, options, 1, &found, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "backward_begins_at");
    assert_int_equal(cairn_max_batch_of(NULL, problem, options, 0, &found, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_max_batch_of(NULL, problem, NULL, 1, &found, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "budget");
    assert_int_equal(cairn_options_set(options, "solver", "chain-dp", NULL), CAIRN_OK);
    cairn_problem_free(problem);
    problem = tiny_graph(1, false);
    assert_int_equal(cairn_max_batch_of(NULL, problem, options, 1, &found, &error), CAIRN_UNSUPPORTED);
    cairn_problem_free(problem);
    cairn_options_free(options);
}

static void it_can_be_stopped(void **state)
{
    cairn_problem *problem = tiny_graph(5, false);
    cairn_options *options = options_for("graph-search", 40);
    (void)state;
    for (int polls = 0; polls < 60; polls++) {
        int left = polls;
        cairn_max_batch found;
        const cairn_env env = {.poll = test_stop_after, .poll_context = &left};
        cairn_status status = cairn_max_batch_of(&env, problem, options, 1, &found, NULL);
        assert_true(status == CAIRN_OK || status == CAIRN_CANCELLED);
        assert_int_equal(status == CAIRN_CANCELLED, found.budget_bytes == CAIRN_NONE);
        assert_true(left >= 0 || status == CAIRN_CANCELLED || found.stopped_early);
    }
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* A solver that uses all the time that it gets: each batch gets a part. */
static void time_is_for_all_batches(void **state)
{
    test_random random = test_random_seeded(8);
    test_graph_shape shape = {.nodes_min = 300, .nodes_max = 300, .training = true, .positive = true};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_options *options = options_for("graph-search", 0);
    cairn_limits limits;
    cairn_max_batch found;
    (void)state;
    assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_OK);
    cairn_options_free(options);
    options = test_options("graph-search", 8 * limits.store_all_bytes, "time-limit=1s threads=1");
    clock_t begun = clock();
    assert_int_equal(cairn_max_batch_of(NULL, problem, options, 1, &found, NULL), CAIRN_OK);
    assert_true(clock() - begun < CLOCKS_PER_SEC * 3 / 2);
    assert_true(found.batch >= 8);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

typedef struct job {
    const cairn_problem *problem;
    const cairn_options *options;
} job;

static cairn_status find_and_forget(const cairn_env *env, void *context)
{
    const job *j = context;
    cairn_max_batch found;
    return cairn_max_batch_of(env, j->problem, j->options, 2, &found, NULL);
}

static cairn_status scale_and_free(const cairn_env *env, void *context)
{
    cairn_problem *scaled;
    cairn_status status = cairn_problem_scale(env, context, 3, 2, &scaled, NULL);
    cairn_problem_free(scaled);
    return status;
}

static void every_allocation_may_fail(void **state)
{
    test_random random = test_random_seeded(3);
    test_chain_shape shape = test_chain_of_everything(3);
    cairn_problem *graph = tiny_graph(2, false), *chain = test_random_chain(&random, &shape);
    job j = {graph, options_for("linear-greedy", 60)};
    (void)state;
    assert_true(test_every_allocation_fails(scale_and_free, graph) > 1);
    assert_true(test_every_allocation_fails(scale_and_free, chain) > 1);
    assert_true(test_every_allocation_fails(find_and_forget, &j) > 1);
    cairn_options_free((cairn_options *)j.options);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs),
        cmocka_unit_test(chains),
        cmocka_unit_test(signed_workspaces),
        cmocka_unit_test(everything_is_taken),
        cmocka_unit_test(no_largest_is_said),
        cmocka_unit_test(large_numbers),
        cmocka_unit_test(what_makes_no_sense_is_refused),
        cmocka_unit_test(it_can_be_stopped),
        cmocka_unit_test(time_is_for_all_batches),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
