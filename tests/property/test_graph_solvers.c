/*
 * Graph solvers against exhaustive search: on thousands of tiny random graphs with aliases, outputs, nodes that run
 * once and workspaces, brute-graph is at least as fast as every solver, no bound exceeds it, and least memories agree.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static const char *const heuristics[] = {"store-all",     "ap-sqrt",      "ap-greedy",    "linear-sqrt",
                                         "linear-greedy", "griewank-log", "graph-online", "graph-search"};
enum { HEURISTICS = sizeof(heuristics) / sizeof(heuristics[0]) };

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "iterations=200 threads=1");
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, options_for(solver, budget_bytes), NULL);
}

static cairn_limits limits(const cairn_problem *problem, const char *solver)
{
    return test_limits(problem, options_for(solver, -1));
}

typedef struct tally {
    int answers, optimal, missed;
} tally;

static void compare(const cairn_problem *problem, const cairn_info *best, const char *solver, int64_t budget_bytes,
                    tally *count)
{
    cairn_info info = solve(problem, solver, budget_bytes);
    assert_true(info.lower_bound_ns <= (best->makespan_ns >= 0 ? best->makespan_ns : INT64_MAX));
    assert_true(info.least_bytes < 0 || info.least_bytes >= best->least_bytes);
    assert_true(info.least_lower_bytes <= best->least_bytes);
    assert_true(!info.least_is_exact || info.least_bytes == best->least_bytes);
    if (best->makespan_ns < 0) {
        assert_int_equal(info.makespan_ns, CAIRN_NONE);
        return;
    }
    count->answers++;
    if (info.makespan_ns < 0) {
        count->missed++;
        return;
    }
    assert_true(info.makespan_ns >= best->makespan_ns);
    assert_true(info.peak_bytes <= budget_bytes);
    if (info.outcome == CAIRN_OUTCOME_OPTIMAL)
        assert_int_equal(info.makespan_ns, best->makespan_ns);
    count->optimal += info.makespan_ns == best->makespan_ns;
}

static void no_solver_beats_exhaustive_search(void **state)
{
    (void)state;
    tally count[HEURISTICS] = {{0}};
    test_graph_shape shape = test_graph_of_everything(6);
    shape.machine = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1500); seed++) {
        test_random random = test_random_seeded(seed);
        shape.training = seed % 2 == 0;
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_limits least = limits(problem, "brute-graph");
        int64_t span = least.store_all_bytes - least.least_bytes;
        for (int step = 0; step < 3; step++) {
            int64_t budget =
                least.least_bytes + span * step / 3 - (step == 0 && seed % 5 == 0 && least.least_bytes > 0);
            cairn_info best = solve(problem, "brute-graph", budget);
            for (int i = 0; i < HEURISTICS; i++)
                compare(problem, &best, heuristics[i], budget, &count[i]);
        }
        cairn_problem_free(problem);
    }
    for (int i = 0; i < HEURISTICS; i++) {
        print_message("%-14s optimal in %d of %d, nothing found in %d\n", heuristics[i], count[i].optimal,
                      count[i].answers, count[i].missed);
        assert_true(count[i].missed <= count[i].answers / 10);
        assert_true(count[i].optimal >= count[i].answers / 4);
    }
    const tally *search = &count[HEURISTICS - 1];
    assert_string_equal(heuristics[HEURISTICS - 1], "graph-search");
    assert_true(search->missed == 0 && search->optimal >= search->answers - search->answers / 100);
}

static void search_succeeds_at_its_least_budget(void **state)
{
    (void)state;
    test_graph_shape shape = test_graph_of_everything(24);
    shape.machine = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1000); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_limits found = limits(problem, "graph-search");
        assert_true(found.least_bytes >= found.least_lower_bytes);
        cairn_info info = solve(problem, "graph-search", found.least_bytes);
        if (info.makespan_ns < info.lower_bound_ns)
            fail_msg("seed %d: least %lld, outcome %s, makespan %lld, bound %lld", (int)seed,
                     (long long)found.least_bytes, cairn_outcome_name(info.outcome), (long long)info.makespan_ns,
                     (long long)info.lower_bound_ns);
        if (found.least_is_exact && found.least_bytes > 0) {
            cairn_info below = solve(problem, "graph-search", found.least_bytes - 1);
            assert_int_equal(below.outcome, CAIRN_OUTCOME_INFEASIBLE);
        }
        cairn_info roomy = solve(problem, "graph-search", found.store_all_bytes);
        assert_int_equal(roomy.recompute_ns, 0);
        cairn_problem_free(problem);
    }
}

static int64_t peak_of_search(int32_t nodes)
{
    test_random random = test_random_seeded(1);
    test_graph_shape shape = {.nodes_min = nodes, .nodes_max = nodes, .training = true, .bytes_max = 1000};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_limits found = limits(problem, "store-all");
    cairn_options *options = test_options("graph-search", found.store_all_bytes / 2, "iterations=4 threads=1");
    cairn_info info = test_solve(problem, options, NULL);
    cairn_problem_free(problem);
    return info.solver_peak_bytes;
}

/* Most values of a forward are still read at its end; search and bound take memory for the graph, not for pairs of them. */
static void memory_is_linear(void **state)
{
    (void)state;
    assert_true(peak_of_search(1600) <= 5 * peak_of_search(400));
}

