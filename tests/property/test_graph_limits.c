/*
 * Least memories of graphs: the bracket [least_lower_bytes, least_bytes] holds what exhaustive search finds, on
 * thousands of tiny graphs with aliases, outputs, nodes that run once and workspaces; where it is said to be exact, it is;
 * and no solver succeeds below the least that it names.
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
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_options *options_for(const char *solver)
{
    return test_options(solver, -1, "threads=1");
}

static cairn_limits limits(const cairn_problem *problem, const char *solver)
{
    return test_limits(problem, options_for(solver));
}

typedef struct tally {
    int graphs, lower_meets, found_meets, exact;
} tally;

static void check(const cairn_problem *problem, tally *count)
{
    cairn_limits truth = limits(problem, "brute-graph"), found = limits(problem, "auto");
    assert_true(truth.least_is_exact);
    assert_true(found.least_lower_bytes <= truth.least_bytes);
    assert_true(found.least_bytes >= truth.least_bytes);
    assert_int_equal(found.least_is_exact, found.least_bytes == found.least_lower_bytes);
    assert_int_equal(found.store_all_bytes, truth.store_all_bytes);
    count->graphs++;
    count->lower_meets += found.least_lower_bytes == truth.least_bytes;
    count->found_meets += found.least_bytes == truth.least_bytes;
    count->exact += found.least_is_exact;
}

/* Looks at so many graphs of a shape, of which at least a share in percent must be exact. */
static void check_all(const test_graph_shape *shape, uint64_t graphs, int exact_percent)
{
    tally count = {0, 0, 0, 0};
    for (uint64_t seed = 0; seed < graphs; seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_graph(&random, shape);
        check(problem, &count);
        cairn_problem_free(problem);
    }
    print_message("of %d graphs: exact %d, lower bound met %d, least found %d\n", count.graphs, count.exact,
                  count.lower_meets, count.found_meets);
    assert_true(count.exact * 100 >= count.graphs * exact_percent);
}

static void brackets_hold_the_truth(void **state)
{
    test_graph_shape shape = test_graph_of_everything(6);
    (void)state;
    shape.machine = false;
    for (int training = 0; training <= 1; training++) {
        shape.training = training;
        check_all(&shape, 3000, 98);
    }
}

/* Seven nodes, few of them special: recomputation matters more. */
static void brackets_hold_the_truth_of_longer_graphs(void **state)
{
    test_graph_shape shape = {.nodes_min = 6, .nodes_max = 7, .deps_max = 3, .positive = true, .workspaces = true};
    (void)state;
    check_all(&shape, 400, 90);
}

static void check_below(const cairn_problem *problem, const char *solver)
{
    cairn_options *options = test_options(solver, -1, "threads=1 iterations=20");
    cairn_limits found;
    cairn_info info;
    assert_int_equal(cairn_limits_of(NULL, problem, options, &found, NULL), CAIRN_OK);
    for (int64_t budget = found.least_lower_bytes; budget <= found.least_bytes; budget++) {
        assert_int_equal(cairn_options_set_int(options, "budget", budget, NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
        if ((info.makespan_ns >= 0) != (budget == found.least_bytes))
            fail_msg("%s: the least is %lld, at %lld it says %s", solver, (long long)found.least_bytes,
                     (long long)budget, cairn_outcome_name(info.outcome));
        assert_int_equal(info.least_bytes, found.least_bytes);
    }
    cairn_options_free(options);
}

/* Walks are not monotone in the budget: what fails under one may succeed under a smaller one. */
static void nothing_is_found_below_the_least(void **state)
{
    static const char *const solvers[] = {"graph-online", "graph-search", "graph-exact", "auto"};
    test_graph_shape shape = test_graph_of_everything(30);
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        test_random random = test_random_seeded(seed);
        shape.training = seed % 2 == 1;
        cairn_problem *problem = test_random_graph(&random, &shape);
        for (size_t i = 0; i < sizeof(solvers) / sizeof(solvers[0]); i++)
            check_below(problem, solvers[i]);
        cairn_problem_free(problem);
    }
}

static int64_t least_found(uint64_t seed, const test_graph_shape *shape, const char *solver)
{
    test_random random = test_random_seeded(seed);
    cairn_problem *problem = test_random_graph(&random, shape);
    int64_t bytes = limits(problem, solver).least_bytes;
    cairn_problem_free(problem);
    return bytes;
}

/* Solvers without transfers do with a link, which lowers the bound only, what they do without. */
static void a_link_changes_no_walk(void **state)
{
    test_graph_shape alone = test_graph_of_everything(30), linked = alone;
    (void)state;
    alone.training = linked.training = true;
    linked.machine = true;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        assert_int_equal(least_found(seed, &alone, "graph-search"), least_found(seed, &linked, "graph-search"));
        assert_int_equal(least_found(seed, &alone, "graph-online"), least_found(seed, &linked, "graph-online"));
    }
}

