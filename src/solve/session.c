#include "solve/session.h"

#include "schedule/schedule.h"
#include "solve/options.h"

/* Waking threads pays from about this many stages or nodes on. */
enum { TEAM_PROBLEM_MIN = 64 };

/* Judging an answer takes about as long as storing everything of a graph so often, or of a chain, which is summed up. */
enum { JUDGING_GRAPHS = 3, JUDGING_CHAINS = 16 };

/* ---- stopping ---- */

static bool is_poll_due(crn_session *session, int64_t interval_ns)
{
    if (interval_ns <= 0)
        return true;
    int64_t now_ns = crn_clock_ns();
    if (session->polled && now_ns - session->polled_ns < interval_ns)
        return false;
    session->polled = true;
    session->polled_ns = now_ns;
    return true;
}

/* The caller's poll may say "stop" only once; solvers may ask again, and must hear the same. */
static int sticky_poll(void *context, const cairn_progress *progress)
{
    crn_session *session = context;
    const cairn_env *caller = session->caller;
    if (session->cancelled || !is_poll_due(session, caller->poll_interval_ns))
        return session->cancelled;
    session->cancelled = caller->poll(caller->poll_context, progress) != 0;
    return session->cancelled;
}

bool crn_task_is_past(const crn_task *task)
{
    return task->deadline_ns != CAIRN_NONE && crn_clock_ns() >= task->deadline_ns;
}

bool crn_should_stop(const crn_task *task, const cairn_progress *progress)
{
    static const cairn_progress nothing = {"solving", CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE};
    const cairn_env *env = task->env;
    if (crn_task_is_past(task))
        return true;
    return env->poll && env->poll(env->poll_context, progress ? progress : &nothing) != 0;
}

crn_task crn_task_part(const crn_task *task, int64_t parts)
{
    crn_task part = *task;
    int64_t now_ns = crn_clock_ns();
    if (task->deadline_ns != CAIRN_NONE)
        part.deadline_ns = now_ns + crn_max(0, task->deadline_ns - now_ns) / parts;
    return part;
}

crn_task crn_task_but_part(const crn_task *task, int64_t parts)
{
    crn_task most = *task;
    if (task->deadline_ns != CAIRN_NONE)
        most.deadline_ns -= crn_max(0, task->deadline_ns - crn_clock_ns()) / parts;
    return most;
}

crn_task crn_task_without_machine(const crn_task *task)
{
    crn_task alone = *task;
    alone.machine = NULL;
    return alone;
}

/* Of the time limit, what is kept for judging the answer. */
static int64_t judging_share(const crn_session *session)
{
    return crn_min(session->settings.time_limit_ns / 2, session->judging_ns);
}

static void set_deadline(crn_session *session)
{
    int64_t limit_ns = session->settings.time_limit_ns;
    session->task.deadline_ns = CAIRN_NONE;
    if (limit_ns == CAIRN_NONE)
        return;
    limit_ns -= judging_share(session);
    if (!crn_add(crn_clock_ns(), limit_ns, &session->task.deadline_ns))
        session->task.deadline_ns = CAIRN_NONE;
}

void crn_session_limit(crn_session *session, int64_t time_limit_ns)
{
    session->settings.time_limit_ns = time_limit_ns;
    set_deadline(session);
}

/* ---- judging ---- */

cairn_status crn_replay(const crn_task *task, const cairn_op *ops, int64_t count, int64_t budget_bytes,
                        cairn_replay *replay, cairn_error *error)
{
    cairn_schedule schedule;
    crn_schedule_borrow(task->problem, ops, count, task->machine, &schedule);
    return cairn_simulate(task->env, task->problem, &schedule, budget_bytes, NULL, replay, error);
}

/* ---- beginning and end ---- */

static cairn_status check_memory(const crn_session *session, cairn_error *error)
{
    const crn_solver *solver = session->solver;
    int64_t needed = solver->memory ? solver->memory(&session->task) : 0;
    if (needed <= session->meter.limit_bytes)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_MEMORY_LIMIT,
                    "%s would need up to %lld bytes of memory and may use %lld (option memory-limit)",
                    solver->info.name, (long long)needed, (long long)session->meter.limit_bytes);
}

static int64_t problem_size(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    return chain ? chain->stage_count : cairn_problem_graph(problem)->node_count;
}

cairn_status crn_session_make_team(crn_session *session, cairn_error *error)
{
    int64_t threads = session->settings.threads == CAIRN_NONE ? crn_processor_count() : session->settings.threads;
    if (threads == 1 || problem_size(session->task.problem) < TEAM_PROBLEM_MIN)
        return CAIRN_OK;
    session->task.team = crn_team_new(&session->env.allocator, (int)threads);
    return session->task.team ? CAIRN_OK : crn_no_memory(error);
}

cairn_status crn_session_explain(const crn_session *session, cairn_status status, cairn_error *error)
{
    if (status != CAIRN_NO_MEMORY || !atomic_load(&session->meter.refused))
        return status;
    return crn_fail(error, CAIRN_MEMORY_LIMIT, "%s needs more than %lld bytes of memory (option memory-limit)",
                    session->solver ? session->solver->info.name : "the bound", (long long)session->meter.limit_bytes);
}

