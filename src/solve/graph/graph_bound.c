#include "solve/graph/graph_bound.h"

#include <math.h>
#include <string.h>

#include "solve/graph/flow_network.h"
#include "solve/graph/graph_suffix.h"

enum { PRICES_MAX = 24, GRID_WORK = 2000000, WINDOW_WORK = 4000000, FIRST_NODES = 24 };

/* A quarter of a second for a hundred nodes; on more, where not all is found out in any case, less. */
#define SUFFIX_WORK ((int64_t)25000000000)

#define BYTES_MAX (CRN_FLOW_INFINITE / CAIRN_NODES_MAX) /* rents of single storages, so that their sum is finite */

struct crn_graph_bounder {
    crn_graph_windows windows;
    const crn_graph_model *model;
    crn_arena arena;
    crn_flow_network network;
    int shift;        /* costs are scaled by 2^shift, so that prices per byte have room below one nanosecond */
    int32_t *place;   /* of a storage: its position among those looked at, -1 = none */
    int32_t *storage; /* those looked at */
    int32_t count;
    bool *needed;   /* of a position: the window reads it */
    bool *resident; /* of a storage: resident at the moment in any case */
    int32_t *residents, resident_count;
    int32_t *alias_at; /* aliases that the window reads, and what they read, as lists of a position */
    int32_t *alias, *alias_next, alias_count;
    bool *alias_seen; /* of a node */
    bool *seen;       /* of a node: it was looked from */
    const crn_task *task;
    int64_t *to_end; /* of a node: what the window from it to the end is worth, as far as known, else 0 */
    int64_t budget_bytes;
    double price; /* the last one that was best: a good first guess for the next window */
};

cairn_status crn_graph_bounder_new(const crn_task *task, const crn_graph_model *model, crn_graph_bounder **bounder,
                                   cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, model->arena.allocator);
    size_t n = (size_t)model->node_count;
    int32_t edges = model->dep_begin[model->node_count];
    crn_graph_bounder *b = crn_arena_alloc_zero(&arena, 1, sizeof(*b));
    *bounder = NULL;
    bool fits =
        b &&
        crn_flow_network_new(task, &arena, 2 * model->node_count + 2, 3 * model->node_count + 2 * edges, &b->network) &&
        (b->place = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->storage = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->to_end = crn_arena_alloc_zero(&arena, n, sizeof(int64_t))) &&
        (b->residents = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->alias_at = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->alias = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->alias_next = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
        (b->needed = crn_arena_alloc(&arena, n, sizeof(bool))) &&
        (b->seen = crn_arena_alloc(&arena, n, sizeof(bool))) &&
        (b->resident = crn_arena_alloc_zero(&arena, n, sizeof(bool))) &&
        (b->alias_seen = crn_arena_alloc_zero(&arena, n, sizeof(bool)));
    if (!fits) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    memset(b->place, 0xff, n * sizeof(int32_t));
    b->model = model;
    b->task = task;
    while (b->shift < 20 && model->total_cost < (INT64_C(1) << 57) >> b->shift)
        b->shift++;
    b->arena = arena;
    *bounder = b;
    return CAIRN_OK;
}

void crn_graph_bounder_free(crn_graph_bounder *bounder)
{
    if (!bounder)
        return;
    crn_arena_clear(&bounder->arena);
}

/* ---- what a window looks at ---- */

static void make_resident(crn_graph_bounder *b, int32_t s, int64_t *left)
{
    if (b->resident[s])
        return;
    b->resident[s] = true;
    b->residents[b->resident_count++] = s;
    *left -= b->model->bytes[s];
}

static int32_t look_at(crn_graph_bounder *b, int32_t s, bool needed)
{
    if (b->place[s] < 0) {
        b->place[s] = b->count;
        b->storage[b->count] = s;
        b->needed[b->count] = false;
        b->alias_at[b->count++] = -1;
    }
    if (needed)
        b->needed[b->place[s]] = true;
    return b->place[s];
}

/* The window reads alias a: computed again with its storage, and so are the aliases below it. */
static void look_at_alias(crn_graph_bounder *b, int32_t a)
{
    const crn_graph_model *model = b->model;
    int32_t at = b->place[model->root[a]];
    for (int32_t v = a; v >= 0;) {
        if (v == model->root[v] || b->alias_seen[v])
            break;
        b->alias_seen[v] = true;
        b->alias[b->alias_count] = v;
        b->alias_next[b->alias_count] = b->alias_at[at];
        b->alias_at[at] = b->alias_count++;
        int32_t below = -1; /* the newest dependency in the same storage is what it is an alias of, or above it */
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
            if (model->root[model->dep[i]] == model->root[v] && model->dep[i] > below)
                below = model->dep[i];
        v = below;
    }
}

