/* What auto knows of the solvers that it may ask. */
#ifndef CRN_AUTO_H
#define CRN_AUTO_H

#include "solve/solver.h"

typedef struct crn_candidate {
    const crn_solver *solver;
    void *state;
    bool is_open, is_asked; /* the latter: about this budget, or found too costly */
    bool is_wide;           /* open for all budgets, not only the session's */
    int64_t work;
    int turn; /* those of a lower one are asked before */
} crn_candidate;

typedef struct crn_auto {
    crn_candidate candidates[CRN_SOLVERS_MAX];
    int count;
} crn_auto;

/** Turns: of those that will end in time, by their estimate, and of those that start from what others find. */
enum { CRN_TURN_SURE = 5, CRN_TURN_LAST = 8 };
/** Of the longest work: what those may take at most that are asked before it, in case that it is stopped. */
enum { CRN_CHEAP_SHARE = 32 };

/** Whether auto asks a solver about a problem, if it can be afforded. */
bool crn_auto_may_ask(const crn_solver *solver, const crn_task *task);

/** Gives the candidates their turns, and puts them in the order in which they are asked. */
void crn_auto_put_in_order(crn_auto *session, const crn_task *task);

/* Whether a candidate cannot beat what has answered; `rank` is the highest of those that did so completely. */
static inline bool crn_candidate_is_covered(const crn_candidate *c, int rank)
{
    return rank == CRN_RANK_ALL || (c->solver->rank > 0 && c->solver->rank < rank);
}

/** The least of all candidates; the state is a crn_auto. */
cairn_status crn_auto_least(const crn_task *task, void *state, crn_least *least, cairn_error *error);

#endif
