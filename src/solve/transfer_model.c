/*
 * From a list of operations to its events, copies and waits (transfer.h). One pass with the simulator's own rules of what is
 * resident: O(operations + reads) time and memory.
 */
#include "schedule/residency.h"
#include "solve/transfer.h"

/* What is known while the list is read. */
typedef struct reading {
    crn_transfer *transfer;
    crn_residency residency;
    const cairn_graph *graph;
    int32_t *copy_of;  /* of a storage of the residency: the copy in it */
    int32_t *newest;   /* of a node: its newest copy, when all are known */
    int32_t *alias_of; /* of a node: its newest record as an alias, CRN_NO_COPY before the first */
    int32_t *last_use; /* of a copy: its latest event */
    bool is_valid;
} reading;

static bool is_computation(cairn_op op)
{
    return op.code <= CAIRN_OP_COMPUTE;
}

/* ---- room ---- */

static int64_t reads_of(const cairn_problem *problem, cairn_op op)
{
    const cairn_graph *graph = cairn_problem_graph(problem);
    return graph && op.code == CAIRN_OP_COMPUTE ? graph->nodes[op.index].dep_count + 1 : 2;
}

static bool make_arrays(crn_transfer *t, int64_t events, int64_t reads)
{
    crn_arena *arena = &t->arena;
    size_t count = (size_t)events + 1, uses = (size_t)reads + count;
    return (t->events = crn_arena_alloc(arena, count, sizeof(*t->events))) &&
           (t->copies = crn_arena_alloc(arena, count, sizeof(*t->copies))) &&
           (t->aliases = crn_arena_alloc(arena, count, sizeof(*t->aliases))) &&
           (t->clock_ns = crn_arena_alloc(arena, count, sizeof(*t->clock_ns))) &&
           (t->from_begin = crn_arena_alloc_zero(arena, count + 1, sizeof(*t->from_begin))) &&
           (t->on_host = crn_arena_alloc(arena, count, sizeof(*t->on_host))) &&
           (t->ready_ns = crn_arena_alloc(arena, count, sizeof(*t->ready_ns))) &&
           (t->busy_ns = crn_arena_alloc(arena, count, sizeof(*t->busy_ns))) &&
           (t->host_ready_ns = crn_arena_alloc(arena, count, sizeof(*t->host_ready_ns))) &&
           (t->host_busy_ns = crn_arena_alloc(arena, count, sizeof(*t->host_busy_ns))) &&
           (t->reads = crn_arena_alloc(arena, uses, sizeof(*t->reads))) &&
           (t->waits = crn_arena_alloc(arena, uses, sizeof(*t->waits))) &&
           (t->out_ns = crn_arena_alloc(arena, uses, sizeof(*t->out_ns))) &&
           (t->back_ns = crn_arena_alloc(arena, uses, sizeof(*t->back_ns))) &&
           (t->left_ns = crn_arena_alloc(arena, uses, sizeof(*t->left_ns))) &&
           (t->next_wait = crn_arena_alloc(arena, uses, sizeof(*t->next_wait))) &&
           (t->out_queue = crn_arena_alloc(arena, uses, sizeof(*t->out_queue))) &&
           (t->back_queue = crn_arena_alloc(arena, uses, sizeof(*t->back_queue))) &&
           (t->release_at = crn_arena_alloc(arena, uses, sizeof(*t->release_at))) &&
           (t->by_from = crn_arena_alloc(arena, uses, sizeof(*t->by_from))) &&
           (t->state = crn_arena_alloc(arena, uses, sizeof(*t->state)));
}

static void count_ops(const cairn_problem *problem, const cairn_op *ops, int64_t count, int64_t *events, int64_t *reads)
{
    *events = *reads = 0;
    for (int64_t i = 0; i < count; i++)
        if (is_computation(ops[i])) {
            ++*events;
            *reads += reads_of(problem, ops[i]);
        }
}