static void look_at_window(crn_graph_bounder *b, int32_t t, int32_t e)
{
    const crn_graph_model *model = b->model;
    for (int32_t c = t; c < e; c++)
        for (int32_t i = model->dep_begin[c]; i < model->dep_begin[c + 1]; i++) {
            int32_t d = model->dep[i], s = model->root[d];
            if (d >= t || b->resident[s])
                continue;
            look_at(b, s, true);
            look_at_alias(b, d);
        }
}

static void read_by(crn_graph_bounder *b, int32_t v)
{
    const crn_graph_model *model = b->model;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        if (!b->resident[model->root[model->dep[i]]])
            look_at(b, model->root[model->dep[i]], false);
}

/* Everything that computing again may need, transitively. */
static void look_at_ancestors(crn_graph_bounder *b)
{
    for (int32_t k = 0; k < b->count; k++) {
        read_by(b, b->storage[k]);
        for (int32_t a = b->alias_at[k]; a >= 0; a = b->alias_next[a])
            read_by(b, b->alias[a]);
    }
}

static void forget_window(crn_graph_bounder *b)
{
    for (int32_t k = 0; k < b->count; k++)
        b->place[b->storage[k]] = -1;
    for (int32_t a = 0; a < b->alias_count; a++)
        b->alias_seen[b->alias[a]] = false;
    for (int32_t i = 0; i < b->resident_count; i++)
        b->resident[b->residents[i]] = false;
    b->count = b->alias_count = b->resident_count = 0;
}

/* ---- one price ---- */

static void arcs_to_deps(crn_graph_bounder *b, int32_t k, int32_t v)
{
    const crn_graph_model *model = b->model;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
        int32_t other = b->place[model->root[model->dep[i]]];
        if (other >= 0 && other != k && !b->needed[other])
            crn_flow_arc(&b->network, 2 * k + 1, 2 * other, CRN_FLOW_INFINITE);
    }
}

/* Of storage k with the aliases of it that the window reads; infinite when one of them must not run twice. */
static int64_t cost_again(const crn_graph_bounder *b, int32_t k)
{
    const crn_graph_model *model = b->model;
    int64_t cost = model->cost[b->storage[k]];
    bool once = model->once_node[b->storage[k]];
    for (int32_t a = b->alias_at[k]; a >= 0; a = b->alias_next[a]) {
        cost += model->cost[b->alias[a]];
        once = once || model->once_node[b->alias[a]];
    }
    return once ? CRN_FLOW_INFINITE : cost << b->shift;
}

typedef struct cut {
    int64_t scaled;     /* its value: lambda * bytes(kept) + cost(computed again), scaled and rounded down */
    double cost, bytes; /* the line that it stands for */
} cut;

#define PRICE_BYTES_ALONE (-1.0) /* rents are bytes, and computing again is free: the least bytes that must be kept */

/* Flows of larger costs would pass 2^63: years, about which nothing is said. */
#define COSTS_MAX (INT64_C(1) << 57)

static int64_t rent_of(const crn_graph_bounder *b, int32_t k, double price)
{
    int64_t bytes = b->model->bytes[b->storage[k]];
    if (price == PRICE_BYTES_ALONE)
        return crn_min(bytes, BYTES_MAX);
    int64_t dear = (b->model->total_cost + 1) << b->shift;
    double rent = floor(price * (double)bytes * (1 - 0x1p-40));
    return rent < (double)dear ? (int64_t)rent : dear;
}

/* Node 2k: storage k is needed; node 2k + 1: it is computed again. True is the source's side. */
static cut cut_at_price(crn_graph_bounder *b, double price)
{
    int32_t source = 2 * b->count, sink = source + 1;
    crn_flow_network_begin(&b->network, sink + 1);
    for (int32_t k = 0; k < b->count; k++) {
        int64_t again = cost_again(b, k);
        bool once = again == CRN_FLOW_INFINITE;
        crn_flow_arc(&b->network, b->needed[k] ? source : 2 * k, 2 * k + 1, rent_of(b, k, price));
        crn_flow_arc(&b->network, 2 * k + 1, sink, once || price != PRICE_BYTES_ALONE ? again : 0);
        if (once)
            continue;
        arcs_to_deps(b, k, b->storage[k]);
        for (int32_t a = b->alias_at[k]; a >= 0; a = b->alias_next[a])
            arcs_to_deps(b, k, b->alias[a]);
    }
    cut found = {crn_flow_maximise(&b->network, source, sink), 0, 0};
    for (int32_t k = 0; k < b->count; k++) {
        bool again = crn_flow_on_source_side(&b->network, 2 * k + 1);
        if (again)
            found.cost += (double)cost_again(b, k);
        else if (b->needed[k] || crn_flow_on_source_side(&b->network, 2 * k))
            found.bytes += (double)b->model->bytes[b->storage[k]];
    }
    return found;
}

