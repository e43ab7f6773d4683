/*
 * Replays of chains that move nothing: everything runs on the compute lane, and time is a sum.
 *
 * An operation then starts when the one before it ends, and by then everything that was to come back has come back. So
 * the memory in use follows from the list alone, nothing ever waits for memory, and two or three bytes a stage are all
 * the state there is: several times as fast as the lanes and storages of simulate.c.
 *
 * Only valid lists are judged here. At the first operation that is not plainly allowed (a transfer, a broken rule, no
 * room) it gives up, and simulate.c, which knows all rules, says what is the matter.
 */
#ifndef CRN_SERIAL_H
#define CRN_SERIAL_H

#include "schedule/schedule.h"

/**
 * Fills in *replay when the list is valid under the budget (CAIRN_NONE = none) and moves nothing; else leaves it as it
 * is. initial_bytes: what is resident from the start. Errors: NO_MEMORY.
 */
cairn_status crn_serial_replay(cairn_allocator allocator, const cairn_chain *chain, const cairn_schedule *schedule,
                               int64_t initial_bytes, int64_t budget_bytes, cairn_replay *replay, cairn_error *error);

#endif
