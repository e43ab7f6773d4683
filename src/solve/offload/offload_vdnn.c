/*
 * offload-vdnn: what is offloaded is chosen by how long its forward runs for its size.
 *
 * Problem   As offload-greedy.
 * Rule      A forward that takes long and reads little hides the transfer of its input well. For every threshold: the
 *           saved sets A[l] go whose ratio uF[l+1] / A[l] is at least the threshold, or every other one of them; the best
 *           of these schedules is the answer (Beaumont et al. 2019, section 6, after vDNN++, Shriram et al. 2019, whose rule
 *           "the inputs of convolutions" needs layers with names).
 * Options   As offload-greedy.
 * Optimal   No; a baseline.
 * Cost      At most THRESHOLDS schedules of O(n) each for every choice of options.
 */
#include <stdlib.h>

#include "solve/offload/offload_plan.h"

enum { THRESHOLDS = 1000, SETS = 2 };

/* A stage whose saved set may go, and the time of the forward that reads it. */
typedef struct candidate {
    int64_t ns, bytes;
    int32_t stage;
} candidate;

typedef struct vdnn {
    crn_offload_plan *plans[CRN_OFFLOAD_PROFILES];
    candidate *by_ratio[CRN_OFFLOAD_PROFILES]; /* the largest ratio first */
    int32_t count[CRN_OFFLOAD_PROFILES];
    int64_t least_bytes;
    bool *all, *goes, *best;
    crn_arena arena;
} vdnn;

static void vdnn_close(const crn_task *task, void *session)
{
    vdnn *s = session;
    (void)task;
    crn_offload_profiles_free(s->plans);
    crn_arena_clear(&s->arena);
}

/* 1 where the ratio of a is larger than that of b, -1 where it is smaller. */
static int compare_ratios(const candidate *a, const candidate *b)
{
    crn_wide left = (crn_wide)a->ns * (crn_wide)b->bytes, right = (crn_wide)b->ns * (crn_wide)a->bytes;
    return (left > right) - (left < right);
}

static int compare_candidates(const void *left, const void *right)
{
    const candidate *a = left, *b = right;
    int ratio = compare_ratios(b, a);
    return ratio != 0 ? ratio : (a->stage > b->stage) - (a->stage < b->stage);
}

static void rank_stages(vdnn *s, int profile)
{
    const crn_offload_plan *plan = s->plans[profile];
    const cairn_chain *chain = cairn_problem_chain(plan->task.problem);
    for (int32_t l = 1; l <= plan->n; l++)
        if (crn_offload_may_go(plan, l))
            s->by_ratio[profile][s->count[profile]++] =
                (candidate){chain->stages[l].options[plan->option[l + 1]].forward_ns, crn_offload_bytes(plan, l), l};
    qsort(s->by_ratio[profile], (size_t)s->count[profile], sizeof(candidate), compare_candidates);
}

/* ---- the sets ---- */

/* The next threshold admits at least step more stages, and all of equal ratio together. */
static int32_t next_threshold(const vdnn *s, int profile, int32_t from, int32_t step)
{
    const candidate *ranked = s->by_ratio[profile];
    int32_t count = s->count[profile], to = (int32_t)crn_min(count, (int64_t)from + step);
    while (to > 0 && to < count && compare_ratios(&ranked[to], &ranked[to - 1]) == 0)
        to++;
    return to;
}

static void every_other(const vdnn *s, int32_t n)
{
    bool odd = false;
    for (int32_t l = 1; l <= n; l++) {
        odd = s->all[l] ? !odd : odd;
        s->goes[l] = s->all[l] && odd;
    }
}

typedef cairn_status (*visit)(vdnn *s, const crn_offload_plan *plan, void *context, cairn_error *error);

