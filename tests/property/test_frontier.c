/*
 * graph-milp and graph-lp-round. With HiGHS (CAIRN_HIGHS_LIBRARY, or where the linker finds it): against exhaustive
 * search and against an enumeration of frontier schedules that shares nothing with the solver but the definition of the
 * class; the rest is skipped where there is none. Without: what is said of it.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

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
#include "support/faulty_allocator.h"
#include "support/random_problem.h"

/* ---- enumeration ---- */

enum { NODES_MAX = 6, SETS = 1 << NODES_MAX };

typedef struct enumeration {
    const cairn_graph *graph;
    int64_t fixed_bytes, budget_bytes; /* budget < 0: look for the least peak */
    int root[NODES_MAX];
    unsigned storage[NODES_MAX]; /* handles of a node's storage */
    int64_t reached[SETS];       /* least time, or peak, at which a stage begins with these handles; -1 = not at all */
} enumeration;

static bool reads(const enumeration *e, int u, int d)
{
    const cairn_node *node = &e->graph->nodes[u];
    for (int32_t i = 0; i < node->dep_count; i++)
        if (node->deps[i] == d)
            return true;
    return node->alias_of == d;
}

static bool has(unsigned set, int v)
{
    return (set >> v & 1u) != 0;
}

/* Whether storage s is there while u runs: there or made before, and read from u on, or wanted by the next stage. */
static bool stays(const enumeration *e, unsigned before, unsigned run, unsigned after, int s, int u)
{
    bool made = has(before, s) || (has(run, s) && s <= u);
    bool read = s == u;
    for (int w = u; made && w < e->graph->node_count; w++)
        for (int d = 0; has(run, w) && d < w; d++)
            read = read || (e->root[d] == s && reads(e, w, d));
    return made && (read || has(after, s));
}

/* The peak of a stage that begins with handles before, runs these nodes in order and leaves after; -1 = it cannot. */
static int64_t peak_of(const enumeration *e, unsigned before, unsigned run, unsigned after)
{
    int64_t peak = e->fixed_bytes;
    unsigned there = before;
    for (int u = 0; u < e->graph->node_count; u++) {
        if (!has(run, u))
            continue;
        for (int d = 0; d < u; d++)
            if (reads(e, u, d) && !has(there, d))
                return -1;
        there |= 1u << u;
        int64_t workspace = e->graph->nodes[u].workspace_bytes;
        int64_t level = e->fixed_bytes + (workspace > 0 ? workspace : 0);
        for (int s = 0; s < e->graph->node_count; s++)
            if (e->root[s] == s && stays(e, before, run, after, s, u))
                level += e->graph->nodes[s].bytes;
        peak = level > peak ? level : peak;
    }
    return (after & ~there) == 0 ? peak : -1;
}

/* May nodes of run be computed in the stage of node t, which begins with handles before? */
static bool may_run(const enumeration *e, int t, unsigned before, unsigned run)
{
    for (int v = 0; v < t; v++)
        if (has(run, v) && (has(before, v) || e->graph->nodes[v].no_recompute))
            return false;
    return true;
}

/* A set of handles between stages: with their storage's root, outputs that were computed included. */
static bool may_hold(const enumeration *e, int t, unsigned set)
{
    for (int v = 0; v < e->graph->node_count; v++) {
        if (has(set, v) && (v >= t || !has(set, e->root[v])))
            return false;
        if (v < t && e->graph->nodes[v].keep && !has(set, v))
            return false;
    }
    return true;
}

static int64_t cost_of(const enumeration *e, unsigned run)
{
    int64_t cost = 0;
    for (int v = 0; v < e->graph->node_count; v++)
        cost += has(run, v) ? e->graph->nodes[v].cost_ns : 0;
    return cost;
}

