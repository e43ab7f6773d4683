#include "solve/graph/graph_walk.h"

#include <math.h>
#include <string.h>

/* Missing ancestors that a recompute cost counts; evictions of waiting values while one node is under way. */
enum { ANCESTORS_MAX = 64, UNLOCKS_MAX = 64 };

/*
 * From SCANNED_NODES nodes on, the residents are a heap: then an eviction looks at LOOKS_MAX of them at most, and updates
 * REFRESHED old prices.
 */
enum { SCANNED_NODES = 1000, LOOKS_MAX = 64, REFRESHED = 8 };

/* Prices computed between two questions whether to stop, and in all by walks whose work is limited (crn_walk_limit). */
enum { POLL_STEPS = 10000, LIMITED_STEPS = 30000000 };

struct crn_walk {
    const crn_graph_model *model;
    crn_arena arena;
    /* the state of a walk */
    int64_t resident_bytes, budget_bytes;
    int64_t needed_bytes; /* the most that a computation took; what did not fit is not part of it */
    int32_t now;          /* node whose first computation is under way */
    bool *handle;         /* of a node: computed and not evicted */
    int32_t *first;       /* of a storage: nodes with a handle, as a list */
    int32_t *next;
    int32_t *locks;     /* of a storage: how many computations under way need it */
    int32_t *accessed;  /* of a storage: events of the sequence when it was last made or read */
    int32_t *use_at;    /* of a storage: position in model->use of the next use */
    int32_t *slot;      /* of a storage: where it stands in residents, -1 = not resident */
    int32_t *residents; /* storages; on large graphs a heap by their prices when they were last looked at */
    int32_t resident_count;
    int32_t refreshed; /* slot of the heap whose price was last updated in turn */
    bool is_heap;
    double *priced; /* of a storage */
    int32_t *aside; /* scratch: storages taken off the heap: they are locked, or their price has risen */
    /* scratch */
    int32_t *stack, *cursor; /* nodes to be computed, and how far their dependencies were looked at */
    int32_t *visit, *mark;   /* search for missing ancestors */
    int32_t marker;
    int32_t unlocks_left; /* of the node under way */
    const crn_task *task;
    int32_t steps; /* since the task was last asked whether to stop */
    int64_t steps_left;
    const crn_walk_rule *rule;
    crn_sequence *sequence;
};

cairn_status crn_walk_new(const crn_graph_model *model, crn_walk **walk, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, model->arena.allocator);
    size_t n = (size_t)model->node_count;
    crn_walk *w = crn_arena_alloc_zero(&arena, 1, sizeof(*w));
    int32_t *table = crn_arena_alloc_zero(&arena, n, 12 * sizeof(*table));
    bool *handle = crn_arena_alloc(&arena, n, sizeof(*handle));
    double *priced = crn_arena_alloc(&arena, n, sizeof(*priced));
    *walk = NULL;
    if (!w || !table || !handle || !priced) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    int32_t **columns[] = {&w->first, &w->next,   &w->locks, &w->use_at, &w->slot,     &w->residents,
                           &w->stack, &w->cursor, &w->visit, &w->mark,   &w->accessed, &w->aside};
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++)
        *columns[i] = table + i * n;
    w->model = model;
    w->handle = handle;
    w->priced = priced;
    w->is_heap = model->node_count >= SCANNED_NODES;
    w->steps_left = INT64_MAX;
    w->arena = arena;
    *walk = w;
    return CAIRN_OK;
}

void crn_walk_free(crn_walk *walk)
{
    if (!walk)
        return;
    crn_arena_clear(&walk->arena);
}

static bool is_stopped(crn_walk *w, int32_t steps)
{
    w->steps += steps;
    w->steps_left -= steps;
    if (w->steps < POLL_STEPS)
        return w->steps_left < 0;
    w->steps = 0;
    return w->steps_left < 0 || crn_should_stop(w->task, NULL);
}

/* The next node that reads storage s for the first time, at or after the one under way; node_count when none does. */
static int32_t next_use(crn_walk *w, int32_t s)
{
    int32_t end = w->model->use_begin[s + 1];
    while (w->use_at[s] < end && w->model->use[w->use_at[s]] < w->now)
        w->use_at[s]++;
    return w->use_at[s] < end ? w->model->use[w->use_at[s]] : w->model->node_count;
}