static int64_t bound_of(const crn_graph_bounder *b, const cut *found, double price, int64_t left)
{
    double rent = ceil(price * (double)left * (1 + 0x1p-40));
    if (rent >= (double)found->scaled)
        return 0;
    int64_t scaled = found->scaled - (int64_t)rent;
    return (scaled + (INT64_C(1) << b->shift) - 1) >> b->shift; /* recomputation times are integers: round up */
}

/* Maximises over the price by Newton's method on the lines of the cuts: one that keeps too much, one that does not. */
static int64_t maximise(crn_graph_bounder *b, int64_t left, double kept_all)
{
    cut much = {0, 0, kept_all}, little = cut_at_price(b, PRICE_BYTES_ALONE);
    int64_t best = 0;
    if (little.scaled > left)
        return INT64_MAX;
    if (little.bytes > (double)left ||
        b->network.stopped) /* or sizes so large that they were cut off, or not told apart */
        return 0;
    double guess = b->price;
    for (int i = 0; i < PRICES_MAX; i++) {
        double price = (little.cost - much.cost) / (much.bytes - little.bytes);
        if (i == 0 && guess > 0)
            price = guess;
        cut found = cut_at_price(b, price);
        int64_t bound = bound_of(b, &found, price, left);
        if (bound > best) {
            best = bound;
            b->price = price;
        }
        if (b->network.stopped)
            break;
        double line = much.cost + price * much.bytes, value = found.cost + price * found.bytes;
        if (!(i == 0 && guess > 0) && value >= line * (1 - 1e-9))
            break;
        cut *replaced = found.bytes > (double)left ? &much : &little;
        *replaced = found;
    }
    return best;
}

/* Sets out a window; returns the bytes that the budget leaves for what is looked at. */
static int64_t look(crn_graph_bounder *b, int64_t budget_bytes, int32_t t, int32_t e, double *kept_all)
{
    const crn_graph_model *model = b->model;
    int64_t left = budget_bytes - model->fixed_bytes - model->bytes[t] - model->extra[t];
    for (int32_t i = model->dep_begin[t]; i < model->dep_begin[t + 1]; i++)
        make_resident(b, model->root[model->dep[i]], &left);
    for (int32_t s = 0; s < t; s++)
        if (model->keep[s] && model->keep_from[s] < t)
            make_resident(b, s, &left);
    look_at_window(b, t, e);
    *kept_all = 0;
    for (int32_t k = 0; k < b->count; k++)
        *kept_all += (double)model->bytes[b->storage[k]];
    return left;
}

int64_t crn_graph_bound_window(crn_graph_bounder *b, int64_t budget_bytes, int32_t t, int32_t e)
{
    double kept_all;
    int64_t left = look(b, budget_bytes, t, e, &kept_all), bound = 0;
    if (left < 0) {
        bound = INT64_MAX;
    } else if (kept_all > (double)left) {
        look_at_ancestors(b);
        bound = maximise(b, left, kept_all);
    }
    forget_window(b);
    return bound;
}

static int64_t memory_at(crn_graph_bounder *b, int32_t t)
{
    double kept_all;
    int64_t taken = -look(b, 0, t, b->model->node_count, &kept_all);
    look_at_ancestors(b);
    int64_t bytes = taken + cut_at_price(b, PRICE_BYTES_ALONE).scaled;
    forget_window(b);
    return bytes;
}

/* Nodes to each one that is looked at, so that all cuts together stay within the work limit. */
static int32_t last_stride(const crn_graph_bounder *b)
{
    int32_t n = b->model->node_count, stride = 1;
    int64_t size = n + b->model->dep_begin[n];
    while (n / stride > 8 && n / stride > GRID_WORK / size)
        stride *= 2;
    return stride;
}

/* What a node takes beside what later nodes read: the more, the less is left to them at that moment. */
static int64_t taken_by(const crn_graph_model *model, int32_t t)
{
    int64_t bytes = crn_add_saturating(model->bytes[t], model->extra[t]);
    for (int32_t i = model->dep_begin[t]; i < model->dep_begin[t + 1]; i++) {
        int32_t s = model->root[model->dep[i]];
        if (model->use[model->use_begin[s + 1] - 1] == t)
            bytes = crn_add_saturating(bytes, model->bytes[s]);
    }
    return bytes;
}

