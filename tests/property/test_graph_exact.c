/*
 * graph-exact against exhaustive search on tiny graphs with everything that the format knows, and against what it and
 * graph-search say with less work on larger ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>
#include <cairn/io.h>

#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes, const char *settings)
{
    return test_solve(problem, test_options(solver, budget_bytes, settings), NULL);
}

static cairn_limits limits(const cairn_problem *problem, const char *solver)
{
    return test_limits(problem, test_options(solver, -1, "iterations=20 threads=1"));
}

static void compare(const cairn_problem *problem, int64_t budget_bytes)
{
    cairn_info best = solve(problem, "brute-graph", budget_bytes, "");
    cairn_info info = solve(problem, "graph-exact", budget_bytes, "threads=1");
    assert_int_equal(info.outcome, best.outcome);
    assert_int_equal(info.makespan_ns, best.makespan_ns);
    assert_int_equal(info.least_bytes, best.least_bytes);
    assert_true(info.lower_bound_ns <= info.makespan_ns || info.makespan_ns < 0);
    assert_true(info.peak_bytes <= budget_bytes);
}

static void answers_are_those_of_exhaustive_search(void **state)
{
    (void)state;
    test_graph_shape shape = test_graph_of_everything(7);
    shape.machine = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1500); seed++) {
        test_random random = test_random_seeded(seed + 7000);
        shape.training = seed % 2 == 0;
        shape.nodes_min = seed % 3 == 0 ? 1 : 7;
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_limits truth = limits(problem, "brute-graph"), found = limits(problem, "graph-exact");
        assert_int_equal(found.least_bytes, truth.least_bytes);
        assert_true(found.least_is_exact);
        int64_t span = truth.store_all_bytes - truth.least_bytes;
        for (int step = 0; step < 4; step++)
            compare(problem, truth.least_bytes + span * step / 4);
        if (truth.least_bytes > 0)
            compare(problem, truth.least_bytes - 1);
        cairn_problem_free(problem);
    }
}

/* What it finds is best without transfers, so with a link it proves nothing. */
static void nothing_is_proved_with_a_link(void **state)
{
    (void)state;
    int less = 0, said = 0;
    test_graph_shape shape = test_graph_of_everything(7);
    shape.nodes_min = 7;
    shape.machine = true;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(200); seed++) {
        test_random random = test_random_seeded(seed + 9000);
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_limits all = limits(problem, "joint-graph"), found = limits(problem, "graph-exact");
        int64_t budget = found.least_bytes + (found.store_all_bytes - found.least_bytes) / 4;
        cairn_info best = solve(problem, "joint-graph", budget, "iterations=20 threads=1");
        cairn_info info = solve(problem, "graph-exact", budget, "iterations=20 threads=1");
        assert_true(found.least_lower_bytes <= all.least_bytes);
        assert_true(info.lower_bound_ns <= best.makespan_ns);
        assert_int_equal(solve(problem, "graph-exact", budget, "threads=1").makespan_ns,
                         solve(problem, "brute-graph", budget, "").makespan_ns);
        less += best.makespan_ns < info.makespan_ns;
        said += strstr(info.reason, "without transfers") != NULL;
        cairn_problem_free(problem);
    }
    assert_true(less > 0 && said > 0);
}

static cairn_problem *training_graph(uint64_t seed, int32_t nodes)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = {.nodes_min = nodes,
                              .nodes_max = nodes,
                              .bytes_max = 100,
                              .ns_max = 100,
                              .positive = true,
                              .training = true,
                              .aliases = seed % 2 == 0,
                              .workspaces = true,
                              .keep = true,
                              .no_recompute = seed % 3 == 0};
    return test_random_graph(&random, &shape);
}

static int64_t a_tenth_of_the_way(const cairn_problem *problem)
{
    cairn_limits found = limits(problem, "graph-search");
    return found.least_bytes + (found.store_all_bytes - found.least_bytes) / 10;
}

