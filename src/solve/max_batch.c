/*
 * The largest batch: Checkmate, section 5.3.
 *
 * Problem   Measured at batch N. At batch b all sizes, workspaces and times are b/N times as large, rounded up; fixed
 *           bytes, the machine and the budget M stay. Wanted: the largest b for which there is a schedule within M whose
 *           recomputation takes at most one forward, F(b): the nodes before the backward, or all forwards of a chain.
 * Found     By bisection over b with the solver that the options name, first over whole multiples of N, then between
 *           two of them. What it counts is the simulator's.
 * Refuted   Take a schedule for batch b' >= b. Without the rounding, and shrunk to batch N, the same operations stay
 *           within fixed + (M - fixed) N / b bytes, and what they recompute takes at most F + (forwards that take time) N / b,
 *           for rounding up adds less than 1 to each. So where every schedule of the problem as it was measured needs
 *           more bytes, or at that budget more recomputation, neither b nor any larger batch is possible. Lower bounds on
 *           memory and makespan prove that; a makespan less the longest first computations bounds the recomputation.
 *           With a machine only memory refutes, from N on: time may be spent waiting, and smaller batches leave
 *           more of the host's memory.
 * Monotone  For whole multiples of N (so for N = 1) memory and times are linear in b, and what is possible at b is
 *           possible below. For others rounding may break that by single bytes and nanoseconds; the answer is then still a
 *           batch that is possible, and the refuted one is still refuted with all above it.
 * Cost      A bisection's number of solver calls, about log2 of what the bounds leave open.
 */
#include <stdio.h>

#include "problem/problem.h"
#include "solve/options.h"
#include "solve/session.h"

/* Of the time, one of so many parts goes into what is refuted. */
enum { PROOF_PARTS = 4 };

typedef struct hunt {
    const cairn_env *caller;
    cairn_env env; /* the caller's, with the poll below */
    const cairn_problem *problem;
    const cairn_options *options;
    crn_session unit; /* of the problem as it was measured: settings, bounds */
    int64_t measured, budget_bytes, fixed_bytes;
    int64_t least_lower_bytes;
    int64_t forward_ns, forward_count; /* one forward at the measured batch, and its computations that take time */
    int64_t firsts_ns;                 /* all that is not recomputation, at most */
    int64_t target_ns;                 /* of the solve under way: a makespan that will do; CAIRN_NONE = only the best */
    int64_t polled_ns;
    bool cancelled, timed_out;
    cairn_max_batch *best;
} hunt;

/* ---- stopping ---- */

static bool is_caller_due(hunt *h)
{
    int64_t now_ns = crn_clock_ns();
    if (h->polled_ns != CAIRN_NONE && now_ns - h->polled_ns < h->caller->poll_interval_ns)
        return false;
    h->polled_ns = now_ns;
    return true;
}

/* Stops a solver when the caller says so, or when what it has will do: then a larger batch is looked at. */
static int poll_hunt(void *context, const cairn_progress *progress)
{
    hunt *h = context;
    if (!h->cancelled && h->caller->poll && is_caller_due(h))
        h->cancelled = h->caller->poll(h->caller->poll_context, progress) != 0;
    bool will_do = progress && progress->best_ns != CAIRN_NONE && progress->best_ns <= h->target_ns;
    return h->cancelled || will_do;
}

static bool is_over(hunt *h)
{
    h->timed_out = h->timed_out || crn_task_is_past(&h->unit.task);
    return h->timed_out || h->cancelled;
}

/* ---- one forward ---- */

typedef struct forward {
    int64_t ns, count;
    int64_t firsts_ns; /* all first computations and all backwards, at most */
} forward;

static void add_forward(forward *f, int64_t ns)
{
    f->ns += ns;
    f->count += ns > 0;
}

static void add_stage(forward *f, const cairn_stage *stage)
{
    int64_t first_ns = stage->forward_only_ns, backward_ns = 0;
    for (int32_t k = 0; k < stage->option_count; k++) {
        first_ns = crn_max(first_ns, stage->options[k].forward_ns);
        backward_ns = crn_max(backward_ns, stage->options[k].backward_ns);
    }
    f->firsts_ns += first_ns + backward_ns;
    add_forward(f, stage->options[0].forward_ns);
}