static void set_up(crn_session *session, const cairn_env *env, const cairn_problem *problem, int64_t budget_max_bytes)
{
    static const cairn_env defaults;
    const crn_settings *settings = &session->settings;
    session->caller = env ? env : &defaults;
    crn_meter_init(&session->meter, crn_allocator(env), crn_memory_limit(settings));
    session->env = *session->caller;
    session->env.allocator = crn_meter_allocator(&session->meter);
    if (session->env.poll) {
        session->env.poll = sticky_poll;
        session->env.poll_context = session;
        session->env.poll_interval_ns = 0; /* of solvers that solve in turn: this session's own poll waits */
    }
    session->task =
        (crn_task){.env = &session->env,
                   .problem = problem,
                   .machine = settings->has_machine ? &settings->machine : cairn_problem_info_of(problem)->machine,
                   .settings = settings,
                   .budget_max_bytes = budget_max_bytes};
    set_deadline(session);
}

static cairn_status store_all(crn_session *session, cairn_error *error)
{
    int64_t began_ns = crn_clock_ns(),
            times = cairn_problem_graph(session->task.problem) ? JUDGING_GRAPHS : JUDGING_CHAINS;
    CRN_TRY(crn_store_all(&session->task, &session->store_all_bytes, &session->store_all_ns, error));
    session->judging_ns = times * (crn_clock_ns() - began_ns);
    if (session->task.deadline_ns != CAIRN_NONE)
        session->task.deadline_ns -= judging_share(session);
    return CAIRN_OK;
}

/*
 * One that starts from what all others find has to share its time with them. With a time limit auto does that for it: it
 * asks the others first, and this one with what is left.
 */
static const crn_solver *who_answers(const crn_session *session)
{
    const crn_solver *solver = session->solver;
    bool shares = solver->rank == CRN_RANK_ALL && solver->is_anytime && !session->settings.minimize_memory;
    return shares && session->task.deadline_ns != CAIRN_NONE ? crn_solver_find("auto") : solver;
}

static cairn_status begin(crn_session *session, const cairn_options *options, cairn_error *error)
{
    session->solver = session->asked = crn_solver_find(session->settings.solver);
    session->task.bounds = &session->bounds;
    if (!session->solver)
        return crn_fail(error, CAIRN_BAD_INPUT, "there is no solver \"%s\"", session->settings.solver);
    CRN_TRY(crn_solver_accepts(session->solver, &session->task, error));
    CRN_TRY(crn_options_check(options, session->solver, &session->task, error));
    CRN_TRY(check_memory(session, error));
    session->asked = who_answers(session);
    CRN_TRY(crn_session_make_team(session, error));
    CRN_TRY(store_all(session, error));
    return crn_least_lower(&session->task, &session->least.lower_bytes, error);
}

cairn_status crn_session_prepare(crn_session *session, const cairn_env *env, const cairn_problem *problem,
                                 const cairn_options *options, int64_t budget_max_bytes, cairn_error *error)
{
    *session = (crn_session){.begun_ns = crn_clock_ns(), .least = {CAIRN_NONE, false, CAIRN_NONE, false}};
    CRN_TRY(crn_options_resolve(options, problem, &session->settings, error));
    set_up(session, env, problem, budget_max_bytes);
    return CAIRN_OK;
}

cairn_status crn_session_begin(crn_session *session, const cairn_env *env, const cairn_problem *problem,
                               const cairn_options *options, int64_t budget_max_bytes, cairn_error *error)
{
    CRN_TRY(crn_session_prepare(session, env, problem, options, budget_max_bytes, error));
    return crn_session_explain(session, begin(session, options, error), error);
}

void crn_session_end(crn_session *session)
{
    crn_solver_close(session->asked, &session->task, session->state);
    session->state = NULL;
    crn_bounds_forget(&session->task);
    crn_team_free(session->task.team);
    session->task.team = NULL;
}

cairn_status crn_session_open(crn_session *session, const crn_task *task, cairn_error *error)
{
    return session->state ? CAIRN_OK : crn_solver_open(session->asked, task, &session->state, error);
}

/* ---- least memory ---- */

/* Merges the solver's own proofs with the general bound: where they meet, the least is exact. */
static void merge_least(crn_least *general, const crn_least *own)
{
    int64_t lower = crn_max(general->lower_bytes, own->lower_bytes);
    if (own->is_exact)
        lower = own->bytes;
    general->is_exact = own->bytes != CAIRN_NONE && own->bytes == lower;
    general->is_rough = own->is_rough && !general->is_exact;
    general->bytes = own->bytes;
    general->lower_bytes = lower;
}

/* A solver that was asked and had no time to open is opened for this question alone, which costs no tables. */
static cairn_status find_least(crn_session *session, cairn_error *error)
{
    const crn_solver *solver = session->asked;
    crn_least own = {CAIRN_NONE, false, CAIRN_NONE, false};
    crn_task question = session->task;
    bool is_apart = session->answered && !session->state;
    question.budget_max_bytes = is_apart ? 0 : question.budget_max_bytes;
    CRN_TRY(crn_session_open(session, &question, error));
    cairn_status status = solver->least ? solver->least(&question, session->state, &own, error) : CAIRN_OK;
    if (is_apart) {
        crn_solver_close(solver, &question, session->state);
        session->state = NULL;
    }
    CRN_TRY(status);
    merge_least(&session->least, &own);
    return CAIRN_OK;
}

cairn_status crn_session_least(crn_session *session, cairn_error *error)
{
    if (session->least.bytes != CAIRN_NONE)
        return CAIRN_OK;
    return crn_session_explain(session, find_least(session, error), error);
}
