/*
 * graph-online: dynamic tensor rematerialization (M. Kirisame et al., ICLR 2021), the baseline that knows no future.
 *
 * Rule      Compute the nodes in order; bring back what is missing; when memory is short, evict the storage with the
 *           least  recompute cost / (bytes * staleness),  the cost with that of the missing ancestors, the staleness
 *           counted in computations since the last access. Values that nobody will read again are known to be
 *           dead, as they are to a framework that counts references, and go first.
 * Differs   The paper's neighbourhood also counts evicted descendants; its time is the clock's.
 * Cost      O((T + recomputations) * residents), memory O(T + E). Least memory by bisection over such walks,
 *           to a thousandth from EXACT_NODES nodes on, then by trying what lies below (graph_descent.h).
 * Optimal   In nothing; a baseline.
 */
#include "solve/graph/graph_online.h"

#include "solve/graph/graph_descent.h"

enum { BISECTIONS = 40, EXACT_NODES = 10000 };

typedef struct online {
    crn_graph_model *model;
    crn_walk *walk;
    crn_arena arena;
    crn_sequence trial, smallest;
    crn_sequence_eval eval;
    int64_t smallest_peak_bytes; /* INT64_MAX = not looked for yet */
    bool smallest_is_known;      /* it was not stopped */
    int64_t lower_bytes;         /* no schedule without transfers is below; once that was looked for */
} online;

static void online_close(const crn_task *task, void *session)
{
    online *o = session;
    (void)task;
    crn_walk_free(o->walk);
    crn_graph_model_free(o->model);
    crn_arena_clear(&o->arena);
}

static cairn_status online_fill(const crn_task *task, online *o, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &o->model, error));
    CRN_TRY(crn_walk_new(o->model, &o->walk, error));
    int32_t capacity = crn_sequence_capacity(o->model->node_count, CRN_WALK_TIMES);
    CRN_TRY(crn_sequence_eval_new(o->model, &o->arena, capacity, &o->eval, error));
    bool made = crn_sequence_new(&o->arena, capacity, &o->trial) && crn_sequence_new(&o->arena, capacity, &o->smallest);
    return made ? CAIRN_OK : crn_no_memory(error);
}

/* Whether a walk under the budget succeeds, and its sequence keeps to it when judged. */
static bool fits(const crn_task *task, online *o, int64_t budget_bytes)
{
    const crn_walk_rule rule = {.online = true};
    if (!crn_walk_run(o->walk, task, budget_bytes, &rule, &o->trial))
        return false;
    crn_sequence_judge(&o->eval, &o->trial);
    return o->eval.peak <= budget_bytes;
}

static void take_smallest(online *o)
{
    o->smallest_peak_bytes = o->eval.peak;
    crn_sequence_copy(&o->smallest, &o->trial);
}

/* A budget under which a walk succeeds though none does just below. */
static void bisect(const crn_task *task, online *o)
{
    int64_t low = o->lower_bytes - 1;
    crn_walk_limit(o->walk, true);
    for (int i = 0; i < BISECTIONS && !crn_should_stop(task, NULL) && !crn_walk_is_spent(o->walk); i++) {
        int64_t near = o->model->node_count < EXACT_NODES ? 1 : o->smallest_peak_bytes / 1024;
        if (o->smallest_peak_bytes - low <= near)
            break;
        int64_t middle = low + (o->smallest_peak_bytes - low) / 2;
        if (fits(task, o, middle))
            take_smallest(o);
        else
            low = middle;
    }
    crn_walk_limit(o->walk, false);
}

static void descend(const crn_task *task, online *o)
{
    crn_descent descent;
    crn_descent_step step;
    crn_descent_init(&descent, o->model->node_count, 1, o->lower_bytes);
    while (!crn_should_stop(task, NULL) && crn_descent_next(&descent, o->smallest_peak_bytes, &step)) {
        if (fits(task, o, step.budget_bytes))
            take_smallest(o);
        else if (crn_should_stop(task, NULL))
            return;
        crn_descent_note(&descent, &step, o->walk, &o->trial);
    }
}

static void begin_smallest(online *o)
{
    crn_sequence_store_all(o->model, &o->trial);
    crn_sequence_judge(&o->eval, &o->trial);
    take_smallest(o);
}

static cairn_status find_smallest(const crn_task *task, online *o, cairn_error *error)
{
    const crn_task alone = crn_task_without_machine(task);
    if (o->smallest_is_known)
        return CAIRN_OK;
    CRN_TRY(crn_least_lower(&alone, &o->lower_bytes, error));
    if (o->smallest_peak_bytes == INT64_MAX)
        begin_smallest(o);
    bisect(task, o);
    descend(task, o);
    o->smallest_is_known = !crn_should_stop(task, NULL);
    return CAIRN_OK;
}

cairn_status crn_graph_online_smallest(const crn_task *task, void *session, const crn_sequence **sequence,
                                       cairn_error *error)
{
    online *o = session;
    *sequence = &o->smallest;
    return find_smallest(task, o, error);
}

static cairn_status online_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    online *o = crn_arena_alloc_zero(&arena, 1, sizeof(*o));
    *session = o;
    if (!o)
        return crn_no_memory(error);
    o->arena = arena;
    o->smallest_peak_bytes = INT64_MAX;
    return online_fill(task, o, error);
}

static cairn_status online_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    online *o = session;
    CRN_TRY(crn_least_lower(task, &least->lower_bytes, error));
    CRN_TRY(find_smallest(task, o, error));
    least->bytes = o->smallest_peak_bytes;
    least->is_exact = least->bytes == least->lower_bytes;
    least->is_rough = !least->is_exact && !o->smallest_is_known;
    return CAIRN_OK;
}

static cairn_status online_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    online *o = session;
    const crn_sequence *found = &o->trial;
    int64_t budget = crn_min(crn_limit_of(budget_bytes), INT64_MAX - 1);
    if (!fits(task, o, budget)) {
        CRN_TRY(find_smallest(task, o, error));
        answer->stopped_early = crn_should_stop(task, NULL);
        if (budget < o->smallest_peak_bytes)
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
