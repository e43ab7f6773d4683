/*
 * Sums that must stay below 2^63, so that simulating any schedule of a problem can add sizes without surprises.
 *
 * A problem is refused as overflow when the sum of all its sizes (each value counted once on every tier, workspaces by
 * magnitude) or of all its times could pass 2^63 - 1. What grows with the length of a schedule (the makespan of many
 * recomputations) is checked by the simulator.
 */
#ifndef CRN_TOTAL_H
#define CRN_TOTAL_H

#include <cairn/base.h>

#include "base/checked.h"

typedef struct crn_total {
    int64_t sum;
    bool overflow;
} crn_total;

/** Adds a size or time, or the magnitude of a negative one. */
static inline void crn_total_add(crn_total *total, int64_t value)
{
    if (value == INT64_MIN || !crn_add(total->sum, value < 0 ? -value : value, &total->sum))
        total->overflow = true;
}

#endif
