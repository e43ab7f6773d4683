/*
 * brute-graph: the optimum over all schedules of a tiny graph without transfers, by exhaustive search. The oracle.
 *
 * State     How many nodes were computed for the first time, and which handles exist, grouped by the storage that they
 *           share: a base computed again while an alias holds the old storage gets a new one.
 * Moves     compute: the next node, or an earlier one that has no handle and may run again, when its dependencies have
 *           handles; drop: one handle, unless it is the last copy of an output.
 * Search    Dijkstra's algorithm. By time, under a budget, for the answer; by peak ("widest path") for the least memory.
 * Cost      Exponential: at most (T + 1)^(T + 1) states; with NODES_MAX nodes some milliseconds, half a second where many
 *           empty aliases can share storages in all ways. Refused above.
 * Optimal   In everything that the format allows without a machine.
 */
#include <stdlib.h>
#include <string.h>

#include "base/queue.h"
#include "problem/problem.h"
#include "solve/solver.h"

enum { NODES_MAX = 10, LABEL_BITS = 4, TABLE_MIN = 1 << 12, POLL_EVERY = 4096 };

/* Labels of handles, LABEL_BITS each from the lowest on: 0 = none, else 1 + the least node in the same storage. */
typedef uint64_t brute_key;

typedef struct brute_state {
    brute_key key;
    int64_t reached; /* least time, or least peak, at which it is reached */
    int32_t parent;
    cairn_op op; /* that led here from the parent */
    bool settled;
} brute_state;

typedef struct brute_search {
    cairn_allocator allocator;
    const cairn_graph *graph;
    int64_t fixed_bytes, budget_bytes; /* CAIRN_NONE = look for the least peak */
    brute_state *states;
    int32_t count, capacity;
    int32_t *table; /* open addressing: state number, -1 = free */
    int32_t table_size;
    crn_queue queue; /* of states; one that was settled since may still be in it */
    bool failed, stopped;
} brute_search;

static int label_of(brute_key key, int32_t v)
{
    return (int)(key >> (LABEL_BITS * v) & ((1u << LABEL_BITS) - 1));
}

static brute_key with_label(brute_key key, int32_t v, int label)
{
    brute_key mask = (brute_key)((1u << LABEL_BITS) - 1) << (LABEL_BITS * v);
    return (key & ~mask) | (brute_key)(unsigned)label << (LABEL_BITS * v);
}

static int computed_of(brute_key key)
{
    return label_of(key, NODES_MAX);
}

/* Labels become the least node of each storage again after handles came or went. */
static brute_key canonical(const cairn_graph *graph, brute_key key)
{
    brute_key result = with_label(0, NODES_MAX, computed_of(key));
    for (int32_t v = 0; v < graph->node_count; v++)
        for (int32_t u = 0; u <= v && label_of(key, v); u++)
            if (label_of(key, u) == label_of(key, v)) {
                result = with_label(result, v, u + 1);
                break;
            }
    return result;
}

static int64_t resident_bytes(const brute_search *b, brute_key key)
{
    int64_t bytes = b->fixed_bytes;
    for (int32_t v = 0; v < b->graph->node_count; v++)
        if (label_of(key, v) == v + 1)
            bytes = crn_add_saturating(bytes, b->graph->nodes[crn_graph_root(b->graph, v)].bytes);
    return bytes;
}

static size_t slot_of(const brute_search *b, brute_key key)
{
    size_t mask = (size_t)b->table_size - 1;
    size_t at = (size_t)((key * 0x9e3779b97f4a7c15u) >> 20) & mask;
    while (b->table[at] >= 0 && b->states[b->table[at]].key != key)
        at = (at + 1) & mask;
    return at;
}

static bool grow_table(brute_search *b)
{
    int32_t size = b->table_size ? 2 * b->table_size : TABLE_MIN;
    crn_free(&b->allocator, b->table, (size_t)b->table_size, sizeof(*b->table));
    b->table = crn_alloc(&b->allocator, (size_t)size, sizeof(*b->table));
    b->table_size = b->table ? size : 0;
    if (!b->table)
        return false;
    memset(b->table, 0xff, (size_t)size * sizeof(*b->table));
    for (int32_t i = 0; i < b->count; i++)
        b->table[slot_of(b, b->states[i].key)] = i;
    return true;
}