static cairn_problem *multiplied(const cairn_problem *problem, int64_t sizes, int64_t times)
{
    cairn_graph graph = *cairn_problem_graph(problem);
    cairn_node *nodes = malloc((size_t)graph.node_count * sizeof(*nodes));
    cairn_problem *made;
    assert_non_null(nodes);
    for (int32_t v = 0; v < graph.node_count; v++) {
        nodes[v] = graph.nodes[v];
        nodes[v].bytes *= sizes;
        nodes[v].workspace_bytes *= sizes;
        nodes[v].cost_ns *= times;
    }
    graph.nodes = nodes;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &made, NULL), CAIRN_OK);
    free(nodes);
    return made;
}

static bool is_same_schedule(const cairn_schedule *a, const cairn_schedule *b)
{
    int64_t count = cairn_schedule_count(a);
    return count == cairn_schedule_count(b) &&
           memcmp(cairn_schedule_ops(a), cairn_schedule_ops(b), (size_t)count * sizeof(cairn_op)) == 0;
}

static bool answers_alike(const cairn_problem *problem, const char *solver, int64_t budget_bytes, int64_t sizes,
                          int64_t times)
{
    cairn_schedule *schedule, *other;
    cairn_problem *larger = multiplied(problem, sizes, times);
    test_solve(problem, options_for(solver, budget_bytes), &schedule);
    test_solve(larger, options_for(solver, budget_bytes * sizes), &other);
    bool alike = schedule && other ? is_same_schedule(schedule, other) : !schedule && !other;
    cairn_schedule_free(schedule);
    cairn_schedule_free(other);
    cairn_problem_free(larger);
    return alike;
}

/*
 * In another unit of sizes or of times the answer is the same, at budgets where a walk succeeds at once. What the least
 * memory is looked for by counts bytes.
 */
static void units_do_not_matter(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        test_random random = test_random_seeded(seed);
        const test_graph_shape shape = {
            .nodes_min = 4, .nodes_max = 40, .training = true, .keep = true, .aliases = true, .workspaces = true};
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_limits found = limits(problem, "graph-search");
        for (int i = 1; i < 4; i++) {
            int64_t budget = found.least_bytes + (found.store_all_bytes - found.least_bytes) * i / 4;
            assert_true(answers_alike(problem, "graph-online", budget, 1000, 1));
            assert_true(answers_alike(problem, "graph-online", budget, 1, 3000));
            assert_true(answers_alike(problem, "graph-search", budget, 1000, 1));
            assert_true(answers_alike(problem, "graph-search", budget, 1, 3000));
        }
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_solver_beats_exhaustive_search),
        cmocka_unit_test(search_succeeds_at_its_least_budget),
        cmocka_unit_test(memory_is_linear),
        cmocka_unit_test(units_do_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
