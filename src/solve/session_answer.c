/*
 * One budget: the solver is asked, the simulator judges its operations, and what is known of bounds and of the least makes
 * of it an outcome with its reason.
 */
#include "solve/session.h"

#include <stdio.h>
#include <string.h>

#include "base/unit_text.h"
#include "schedule/schedule.h"
#include "solve/baselines.h"

/* Of the time limit, what is kept for the bound. */
enum { BOUND_SHARE = 8 };

cairn_status crn_answer_init(crn_answer *answer, const crn_task *task, cairn_error *error)
{
    *answer = (crn_answer){.lower_bound_ns = CAIRN_NONE, .objective_bytes = CAIRN_NONE, .checkpoint_count = -1};
    return cairn_builder_new(task->env, task->problem, &answer->builder, error);
}

void crn_answer_clear(crn_answer *answer, const crn_task *task)
{
    cairn_allocator allocator = crn_allocator(task->env);
    cairn_builder_free(answer->builder);
    if (answer->checkpoints)
        crn_free(&allocator, answer->checkpoints, (size_t)answer->checkpoint_count, sizeof(*answer->checkpoints));
}

void crn_info_reset(cairn_info *info)
{
    *info = (cairn_info){.outcome = CAIRN_OUTCOME_UNKNOWN,
                         .budget_bytes = CAIRN_NONE,
                         .makespan_ns = CAIRN_NONE,
                         .peak_bytes = CAIRN_NONE,
                         .host_peak_bytes = CAIRN_NONE,
                         .recompute_ns = CAIRN_NONE,
                         .stall_ns = CAIRN_NONE,
                         .lower_bound_ns = CAIRN_NONE,
                         .gap = -1,
                         .least_bytes = CAIRN_NONE,
                         .least_lower_bytes = CAIRN_NONE,
                         .store_all_bytes = CAIRN_NONE,
                         .store_all_ns = CAIRN_NONE,
                         .solve_ns = CAIRN_NONE,
                         .solver_peak_bytes = CAIRN_NONE,
                         .objective_bytes = CAIRN_NONE,
                         .iterations = CAIRN_NONE,
                         .checkpoint_count = -1};
}

void cairn_info_clear(cairn_info *info)
{
    if (info->checkpoints)
        crn_free(&info->allocator, info->checkpoints, (size_t)info->checkpoint_count, sizeof(*info->checkpoints));
    crn_info_reset(info);
}

/* What the solver may have of the time: all but the bound's, where it does not see to that itself. */
static crn_task solver_part(const crn_session *session)
{
    bool sees = session->asked->has_own_bound || strcmp(session->asked->info.name, "auto") == 0;
    return sees || session->settings.minimize_memory ? session->task : crn_task_but_part(&session->task, BOUND_SHARE);
}

static cairn_status ask_alone(crn_session *session, const crn_task *part, int64_t budget_bytes, crn_answer *answer,
                              cairn_error *error)
{
    cairn_status status = crn_session_open(session, part, error);
    if (status == CAIRN_OK)
        status = session->asked->solve(part, session->state, budget_bytes, answer, error);
    if (session->asked != session->solver) { /* the schedule is its own, whoever found it: the reason says who did */
        answer->solver = NULL;
        answer->optimal_in_class = false;
        answer->iterations = 0;
    }
    if (status != CAIRN_CANCELLED || session->cancelled)
        return status;
    answer->found = false;
    answer->stopped_early = true; /* by the clock */
    return CAIRN_OK;
}

/* A solver that the clock may stop is asked together with the baselines, and the better answer counts. */
static cairn_status ask_beside_baselines(crn_session *session, const crn_task *part, int64_t budget_bytes,
                                         crn_answer *answer, cairn_error *error)
{
    crn_answer other;
    CRN_TRY(crn_answer_init(&other, part, error));
    cairn_status status = crn_baselines_solve(part, session->asked, budget_bytes, &other, error);
    if (status == CAIRN_OK)
        status = ask_alone(session, part, budget_bytes, answer, error);
    if (status == CAIRN_OK && answer->stopped_early)
        status = crn_take_better(part, budget_bytes, answer, &other, error);
    crn_answer_clear(&other, part);
    return status;
}