int64_t crn_transfer_memory(const crn_task *task, int64_t count)
{
    const cairn_graph *graph = cairn_problem_graph(task->problem);
    int64_t per_use = (int64_t)(sizeof(crn_wait) + 3 * sizeof(int64_t) + 6 * sizeof(int32_t) + 1), most = 2;
    for (int32_t v = 0; graph && v < graph->node_count; v++)
        most = crn_max(most, graph->nodes[v].dep_count + 1);
    int64_t per_event = (int64_t)(sizeof(crn_event) + sizeof(crn_copy) + sizeof(crn_alias)) + 48 + (most + 1) * per_use;
    return count * per_event + 4096;
}

static cairn_status reading_begin(reading *r, const crn_task *task, int64_t count, cairn_error *error)
{
    size_t storages, nodes;
    CRN_TRY(crn_residency_init(&r->residency, crn_allocator(task->env), task->problem, NULL, count, error));
    r->graph = cairn_problem_graph(task->problem);
    storages = (size_t)r->residency.storage_capacity;
    nodes = (size_t)r->residency.value_count;
    r->copy_of = crn_arena_alloc(&r->transfer->arena, storages, sizeof(*r->copy_of));
    r->newest = crn_arena_alloc(&r->transfer->arena, nodes, sizeof(*r->newest));
    r->alias_of = crn_arena_alloc(&r->transfer->arena, nodes, sizeof(*r->alias_of));
    r->last_use = crn_arena_alloc(&r->transfer->arena, (size_t)count + 1, sizeof(*r->last_use));
    r->is_valid = true;
    if (!r->copy_of || !r->newest || !r->alias_of || !r->last_use) {
        crn_residency_free(&r->residency);
        return crn_no_memory(error);
    }
    for (size_t v = 0; v < nodes; v++)
        r->newest[v] = r->alias_of[v] = CRN_NO_COPY;
    return CAIRN_OK;
}

/* ---- copies ---- */

static int32_t add_copy(reading *r, int32_t storage, cairn_op value, int64_t bytes, int32_t birth)
{
    crn_transfer *t = r->transfer;
    int32_t made = t->copy_count++;
    t->copies[made] = (crn_copy){.value = value,
                                 .bytes = bytes,
                                 .birth = birth,
                                 .end = CRN_NO_COPY,
                                 .last_read = birth,
                                 .next_dropped = CRN_NO_COPY,
                                 .first_alias = CRN_NO_COPY,
                                 .first_wait = CRN_NO_COPY};
    r->copy_of[storage] = made;
    r->last_use[made] = birth;
    return made;
}

/* The event reads the copy: what lies between this use and the last one is a wait. */
static void add_read(reading *r, int32_t copy, int32_t event)
{
    crn_transfer *t = r->transfer;
    crn_copy *c = &t->copies[copy];
    if (c->last_read == event)
        return;
    c->last_read = event;
    t->reads[t->read_count++] = copy;
    t->events[event].read_count++;
    if (event - r->last_use[copy] >= 2)
        t->waits[t->wait_count++] = (crn_wait){copy, r->last_use[copy], event};
    r->last_use[copy] = event;
}

/* ---- aliases ---- */

static void read_alias(reading *r, int32_t node, int32_t event)
{
    int32_t record = r->alias_of[node];
    if (r->graph->nodes[node].alias_of >= 0 && record != CRN_NO_COPY)
        r->transfer->aliases[record].last_read = event;
}

/* Whether all that the alias reads lies in its own storage, so that it can be computed again wherever that is. */
static bool stands_alone(const reading *r, int32_t node, int32_t storage)
{
    const cairn_node *n = &r->graph->nodes[node];
    for (int32_t i = 0; i < n->dep_count; i++)
        if (r->residency.places[n->deps[i]].device != storage)
            return false;
    return true;
}

