/*
 * Making a list of computations fit a budget by offloading copies, and improving what is offloaded.
 *
 *   fit      while an event does not fit, offload the copy that waits across it and frees most for its time on the link
 *   prune    what is offloaded without need stays
 *   improve  ruin and recreate: at random some copies stay or are offloaded, then fit and prune; kept when not worse
 *
 * The time of every set is that of transfer.h's schedule. Choices are heuristic, the judgement is not. Stopped while fitting
 * it ends without, stopped while pruning with what is offloaded by then.
 */
#ifndef CRN_JOINT_FIT_H
#define CRN_JOINT_FIT_H

#include "solve/transfer.h"

typedef struct crn_fit {
    crn_transfer *transfer;
    crn_arena arena;
    uint64_t random;
    int64_t budget_bytes;
    bool *now, *best;  /* of a wait: is offloaded */
    int64_t *over;     /* of an event: memory beyond the budget */
    int64_t *away;     /* of an event: bytes on the host */
    int64_t *over_ns;  /* time of the events before it that do not fit */
    int32_t *order;    /* scratch: waits */
    int64_t looked_at; /* events and waits, since it was last asked whether to stop */
    bool stopped;
    bool host_is_scarce;
    int64_t now_ns, best_ns; /* makespans; INT64_MAX = none */
    bool patient;            /* of the best */
} crn_fit;

/** Takes the transfer over; on failure it is freed. */
cairn_status crn_fit_new(crn_transfer *transfer, uint64_t seed, crn_fit **fit, cairn_error *error);
void crn_fit_free(crn_fit *fit);

/** The least budget with which everything may be offloaded; INT64_MAX where the host cannot hold it all. */
int64_t crn_fit_need(crn_fit *fit);
/**
 * The first fit under a budget, from what is offloaded in `first` (NULL = nothing) and from everything; best_ns says
 * what came out. Errors: those of crn_transfer_schedule.
 */
cairn_status crn_fit_begin(crn_fit *fit, int64_t budget_bytes, const bool *first, cairn_error *error);
/** Rounds of improvement; ends early at stop_ns. */
cairn_status crn_fit_improve(crn_fit *fit, int64_t rounds, int64_t stop_ns, cairn_error *error);
/** The operations of the best. */
cairn_status crn_fit_emit(crn_fit *fit, cairn_builder *builder, cairn_error *error);

#endif
