#include "solve/graph/graph_suffix.h"

#include <stdlib.h>
#include <string.h>

/* Larger graphs are left to graph_bound.h alone: a step of branch and bound would be dear. */
enum { NODES_MAX = 2048 };

enum { POLL_EVERY = 256, SHARES = 4, WORK_OF_STEP = 16, FIRST_STEP = 256 };

/* ---- what is read after a moment of what was before ---- */

/* Uses at a moment, by reader, as linked lists in both directions: going back by one moment moves what it reads first. */
typedef struct use_order {
    int32_t *next, *previous, *reader; /* of a node; entry node_count is the head */
} use_order;

static void unlink_node(use_order *order, int32_t v)
{
    if (order->reader[v] < 0)
        return;
    order->next[order->previous[v]] = order->next[v];
    order->previous[order->next[v]] = order->previous[v];
    order->reader[v] = -1;
}

static void put_first(use_order *order, int32_t head, int32_t v, int32_t reader)
{
    unlink_node(order, v);
    order->next[v] = order->next[head];
    order->previous[v] = head;
    order->previous[order->next[head]] = v;
    order->next[head] = v;
    order->reader[v] = reader;
}

/* From the moment before t + 1 to that before t. */
static void step_back(const crn_graph_model *model, use_order *order, int32_t t)
{
    unlink_node(order, t);
    for (int32_t i = model->dep_begin[t]; i < model->dep_begin[t + 1]; i++)
        put_first(order, model->node_count, model->dep[i], t);
}

static bool order_new(const crn_graph_model *model, crn_arena *arena, use_order *order)
{
    size_t n = (size_t)model->node_count;
    order->next = crn_arena_alloc(arena, n + 1, sizeof(*order->next));
    order->previous = crn_arena_alloc(arena, n + 1, sizeof(*order->previous));
    order->reader = crn_arena_alloc(arena, n + 1, sizeof(*order->reader));
    if (!order->next || !order->previous || !order->reader)
        return false;
    order->next[n] = order->previous[n] = model->node_count;
    memset(order->reader, 0xff, (n + 1) * sizeof(*order->reader));
    return true;
}

/* Lists the uses at moment t, behind those of the moments after it where all are kept. */
static void list_uses(crn_graph_suffix *s, const use_order *order, int32_t t)
{
    int32_t n = s->model->node_count, at = s->is_listed && t < n ? s->use_end[t + 1] : 0;
    s->use_begin[t] = at;
    for (int32_t v = order->next[n]; v < n; v = order->next[v])
        s->uses[at++] = (crn_suffix_use){v, order->reader[v]};
    s->use_end[t] = at;
}

/* ---- given what is held ---- */

/* Adds v, and all that it needs, to what is computed again: the cost of that, or INT64_MAX where it cannot be. */
static int64_t compute_again(const crn_graph_suffix *s, const uint64_t *held, int32_t v)
{
    const crn_graph_model *model = s->model;
    int64_t cost = 0;
    int32_t depth = 0;
    crn_suffix_put(s->again, v);
    s->stack[depth++] = v;
    while (depth > 0) {
        int32_t u = s->stack[--depth];
        if (model->once_node[u])
            return INT64_MAX;
        cost += model->cost[u];
        for (int32_t i = model->dep_begin[u]; i < model->dep_begin[u + 1]; i++)
            if (!crn_suffix_has(held, model->dep[i]) && !crn_suffix_has(s->again, model->dep[i])) {
                crn_suffix_put(s->again, model->dep[i]);
                s->stack[depth++] = model->dep[i];
            }
    }
    return cost;
}

/* rest(P); cost_at, unless NULL: cost(N(P, x)) for each use. */
static int64_t rest_of(const crn_graph_suffix *s, int32_t t, const uint64_t *held, int64_t *cost_at)
{
    int64_t least_ns = s->after[t], cost = 0;
    int32_t begin = s->use_begin[t], end = s->use_end[t];
    memset(s->again, 0, s->words * sizeof(*s->again));
    for (int32_t i = begin; i < end; i++) {
        const crn_suffix_use use = s->uses[i];
        if (!crn_suffix_has(held, use.node) && !crn_suffix_has(s->again, use.node)) {
            int64_t more = compute_again(s, held, use.node);
            if (more == INT64_MAX)
                return INT64_MAX;
            cost += more;
            least_ns = crn_max(least_ns, crn_add_saturating(cost, s->after[use.reader]));
        }
        if (cost_at)
            cost_at[i - begin] = cost;
    }
    return least_ns;
}

int64_t crn_graph_suffix_rest(const crn_graph_suffix *suffix, int32_t t, const uint64_t *held)
{
    return rest_of(suffix, t, held, NULL);
}

/* ---- whatever is held: branch and bound ---- */

/* A storage that may be held or dropped. */
typedef struct item {
    int32_t root, reader; /* who reads one of its handles first; node_count = none directly */
    int64_t bytes, cost;  /* of the root; 0 where nobody reads it directly */
} item;