/* Of the nodes from t on, so many of them, the one that takes most. */
static int32_t largest_taker(const crn_graph_model *model, int32_t t, int32_t count)
{
    int32_t best = t, end = (int32_t)crn_min(model->node_count, (int64_t)t + count);
    int64_t most = taken_by(model, t);
    for (int32_t v = t + 1; v < end; v++) {
        int64_t taken = taken_by(model, v);
        best = taken > most ? v : best;
        most = crn_max(most, taken);
    }
    return best;
}

/* The largest value so far of a function of the node, and where; a node is looked at once. */
typedef struct peak {
    int64_t (*value)(crn_graph_bounder *, int32_t);
    int64_t best;
    int32_t best_t;
} peak;

static bool has_ended(const crn_graph_bounder *b, const peak *p)
{
    return p->best == INT64_MAX || crn_should_stop(b->task, NULL);
}

static void look_from(crn_graph_bounder *b, peak *p, int32_t t)
{
    if (t < 0 || t >= b->model->node_count || b->seen[t])
        return;
    int64_t found = p->value(b, t);
    b->seen[t] = true;
    p->best_t = found > p->best ? t : p->best_t;
    p->best = crn_max(p->best, found);
}

/* Closer and closer to the best. */
static void look_around(crn_graph_bounder *b, peak *p, int32_t stride)
{
    for (stride /= 2; stride > 0 && p->best > 0 && !has_ended(b, p); stride /= 2)
        for (int32_t t = p->best_t - stride, i = 0; i < 2; t += 2 * stride, i++)
            look_from(b, p, t);
}

/*
 * The largest value of a function of the node: of those that take most among so many neighbours, first few of them, and
 * around the best of these; then of more and more. Every value is a valid bound, so a maximum that is missed only weakens
 * it, and so does being stopped.
 */
static int64_t largest(crn_graph_bounder *b, int64_t (*value)(crn_graph_bounder *, int32_t))
{
    int32_t n = b->model->node_count, last = last_stride(b), stride = last;
    peak p = {.value = value};
    memset(b->seen, 0, (size_t)n * sizeof(*b->seen));
    while (n / stride > FIRST_NODES)
        stride *= 2;
    for (; stride >= last && !has_ended(b, &p); stride /= 2) {
        for (int32_t from = 0; from < n && !has_ended(b, &p); from += stride)
            look_from(b, &p, largest_taker(b->model, from, stride));
        look_around(b, &p, stride);
    }
    return p.best;
}

static int64_t window_to_end(crn_graph_bounder *b, int32_t t)
{
    return b->to_end[t] = crn_graph_bound_window(b, b->budget_bytes, t, b->model->node_count);
}

/* Where windows may begin and end: in each of as many even parts as the work limit allows, the node worth most. */
static int32_t list_cuts(const crn_graph_bounder *b, int32_t cuts[CRN_GRAPH_CUTS_MAX + 1])
{
    int32_t n = b->model->node_count, count = 0;
    int64_t size = n + b->model->dep_begin[n];
    int32_t parts = (int32_t)crn_min(CRN_GRAPH_CUTS_MAX, (int64_t)sqrt(0.25 * WINDOW_WORK / (double)size));
    for (int32_t part = 0; part < parts; part++) {
        int32_t from = (int32_t)((int64_t)n * part / parts), to = (int32_t)((int64_t)n * (part + 1) / parts),
                best = from;
        for (int32_t t = from; t < to; t++)
            best = b->to_end[t] > b->to_end[best] ? t : best;
        if (to > from && b->to_end[best] > 0)
            cuts[count++] = best;
    }
    cuts[count] = n;
    return count;
}

static int64_t window_between(crn_graph_bounder *b, int32_t t, int32_t e)
{
    if (e == b->model->node_count)
        return b->to_end[t];
    return crn_should_stop(b->task, NULL) ? 0 : crn_graph_bound_window(b, b->budget_bytes, t, e);
}

static void fill_windows(crn_graph_bounder *b)
{
    crn_graph_windows *all = &b->windows;
    all->count = list_cuts(b, all->cut);
    for (int32_t i = 0; i < all->count; i++)
        for (int32_t j = i + 1; j <= all->count; j++)
            all->spent[i][j] = window_between(b, all->cut[i], all->cut[j]);
}

/* The best sum over windows that do not overlap: what each spends is spent within it. */
static int64_t best_windows(crn_graph_bounder *b)
{
    int64_t sum[CRN_GRAPH_CUTS_MAX + 1] = {0};
    fill_windows(b);
    for (int32_t j = 1; j <= b->windows.count; j++)
        for (int32_t i = 0; i < j; i++)
            sum[j] = crn_max(sum[j], crn_add_saturating(sum[i], b->windows.spent[i][j]));
    return sum[b->windows.count];
}