/* Sums stay below 2^63: the problem's own total of times is larger. */
static forward forward_of(const cairn_problem *problem)
{
    forward f = {0, 0, 0};
    const cairn_chain *chain = cairn_problem_chain(problem);
    const cairn_graph *graph = cairn_problem_graph(problem);
    for (int32_t i = 0; chain && i < chain->stage_count; i++)
        add_stage(&f, &chain->stages[i]);
    for (int32_t v = 0; graph && v < graph->node_count; v++) {
        f.firsts_ns += graph->nodes[v].cost_ns;
        if (v < graph->backward_begins_at)
            add_forward(&f, graph->nodes[v].cost_ns);
    }
    return f;
}

/* ---- refuting ---- */

/* floor(value * N / batch), at most INT64_MAX. */
static int64_t shrunk(const hunt *h, int64_t value, int64_t batch)
{
    crn_wide quotient = (crn_wide)(uint64_t)value * (uint64_t)h->measured / (uint64_t)batch;
    return quotient > (crn_wide)INT64_MAX ? INT64_MAX : (int64_t)quotient;
}

/* The least batch that memory alone refutes; INT64_MAX when there is none. */
static int64_t refuted_by_memory(const hunt *h)
{
    if (h->budget_bytes < h->fixed_bytes)
        return 1;
    int64_t needed = h->least_lower_bytes - h->fixed_bytes, room = h->budget_bytes - h->fixed_bytes;
    if (needed <= 0)
        return INT64_MAX;
    int64_t batch = shrunk(h, room, needed); /* the largest with floor(room * N / batch) >= needed */
    if (h->unit.task.machine)
        batch = crn_max(batch, h->measured - 1);
    return batch == INT64_MAX ? batch : batch + 1;
}

static cairn_status refuted_by_time(const hunt *h, const crn_task *task, int64_t batch, bool *refuted,
                                    cairn_error *error)
{
    const char *method;
    int64_t bound_ns, room = shrunk(h, h->budget_bytes - h->fixed_bytes, batch), allowed_ns;
    *refuted = false;
    if (!crn_add(h->fixed_bytes, room, &room))
        return CAIRN_OK;
    CRN_TRY(crn_lower_bound(task, room, &bound_ns, &method, error));
    int64_t rounding_ns = h->measured == 1 ? 0 : shrunk(h, h->forward_count, batch) + 1;
    if (crn_add(h->forward_ns, rounding_ns, &allowed_ns))
        *refuted = bound_ns - h->firsts_ns > allowed_ns;
    return CAIRN_OK;
}

/* The least batch in (low, high] that is known to be refuted, where high is or counts as such. */
static cairn_status lower_by_time(hunt *h, int64_t low, int64_t *high, cairn_error *error)
{
    const crn_task part = crn_task_part(&h->unit.task, PROOF_PARTS);
    if (h->unit.task.machine)
        return CAIRN_OK;
    while (*high - low > 1 && !crn_task_is_past(&part) && !is_over(h)) {
        bool refuted;
        int64_t middle = low + (*high - low) / 2;
        CRN_TRY(refuted_by_time(h, &part, middle, &refuted, error));
        *(refuted ? high : &low) = middle;
    }
    return CAIRN_OK;
}

/* ---- finding ---- */

/*
 * Where to ask next between low, which is possible, and high, which is not: at the middle one of the multiples of the
 * measured batch there, or the middle if there is none.
 */
static int64_t middle_batch(const hunt *h, int64_t low, int64_t high)
{
    int64_t first = low / h->measured + 1, last = (high - 1) / h->measured;
    return first <= last ? (first + (last - first) / 2) * h->measured : low + (high - low) / 2;
}

static cairn_status at_batch(const hunt *h, int64_t batch, cairn_problem **problem, cairn_error *error)
{
    return cairn_problem_scale(h->caller, h->problem, batch, h->measured, problem, error);
}

/* The largest batch up to high whose sizes and times stay below 2^63. */
static cairn_status largest_that_can_be_written(const hunt *h, int64_t high, int64_t *batch, cairn_error *error)
{
    int64_t low = 0;
    for (int64_t middle = high; low < high; middle = low + (high - low) / 2 + (high - low) % 2) {
        cairn_problem *scaled;
        cairn_status status = at_batch(h, middle, &scaled, error);
        if (status != CAIRN_OK && status != CAIRN_OVERFLOW)
            return status;
        if (status == CAIRN_OK)
            low = middle;
        else
            high = middle - 1;
        cairn_problem_free(scaled);
    }
    *batch = low;
    return CAIRN_OK;
}