/* Cost of bringing storage s back: its root, and the missing ancestors of it. Cut off after ANCESTORS_MAX nodes. */
static int64_t recompute_cost(crn_walk *w, int32_t s)
{
    const crn_graph_model *model = w->model;
    int64_t cost = 0;
    int32_t head = 0, tail = 0;
    w->marker++;
    w->visit[tail++] = s;
    w->mark[s] = w->marker;
    while (head < tail) {
        int32_t v = w->visit[head++];
        cost += model->cost[v];
        if (model->once[model->root[v]])
            return INT64_MAX;
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1] && tail < ANCESTORS_MAX; i++) {
            int32_t d = model->dep[i];
            if (!w->handle[d] && w->mark[d] != w->marker) {
                w->mark[d] = w->marker;
                w->visit[tail++] = d;
            }
        }
    }
    return cost;
}

/*
 * Whether something that was evicted and will be used again is computed from the dead storage s, directly or through
 * others that were evicted: then s is not dead after all.
 */
static bool wanted(crn_walk *w, int32_t s)
{
    const crn_graph_model *model = w->model;
    int32_t head = 0, tail = 0;
    w->marker++;
    w->visit[tail++] = s;
    w->mark[s] = w->marker;
    while (head < tail) {
        int32_t at = w->visit[head++];
        for (int32_t i = model->use_begin[at]; i < model->use_begin[at + 1]; i++) {
            int32_t user = model->root[model->use[i]];
            if (model->use[i] >= w->now || w->handle[model->use[i]] || w->mark[user] == w->marker)
                continue;
            if (next_use(w, user) < model->node_count)
                return true;
            w->mark[user] = w->marker;
            w->visit[tail++] = user;
        }
    }
    return false;
}

static double power(double x, int exponent)
{
    double result = 1;
    for (int i = 0; i < exponent; i++)
        result *= x;
    return result;
}

/*
 * The price of evicting s; the least one goes. Negative: it can go for nothing. Infinite: it must stay. Exponents being
 * multiples of 1/2, it is the square of the price that is told where the future is known.
 */
static double price(crn_walk *w, int32_t s)
{
    const crn_graph_model *model = w->model;
    int32_t use = next_use(w, s);
    int64_t cost = recompute_cost(w, s);
    double bytes = (double)model->bytes[s], distance = (double)(use - w->now + 1), weighed = crn_priced_cost(cost);
    if (use == model->node_count) /* dead: cheap ancestors of what may come back go first */
        return cost == INT64_MAX && wanted(w, s) ? INFINITY : -1.0 / weighed;
    if (cost == INT64_MAX || model->bytes[s] == 0)
        return INFINITY;
    if (w->rule->online)
        return weighed / (bytes * (double)(w->sequence->count - w->accessed[s] + 1));
    if (w->rule->weight)
        weighed *= (double)w->rule->weight[w->use_at[s]];
    return weighed * weighed /
           (power(bytes, w->rule->half_bytes_power) * power(distance, w->rule->half_distance_power));
}

static bool kept(const crn_walk *w, int32_t s)
{
    return w->model->keep[s] && w->handle[w->model->keep_from[s]];
}

/* ---- the residents, a list or a heap ---- */

static void put_at(crn_walk *w, int32_t slot, int32_t s)
{
    w->residents[slot] = s;
    w->slot[s] = slot;
}

static bool is_cheaper(const crn_walk *w, int32_t a, int32_t b)
{
    return w->priced[a] != w->priced[b] ? w->priced[a] < w->priced[b] : a < b;
}

/* Restores the heap's order around the storage in a slot. */
static void settle(crn_walk *w, int32_t slot)
{
    int32_t s = w->residents[slot];
    for (; slot > 0 && is_cheaper(w, s, w->residents[(slot - 1) / 2]); slot = (slot - 1) / 2)
        put_at(w, slot, w->residents[(slot - 1) / 2]);
    for (int32_t child = 2 * slot + 1; child < w->resident_count; child = 2 * slot + 1) {
        if (child + 1 < w->resident_count && is_cheaper(w, w->residents[child + 1], w->residents[child]))
            child++;
        if (!is_cheaper(w, w->residents[child], s))
            break;
        put_at(w, slot, w->residents[child]);
        slot = child;
    }
    put_at(w, slot, s);
}

static void add_resident(crn_walk *w, int32_t s)
{
    put_at(w, w->resident_count++, s);
    if (w->is_heap) {
        w->priced[s] = price(w, s);
        settle(w, w->slot[s]);
    }
}

static void remove_resident(crn_walk *w, int32_t s)
{
    int32_t slot = w->slot[s], moved = w->residents[--w->resident_count];
    w->slot[s] = -1;
    if (moved == s)
        return;
    put_at(w, slot, moved);
    if (w->is_heap)
        settle(w, slot);
}