static cairn_status ask_solver(crn_session *session, int64_t budget_bytes, crn_answer *answer, cairn_error *error)
{
    const crn_task part = solver_part(session);
    cairn_status status = crn_may_be_cut(session->asked, &part)
                              ? ask_beside_baselines(session, &part, budget_bytes, answer, error)
                              : ask_alone(session, &part, budget_bytes, answer, error);
    if (status == CAIRN_OK && !answer->found && session->cancelled)
        return crn_fail(error, CAIRN_CANCELLED, "stopped before a schedule was found");
    return status;
}

static void take_replay(cairn_info *info, const cairn_replay *replay, bool has_machine)
{
    info->makespan_ns = replay->makespan_ns;
    info->peak_bytes = replay->peak_bytes;
    info->host_peak_bytes = has_machine ? replay->host_peak_bytes : CAIRN_NONE;
    info->recompute_ns = replay->recompute_ns;
    info->stall_ns = replay->stall_ns;
}

/* What takes more than 2^63 - 1 ns is no answer. */
static cairn_status judge(crn_session *session, crn_answer *answer, cairn_info *info, cairn_error *error)
{
    cairn_replay replay;
    CRN_TRY(crn_replay(&session->task, cairn_builder_ops(answer->builder), cairn_builder_count(answer->builder),
                       info->budget_bytes, &replay, error));
    answer->found = replay.violation.code != CAIRN_VIOLATION_OVERFLOW;
    if (!answer->found)
        return CAIRN_OK;
    if (!replay.valid)
        return crn_fail_at(error, CAIRN_INTERNAL, replay.violation.op, NULL, "%s made a schedule that is not valid: %s",
                           info->solver, replay.violation.message);
    take_replay(info, &replay, session->task.machine != NULL);
    return CAIRN_OK;
}

/* The methods are asked unless what is known already meets the answer. */
static cairn_status fill_bound(crn_session *session, const crn_answer *answer, cairn_info *info, cairn_error *error)
{
    const char *method;
    info->lower_bound_ns = crn_max(crn_work_ns(session->task.problem), answer->lower_bound_ns);
    int64_t enough_ns = answer->found ? info->makespan_ns : INT64_MAX;
    CRN_TRY(crn_raise_bound(&session->task, info->budget_bytes, enough_ns, &info->lower_bound_ns, &method, error));
    if (!answer->found)
        return CAIRN_OK;
    if (info->lower_bound_ns > info->makespan_ns)
        return crn_fail(error, CAIRN_INTERNAL, "the lower bound %lld ns passes the makespan %lld ns of %s",
                        (long long)info->lower_bound_ns, (long long)info->makespan_ns, info->solver);
    info->gap =
        info->makespan_ns == 0 ? 0 : (double)(info->makespan_ns - info->lower_bound_ns) / (double)info->makespan_ns;
    return CAIRN_OK;
}

/* No schedule at all fits, whatever was looked at. */
static bool is_refuted(const cairn_info *info)
{
    return info->budget_bytes != CAIRN_NONE && info->budget_bytes < info->least_lower_bytes;
}

/* The memory is enough, but times beyond 2^63 - 1 ns cannot be represented, and some solvers stop somewhat before. */
static bool is_beyond_counting(const cairn_info *info)
{
    return info->least_bytes != CAIRN_NONE && crn_limit_of(info->budget_bytes) >= info->least_bytes;
}

/* Where the search for the least was cut short, less memory may do than is known. */
static cairn_outcome outcome_of_nothing(const crn_session *session, const crn_answer *answer, const cairn_info *info)
{
    bool is_open = answer->stopped_early || answer->cut_short || session->least.is_rough || is_beyond_counting(info);
    return is_open && !is_refuted(info) ? CAIRN_OUTCOME_UNKNOWN : CAIRN_OUTCOME_INFEASIBLE;
}