static void one_stage(enumeration *e, int t, unsigned before, int64_t next[SETS])
{
    for (unsigned again = 0; again < 1u << t; again++) {
        unsigned run = again | 1u << t;
        if (!may_run(e, t, before, run))
            continue;
        for (unsigned after = 0; after < 2u << t; after++) {
            if (!may_hold(e, t + 1, after))
                continue;
            int64_t peak = peak_of(e, before, run, after), value = e->reached[before];
            if (peak < 0 || (e->budget_bytes >= 0 && peak > e->budget_bytes))
                continue;
            value = e->budget_bytes >= 0 ? value + cost_of(e, run) : (peak > value ? peak : value);
            if (next[after] < 0 || value < next[after])
                next[after] = value;
        }
    }
}

/* The least time of a frontier schedule within a budget, or the least peak of one; -1 = there is none. */
static int64_t enumerate(const cairn_problem *problem, int64_t budget_bytes)
{
    enumeration e = {.graph = cairn_problem_graph(problem), .budget_bytes = budget_bytes};
    e.fixed_bytes = cairn_problem_info_of(problem)->fixed_bytes;
    for (int v = 0; v < e.graph->node_count; v++)
        e.root[v] = e.graph->nodes[v].alias_of < 0 ? v : e.root[e.graph->nodes[v].alias_of];
    memset(e.reached, 0xff, sizeof(e.reached));
    e.reached[0] = budget_bytes < 0 ? e.fixed_bytes : 0;
    for (int t = 0; t < e.graph->node_count; t++) {
        int64_t next[SETS];
        memset(next, 0xff, sizeof(next));
        for (unsigned before = 0; before < 1u << t; before++)
            if (e.reached[before] >= 0)
                one_stage(&e, t, before, next);
        memcpy(e.reached, next, sizeof(next));
    }
    int64_t best = -1;
    for (int i = 0; i < SETS; i++)
        if (e.reached[i] >= 0 && (best < 0 || e.reached[i] < best))
            best = e.reached[i];
    return best;
}

/* ---- asking ---- */

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "iterations=50");
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, options_for(solver, budget_bytes), NULL);
}

static bool has_highs(void)
{
    for (int i = 0; cairn_solver_at(i); i++)
        if (strcmp(cairn_solver_at(i)->name, "graph-milp") == 0)
            return cairn_solver_at(i)->available;
    return false;
}

static void need_highs(void)
{
    if (!has_highs())
        skip();
}

static int64_t lesser(int64_t a, int64_t b)
{
    return a < 0 || (b >= 0 && b < a) ? b : a;
}

/* ---- tests ---- */

static void tiny_answers_are_the_best_frontier_schedules(void **state)
{
    (void)state;
    need_highs();
    int answers = 0, proved = 0, beyond = 0, rounded = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        test_random random = test_random_seeded(seed + 300);
        test_graph_shape shape = test_graph_of_everything(NODES_MAX);
        shape.machine = false;
        shape.training = seed % 2 == 0;
        shape.nodes_min = seed % 4 == 0 ? 1 : NODES_MAX;
        shape.positive = seed % 3 != 0;
        shape.bytes_max = shape.positive ? 100 : 12;
        cairn_problem *problem = test_random_graph(&random, &shape);
        int64_t least = enumerate(problem, -1);
        cairn_info all = solve(problem, "brute-graph", INT64_MAX / 2);
        int64_t budget = least + (all.store_all_bytes - least) * (int64_t)(seed % 3) / 4;
        int64_t frontier_ns = enumerate(problem, budget);
        cairn_info best = solve(problem, "brute-graph", budget), search = solve(problem, "graph-search", budget);
        cairn_info milp = solve(problem, "graph-milp", budget), rounding = solve(problem, "graph-lp-round", budget);
        assert_true(frontier_ns >= best.makespan_ns && least >= best.least_bytes);
        assert_int_equal(milp.makespan_ns, lesser(frontier_ns, search.makespan_ns));
        assert_int_equal(milp.least_bytes, lesser(least, search.least_bytes));
        assert_true(milp.outcome == CAIRN_OUTCOME_OPTIMAL || strcmp(milp.optimal_in, "frontier") == 0);
        assert_true(milp.lower_bound_ns <= best.makespan_ns && milp.peak_bytes <= budget);
        assert_true(rounding.makespan_ns < 0 || rounding.makespan_ns >= frontier_ns);
        assert_true(rounding.least_bytes >= least);
        answers++;
        proved += milp.outcome == CAIRN_OUTCOME_OPTIMAL;
        beyond += best.makespan_ns < frontier_ns;
        rounded += rounding.makespan_ns == frontier_ns;
        cairn_problem_free(problem);
    }
    print_message("of %d: %d meet the lower bound, %d are beaten outside the class, rounding finds %d\n", answers,
                  proved, beyond, rounded);
}

