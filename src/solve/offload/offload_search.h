/*
 * The branch and bound of offload-exact over lists of operations; see offload_exact.c.
 */
#ifndef CRN_OFFLOAD_SEARCH_H
#define CRN_OFFLOAD_SEARCH_H

#include "base/queue.h"
#include "solve/solver.h"

enum { CRN_OFFLOAD_STAGES_MAX = 6, CRN_OFFLOAD_LABELS_MAX = 1 << 18 };
enum { CRN_OFFLOAD_TABLE_LOG2 = 16, CRN_OFFLOAD_TABLE_SIZE = 1 << CRN_OFFLOAD_TABLE_LOG2 };

typedef struct crn_offload_lane_end {
    int64_t end_ns, device_bytes, host_bytes; /* what comes back then */
} crn_offload_lane_end;

/** A list of operations, reduced to what matters for what may follow it. */
typedef struct crn_offload_label {
    uint64_t key;  /* computations done, places, options: what is where */
    int64_t bound; /* least makespan, or least peak, of all that follows */
    int64_t now_ns, device_bytes, host_bytes;
    crn_offload_lane_end lanes[CAIRN_LANE_COUNT];
    int64_t ready_ns[CRN_OFFLOAD_STAGES_MAX + 1], busy_ns[CRN_OFFLOAD_STAGES_MAX + 1]; /* of a copy on the device */
    int64_t host_ready_ns[CRN_OFFLOAD_STAGES_MAX + 1],
        host_busy_ns[CRN_OFFLOAD_STAGES_MAX + 1]; /* of one on the host */
    int32_t parent, next_same;                    /* the next in its place in the table */
    cairn_op op;                                  /* that led here */
    int8_t place[CRN_OFFLOAD_STAGES_MAX + 1];
    uint8_t option[CRN_OFFLOAD_STAGES_MAX + 1];
    int32_t done; /* computations */
    bool dominated;
} crn_offload_label;

/** One search. */
typedef struct crn_offload_search {
    const crn_task *task;
    const cairn_chain *chain;
    const cairn_machine *machine;
    int32_t n;
    int64_t budget_bytes, incumbent; /* what is not below it is of no use */
    bool by_memory;                  /* nothing takes time; the bound is the peak */
    crn_offload_label *labels;
    int32_t label_count, label_capacity;
    int32_t *table;           /* chains of labels by the upper bits of their keys' hashes; -1 = empty */
    crn_queue queue;          /* of labels: least bound first, then what has done most, then the oldest */
    bool overflow, no_memory; /* it ended at LABELS_MAX labels; it ended for want of memory */
    cairn_allocator allocator;
} crn_offload_search;

/**
 * Sets out the search for a schedule below the incumbent: of makespan, or by_memory of peak. A search of zeros, and one
 * that could not begin, can be ended.
 */
cairn_status crn_offload_search_begin(crn_offload_search *s, const crn_task *task, int64_t budget_bytes, bool by_memory,
                                      int64_t incumbent, cairn_error *error);
void crn_offload_search_end(crn_offload_search *s);

/** The first complete label, or -1: then there is none below the incumbent, unless the search overflowed. */
cairn_status crn_offload_search_run(crn_offload_search *s, int32_t *goal, cairn_error *error);

/** The operations that lead to a label. */
cairn_status crn_offload_search_emit(const crn_offload_search *s, int32_t goal, cairn_builder *builder,
                                     cairn_error *error);

#endif