static void fill_outcome(const crn_session *session, const crn_answer *answer, cairn_info *info)
{
    const crn_solver *solver = crn_solver_find(info->solver);
    if (!answer->found)
        info->outcome = outcome_of_nothing(session, answer, info);
    else if (info->lower_bound_ns == info->makespan_ns && !session->settings.minimize_memory)
        info->outcome = CAIRN_OUTCOME_OPTIMAL;
    else
        info->outcome = CAIRN_OUTCOME_FEASIBLE;
    if (info->outcome == CAIRN_OUTCOME_FEASIBLE && answer->optimal_in_class && solver)
        snprintf(info->optimal_in, sizeof(info->optimal_in), "%s",
                 answer->optimal_in ? answer->optimal_in : solver->info.optimal_in);
}

/* With the limit and its unit: an integer is in nanoseconds, which is easily taken for seconds. */
static void say_time_ended(int64_t limit_ns, cairn_info *info)
{
    char limit[32];
    snprintf(info->reason, sizeof(info->reason), "the time limit%s%s ended before a schedule was found",
             limit_ns == CAIRN_NONE ? "" : " of ",
             limit_ns == CAIRN_NONE ? "" : crn_format_ns(limit_ns, limit, sizeof(limit)));
}

static void fill_reason(const crn_session *session, const crn_answer *answer, cairn_info *info)
{
    bool is_rough = session->least.is_rough && info->least_bytes != CAIRN_NONE;
    char lower[CRN_EXACT_BYTES_MAX], least[CRN_EXACT_BYTES_MAX];
    crn_format_bytes_exactly(info->least_lower_bytes, lower, sizeof(lower));
    crn_format_bytes_exactly(info->least_bytes, least, sizeof(least));
    if (answer->reason[0])
        memcpy(info->reason, answer->reason, sizeof(info->reason));
    else if (info->outcome == CAIRN_OUTCOME_UNKNOWN && answer->stopped_early)
        say_time_ended(session->settings.time_limit_ns, info);
    else if (info->outcome == CAIRN_OUTCOME_UNKNOWN && !answer->cut_short && is_beyond_counting(info))
        snprintf(info->reason, sizeof(info->reason), "what fits takes longer than %s can count", info->solver);
    else if (info->outcome == CAIRN_OUTCOME_UNKNOWN && is_rough && !answer->cut_short)
        snprintf(info->reason, sizeof(info->reason),
                 "the search for the least memory was cut short: less than %s may do (option time-limit)", least);
    else if (info->outcome == CAIRN_OUTCOME_UNKNOWN)
        snprintf(info->reason, sizeof(info->reason),
                 "none was found before its work or memory ended (options iterations, memory-limit)");
    else if (info->outcome == CAIRN_OUTCOME_INFEASIBLE && is_refuted(info))
        snprintf(info->reason, sizeof(info->reason), "every schedule needs at least %s", lower);
    else if (info->outcome == CAIRN_OUTCOME_INFEASIBLE && info->least_is_exact)
        snprintf(info->reason, sizeof(info->reason), "every schedule needs at least %s", least);
    else if (info->outcome == CAIRN_OUTCOME_INFEASIBLE && info->least_bytes != CAIRN_NONE)
        snprintf(info->reason, sizeof(info->reason), "%s found none below %s", info->solver, least);
    else if (info->outcome == CAIRN_OUTCOME_INFEASIBLE)
        snprintf(info->reason, sizeof(info->reason), "%s has no schedule within any budget", info->solver);
}

static cairn_status copy_checkpoints(const crn_session *session, const crn_answer *answer, cairn_info *info,
                                     cairn_error *error)
{
    info->objective_bytes = answer->objective_bytes;
    if (!answer->found || !answer->checkpoints)
        return CAIRN_OK;
    size_t count = (size_t)answer->checkpoint_count;
    info->allocator = session->meter.inner;
    info->checkpoints = crn_alloc(&info->allocator, count, sizeof(*info->checkpoints));
    if (!info->checkpoints)
        return crn_no_memory(error);
    info->checkpoint_count = answer->checkpoint_count;
    memcpy(info->checkpoints, answer->checkpoints, count * sizeof(*info->checkpoints));
    return CAIRN_OK;
}

/*
 * The least belongs to every answer, but for one that was stopped while looking for it. It is no more than a budget that
 * was kept to: those who look for the least with limited work, or time, may pass that by.
 */
