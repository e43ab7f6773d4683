/*
 * The parts of a graph that select-acg divides it into, and the least checkpoints in one under a bound on the segments. The
 * division and the recurrence are in select_acg.c.
 */
#ifndef CRN_ACG_PARTS_H
#define CRN_ACG_PARTS_H

#include "solve/graph/graph_replan.h"

enum { CRN_ACG_POSITIONS_MAX = 768 };

/** Between two positions p < q of a part. */
typedef struct crn_acg_piece {
    int64_t largest_bytes; /* of a segment, with both frontiers as checkpoints */
    int64_t new_bytes;     /* of q's frontier without p's */
} crn_acg_piece;

typedef struct crn_acg_part crn_acg_part;

struct crn_acg_part {
    int32_t count, depth;
    int32_t *storage; /* ascending */
    int32_t *reach;   /* of member x: its last neighbour in the part, as a member; x if none is after it */
    int64_t *before;  /* before[x]: bytes of the members before x */
    int32_t *position, positions;
    bool *narrow;          /* of a position */
    crn_acg_piece *piece;  /* of positions p < q: piece[q * (q - 1) / 2 + p] */
    crn_acg_part *child;   /* parts between neighbouring narrow positions */
    crn_acg_part *sibling; /* the next child of the same parent */
    int32_t child_until;   /* of a child: the position of the parent at which its place ends */
    /* under the present bound */
    int64_t *least, *inner; /* c(q); sum of c over the children that end at q, INT64_MAX where there are none */
    int32_t *from;
    uint8_t *way;
};

typedef struct crn_acg {
    crn_graph_model *model;
    crn_arena arena;
    crn_replan replan;
    crn_sequence_eval eval;
    bool *kept, *best_kept;               /* of a storage */
    int32_t *neighbour_begin, *neighbour; /* of a storage: those that read it or that it reads */
    int32_t *local;                       /* of a storage: its number in the part that is being made, -1 = not in it */
    int32_t *leader;                      /* of a member, while segments are joined */
    int64_t *joined_bytes;                /* of a leader */
    int32_t *member_count;                /* of a leader */
    crn_acg_part **owner;                 /* of a leader */
    int64_t *frontier_bytes;              /* scratch, of a position */
    int32_t *frontier_count;
    crn_acg_part *parts; /* of the whole, as siblings */
    int64_t pairs;
    const crn_task *task;                /* while parts are made */
    int64_t steps;                       /* since it was last asked whether to stop */
    int32_t positions_max;               /* of a part */
    int64_t objective_bytes, peak_bytes; /* INT64_MAX: it would take more than 2^63 - 1 ns, so there is no schedule */
    bool stopped_early;
} crn_acg;

/** Whether a storage is made in the forward; whether it is a checkpoint in any case. */
bool crn_acg_is_forward(const crn_acg *a, int32_t s);
bool crn_acg_is_fixed(const crn_acg *a, int32_t s);

/**
 * Divides the forward into parts, from a model and a replan whose backward was found. With a time limit, parts get only
 * as many positions as it has time for. False when memory fails, and when the task stops: then stopped_early is set.
 */
bool crn_acg_make(crn_acg *a, const crn_task *task);

/** The least bytes of checkpoints in a part, with no segment of more than s bytes. */
int64_t crn_acg_solve(crn_acg_part *part, int64_t s);

/** Marks the checkpoints of a part that was solved; returns the bytes of its largest segment. */
int64_t crn_acg_mark(crn_acg *a, const crn_acg_part *part, int64_t s);

#endif
