/*
 * graph-online: dynamic tensor rematerialization (M. Kirisame et al., ICLR 2021), the baseline that knows no future.
 *
 * Rule      Compute the nodes in order; bring back what is missing; when memory is short, evict the storage with the
 *           least  recompute cost / (bytes * staleness),  the cost with that of the missing ancestors, the staleness
 *           counted in computations since the last access. Values that nobody will read again are known to be
 *           dead, as they are to a framework that counts references, and go first.
 * Differs   The paper's neighbourhood also counts evicted descendants; its time is the clock's.
 * Cost      O((T + recomputations) * residents), memory O(T + E). Least memory by bisection over such walks.
 * Optimal   In nothing; a baseline.
 */
#include <string.h>

#include "solve/graph/graph_walk.h"

enum { BISECTIONS = 40 };

typedef struct online {
    crn_graph_model *model;
    crn_walk *walk;
    crn_arena arena;
    crn_sequence trial, smallest;
    crn_sequence_eval eval;
    int64_t smallest_peak_bytes, lower_bytes;
} online;

static void online_close(const crn_task *task, void *session)
{
    online *o = session;
    (void)task;
    if (!o)
        return;
    crn_walk_free(o->walk);
    crn_graph_model_free(o->model);
    crn_arena arena = o->arena;
    crn_arena_clear(&arena);
}

static cairn_status online_fill(const crn_task *task, online *o, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &o->model, error));
    CRN_TRY(crn_walk_new(o->model, &o->walk, error));
    int32_t capacity = (int32_t)crn_min(8 * (int64_t)o->model->node_count + 64, CAIRN_OPS_MAX / 2);
    CRN_TRY(crn_sequence_eval_new(o->model, &o->arena, capacity, &o->eval, error));
    o->trial.capacity = o->smallest.capacity = capacity;
    o->trial.node = crn_arena_alloc(&o->arena, (size_t)capacity, sizeof(*o->trial.node));
    o->smallest.node = crn_arena_alloc(&o->arena, (size_t)capacity, sizeof(*o->smallest.node));
    return o->trial.node && o->smallest.node ? CAIRN_OK : crn_no_memory(error);
}

/* Whether a walk under the budget succeeds, and its sequence keeps to it when judged. */
static bool fits(online *o, int64_t budget_bytes)
{
    const crn_walk_rule rule = {.online = true};
    if (!crn_walk_run(o->walk, budget_bytes, &rule, &o->trial))
        return false;
    crn_sequence_judge(&o->eval, &o->trial);
    if (o->eval.peak < o->smallest_peak_bytes) {
        o->smallest_peak_bytes = o->eval.peak;
        o->smallest.count = o->trial.count;
        memcpy(o->smallest.node, o->trial.node, (size_t)o->trial.count * sizeof(*o->trial.node));
    }
    return o->eval.peak <= budget_bytes;
}

static void find_smallest(online *o)
{
    int64_t low = o->lower_bytes - 1;
    fits(o, INT64_MAX / 2);
    for (int i = 0; i < BISECTIONS && o->smallest_peak_bytes - low > 1; i++) {
        int64_t middle = low + (o->smallest_peak_bytes - low) / 2;
        if (!fits(o, middle))
            low = middle;
    }
}

static cairn_status online_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    online *o = crn_arena_alloc_zero(&arena, 1, sizeof(*o));
    *session = NULL;
    if (!o)
        return crn_no_memory(error);
    o->arena = arena;
    o->smallest_peak_bytes = INT64_MAX;
    cairn_status status = online_fill(task, o, error);
    if (status == CAIRN_OK)
        status = crn_least_lower(task, &o->lower_bytes, error);
    if (status != CAIRN_OK) {
        online_close(task, o);
        return status;
    }
    find_smallest(o);
    *session = o;
    return CAIRN_OK;
}

static cairn_status online_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const online *o = session;
    (void)task;
    (void)error;
    *least = (crn_least){.bytes = o->smallest_peak_bytes,
                         .is_exact = o->smallest_peak_bytes == o->lower_bytes,
                         .lower_bytes = o->lower_bytes};
    return CAIRN_OK;
}

static cairn_status online_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    online *o = session;
    (void)task;
    const crn_sequence *found = &o->trial;
    if (!fits(o, budget_bytes == CAIRN_NONE ? INT64_MAX / 2 : budget_bytes)) {
        if (budget_bytes < o->smallest_peak_bytes)
            return CAIRN_OK;
        found = &o->smallest;
    }
    answer->found = true;
    return crn_sequence_emit(&o->eval, found, answer->builder, error);
}

const crn_solver crn_graph_online_solver = {
    .info =
        {
            .name = "graph-online",
            .takes_graphs = true,
            .available = true,
            .optimal_in = "",
            .summary = "evicts what is cheap, large and stale; knows no future",
            .source = "Kirisame et al. (DTR) 2021",
            .cost = "O((T + recomputations) residents)",
        },
    .open = online_open,
    .close = online_close,
    .least = online_least,
    .solve = online_solve,
};