static cairn_status fill_least(crn_session *session, const crn_answer *answer, cairn_info *info, cairn_error *error)
{
    cairn_status status = crn_session_least(session, error);
    if (status != CAIRN_OK && status != CAIRN_CANCELLED)
        return status;
    crn_least *least = &session->least;
    if (answer->found && info->budget_bytes != CAIRN_NONE && info->budget_bytes < least->bytes) {
        least->bytes = info->budget_bytes;
        least->is_exact = least->bytes == least->lower_bytes;
    }
    info->least_bytes = least->bytes;
    info->least_is_exact = least->is_exact;
    info->least_lower_bytes = least->lower_bytes;
    return CAIRN_OK;
}

static cairn_status fill_info(crn_session *session, crn_answer *answer, cairn_info *info, cairn_error *error)
{
    snprintf(info->solver, sizeof(info->solver), "%s", answer->solver ? answer->solver : session->solver->info.name);
    info->store_all_bytes = session->store_all_bytes;
    info->store_all_ns = session->store_all_ns;
    info->stopped_early = answer->stopped_early;
    info->iterations = answer->iterations > 0 ? answer->iterations : CAIRN_NONE;
    if (answer->found)
        CRN_TRY(judge(session, answer, info, error));
    CRN_TRY(fill_bound(session, answer, info, error));
    CRN_TRY(fill_least(session, answer, info, error));
    fill_outcome(session, answer, info);
    fill_reason(session, answer, info);
    return copy_checkpoints(session, answer, info, error);
}

static cairn_status make_schedule(const crn_session *session, const crn_answer *answer, const cairn_info *info,
                                  cairn_schedule **schedule, cairn_error *error)
{
    cairn_schedule_info recorded = {.solver = info->solver,
                                    .budget_bytes = info->budget_bytes,
                                    .makespan_ns = info->makespan_ns,
                                    .peak_bytes = info->peak_bytes,
                                    .lower_bound_ns = info->lower_bound_ns,
                                    .machine = session->settings.has_machine ? &session->settings.machine : NULL};
    return crn_schedule_new(session->meter.inner, session->task.problem, cairn_builder_ops(answer->builder),
                            cairn_builder_count(answer->builder), &recorded, schedule, error);
}

static cairn_status answer_with(crn_session *session, crn_answer *answer, cairn_schedule **schedule, cairn_info *info,
                                cairn_error *error)
{
    CRN_TRY(ask_solver(session, info->budget_bytes, answer, error));
    CRN_TRY(fill_info(session, answer, info, error));
    return schedule && answer->found ? make_schedule(session, answer, info, schedule, error) : CAIRN_OK;
}

static void log_answer(const crn_session *session, const cairn_info *info)
{
    char line[240];
    const cairn_env *env = session->caller;
    if (!env->log)
        return;
    snprintf(line, sizeof(line), "event=solved solver=%s outcome=%s budget_bytes=%lld makespan_ns=%lld solve_ns=%lld",
             info->solver, cairn_outcome_name(info->outcome), (long long)info->budget_bytes,
             (long long)info->makespan_ns, (long long)info->solve_ns);
    env->log(env->log_context, line);
}

cairn_status crn_session_answer(crn_session *session, int64_t budget_bytes, cairn_schedule **schedule, cairn_info *info,
                                cairn_error *error)
{
    int64_t started_ns = session->answered ? crn_clock_ns() : session->begun_ns;
    crn_answer answer;
    crn_info_reset(info);
    info->budget_bytes = budget_bytes;
    cairn_status status = crn_answer_init(&answer, &session->task, error);
    if (status == CAIRN_OK) {
        if (session->answered) /* what came before the first answer counts as part of it */
            crn_session_limit(session, session->settings.time_limit_ns);
        session->answered = true;
        status = answer_with(session, &answer, schedule, info, error);
        crn_answer_clear(&answer, &session->task);
    }
    if (status != CAIRN_OK) {
        cairn_info_clear(info);
        return crn_session_explain(session, status, error);
    }
    info->solve_ns = crn_clock_ns() - started_ns;
    info->solver_peak_bytes = atomic_load(&session->meter.peak_bytes);
    log_answer(session, info);
    return CAIRN_OK;
}
