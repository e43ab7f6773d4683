#include "solve/graph/graph_walk.h"

#include <math.h>
#include <string.h>

enum { ANCESTORS_MAX = 64, UNLOCKS_MAX = 64, SCAN_MAX = 512, SCAN_LARGE = 48, LARGE_NODES = 10000 };

struct crn_walk {
    const crn_graph_model *model;
    crn_arena arena;
    /* the state of a walk */
    int64_t resident_bytes, budget_bytes;
    int32_t now;    /* node whose first computation is under way */
    bool *handle;   /* of a node: computed and not evicted */
    int32_t *first; /* of a storage: nodes with a handle, as a list */
    int32_t *next;
    int32_t *locks;     /* of a storage: how many computations under way need it */
    int32_t *accessed;  /* of a storage: events of the sequence when it was last made or read */
    int32_t *use_at;    /* of a storage: position in model->use of the next use */
    int32_t *slot;      /* of a storage: where it stands in residents, -1 = not resident */
    int32_t *residents; /* storages */
    int32_t resident_count, scan_from;
    /* scratch */
    int32_t *stack, *cursor; /* nodes to be computed, and how far their dependencies were looked at */
    int32_t *visit, *mark;   /* search for missing ancestors */
    int32_t marker;
    int32_t unlocks_left; /* of the node under way */
    const crn_walk_rule *rule;
    crn_sequence *sequence;
};

cairn_status crn_walk_new(const crn_graph_model *model, crn_walk **walk, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, model->arena.allocator);
    size_t n = (size_t)model->node_count;
    crn_walk *w = crn_arena_alloc_zero(&arena, 1, sizeof(*w));
    int32_t *table = crn_arena_alloc_zero(&arena, n, 11 * sizeof(*table));
    bool *handle = crn_arena_alloc(&arena, n, sizeof(*handle));
    *walk = NULL;
    if (!w || !table || !handle) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    int32_t **columns[] = {&w->first, &w->next,   &w->locks, &w->use_at, &w->slot,    &w->residents,
                           &w->stack, &w->cursor, &w->visit, &w->mark,   &w->accessed};
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++)
        *columns[i] = table + i * n;
    w->model = model;
    w->handle = handle;
    w->arena = arena;
    *walk = w;
    return CAIRN_OK;
}

void crn_walk_free(crn_walk *walk)
{
    if (!walk)
        return;
    crn_arena arena = walk->arena;
    crn_arena_clear(&arena);
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

static double half_power(double x, int halves)
{
    double result = halves & 1 ? sqrt(x) : 1;
    for (int i = 0; i < halves / 2; i++)
        result *= x;
    return result;
}

/* The price of evicting s; the least one goes. Negative: it can go for nothing. Infinite: it must stay. */
static double price(crn_walk *w, int32_t s)
{
    const crn_graph_model *model = w->model;
    int32_t use = next_use(w, s);
    int64_t cost = recompute_cost(w, s);
    if (use == model->node_count) /* dead: cheap ancestors of what may come back go first */
        return cost == INT64_MAX && wanted(w, s) ? INFINITY : -1.0 / (double)(1 + (cost >> 1));
    if (cost == INT64_MAX)
        return INFINITY;
    if (w->rule->online)
        return ((double)cost + 1) / ((double)(model->bytes[s] + 1) * (double)(w->sequence->count - w->accessed[s] + 1));
    double weight = w->rule->weight ? (double)w->rule->weight[w->use_at[s]] : 1.0;
    double distance = (double)(use - w->now + 1), bytes = (double)(model->bytes[s] + 1);
    return weight * ((double)cost + 1) /
           (half_power(bytes, w->rule->half_bytes_power) * half_power(distance, w->rule->half_distance_power));
}

static bool kept(const crn_walk *w, int32_t s)
{
    return w->model->keep[s] && w->handle[w->model->keep_from[s]];
}

static void evict(crn_walk *w, int32_t s)
{
    for (int32_t v = w->first[s]; v >= 0; v = w->next[v])
        w->handle[v] = false;
    w->first[s] = -1;
    w->resident_bytes -= w->model->bytes[s];
    int32_t moved = w->residents[--w->resident_count];
    w->residents[w->slot[s]] = moved;
    w->slot[moved] = w->slot[s];
    w->slot[s] = -1;
}

/* Evicts the cheapest storage. With very many residents only a window of them is looked at, a new one each time. */
static bool evict_one(crn_walk *w)
{
    double least = INFINITY;
    int32_t window = w->model->node_count < LARGE_NODES ? SCAN_MAX : SCAN_LARGE;
    int32_t chosen = -1, count = w->resident_count, scan = count < window ? count : window;
    for (int32_t i = 0, k = w->scan_from; i < count && (i < scan || chosen < 0); i++, k++) {
        if (k >= count)
            k = 0;
        int32_t s = w->residents[k];
        if (w->locks[s] > 0 || w->model->bytes[s] == 0 || kept(w, s))
            continue;
        double p = price(w, s);
        if (p < least || (p == least && chosen >= 0 && s < chosen)) {
            least = p;
            chosen = s;
        }
    }
    if (chosen < 0)
        return false;
    if (count >= window)
        w->scan_from = (w->scan_from + scan) % count;
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
    if (!w->rule->unlocks || w->unlocks_left == 0)
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
    if (s == v) {
        w->resident_bytes += model->bytes[v];
        w->slot[s] = w->resident_count;
        w->residents[w->resident_count++] = s;
    }
    w->accessed[s] = w->sequence->count;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        w->accessed[model->root[model->dep[i]]] = w->sequence->count;
    w->handle[v] = true;
    w->next[v] = w->first[s];
    w->first[s] = v;
    if (s == v || v == w->now) { /* aliases computed again are implied by who reads them */
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
 * Computes v after everything that it lacks. Dependencies that are there are locked as soon as v is asked for; one that
 * was unlocked meanwhile is brought back.
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
    w->resident_count = w->scan_from = w->marker = 0;
    w->resident_bytes = model->fixed_bytes;
}

bool crn_walk_run(crn_walk *w, int64_t budget_bytes, const crn_walk_rule *rule, crn_sequence *sequence)
{
    reset(w);
    w->rule = rule;
    w->sequence = sequence;
    w->budget_bytes = budget_bytes;
    sequence->count = 0;
    for (w->now = 0; w->now < w->model->node_count; w->now++) {
        w->unlocks_left = UNLOCKS_MAX;
        if (!require(w, w->now))
            return false;
    }
    return true;
}