/* A search that is cut short has a bound, and it is one; more work never makes the answer worse. */
static void less_work_brackets_the_optimum(void **state)
{
    (void)state;
    int closed = 0, seen = 0;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(24); seed++, seen++) {
        cairn_problem *problem = training_graph(seed, 26 + (int32_t)seed % 8);
        int64_t budget = a_tenth_of_the_way(problem);
        cairn_info search = solve(problem, "graph-search", budget, "iterations=20 threads=1");
        cairn_info full = solve(problem, "graph-exact", budget, "iterations=3000 threads=1");
        closed += full.outcome == CAIRN_OUTCOME_OPTIMAL;
        assert_true(full.makespan_ns <= search.makespan_ns && full.lower_bound_ns >= search.lower_bound_ns);
        for (int i = 0; i < 3; i++) {
            static const char *const work[] = {"iterations=0 threads=1", "iterations=1 threads=1",
                                               "iterations=20 threads=1"};
            cairn_info less = solve(problem, "graph-exact", budget, work[i]);
            assert_true(less.makespan_ns >= full.lower_bound_ns && less.lower_bound_ns <= full.makespan_ns);
            assert_true(less.outcome == CAIRN_OUTCOME_OPTIMAL || less.reason[0] != '\0');
        }
        cairn_problem_free(problem);
    }
    assert_true(closed > seen / 2);
}

/* The same operations whatever the number of threads, and from call to call. */
static void answers_repeat(void **state)
{
    (void)state;
    cairn_problem *problem = training_graph(4, 30);
    int64_t budget = a_tenth_of_the_way(problem);
    cairn_schedule *first, *again;
    (void)test_solve(problem, test_options("graph-exact", budget, "iterations=100 threads=1"), &first);
    (void)test_solve(problem, test_options("graph-exact", budget, "iterations=100 threads=2"), &again);
    assert_string_equal(cairn_schedule_hash(first), cairn_schedule_hash(again));
    cairn_schedule_free(first);
    cairn_schedule_free(again);
    cairn_problem_free(problem);
}

/* What branch and bound by HiGHS needed a minute and a half for: a training graph with skip connections. */
static void a_tight_training_graph_is_closed(void **state)
{
    cairn_problem *problem;
    char *text;
    size_t length;
    (void)state;
    assert_int_equal(cairn_file_read(NULL, CAIRN_TEST_DATA "/graphs/skips_49.json", &text, &length, NULL), CAIRN_OK);
    assert_int_equal(cairn_problem_read(NULL, text, length, &problem, NULL), CAIRN_OK);
    cairn_text_free(NULL, text, length);
    cairn_info info = solve(problem, "graph-exact", 268, "");
    assert_int_equal(info.outcome, CAIRN_OUTCOME_OPTIMAL);
    assert_int_equal(info.makespan_ns, 5627);
    cairn_problem_free(problem);
}

/* Few states fit: the search ends, with graph-search's answer at the worst. */
static void little_memory_is_enough(void **state)
{
    (void)state;
    cairn_problem *problem = training_graph(5, 40);
    int64_t budget = a_tenth_of_the_way(problem);
    cairn_info search = solve(problem, "graph-search", budget, "iterations=20 threads=1");
    cairn_info info = solve(problem, "graph-exact", budget, "iterations=20 threads=1 memory-limit=8MiB");
    assert_true(info.makespan_ns <= search.makespan_ns && info.solver_peak_bytes <= 8 << 20);
    cairn_problem_free(problem);
}

typedef struct want {
    const cairn_problem *problem;
    int64_t budget_bytes, found_ns, optimum_ns; /* by graph-search; the least there is */
    int ended;                                  /* for want of memory, with an answer */
} want;

