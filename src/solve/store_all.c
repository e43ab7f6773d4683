/*
 * store-all: no recomputation. What a framework does when nobody asks for anything else.
 *
 * Chain: every stage saves all that its backward needs (option 0), then the backwards run. Graph: every node is computed
 * once, in order, and dropped once its last user has been issued, unless it is to be kept; the storage comes back when
 * the base and all its aliases are gone.
 *
 * The time is the least possible where every stage has one option. The memory is what it is: the peak is the
 * simulator's, and the solver succeeds from there on. For a chain it is summed up in one pass, since forward l runs beside
 * a[0], d[n] and A[1..l-1], and backward l beside a[0], d[l], A[1..l] and the weight gradients of l+1..n; a graph's list is
 * replayed. O(n) time; memory for the list alone.
 */
#include "schedule/schedule.h"
#include "solve/solver.h"

static cairn_status add(cairn_builder *builder, cairn_op_code code, int32_t index, cairn_error *error)
{
    return cairn_builder_add(builder, (cairn_op){.code = (uint8_t)code, .index = index}, error);
}

static cairn_status emit_chain(const cairn_chain *chain, cairn_builder *builder, cairn_error *error)
{
    CRN_TRY(crn_builder_reserve(builder, 2 * (int64_t)chain->stage_count, error));
    for (int32_t l = 1; l <= chain->stage_count; l++)
        CRN_TRY(add(builder, CAIRN_OP_FORWARD_SAVE, l, error));
    for (int32_t l = chain->stage_count; l >= 1; l--)
        CRN_TRY(add(builder, CAIRN_OP_BACKWARD, l, error));
    return CAIRN_OK;
}

/* What the simulator finds for that list, without the list. */
static void sum_chain(const cairn_chain *chain, int64_t fixed_bytes, int64_t *peak_bytes, int64_t *makespan_ns)
{
    const cairn_stage *last = &chain->stages[chain->stage_count - 1];
    int64_t always = fixed_bytes + chain->input_bytes, saved = 0, weights = 0;
    int64_t forwards = always + last->grad_bytes, backwards = always; /* peaks; all weight gradients to be added */
    int64_t grad_before = chain->input_grad_bytes;
    *makespan_ns = 0;
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        const cairn_stage_option *option = &stage->options[0];
        int64_t made = grad_before + stage->weight_grad_bytes, gone = stage->grad_bytes + option->saved_bytes;
        saved += option->saved_bytes;
        weights += stage->weight_grad_bytes;
        forwards = crn_max(forwards, always + last->grad_bytes + saved + crn_max(0, option->forward_workspace_bytes));
        backwards = crn_max(backwards, always + saved + stage->grad_bytes - weights +
                                           crn_max(0, crn_max(made - gone, made + option->backward_workspace_bytes)));
        *makespan_ns += option->forward_ns + option->backward_ns;
        grad_before = stage->grad_bytes;
    }
    *peak_bytes = crn_max(forwards, backwards + weights);
}

/* ---- graph ---- */

/* last[v]: the last node that reads v (an alias reads what it is an alias of), v itself where there is none. */
static void find_last_users(const cairn_graph *graph, int32_t *last)
{
    for (int32_t v = 0; v < graph->node_count; v++) {
        const cairn_node *node = &graph->nodes[v];
        last[v] = v;
        for (int32_t i = 0; i < node->dep_count; i++)
            last[node->deps[i]] = v;
        if (node->alias_of >= 0)
            last[node->alias_of] = v;
    }
}

static cairn_status drop_if_last(const cairn_graph *graph, const int32_t *last, int32_t value, int32_t user,
                                 cairn_builder *builder, cairn_error *error)
{
    if (last[value] != user || graph->nodes[value].keep)
        return CAIRN_OK;
    return add(builder, CAIRN_OP_DROP, value, error);
}

static bool is_dependency(const cairn_node *node, int32_t value)
{
    for (int32_t i = 0; i < node->dep_count; i++)
        if (node->deps[i] == value)
            return true;
    return false;
}

