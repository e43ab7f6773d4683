#include "solve/graph/suffix_branch.h"

#include <stdlib.h>
#include <string.h>

/* Whether to stop is asked after so much work: a step may go over all items for every use. */
enum { POLL_WORK = 1 << 15, WORK_OF_STEP = 16, FIRST_STEP = 256 };

enum { UNSEEN = -1, NO_ITEM = -2 };

/* All handles of a storage that are computed by the moment. */
static void set_storage(crn_branching *b, int32_t root, bool held)
{
    for (int32_t i = b->member_begin[root]; i < b->member_begin[root + 1] && b->members[i] <= b->node; i++) {
        uint64_t bit = (uint64_t)1 << (b->members[i] % 64);
        uint64_t *word = &b->held[b->members[i] / 64];
        *word = held ? *word | bit : *word & ~bit;
    }
}

/* The least cost of dropping what does not fit, of what is read directly by a node up to `until`. */
static int64_t knapsack(crn_branching *b, int32_t until)
{
    int64_t over = b->open_bytes - b->room, cost = 0;
    b->work += b->item_count;
    for (int32_t i = 0; i < b->item_count; i++)
        if (b->choices[i] == CRN_BRANCH_OPEN && (b->items[i].reader > until || b->items[i].cost == 0))
            over -= b->items[i].bytes;
    for (int32_t i = b->item_count - 1; i >= 0 && over > 0; i--) {
        const crn_branch_item *it = &b->items[i];
        if (b->choices[i] != CRN_BRANCH_OPEN || it->reader > until || it->cost == 0)
            continue;
        if (it->bytes > over)
            return cost +
                   (int64_t)(((crn_wide)it->cost * (crn_wide)over + (crn_wide)it->bytes - 1) / (crn_wide)it->bytes);
        cost += it->cost;
        over -= it->bytes;
    }
    return cost;
}

/*
 * A bound for all ways to decide the open items. For any x it is the sum of three costs: recomputations before x of
 * what is dropped already, of what must still be dropped for the bytes and is read before x, and all recomputations
 * after x.
 */
static int64_t bound_of(crn_branching *b)
{
    const crn_graph_suffix *s = b->suffix;
    int32_t t = b->node + 1, begin = s->use_begin[t], count = s->use_end[t] - begin;
    int64_t bound = crn_graph_suffix_rest_costs(s, t, b->held, b->cost_at);
    b->work += count + WORK_OF_STEP;
    if (bound >= b->best || b->open_bytes <= b->room || count == 0)
        return bound;
    int64_t most = knapsack(b, s->model->node_count - 1);
    for (int32_t i = count - 1; i >= 0 && bound < b->best; i--) {
        int32_t reader = s->uses[begin + i].reader;
        int64_t spent = crn_add_saturating(b->cost_at[i], s->after[reader]);
        if (crn_add_saturating(spent, most) > bound)
            bound = crn_max(bound, crn_add_saturating(spent, knapsack(b, reader)));
    }
    return bound;
}

static void decide(crn_branching *b, int32_t i, crn_branch_choice made)
{
    const crn_branch_item *it = &b->items[i];
    b->open_bytes -= it->bytes;
    b->choices[i] = made;
    if (made == CRN_BRANCH_HELD)
        b->room -= it->bytes;
    else
        set_storage(b, it->root, false);
}

static void undo(crn_branching *b, int32_t i)
{
    const crn_branch_item *it = &b->items[i];
    b->open_bytes += it->bytes;
    if (b->choices[i] == CRN_BRANCH_HELD)
        b->room += it->bytes;
    else
        set_storage(b, it->root, true);
    b->choices[i] = CRN_BRANCH_OPEN;
}

/* Back to the last item that was held by choice, which is dropped now; -1 = there is none. */
static int32_t backtrack(crn_branching *b, int32_t depth)
{
    while (--depth >= 0) {
        bool was_held = b->choices[depth] == CRN_BRANCH_HELD;
        undo(b, depth);
        if (was_held && b->bound_at[depth] < b->best) {
            decide(b, depth, CRN_BRANCH_DROPPED);
            return depth + 1;
        }
    }
    return -1;
}

