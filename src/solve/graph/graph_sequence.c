#include "solve/graph/graph_sequence.h"

#include "solve/graph/link_times.h"

#include <string.h>

int32_t crn_sequence_capacity(int32_t node_count, int32_t times)
{
    int64_t capacity = crn_min((int64_t)times * node_count + 64, CAIRN_OPS_MAX / 2);
    return (int32_t)crn_max(node_count, capacity);
}

bool crn_sequence_new(crn_arena *arena, int32_t capacity, crn_sequence *sequence)
{
    *sequence = (crn_sequence){.capacity = capacity};
    sequence->node = crn_arena_alloc(arena, (size_t)capacity, sizeof(*sequence->node));
    return sequence->node != NULL;
}

void crn_sequence_remove(crn_sequence *sequence, int32_t e)
{
    sequence->count--;
    memmove(sequence->node + e, sequence->node + e + 1, (size_t)(sequence->count - e) * sizeof(*sequence->node));
}

bool crn_sequence_insert(crn_sequence *sequence, int32_t e, const int32_t *nodes, int32_t count)
{
    if (sequence->count + count > sequence->capacity)
        return false;
    memmove(sequence->node + e + count, sequence->node + e, (size_t)(sequence->count - e) * sizeof(*sequence->node));
    memcpy(sequence->node + e, nodes, (size_t)count * sizeof(*nodes));
    sequence->count += count;
    return true;
}

void crn_sequence_copy(crn_sequence *to, const crn_sequence *from)
{
    to->count = from->count;
    memcpy(to->node, from->node, (size_t)from->count * sizeof(*to->node));
}

void crn_sequence_store_all(const crn_graph_model *model, crn_sequence *sequence)
{
    for (int32_t v = 0; v < model->node_count; v++)
        sequence->node[v] = v;
    sequence->count = model->node_count;
}

cairn_status crn_sequence_eval_new(const crn_graph_model *model, crn_arena *arena, int32_t capacity,
                                   crn_sequence_eval *eval, cairn_error *error)
{
    size_t n = (size_t)model->node_count, events = (size_t)capacity + 1;
    *eval = (crn_sequence_eval){.model = model, .capacity = capacity};
    eval->level = crn_arena_alloc(arena, events, sizeof(*eval->level));
    eval->last = crn_arena_alloc(arena, events, sizeof(*eval->last));
    eval->previous = crn_arena_alloc(arena, events, sizeof(*eval->previous));
    eval->instance = crn_arena_alloc(arena, n, sizeof(*eval->instance));
    eval->handle = crn_arena_alloc(arena, n, sizeof(*eval->handle));
    eval->freed = crn_arena_alloc(arena, events + 1, sizeof(*eval->freed));
    eval->stack = crn_arena_alloc(arena, n, sizeof(*eval->stack));
    if (model->link && !(eval->times = crn_link_times_new(arena, capacity)))
        return crn_no_memory(error);
    if (!eval->level || !eval->last || !eval->previous || !eval->instance || !eval->handle || !eval->freed ||
        !eval->stack)
        return crn_no_memory(error);
    return CAIRN_OK;
}

int32_t crn_sequence_backward_begin(const cairn_graph *graph, const crn_sequence_eval *store_all)
{
    int32_t worst = 0;
    if (graph->backward_begins_at >= 0)
        return graph->backward_begins_at;
    for (int32_t v = 1; v < graph->node_count; v++)
        worst = store_all->level[v] > store_all->level[worst] ? v : worst;
    return worst;
}

/* The handles that exist, by storage, and where their operations go: what emission needs beyond judging. */
typedef struct emission {
    cairn_builder *builder;
    cairn_error *error;
    cairn_status status;
    int32_t *ending, *ending_next;   /* event -> instances that it reads last, as a list */
    int32_t *handles, *handles_next; /* storage -> nodes with a handle, newest first */
} emission;

static void put(emission *out, cairn_op_code code, int32_t node)
{
    if (out->status == CAIRN_OK)
        out->status = cairn_builder_add(out->builder, (cairn_op){(uint8_t)code, 0, 0, node}, out->error);
}

static void put_compute(emission *out, int32_t node, int32_t root)
{
    if (!out)
        return;
    put(out, CAIRN_OP_COMPUTE, node);
    if (node == root)
        out->handles[root] = -1;
    out->handles_next[node] = out->handles[root];
    out->handles[root] = node;
}

static void add_cost(crn_sequence_eval *eval, int32_t event)
{
    if (crn_add(eval->cost, crn_event_cost(eval->model, event), &eval->cost))
        return;
    eval->cost = INT64_MAX;
    eval->too_long = true;
}

static void note_read(crn_sequence_eval *eval, int32_t instance, int32_t e)
{
    eval->last[instance] = e;
    if (eval->times)
        crn_link_times_read(eval->times, instance, e);
}

/*
 * Event e reads node d: its instance lives on to e, and a handle that the instance lacks is computed first, from the
 * alias below it, which may be lacking too. Returns the largest extra memory of what was computed.
 */
static int64_t read_node(crn_sequence_eval *eval, int32_t d, int32_t e, emission *out)
{
    const crn_graph_model *model = eval->model;
    int64_t extra = 0;
    int32_t depth = 0;
    note_read(eval, eval->instance[model->root[d]], e);
    if (eval->handle[d] == eval->instance[model->root[d]])
        return 0;
    eval->stack[depth++] = d;
    while (depth > 0) {
        int32_t v = eval->stack[depth - 1], lacking = -1;
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1] && lacking < 0; i++) {
            int32_t instance = eval->instance[model->root[model->dep[i]]];
            note_read(eval, instance, e);
            if (eval->handle[model->dep[i]] != instance)
                lacking = model->dep[i];
        }
        if (lacking >= 0) {
            eval->stack[depth++] = lacking;
            continue;
        }
        depth--;
        eval->handle[v] = eval->instance[model->root[v]];
        add_cost(eval, v);
        extra = crn_max(extra, model->extra[v]);
        put_compute(out, v, model->root[v]);
    }
    return extra;
}