static cairn_status solve_in_want(const cairn_env *env, void *context)
{
    want *w = context;
    cairn_info info;
    cairn_options *options = test_options("graph-exact", w->budget_bytes, "iterations=2 threads=1");
    cairn_status status = cairn_solve(env, w->problem, options, NULL, &info, NULL);
    cairn_options_free(options);
    if (status != CAIRN_OK)
        return status;
    assert_in_range(info.makespan_ns, w->optimum_ns, w->found_ns);
    assert_true(info.lower_bound_ns <= w->optimum_ns);
    w->ended += strstr(info.reason, "memory-limit") != NULL;
    return status;
}

/* Whatever allocation of the search fails, graph-search's answer comes out, with a bound that is one. */
static void want_of_memory_leaves_the_answer_so_far(void **state)
{
    (void)state;
    cairn_problem *problem = training_graph(9, 26);
    int64_t budget = a_tenth_of_the_way(problem);
    cairn_info search = solve(problem, "graph-search", budget, "iterations=2 threads=1");
    cairn_info best = solve(problem, "graph-exact", budget, "");
    want w = {problem, budget, search.makespan_ns, best.makespan_ns, 0};
    assert_int_equal(best.outcome, CAIRN_OUTCOME_OPTIMAL);
    assert_true(test_every_allocation_fails(solve_in_want, &w) > 1 && w.ended > 0);
    cairn_problem_free(problem);
}

static void what_is_too_large_is_refused(void **state)
{
    (void)state;
    cairn_problem *problem = training_graph(1, 140);
    cairn_options *options = test_options("graph-exact", 1000, "");
    cairn_error error;
    cairn_info info;
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_UNSUPPORTED);
    assert_non_null(strstr(error.message, "at most 128 nodes"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void a_poll_stops_it(void **state)
{
    (void)state;
    cairn_problem *problem = training_graph(3, 48);
    cairn_options *options = test_options("graph-exact", a_tenth_of_the_way(problem), "iterations=2000");
    test_stops_at_any_poll(problem, options);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static int work_never_begins_anew(void *context, const cairn_progress *progress)
{
    int64_t *moves_done = context;
    if (strcmp(progress->phase, "exact search") == 0) {
        assert_in_range(progress->done, *moves_done, progress->total);
        *moves_done = progress->done;
    }
    return 0;
}

/* The least memory is looked for in many steps, each a search: together they do what one may do. */
static void the_least_takes_the_work_of_one_search(void **state)
{
    (void)state;
    test_random random = test_random_seeded(4);
    test_graph_shape shape = {.nodes_min = 20, .nodes_max = 20, .deps_max = 20, .bytes_max = 1000};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_options *options = test_options("graph-exact", -1, "iterations=1000 threads=1");
    int64_t moves_done = 0;
    const cairn_env env = {.poll = work_never_begins_anew, .poll_context = &moves_done};
    cairn_limits found;
    assert_int_equal(cairn_limits_of(&env, problem, options, &found, NULL), CAIRN_OK);
    assert_true(moves_done > 0);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static cairn_status solve_in(const cairn_env *env, void *context)
{
    return test_solve_status(env, context, test_options("graph-exact", 40, "iterations=20 threads=1"));
}

static void every_allocation_may_fail(void **state)
{
    test_random random = test_random_seeded(11);
    test_graph_shape shape = test_graph_of_everything(12);
    shape.machine = false;
    shape.nodes_min = 12;
    cairn_problem *problem = test_random_graph(&random, &shape);
    (void)state;
    assert_true(test_every_allocation_fails(solve_in, problem) > 1);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_those_of_exhaustive_search),
        cmocka_unit_test(nothing_is_proved_with_a_link),
        cmocka_unit_test(less_work_brackets_the_optimum),
        cmocka_unit_test(answers_repeat),
        cmocka_unit_test(a_tight_training_graph_is_closed),
        cmocka_unit_test(little_memory_is_enough),
        cmocka_unit_test(want_of_memory_leaves_the_answer_so_far),
        cmocka_unit_test(what_is_too_large_is_refused),
        cmocka_unit_test(a_poll_stops_it),
        cmocka_unit_test(the_least_takes_the_work_of_one_search),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