static cairn_status emit_node(const cairn_graph *graph, const int32_t *last, int32_t v, cairn_builder *builder,
                              cairn_error *error)
{
    const cairn_node *node = &graph->nodes[v];
    CRN_TRY(add(builder, CAIRN_OP_COMPUTE, v, error));
    for (int32_t i = 0; i < node->dep_count; i++)
        CRN_TRY(drop_if_last(graph, last, node->deps[i], v, builder, error));
    if (node->alias_of >= 0 && !is_dependency(node, node->alias_of))
        CRN_TRY(drop_if_last(graph, last, node->alias_of, v, builder, error));
    return drop_if_last(graph, last, v, v, builder, error);
}

static cairn_status emit_graph(const crn_task *task, cairn_builder *builder, cairn_error *error)
{
    const cairn_graph *graph = cairn_problem_graph(task->problem);
    cairn_allocator allocator = crn_allocator(task->env);
    size_t count = (size_t)graph->node_count;
    int32_t *last = crn_alloc(&allocator, count, sizeof(*last));
    cairn_status status = CAIRN_OK;
    if (!last)
        return crn_no_memory(error);
    find_last_users(graph, last);
    for (int32_t v = 0; status == CAIRN_OK && v < graph->node_count; v++)
        status = emit_node(graph, last, v, builder, error);
    crn_free(&allocator, last, count, sizeof(*last));
    return status;
}

/* ---- both ---- */

static cairn_status emit(const crn_task *task, cairn_builder *builder, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    return chain ? emit_chain(chain, builder, error) : emit_graph(task, builder, error);
}

static cairn_status replay_list(const crn_task *task, cairn_builder *builder, cairn_replay *replay, cairn_error *error)
{
    CRN_TRY(emit(task, builder, error));
    CRN_TRY(crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, replay, error));
    if (!replay->valid)
        return crn_fail_at(error, CAIRN_INTERNAL, replay->violation.op, NULL, "storing everything is not valid: %s",
                           replay->violation.message);
    return CAIRN_OK;
}

static cairn_status replay_graph(const crn_task *task, int64_t *peak_bytes, int64_t *makespan_ns, cairn_error *error)
{
    cairn_builder *builder;
    cairn_replay replay;
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    cairn_status status = replay_list(task, builder, &replay, error);
    cairn_builder_free(builder);
    if (status != CAIRN_OK)
        return status;
    *peak_bytes = replay.peak_bytes;
    *makespan_ns = replay.makespan_ns;
    return CAIRN_OK;
}

cairn_status crn_store_all(const crn_task *task, int64_t *peak_bytes, int64_t *makespan_ns, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    if (!chain)
        return replay_graph(task, peak_bytes, makespan_ns, error);
    sum_chain(chain, cairn_problem_info_of(task->problem)->fixed_bytes, peak_bytes, makespan_ns);
    return CAIRN_OK;
}

static cairn_status store_all_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    int64_t makespan_ns;
    (void)session;
    return crn_store_all(task, &least->bytes, &makespan_ns, error);
}

static cairn_status store_all_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                    cairn_error *error)
{
    int64_t peak_bytes, makespan_ns;
    (void)session;
    CRN_TRY(crn_store_all(task, &peak_bytes, &makespan_ns, error));
    answer->found = budget_bytes == CAIRN_NONE || peak_bytes <= budget_bytes;
    return answer->found ? emit(task, answer->builder, error) : CAIRN_OK;
}

const crn_solver crn_store_all_solver = {
    .info = {.name = "store-all",
             .takes_chains = true,
             .takes_graphs = true,
             .available = true,
             .optimal_in = "",
             .summary = "stores everything: the plain training step",
             .source = "",
             .cost = "O(n + edges)"},
    .rank = 10,
    .is_quick = true,
    .least = store_all_least,
    .solve = store_all_solve,
};
