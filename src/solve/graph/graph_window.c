#include "solve/graph/graph_window.h"

#include <math.h>
#include <string.h>

enum { PRICES_MAX = 24 };

#define BYTES_MAX (CRN_FLOW_INFINITE / CAIRN_NODES_MAX) /* rents of single storages, so that their sum is finite */

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

/* The window reads alias a. It is recomputed with its storage, and so are the aliases below it. */
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

/* Everything that recomputations may need, transitively. */
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
    int64_t scaled;     /* its value: lambda * bytes(kept) + cost(recomputed), scaled and rounded down */
    double cost, bytes; /* the line that it stands for */
} cut;

#define PRICE_BYTES_ALONE (-1.0) /* rents are bytes, and recomputation is free: the least bytes that must be kept */

static int64_t rent_of(const crn_graph_bounder *b, int32_t k, double price)
{
    int64_t bytes = b->model->bytes[b->storage[k]];
    if (price == PRICE_BYTES_ALONE)
        return crn_min(bytes, BYTES_MAX);
    int64_t dear = (b->model->total_cost + 1) << b->shift;
    double rent = floor(price * (double)bytes * (1 - 0x1p-40));
    return rent < (double)dear ? (int64_t)rent : dear;
}

/* Node 2k: storage k is needed; node 2k + 1: it is recomputed. True is the source's side. */
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

int64_t crn_graph_bound_moment(crn_graph_bounder *b, int32_t t)
{
    double kept_all;
    int64_t taken = -look(b, 0, t, b->model->node_count, &kept_all);
    look_at_ancestors(b);
    int64_t bytes = taken + cut_at_price(b, PRICE_BYTES_ALONE).scaled;
    forget_window(b);
    return bytes;
}
