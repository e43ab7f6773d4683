/*
 * A problem at another size: sizes, workspaces and times times a fraction, each rounded up, fixed bytes as they are.
 *
 * This is how a problem that was measured at one batch is taken to another: activations and the work on them grow with
 * the batch, parameters do not. Rounding up is monotone, so what a valid problem promises (saved_bytes at least
 * output_bytes) still holds, and no size is smaller than the exact quotient. O(size) time and memory.
 */
#include "base/checked.h"
#include "base/failure.h"
#include "problem/problem.h"

typedef struct scaling {
    crn_arena arena;
    int64_t multiplier, divisor; /* both at least 1 */
    bool overflow;
} scaling;

/* ceil(value * multiplier / divisor): for negative values, that is towards 0. */
static int64_t scaled(scaling *s, int64_t value)
{
    crn_wide magnitude = value < 0 ? -(crn_wide)value : (crn_wide)value;
    crn_wide product = magnitude * (uint64_t)s->multiplier;
    crn_wide quotient = (product + (value < 0 ? 0 : (uint64_t)s->divisor - 1)) / (uint64_t)s->divisor;
    if (quotient > (crn_wide)INT64_MAX) {
        s->overflow = true;
        return 0;
    }
    return value < 0 ? -(int64_t)quotient : (int64_t)quotient;
}

static cairn_status fail_overflow(const scaling *s, int64_t index, const char *what, cairn_error *error)
{
    return crn_fail_at(error, CAIRN_OVERFLOW, index, NULL, "%lld/%lld times a size or time of %s %lld passes 2^63 - 1",
                       (long long)s->multiplier, (long long)s->divisor, what, (long long)index);
}

/* ---- chains ---- */

static const cairn_stage_option *scaled_options(scaling *s, const cairn_stage *stage)
{
    cairn_stage_option *options = crn_arena_alloc(&s->arena, (size_t)stage->option_count, sizeof(*options));
    for (int32_t k = 0; options && k < stage->option_count; k++) {
        options[k] = stage->options[k];
        options[k].saved_bytes = scaled(s, options[k].saved_bytes);
        options[k].forward_ns = scaled(s, options[k].forward_ns);
        options[k].backward_ns = scaled(s, options[k].backward_ns);
        options[k].forward_workspace_bytes = scaled(s, options[k].forward_workspace_bytes);
        options[k].backward_workspace_bytes = scaled(s, options[k].backward_workspace_bytes);
    }
    return options;
}

static cairn_status scale_stage(scaling *s, cairn_stage *stage, int32_t l, cairn_error *error)
{
    stage->output_bytes = scaled(s, stage->output_bytes);
    stage->grad_bytes = scaled(s, stage->grad_bytes);
    stage->weight_grad_bytes = scaled(s, stage->weight_grad_bytes);
    stage->forward_only_ns = scaled(s, stage->forward_only_ns);
    stage->forward_only_workspace_bytes = scaled(s, stage->forward_only_workspace_bytes);
    stage->options = scaled_options(s, stage);
    if (!stage->options)
        return crn_no_memory(error);
    return s->overflow ? fail_overflow(s, l, "stage", error) : CAIRN_OK;
}

static cairn_status scale_chain(scaling *s, const cairn_env *env, const cairn_problem *from, cairn_problem **to,
                                cairn_error *error)
{
    cairn_chain chain = *cairn_problem_chain(from);
    cairn_stage *stages = crn_arena_alloc(&s->arena, (size_t)chain.stage_count, sizeof(*stages));
    if (!stages)
        return crn_no_memory(error);
    chain.input_bytes = scaled(s, chain.input_bytes);
    chain.input_grad_bytes = scaled(s, chain.input_grad_bytes);
    for (int32_t i = 0; i < chain.stage_count; i++) {
        stages[i] = chain.stages[i];
        CRN_TRY(scale_stage(s, &stages[i], i + 1, error));
    }
    chain.stages = stages;
    return cairn_problem_new_chain(env, &chain, cairn_problem_info_of(from), to, error);
}

/* ---- graphs ---- */

static cairn_status scale_graph(scaling *s, const cairn_env *env, const cairn_problem *from, cairn_problem **to,
                                cairn_error *error)
{
    cairn_graph graph = *cairn_problem_graph(from);
    cairn_node *nodes = crn_arena_alloc(&s->arena, (size_t)graph.node_count, sizeof(*nodes));
    if (!nodes)
        return crn_no_memory(error);
    for (int32_t v = 0; v < graph.node_count; v++) {
        nodes[v] = graph.nodes[v];
        nodes[v].cost_ns = scaled(s, nodes[v].cost_ns);
        nodes[v].bytes = scaled(s, nodes[v].bytes);
        nodes[v].workspace_bytes = scaled(s, nodes[v].workspace_bytes);
        if (s->overflow)
            return fail_overflow(s, v, "node", error);
    }
    graph.nodes = nodes;
    return cairn_problem_new_graph(env, &graph, cairn_problem_info_of(from), to, error);
}

cairn_status cairn_problem_scale(const cairn_env *env, const cairn_problem *problem, int64_t multiplier,
                                 int64_t divisor, cairn_problem **made, cairn_error *error)
{
    scaling s = {.multiplier = multiplier, .divisor = divisor};
    *made = NULL;
    if (multiplier < 1 || divisor < 1)
        return crn_fail(error, CAIRN_BAD_INPUT,
                        "a problem is scaled by a fraction of integers of at least 1, not %lld/%lld",
                        (long long)multiplier, (long long)divisor);
    crn_arena_init(&s.arena, crn_allocator(env));
    cairn_status status = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN
                              ? scale_chain(&s, env, problem, made, error)
                              : scale_graph(&s, env, problem, made, error);
    crn_arena_clear(&s.arena);
    return status;
}
