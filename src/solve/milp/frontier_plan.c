#include "solve/milp/frontier_plan.h"

#include <string.h>

cairn_status crn_frontier_plan_new(const crn_frontier_graph *graph, crn_arena *arena, crn_frontier_plan *plan,
                                   cairn_error *error)
{
    size_t n = (size_t)graph->count;
    *plan = (crn_frontier_plan){.graph = graph};
    plan->held = crn_arena_alloc_zero(arena, (n + 1) * n, sizeof(*plan->held));
    plan->computed = crn_arena_alloc_zero(arena, n * n, sizeof(*plan->computed));
    plan->stack = crn_arena_alloc(arena, n, sizeof(*plan->stack));
    plan->last = crn_arena_alloc(arena, n, sizeof(*plan->last));
    plan->there = crn_arena_alloc(arena, n, sizeof(*plan->there));
    if (!plan->held || !plan->computed || !plan->stack || !plan->last || !plan->there)
        return crn_no_memory(error);
    return CAIRN_OK;
}

/* ---- completing ---- */

/* What must not run twice is held as long as it can be read; a handle is held only with its storage. */
static void hold_what_must_be(crn_frontier_plan *plan)
{
    const crn_frontier_graph *graph = plan->graph;
    for (int32_t t = 0; t <= graph->count; t++) {
        bool *held = crn_plan_row(plan, plan->held, t);
        for (int32_t v = 0; v < graph->count; v++) {
            held[v] = v < t && (held[v] || t >= graph->always_from[v] || (graph->once[v] && t <= graph->latest[v]));
            if (held[v] && (t >= graph->always_from[v] || graph->once[v]))
                held[graph->root[v]] = true;
        }
        for (int32_t v = 0; v < graph->count; v++)
            held[v] = held[v] && held[graph->root[v]];
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
    const crn_frontier_graph *graph = s->plan->graph;
    if (s->held[v]) {
        s->needed[v] = s->needed[graph->root[v]] = true;
    } else if (!s->computed[v]) {
        s->possible = s->possible && (v == s->t || !graph->once[v]);
        s->computed[v] = true;
        s->plan->stack[s->depth++] = v;
    }
}

static bool complete_stage(crn_frontier_plan *plan, int32_t t)
{
    const crn_frontier_graph *graph = plan->graph;
    const bool *next = crn_plan_row(plan, plan->held, t + 1);
    size_t row_bytes = (size_t)graph->count * sizeof(bool);
    stage s = {plan, t, 0, crn_plan_row(plan, plan->held, t), crn_plan_row(plan, plan->computed, t), plan->there, true};
    memset(s.computed, 0, row_bytes);
    memset(s.needed, 0, row_bytes);
    want(&s, t);
    for (int32_t v = 0; v < t; v++)
        if (next[v])
            want(&s, v);
    while (s.depth > 0) {
        int32_t u = plan->stack[--s.depth];
        for (int32_t i = graph->dep_begin[u]; i < graph->dep_begin[u + 1]; i++)
            want(&s, graph->dep[i]);
    }
    memcpy(s.held, s.needed, row_bytes);
    return s.possible;
}

bool crn_frontier_plan_complete(crn_frontier_plan *plan)
{
    bool possible = true;
    hold_what_must_be(plan);
    for (int32_t t = plan->graph->count - 1; possible && t >= 0; t--)
        possible = complete_stage(plan, t);
    return possible;
}

/* ---- reading ---- */

void crn_frontier_plan_read(crn_frontier_plan *plan, const cairn_op *ops, int64_t count)
{
    const crn_frontier_graph *graph = plan->graph;
    size_t row_bytes = (size_t)graph->count * sizeof(bool);
    int32_t next = 0; /* the next node to be computed for the first time */
    bool begun = false;
    memset(plan->there, 0, row_bytes);
    memset(plan->held, 0, ((size_t)graph->count + 1) * row_bytes);
    for (int64_t i = 0; i < count; i++) {
        int32_t v = ops[i].index;
        if (ops[i].code != CAIRN_OP_COMPUTE) {
            plan->there[v] = plan->there[v] && ops[i].code != CAIRN_OP_DROP;
            continue;
        }
        if (!begun && next < graph->count)
            memcpy(crn_plan_row(plan, plan->held, next), plan->there, row_bytes);
        begun = v != next;
        next += v == next;
        plan->there[v] = true;
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
    out->plan->there[node] = code == CAIRN_OP_COMPUTE;
    return cairn_builder_add(out->builder, (cairn_op){(uint8_t)code, 0, 0, node}, out->error);
}

/* Drops a storage with all its handles where node u was the last in the stage to touch it. */
static cairn_status release(emission *out, int32_t storage, int32_t u)
{
    const crn_frontier_graph *graph = out->plan->graph;
    if (out->plan->last[storage] != u || out->next[storage])
        return CAIRN_OK;
    for (int32_t v = storage; v < graph->count; v++)
        if (graph->root[v] == storage && out->plan->there[v])
            CRN_TRY(put(out, CAIRN_OP_DROP, v));
    return CAIRN_OK;
}

static void find_last_readers(crn_frontier_plan *plan, const bool *computed, int32_t t)
{
    const crn_frontier_graph *graph = plan->graph;
    for (int32_t u = 0; u <= t; u++) {
        if (!computed[u])
            continue;
        plan->last[graph->root[u]] = u;
        for (int32_t i = graph->dep_begin[u]; i < graph->dep_begin[u + 1]; i++)
            plan->last[graph->root[graph->dep[i]]] = u;
    }
}

/* An alias whose handle outlived the plan's need for it is there already: its storage was held all the time. */
static cairn_status emit_stage(emission *out, int32_t t)
{
    crn_frontier_plan *plan = out->plan;
    const crn_frontier_graph *graph = plan->graph;
    const bool *computed = crn_plan_row(plan, plan->computed, t);
    out->next = crn_plan_row(plan, plan->held, t + 1);
    find_last_readers(plan, computed, t);
    for (int32_t u = 0; u <= t; u++) {
        if (!computed[u])
            continue;
        if (!plan->there[u])
            CRN_TRY(put(out, CAIRN_OP_COMPUTE, u));
        for (int32_t i = graph->dep_begin[u]; i < graph->dep_begin[u + 1]; i++)
            CRN_TRY(release(out, graph->root[graph->dep[i]], u));
        CRN_TRY(release(out, graph->root[u], u));
    }
    return CAIRN_OK;
}

cairn_status crn_frontier_plan_emit(crn_frontier_plan *plan, cairn_builder *builder, cairn_error *error)
{
    emission out = {.plan = plan, .builder = builder, .error = error};
    memset(plan->there, 0, (size_t)plan->graph->count * sizeof(bool));
    for (int32_t t = 0; t < plan->graph->count; t++)
        CRN_TRY(emit_stage(&out, t));
    return CAIRN_OK;
}
