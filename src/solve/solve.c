/* The calls of cairn/solve.h. */
#include <stdio.h>

#include "solve/options.h"
#include "solve/session.h"

static int64_t largest_budget(const int64_t *budgets_bytes, int count)
{
    int64_t largest = 0;
    for (int i = 0; i < count; i++) {
        if (budgets_bytes[i] == CAIRN_NONE)
            return CAIRN_NONE;
        largest = crn_max(largest, budgets_bytes[i]);
    }
    return largest;
}

static void clear_answers(int count, cairn_schedule **schedules, cairn_info *infos)
{
    for (int i = 0; i < count; i++) {
        cairn_info_clear(&infos[i]);
        if (schedules) {
            cairn_schedule_free(schedules[i]);
            schedules[i] = NULL;
        }
    }
}

static cairn_status check_budgets(const int64_t *budgets_bytes, int count, cairn_error *error)
{
    for (int i = 0; i < count; i++)
        if (budgets_bytes[i] < 0 && budgets_bytes[i] != CAIRN_NONE)
            return crn_fail_at(error, CAIRN_BAD_INPUT, i, "budget",
                               "budgets[%d] is %lld bytes; at least 0, or CAIRN_NONE for no limit", i,
                               (long long)budgets_bytes[i]);
    return CAIRN_OK;
}

cairn_status cairn_solve_many(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                              const int64_t *budgets_bytes, int count, cairn_schedule **schedules, cairn_info *infos,
                              cairn_error *error)
{
    crn_session session;
    if (count < 0)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "a count of %d budgets", count);
    for (int i = 0; i < count; i++) {
        crn_info_reset(&infos[i]);
        if (schedules)
            schedules[i] = NULL;
    }
    CRN_TRY(check_budgets(budgets_bytes, count, error));
    cairn_status status =
        crn_session_begin(&session, env, problem, options, largest_budget(budgets_bytes, count), error);
    for (int i = 0; status == CAIRN_OK && i < count; i++)
        status = crn_session_answer(&session, budgets_bytes[i], schedules ? &schedules[i] : NULL, &infos[i], error);
    crn_session_end(&session);
    if (status != CAIRN_OK)
        clear_answers(count, schedules, infos);
    return status;
}

static cairn_status check_budget_given(const crn_settings *settings, cairn_error *error)
{
    if (settings->minimize_memory && settings->has_budget)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "budget", "a budget does not go with minimize=memory");
    if (!settings->minimize_memory && !settings->has_budget)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "budget",
                           "option budget is needed (\"none\" for no limit)");
    return CAIRN_OK;
}

cairn_status cairn_solve(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                         cairn_schedule **schedule, cairn_info *info, cairn_error *error)
{
    crn_settings settings;
    crn_info_reset(info);
    if (schedule)
        *schedule = NULL;
    CRN_TRY(crn_options_resolve(options, problem, &settings, error));
    CRN_TRY(check_budget_given(&settings, error));
    return cairn_solve_many(env, problem, options, &settings.budget_bytes, 1, schedule, info, error);
}

static void take_limits(const crn_session *session, cairn_limits *limits)
{
    *limits = (cairn_limits){.least_bytes = session->least.bytes,
                             .least_is_exact = session->least.is_exact,
                             .least_lower_bytes = session->least.lower_bytes,
                             .store_all_bytes = session->store_all_bytes,
                             .store_all_ns = session->store_all_ns};
}

/* The least may be found without a pause at which one could stop. */
static cairn_status poll_once(const crn_session *session, cairn_error *error)
{
    return crn_should_stop(&session->task, NULL) ? crn_fail(error, CAIRN_CANCELLED, "stopped before it began")
                                                 : CAIRN_OK;
}

cairn_status cairn_limits_of(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                             cairn_limits *limits, cairn_error *error)
{
    crn_session session;
    *limits = (cairn_limits){CAIRN_NONE, false, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE};
    cairn_status status = crn_session_begin(&session, env, problem, options, 0, error);
    if (status == CAIRN_OK) {
        status = poll_once(&session, error);
        if (status == CAIRN_OK)
            status = crn_session_least(&session, error);
        if (status == CAIRN_CANCELLED && !session.cancelled) /* by the clock: what is known is still an answer */
            status = CAIRN_OK;
    }
    if (status == CAIRN_OK)
        take_limits(&session, limits);
    crn_session_end(&session);
    return status;
}

cairn_status cairn_bound_of(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                            cairn_bound *bound, cairn_error *error)
{
    crn_session session;
    const char *method;
    *bound = (cairn_bound){.lower_bound_ns = CAIRN_NONE, .least_lower_bytes = CAIRN_NONE};
    CRN_TRY(crn_session_prepare(&session, env, problem, options, 0, error));
    CRN_TRY(check_budget_given(&session.settings, error));
    CRN_TRY(crn_options_check(options, NULL, &session.task, error));
    crn_session_make_team(&session, NULL); /* without memory for one, bounds have one thread */
    cairn_status status = crn_least_lower(&session.task, &bound->least_lower_bytes, error);
    if (status == CAIRN_OK)
        status = crn_lower_bound(&session.task, session.settings.budget_bytes, &bound->lower_bound_ns, &method, error);
    crn_session_end(&session);
    if (status != CAIRN_OK)
        return crn_session_explain(&session, status, error);
    snprintf(bound->method, sizeof(bound->method), "%s", method);
    return CAIRN_OK;
}

cairn_status cairn_solver_accepts(const char *solver, const cairn_problem *problem, const cairn_options *options,
                                  cairn_error *error)
{
    crn_session session;
    const crn_solver *found = crn_solver_find(solver);
    if (!found)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "solver", "there is no solver \"%s\"",
                           solver ? solver : "");
    CRN_TRY(crn_session_prepare(&session, NULL, problem, options, 0, error));
    CRN_TRY(crn_solver_accepts(found, &session.task, error));
    return crn_options_check(options, found, &session.task, error);
}
