#include "solve/milp/frontier_plan.h"

#include <string.h>

cairn_status crn_frontier_plan_new(const crn_frontier_graph *graph, crn_arena *arena, crn_frontier_plan *plan,
                                   cairn_error *error)
{
    size_t n = (size_t)graph->model->node_count;
    *plan = (crn_frontier_plan){.graph = graph};
    plan->held = crn_arena_alloc_zero(arena, (n + 1) * n, sizeof(*plan->held));
    plan->computed = crn_arena_alloc_zero(arena, n * n, sizeof(*plan->computed));
    plan->stack = crn_arena_alloc(arena, n, sizeof(*plan->stack));
    plan->last = crn_arena_alloc(arena, n, sizeof(*plan->last));
    plan->exists = crn_arena_alloc(arena, n, sizeof(*plan->exists));
    if (!plan->held || !plan->computed || !plan->stack || !plan->last || !plan->exists)
        return crn_no_memory(error);
    return CAIRN_OK;
}

/* ---- completing ---- */

/* What must not run twice is held as long as it can be read; a handle is held only with its storage. */
static void hold_what_must_be(crn_frontier_plan *plan)
{
    const crn_frontier_graph *graph = plan->graph;
    const crn_graph_model *model = graph->model;
    for (int32_t t = 0; t <= model->node_count; t++) {
        bool *held = crn_plan_row(plan, plan->held, t);
        for (int32_t v = 0; v < model->node_count; v++) {
            held[v] =
                v < t && (held[v] || t >= graph->always_from[v] || (model->once_node[v] && t <= graph->latest[v]));
            if (held[v] && (t >= graph->always_from[v] || model->once_node[v]))
                held[model->root[v]] = true;
        }
        for (int32_t v = 0; v < model->node_count; v++)
            held[v] = held[v] && held[model->root[v]];
    }
}

/* One stage: from what the next one wants (its held row) to what is computed and what of held is needed. */
typedef struct stage {
    crn_frontier_plan *plan;
    int32_t t, depth;
    bool *held, *computed, *needed;
    bool possible;
} stage;

static void want(stage *s, int32_t v)
{
    const crn_graph_model *model = s->plan->graph->model;
    if (s->held[v]) {
        s->needed[v] = s->needed[model->root[v]] = true;
    } else if (!s->computed[v]) {
        s->possible = s->possible && (v == s->t || !model->once_node[v]);
        s->computed[v] = true;
        s->plan->stack[s->depth++] = v;
    }
}

static bool complete_stage(crn_frontier_plan *plan, int32_t t)
{
    const crn_graph_model *model = plan->graph->model;
    const bool *next = crn_plan_row(plan, plan->held, t + 1);
    size_t row_bytes = (size_t)model->node_count * sizeof(bool);
    stage s = {.plan = plan,
               .t = t,
               .held = crn_plan_row(plan, plan->held, t),
               .computed = crn_plan_row(plan, plan->computed, t),
               .needed = plan->exists,
               .possible = true};
    memset(s.computed, 0, row_bytes);
    memset(s.needed, 0, row_bytes);
    want(&s, t);
    for (int32_t v = 0; v < t; v++)
        if (next[v])
            want(&s, v);
    while (s.depth > 0) {
        int32_t u = plan->stack[--s.depth];
        for (int32_t i = model->dep_begin[u]; i < model->dep_begin[u + 1]; i++)
            want(&s, model->dep[i]);
    }
    memcpy(s.held, s.needed, row_bytes);
    return s.possible;
}

bool crn_frontier_plan_complete(crn_frontier_plan *plan)
{
    bool possible = true;
    hold_what_must_be(plan);
    for (int32_t t = plan->graph->model->node_count - 1; possible && t >= 0; t--)
        possible = complete_stage(plan, t);
    return possible;
}

/* ---- reading ---- */

void crn_frontier_plan_read(crn_frontier_plan *plan, const cairn_op *ops, int64_t count)
{
    const crn_graph_model *model = plan->graph->model;
    size_t row_bytes = (size_t)model->node_count * sizeof(bool);
    int32_t next = 0; /* the next node to be computed for the first time */
    bool begun = false;
    memset(plan->exists, 0, row_bytes);
    memset(plan->held, 0, ((size_t)model->node_count + 1) * row_bytes);
    for (int64_t i = 0; i < count; i++) {
        int32_t v = ops[i].index;
        if (ops[i].code != CAIRN_OP_COMPUTE) {
            plan->exists[v] = plan->exists[v] && ops[i].code != CAIRN_OP_DROP;
            continue;
        }
        if (!begun && next < model->node_count)
            memcpy(crn_plan_row(plan, plan->held, next), plan->exists, row_bytes);
        begun = v != next;
        next += v == next;
        plan->exists[v] = true;
    }
}

/* ---- emitting ---- */

typedef struct emission {
    crn_frontier_plan *plan;
    cairn_builder *builder;
    cairn_error *error;
    const bool *next; /* held by the next stage */
} emission;

static cairn_status put(emission *out, cairn_op_code code, int32_t node)
{
    out->plan->exists[node] = code == CAIRN_OP_COMPUTE;
    return cairn_builder_add(out->builder, (cairn_op){(uint8_t)code, 0, 0, node}, out->error);
}

/* Drops a storage with all its handles where node u was the last in the stage to touch it. */
static cairn_status release(emission *out, int32_t storage, int32_t u)
{
    const crn_graph_model *model = out->plan->graph->model;
    if (out->plan->last[storage] != u || out->next[storage])
        return CAIRN_OK;
    for (int32_t v = storage; v < model->node_count; v++)
        if (model->root[v] == storage && out->plan->exists[v])
            CRN_TRY(put(out, CAIRN_OP_DROP, v));
    return CAIRN_OK;
}

static void find_last_readers(crn_frontier_plan *plan, const bool *computed, int32_t t)
{
    const crn_graph_model *model = plan->graph->model;
    for (int32_t u = 0; u <= t; u++) {
        if (!computed[u])
            continue;
        plan->last[model->root[u]] = u;
        for (int32_t i = model->dep_begin[u]; i < model->dep_begin[u + 1]; i++)
            plan->last[model->root[model->dep[i]]] = u;
    }
}

/* An alias whose handle outlived the plan's need for it is there already: its storage was held all the time. */
static cairn_status emit_stage(emission *out, int32_t t)
{
    crn_frontier_plan *plan = out->plan;
    const crn_graph_model *model = plan->graph->model;
    const bool *computed = crn_plan_row(plan, plan->computed, t);
    out->next = crn_plan_row(plan, plan->held, t + 1);
    find_last_readers(plan, computed, t);
    for (int32_t u = 0; u <= t; u++) {
        if (!computed[u])
            continue;
        if (!plan->exists[u])
            CRN_TRY(put(out, CAIRN_OP_COMPUTE, u));
        for (int32_t i = model->dep_begin[u]; i < model->dep_begin[u + 1]; i++)
            CRN_TRY(release(out, model->root[model->dep[i]], u));
        CRN_TRY(release(out, model->root[u], u));
    }
    return CAIRN_OK;
}

cairn_status crn_frontier_plan_emit(crn_frontier_plan *plan, cairn_builder *builder, cairn_error *error)
{
    emission out = {.plan = plan, .builder = builder, .error = error};
    memset(plan->exists, 0, (size_t)plan->graph->model->node_count * sizeof(bool));
    for (int32_t t = 0; t < plan->graph->model->node_count; t++)
        CRN_TRY(emit_stage(&out, t));
    return CAIRN_OK;
}
