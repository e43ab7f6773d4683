#include "solve/graph/moment_program.h"

#include <string.h>

/* In place of the column of a storage. NONE: it has no such variable. HELD: it is resident in any case. */
enum { NONE = -1, HELD = -2 };

/* What rows and columns are named after, beside moments and storages: see box_program.h. */
typedef enum kind { IS_HELD = 1, IS_AGAIN, IS_SUM, IS_THERE, IS_IN_SIZES } kind;

/* A price below this share of the sum of all costs counts as none. */
#define PRICE_LEAST 1e-6

enum { SPANS_NODES_MAX = 768 };
enum { NAME_BITS = 15, NAME_NODES_MAX = (1 << NAME_BITS) - 1 };

/* One moment and what follows. */
typedef struct moment {
    int index, count;
    int32_t node, end; /* of its window */
    int32_t member_count;
    int64_t left; /* what the budget leaves to storages that may be held */
} moment;

bool crn_moment_program_new(crn_arena *arena, const crn_graph_model *model, int64_t budget_bytes, int32_t entry_max,
                            crn_moment_program *p)
{
    size_t n = (size_t)model->node_count;
    *p = (crn_moment_program){.model = model, .budget_bytes = budget_bytes};
    bool fits = crn_box_program_new(arena, entry_max, model->total_cost, &p->box) &&
                (p->together = crn_arena_alloc(arena, n, sizeof(int32_t))) &&
                (p->members = crn_arena_alloc(arena, n, sizeof(int32_t))) &&
                (p->is_member = crn_arena_alloc(arena, n, sizeof(bool))) &&
                (p->is_read = crn_arena_alloc(arena, n, sizeof(bool))) &&
                (p->is_seen = crn_arena_alloc(arena, n, sizeof(bool)));
    for (int i = 0; fits && i < CRN_MOMENTS_MAX; i++)
        fits = (p->held[i] = crn_arena_alloc(arena, n, sizeof(int32_t))) &&
               (p->again[i] = crn_arena_alloc(arena, n, sizeof(int32_t)));
    return fits;
}

/* ---- what a moment looks at ---- */

static void add_member(crn_moment_program *p, moment *at, int32_t s)
{
    if (p->is_member[s])
        return;
    p->is_member[s] = true;
    p->members[at->member_count++] = s;
}

/*
 * Members: the storages from before the moment that later nodes read, those that serve to recompute these, and so on.
 */
static void find_members(crn_moment_program *p, moment *at)
{
    const crn_graph_model *model = p->model;
    memset(p->is_member, 0, (size_t)model->node_count * sizeof(bool));
    for (int32_t i = model->dep_begin[at->node]; i < model->dep_begin[model->node_count]; i++)
        if (model->dep[i] < at->node)
            add_member(p, at, model->root[model->dep[i]]);
    for (int32_t k = 0; k < at->member_count; k++)
        for (int32_t s = p->members[k], i = model->dep_begin[s]; i < model->dep_begin[s + 1]; i++)
            add_member(p, at, model->root[model->dep[i]]);
}

/* Of storage s, or d for s, in the window from the moment to `end`. */
static uint64_t name_of(const crn_moment_program *p, kind what, const moment *at, int32_t end, int32_t s, int32_t d)
{
    uint64_t name = (uint64_t)what;
    const int32_t parts[] = {at->node, end, s, d};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        name = name << NAME_BITS | (uint64_t)(parts[i] + 1);
    return p->model->node_count < NAME_NODES_MAX ? name : 0;
}

static int32_t named_column(crn_moment_program *p, uint64_t name, int64_t cost, int64_t bytes)
{
    p->box.name = name;
    return crn_box_column(&p->box, cost, bytes);
}

static void hold(crn_moment_program *p, moment *at, int32_t s)
{
    if (p->held[at->index][s] == HELD)
        return;
    p->held[at->index][s] = HELD;
    at->left -= p->model->bytes[s];
}

