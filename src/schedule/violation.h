/* Saying what is wrong with a schedule. */
#ifndef CRN_VIOLATION_H
#define CRN_VIOLATION_H

#include <cairn/schedule.h>

#include "base/failure.h"

/** One clause on a violation. */
const char *crn_violation_text(cairn_violation_code code);

/** A replay of which nothing is known: not valid, no violation, every number CAIRN_NONE. */
void crn_replay_clear(cairn_replay *replay);

/** Makes a replay one that found this violation at an operation (CAIRN_NONE: of the whole list). */
void crn_replay_violate(cairn_replay *replay, cairn_violation_code code, int64_t position, const char *format, ...)
    CRN_PRINTF(4, 5);

#endif