static bool grow_states(brute_search *b)
{
    int32_t capacity = b->capacity ? 2 * b->capacity : TABLE_MIN;
    brute_state *states = crn_realloc(&b->allocator, b->states, (size_t)b->capacity, (size_t)capacity, sizeof(*states));
    if (!states)
        return false;
    b->states = states;
    b->capacity = capacity;
    return true;
}

static void reach(brute_search *b, brute_key key, int64_t value, int32_t parent, cairn_op op)
{
    if (b->failed || ((b->count + 1) * 2 > b->table_size && !grow_table(b)) ||
        (b->count == b->capacity && !grow_states(b)) || !crn_queue_make_room(&b->queue)) {
        b->failed = true;
        return;
    }
    size_t at = slot_of(b, key);
    bool is_new = b->table[at] < 0;
    if (is_new) {
        b->states[b->count] = (brute_state){.key = key, .reached = INT64_MAX};
        b->table[at] = b->count++;
    }
    brute_state *state = &b->states[b->table[at]];
    if (!is_new && value >= state->reached)
        return;
    state->reached = value;
    state->parent = parent;
    state->op = op;
    crn_queue_push(&b->queue, (crn_queue_entry){value, 0, b->table[at]});
}

/* ---- moves ---- */

static bool may_compute(const brute_search *b, brute_key key, int32_t v)
{
    const cairn_node *node = &b->graph->nodes[v];
    if (label_of(key, v) || (v < computed_of(key) && node->no_recompute))
        return false;
    if (node->alias_of >= 0 && !label_of(key, node->alias_of))
        return false;
    for (int32_t i = 0; i < node->dep_count; i++)
        if (!label_of(key, node->deps[i]))
            return false;
    return true;
}

static void try_compute(brute_search *b, int32_t from, int32_t v)
{
    const cairn_node *node = &b->graph->nodes[v];
    brute_key key = b->states[from].key;
    if (!may_compute(b, key, v))
        return;
    int64_t needed;
    if (!crn_add(resident_bytes(b, key), node->bytes + crn_max(0, node->workspace_bytes), &needed))
        return; /* a storage may be there twice, once for an alias */
    if (b->budget_bytes != CAIRN_NONE && needed > b->budget_bytes)
        return;
    int64_t value = crn_max(b->states[from].reached, needed);
    if (b->budget_bytes != CAIRN_NONE && !crn_add(b->states[from].reached, node->cost_ns, &value))
        return; /* no schedule takes so long */
    /* an alias takes the label of its base, a base one that is free: labels in use go up to NODES_MAX */
    brute_key next = with_label(key, v, node->alias_of >= 0 ? label_of(key, node->alias_of) : NODES_MAX + 1);
    if (v == computed_of(key))
        next = with_label(next, NODES_MAX, v + 1);
    reach(b, canonical(b->graph, next), value, from, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, v});
}

static void try_drop(brute_search *b, int32_t from, int32_t v)
{
    brute_key key = b->states[from].key;
    if (label_of(key, v) && !b->graph->nodes[v].keep)
        reach(b, canonical(b->graph, with_label(key, v, 0)), b->states[from].reached, from,
              (cairn_op){CAIRN_OP_DROP, 0, 0, v});
}

/* The number of the first complete state that is settled, -1 when there is none. */
static int32_t brute_run(const crn_task *task, brute_search *b)
{
    reach(b, 0, b->budget_bytes != CAIRN_NONE ? 0 : b->fixed_bytes, -1, (cairn_op){0});
    for (int64_t settled = 1; b->queue.count > 0 && !b->failed && !b->stopped;) {
        int32_t at = crn_queue_pop(&b->queue).item;
        if (b->states[at].settled)
            continue;
        b->states[at].settled = true;
        b->stopped = settled++ % POLL_EVERY == 0 && crn_should_stop(task, NULL);
        int computed = computed_of(b->states[at].key);
        if (computed == b->graph->node_count)
            return at;
        for (int32_t v = 0; v <= computed; v++)
            try_compute(b, at, v);
        for (int32_t v = 0; v < computed; v++)
            try_drop(b, at, v);
    }
    return -1;
}