/* After node v: what it read is next used later, if at all, which makes it cheaper. */
static void price_again(crn_walk *w, int32_t v)
{
    const crn_graph_model *model = w->model;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1] && w->is_heap; i++) {
        int32_t s = model->root[model->dep[i]];
        if (w->slot[s] < 0)
            continue;
        w->priced[s] = price(w, s);
        settle(w, w->slot[s]);
    }
}

static void evict(crn_walk *w, int32_t s)
{
    for (int32_t v = w->first[s]; v >= 0; v = w->next[v])
        w->handle[v] = false;
    w->first[s] = -1;
    w->resident_bytes -= w->model->bytes[s];
    remove_resident(w, s);
}

static bool can_go(const crn_walk *w, int32_t s)
{
    return w->locks[s] == 0 && w->model->bytes[s] > 0 && !kept(w, s);
}

/* The cheapest storage that can go, -1 when none can. */
static int32_t scan_for_cheapest(crn_walk *w)
{
    double least = INFINITY;
    int32_t chosen = -1;
    for (int32_t i = 0; i < w->resident_count; i++) {
        int32_t s = w->residents[i];
        double p = can_go(w, s) ? price(w, s) : INFINITY;
        if (p < least || (p == least && chosen >= 0 && s < chosen)) {
            least = p;
            chosen = s;
        }
    }
    return chosen;
}

/* Updates the prices of a few residents, others each time, so that no price is old for long. */
static void refresh(crn_walk *w)
{
    for (int32_t i = 0; i < REFRESHED && w->resident_count > 0; i++) {
        w->refreshed = (w->refreshed + 1) % w->resident_count;
        int32_t s = w->residents[w->refreshed];
        w->priced[s] = price(w, s);
        settle(w, w->refreshed);
    }
}

/*
 * The same from the heap, nearly. Most prices rise, as the next use comes nearer and ancestors are evicted. So a price
 * that is no higher than it was is taken for the least. A storage whose price rose is put back with its new price.
 * After LOOKS_MAX of these, the cheapest of them is taken.
 */
static int32_t take_cheapest(crn_walk *w)
{
    int32_t chosen = -1, aside_count = 0, looks = 0;
    refresh(w);
    while (w->resident_count > 0 && looks < LOOKS_MAX && (chosen < 0 || is_cheaper(w, w->residents[0], chosen))) {
        int32_t s = w->residents[0];
        remove_resident(w, s);
        w->aside[aside_count++] = s;
        if (!can_go(w, s))
            continue;
        looks++;
        w->priced[s] = price(w, s);
        if (w->priced[s] < INFINITY && (chosen < 0 || is_cheaper(w, s, chosen)))
            chosen = s;
    }
    for (int32_t i = 0; i < aside_count; i++) {
        put_at(w, w->resident_count++, w->aside[i]);
        settle(w, w->resident_count - 1);
    }
    return chosen;
}

static bool evict_one(crn_walk *w)
{
    int32_t chosen = w->is_heap ? take_cheapest(w) : scan_for_cheapest(w);
    if (chosen < 0 || is_stopped(w, w->is_heap ? LOOKS_MAX : w->resident_count))
        return false;
    evict(w, chosen);
    return true;
}

static void lock_deps(crn_walk *w, int32_t v, int by)
{
    for (int32_t i = w->model->dep_begin[v]; i < w->model->dep_begin[v + 1]; i++)
        w->locks[w->model->root[w->model->dep[i]]] += by;
}

/*
 * Evicts the cheapest storage that waits for a computation further up, which then has to bring it back; v does not read
 * it. Two values that cannot be computed beside each other would take turns for ever, so this is limited.
 */
static bool evict_waiting(crn_walk *w, int32_t v)
{
    const crn_graph_model *model = w->model;
    double least = INFINITY;
    int32_t chosen = -1;
    if (!w->rule->unlocks || w->unlocks_left == 0 || is_stopped(w, w->resident_count))
        return false;
    for (int32_t i = 0; i < w->resident_count; i++) {
        int32_t s = w->residents[i];
        bool stays = w->model->bytes[s] == 0 || kept(w, s) || s == model->root[v];
        for (int32_t k = model->dep_begin[v]; k < model->dep_begin[v + 1] && !stays; k++)
            stays = model->root[model->dep[k]] == s;
        double p = stays ? INFINITY : price(w, s);
        if (p < least) {
            least = p;
            chosen = s;
        }
    }
    if (chosen < 0)
        return false;
    w->unlocks_left--;
    evict(w, chosen);
    return true;
}

