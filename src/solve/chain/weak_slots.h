/*
 * The program of weak_model.h over memory slots: a row of values over m for each part.
 *
 * Kept values are rounded up to slots, each by itself, and what operations need is rounded up as a whole, as in
 * chain-dp; so every answer is a schedule that fits. Rows and the vector loop over m are slotted_rows.h; a row holds
 * only the m between the least memory of its part and that with which everything in it could be kept.
 *
 * O(n^4 S) time, (S + 1) * 4 bytes for each of the parts, of which there are n^3 / 6 of a kind; 8 bytes where times
 * need it.
 */
#ifndef CRN_WEAK_SLOTS_H
#define CRN_WEAK_SLOTS_H

#include "solve/chain/weak_least.h"

/** Upper estimate of the bytes for so many parts. */
int64_t crn_weak_slots_memory(int64_t part_count, int32_t slots);

/**
 * Puts the program's schedule for available_bytes beside what is always there in place of what is in the builder, if
 * it takes less than less_than_ns beyond the least of all stages. Errors: NO_MEMORY, CANCELLED.
 */
cairn_status crn_weak_slots_solve(const crn_weak_least *least, const crn_task *task, int64_t available_bytes,
                                  int32_t slots, int64_t less_than_ns, cairn_builder *builder, bool *found,
                                  cairn_error *error);

#endif
