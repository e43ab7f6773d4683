/*
 * One search over the states of graph-exact; see graph_exact.c.
 */
#include "solve/graph/exact_search.h"

/* Limit on moves times nodes of a search without a time limit: it takes about twelve seconds. */
#define WORK_MAX ((int64_t)2500000000)
enum { POLL_EVERY = 4096 };

/* ---- the graph ---- */

/* Sets that do not depend on the budget. */
static void fill_sets(crn_exact_graph *s)
{
    const crn_graph_model *model = s->model;
    int32_t n = model->node_count;
    for (int32_t v = 0; v < n; v++) {
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
            s->reads[v] = crn_exact_with(s->reads[v], model->dep[i]);
        s->members[model->root[v]] = crn_exact_with(s->members[model->root[v]], v);
    }
    for (int32_t t = n - 1; t >= 0; t--) { /* what t reads, and what serves after it or to compute that */
        crn_exact_set itself = crn_exact_with((crn_exact_set){{0}}, t);
        s->useful[t] = crn_exact_without(crn_exact_both(s->useful[t + 1], &s->reads[t]), &itself);
        for (int32_t v = t - 1; v >= 0; v--)
            if (crn_exact_has(&s->useful[t], v))
                s->useful[t] = crn_exact_both(s->useful[t], &s->reads[v]);
    }
    for (int32_t t = 0; t <= n; t++)
        for (int32_t v = 0; v < t; v++)
            if (model->keep[model->root[v]] && model->keep_from[model->root[v]] < t)
                s->kept[t] = crn_exact_with(s->kept[t], v);
}

static void order_storages(crn_exact_graph *s)
{
    const crn_graph_model *model = s->model;
    for (int32_t v = 0; v < model->node_count; v++) {
        if (model->root[v] != v || model->bytes[v] == 0)
            continue;
        int32_t at = s->sized_count++;
        for (; at > 0 && model->bytes[s->by_bytes[at - 1]] < model->bytes[v]; at--)
            s->by_bytes[at] = s->by_bytes[at - 1];
        s->by_bytes[at] = v;
    }
}

void crn_exact_graph_init(crn_exact_graph *graph, const crn_graph_model *model)
{
    graph->model = model;
    fill_sets(graph);
    order_storages(graph);
}

/* ---- moves ---- */

static int64_t held_bytes(const crn_exact_graph *s, const crn_exact_set *held)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < s->sized_count; i++)
        if (crn_exact_has(held, s->by_bytes[i]))
            bytes += s->model->bytes[s->by_bytes[i]];
    return bytes;
}

/* A move: node v is computed after some storages have been dropped. */
typedef struct move {
    int32_t node, computed; /* and how many have been then */
    int64_t spent;
} move;

static bool is_told_to_stop(const crn_exact_run *r)
{
    int64_t total_ns = r->graph->model->total_cost;
    int64_t best_ns = r->below_ns < INT64_MAX ? total_ns + r->below_ns : CAIRN_NONE;
    int64_t limit = crn_work_limit(r->task, r->moves_max);
    const cairn_progress progress = {"exact search", r->moves, limit > 0 ? limit : CAIRN_NONE, best_ns,
                                     total_ns + r->bound_ns};
    return crn_should_stop(r->task, &progress);
}

/* A state that was not kept may have been on the way to the best one. */
static bool is_full(const crn_exact_run *r)
{
    return r->states.failed || r->states.count >= r->states_max;
}

/* The least that is spent by way of a move that leaves these handles; INT64_MAX = not less than what must be beaten. */
static int64_t bound_of(crn_exact_run *r, const move *m, const crn_exact_set *held)
{
    r->halted =
        r->halted || ++r->moves > r->moves_max || is_full(r) || (r->moves % POLL_EVERY == 0 && is_told_to_stop(r));
    if (r->halted)
        return INT64_MAX;
    if (!r->suffix)
        return 0;
    int64_t rest_ns = crn_graph_suffix_rest(r->suffix, m->computed, held->word);
    int64_t bound_ns = crn_add_saturating(m->spent, rest_ns);
    return bound_ns < r->below_ns ? bound_ns : INT64_MAX;
}

