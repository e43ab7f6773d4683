/*
 * What the solvers find that need neither tables nor a search, the baselines, for those who may be cut off: whoever is
 * stopped by the clock answers with the best of what it has and of theirs.
 */
#ifndef CRN_BASELINES_H
#define CRN_BASELINES_H

#include "solve/solver.h"

/** Of the time left, what all baselines but the quick ones may take together. */
enum { CRN_BASELINES_SHARE = 8 };

/** Whether a solver is one: it names no work, does not search until time ends, and needs nothing found at run time. */
bool crn_is_baseline(const crn_solver *solver);

/**
 * The task with what the next of so many baselines may take: a quick one half of the time that is left, another an even
 * share of what is left until pool_end_ns.
 */
crn_task crn_baseline_part(const crn_task *task, const crn_solver *solver, int64_t pool_end_ns, int64_t left);

/** When the baselines have had their share of the time; CAIRN_NONE where there is no limit. */
int64_t crn_baselines_end(const crn_task *task);

/** Whether the clock may stop a solver before it has what it would find: then the baselines come first. */
bool crn_may_be_cut(const crn_solver *solver, const crn_task *task);

/**
 * The best schedule of the baselines that take the problem, in their share of the time: of the quick ones where the
 * solver that may be cut is one itself, else of all. Want of memory is forgiven.
 */
cairn_status crn_baselines_solve(const crn_task *task, const crn_solver *whose, int64_t budget_bytes,
                                 crn_answer *answer, cairn_error *error);

/** Takes over the other answer's schedule where that is better, and says so; the other gets the worse one. */
cairn_status crn_take_better(const crn_task *task, int64_t budget_bytes, crn_answer *answer, crn_answer *other,
                             cairn_error *error);

#endif
