/*
 * Cuts a chain into pieces (chain_pieces.h) for one price of memory: a shortest path with labels.
 *
 * A path goes through the stages s..t from piece to piece. A label at stage l says what a path to there keeps (bytes) and
 * what it costs: the time beyond the least of each stage, and price * bytes. What paths to one stage may keep is divided
 * into equal buckets, and the label of least cost in each bucket stays. Of those, labels go that another beats in both
 * bytes and time. A piece may be added where it fits what the label leaves of m; so every path to t is a plan that fits.
 *
 * Recomputed stages whose saved sets fit together take their forward once more. Where they do not, but a share of
 * 1/2^slack of them would, the piece is allowed as well, at an estimate of what its own plan will add: as many 64ths of
 * the forward as 64ths of the saved sets do not fit, or 1.5 or 2 times that (`charge`). Whoever makes that plan sees what
 * it really takes.
 *
 * With a band (chain_band.h) only labels stay that can lead to a faster path than one known, and the buckets divide only
 * what lies beside the best path. Labels out there fall into the first or last bucket.
 *
 * A run that begins earlier takes more forwards. When the cheapest label of all stages before cannot make up for them,
 * longer runs are not tried. So time is O(stages * R * buckets), R the longest run that is worth its time, mostly far less
 * than the longest that fits. Labels take 48 bytes each, of at most stages * buckets.
 *
 * Labels know their bytes and their cost exactly (chain_prices.h). Only the bucket follows from `share`, the bytes as a
 * share of m, which is rounded down with each piece.
 */
#ifndef CRN_CHAIN_LABELS_H
#define CRN_CHAIN_LABELS_H

#include "solve/chain/chain_band.h"

typedef struct crn_label {
    crn_cost cost;
    int64_t bytes, share;  /* kept */
    int32_t before, index; /* the label before: the place before the piece, and where the label is in the list */
    int32_t option;        /* of the piece's stage, or CRN_PIECE_RECOMPUTED */
} crn_label;

typedef struct crn_label_place {
    crn_cost least;     /* cost of a label here */
    crn_cost ahead;     /* of a label here or of one before, less the forwards up to its place */
    int32_t begin, end; /* its labels in the list, with growing bytes */
} crn_label_place;

typedef struct crn_labels {
    crn_prices prices;
    cairn_allocator allocator;
    crn_label *list, *buckets;
    crn_label_place *places;
    size_t count, capacity, bucket_capacity, place_capacity;
    int64_t steps, steps_max; /* taken so far, of all calls, and after which no path is found */
} crn_labels;

typedef struct crn_label_query {
    crn_priced problem;
    int32_t buckets;
    const crn_band *band; /* of the same problem; NULL: none */
} crn_label_query;

typedef struct crn_label_path {
    crn_plan plan; /* its inner plans are left open; empty: there is none */
    int64_t parts; /* its time, in 64ths of ns, estimates included */
} crn_label_path;

/** False when memory fails. Zeroed ones can be cleared. */
bool crn_labels_init(crn_labels *labels, const crn_chain_model *model, const crn_task *task);
void crn_labels_clear(crn_labels *labels);
/** The most buckets of a stage for which there is memory, with n stages. */
int32_t crn_buckets_max(int64_t n);
/** Upper estimate of the bytes for n stages and no more buckets than that. */
int64_t crn_labels_memory(int64_t n);
/** Adds the pieces of the fastest path to the list. Errors: NO_MEMORY, CANCELLED. */
cairn_status crn_labels_cut(crn_labels *labels, const crn_task *task, const crn_label_query *query, crn_pieces *pieces,
                            crn_label_path *path, cairn_error *error);
/** After a path was found: the band is narrowed to so much (a share of m) beside what it keeps. */
void crn_labels_narrow(const crn_labels *labels, const crn_label_query *query, int64_t beside, crn_band *band);

#endif