/* Calls visit with every set in s->goes. */
static cairn_status for_each_set(const crn_task *task, vdnn *s, visit body, void *context, cairn_error *error)
{
    for (int profile = 0; profile < CRN_OFFLOAD_PROFILES; profile++) {
        const crn_offload_plan *plan = s->plans[profile];
        if (!plan)
            continue;
        int32_t step = s->count[profile] / THRESHOLDS + 1, at = 0;
        for (int32_t l = 0; l <= plan->n; l++)
            s->all[l] = s->goes[l] = false;
        CRN_TRY(body(s, plan, context, error));
        while (at < s->count[profile]) {
            if (crn_should_stop(task, NULL))
                return crn_fail(error, CAIRN_CANCELLED, "stopped");
            for (int32_t to = next_threshold(s, profile, at, step); at < to; at++)
                s->all[s->by_ratio[profile][at].stage] = true;
            for (int32_t l = 0; l <= plan->n; l++)
                s->goes[l] = s->all[l];
            CRN_TRY(body(s, plan, context, error));
            every_other(s, plan->n);
            CRN_TRY(body(s, plan, context, error));
        }
    }
    return CAIRN_OK;
}

static cairn_status lower_least(vdnn *s, const crn_offload_plan *plan, void *context, cairn_error *error)
{
    (void)context;
    (void)error;
    s->least_bytes = crn_min(s->least_bytes, crn_offload_need(plan, s->goes));
    return CAIRN_OK;
}

typedef struct trial {
    int64_t budget_bytes;
    crn_offload_best best;
} trial;

static cairn_status try_set(vdnn *s, const crn_offload_plan *plan, void *context, cairn_error *error)
{
    trial *t = context;
    if (crn_offload_need(plan, s->goes) > t->budget_bytes)
        return CAIRN_OK;
    return crn_offload_try(plan, s->goes, t->budget_bytes, &t->best, error);
}

/* ---- the solver ---- */

static bool make_room(vdnn *s, size_t count)
{
    for (int i = 0; i < CRN_OFFLOAD_PROFILES; i++)
        if (!(s->by_ratio[i] = crn_arena_alloc(&s->arena, count, sizeof(candidate))))
            return false;
    return (s->all = crn_arena_alloc_zero(&s->arena, count, sizeof(bool))) &&
           (s->goes = crn_arena_alloc_zero(&s->arena, count, sizeof(bool))) &&
           (s->best = crn_arena_alloc_zero(&s->arena, count, sizeof(bool)));
}

static cairn_status vdnn_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    vdnn *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    s->least_bytes = INT64_MAX;
    if (!make_room(s, (size_t)cairn_problem_chain(task->problem)->stage_count + 1))
        return crn_no_memory(error);
    CRN_TRY(crn_offload_profiles(task, s->plans, error));
    for (int i = 0; i < CRN_OFFLOAD_PROFILES; i++)
        if (s->plans[i])
            rank_stages(s, i);
    return for_each_set(task, s, lower_least, NULL, error);
}

static cairn_status vdnn_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const vdnn *s = session;
    (void)task;
    (void)error;
    least->bytes = s->least_bytes;
    return CAIRN_OK;
}

static cairn_status vdnn_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    vdnn *s = session;
    trial t = {crn_limit_of(budget_bytes), {.makespan_ns = INT64_MAX, .goes = s->best}};
    cairn_status status = for_each_set(task, s, try_set, &t, error);
    if (status == CAIRN_CANCELLED && t.best.makespan_ns < INT64_MAX)
        answer->stopped_early = true;
    else
        CRN_TRY(status);
    return crn_offload_answer(&t.best, t.budget_bytes, answer, error);
}

static int64_t vdnn_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return CRN_OFFLOAD_PROFILES * (crn_offload_plan_memory(task) + n * (int64_t)sizeof(candidate));
}

static int64_t vdnn_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return CRN_OFFLOAD_PROFILES * SETS * crn_min(n, THRESHOLDS) * n * 200;
}

const crn_solver crn_offload_vdnn_solver = {
    .info = {.name = "offload-vdnn",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "",
             .summary =
                 "saved sets are offloaded whose next forward is long for their size; the best of all thresholds",
             .source = "vDNN++, Shriram et al. 2019, as in Beaumont et al. 2019, section 6",
             .cost = "at most 6,000 schedules of O(n)"},
    .memory = vdnn_memory,
    .work = vdnn_work,
    .open = vdnn_open,
    .close = vdnn_close,
    .least = vdnn_least,
    .solve = vdnn_solve,
};