static bool should_end(crn_branching *b)
{
    if (b->work >= b->poll_at) {
        b->stopped = b->stopped || crn_should_stop(b->task, NULL);
        b->poll_at = b->work + POLL_WORK;
    }
    return b->stopped || b->work > b->work_max;
}

/*
 * Lowers b->best to the minimum, if that is less. Decides the items in their order, held first. The bound changes only
 * when an item is dropped. False: the work ended before the answer was known.
 */
static bool branch(crn_branching *b)
{
    int32_t depth = 0;
    bool is_new = true;
    int64_t bound = 0;
    while (depth >= 0) {
        if (is_new)
            bound = bound_of(b);
        bool is_leaf = bound >= b->best || b->open_bytes <= b->room;
        if (is_leaf) {
            b->best = crn_min(b->best, bound);
            depth = backtrack(b, depth);
            is_new = true;
            continue;
        }
        if (should_end(b)) {
            while (depth > 0)
                undo(b, --depth);
            return false;
        }
        is_new = b->items[depth].bytes > b->room;
        b->bound_at[depth] = bound;
        decide(b, depth, is_new ? CRN_BRANCH_DROPPED : CRN_BRANCH_HELD);
        depth++;
    }
    return true;
}

/*
 * The minimum. Asks whether it is below the bound plus a step. After each no, that sum is the new bound, and the step
 * is doubled. A no takes a fraction of the time that finding the minimum would, and it holds when the work ends.
 */
static int64_t find_least(crn_branching *b, int64_t bound)
{
    for (int64_t step = bound / FIRST_STEP + 1;; step = crn_mul_saturating(step, 2)) {
        int64_t asked = crn_add_saturating(bound, step);
        b->best = asked;
        if (!branch(b))
            return bound;
        if (b->best < asked || asked == INT64_MAX)
            return b->best;
        bound = asked;
    }
}

static int compare_items(const void *left, const void *right)
{
    const crn_branch_item *a = left, *b = right;
    crn_wide x = (crn_wide)a->cost * (crn_wide)b->bytes, y = (crn_wide)b->cost * (crn_wide)a->bytes;
    if (x != y)
        return x > y ? -1 : 1;
    return (a->root > b->root) - (a->root < b->root);
}

/* Whether a storage is held in any case: w reads it, or it is an output that exists. */
static bool must_hold(const crn_branching *b, int32_t root)
{
    const crn_graph_model *model = b->suffix->model;
    if (model->keep[root] && model->keep_from[root] < b->node)
        return true;
    for (int32_t i = model->dep_begin[b->node]; i < model->dep_begin[b->node + 1]; i++)
        if (model->root[model->dep[i]] == root)
            return true;
    return false;
}

/* Holds a storage for now: for good where it must be held or takes no bytes, else as one to decide on. */
static void add_storage(crn_branching *b, int32_t root)
{
    const crn_graph_model *model = b->suffix->model;
    if (b->item_of[root] != UNSEEN || root >= b->node)
        return;
    set_storage(b, root, true);
    if (must_hold(b, root)) {
        b->room -= model->bytes[root];
        b->item_of[root] = NO_ITEM;
    } else if (model->bytes[root] == 0) {
        b->item_of[root] = NO_ITEM;
    } else {
        b->item_of[root] = b->item_count;
        b->items[b->item_count++] = (crn_branch_item){root, model->node_count, model->bytes[root], 0};
        b->open_bytes += model->bytes[root];
    }
}

static void push_once(const crn_graph_suffix *s, int32_t v, int32_t *depth)
{
    if (crn_suffix_has(s->again, v))
        return;
    crn_suffix_put(s->again, v);
    s->stack[(*depth)++] = v;
}