static void arrive(crn_exact_run *r, const move *m, crn_exact_set held, int64_t bound_ns)
{
    const crn_exact_graph *s = r->graph;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        held.word[i] &= s->useful[m->computed].word[i] | s->kept[m->computed].word[i];
    crn_exact_state way = {
        .held = held, .spent = m->spent, .parent = r->from, .computed = (uint8_t)m->computed, .node = (uint8_t)m->node};
    crn_exact_reach(&r->states, &way, bound_ns, s->model->node_count - m->computed);
}

/* All ways to drop candidates from number i on so that `over` bytes go and none could stay. */
static void drop_some(crn_exact_run *r, const move *m, int32_t i, int64_t over, const crn_exact_set *held)
{
    const crn_exact_graph *s = r->graph;
    for (; i < r->candidate_count && r->bytes_from[i] >= over && !r->halted; i++) {
        int32_t root = r->candidates[i];
        crn_exact_set left = crn_exact_without(*held, &s->members[root]);
        int64_t bound_ns = bound_of(r, m, &left);
        if (bound_ns == INT64_MAX)
            continue;
        if (s->model->bytes[root] >= over)
            arrive(r, m, left, bound_ns);
        else
            drop_some(r, m, i + 1, over - s->model->bytes[root], &left);
    }
}

/* The storages that may be dropped: all that are resident, except those that the node reads, and outputs. */
static void find_candidates(crn_exact_run *r, int32_t node)
{
    const crn_exact_graph *s = r->graph;
    r->candidate_count = 0;
    for (int32_t i = 0; i < s->sized_count; i++) {
        int32_t root = s->by_bytes[i];
        if (crn_exact_has(&r->at->held, root) && !crn_exact_has(&s->kept[r->at->computed], root) &&
            !crn_exact_meet(&s->members[root], &s->reads[node]))
            r->candidates[r->candidate_count++] = root;
    }
    r->bytes_from[r->candidate_count] = 0;
    for (int32_t i = r->candidate_count - 1; i >= 0; i--)
        r->bytes_from[i] = r->bytes_from[i + 1] + s->model->bytes[r->candidates[i]];
}

static void try_compute(crn_exact_run *r, int32_t v, int64_t bytes)
{
    const crn_exact_graph *s = r->graph;
    const crn_graph_model *model = s->model;
    bool is_first = v == r->at->computed;
    move m = {.node = v, .computed = r->at->computed + is_first, .spent = r->at->spent};
    if (!crn_exact_contains(&r->at->held, &s->reads[v]) || (!is_first && model->once_node[v]))
        return;
    if (!is_first && r->suffix)
        m.spent = crn_add_saturating(m.spent, model->cost[v]);
    crn_exact_set held = crn_exact_with(r->at->held, v);
    int64_t over, needed = crn_add_saturating(crn_add_saturating(bytes, model->bytes[v]), model->extra[v]);
    if (!crn_sub(needed, r->budget_bytes, &over))
        over = INT64_MAX;
    int64_t bound_ns = bound_of(r, &m, &held);
    if (bound_ns == INT64_MAX)
        return;
    if (over <= 0) {
        arrive(r, &m, held, bound_ns);
    } else {
        find_candidates(r, v);
        drop_some(r, &m, 0, over, &held);
    }
}

static void expand(crn_exact_run *r, int32_t from)
{
    const crn_exact_graph *s = r->graph;
    crn_exact_state state = r->states.states[from]; /* the array may move */
    r->from = from;
    r->at = &state;
    int64_t bytes = held_bytes(s, &state.held);
    crn_exact_set gone = crn_exact_without(s->useful[state.computed], &state.held);
    for (int32_t v = 0; v < state.computed; v++)
        if (crn_exact_has(&gone, v))
            try_compute(r, v, bytes);
    try_compute(r, state.computed, bytes);
    r->at = NULL;
}

