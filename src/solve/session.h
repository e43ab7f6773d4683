/*
 * A solver at work on a problem: what cairn_solve, cairn_solve_many and cairn_limits_of have in common.
 *
 * The session owns what is around a solver (settings, meter, poll that stays stopped, threads), and is the one place
 * where an answer becomes an outcome: the operations are judged by the simulator, the bound is the better of the
 * solver's and the general one, and what does not agree is a defect.
 */
#ifndef CRN_SESSION_H
#define CRN_SESSION_H

#include "solve/solver.h"

typedef struct crn_session {
    const cairn_env *caller;
    cairn_env env; /* the caller's, with the metered allocator and the poll below */
    crn_meter meter;
    crn_settings settings;
    crn_task task;
    const crn_solver *solver; /* whom the caller asks */
    const crn_solver *asked;  /* who answers: the same, or auto where that shares the time for it */
    void *state;              /* of who answers, once that is open; NULL where it needs none */
    bool answered;            /* a budget, at least */
    int64_t begun_ns;         /* what it takes from then on counts with the first answer */
    bool cancelled;           /* the caller's poll asked to stop */
    bool polled;              /* the caller's poll was called, at polled_ns */
    int64_t polled_ns;
    int64_t store_all_bytes, store_all_ns;
    int64_t judging_ns; /* what is set aside of the time limit, for judging answers */
    crn_least least;
    crn_bound_store bounds;
} crn_session;

/** Resolves the options into session->task; nothing to free yet. What is added then is freed with crn_session_end. */
cairn_status crn_session_prepare(crn_session *session, const cairn_env *env, const cairn_problem *problem,
                                 const cairn_options *options, int64_t budget_max_bytes, cairn_error *error);
/** Threads for session->task, where the problem is large enough. Errors: NO_MEMORY. */
cairn_status crn_session_make_team(crn_session *session, cairn_error *error);
/** As crn_session_prepare, and refuses what cannot be solved. Free with crn_session_end, also after a failure. */
cairn_status crn_session_begin(crn_session *session, const cairn_env *env, const cairn_problem *problem,
                               const cairn_options *options, int64_t budget_max_bytes, cairn_error *error);
void crn_session_end(crn_session *session);
/** Opens the solver's own session, once, for a task that may be a part of the session's. */
cairn_status crn_session_open(crn_session *session, const crn_task *task, cairn_error *error);
/** The status and error of a call of the session: an allocation that the meter refused is not the machine's fault. */
cairn_status crn_session_explain(const crn_session *session, cairn_status status, cairn_error *error);
/** Another time limit for the next answer, from now on; CAIRN_NONE for none. */
void crn_session_limit(crn_session *session, int64_t time_limit_ns);

/** Answers one budget. On success *info is filled in and *schedule is the verified schedule or NULL. */
cairn_status crn_session_answer(crn_session *session, int64_t budget_bytes, cairn_schedule **schedule, cairn_info *info,
                                cairn_error *error);
/** Fills in session->least. */
cairn_status crn_session_least(crn_session *session, cairn_error *error);

/** An info in which nothing applies. */
void crn_info_reset(cairn_info *info);

#endif
