#include "solve/graph/graph_replan.h"

cairn_status crn_replan_new(const crn_graph_model *model, crn_arena *arena, int32_t capacity, crn_replan *replan,
                            cairn_error *error)
{
    size_t n = (size_t)model->node_count;
    *replan = (crn_replan){.model = model};
    replan->present = crn_arena_alloc(arena, n, sizeof(*replan->present));
    replan->stack = crn_arena_alloc(arena, n + 1, sizeof(*replan->stack));
    replan->cursor = crn_arena_alloc(arena, n + 1, sizeof(*replan->cursor));
    if (!replan->present || !replan->stack || !replan->cursor || !crn_sequence_new(arena, capacity, &replan->sequence))
        return crn_no_memory(error);
    return CAIRN_OK;
}

static bool push(crn_replan *replan, int32_t v)
{
    if (replan->sequence.count == replan->sequence.capacity)
        return false;
    replan->sequence.node[replan->sequence.count++] = v;
    return true;
}

void crn_replan_find_backward(crn_replan *replan, const cairn_graph *graph, crn_sequence_eval *eval)
{
    crn_sequence_store_all(replan->model, &replan->sequence);
    crn_sequence_judge(eval, &replan->sequence);
    replan->backward_begin = crn_sequence_backward_begin(graph, eval);
}

bool crn_replan_forward(crn_replan *replan, const bool *kept)
{
    replan->sequence.count = 0;
    for (int32_t v = 0; v < replan->backward_begin; v++)
        if (!push(replan, v))
            return false;
    for (int32_t s = 0; s < replan->model->node_count; s++)
        replan->present[s] = s >= replan->backward_begin || kept[s] || crn_always_stays(replan->model, s);
    return true;
}

static int32_t lacking(const crn_replan *replan, int32_t v, int32_t *cursor)
{
    const crn_graph_model *model = replan->model;
    for (; *cursor < model->dep_begin[v + 1]; ++*cursor)
        if (!replan->present[model->root[model->dep[*cursor]]])
            return model->root[model->dep[*cursor]];
    return -1;
}

bool crn_replan_require(crn_replan *replan, int32_t v)
{
    int32_t depth = 0;
    replan->stack[depth] = v;
    replan->cursor[depth++] = replan->model->dep_begin[v];
    while (depth > 0) {
        int32_t top = replan->stack[depth - 1], missing = lacking(replan, top, &replan->cursor[depth - 1]);
        if (missing >= 0) {
            replan->stack[depth] = missing;
            replan->cursor[depth++] = replan->model->dep_begin[missing];
            continue;
        }
        if (!push(replan, top))
            return false;
        replan->present[replan->model->root[top]] = true;
        depth--;
    }
    return true;
}

bool crn_replan_make(crn_replan *replan, const bool *kept)
{
    bool fits = crn_replan_forward(replan, kept);
    for (int32_t v = replan->backward_begin; fits && v < replan->model->node_count; v++)
        fits = crn_replan_require(replan, v);
    return fits;
}
