/* Option values as they were set, and what they mean for a problem. */
#ifndef CRN_OPTIONS_H
#define CRN_OPTIONS_H

#include "solve/solver.h"

/** What the options ask of this problem: defaults filled in, the machine merged with the problem's. NULL = all defaults. */
cairn_status crn_options_resolve(const cairn_options *options, const cairn_problem *problem, crn_settings *settings,
                                 cairn_error *error);

#endif