/* Best bound first, so that the first complete state is the best. */
static crn_exact_ending search_states(crn_exact_run *r)
{
    crn_exact_state start = {.parent = -1};
    move none = {0};
    int64_t bound_ns = bound_of(r, &none, &start.held);
    if (bound_ns != INT64_MAX)
        crn_exact_reach(&r->states, &start, bound_ns, r->graph->model->node_count);
    while (!r->halted && !r->states.failed) {
        r->last = crn_exact_next(&r->states, &bound_ns);
        if (r->last < 0)
            return CRN_EXACT_EXHAUSTED;
        r->bound_ns = crn_max(r->bound_ns, bound_ns);
        if (r->states.states[r->last].computed == r->graph->model->node_count)
            return CRN_EXACT_FOUND;
        expand(r, r->last);
    }
    if (crn_should_stop(r->task, NULL))
        return CRN_EXACT_STOPPED;
    return is_full(r) ? CRN_EXACT_FULL : CRN_EXACT_LIMITED;
}

/* ---- operations ---- */

static cairn_status emit_drops(cairn_builder *builder, const crn_exact_set *handles, int32_t count, cairn_error *error)
{
    for (int32_t v = 0; v < count; v++)
        if (crn_exact_has(handles, v))
            CRN_TRY(cairn_builder_add(builder, (cairn_op){CAIRN_OP_DROP, 0, 0, v}, error));
    return CAIRN_OK;
}

/* What the node reads is dropped after it; so is the node itself where it is no use. */
static cairn_status emit_move(const crn_exact_graph *s, const crn_exact_state *from, const crn_exact_state *to,
                              cairn_builder *builder, cairn_error *error)
{
    int32_t n = s->model->node_count;
    crn_exact_set read = {{0}};
    for (int32_t v = 0; v < n; v++)
        if (crn_exact_has(&s->reads[to->node], v))
            read = crn_exact_both(read, &s->members[s->model->root[v]]);
    crn_exact_set dropped = crn_exact_without(from->held, &to->held), before = crn_exact_without(dropped, &read);
    crn_exact_set made = crn_exact_with(dropped, to->node), after = crn_exact_without(made, &before);
    after = crn_exact_without(after, &to->held);
    CRN_TRY(emit_drops(builder, &before, n, error));
    CRN_TRY(cairn_builder_add(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, to->node}, error));
    return emit_drops(builder, &after, n, error);
}

cairn_status crn_exact_emit(const crn_exact_run *r, cairn_builder *builder, cairn_error *error)
{
    const crn_exact_state *states = r->states.states;
    int32_t length = 0;
    for (int32_t at = r->last; states[at].parent >= 0; at = states[at].parent)
        length++;
    int32_t *path = crn_alloc(&r->states.allocator, (size_t)length + 1, sizeof(*path));
    if (!path)
        return crn_no_memory(error);
    int32_t i = length;
    for (int32_t at = r->last; at >= 0; at = states[at].parent)
        path[i--] = at;
    cairn_status status = CAIRN_OK;
    for (i = 1; i <= length && status == CAIRN_OK; i++)
        status = emit_move(r->graph, &states[path[i - 1]], &states[path[i]], builder, error);
    crn_free(&r->states.allocator, path, (size_t)length + 1, sizeof(*path));
    return status;
}

/* ---- from beginning to end ---- */

/* A quarter of what may be allocated is for states. */
int64_t crn_exact_states_max(const crn_task *task)
{
    return crn_min(crn_memory_limit(task->settings) / 4 / CRN_EXACT_STATE_BYTES, INT32_MAX / 4);
}

int64_t crn_exact_moves(const crn_task *task)
{
    int64_t iterations = task->settings->iterations;
    if (iterations >= 0)
        return crn_mul_saturating(iterations, CRN_EXACT_MOVES_EACH);
    return task->deadline_ns != CAIRN_NONE ? INT64_MAX
                                           : WORK_MAX / (cairn_problem_graph(task->problem)->node_count + 1);
}

/* Without memory for more states it ends like any search that is cut short: what is known by then holds. */
crn_exact_ending crn_exact_search(crn_exact_run *r)
{
    r->states_max = crn_exact_states_max(r->task);
    r->moves_max = crn_exact_moves(r->task);
    crn_exact_states_init(&r->states, crn_allocator(r->task->env));
    crn_exact_ending how = search_states(r);
    crn_exact_states_close(&r->states);
    return how;
}
