/*
 * Graph solvers against exhaustive search: on thousands of tiny random graphs with aliases, outputs, nodes that run
 * once and workspaces, brute-graph is at least as fast as every solver, no bound exceeds it, and least memories agree.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
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
    for (int i = 0; i < HEURISTICS; i++)
        print_message("%-14s optimal in %d of %d, nothing found in %d\n", heuristics[i], count[i].optimal,
                      count[i].answers, count[i].missed);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_solver_beats_exhaustive_search),
        cmocka_unit_test(search_succeeds_at_its_least_budget),
        cmocka_unit_test(memory_is_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
