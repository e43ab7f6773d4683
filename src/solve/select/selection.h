/*
 * Checkpoint selection on a chain: what its solvers share.
 *
 * Problem   Sizes d[0..n] of the input and of the outputs of n layers. A set of checkpoints, with 0 and n always in it,
 *           cuts the layers into segments; the forward keeps the checkpoints only, and the backward computes each
 *           segment again from the checkpoint before it. Wanted: the set with the least memory, which two objectives
 *           measure:
 *
 *   eq. 6   sum of d over all checkpoints + max over segments (h,i) of (d[h+1] + ... + d[i-1])
 *   eq. 9   max over segments (h,i) of [ sum of d over checkpoints up to i + d[h+1] + ... + d[i-1]
 *                                        + max of d[h], ..., d[i-1] ]
 *
 *           Eq. 6 keeps all checkpoints to the end; eq. 9 releases them as the backward passes and counts a buffer for
 *           the gradient.
 * Source    Hong, Tsai, Wang, Liu, Wu, "GPU memory usage optimization for backward propagation in deep network training".
 * Schedule  Memory-persistent: the forward keeps the checkpoints; the last segment is saved at once, every other one
 *           when the backward arrives at it. A segment of one layer whose saved set is its output alone is saved in the
 *           forward: that takes the same memory and no recomputation. Where a stage has options, the one that saves
 *           least. The objectives see output_bytes and input_bytes alone, the peak sees everything.
 *
 * A solver chooses; the rest is here.
 */
#ifndef CRN_SELECTION_H
#define CRN_SELECTION_H

#include "solve/solver.h"

/** A session: the choice, and what it takes. */
typedef struct crn_selection {
    crn_arena arena;
    const cairn_chain *chain;
    int32_t n;
    const int64_t *size; /* d[0..n] */
    int32_t *next;       /* the checkpoint after checkpoint h; filled in by the chooser, for checkpoints */
    int64_t objective_bytes;
    bool stopped_early;
    int64_t peak_bytes; /* of the schedule, CAIRN_NONE before it was looked at */
} crn_selection;

/** Fills in next and objective_bytes; scratch memory may come from the arena. No sum of sizes can overflow. */
typedef cairn_status crn_choose(const crn_task *task, crn_selection *selection, cairn_error *error);

/** The members of crn_solver: all but open, which names the chooser. */
cairn_status crn_selection_accepts(const crn_task *task, cairn_error *error);
cairn_status crn_selection_open(const crn_task *task, crn_choose *choose, void **session, cairn_error *error);
void crn_selection_close(const crn_task *task, void *session);
cairn_status crn_selection_least(const crn_task *task, void *session, crn_least *least, cairn_error *error);
cairn_status crn_selection_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error);

#endif
