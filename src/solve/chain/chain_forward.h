/*
 * Ways to go forward: from X, the input of stage s, which stays, to {X, a[j]}, with nothing else left behind.
 *
 * The plain way is forward_keep s, forward_drop s+1, ..., forward_drop j. A saving forward can serve as well: save
 * some stages in a row, each reading what the one before saved, compute the next output from the last of them
 * (forward_keep), and drop them all. That is worth it where the saving forward is faster than the other one or needs
 * less workspace, and it is all that there is: see docs/explanation/solvers/chain-dp.md. So a way is a path over two
 * kinds of states,
 *
 *   alone(j): a[j] only (for j = s - 1: nothing but X),
 *   saved(j): A[i+1], ..., A[j] of some options, on top of a[i], i < j (on top of X for i = s - 1),
 *
 * and has a time and a peak (beside base and X); of each state the ways that no other beats are kept, saved(j) also by
 * what is resident. Their number is limited: those with the least peak and the least time always stay, and what was given
 * up is told.
 *
 * A stage that must not be recomputed ends the row: a forward whose result is dropped would have to be repeated.
 * O(n) time a row, for a bounded number of ways and options.
 */
#ifndef CRN_CHAIN_FORWARD_H
#define CRN_CHAIN_FORWARD_H

#include "solve/chain_model.h"

enum { CRN_WAYS_MAX = 12, CRN_SAVED_WAYS_MAX = 32 };

/** A way; of alone(j) in increasing order of peak and decreasing order of time. */
typedef struct crn_way {
    int64_t peak_bytes, ns;
    int64_t resident_bytes; /* of what is not X */
    int32_t parent;         /* index of the way before, in its list */
    int16_t option;         /* saved(j): that of stage j */
    bool from_saved;        /* the way before is one of saved(j - 1), else of alone(j - 1) */
} crn_way;

typedef struct crn_ways {
    crn_way alone[CRN_WAYS_MAX + 1], saved[CRN_SAVED_WAYS_MAX + 1]; /* one more while they are made */
    int32_t alone_count, saved_count;
    bool gave_up; /* ways to here, or on the way, for want of room */
} crn_ways;

/** The ways from one s. */
typedef struct crn_forward {
    const crn_chain_model *model;
    cairn_allocator allocator;
    crn_ways *row;  /* row[j], j = s - 1 .. end */
    int32_t s, end; /* j = s .. end can be reached; end = s - 1 where nothing can */
} crn_forward;

/** Room for a row; false when memory fails. Bytes: crn_forward_memory. */
bool crn_forward_init(crn_forward *forward, const cairn_allocator *allocator, const crn_chain_model *model);
void crn_forward_clear(crn_forward *forward);
int64_t crn_forward_memory(int32_t n);

/** Fills the row of s, up to j = last at most. */
void crn_forward_fill(crn_forward *forward, int32_t s, int32_t last);

/** Goes through the row of s = 1 without keeping it: the stage that was reached, and its ways and those before. */
typedef struct crn_forward_walk {
    const crn_chain_model *model;
    int32_t j;
    crn_ways ways[2]; /* of j at j % 2 */
} crn_forward_walk;

void crn_forward_walk_begin(crn_forward_walk *walk, const crn_chain_model *model);
/** One stage further: the least peak of a way to alone(j), INT64_MAX where there is none. */
int64_t crn_forward_walk_on(crn_forward_walk *walk);

/** Emits a way to alone(j) of the row that is filled in. */
cairn_status crn_forward_emit(crn_forward *forward, int32_t j, int32_t way, cairn_builder *builder, cairn_error *error);

#endif