/*
 * Node 3 reads two large values. Each needs 12 bytes of its own beside what it reads, and whichever is computed last is
 * computed beside the other: 30 bytes, where no node needs more than 25 by itself.
 */
static void what_must_wait_is_counted(void **state)
{
    static const int32_t first[] = {0}, both[] = {1, 2};
    const cairn_node nodes[] = {
        {.name = "", .cost_ns = 1, .bytes = 3, .alias_of = -1},
        {.name = "", .cost_ns = 1, .bytes = 12, .workspace_bytes = 3, .deps = first, .dep_count = 1, .alias_of = -1},
        {.name = "", .cost_ns = 1, .bytes = 12, .workspace_bytes = 3, .deps = first, .dep_count = 1, .alias_of = -1},
        {.name = "", .cost_ns = 1, .bytes = 1, .deps = both, .dep_count = 2, .alias_of = -1},
    };
    const cairn_graph graph = {4, nodes, -1};
    cairn_problem *problem;
    (void)state;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(limits(problem, "store-all").least_lower_bytes, 30);
    assert_int_equal(limits(problem, "brute-graph").least_bytes, 30);
    cairn_problem_free(problem);
}

/* Sizes near the limit of sums, and many readers. */
static void large_sizes_do_not_overflow(void **state)
{
    enum { COUNT = 40 };
    const int64_t huge = INT64_MAX / (COUNT + 1);
    int32_t deps[COUNT];
    cairn_node nodes[COUNT];
    cairn_problem *problem;
    (void)state;
    for (int32_t v = 0; v < COUNT; v++) {
        deps[v] = v;
        nodes[v] = (cairn_node){
            .name = "", .cost_ns = 1, .bytes = huge, .deps = deps, .dep_count = v, .alias_of = -1, .keep = v % 3 == 0};
    }
    const cairn_graph graph = {COUNT, nodes, -1};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    cairn_limits found = limits(problem, "auto");
    assert_true(found.least_is_exact);
    assert_int_equal(found.least_bytes, huge * COUNT);
    cairn_problem_free(problem);
}

static cairn_status limits_in(const cairn_env *env, void *context)
{
    cairn_options *options = options_for("store-all");
    cairn_limits found;
    cairn_status status = cairn_limits_of(env, context, options, &found, NULL);
    cairn_options_free(options);
    return status;
}

/* The longest times that a problem may have, about which the least memory says nothing. */
static void long_times_do_not_overflow(void **state)
{
    (void)state;
    const int32_t deps[] = {0, 1, 0, 2};
    const cairn_node nodes[] = {
        {.cost_ns = INT64_MAX - 3, .bytes = 3, .alias_of = -1},
        {.cost_ns = 1, .bytes = 2, .deps = deps, .dep_count = 1, .alias_of = -1},
        {.cost_ns = 1, .bytes = 1, .deps = deps + 1, .dep_count = 1, .alias_of = -1},
        {.cost_ns = 1, .bytes = 1, .deps = deps + 2, .dep_count = 2, .alias_of = -1},
    };
    const cairn_graph graph = {4, nodes, -1};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    cairn_limits found = limits(problem, "graph-search");
    assert_int_equal(found.least_lower_bytes, 5);
    assert_int_equal(found.least_bytes, 5);
    cairn_problem_free(problem);
}

