#include "solve/graph/graph_suffix.h"

#include <string.h>

#include "solve/graph/suffix_branch.h"

/* Larger graphs are left to graph_bound.h alone: a step of branch and bound would be expensive. */
enum { NODES_MAX = 2048 };

enum { SHARES = 4 };

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

/* Lists the uses at moment t. Where the uses of all moments are kept, they follow those of moment t + 1. */
static void list_uses(crn_graph_suffix *s, const use_order *order, int32_t t)
{
    int32_t n = s->model->node_count, at = s->is_listed && t < n ? s->use_end[t + 1] : 0;
    s->use_begin[t] = at;
    for (int32_t v = order->next[n]; v < n; v = order->next[v])
        s->uses[at++] = (crn_suffix_use){v, order->reader[v]};
    s->use_end[t] = at;
}

/* ---- given what is held ---- */

/* Adds v, and all that it needs, to what is recomputed. Returns the cost, or INT64_MAX where that is impossible. */
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

int64_t crn_graph_suffix_rest_costs(const crn_graph_suffix *s, int32_t t, const uint64_t *held, int64_t *cost_at)
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
    return crn_graph_suffix_rest_costs(suffix, t, held, NULL);
}

/* ---- all nodes ---- */

/* The largest bound of a window that begins with w, plus the bound from the window's end on. */
static int64_t after_by_windows(const crn_graph_suffix *s, const crn_graph_windows *windows, int32_t w)
{
    int64_t spent = 0;
    for (int32_t i = 0; i < windows->count; i++)
        for (int32_t j = i + 1; windows->cut[i] == w && j <= windows->count; j++)
            spent = crn_max(spent, crn_add_saturating(windows->spent[i][j], s->after[windows->cut[j]]));
    return spent;
}

/* A moment may take a few even shares of the work that is left, for most need next to nothing. */
static void find_all(crn_branching *b, use_order *order, int64_t work_max, const crn_graph_windows *windows)
{
    crn_graph_suffix *s = b->suffix;
    int64_t left = work_max;
    list_uses(s, order, s->model->node_count);
    for (int32_t w = s->model->node_count - 1; w >= 0; w--) {
        b->work_max = left / (w + 1) * SHARES;
        b->work = 0;
        b->stopped = b->stopped || crn_should_stop(b->task, NULL); /* to list what may be held takes time, too */
        s->after[w] = b->stopped || left == 0 ? s->after[w + 1] : crn_branching_after(b, w);
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
    crn_branching b = {.task = task};
    use_order order;
    crn_arena_init(&arena, crn_allocator(task->env));
    bool made = crn_branching_new(s, &arena, &b) && order_new(s->model, &arena, &order);
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
