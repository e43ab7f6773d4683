/* Option values as they were set, what they mean for a problem, and which of them a solver takes. */
#ifndef CRN_OPTIONS_H
#define CRN_OPTIONS_H

#include "solve/solver.h"

/** What the options ask of this problem: defaults filled in, the machine merged with the problem's. NULL = all defaults. */
cairn_status crn_options_resolve(const cairn_options *options, const cairn_problem *problem, crn_settings *settings,
                                 cairn_error *error);

/** As cairn_parse_duration, for durations that are commonly told in microseconds. */
cairn_status crn_parse_latency(const char *text, int64_t *ns, cairn_error *error);

/** Whether a solver minimizes the objective that was asked for, if one was. */
bool crn_solver_takes_objective(const crn_solver *solver, const crn_settings *settings);

/** Refuses what was set and the solver does not take: UNSUPPORTED, naming those that do. solver NULL = a bound. */
cairn_status crn_options_check(const cairn_options *options, const crn_solver *solver, const crn_task *task,
                               cairn_error *error);

#endif
