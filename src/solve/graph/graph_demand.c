/*
 * A lower bound on the memory of a graph's schedules, from what must be resident at the same time.
 *
 * Problem   Least memory of all schedules without transfers, whatever their time: a bound from below.
 * Idea      Let the storages S all be resident at one moment, and let d be the one that was computed last. When d was
 *           computed, the others of S were resident, and so was what d reads. So the peak is at least
 *
 *               f(S) = min over d in S of max( memory(S + reads(d)) + workspace(d),  f(S - d + reads(d)) ),
 *
 *           with reads(d) the storages that the root of d reads; f of at most one storage is taken for 0. The first
 *           computation of a node v needs memory(reads(v) + v) + workspace(v) and f(reads(v)); the bound is the largest
 *           of these. memory() counts fixed bytes and what cannot be gone: outputs, and storages that run once and have
 *           a reader from v on, if they come before a storage of S, for first computations come in order.
 * Search    f is a bottleneck path, found by Dijkstra's algorithm over sets, the one with the least peak so far first,
 *           fewest bytes first among equals. Where it stops early, after STATES_MAX sets or at one storage, the least
 *           peak so far is still a bound. So is it where a set forgets storages: those above WIDTH, the smallest ones.
 * Why       Unlike a node's own needs, it sees that a gradient has to wait while what it meets is recomputed.
 * Cost      At most TARGETS_MAX nodes, those whose own needs are largest, STATES_MAX sets each: O(T + E) memory.
 */
#include <stdlib.h>
#include <string.h>

#include "solve/graph_model.h"

enum { WIDTH = 8, STATES_MAX = 512, TABLE_SIZE = 4 * STATES_MAX, TARGETS_MAX = 512, TIME_PARTS = 8 };

typedef struct storage_set {
    int32_t storage[WIDTH]; /* ascending */
    int32_t count;
    int64_t bytes; /* of the set */
    int64_t peak;  /* the least on the way from the target to here */
} storage_set;

typedef struct demand {
    const crn_graph_model *model;
    int32_t target;
    int32_t *pinned_from;   /* storage -> node after which it cannot be gone before the target; node_count = can be */
    int64_t *pinned_before; /* node -> bytes of all that cannot be gone once it is being computed */
    int32_t *mark;          /* storage -> the last union that it was seen in */
    int32_t marker;
    storage_set *sets;
    int32_t *heap, *table; /* set numbers; the table is open addressing, -1 = free */
    int32_t count, heap_count;
} demand;

static bool demand_new(const crn_graph_model *model, crn_arena *arena, demand *d)
{
    size_t n = (size_t)model->node_count;
    *d = (demand){.model = model};
    d->pinned_from = crn_arena_alloc(arena, n, sizeof(*d->pinned_from));
    d->pinned_before = crn_arena_alloc(arena, n + 1, sizeof(*d->pinned_before));
    d->mark = crn_arena_alloc_zero(arena, n, sizeof(*d->mark));
    d->sets = crn_arena_alloc(arena, STATES_MAX, sizeof(*d->sets));
    d->heap = crn_arena_alloc(arena, STATES_MAX, sizeof(*d->heap));
    d->table = crn_arena_alloc(arena, TABLE_SIZE, sizeof(*d->table));
    return d->pinned_from && d->pinned_before && d->mark && d->sets && d->heap && d->table;
}

/* ---- what cannot be gone ---- */

static int32_t last_use(const crn_graph_model *model, int32_t s)
{
    return model->use_begin[s] < model->use_begin[s + 1] ? model->use[model->use_begin[s + 1] - 1] : -1;
}

static void aim_at(demand *d, int32_t v)
{
    const crn_graph_model *model = d->model;
    d->target = v;
    memset(d->pinned_before, 0, (size_t)(v + 1) * sizeof(*d->pinned_before));
    for (int32_t s = 0; s < v; s++) {
        int32_t from = model->keep[s] ? model->keep_from[s] : model->node_count;
        if (model->once_node[s] && last_use(model, s) >= v)
            from = s;
        d->pinned_from[s] = from;
        if (from < v)
            d->pinned_before[from + 1] += model->bytes[s];
    }
    d->pinned_from[v] = model->node_count;
    for (int32_t i = 0; i < v; i++)
        d->pinned_before[i + 1] += d->pinned_before[i];
}

