/*
 * Stopping on large graphs: every solver of graphs hears soon that it is to stop, whenever that is, and what it has by
 * then is a schedule. "Soon" is counted in processor time, which a busy machine does not stretch.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/random_source.h"
#include "support/rounds.h"

/* A network with skips, forward and backward; backward nodes read the value below, every third its own one too. */
static cairn_problem *network(int32_t forward)
{
    test_random random = test_random_seeded(1);
    int32_t count = 2 * forward, *deps = malloc(3 * (size_t)count * sizeof(*deps));
    cairn_node *nodes = calloc((size_t)count, sizeof(*nodes));
    assert_true(deps && nodes);
    for (int32_t v = 0; v < count; v++) {
        int32_t mirror = count - 1 - v, *own = deps + 3 * (ptrdiff_t)v, n = 0;
        if (v > 0)
            own[n++] = v - 1;
        if (v < forward && v % 7 == 6)
            own[n++] = v - 6;
        if (v > forward && mirror > 0)
            own[n++] = mirror - 1;
        if (v > forward && mirror % 3 == 0)
            own[n++] = mirror;
        nodes[v] = (cairn_node){.cost_ns = test_random_between(&random, 1000, 100000),
                                .bytes = test_random_between(&random, 10000, 1000000),
                                .deps = own,
                                .dep_count = n,
                                .alias_of = -1};
    }
    const cairn_graph graph = {.node_count = count, .nodes = nodes, .backward_begins_at = forward};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    free(nodes);
    free(deps);
    return problem;
}

typedef struct patience {
    int polls, stop_at; /* the number of the poll that says so; 0 = the first that is told of a schedule */
    clock_t last, longest;
} patience;

static int poll_until(void *context, const cairn_progress *progress)
{
    patience *p = context;
    clock_t now = clock();
    p->longest = now - p->last > p->longest ? now - p->last : p->longest;
    p->last = now;
    p->polls++;
    return p->stop_at == 0 ? progress->best_ns != CAIRN_NONE : p->polls == p->stop_at;
}

/* What a solver does with a quarter of what storing everything takes, stopped at a poll. */
static cairn_status solve_until(const cairn_problem *problem, const char *solver, int64_t budget_bytes, patience *p,
                                cairn_info *info)
{
    const cairn_env env = {.poll = poll_until, .poll_context = p};
    cairn_options *options = test_options(solver, -1, "threads=1");
    p->last = clock();
    cairn_status status = cairn_solve_many(&env, problem, options, &budget_bytes, 1, NULL, info, NULL);
    clock_t now = clock();
    p->longest = now - p->last > p->longest ? now - p->last : p->longest;
    cairn_options_free(options);
    return status;
}

static int64_t quarter_of_all(const cairn_problem *problem)
{
    return test_limits(problem, test_options("store-all", -1, "")).store_all_bytes / 4;
}

static const char *const solvers[] = {"ap-sqrt",      "ap-greedy",    "linear-sqrt",  "linear-greedy",
                                      "griewank-log", "graph-online", "graph-search", "auto"};
enum { SECONDS_MAX = TEST_ROUNDS(20) == 20 ? 1 : 20 };
enum { SOLVER_COUNT = sizeof(solvers) / sizeof(solvers[0]) };

static void every_solver_hears_soon(void **state)
{
    static const int stops[] = {1, 20, 400, 4000};
    cairn_problem *problem = network(TEST_ROUNDS(TEST_ROUNDS(8000))); /* time grows with its square */
    int64_t budget_bytes = quarter_of_all(problem);
    (void)state;
    for (int i = 0; i < SOLVER_COUNT; i++)
        for (size_t k = 0; k < sizeof(stops) / sizeof(stops[0]); k++) {
            patience p = {.stop_at = stops[k]};
            cairn_info info;
            cairn_status status = solve_until(problem, solvers[i], budget_bytes, &p, &info);
            double longest_s = (double)p.longest / CLOCKS_PER_SEC;
            if (longest_s > SECONDS_MAX)
                fail_msg("%s, stopped at poll %d, did not ask for %.2f s", solvers[i], stops[k], longest_s);
            assert_true(status == CAIRN_OK || status == CAIRN_CANCELLED);
            if (status == CAIRN_OK && info.makespan_ns != CAIRN_NONE)
                assert_true(info.peak_bytes <= budget_bytes && info.makespan_ns >= info.lower_bound_ns);
            cairn_info_clear(&info);
            if (p.polls < stops[k])
                break; /* it was done before */
        }
    cairn_problem_free(problem);
}