static cairn_status store_all_fits(hunt *h, int64_t batch, bool *fits, cairn_error *error)
{
    crn_session session;
    cairn_problem *scaled;
    int64_t peak_bytes = 0, makespan_ns = 0;
    CRN_TRY(at_batch(h, batch, &scaled, error));
    cairn_status status = crn_session_prepare(&session, &h->env, scaled, h->options, h->budget_bytes, error);
    if (status == CAIRN_OK)
        status = crn_store_all(&session.task, &peak_bytes, &makespan_ns, error);
    *fits = status == CAIRN_OK && peak_bytes <= h->budget_bytes;
    if (*fits)
        *h->best = (cairn_max_batch){.batch = batch,
                                     .refuted_batch = CAIRN_NONE,
                                     .budget_bytes = h->budget_bytes,
                                     .makespan_ns = makespan_ns,
                                     .peak_bytes = peak_bytes,
                                     .forward_ns = forward_of(scaled).ns,
                                     .solver = "store-all"};
    cairn_problem_free(scaled);
    return status;
}

static cairn_status raise_by_store_all(hunt *h, int64_t high, cairn_error *error)
{
    int64_t low = 0;
    while (high - low > 1 && (low == 0 || !is_over(h))) {
        bool fits;
        int64_t middle = middle_batch(h, low, high);
        CRN_TRY(store_all_fits(h, middle, &fits, error));
        *(fits ? &low : &high) = middle;
    }
    return CAIRN_OK;
}

/* Time left for one of so many solves; CAIRN_NONE = no limit. */
static int64_t share_of_time(const hunt *h, int64_t solves)
{
    if (h->unit.task.deadline_ns == CAIRN_NONE)
        return CAIRN_NONE;
    return crn_max(0, h->unit.task.deadline_ns - crn_clock_ns()) / solves;
}

static cairn_status solve_within(hunt *h, const cairn_problem *scaled, int64_t solves, cairn_info *info,
                                 cairn_error *error)
{
    crn_session session;
    cairn_status status = crn_session_begin(&session, &h->env, scaled, h->options, h->budget_bytes, error);
    if (status == CAIRN_OK) {
        crn_session_limit(&session, share_of_time(h, solves));
        status = crn_session_answer(&session, h->budget_bytes, NULL, info, error);
    }
    crn_session_end(&session);
    return status;
}

static void take(hunt *h, int64_t batch, int64_t forward_ns, const cairn_info *info)
{
    cairn_max_batch *best = h->best;
    if (best->batch == batch && best->makespan_ns <= info->makespan_ns)
        return;
    *best = (cairn_max_batch){.batch = batch,
                              .refuted_batch = CAIRN_NONE,
                              .budget_bytes = h->budget_bytes,
                              .makespan_ns = info->makespan_ns,
                              .peak_bytes = info->peak_bytes,
                              .recompute_ns = info->recompute_ns,
                              .forward_ns = forward_ns};
    snprintf(best->solver, sizeof(best->solver), "%s", info->solver);
}

/* Asks the solver at a batch. thorough: for its best answer; else the first that will do is enough. */
static cairn_status try_batch(hunt *h, int64_t batch, int64_t solves, bool thorough, bool *possible, cairn_error *error)
{
    cairn_problem *scaled;
    cairn_info info = {.checkpoints = NULL};
    CRN_TRY(at_batch(h, batch, &scaled, error));
    forward f = forward_of(scaled);
    bool times_add_up = cairn_problem_graph(scaled) && !h->unit.task.machine; /* makespan = first + recomputed */
    h->target_ns = CAIRN_NONE;
    if (!thorough && times_add_up && !crn_add(f.firsts_ns, f.ns, &h->target_ns))
        h->target_ns = CAIRN_NONE;
    cairn_status status = solve_within(h, scaled, solves, &info, error);
    *possible = status == CAIRN_OK && info.makespan_ns != CAIRN_NONE && info.recompute_ns <= f.ns;
    if (*possible)
        take(h, batch, f.ns, &info);
    cairn_info_clear(&info);
    cairn_problem_free(scaled);
    return status == CAIRN_CANCELLED ? CAIRN_OK : status;
}

static int64_t solves_for(int64_t open)
{
    int64_t solves = 1; /* the last one, which is thorough */
    for (; open > 1; open -= open / 2)
        solves++;
    return solves;
}

static cairn_status bisect(hunt *h, int64_t low, int64_t high, cairn_error *error)
{
    bool possible;
    while (high - low > 1 && !is_over(h)) {
        int64_t middle = middle_batch(h, low, high);
        CRN_TRY(try_batch(h, middle, solves_for(high - low), false, &possible, error));
        *(possible ? &low : &high) = middle;
    }
    return low > 0 && !is_over(h) ? try_batch(h, low, 1, true, &possible, error) : CAIRN_OK;
}

/* ---- all of it ---- */

