/*
 * Cuts a chain into pieces (chain_pieces.h) for one price of memory: a shortest path with labels.
 *
 * A path goes through the stages s..t from piece to piece. A label at stage l says what a path to there keeps (bytes) and
 * what it takes beyond the least of each stage (ns); its cost is ns + price * bytes. Of each stage the `width` labels of
 * least cost stay of those that no other beats in both. A piece may be added where it fits what the label leaves of m; so
 * every path to t is a plan that fits.
 *
 * Recomputed stages whose saved sets fit together take their forward once more. Where they do not, but a share of 1/2^slack
 * of them would, the piece is allowed as well, at an estimate of what its own plan will add: as many eighths of the
 * forward as eighths of the saved sets do not fit. Whoever makes that plan sees what it really takes.
 *
 * Prices are in units of W / (B * 2^20) ns a byte, W the sum of all forwards and the options' extra times, B what storing
 * everything takes; costs are integers of 128 bits, times in eighths, so nothing is rounded and scales change nothing.
 * O(stages * R * width) time, R the longest recomputed piece; 48 bytes a label.
 */
#ifndef CRN_CHAIN_LABELS_H
#define CRN_CHAIN_LABELS_H

#include "solve/chain/chain_pieces.h"

enum { CRN_PRICE_UNIT_LOG2 = 20, CRN_PRICE_LOG2_MAX = 27 };

typedef struct crn_label {
    crn_wide cost;
    int64_t bytes, eighths; /* kept; time in eighths of ns */
    int32_t before, index;  /* the label before: of the stage before the piece, and which of its labels */
    int32_t option;         /* of the piece's stage, or CRN_PIECE_RECOMPUTED */
} crn_label;

typedef struct crn_labels {
    const crn_chain_model *model;
    int64_t weight_ns, full_bytes; /* W, B */
    int32_t run_max;               /* the longest recomputed piece */
    cairn_allocator allocator;
    crn_label *list; /* `width` for each stage of the problem and for the beginning */
    int32_t *counts;
    size_t list_capacity, count_capacity;
    int64_t steps; /* taken so far, of all calls */
} crn_labels;

typedef struct crn_label_query {
    int32_t s, t;
    int64_t m;
    int64_t price;
    int32_t width;
    int slack;
} crn_label_query;

/** False: the numbers are too large for prices. Zeroed ones can be cleared. */
bool crn_labels_init(crn_labels *labels, const crn_chain_model *model, const crn_task *task);
void crn_labels_clear(crn_labels *labels);
/** The longest recomputed piece that is tried in a chain of n stages: a pass over all of them takes some 2^26 steps. */
int32_t crn_labels_run_max(int64_t n);
/** Upper estimate of the bytes for n stages and a width. */
int64_t crn_labels_memory(int64_t n, int32_t width);
/**
 * Adds the pieces of the fastest path to the list; the plan is empty where there is none. Inner plans are left open.
 * Errors: NO_MEMORY, CANCELLED.
 */
cairn_status crn_labels_cut(crn_labels *labels, const crn_task *task, const crn_label_query *query, crn_pieces *pieces,
                            crn_plan *plan, cairn_error *error);

#endif