/* A row of forward nodes, one in so many with a second input from some nodes before; each has a backward node. */
static cairn_problem *large_training_graph(int32_t row, int32_t skip, int32_t every)
{
    int32_t(*deps)[2] = calloc(2 * (size_t)row, sizeof(*deps));
    cairn_node *nodes = calloc(2 * (size_t)row, sizeof(*nodes));
    test_random random = test_random_seeded(3);
    cairn_problem *problem;
    assert_true(deps && nodes);
    for (int32_t v = 0; v < 2 * row; v++) {
        int32_t forward = v < row ? v : 2 * row - 1 - v;
        deps[v][0] = v < row ? v - skip : forward - 1;
        deps[v][1] = v - 1;
        int32_t first = v < row ? v < skip || v % every != every - 1 : forward == 0;
        nodes[v] = (cairn_node){.cost_ns = test_random_between(&random, 1, 100),
                                .bytes = test_random_between(&random, 1, 1000),
                                .deps = deps[v] + first,
                                .dep_count = v == 0 ? 0 : 2 - first,
                                .alias_of = -1};
    }
    const cairn_graph graph = {2 * row, nodes, row};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    free(nodes);
    free(deps);
    return problem;
}

/* A thousand forward nodes in the memory of a few: sweeps take little more than is proved to be needed, and are answers. */
static void brackets_of_large_graphs_are_narrow(void **state)
{
    (void)state;
    cairn_problem *problem = large_training_graph(1000, 6, 7);
    cairn_limits found = limits(problem, "graph-search");
    assert_true(100 * found.least_bytes <= 106 * found.least_lower_bytes);
    assert_true(found.store_all_bytes > 100 * found.least_bytes);
    cairn_options *options = test_options("graph-search", found.least_bytes, "threads=1 iterations=0");
    cairn_schedule *schedule;
    cairn_info info = test_solve(problem, options, &schedule);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    assert_true(info.peak_bytes <= found.least_bytes);
    cairn_schedule_free(schedule);
    cairn_info_clear(&info);
    cairn_problem_free(problem);
}

/*
 * Where skips cross every cut, sweeps need room: their sequences are longer than those that are searched, and are answers
 * all the same, at the least budget and without an improvement.
 */
static void many_skips_need_long_sweeps(void **state)
{
    enum { ROW = 1500, WALK_OPS = 2 * 8 * 2 * ROW }; /* of eight computations a node, each with a drop */
    (void)state;
    cairn_problem *problem = large_training_graph(ROW, 9, 5);
    cairn_limits found = limits(problem, "graph-search");
    assert_true(100 * found.least_bytes <= 140 * found.least_lower_bytes);
    cairn_options *options = test_options("graph-search", found.least_bytes, "threads=1 iterations=20");
    cairn_schedule *schedule;
    cairn_info info = test_solve(problem, options, &schedule);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    assert_true(info.peak_bytes <= found.least_bytes);
    assert_true(cairn_schedule_count(schedule) > WALK_OPS);
    cairn_schedule_free(schedule);
    cairn_info_clear(&info);
    cairn_problem_free(problem);
}

/* Cuts that a skip crosses are dear, those before and after it are not. */
static void long_skips_widen_no_bracket(void **state)
{
    (void)state;
    cairn_problem *problem = large_training_graph(TEST_ROUNDS(50000), 500, 1000);
    cairn_limits found = limits(problem, "graph-search");
    assert_true(100 * found.least_bytes <= 135 * found.least_lower_bytes);
    cairn_problem_free(problem);
}