static void begin_instance(crn_sequence_eval *eval, int32_t storage, int32_t e)
{
    eval->previous[e] = eval->instance[storage];
    eval->instance[storage] = e;
    eval->last[e] = e;
}

static void fetch(crn_sequence_eval *eval, int32_t event, int32_t e)
{
    int32_t storage = crn_event_node(eval->model, event);
    begin_instance(eval, storage, e);
    eval->handle[storage] = e;
    add_cost(eval, event);
}

/* One event: reads, then the node itself. Returns the extra memory while it runs. */
static int64_t play(crn_sequence_eval *eval, int32_t v, int32_t e, emission *out)
{
    const crn_graph_model *model = eval->model;
    if (crn_event_is_fetch(model, v)) {
        fetch(eval, v, e);
        return 0;
    }
    int64_t extra = model->extra[v];
    int32_t root = model->root[v];
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        extra = crn_max(extra, read_node(eval, model->dep[i], e, out));
    if (root == v) {
        begin_instance(eval, v, e);
    } else {
        eval->previous[e] = -1;
        eval->last[e] = -1;
    }
    eval->handle[v] = eval->instance[root];
    add_cost(eval, v);
    put_compute(out, v, root);
    return extra;
}

static void begin(crn_sequence_eval *eval)
{
    size_t n = (size_t)eval->model->node_count;
    memset(eval->instance, 0xff, n * sizeof(*eval->instance));
    memset(eval->handle, 0xff, n * sizeof(*eval->handle));
    eval->cost = 0;
    eval->too_long = false;
}

/* Outputs live to the end: their storage's newest instance, once the first node to be kept exists. */
static void hold_outputs(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    for (int32_t s = 0; s < eval->model->node_count; s++)
        if (eval->model->keep[s])
            eval->last[eval->instance[s]] = sequence->count - 1;
}

/*
 * Levels from the instances' life times. level[] holds each event's extra memory on entry. Two passes: what each event
 * frees is collected at the event after its last reader, then summed up.
 */
static void sum_levels(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    int64_t *freed = eval->freed;
    const crn_graph_model *model = eval->model;
    int64_t resident = model->fixed_bytes;
    memset(freed, 0, ((size_t)sequence->count + 1) * sizeof(*freed));
    if (eval->times)
        crn_link_times_levels(eval, sequence);
    for (int32_t e = 0; e < sequence->count; e++)
        if (eval->last[e] >= 0)
            freed[eval->last[e] + 1] += model->bytes[crn_event_node(model, sequence->node[e])];
    eval->peak = resident;
    for (int32_t e = 0; e < sequence->count; e++) {
        resident += model->bytes[crn_event_node(model, sequence->node[e])] - freed[e];
        eval->level[e] += resident;
        eval->peak = crn_max(eval->peak, eval->level[e]);
    }
    if (eval->too_long)
        eval->peak = INT64_MAX;
}

void crn_sequence_judge(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    begin(eval);
    if (eval->times)
        crn_link_times_begin(eval->times, sequence->count);
    for (int32_t e = 0; e < sequence->count; e++)
        eval->level[e] = play(eval, sequence->node[e], e, NULL);
    hold_outputs(eval, sequence);
    if (eval->times)
        crn_link_times_place(eval, sequence);
    sum_levels(eval, sequence);
}

static bool emission_new(const crn_graph_model *model, int32_t events, crn_arena *arena, emission *out)
{
    size_t n = (size_t)model->node_count;
    out->ending = crn_arena_alloc(arena, (size_t)events, sizeof(int32_t));
    out->ending_next = crn_arena_alloc(arena, (size_t)events, sizeof(int32_t));
    out->handles = crn_arena_alloc(arena, n, sizeof(int32_t));
    out->handles_next = crn_arena_alloc(arena, n, sizeof(int32_t));
    return out->ending && out->ending_next && out->handles && out->handles_next;
}

/* Lists, for every event, the instances that end with it; those of outputs never end. */
static void list_endings(const crn_sequence_eval *eval, const crn_sequence *sequence, emission *out)
{
    for (int32_t e = 0; e < sequence->count; e++)
        out->ending[e] = -1;
    for (int32_t e = sequence->count - 1; e >= 0; e--) {
        int32_t storage = sequence->node[e], last = eval->last[e];
        if (last < 0 || (eval->model->keep[storage] && eval->instance[storage] == e))
            continue;
        out->ending_next[e] = out->ending[last];
        out->ending[last] = e;
    }
}

static void put_drops(emission *out, const crn_sequence *sequence, int32_t e)
{
    for (int32_t i = out->ending[e]; i >= 0; i = out->ending_next[i])
        for (int32_t v = out->handles[sequence->node[i]]; v >= 0; v = out->handles_next[v])
            put(out, CAIRN_OP_DROP, v);
}

cairn_status crn_sequence_emit(crn_sequence_eval *eval, const crn_sequence *sequence, cairn_builder *builder,
                               cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, eval->model->arena.allocator);
    emission out = {.builder = builder, .error = error, .status = CAIRN_OK};
    if (!emission_new(eval->model, sequence->count, &arena, &out)) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    crn_sequence_judge(eval, sequence);
    list_endings(eval, sequence, &out);
    begin(eval);
    for (int32_t e = 0; e < sequence->count && out.status == CAIRN_OK; e++) {
        play(eval, sequence->node[e], e, &out);
        put_drops(&out, sequence, e);
    }
    crn_arena_clear(&arena);
    return out.status;
}
