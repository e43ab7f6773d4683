/*
 * Binomial checkpoints among the candidates of a graph, after Griewank & Walther 2000: the sequences of griewank-log.
 *
 * The forward leaves checkpoints where revolve leaves them on a chain of as many equal steps. When the backward needs a
 * value that is gone, the candidates from the newest checkpoint before it are recomputed in order. They leave
 * checkpoints where slots are free. Then everything before the backward's segment is dropped, except checkpoints.
 *
 * Cost      O((events + E) log T) for one number of slots, with at most 16 events a node. A sweep may pass a candidate
 *           that is still resident. That candidate is dropped right after the sweep, unless it is a checkpoint. A heap
 *           holds the resident storages by index, so no scan is needed to find those to drop.
 */
#ifndef CRN_GRAPH_BINOMIAL_H
#define CRN_GRAPH_BINOMIAL_H

#include "base/queue.h"
#include "solve/graph/graph_replan.h"

/** The most slots, and the computations of a node, on average, for which there is room. */
enum { CRN_BINOMIAL_SLOTS_MAX = 16, CRN_BINOMIAL_TIMES = 16 };

typedef struct crn_binomial {
    crn_replan *replan;
    const int32_t *candidates; /* storages, ascending */
    int32_t candidate_count;
    int32_t checkpoints[CRN_BINOMIAL_SLOTS_MAX + 1], checkpoint_count; /* indices of candidates, ascending */
    bool *kept;                                                        /* of a storage: a checkpoint */
    crn_queue resident;                                                /* resident storages that may be dropped */
    bool *is_queued;                                                   /* of a storage: in that queue */
    int32_t seen_count;                                                /* events whose storages have been queued */
} crn_binomial;

/** Makes its sequences in a replan whose backward was found. Errors: NO_MEMORY. Free with crn_binomial_clear. */
cairn_status crn_binomial_new(crn_replan *replan, const int32_t *candidates, int32_t candidate_count, crn_arena *arena,
                              crn_binomial *binomial, cairn_error *error);
/** Zeros are allowed. */
void crn_binomial_clear(crn_binomial *binomial);
/** The sequence with so many slots, into the replan. False: no room, or stopped. */
bool crn_binomial_make(crn_binomial *binomial, const crn_task *task, int32_t slots);

#endif