/* Views of views of ...: whose storage they are in is not looked for from the beginning every time. */
static void chains_of_aliases_are_short(void **state)
{
    enum { ALIASES = 100000, SECONDS_MAX = 10 };
    cairn_node *nodes = calloc(ALIASES + 1, sizeof(*nodes));
    const cairn_graph graph = {ALIASES + 1, nodes, -1};
    cairn_problem *problem;
    (void)state;
    assert_non_null(nodes);
    nodes[0] = (cairn_node){.cost_ns = 1, .bytes = 7, .alias_of = -1};
    for (int32_t v = 1; v <= ALIASES; v++)
        nodes[v] = (cairn_node){.cost_ns = 1, .alias_of = v - 1};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    clock_t begun = clock();
    assert_int_equal(limits(problem, "store-all").least_lower_bytes, 7);
    assert_true(clock() - begun < SECONDS_MAX * CLOCKS_PER_SEC);
    cairn_problem_free(problem);
    free(nodes);
}

/* A forward in a row, of which every value is a checkpoint's candidate: a square of their number takes half a minute. */
static void a_long_row_takes_no_square(void **state)
{
    enum { FORWARD = TEST_ROUNDS(100000), SECONDS_MAX = 10 };
    cairn_node *nodes = calloc(2 * FORWARD, sizeof(*nodes));
    int32_t(*deps)[2] = calloc(2 * FORWARD, sizeof(*deps));
    const cairn_graph graph = {2 * FORWARD, nodes, FORWARD};
    cairn_problem *problem;
    (void)state;
    assert_true(nodes && deps);
    for (int32_t v = 0; v < 2 * FORWARD; v++) {
        deps[v][0] = 2 * FORWARD - 2 - v;
        deps[v][1] = v - 1;
        int32_t first = v <= FORWARD || v == 2 * FORWARD - 1;
        nodes[v] = (cairn_node){
            .cost_ns = 1, .bytes = 1, .deps = deps[v] + first, .dep_count = v == 0 ? 0 : 2 - first, .alias_of = -1};
    }
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    clock_t begun = clock();
    cairn_limits found = limits(problem, "griewank-log");
    assert_true(clock() - begun < SECONDS_MAX * CLOCKS_PER_SEC);
    assert_true(found.least_bytes < found.store_all_bytes / 100);
    cairn_problem_free(problem);
    free(deps);
    free(nodes);
}

/* The bound's programs alone may take more: they are left out, and the search answers. */
static void a_search_needs_no_room_for_programs(void **state)
{
    enum { NODES = 2000, ROOM = 13500000 };
    test_random random = test_random_seeded(7);
    const test_graph_shape shape = {
        .nodes_min = NODES, .nodes_max = NODES, .deps_max = 2, .bytes_max = 1000, .positive = true, .training = true};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_limits ends = limits(problem, "store-all");
    (void)state;
    cairn_options *options =
        test_options("graph-search", (ends.least_lower_bytes + ends.store_all_bytes) / 2, "threads=1 iterations=0");
    assert_int_equal(cairn_options_set_int(options, "memory-limit", ROOM, NULL), CAIRN_OK);
    cairn_info info = test_solve(problem, options, NULL);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    assert_true(info.solver_peak_bytes <= ROOM);
    cairn_problem_free(problem);
}

static void every_allocation_may_fail(void **state)
{
    test_random random = test_random_seeded(2);
    test_graph_shape shape = test_graph_of_everything(12);
    cairn_problem *problem = test_random_graph(&random, &shape);
    (void)state;
    assert_true(test_every_allocation_fails(limits_in, problem) > 1);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(brackets_hold_the_truth),          cmocka_unit_test(brackets_hold_the_truth_of_longer_graphs),
        cmocka_unit_test(nothing_is_found_below_the_least), cmocka_unit_test(a_link_changes_no_walk),
        cmocka_unit_test(what_must_wait_is_counted),        cmocka_unit_test(large_sizes_do_not_overflow),
        cmocka_unit_test(long_times_do_not_overflow),       cmocka_unit_test(chains_of_aliases_are_short),
        cmocka_unit_test(every_allocation_may_fail),        cmocka_unit_test(brackets_of_large_graphs_are_narrow),
        cmocka_unit_test(a_long_row_takes_no_square),       cmocka_unit_test(long_skips_widen_no_bracket),
        cmocka_unit_test(many_skips_need_long_sweeps),      cmocka_unit_test(a_search_needs_no_room_for_programs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
