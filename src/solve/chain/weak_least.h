/*
 * The least memory of every part of weak_model.h, in bytes, and a schedule that needs no more.
 *
 * With the terms of the recurrence, least(part) is the smallest over
 *
 *   max(from_shift + from_bytes, first_shift + least(first), least(second)).
 *
 * O(n^4) time, by descending s, on all threads; 8 bytes a part.
 */
#ifndef CRN_WEAK_LEAST_H
#define CRN_WEAK_LEAST_H

#include "solve/chain/weak_unfold.h"

/** What cannot be solved at all. */
#define CRN_WEAK_NEVER INT64_MAX

typedef struct crn_weak_least {
    const crn_weak_model *model;
    int64_t *bytes; /* of a part, at crn_weak_at */
} crn_weak_least;

/** All memory is the arena's. Errors: NO_MEMORY, CANCELLED. */
cairn_status crn_weak_least_init(crn_weak_least *least, const crn_weak_model *model, const crn_task *task,
                                 crn_arena *arena, cairn_error *error);
/** The least of the whole chain, beside what is always there. */
int64_t crn_weak_least_of_whole(const crn_weak_least *least);
/** Emits a schedule that needs no more. */
cairn_status crn_weak_least_emit(const crn_weak_least *least, const crn_task *task, cairn_builder *builder,
                                 cairn_error *error);

#endif
