/*
 * One window, or one moment, of the lower bounds of graph_bound.h: the Lagrangian relaxation, a minimum cut at each price.
 */
#ifndef CRN_GRAPH_WINDOW_H
#define CRN_GRAPH_WINDOW_H

#include "solve/graph/flow_network.h"
#include "solve/graph/graph_bound.h"

struct crn_graph_bounder {
    crn_graph_windows windows;
    const crn_graph_model *model;
    crn_arena arena;
    crn_flow_network network;
    int shift;        /* costs are scaled by 2^shift, so that prices per byte have room below one nanosecond */
    int32_t *place;   /* of a storage: its position among those looked at, -1 = none */
    int32_t *storage; /* those looked at */
    int32_t count;
    bool *needed;   /* of a position: the window reads it */
    bool *resident; /* of a storage: resident at the moment in any case */
    int32_t *residents, resident_count;
    int32_t *alias_at; /* aliases that the window reads, and what they read, as lists of a position */
    int32_t *alias, *alias_next, alias_count;
    bool *alias_seen; /* of a node */
    bool *seen;       /* of a node: it was looked from */
    const crn_task *task;
    int64_t *to_end; /* of a node: what the window from it to the end is worth, as far as known, else 0 */
    int64_t budget_bytes;
    double price; /* the last one that was best: a good first guess for the next window */
};

/** The least bytes that must be resident while node t is computed for the first time. */
int64_t crn_graph_bound_moment(crn_graph_bounder *b, int32_t t);

/** Of count nodes from t on, the one that takes most memory beside what later nodes read: it leaves them least. */
int32_t crn_graph_largest_taker(const crn_graph_model *model, int32_t t, int32_t count);

#endif