static bool asks_everybody(const hunt *h)
{
    const crn_solver *solver = crn_solver_find(h->unit.settings.solver);
    return solver && solver->info.takes_chains && solver->info.takes_graphs;
}

static cairn_status fail_without_end(int64_t batch, cairn_error *error)
{
    return crn_fail(error, CAIRN_OVERFLOW,
                    "there is no largest batch: %lld is possible, and sizes or times of larger ones pass 2^63 - 1",
                    (long long)batch);
}

static cairn_status find(hunt *h, cairn_error *error)
{
    int64_t refuted = refuted_by_memory(h), largest;
    CRN_TRY(largest_that_can_be_written(h, refuted - 1, &largest, error));
    int64_t high = largest + 1;
    if (asks_everybody(h))
        CRN_TRY(raise_by_store_all(h, high, error));
    int64_t low = crn_max(0, h->best->batch), first_high = high;
    CRN_TRY(lower_by_time(h, low, &high, error));
    CRN_TRY(bisect(h, low, high, error));
    if (high == first_high && (high != refuted || refuted == INT64_MAX)) { /* where numbers end, not memory */
        if (h->best->batch == largest)
            return fail_without_end(largest, error);
        high = refuted;
    }
    h->best->refuted_batch = high == INT64_MAX ? CAIRN_NONE : high;
    h->best->stopped_early = h->cancelled || h->timed_out;
    if (h->cancelled && h->best->batch == CAIRN_NONE)
        return crn_fail(error, CAIRN_CANCELLED, "stopped before a batch was found");
    return CAIRN_OK;
}

static cairn_status check(const hunt *h, cairn_error *error)
{
    const cairn_graph *graph = cairn_problem_graph(h->problem);
    if (h->measured < 1)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "batch", "the measured batch is %lld; at least 1",
                           (long long)h->measured);
    if (h->unit.settings.minimize_memory)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "minimize",
                           "minimize=memory does not go with the largest batch");
    if (h->unit.settings.budget_bytes == CAIRN_NONE)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "budget", "the largest batch needs a budget");
    if (graph && graph->backward_begins_at < 0)
        return crn_fail_at(
            error, CAIRN_BAD_INPUT, CAIRN_NONE, "backward_begins_at",
            "backward_begins_at is missing: the largest batch is that of at most one more forward, and the "
            "graph does not say where its forward ends");
    const crn_solver *solver = crn_solver_find(h->unit.settings.solver);
    CRN_TRY(crn_solver_accepts(solver, &h->unit.task, error));
    return crn_options_check(h->options, solver, &h->unit.task, error);
}

static cairn_status begin(hunt *h, cairn_error *error)
{
    CRN_TRY(crn_session_prepare(&h->unit, &h->env, h->problem, h->options, CAIRN_NONE, error));
    CRN_TRY(check(h, error));
    h->unit.task.bounds = &h->unit.bounds; /* they are asked at many budgets */
    forward f = forward_of(h->problem);
    h->forward_ns = f.ns;
    h->forward_count = f.count;
    h->firsts_ns = f.firsts_ns;
    h->budget_bytes = h->best->budget_bytes = h->unit.settings.budget_bytes;
    h->fixed_bytes = cairn_problem_info_of(h->problem)->fixed_bytes;
    return crn_least_lower(&h->unit.task, &h->least_lower_bytes, error);
}

cairn_status cairn_max_batch_of(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                                int64_t measured_batch, cairn_max_batch *max_batch, cairn_error *error)
{
    static const cairn_env defaults;
    static const cairn_max_batch nothing = {.batch = CAIRN_NONE,
                                            .refuted_batch = CAIRN_NONE,
                                            .budget_bytes = CAIRN_NONE,
                                            .makespan_ns = CAIRN_NONE,
                                            .peak_bytes = CAIRN_NONE,
                                            .recompute_ns = CAIRN_NONE,
                                            .forward_ns = CAIRN_NONE};
    hunt h = {.caller = env ? env : &defaults,
              .problem = problem,
              .options = options,
              .measured = measured_batch,
              .target_ns = CAIRN_NONE,
              .polled_ns = CAIRN_NONE,
              .best = max_batch};
    *max_batch = nothing;
    h.env = *h.caller;
    h.env.poll = poll_hunt;
    h.env.poll_context = &h;
    h.env.poll_interval_ns = 0;
    cairn_status status = begin(&h, error);
    if (status == CAIRN_OK)
        status = find(&h, error);
    status = crn_session_explain(&h.unit, status, error);
    crn_session_end(&h.unit);
    if (status != CAIRN_OK)
        *max_batch = nothing;
    return status;
}
