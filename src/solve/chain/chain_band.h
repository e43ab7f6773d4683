/*
 * Which labels (chain_labels.h) can lead to a better plan than one known.
 *
 * The `rest` of a stage is the least cost of all stages after it, whatever the path to it keeps: what fits in m by itself
 * is allowed. A path that takes T and keeps b costs T + price * b, and b <= m. So a label leads to no path faster than one
 * that takes U if its cost and the rest exceed the limit U + price * m. In the same way no such path has a run when the
 * least costs before and after it and its own exceed the limit; the rest does without such runs.
 *
 * The band of a stage is the range of bytes that the buckets of the next table divide: at first all of m, then what lies
 * beside the best path. That is a choice, not a proof: what the path of least time keeps may lie elsewhere.
 *
 * O(stages * R) time, R the longest run within the limit or so; 64 bytes a stage.
 */
#ifndef CRN_CHAIN_BAND_H
#define CRN_CHAIN_BAND_H

#include "solve/chain/chain_run.h"

/** Bytes as shares of m: this is all of it. */
enum { CRN_SHARE_LOG2 = 36 };

typedef struct crn_band_place {
    crn_cost rest;
    crn_cost least, ahead; /* the least cost up to here; that of all places up to here, less the forwards before each */
    int64_t low, high;     /* shares of m */
} crn_band_place;

typedef struct crn_band {
    crn_cost limit;
    crn_band_place *places;
    size_t capacity;
} crn_band;

/** The band of a problem of which a path is known that takes so many parts (64ths of ns). Errors: NO_MEMORY, CANCELLED. */
cairn_status crn_band_make(crn_band *band, const crn_task *task, const crn_prices *prices, const crn_priced *problem,
                           int64_t parts, cairn_error *error);
/** A path is known that takes so many parts. */
void crn_band_limit(crn_band *band, const crn_prices *prices, const crn_priced *problem, int64_t parts);
void crn_band_clear(crn_band *band, const cairn_allocator *allocator);

#endif