int64_t crn_graph_bound_makespan(crn_graph_bounder *b, int64_t budget_bytes)
{
    b->budget_bytes = budget_bytes;
    b->windows.count = 0;
    if (b->model->total_cost > COSTS_MAX)
        return b->model->total_cost;
    memset(b->to_end, 0, (size_t)b->model->node_count * sizeof(*b->to_end));
    int64_t again = largest(b, window_to_end);
    if (again > 0 && again < INT64_MAX)
        again = crn_max(again, best_windows(b));
    return again == INT64_MAX ? INT64_MAX : b->model->total_cost + again;
}

int64_t crn_graph_bound_memory(crn_graph_bounder *b)
{
    return largest(b, memory_at);
}

/* ---- the method ---- */

static bool applies(const crn_task *task)
{
    return cairn_problem_kind_of(task->problem) == CAIRN_KIND_GRAPH && !task->machine;
}

/* The time that a bound may take is a share of what its solver has. */
enum { TIME_PARTS = 4 };

/* The last answer: a solve asks at the same budget several times. */
typedef struct known {
    int64_t budget_bytes, found_ns;
} known;

static cairn_status bounder_for(const crn_task *task, crn_graph_model **model, crn_graph_bounder **bounder,
                                cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, model, error));
    cairn_status status = crn_graph_bounder_new(task, *model, bounder, error);
    if (status != CAIRN_OK)
        crn_graph_model_free(*model);
    return status;
}

static cairn_status raise_by_suffixes(const crn_task *task, const crn_graph_bounder *bounder, int64_t budget_bytes,
                                      int64_t *found_ns, cairn_error *error)
{
    const crn_graph_model *model = bounder->model;
    crn_graph_suffix *suffix;
    if (*found_ns == INT64_MAX || !crn_graph_suffix_applies(task))
        return CAIRN_OK;
    CRN_TRY(crn_graph_suffix_new(task, model, budget_bytes, SUFFIX_WORK / (model->node_count + 1), &bounder->windows,
                                 &suffix, error));
    *found_ns = crn_max(*found_ns, crn_add_saturating(model->total_cost, suffix->after[0]));
    crn_graph_suffix_free(suffix);
    return CAIRN_OK;
}

static cairn_status find_makespan(const crn_task *task, int64_t budget_bytes, int64_t *found_ns, cairn_error *error)
{
    crn_graph_model *model;
    crn_graph_bounder *bounder;
    const crn_task part = crn_task_part(task, TIME_PARTS);
    CRN_TRY(bounder_for(&part, &model, &bounder, error));
    *found_ns = crn_graph_bound_makespan(bounder, budget_bytes);
    cairn_status status = raise_by_suffixes(&part, bounder, budget_bytes, found_ns, error);
    crn_graph_bounder_free(bounder);
    crn_graph_model_free(model);
    return status;
}

/*
 * A budget that nothing fits leaves the bound as it is. What the windows say holds where there is no memory for suffixes.
 */
static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    cairn_status status = CAIRN_OK;
    if (!applies(task) || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    known *last = *kept ? *kept : crn_alloc_zero(&allocator, 1, sizeof(*last));
    if (!last)
        return crn_no_memory(error);
    *kept = last;
    if (last->found_ns == 0 || last->budget_bytes != budget_bytes) {
        *last = (known){.budget_bytes = budget_bytes};
        status = find_makespan(task, budget_bytes, &last->found_ns, error);
    }
    if (last->found_ns != INT64_MAX)
        *bound_ns = crn_max(*bound_ns, last->found_ns);
    return status;
}

static void forget(const crn_task *task, void *kept)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, kept, 1, sizeof(known));
}

static cairn_status raise_memory(const crn_task *task, int64_t *bound_bytes, cairn_error *error)
{
    crn_graph_model *model;
    crn_graph_bounder *bounder;
    const crn_task part = crn_task_part(task, TIME_PARTS);
    if (!applies(task))
        return CAIRN_OK;
    CRN_TRY(bounder_for(&part, &model, &bounder, error));
    *bound_bytes = crn_max(*bound_bytes, crn_graph_bound_memory(bounder));
    crn_graph_bounder_free(bounder);
    crn_graph_model_free(model);
    return CAIRN_OK;
}

const crn_bound_method crn_graph_bound_method = {
    .name = "min-cut", .raise_makespan = raise_makespan, .forget = forget, .raise_memory = raise_memory};