/* Columns of the members, and the row of what is held. False where the moment's node does not fit. */
static bool set_out_members(crn_moment_program *p, moment *at)
{
    const crn_graph_model *model = p->model;
    int32_t *held = p->held[at->index], *again = p->again[at->index];
    memset(held, 0xff, (size_t)model->node_count * sizeof(*held));
    memset(again, 0xff, (size_t)model->node_count * sizeof(*again));
    at->left = p->budget_bytes - model->fixed_bytes - model->bytes[at->node] - model->extra[at->node];
    for (int32_t i = model->dep_begin[at->node]; i < model->dep_begin[at->node + 1]; i++)
        hold(p, at, model->root[model->dep[i]]);
    for (int32_t s = 0; s < at->node; s++)
        if (model->keep[s] && model->keep_from[s] < at->node)
            hold(p, at, s);
    if (at->left < 0)
        return false;
    for (int32_t k = 0; k < at->member_count; k++) {
        int32_t s = p->members[k];
        if (!model->once_node[s])
            again[s] = named_column(p, name_of(p, IS_AGAIN, at, at->end, s, NONE), model->cost[s], 0);
        if (held[s] == HELD || model->bytes[s] > at->left)
            continue;
        held[s] = named_column(p, name_of(p, IS_HELD, at, NONE, s, NONE), 0, model->bytes[s]);
        if (model->bytes[s] > 0)
            crn_box_entry(&p->box, held[s], 1);
    }
    p->box.name = name_of(p, IS_IN_SIZES, at, NONE, NONE, NONE);
    crn_box_sizes(&p->box, at->left);
    return true;
}

/* ---- rows ---- */

static void entry(crn_moment_program *p, int32_t column, int sign)
{
    if (column >= 0)
        crn_box_entry(&p->box, column, sign);
}

/* Columns of storages that are recomputed in a window, from the moment to `end`. */
typedef struct window {
    const int32_t *again;
    int32_t end;
} window;

/* held + again >= 1, or >= another column, of storage d; NONE = of s itself. */
static void must_be_there(crn_moment_program *p, const moment *at, const window *w, int32_t s, int32_t d,
                          int32_t if_column)
{
    if (p->held[at->index][s] == HELD)
        return;
    entry(p, if_column, 1);
    entry(p, p->held[at->index][s], -1);
    entry(p, w->again[s], -1);
    p->box.name = name_of(p, IS_THERE, at, w->end, s, d);
    crn_box_row(&p->box, if_column == NONE ? -1 : 0);
}

/* Rows of the storages that nodes of the window read, one for each. */
static void reads_of(crn_moment_program *p, const moment *at, const window *w)
{
    const crn_graph_model *model = p->model;
    memset(p->is_read, 0, (size_t)model->node_count * sizeof(bool));
    for (int32_t i = model->dep_begin[at->node]; i < model->dep_begin[w->end]; i++) {
        int32_t s = model->root[model->dep[i]];
        if (model->dep[i] >= at->node || p->is_read[s])
            continue;
        p->is_read[s] = true;
        must_be_there(p, at, w, s, NONE, NONE);
    }
}

/* Aliases that the window reads are recomputed where their storage is not held. */
static void aliases_until(crn_moment_program *p, const moment *at, int32_t end)
{
    const crn_graph_model *model = p->model;
    memset(p->is_seen, 0, (size_t)model->node_count * sizeof(bool));
    for (int32_t i = model->dep_begin[at->node]; i < model->dep_begin[end]; i++) {
        int32_t a = model->dep[i], s = model->root[a];
        if (a >= at->node || a == s || p->is_seen[a] || model->cost[a] == 0 || p->held[at->index][s] == HELD)
            continue;
        p->is_seen[a] = true;
        entry(p, named_column(p, name_of(p, IS_AGAIN, at, end, a, NONE), model->cost[a], 0), -1);
        entry(p, p->held[at->index][s], -1);
        p->box.name = name_of(p, IS_THERE, at, end, a, NONE);
        crn_box_row(&p->box, -1);
    }
}

