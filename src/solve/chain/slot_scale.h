/*
 * Memory in slots. A slot is the rational M / S, where M is the memory that there is: sizes are rounded up to slots, and
 * since the slot itself is not rounded, scaling all sizes changes nothing.
 */
#ifndef CRN_SLOT_SCALE_H
#define CRN_SLOT_SCALE_H

#include "base/memory.h"

typedef struct crn_slot_scale {
    int32_t slots;           /* S */
    int64_t available_bytes; /* M */
    int64_t *bytes_of;       /* floor(m M / S), m = 0..S */
    double slots_per_byte;
} crn_slot_scale;

/** All memory is the arena's; false when it fails. */
bool crn_slot_scale_init(crn_slot_scale *scale, int64_t available_bytes, int32_t slots, crn_arena *arena);
/** The least m with m M / S >= bytes; S + 1 where there is none. */
int32_t crn_slots_of(const crn_slot_scale *scale, int64_t bytes);
/** Whether a size is a whole number of slots. */
bool crn_slots_are_whole(const crn_slot_scale *scale, int64_t bytes);

#endif
