/*
 * Which parts of a table in slots can belong to an optimum, given that an answer of some time is known.
 *
 * Every stage but the last is either saved before the first backward or passed over, which takes q[l] at least (times are
 * beyond the least of each stage). Those saved then have b[l] slots at least, together no more than S. So whatever the
 * price r >= 0 of a slot, the stages of a set take at least sum of min(q[l], r b[l]), less r S once. In (s,t) with m slots,
 *
 *   - the stages s..t have been passed over if t < n;
 *   - of the stages before s, those that were never passed over are saved in the S - m slots that the sub-problem lacks;
 *   - of the stages outside, those that were never passed over were all saved before the first backward.
 *
 * These times are of different operations than those of (s,t). A state whose own time and theirs pass the known answer's
 * is in no optimum, whatever the tie; that its value is then unknown changes neither the optimum nor the way back.
 */
#ifndef CRN_SLOTTED_CUTS_H
#define CRN_SLOTTED_CUTS_H

#include <stdbool.h>

#include "base/memory.h"

typedef struct crn_slotted_cuts {
    int32_t n, slots;
    int64_t most_ns;    /* of the known answer; negative: nothing is cut */
    int64_t price_ns;   /* r */
    int64_t *passed_ns; /* sum of q[1..l] */
    int64_t *paid_ns;   /* sum of min(q, r b) over 1..l, without that of n */
} crn_slotted_cuts;

/** q and b: of stages 1..n; q changes. All memory is the arena's; false when it fails. */
bool crn_slotted_cuts_init(crn_slotted_cuts *cuts, int32_t n, int32_t slots, int64_t most_ns, int64_t *q,
                           const int32_t *b, crn_arena *arena);
/** The most that C(s,t,m) takes in an optimum; negative: (s,t) is in none. INT64_MAX: nothing is known. */
int64_t crn_slotted_cuts_ns(const crn_slotted_cuts *cuts, int32_t s, int32_t t);
/** The most m with which (s,t) is in an optimum; slots where nothing is known. */
int32_t crn_slotted_cuts_slots(const crn_slotted_cuts *cuts, int32_t s, int32_t t);

#endif