enum { UNSEEN = -1, NO_ITEM = -2 };

typedef enum choice { OPEN, HELD, DROPPED } choice;

typedef struct branching {
    const crn_task *task;
    crn_graph_suffix *suffix;
    int32_t node;                 /* w */
    item *items;                  /* those dear for their bytes first */
    int32_t item_count, *item_of; /* storage -> item, or one of the two below */
    choice *choices;
    int64_t *bound_at; /* of an item that is held: the bound before that was decided */
    int64_t *cost_at;  /* scratch, of a use */
    uint64_t *held;    /* all that is not dropped */
    int64_t room;      /* for what is open */
    int64_t open_bytes;
    int64_t best;
    int64_t work, work_max;
    bool stopped;
    /* storage -> its nodes */
    const int32_t *member_begin, *members;
} branching;

/* All handles of a storage that are computed by the moment. */
static void set_storage(branching *b, int32_t root, bool held)
{
    for (int32_t i = b->member_begin[root]; i < b->member_begin[root + 1] && b->members[i] <= b->node; i++) {
        uint64_t bit = (uint64_t)1 << (b->members[i] % 64);
        uint64_t *word = &b->held[b->members[i] / 64];
        *word = held ? *word | bit : *word & ~bit;
    }
}

/* The least cost of dropping what does not fit, of what is read directly by a node up to `until`. */
static int64_t knapsack(branching *b, int32_t until)
{
    int64_t over = b->open_bytes - b->room, cost = 0;
    b->work += b->item_count;
    for (int32_t i = 0; i < b->item_count; i++)
        if (b->choices[i] == OPEN && (b->items[i].reader > until || b->items[i].cost == 0))
            over -= b->items[i].bytes;
    for (int32_t i = b->item_count - 1; i >= 0 && over > 0; i--) {
        const item *it = &b->items[i];
        if (b->choices[i] != OPEN || it->reader > until || it->cost == 0)
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
 * What holds for all ways to decide what is open: for any x, what is computed again before x because it is dropped
 * already, what must be dropped for the bytes and is read before x, and what is spent after x.
 */
static int64_t bound_of(branching *b)
{
    const crn_graph_suffix *s = b->suffix;
    int32_t t = b->node + 1, begin = s->use_begin[t], count = s->use_end[t] - begin;
    int64_t bound = rest_of(s, t, b->held, b->cost_at);
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

static void decide(branching *b, int32_t i, choice made)
{
    const item *it = &b->items[i];
    b->open_bytes -= it->bytes;
    b->choices[i] = made;
    if (made == HELD)
        b->room -= it->bytes;
    else
        set_storage(b, it->root, false);
}

static void undo(branching *b, int32_t i)
{
    const item *it = &b->items[i];
    b->open_bytes += it->bytes;
    if (b->choices[i] == HELD)
        b->room += it->bytes;
    else
        set_storage(b, it->root, true);
    b->choices[i] = OPEN;
}

/* Back to the last item that was held by choice, which is dropped now; -1 = there is none. */
static int32_t backtrack(branching *b, int32_t depth)
{
    while (--depth >= 0) {
        bool was_held = b->choices[depth] == HELD;
        undo(b, depth);
        if (was_held && b->bound_at[depth] < b->best) {
            decide(b, depth, DROPPED);
            return depth + 1;
        }
    }
    return -1;
}

static bool should_end(branching *b, int64_t step)
{
    if (step % POLL_EVERY == 0 && crn_should_stop(b->task, NULL))
        b->stopped = true;
    return b->stopped || b->work > b->work_max;
}

/*
 * Is there anything below b->best? Decides items in their order, held first; the bound changes when something is
 * dropped. False where it was not found out; else b->best is the least there is, if that is less.
 */
static bool branch(branching *b)
{
    int32_t depth = 0;
    bool is_new = true;
    int64_t bound = 0;
    for (int64_t step = 1; depth >= 0; step++) {
        if (is_new)
            bound = bound_of(b);
        bool is_leaf = bound >= b->best || b->open_bytes <= b->room;
        if (is_leaf) {
            b->best = crn_min(b->best, bound);
            depth = backtrack(b, depth);
            is_new = true;
            continue;
        }
        if (should_end(b, step)) {
            while (depth > 0)
                undo(b, --depth);
            return false;
        }
        is_new = b->items[depth].bytes > b->room;
        b->bound_at[depth] = bound;
        decide(b, depth, is_new ? DROPPED : HELD);
        depth++;
    }
    return true;
}

/*
 * The least of all: is it below the bound and a little, and more, and twice that? A question that has no for an answer
 * takes a fraction of what finding the least would, and what was answered holds when the work ends.
 */
static int64_t find_least(branching *b, int64_t bound)
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
    const item *a = left, *b = right;
    crn_wide x = (crn_wide)a->cost * (crn_wide)b->bytes, y = (crn_wide)b->cost * (crn_wide)a->bytes;
    if (x != y)
        return x > y ? -1 : 1;
    return (a->root > b->root) - (a->root < b->root);
}

/* Held whatever is chosen: what w reads, and outputs that exist. */
static bool must_hold(const branching *b, int32_t root)
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
static void add_storage(branching *b, int32_t root)
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
        b->items[b->item_count++] = (item){root, model->node_count, model->bytes[root], 0};
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

/* All storages that must be held, are read after the moment, or serve to compute such a one again. */
static void add_useful(branching *b)
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

/* Who is read directly costs at least its root when it is dropped. */
static void price_items(branching *b)
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

/* after(w), with what is after w known already. */
static int64_t after_node(branching *b, int32_t w)
{
    const crn_graph_suffix *s = b->suffix;
    const crn_graph_model *model = s->model;
    b->node = w;
    b->item_count = 0;
    b->open_bytes = 0;
    b->work = 0;
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

static bool fill_members(const crn_graph_model *model, crn_arena *arena, branching *b)
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

static bool branching_new(crn_graph_suffix *s, crn_arena *arena, branching *b)
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

/* What the windows that begin with w say, with what is after them. */
static int64_t after_by_windows(const crn_graph_suffix *s, const crn_graph_windows *windows, int32_t w)
{
    int64_t spent = 0;
    for (int32_t i = 0; i < windows->count; i++)
        for (int32_t j = i + 1; windows->cut[i] == w && j <= windows->count; j++)
            spent = crn_max(spent, crn_add_saturating(windows->spent[i][j], s->after[windows->cut[j]]));
    return spent;
}

/* A moment may take a few even shares of the work that is left, for most need next to nothing. */
static void find_all(branching *b, use_order *order, int64_t work_max, const crn_graph_windows *windows)
{
    crn_graph_suffix *s = b->suffix;
    int64_t left = work_max;
    list_uses(s, order, s->model->node_count);
    for (int32_t w = s->model->node_count - 1; w >= 0; w--) {
        b->work_max = left / (w + 1) * SHARES;
        s->after[w] = b->stopped || left == 0 ? s->after[w + 1] : after_node(b, w);
        if (windows)
            s->after[w] = crn_max(s->after[w], after_by_windows(s, windows, w));
        left = crn_max(0, left - b->work);
        step_back(s->model, order, w);
        list_uses(s, order, w);
    }
}

static cairn_status fill(const crn_task *task, crn_graph_suffix *s, int64_t work_max, const crn_graph_windows *windows,
                         cairn_error *error)
{
    crn_arena arena;
    branching b = {.task = task};
    use_order order;
    crn_arena_init(&arena, crn_allocator(task->env));
    bool made = branching_new(s, &arena, &b) && order_new(s->model, &arena, &order);
    if (made)
        find_all(&b, &order, work_max, windows);
    crn_arena_clear(&arena);
    return made ? CAIRN_OK : crn_no_memory(error);
}

static bool reserve(crn_graph_suffix *s)
{
    size_t n = (size_t)s->model->node_count;
    s->words = (n + 63) / 64;
    s->is_listed = n <= CRN_SUFFIX_LISTED_MAX;
    s->after = crn_arena_alloc_zero(&s->arena, n + 1, sizeof(*s->after));
    s->use_begin = crn_arena_alloc(&s->arena, n + 1, sizeof(*s->use_begin));
    s->use_end = crn_arena_alloc(&s->arena, n + 1, sizeof(*s->use_end));
    s->uses = crn_arena_alloc(&s->arena, s->is_listed ? n * (n + 1) / 2 : n, sizeof(*s->uses));
    s->again = crn_arena_alloc(&s->arena, s->words, sizeof(*s->again));
    s->stack = crn_arena_alloc(&s->arena, n, sizeof(*s->stack));
    return s->after && s->use_begin && s->use_end && s->uses && s->again && s->stack;
}

bool crn_graph_suffix_applies(const crn_task *task)
{
    return cairn_problem_kind_of(task->problem) == CAIRN_KIND_GRAPH && !task->machine &&
           cairn_problem_graph(task->problem)->node_count <= NODES_MAX;
}

cairn_status crn_graph_suffix_new(const crn_task *task, const crn_graph_model *model, int64_t budget_bytes,
                                  int64_t work_max, const crn_graph_windows *windows, crn_graph_suffix **suffix,
                                  cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    crn_graph_suffix *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *suffix = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    s->model = model;
    s->budget_bytes = budget_bytes - model->fixed_bytes;
    cairn_status status = reserve(s) ? fill(task, s, work_max, windows, error) : crn_no_memory(error);
    if (status != CAIRN_OK) {
        crn_graph_suffix_free(s);
        *suffix = NULL;
    }
    return status;
}

void crn_graph_suffix_free(crn_graph_suffix *suffix)
{
    if (!suffix)
        return;
    crn_arena arena = suffix->arena;
    crn_arena_clear(&arena);
}