/* Adds all storages that must be held, are read after the moment, or serve to recompute such a one. */
static void add_useful(crn_branching *b)
{
    const crn_graph_suffix *s = b->suffix;
    const crn_graph_model *model = s->model;
    int32_t depth = 0;
    for (int32_t v = 0; v < b->node; v++)
        if (model->root[v] == v && must_hold(b, v))
            add_storage(b, v);
    memset(s->again, 0, s->words * sizeof(*s->again));
    for (int32_t i = s->use_begin[b->node + 1]; i < s->use_end[b->node + 1]; i++)
        push_once(s, s->uses[i].node, &depth);
    while (depth > 0) {
        int32_t v = s->stack[--depth];
        add_storage(b, model->root[v]);
        for (int32_t k = model->dep_begin[v]; k < model->dep_begin[v + 1]; k++)
            push_once(s, model->dep[k], &depth);
    }
}

/* A storage that is read directly and dropped costs at least the recomputation of its root. */
static void price_items(crn_branching *b)
{
    const crn_graph_suffix *s = b->suffix;
    for (int32_t i = s->use_begin[b->node + 1]; i < s->use_end[b->node + 1]; i++) {
        int32_t at = b->item_of[s->model->root[s->uses[i].node]];
        if (at < 0 || b->items[at].reader < s->model->node_count)
            continue;
        b->items[at].reader = s->uses[i].reader;
        b->items[at].cost = s->model->cost[b->items[at].root];
    }
}

int64_t crn_branching_after(crn_branching *b, int32_t w)
{
    const crn_graph_suffix *s = b->suffix;
    const crn_graph_model *model = s->model;
    b->node = w;
    b->item_count = 0;
    b->open_bytes = 0;
    b->work = b->poll_at = 0;
    b->room = s->budget_bytes;
    if (!crn_sub(b->room, model->bytes[w], &b->room) || !crn_sub(b->room, model->extra[w], &b->room))
        return INT64_MAX;
    if (b->room < 0)
        return INT64_MAX;
    memset(b->held, 0, s->words * sizeof(*b->held));
    for (int32_t v = 0; v < model->node_count; v++)
        b->item_of[v] = UNSEEN;
    crn_suffix_put(b->held, w);
    add_useful(b);
    if (b->room < 0)
        return INT64_MAX;
    price_items(b);
    qsort(b->items, (size_t)b->item_count, sizeof(*b->items), compare_items);
    return find_least(b, s->after[w + 1]);
}

static bool fill_members(const crn_graph_model *model, crn_arena *arena, crn_branching *b)
{
    size_t n = (size_t)model->node_count;
    int32_t *begin = crn_arena_alloc_zero(arena, n + 2, sizeof(*begin));
    int32_t *members = crn_arena_alloc(arena, n, sizeof(*members));
    if (!begin || !members)
        return false;
    for (int32_t v = 0; v < model->node_count; v++)
        begin[model->root[v] + 2]++;
    for (size_t r = 0; r < n; r++)
        begin[r + 2] += begin[r + 1];
    for (int32_t v = 0; v < model->node_count; v++)
        members[begin[model->root[v] + 1]++] = v;
    b->member_begin = begin;
    b->members = members;
    return true;
}

bool crn_branching_new(crn_graph_suffix *s, crn_arena *arena, crn_branching *b)
{
    size_t n = (size_t)s->model->node_count;
    b->items = crn_arena_alloc(arena, n, sizeof(*b->items));
    b->item_of = crn_arena_alloc(arena, n, sizeof(*b->item_of));
    b->choices = crn_arena_alloc_zero(arena, n, sizeof(*b->choices));
    b->bound_at = crn_arena_alloc(arena, n, sizeof(*b->bound_at));
    b->held = crn_arena_alloc(arena, s->words, sizeof(*b->held));
    b->cost_at = crn_arena_alloc(arena, n, sizeof(*b->cost_at));
    b->suffix = s;
    return b->cost_at && b->items && b->item_of && b->choices && b->bound_at && b->held &&
           fill_members(s->model, arena, b);
}