static bool compute(crn_walk *w, int32_t v)
{
    const crn_graph_model *model = w->model;
    int32_t s = model->root[v];
    while (w->resident_bytes + model->bytes[v] + model->extra[v] > w->budget_bytes)
        if (!evict_one(w) && !evict_waiting(w, v))
            return false;
    w->needed_bytes = crn_max(w->needed_bytes, w->resident_bytes + model->bytes[v] + model->extra[v]);
    if (s == v) {
        w->resident_bytes += model->bytes[v];
        add_resident(w, s);
    }
    w->accessed[s] = w->sequence->count;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        w->accessed[model->root[model->dep[i]]] = w->sequence->count;
    w->handle[v] = true;
    w->next[v] = w->first[s];
    w->first[s] = v;
    if (s == v || v == w->now) { /* recomputed aliases are implied by who reads them */
        if (w->sequence->count == w->sequence->capacity)
            return false;
        w->sequence->node[w->sequence->count++] = v;
    }
    return true;
}

static bool has_deps(const crn_walk *w, int32_t v)
{
    for (int32_t i = w->model->dep_begin[v]; i < w->model->dep_begin[v + 1]; i++)
        if (!w->handle[w->model->dep[i]])
            return false;
    return true;
}

/*
 * Computes v after everything that it lacks. Resident dependencies are locked as soon as v is asked for. One that was
 * unlocked meanwhile is brought back.
 */
static bool require(crn_walk *w, int32_t v)
{
    const crn_graph_model *model = w->model;
    int32_t depth = 0;
    w->stack[depth] = v;
    w->cursor[depth++] = model->dep_begin[v];
    lock_deps(w, v, 1);
    while (depth > 0) {
        int32_t top = w->stack[depth - 1], lacking = -1;
        while (w->cursor[depth - 1] < model->dep_begin[top + 1] && lacking < 0) {
            int32_t d = model->dep[w->cursor[depth - 1]];
            if (w->handle[d])
                w->cursor[depth - 1]++;
            else
                lacking = d;
        }
        if (lacking < 0 && w->rule->unlocks && !has_deps(w, top)) {
            w->cursor[depth - 1] = model->dep_begin[top];
            continue;
        }
        if (lacking < 0) {
            if (!compute(w, top))
                return false;
            lock_deps(w, top, -1);
            depth--;
            continue;
        }
        if (model->once[model->root[lacking]] && lacking < w->now)
            return false;
        w->stack[depth] = lacking;
        w->cursor[depth++] = model->dep_begin[lacking];
        lock_deps(w, lacking, 1);
    }
    return true;
}

static void reset(crn_walk *w)
{
    const crn_graph_model *model = w->model;
    size_t n = (size_t)model->node_count;
    memset(w->handle, 0, n * sizeof(*w->handle));
    memset(w->locks, 0, n * sizeof(*w->locks));
    memset(w->mark, 0, n * sizeof(*w->mark));
    memset(w->first, 0xff, n * sizeof(*w->first));
    memset(w->slot, 0xff, n * sizeof(*w->slot));
    memcpy(w->use_at, model->use_begin, n * sizeof(*w->use_at));
    w->resident_count = w->refreshed = w->marker = 0;
    w->resident_bytes = model->fixed_bytes;
}

bool crn_walk_run(crn_walk *w, const crn_task *task, int64_t budget_bytes, const crn_walk_rule *rule,
                  crn_sequence *sequence)
{
    reset(w);
    w->task = task;
    w->rule = rule;
    w->sequence = sequence;
    w->budget_bytes = budget_bytes;
    w->needed_bytes = 0;
    sequence->count = 0;
    for (w->now = 0; w->now < w->model->node_count; w->now++) {
        w->unlocks_left = UNLOCKS_MAX;
        if (w->now > 0)
            price_again(w, w->now - 1);
        if (is_stopped(w, 1) || !require(w, w->now))
            return false;
    }
    return true;
}

int64_t crn_walk_needed(const crn_walk *walk)
{
    return walk->needed_bytes;
}

void crn_walk_limit(crn_walk *walk, bool limited)
{
    walk->steps_left = limited && walk->is_heap ? LIMITED_STEPS : INT64_MAX;
}

bool crn_walk_is_spent(const crn_walk *walk)
{
    return walk->steps_left < 0;
}
