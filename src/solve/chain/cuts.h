/*
 * A chain cut into segments: the last one is stored, of the others some are stored and some run again.
 *
 * The forward keeps the input of every segment that runs again; the backward stores each of these right before its own
 * backward. A segment with a stage that must not be recomputed is stored. Of a stage with several options, the first one is
 * used.
 */
#ifndef CRN_CUTS_H
#define CRN_CUTS_H

#include "solve/chain_model.h"

/** ends[i] is the last stage of segment i, kept[i] whether it is stored; the last one is in any case. */
typedef struct crn_cuts {
    const crn_chain_model *model;
    int32_t *ends;
    bool *kept;
    int32_t count;
} crn_cuts;

/** The schedule, in place of what the builder has. */
cairn_status crn_cuts_emit(const crn_cuts *cuts, cairn_builder *builder, cairn_error *error);

/**
 * What the simulator says of that schedule, in one pass and without it. No stage runs forward more than twice, so that
 * the time is within 2^63 - 1 ns: a problem is refused where one forward of each kind and one backward are not.
 */
void crn_cuts_judge(const crn_cuts *cuts, int64_t *peak_bytes, int64_t *makespan_ns);

/** The first stage of a segment. */
static inline int32_t crn_cuts_first(const crn_cuts *cuts, int32_t segment)
{
    return segment > 0 ? cuts->ends[segment - 1] + 1 : 1;
}

#endif