static void add_alias(reading *r, int32_t node, int32_t event)
{
    crn_transfer *t = r->transfer;
    const cairn_node *n = &r->graph->nodes[node];
    int32_t storage = r->residency.places[node].device, copy = r->copy_of[storage], made = t->alias_count++;
    r->is_valid &= r->alias_of[node] == CRN_NO_COPY || t->copies[copy].birth > t->aliases[r->alias_of[node]].created;
    t->aliases[made] = (crn_alias){.node = node,
                                   .created = event,
                                   .last_read = event,
                                   .ns = n->cost_ns,
                                   .next = t->copies[copy].first_alias,
                                   .is_kept = n->keep};
    t->copies[copy].first_alias = made;
    t->copies[copy].pinned |= n->keep || n->no_recompute || n->workspace_bytes > 0 || !stands_alone(r, node, storage);
    r->alias_of[node] = made;
}

/* ---- events ---- */

static void read_graph_event(reading *r, int32_t node, int32_t event)
{
    const cairn_node *n = &r->graph->nodes[node];
    for (int32_t i = 0; i < n->dep_count; i++) {
        int32_t storage = r->residency.places[n->deps[i]].device;
        if (storage == CRN_NO_STORAGE)
            continue;
        add_read(r, r->copy_of[storage], event);
        read_alias(r, n->deps[i], event);
    }
    if (n->alias_of >= 0 && r->residency.places[n->alias_of].device != CRN_NO_STORAGE) {
        add_read(r, r->copy_of[r->residency.places[n->alias_of].device], event);
        read_alias(r, n->alias_of, event);
    }
}

static int64_t reservation(const crn_effect *effect)
{
    int64_t grow = effect->added_bytes - effect->removed_bytes;
    return crn_max(0, crn_max(grow, effect->added_bytes + effect->workspace_bytes));
}

static cairn_op value_of(const reading *r, cairn_op op)
{
    bool saved = !r->graph && op.code == CAIRN_OP_FORWARD_SAVE;
    return (cairn_op){.value = saved ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT, .index = op.index};
}

static void add_event(reading *r, cairn_op op, const crn_effect *effect)
{
    crn_transfer *t = r->transfer;
    int32_t at = t->event_count - 1; /* begun before the operation was applied */
    crn_event *event = &t->events[at];
    event->ns = effect->compute_ns;
    event->reserve_bytes = reservation(effect);
    event->grow_bytes = effect->added_bytes - effect->removed_bytes;
    for (int32_t i = 0; !r->graph && i < effect->read_count; i++)
        add_read(r, r->copy_of[effect->reads[i]], at);
    for (int32_t i = 0; i < effect->removed_count; i++) {
        t->copies[r->copy_of[effect->removed[i]]].end = at;
        t->copies[r->copy_of[effect->removed[i]]].removed = true;
    }
    if (effect->added != CRN_NO_STORAGE)
        event->added = add_copy(r, effect->added, value_of(r, op), r->residency.storages[effect->added].bytes, at);
    if (r->graph && event->added == CRN_NO_COPY)
        add_alias(r, op.index, at);
}

static void begin_event(reading *r, cairn_op op)
{
    crn_transfer *t = r->transfer;
    int32_t at = t->event_count++;
    t->events[at] = (crn_event){.op = op, .first_read = t->read_count, .added = CRN_NO_COPY, .dropped = CRN_NO_COPY};
    if (r->graph)
        read_graph_event(r, op.index, at);
}

static bool read_op(reading *r, cairn_op op)
{
    crn_effect effect;
    if (is_computation(op))
        begin_event(r, op);
    if (crn_residency_apply(&r->residency, op, &effect) != CAIRN_VIOLATION_NONE)
        return false;
    if (is_computation(op))
        add_event(r, op, &effect);
    else if (effect.released != CRN_NO_STORAGE)
        r->transfer->copies[r->copy_of[effect.released]].end = r->transfer->event_count - 1;
    return op.code != CAIRN_OP_OFFLOAD && op.code != CAIRN_OP_PREFETCH && op.code != CAIRN_OP_DISCARD;
}

static bool reads_node(const cairn_node *node, int32_t other)
{
    for (int32_t i = 0; i < node->dep_count; i++)
        if (node->deps[i] == other)
            return true;
    return node->alias_of == other;
}

