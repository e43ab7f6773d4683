/* Graphs: validation and copying. Dependencies are kept sorted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/failure.h"
#include "problem/problem.h"
#include "problem/total.h"

static cairn_status deps_error(cairn_error *error, int32_t v, const char *what, int32_t dep)
{
    char path[CAIRN_ERROR_PATH_MAX];
    snprintf(path, sizeof(path), "nodes[%d].deps", v);
    return crn_fail_at(error, CAIRN_BAD_INPUT, v, path, "deps lists %d%s", dep, what);
}

static cairn_status node_error(cairn_error *error, int32_t v, const char *field, const char *what, int64_t value)
{
    char path[CAIRN_ERROR_PATH_MAX];
    snprintf(path, sizeof(path), "nodes[%d].%s", v, field);
    return crn_fail_at(error, CAIRN_BAD_INPUT, v, path, "%s is %lld; %s", field, (long long)value, what);
}

static cairn_status check_node(const cairn_node *node, int32_t v, cairn_error *error)
{
    if (node->cost_ns < 0)
        return node_error(error, v, "cost_ns", "at least 0", node->cost_ns);
    if (node->bytes < 0)
        return node_error(error, v, "bytes", "at least 0", node->bytes);
    if (node->alias_of < -1 || node->alias_of >= v)
        return node_error(error, v, "alias_of", "the index of an earlier node, or null", node->alias_of);
    if (node->alias_of >= 0 && node->bytes != 0)
        return node_error(error, v, "bytes", "an alias has none of its own: 0", node->bytes);
    if (node->dep_count < 0)
        return node_error(error, v, "dep_count", "at least 0", node->dep_count);
    for (int32_t i = 0; i < node->dep_count; i++)
        if (node->deps[i] < 0 || node->deps[i] >= v)
            return deps_error(error, v, "; the indices of earlier nodes", node->deps[i]);
    return CAIRN_OK;
}

static cairn_status check_totals(const cairn_graph *graph, int64_t fixed_bytes, int64_t *work_ns, cairn_error *error)
{
    crn_total bytes = {fixed_bytes, false}, ns = {0, false};
    int64_t edges = 0;
    for (int32_t v = 0; v < graph->node_count; v++) {
        crn_total_add(&bytes, graph->nodes[v].bytes);
        crn_total_add(&bytes, graph->nodes[v].workspace_bytes);
        crn_total_add(&ns, graph->nodes[v].cost_ns);
        edges += graph->nodes[v].dep_count;
        if (bytes.overflow || ns.overflow)
            return crn_fail_at(error, CAIRN_OVERFLOW, v, NULL, "the sum of all %s passes 2^63 - 1 at node %d",
                               bytes.overflow ? "sizes" : "times", v);
        if (edges > CAIRN_EDGES_MAX)
            return crn_fail_at(error, CAIRN_TOO_LARGE, v, NULL, "more than %lld dependencies",
                               (long long)CAIRN_EDGES_MAX);
    }
    *work_ns = ns.sum;
    return CAIRN_OK;
}

static cairn_status check_graph(const cairn_graph *graph, int64_t fixed_bytes, int64_t *work_ns, cairn_error *error)
{
    if (graph->node_count < 1)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "nodes", "a graph has at least one node");
    if (graph->node_count > CAIRN_NODES_MAX)
        return crn_fail_at(error, CAIRN_TOO_LARGE, CAIRN_NONE, "nodes", "%d nodes; at most %lld", graph->node_count,
                           (long long)CAIRN_NODES_MAX);
    if (graph->backward_begins_at < -1 || graph->backward_begins_at > graph->node_count)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "backward_begins_at",
                           "backward_begins_at is %d; 0 to the number of nodes, %d", graph->backward_begins_at,
                           graph->node_count);
    for (int32_t v = 0; v < graph->node_count; v++)
        CRN_TRY(check_node(&graph->nodes[v], v, error));
    return check_totals(graph, fixed_bytes, work_ns, error);
}

static int compare_index(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static cairn_status sort_deps(int32_t *deps, size_t count, int32_t v, cairn_error *error)
{
    bool is_sorted = true;
    for (size_t i = 1; i < count; i++)
        is_sorted = is_sorted && deps[i - 1] < deps[i];
    if (!is_sorted)
        qsort(deps, count, sizeof(*deps), compare_index);
    for (size_t i = 1; i < count; i++)
        if (deps[i] == deps[i - 1])
            return deps_error(error, v, " twice", deps[i]);
    return CAIRN_OK;
}

static cairn_status copy_deps(crn_arena *arena, const cairn_node *from, int32_t v, cairn_node *to, cairn_error *error)
{
    size_t count = (size_t)from->dep_count;
    int32_t *deps = crn_arena_alloc(arena, count, sizeof(*deps));
    if (!deps)
        return crn_no_memory(error);
    if (count > 0)
        memcpy(deps, from->deps, count * sizeof(*deps));
    to->deps = deps;
    return sort_deps(deps, count, v, error);
}

static cairn_status copy_graph(cairn_problem *problem, const cairn_graph *graph, cairn_error *error)
{
    cairn_node *nodes = crn_arena_alloc(&problem->arena, (size_t)graph->node_count, sizeof(*nodes));
    if (!nodes)
        return crn_no_memory(error);
    for (int32_t v = 0; v < graph->node_count; v++) {
        nodes[v] = graph->nodes[v];
        nodes[v].name = crn_arena_text(&problem->arena, graph->nodes[v].name ? graph->nodes[v].name : "");
        if (!nodes[v].name)
            return crn_no_memory(error);
        CRN_TRY(copy_deps(&problem->arena, &graph->nodes[v], v, &nodes[v], error));
    }
    problem->graph = *graph;
    problem->graph.nodes = nodes;
    return CAIRN_OK;
}

/* The lists lie in memory that becomes the problem's own, so they are sorted where they are. */
static cairn_status take_graph(cairn_problem *problem, const cairn_graph *graph, crn_arena *own, cairn_error *error)
{
    for (int32_t v = 0; v < graph->node_count; v++)
        CRN_TRY(sort_deps((int32_t *)graph->nodes[v].deps, (size_t)graph->nodes[v].dep_count, v, error));
    problem->graph = *graph;
    crn_arena_join(&problem->arena, own);
    return CAIRN_OK;
}

cairn_status crn_problem_make_graph(const cairn_env *env, const cairn_graph *graph, const cairn_problem_info *info,
                                    crn_arena *own, cairn_problem **problem, cairn_error *error)
{
    cairn_problem *made;
    *problem = NULL;
    CRN_TRY(crn_problem_begin(env, CAIRN_KIND_GRAPH, info, own, &made, error));
    cairn_status status = check_graph(graph, made->info.fixed_bytes, &made->work_ns, error);
    if (status == CAIRN_OK)
        status = own ? take_graph(made, graph, own, error) : copy_graph(made, graph, error);
    if (status != CAIRN_OK) {
        cairn_problem_free(made);
        return status;
    }
    crn_problem_hash_fill(made);
    *problem = made;
    return CAIRN_OK;
}

cairn_status cairn_problem_new_graph(const cairn_env *env, const cairn_graph *graph, const cairn_problem_info *info,
                                     cairn_problem **problem, cairn_error *error)
{
    return crn_problem_make_graph(env, graph, info, NULL, problem, error);
}

int32_t crn_graph_root(const cairn_graph *graph, int32_t node)
{
    while (graph->nodes[node].alias_of >= 0)
        node = graph->nodes[node].alias_of;
    return node;
}