/* What was found before one is stopped is not lost. */
static void a_stopped_search_has_an_answer(void **state)
{
    cairn_problem *problem = network(1000);
    int64_t budget_bytes = quarter_of_all(problem);
    patience p = {.stop_at = 0};
    cairn_info info;
    (void)state;
    assert_int_equal(solve_until(problem, "graph-search", budget_bytes, &p, &info), CAIRN_OK);
    assert_true(info.stopped_early);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    assert_true(info.gap >= 0 && info.gap < 0.1);
    cairn_info_clear(&info);
    cairn_problem_free(problem);
}

static cairn_info solve_in_time(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    cairn_options *options;
    cairn_info info;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    cairn_options_set(options, "solver", solver, NULL);
    cairn_options_set(options, "time-limit", "1000s", NULL);
    cairn_options_set(options, "iterations", "8", NULL);
    assert_int_equal(cairn_solve_many(NULL, problem, options, &budget_bytes, 1, NULL, &info, NULL), CAIRN_OK);
    cairn_options_free(options);
    return info;
}

/* With a time limit auto gives it to the search but for the baselines' share, and so is no worse than either. */
static void time_goes_to_the_search(void **state)
{
    cairn_problem *problem = network(TEST_ROUNDS(1000));
    int64_t budget_bytes = quarter_of_all(problem);
    cairn_info search = solve_in_time(problem, "graph-search", budget_bytes);
    cairn_info best = solve_in_time(problem, "auto", budget_bytes);
    (void)state;
    assert_non_null(strstr(best.reason, "graph-online, graph-search"));
    assert_true(best.makespan_ns <= search.makespan_ns);
    assert_true(best.lower_bound_ns >= search.lower_bound_ns);
    cairn_problem_free(problem);
}

/* Walks that know no future find some that others do not: those are the search's, too. */
static void the_search_needs_no_more_than_online_walks(void **state)
{
    cairn_problem *problem = network(TEST_ROUNDS(750));
    cairn_limits search = test_limits(problem, test_options("graph-search", -1, "threads=1"));
    cairn_limits online = test_limits(problem, test_options("graph-online", -1, "threads=1"));
    (void)state;
    assert_true(search.least_bytes <= online.least_bytes);
    cairn_problem_free(problem);
}

/* Of one thread, within a limit of 100 ms; with a slow link to a large host. */
static double seconds_within_a_tenth(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    cairn_options *options = test_options(
        solver, budget_bytes, "threads=1 time-limit=100ms host-budget=1TB to-host=300MB/s to-device=300MB/s");
    clock_t begun = clock();
    cairn_info info = test_solve(problem, options, NULL);
    assert_true(info.outcome != CAIRN_OUTCOME_INFEASIBLE);
    cairn_info_clear(&info);
    return (double)(clock() - begun) / CLOCKS_PER_SEC;
}

/* Each of the lists that the joint solver starts from has a bound, and a tight budget makes that dear. */
static void a_short_limit_holds_with_a_link(void **state)
{
    static const char *const which[] = {"joint-graph", "graph-search", "auto"};
    const double most = SECONDS_MAX == 1 ? 0.25 : 2.0; /* under sanitizers */
    cairn_problem *problem = network(500);
    cairn_limits limits = test_limits(problem, test_options("store-all", -1, ""));
    (void)state;
    for (size_t i = 0; i < sizeof(which) / sizeof(which[0]); i++) {
        double seconds = seconds_within_a_tenth(problem, which[i], limits.store_all_bytes / 30);
        if (seconds > most)
            fail_msg("%s took %.3f s of a limit of 0.1 s", which[i], seconds);
    }
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_solver_hears_soon),         cmocka_unit_test(a_stopped_search_has_an_answer),
        cmocka_unit_test(time_goes_to_the_search),         cmocka_unit_test(the_search_needs_no_more_than_online_walks),
        cmocka_unit_test(a_short_limit_holds_with_a_link),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
