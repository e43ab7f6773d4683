#include "solve/graph/graph_bound.h"

#include <math.h>
#include <string.h>

#include "solve/graph/graph_suffix.h"
#include "solve/graph/graph_window.h"
#include "solve/graph/moment_search.h"

enum { GRID_WORK = 2000000, WINDOW_WORK = 40000000, FIRST_NODES = 24 };

/*
 * Windows begin and end at FIRST_CUTS nodes. With a time limit, the number is doubled while 1/MORE_PARTS of it lasts.
 */
enum { FIRST_CUTS = 24, MORE_PARTS = 4 };

/*
 * Work limit of the bounds of graph_suffix.h, to be divided by the number of nodes: a quarter of a second at a hundred
 * nodes. Larger graphs get less, because branch and bound does not finish on them in any case.
 */
#define SUFFIX_WORK ((int64_t)25000000000)

/* Flows of larger costs would pass 2^63. A graph whose costs sum to more (4.5 years) gets that sum as its bound. */
#define COSTS_MAX (INT64_C(1) << 57)

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
int32_t crn_graph_largest_taker(const crn_graph_model *model, int32_t t, int32_t count)
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

/* Looks at nodes around the best one, at half the distance each time. */
static void look_around(crn_graph_bounder *b, peak *p, int32_t stride)
{
    for (stride /= 2; stride > 0 && p->best > 0 && !has_ended(b, p); stride /= 2)
        for (int32_t t = p->best_t - stride, i = 0; i < 2; t += 2 * stride, i++)
            look_from(b, p, t);
}

/*
 * The largest value of a function of the node. The nodes are divided into runs. Of each run, the node that takes most
 * memory is tried, then nodes around the best one; then the runs are halved. Every value is a valid bound: a maximum
 * that is missed, or a search that is stopped, only weakens it.
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
            look_from(b, &p, crn_graph_largest_taker(b->model, from, stride));
        look_around(b, &p, stride);
    }
    return p.best;
}

static int64_t window_to_end(crn_graph_bounder *b, int32_t t)
{
    return b->to_end[t] = crn_graph_bound_window(b, b->budget_bytes, t, b->model->node_count);
}

/* As many as the work limit allows. */
static int32_t first_parts(const crn_graph_bounder *b)
{
    int64_t size = b->model->node_count + b->model->dep_begin[b->model->node_count];
    return (int32_t)crn_min(FIRST_CUTS, (int64_t)sqrt(0.25 * WINDOW_WORK / (double)size));
}

/* Where windows may begin and end: in each of so many even parts, the node worth most. */
static int32_t list_cuts(const crn_graph_bounder *b, int32_t parts, int32_t cuts[CRN_GRAPH_CUTS_MAX + 1])
{
    int32_t n = b->model->node_count, count = 0;
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

/* The best sum over windows that do not overlap: what each spends is spent within it. */
static int64_t best_windows(crn_graph_bounder *b, int32_t parts, crn_graph_windows *all)
{
    int64_t sum[CRN_GRAPH_CUTS_MAX + 1] = {0};
    all->count = list_cuts(b, parts, all->cut);
    for (int32_t i = 0; i < all->count; i++)
        for (int32_t j = i + 1; j <= all->count; j++)
            all->spent[i][j] = window_between(b, all->cut[i], all->cut[j]);
    for (int32_t j = 1; j <= all->count; j++)
        for (int32_t i = 0; i < j; i++)
            sum[j] = crn_max(sum[j], crn_add_saturating(sum[i], all->spent[i][j]));
    return sum[all->count];
}

/* Where a time limit leaves some, more windows: the best are kept. */
static int64_t more_windows(crn_graph_bounder *b, int64_t found)
{
    const crn_task *task = b->task, part = crn_task_part(task, MORE_PARTS);
    crn_graph_windows more;
    b->task = b->network.task = &part;
    for (int32_t parts = first_parts(b); parts < CRN_GRAPH_CUTS_MAX && !crn_should_stop(&part, NULL);) {
        parts = (int32_t)crn_min(CRN_GRAPH_CUTS_MAX, crn_max(2, 2 * (int64_t)parts));
        int64_t sum = best_windows(b, parts, &more);
        if (sum > found)
            b->windows = more;
        found = crn_max(found, sum);
    }
    b->task = b->network.task = task;
    return found;
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
        again = crn_max(again, best_windows(b, first_parts(b), &b->windows));
    if (again > 0 && again < INT64_MAX && b->task->deadline_ns != CAIRN_NONE)
        again = more_windows(b, again);
    return again == INT64_MAX ? INT64_MAX : b->model->total_cost + again;
}

int64_t crn_graph_bound_memory(crn_graph_bounder *b)
{
    return largest(b, crn_graph_bound_moment);
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
    int64_t budget_bytes;
    int64_t found_ns; /* INT64_MAX = no schedule fits; CAIRN_NONE = there was no time or memory to find it */
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

static cairn_status raise_by_moments(const crn_task *task, const crn_graph_bounder *bounder, int64_t *found_ns,
                                     cairn_error *error)
{
    int64_t total_ns = bounder->model->total_cost, again_ns = *found_ns - total_ns;
    if (*found_ns == INT64_MAX || total_ns > COSTS_MAX)
        return CAIRN_OK;
    CRN_TRY(crn_moments_raise(task, bounder, &again_ns, error));
    *found_ns = crn_add_saturating(total_ns, again_ns);
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
    if (status == CAIRN_OK)
        status = raise_by_moments(&part, bounder, found_ns, error);
    crn_graph_bounder_free(bounder);
    crn_graph_model_free(model);
    return status;
}

/*
 * A budget that no schedule fits leaves the bound as it is. Where memory fails for the suffixes, the windows' bound
 * holds.
 */
static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    cairn_status status = CAIRN_OK;
    if (!applies(task) || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    known *last = *kept ? *kept : crn_alloc(&allocator, 1, sizeof(*last));
    if (!last)
        return crn_no_memory(error);
    if (!*kept || last->found_ns == CAIRN_NONE || last->budget_bytes != budget_bytes) {
        *last = (known){budget_bytes, CAIRN_NONE};
        *kept = last;
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