/* An alias that another one is made from is read as long as that one is. The list stands newest first. */
static void extend_aliases(const reading *r, const crn_copy *copy)
{
    crn_alias *aliases = r->transfer->aliases;
    for (int32_t a = copy->first_alias; a != CRN_NO_COPY; a = aliases[a].next)
        for (int32_t b = aliases[a].next; b != CRN_NO_COPY; b = aliases[b].next)
            if (reads_node(&r->graph->nodes[aliases[a].node], aliases[b].node))
                aliases[b].last_read = (int32_t)crn_max(aliases[b].last_read, aliases[a].last_read);
}

/* ---- after the last operation ---- */

static bool is_kept(const reading *r, const crn_copy *copy)
{
    bool kept = r->graph->nodes[copy->value.index].keep;
    for (int32_t a = copy->first_alias; a != CRN_NO_COPY; a = r->transfer->aliases[a].next)
        kept |= r->transfer->aliases[a].is_kept;
    return kept;
}

static void close_copies(reading *r)
{
    crn_transfer *t = r->transfer;
    for (int32_t i = 0; i < t->copy_count; i++) {
        crn_copy *copy = &t->copies[i];
        extend_aliases(r, copy);
        if (r->graph)
            copy->end = is_kept(r, copy) ? t->event_count : r->last_use[i];
        else if (copy->end == CRN_NO_COPY)
            copy->end = t->event_count;
        if (r->graph) { /* of two storages of a node at once only one could come back */
            int32_t before = r->newest[copy->value.index];
            r->is_valid &= before == CRN_NO_COPY || t->copies[before].end < copy->birth;
            r->newest[copy->value.index] = i;
        }
        if (!copy->removed && copy->end >= 0 && copy->end < t->event_count) {
            copy->next_dropped = t->events[copy->end].dropped;
            t->events[copy->end].dropped = i;
        }
        if (!copy->pinned && copy->end == t->event_count && r->last_use[i] < t->event_count - 1)
            t->waits[t->wait_count++] = (crn_wait){i, r->last_use[i], t->event_count};
    }
}

static void measure_levels(crn_transfer *t)
{
    int64_t used = t->start_bytes;
    t->clock_ns[0] = 0;
    for (int32_t e = 0; e < t->event_count; e++) {
        crn_event *event = &t->events[e];
        event->level_bytes = used + event->reserve_bytes;
        used += event->grow_bytes;
        for (int32_t c = event->dropped; c != CRN_NO_COPY; c = t->copies[c].next_dropped)
            used -= t->copies[c].bytes;
        if (!crn_add(t->clock_ns[e], event->ns, &t->clock_ns[e + 1]))
            t->clock_ns[e + 1] = INT64_MAX;
    }
    t->end_bytes = used;
}

static void sort_by_from(crn_transfer *t)
{
    for (int32_t w = 0; w < t->wait_count; w++)
        t->from_begin[t->waits[w].from + 1]++;
    for (int32_t e = 0; e < t->event_count; e++)
        t->from_begin[e + 1] += t->from_begin[e];
    for (int32_t w = t->wait_count - 1; w >= 0; w--)
        t->by_from[--t->from_begin[t->waits[w].from + 1]] = w;
    for (int32_t e = 0; e < t->event_count; e++)
        t->from_begin[e] = t->from_begin[e + 1];
    t->from_begin[t->event_count] = t->wait_count;
}

/* The waits of each copy, by the event that they end with. */
static void link_waits(crn_transfer *t)
{
    for (int32_t w = t->wait_count - 1; w >= 0; w--) {
        crn_copy *copy = &t->copies[t->waits[w].copy];
        t->next_wait[w] = copy->first_wait;
        copy->first_wait = w;
    }
}