/* A recomputed storage needs what it reads. What the window reads has its rows already. */
static void closure(crn_moment_program *p, const moment *at, const window *w)
{
    const crn_graph_model *model = p->model;
    for (int32_t k = 0; k < at->member_count; k++) {
        int32_t s = p->members[k];
        for (int32_t i = model->dep_begin[s]; w->again[s] >= 0 && i < model->dep_begin[s + 1]; i++) {
            int32_t d = model->root[model->dep[i]];
            if (d != s && !p->is_read[d])
                must_be_there(p, at, w, d, s, w->again[s]);
        }
    }
}

/* What the next moment holds was held at this one, or was recomputed in the window. */
static void holds_at(crn_moment_program *p, const moment *at, const window *w, int next)
{
    for (int32_t k = 0; next < at->count && k < at->member_count; k++) {
        int32_t s = p->members[k], held = p->held[next][s];
        if (held != NONE && !p->is_read[s])
            must_be_there(p, at, w, s, s, held == HELD ? NONE : held);
    }
}

static void set_out_window(crn_moment_program *p, const moment *at)
{
    const window w = {p->again[at->index], at->end};
    reads_of(p, at, &w);
    aliases_until(p, at, at->end);
    closure(p, at, &w);
    holds_at(p, at, &w, at->index + 1);
}

/* The same for several windows together, from the moment to the next one after them. */
static void set_out_windows(crn_moment_program *p, const moment *at, int next, int32_t end)
{
    const window w = {p->together, end};
    for (int32_t k = 0; k < at->member_count; k++) {
        int32_t s = p->members[k];
        uint64_t name = name_of(p, IS_AGAIN, at, end, s, NONE);
        p->together[s] = p->model->once_node[s] ? NONE : named_column(p, name, 0, 0);
        if (p->together[s] == NONE)
            continue;
        entry(p, p->together[s], 1);
        for (int i = at->index; i < next; i++)
            entry(p, p->again[i][s], -1);
        p->box.name = name_of(p, IS_SUM, at, end, s, NONE);
        crn_box_row(&p->box, 0);
        if (crn_box_recall(&p->box, name, -1) >= 0) /* it was one window, and cost what it takes */
            crn_box_start_at(&p->box, p->model->cost[s]);
    }
    reads_of(p, at, &w);
    closure(p, at, &w);
    holds_at(p, at, &w, next);
}

/* Whether an earlier program has found a price for these windows, as one or together. */
static bool is_priced(const crn_moment_program *p, const moment *at, int32_t end)
{
    for (int32_t k = 0; k < at->member_count; k++)
        if (crn_box_recall(&p->box, name_of(p, IS_SUM, at, end, p->members[k], NONE), 0) > PRICE_LEAST)
            return true;
    return false;
}

/*
 * Which windows are looked at together: 2, 4, 8 and 16 of them, those of which the start of this program knows, and all to the
 * end. On large graphs the last alone, for the others take more time than they are worth.
 */
static void set_out_together(crn_moment_program *p, const moment *at, const int32_t *moments)
{
    bool is_small = p->model->node_count <= SPANS_NODES_MAX;
    for (int span = 2; is_small && at->index + span < at->count; span++) {
        int32_t end = moments[at->index + span];
        if ((span & (span - 1)) == 0 || is_priced(p, at, end))
            set_out_windows(p, at, at->index + span, end);
    }
    if (at->index + 1 < at->count)
        set_out_windows(p, at, at->count, p->model->node_count);
}

int64_t crn_moment_bound(crn_moment_program *p, const int32_t *moments, int count, crn_box_limit *limit)
{
    crn_box_begin(&p->box);
    for (int i = count - 1; i >= 0; i--) {
        moment at = {.index = i,
                     .count = count,
                     .node = moments[i],
                     .end = i + 1 < count ? moments[i + 1] : p->model->node_count};
        find_members(p, &at);
        if (!set_out_members(p, &at))
            return 0;
        set_out_window(p, &at);
        set_out_together(p, &at, moments);
        if (p->box.is_full)
            return 0;
    }
    return crn_box_bound(&p->box, limit);
}