/* ---- sets ---- */

/* Puts a storage among the WIDTH largest of a set; order: by size, then by index, until the set is finished. */
static void offer(const demand *d, storage_set *set, int32_t s)
{
    const int64_t *bytes = d->model->bytes;
    int32_t at = set->count;
    while (at > 0 && bytes[set->storage[at - 1]] < bytes[s])
        at--;
    if (at == WIDTH)
        return;
    if (set->count < WIDTH)
        set->count++;
    for (int32_t i = set->count - 1; i > at; i--)
        set->storage[i] = set->storage[i - 1];
    set->storage[at] = s;
}

static int compare_index(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void finish(const demand *d, storage_set *set)
{
    set->bytes = 0;
    qsort(set->storage, (size_t)set->count, sizeof(*set->storage), compare_index);
    for (int32_t i = 0; i < set->count; i++)
        set->bytes += d->model->bytes[set->storage[i]];
}

/* The k-th storage of a set other than v, or of what v reads; false past the end. Some come twice. */
static bool part_at(const demand *d, int32_t v, const storage_set *set, int32_t k, int32_t *s)
{
    const crn_graph_model *model = d->model;
    if (k < set->count) {
        *s = set->storage[k];
        return true;
    }
    k += model->dep_begin[v] - set->count;
    if (k >= model->dep_begin[v + 1])
        return false;
    *s = model->root[model->dep[k]];
    return true;
}

/*
 * Node v is computed while the storages of a set other than v are resident. Writes the set that must be resident
 * before, and returns the memory that this takes. Once the newest of them exists, some storages cannot be dropped:
 * their bytes are added as one sum.
 */
static int64_t compute_beside(demand *d, int32_t v, const storage_set *set, storage_set *before)
{
    const crn_graph_model *model = d->model;
    int32_t newest = v, s;
    for (int32_t k = 0; part_at(d, v, set, k, &s); k++)
        newest = s > newest ? s : newest;
    int64_t memory = model->fixed_bytes + model->extra[v] + d->pinned_before[newest];
    if (d->pinned_from[v] >= newest)
        memory += model->bytes[v];
    *before = (storage_set){.count = 0};
    d->marker++;
    for (int32_t k = 0; part_at(d, v, set, k, &s); k++) {
        if (s == v || d->mark[s] == d->marker || d->pinned_from[s] < newest)
            continue;
        d->mark[s] = d->marker;
        memory += model->bytes[s];
        if (model->bytes[s] > 0)
            offer(d, before, s);
    }
    finish(d, before);
    return memory;
}

/* ---- Dijkstra's algorithm over sets ---- */

static bool is_before(const demand *d, int32_t a, int32_t b)
{
    const storage_set *x = &d->sets[a], *y = &d->sets[b];
    if (x->peak != y->peak)
        return x->peak < y->peak;
    return x->bytes != y->bytes ? x->bytes < y->bytes : a < b;
}

static void heap_swap(demand *d, int32_t i, int32_t j)
{
    int32_t set = d->heap[i];
    d->heap[i] = d->heap[j];
    d->heap[j] = set;
}

static void heap_push(demand *d, int32_t set)
{
    int32_t i = d->heap_count++;
    d->heap[i] = set;
    for (; i > 0 && is_before(d, d->heap[i], d->heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap_swap(d, i, (i - 1) / 2);
}

static int32_t heap_pop(demand *d)
{
    int32_t set = d->heap[0];
    heap_swap(d, 0, --d->heap_count);
    for (int32_t i = 0;;) {
        int32_t least = i;
        for (int32_t child = 2 * i + 1; child <= 2 * i + 2; child++)
            if (child < d->heap_count && is_before(d, d->heap[child], d->heap[least]))
                least = child;
        if (least == i)
            return set;
        heap_swap(d, i, least);
        i = least;
    }
}

/* Where a set is in the table, or the free place for it. */
static int32_t slot_of(const demand *d, const storage_set *set)
{
    uint64_t hash = 0;
    for (int32_t i = 0; i < set->count; i++)
        hash = (hash ^ (uint64_t)(uint32_t)set->storage[i]) * 0x9e3779b97f4a7c15u;
    size_t size = (size_t)set->count * sizeof(*set->storage);
    int32_t at = (int32_t)(hash >> 40) & (TABLE_SIZE - 1);
    for (; d->table[at] >= 0; at = (at + 1) & (TABLE_SIZE - 1)) {
        const storage_set *other = &d->sets[d->table[at]];
        if (other->count == set->count && memcmp(other->storage, set->storage, size) == 0)
            break;
    }
    return at;
}

/* A set that was reached before was reached with a peak that is no larger, or is taken up once more. False: no room. */
static bool reach(demand *d, const storage_set *set)
{
    int32_t at = slot_of(d, set);
    if (d->table[at] >= 0 && d->sets[d->table[at]].peak <= set->peak)
        return true;
    if (d->count == STATES_MAX)
        return false;
    d->sets[d->count] = *set;
    d->table[at] = d->count;
    heap_push(d, d->count++);
    return true;
}

/* What the first computation of a node takes, at least. */
static int64_t bound_of(demand *d, int32_t v)
{
    storage_set set = {.count = 0}, next;
    aim_at(d, v);
    memset(d->table, 0xff, TABLE_SIZE * sizeof(*d->table));
    d->count = d->heap_count = 0;
    next.peak = compute_beside(d, v, &set, &next);
    bool has_room = reach(d, &next);
    while (has_room) {
        set = d->sets[heap_pop(d)];
        if (set.count <= 1)
            break;
        for (int32_t i = 0; i < set.count && has_room; i++) {
            int64_t memory = compute_beside(d, set.storage[i], &set, &next);
            next.peak = crn_max(set.peak, memory);
            has_room = reach(d, &next);
        }
    }
    return set.peak; /* without room: no set that is left has a smaller one */
}

/* ---- which nodes ---- */

/* Only the order matters: a storage that is read by several names counts several times. */
static int64_t own_needs(const crn_graph_model *model, int32_t v)
{
    int64_t bytes = model->bytes[v] + model->extra[v];
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        if (!crn_add(bytes, model->bytes[model->root[model->dep[i]]], &bytes))
            return INT64_MAX;
    return bytes;
}

static int compare_descending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

static cairn_status bound_all(const crn_task *task, demand *d, crn_arena *arena, int64_t *bound_bytes,
                              cairn_error *error)
{
    const crn_graph_model *model = d->model;
    size_t n = (size_t)model->node_count;
    int64_t *needs = crn_arena_alloc(arena, n, sizeof(*needs));
    int32_t looked_at = 0;
    if (!needs)
        return crn_no_memory(error);
    for (int32_t v = 0; v < model->node_count; v++)
        needs[v] = own_needs(model, v);
    qsort(needs, n, sizeof(*needs), compare_descending);
    int64_t least = n > TARGETS_MAX ? needs[TARGETS_MAX - 1] : 0;
    for (int32_t v = 0; v < model->node_count && looked_at < TARGETS_MAX; v++)
        if (own_needs(model, v) >= least && !crn_should_stop(task, NULL)) {
            *bound_bytes = crn_max(*bound_bytes, bound_of(d, v));
            looked_at++;
        }
    return CAIRN_OK;
}

static cairn_status raise_memory(const crn_task *task, int64_t *bound_bytes, cairn_error *error)
{
    crn_graph_model *model;
    demand d;
    crn_arena arena;
    const crn_task part = crn_task_part(task, TIME_PARTS);
    if (cairn_problem_kind_of(task->problem) != CAIRN_KIND_GRAPH || task->machine)
        return CAIRN_OK;
    CRN_TRY(crn_graph_model_new(task, &model, error));
    crn_arena_init(&arena, crn_allocator(task->env));
    cairn_status status =
        demand_new(model, &arena, &d) ? bound_all(&part, &d, &arena, bound_bytes, error) : crn_no_memory(error);
    crn_arena_clear(&arena);
    crn_graph_model_free(model);
    return status;
}

const crn_bound_method crn_graph_demand_method = {.name = "demand", .raise_memory = raise_memory};