static void brute_begin(const crn_task *task, int64_t budget_bytes, brute_search *b)
{
    *b = (brute_search){.allocator = crn_allocator(task->env), .budget_bytes = budget_bytes};
    crn_queue_init(&b->queue, b->allocator);
    b->graph = cairn_problem_graph(task->problem);
    b->fixed_bytes = cairn_problem_info_of(task->problem)->fixed_bytes;
}

static void brute_end(brute_search *b)
{
    crn_free(&b->allocator, b->states, (size_t)b->capacity, sizeof(*b->states));
    crn_free(&b->allocator, b->table, (size_t)b->table_size, sizeof(*b->table));
    crn_queue_clear(&b->queue);
}

/* ---- the solver ---- */

static cairn_status ended(const brute_search *b, cairn_error *error)
{
    if (b->failed)
        return crn_no_memory(error);
    return b->stopped ? crn_fail(error, CAIRN_CANCELLED, "stopped before the search was complete") : CAIRN_OK;
}

static cairn_status brute_accepts(const crn_task *task, cairn_error *error)
{
    int32_t count = cairn_problem_graph(task->problem)->node_count;
    if (count <= NODES_MAX)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNSUPPORTED, "brute-graph takes at most %d nodes, not %d", NODES_MAX, count);
}

static cairn_status brute_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    brute_search b;
    (void)session;
    brute_begin(task, CAIRN_NONE, &b);
    int32_t end = brute_run(task, &b);
    cairn_status status = ended(&b, error);
    if (end >= 0) {
        least->bytes = b.states[end].reached;
        least->is_exact = !task->machine;
    }
    brute_end(&b);
    return status;
}

static cairn_status emit(const brute_search *b, int32_t end, cairn_builder *builder, cairn_error *error)
{
    int32_t length = 0;
    for (int32_t at = end; b->states[at].parent >= 0; at = b->states[at].parent)
        length++;
    cairn_op *ops = crn_alloc(&b->allocator, (size_t)length, sizeof(*ops));
    if (!ops)
        return crn_no_memory(error);
    int32_t i = length;
    for (int32_t at = end; b->states[at].parent >= 0; at = b->states[at].parent)
        ops[--i] = b->states[at].op;
    cairn_status status = CAIRN_OK;
    for (i = 0; i < length && status == CAIRN_OK; i++)
        status = cairn_builder_add(builder, ops[i], error);
    crn_free(&b->allocator, ops, (size_t)length, sizeof(*ops));
    return status;
}

static cairn_status brute_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    brute_search b;
    (void)session;
    brute_begin(task, crn_limit_of(budget_bytes), &b);
    int32_t end = b.fixed_bytes <= b.budget_bytes ? brute_run(task, &b) : -1;
    cairn_status status = ended(&b, error);
    if (status == CAIRN_OK && end >= 0) {
        answer->found = true;
        answer->optimal_in_class = !task->machine;
        answer->lower_bound_ns = task->machine ? CAIRN_NONE : b.states[end].reached;
        status = emit(&b, end, answer->builder, error);
    }
    brute_end(&b);
    return status;
}

/* What the worst graphs of a size take. */
static int64_t brute_work(const crn_task *task)
{
    return (int64_t)500 << (2 * cairn_problem_graph(task->problem)->node_count);
}

const crn_solver crn_brute_graph_solver = {
    .info =
        {
            .name = "brute-graph",
            .takes_graphs = true,
            .available = true,
            .exhaustive = true,
            .optimal_in = "all",
            .summary = "exhaustive search over all schedules of at most 10 nodes",
            .source = "Dijkstra 1959, over states of the simulator's rules",
            .cost = "exponential",
        },
    .rank = 40,
    .accepts = brute_accepts,
    .work = brute_work,
    .least = brute_least,
    .solve = brute_solve,
};