/* Leaves out the waits of copies that stay, and measures the transfers of the others. */
static void close_waits(crn_transfer *t)
{
    int32_t kept = 0;
    for (int32_t w = 0; w < t->wait_count; w++) {
        const crn_copy *copy = &t->copies[t->waits[w].copy];
        int64_t out_ns = cairn_transfer_ns(copy->bytes, t->machine->to_host_bytes_per_s, t->machine->latency_ns);
        int64_t back_ns = cairn_transfer_ns(copy->bytes, t->machine->to_device_bytes_per_s, t->machine->latency_ns);
        if (copy->pinned || copy->bytes == 0 || copy->bytes > t->machine->host_bytes || out_ns < 0 || back_ns < 0)
            continue;
        t->waits[kept] = t->waits[w];
        t->out_ns[kept] = out_ns;
        t->back_ns[kept++] = back_ns;
    }
    t->wait_count = kept;
    sort_by_from(t);
}

static void add_input(reading *r)
{
    crn_transfer *t = r->transfer;
    const cairn_chain *chain = r->residency.chain;
    t->start_bytes = cairn_problem_info_of(t->task->problem)->fixed_bytes;
    if (!chain)
        return;
    int32_t input = add_copy(r, r->residency.places[0].device, (cairn_op){0}, chain->input_bytes, -1);
    t->copies[input].pinned = true;
    t->start_bytes += chain->input_bytes + chain->stages[chain->stage_count - 1].grad_bytes;
}

static cairn_status read_list(reading *r, const cairn_op *ops, int64_t count, cairn_error *error)
{
    add_input(r);
    for (int64_t i = 0; i < count && r->is_valid; i++)
        r->is_valid &= read_op(r, ops[i]);
    if (!r->is_valid || !crn_residency_complete(&r->residency))
        return crn_fail(error, CAIRN_UNSUPPORTED, "transfers cannot be added to this list of operations");
    close_copies(r);
    if (!r->is_valid)
        return crn_fail(error, CAIRN_UNSUPPORTED, "a storage is computed anew while an alias holds the old one");
    measure_levels(r->transfer);
    close_waits(r->transfer);
    link_waits(r->transfer);
    return CAIRN_OK;
}

cairn_status crn_transfer_new(const crn_task *task, const cairn_op *ops, int64_t count, crn_transfer **transfer,
                              cairn_error *error)
{
    crn_arena arena;
    int64_t events, reads;
    reading r = {.is_valid = true};
    *transfer = NULL;
    crn_arena_init(&arena, crn_allocator(task->env));
    crn_transfer *t = crn_arena_alloc_zero(&arena, 1, sizeof(*t));
    if (!t)
        return crn_no_memory(error);
    t->arena = arena;
    t->task = task;
    t->machine = task->machine;
    count_ops(task->problem, ops, count, &events, &reads);
    r.transfer = t;
    cairn_status status = make_arrays(t, events, reads) ? CAIRN_OK : crn_no_memory(error);
    if (status == CAIRN_OK)
        status = reading_begin(&r, task, count, error);
    if (status == CAIRN_OK) {
        status = read_list(&r, ops, count, error);
        crn_residency_free(&r.residency);
    }
    if (status != CAIRN_OK) {
        crn_transfer_free(t);
        return status;
    }
    *transfer = t;
    return CAIRN_OK;
}

void crn_transfer_free(crn_transfer *transfer)
{
    if (!transfer)
        return;
    crn_arena_clear(&transfer->arena);
}

void crn_transfer_levels(const crn_transfer *transfer, const bool *offloaded, int64_t *levels)
{
    int64_t away = 0;
    for (int32_t e = 0; e < transfer->event_count; e++)
        levels[e] = 0;
    for (int32_t w = 0; w < transfer->wait_count; w++) {
        const crn_wait *wait = &transfer->waits[w];
        if (!offloaded[w])
            continue;
        levels[wait->from + 1] += transfer->copies[wait->copy].bytes;
        if (wait->to < transfer->event_count)
            levels[wait->to] -= transfer->copies[wait->copy].bytes;
    }
    for (int32_t e = 0; e < transfer->event_count; e++) {
        away += levels[e];
        levels[e] = transfer->events[e].level_bytes - away;
    }
}
