#include "solve/milp/frontier_graph.h"

enum { NODES_MAX = 200 };

cairn_status crn_frontier_accepts(const crn_task *task, cairn_error *error)
{
    int32_t count = cairn_problem_graph(task->problem)->node_count;
    if (count <= NODES_MAX)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNSUPPORTED, "integer programs are for graphs of at most %d nodes, not %d", NODES_MAX,
                    count);
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void fill_units(crn_frontier_graph *made)
{
    const crn_graph_model *model = made->model;
    for (int32_t v = 0; v < model->node_count; v++) {
        made->cost_unit = common_divisor(made->cost_unit, model->cost[v]);
        made->bytes_unit = common_divisor(made->bytes_unit, model->bytes[v]);
        made->bytes_unit = common_divisor(made->bytes_unit, model->extra[v]);
    }
    made->bytes_unit = crn_max(1, made->bytes_unit);
    made->cost_unit = crn_max(1, made->cost_unit);
}

/* A kept handle is there from the stage after its node's on, and so is the root of its storage. */
static void fill_always(const crn_graph_model *model, const cairn_graph *graph, int32_t *always_from)
{
    for (int32_t v = 0; v < model->node_count; v++) {
        always_from[v] = model->node_count + 1;
        if (!graph->nodes[v].keep)
            continue;
        always_from[v] = v + 1;
        always_from[model->root[v]] = (int32_t)crn_min(always_from[model->root[v]], v + 1);
    }
}

/*
 * latest[v]: in stage t a handle is read by node t itself, or by an earlier node that is computed again, which makes
 * sense as long as that one's handle is of use. A storage is of use as long as one of its handles is.
 */
static void fill_latest(const crn_graph_model *model, const int32_t *always_from, int32_t *latest)
{
    for (int32_t v = 0; v < model->node_count; v++)
        latest[v] = v;
    for (int32_t u = model->node_count - 1; u >= 0; u--) {
        int64_t last = model->once_node[u] ? u : crn_max(u, crn_min(latest[u], always_from[u] - 1));
        for (int32_t i = model->dep_begin[u]; i < model->dep_begin[u + 1]; i++)
            latest[model->dep[i]] = (int32_t)crn_max(latest[model->dep[i]], last);
        latest[model->root[u]] = (int32_t)crn_max(latest[model->root[u]], latest[u]);
    }
}

static cairn_status fill(const crn_task *task, crn_frontier_graph *made, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &made->model, error));
    size_t n = (size_t)made->model->node_count;
    int32_t *latest = crn_arena_alloc(&made->arena, n, sizeof(*latest));
    int32_t *always_from = crn_arena_alloc(&made->arena, n, sizeof(*always_from));
    if (!latest || !always_from)
        return crn_no_memory(error);
    fill_units(made);
    fill_always(made->model, cairn_problem_graph(task->problem), always_from);
    fill_latest(made->model, always_from, latest);
    made->latest = latest;
    made->always_from = always_from;
    return CAIRN_OK;
}

cairn_status crn_frontier_graph_new(const crn_task *task, crn_frontier_graph **graph, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    *graph = NULL;
    crn_frontier_graph *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    cairn_status status = fill(task, made, error);
    if (status != CAIRN_OK) {
        crn_frontier_graph_free(made);
        return status;
    }
    *graph = made;
    return CAIRN_OK;
}

void crn_frontier_graph_free(crn_frontier_graph *graph)
{
    if (!graph)
        return;
    crn_graph_model_free(graph->model);
    crn_arena_clear(&graph->arena);
}