static cairn_problem *training_graph(uint64_t seed, int32_t nodes)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = {.nodes_min = nodes,
                              .nodes_max = nodes,
                              .bytes_max = 1000,
                              .ns_max = 1000,
                              .positive = true,
                              .training = true,
                              .aliases = seed % 2 == 0,
                              .workspaces = true,
                              .keep = true};
    return test_random_graph(&random, &shape);
}

static void larger_answers_beat_the_start_and_repeat(void **state)
{
    (void)state;
    need_highs();
    for (uint64_t seed = 0; seed < 6; seed++) {
        cairn_problem *problem = training_graph(seed, 24);
        cairn_info search = solve(problem, "graph-search", INT64_MAX / 2);
        int64_t budget = (search.least_bytes + search.store_all_bytes) / 2;
        cairn_schedule *first, *again;
        cairn_info info;
        cairn_options *options = options_for("graph-milp", budget);
        assert_int_equal(cairn_options_set(options, "iterations", "1000", NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, &first, &info, NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, &again, &info, NULL), CAIRN_OK);
        assert_string_equal(cairn_schedule_hash(first), cairn_schedule_hash(again));
        assert_int_equal(cairn_options_set(options, "solver", "graph-search", NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &search, NULL), CAIRN_OK);
        assert_true(info.makespan_ns <= search.makespan_ns && info.lower_bound_ns >= search.lower_bound_ns);
        assert_true(info.least_bytes <= search.least_bytes);
        assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL || strcmp(info.optimal_in, "frontier") == 0);
        cairn_schedule_free(first);
        cairn_schedule_free(again);
        cairn_options_free(options);
        cairn_problem_free(problem);
    }
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void the_clock_stops_it(void **state)
{
    (void)state;
    need_highs();
    cairn_problem *problem = training_graph(1, 90);
    cairn_info search = solve(problem, "graph-search", INT64_MAX / 2), info;
    int64_t budget = search.least_bytes + (search.store_all_bytes - search.least_bytes) / 4;
    cairn_options *options = options_for("graph-milp", budget);
    assert_int_equal(cairn_options_set(options, "time-limit", "1s", NULL), CAIRN_OK);
    int64_t begun_ns = now_ns();
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
    assert_true(now_ns() - begun_ns < 30000000000); /* the machine may be busy; to its end it takes minutes */
    assert_true(info.outcome == CAIRN_OUTCOME_FEASIBLE || info.outcome == CAIRN_OUTCOME_OPTIMAL);
    assert_true(info.optimal_in[0] != '\0' || info.outcome == CAIRN_OUTCOME_OPTIMAL || info.stopped_early ||
                info.reason[0] != '\0');
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void a_poll_stops_it(void **state)
{
    (void)state;
    need_highs();
    cairn_problem *problem = training_graph(3, 40);
    cairn_info search = solve(problem, "graph-search", INT64_MAX / 2);
    cairn_options *options = options_for("graph-milp", (search.least_bytes + search.store_all_bytes) / 2);
    test_stops_at_any_poll(problem, options);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void too_large_is_refused_beforehand(void **state)
{
    (void)state;
    need_highs();
    cairn_problem *problem = training_graph(5, 60);
    static const char *const solvers[] = {"graph-milp", "graph-lp-round"};
    for (int i = 0; i < 2; i++) {
        cairn_options *options = options_for(solvers[i], 1000000);
        cairn_error error;
        cairn_info info;
        assert_int_equal(cairn_options_set(options, "memory-limit", "16MiB", NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_MEMORY_LIMIT);
        assert_non_null(strstr(error.message, solvers[i]));
        cairn_options_free(options);
    }
    cairn_problem_free(problem);
}

typedef struct want {
    const cairn_problem *problem;
    int64_t budget_bytes, start_ns;
    int ended; /* for want of memory, with an answer */
} want;

static cairn_status solve_in_want(const cairn_env *env, void *context)
{
    want *w = context;
    cairn_info info;
    cairn_options *options = options_for("graph-milp", w->budget_bytes);
    cairn_status status = cairn_solve(env, w->problem, options, NULL, &info, NULL);
    cairn_options_free(options);
    if (status != CAIRN_OK)
        return status;
    assert_true(info.makespan_ns > 0 && info.makespan_ns <= w->start_ns);
    w->ended += strstr(info.reason, "memory-limit") != NULL;
    return status;
}

static void want_of_memory_leaves_the_start(void **state)
{
    (void)state;
    need_highs();
    cairn_problem *problem = training_graph(29, 10); /* one that the lower bound does not close */
    cairn_info search = solve(problem, "graph-search", INT64_MAX / 2);
    int64_t budget = search.least_bytes + (search.store_all_bytes - search.least_bytes) / 10;
    want w = {problem, budget, solve(problem, "graph-search", budget).makespan_ns, 0};
    assert_true(test_every_allocation_fails(solve_in_want, &w) > 1 && w.ended > 0);
    cairn_problem_free(problem);
}

static void larger_graphs_are_not_taken(void **state)
{
    (void)state;
    need_highs();
    cairn_node nodes[201];
    for (int i = 0; i < 201; i++)
        nodes[i] = (cairn_node){.alias_of = -1, .bytes = 1};
    for (int32_t count = 200; count <= 201; count++) {
        cairn_graph graph = {count, nodes, -1};
        cairn_problem *problem;
        assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
        cairn_status wanted = count <= 200 ? CAIRN_OK : CAIRN_UNSUPPORTED;
        assert_int_equal(cairn_solver_accepts("graph-milp", problem, NULL, NULL), wanted);
        assert_int_equal(cairn_solver_accepts("graph-lp-round", problem, NULL, NULL), wanted);
        cairn_problem_free(problem);
    }
}

/* Runs last: the environment is changed. */
static void without_highs_they_are_unavailable(void **state)
{
    (void)state;
    static const char *const files[] = {"/nonexistent", CAIRN_TEST_DATA "/graphs/unet_4.json", "libm.so.6"};
    static const char *const solvers[] = {"graph-milp", "graph-lp-round"};
    cairn_problem *problem = training_graph(7, 8);
    for (int i = 0; i < 6; i++) {
        cairn_error error;
        cairn_info info;
        cairn_options *options = options_for(solvers[i % 2], 100000);
        assert_int_equal(setenv("CAIRN_HIGHS_LIBRARY", files[i / 2], 1), 0);
        assert_false(has_highs());
        assert_int_equal(cairn_solver_accepts(solvers[i % 2], problem, NULL, &error), CAIRN_UNAVAILABLE);
        assert_non_null(strstr(error.message, "HiGHS"));
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_UNAVAILABLE);
        assert_non_null(strstr(error.message, "CAIRN_HIGHS_LIBRARY"));
        assert_int_equal(info.makespan_ns, CAIRN_NONE);
        cairn_options_free(options);
        cairn_info other = solve(problem, "auto", INT64_MAX / 2);
        assert_int_equal(other.outcome, CAIRN_OUTCOME_OPTIMAL);
    }
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_answers_are_the_best_frontier_schedules),
        cmocka_unit_test(larger_answers_beat_the_start_and_repeat),
        cmocka_unit_test(the_clock_stops_it),
        cmocka_unit_test(a_poll_stops_it),
        cmocka_unit_test(want_of_memory_leaves_the_start),
        cmocka_unit_test(too_large_is_refused_beforehand),
        cmocka_unit_test(larger_graphs_are_not_taken),
        cmocka_unit_test(without_highs_they_are_unavailable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
