/*
 * The bound of a large graph looks at a few of its moments only, but at those that matter: it is what cuts at all
 * moments around the turn say.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/graph/graph_bound.h"
#include "support/ask.h"
#include "support/random_source.h"

/* More than those of which every moment is looked at, and than the bound for small graphs takes. */
enum { NODES = 2400, AROUND = 120, SPARSE = 32 };

/* As a traced step: most values are small, and every SPARSE-th node takes much beside what others read. */
static cairn_problem *graph_with_sparse_workspaces(void)
{
    test_random random = test_random_seeded(5);
    int32_t *deps = malloc(2 * NODES * sizeof(*deps));
    cairn_node *nodes = calloc(NODES, sizeof(*nodes));
    cairn_problem *problem;
    assert_true(deps && nodes);
    for (int32_t v = 0; v < NODES; v++) {
        int32_t mirror = NODES - 1 - v, *own = deps + 2 * (ptrdiff_t)v, n = 0;
        if (v > 0)
            own[n++] = v - 1;
        if (v > NODES / 2)
            own[n++] = mirror;
        nodes[v] = (cairn_node){.cost_ns = test_random_between(&random, 1000, 2000),
                                .bytes = test_random_between(&random, 1000, 2000),
                                .workspace_bytes = v % SPARSE == 9 ? 40000 : 0,
                                .deps = own,
                                .dep_count = n,
                                .alias_of = -1};
    }
    const cairn_graph graph = {.node_count = NODES, .nodes = nodes, .backward_begins_at = NODES / 2};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    free(nodes);
    free(deps);
    return problem;
}

static void few_moments_say_what_all_say(void **state)
{
    static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE, .time_limit_ns = CAIRN_NONE};
    cairn_problem *problem = graph_with_sparse_workspaces();
    cairn_limits limits = test_limits(problem, test_options("store-all", -1, ""));
    int64_t budget_bytes = limits.least_lower_bytes + (limits.store_all_bytes - limits.least_lower_bytes) / 4, best = 0;
    const cairn_env env = {.poll = NULL};
    const crn_task task = {.env = &env,
                           .problem = problem,
                           .settings = &settings,
                           .budget_max_bytes = CAIRN_NONE,
                           .deadline_ns = CAIRN_NONE};
    crn_graph_model *model;
    crn_graph_bounder *bounder;
    (void)state;
    assert_int_equal(crn_graph_model_new(&task, &model, NULL), CAIRN_OK);
    assert_int_equal(crn_graph_bounder_new(&task, model, &bounder, NULL), CAIRN_OK);
    int64_t found = crn_graph_bound_makespan(bounder, budget_bytes);
    for (int32_t t = NODES / 2 - AROUND; t < NODES / 2 + AROUND; t++) {
        int64_t bound = crn_graph_bound_window(bounder, budget_bytes, t, NODES);
        best = bound > best ? bound : best;
    }
    assert_true(best > model->total_cost / 20);
    assert_true(found >= model->total_cost + best);
    crn_graph_bounder_free(bounder);
    crn_graph_model_free(model);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(few_moments_say_what_all_say)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
