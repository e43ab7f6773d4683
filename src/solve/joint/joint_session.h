/*
 * What joint-chain and joint-graph have in common as solvers: a session knows the least budget and what storing everything
 * takes; a call of solve begins a search, gives it schedules and lists to start from, and takes the best. The search for
 * the least budget waits until somebody needs it: a call of solve with a known schedule does not.
 */
#ifndef CRN_JOINT_SESSION_H
#define CRN_JOINT_SESSION_H

#include "solve/joint/joint_search.h"

typedef struct crn_joint crn_joint;
/** Lowers least_bytes to what is enough for a schedule. */
typedef cairn_status (*crn_joint_lower)(const crn_task *task, crn_joint *s, cairn_error *error);

struct crn_joint {
    crn_joint_lower lower; /* NULL = the least is known */
    int64_t least_bytes;   /* INT64_MAX = none is known */
    int64_t lists_bytes;   /* the least of the solver that a list comes from, where that is asked for */
    int64_t store_all_bytes, store_all_ns;
    bool is_rough; /* cut short while looking for the least budget: less may do */
};

/** Gives the search what it starts from, and improves it. */
typedef cairn_status (*crn_joint_fill)(const crn_joint *s, crn_joint_search *search, int64_t budget_bytes,
                                       crn_answer *answer, cairn_error *error);

cairn_status crn_joint_open(const crn_task *task, crn_joint_lower lower, void **session, cairn_error *error);
void crn_joint_close(const crn_task *task, void *session);
cairn_status crn_joint_least(const crn_task *task, void *session, crn_least *least, cairn_error *error);
cairn_status crn_joint_solve(const crn_task *task, crn_joint *s, int64_t budget_bytes, crn_joint_fill fill,
                             crn_answer *answer, cairn_error *error);

/** The schedule that the task says is known, as it is and as a list. */
cairn_status crn_joint_offer_known(crn_joint_search *search, cairn_error *error);

/** Rounds of improvement: those that were asked for, as many as the time allows, or the usual number. */
int64_t crn_joint_rounds(const crn_task *task, int64_t usual);

/** Whether the best so far cannot be improved. */
static inline bool crn_joint_is_done(const crn_joint_search *search)
{
    return search->best_ns <= search->bound_ns;
}

#endif
