/*
 * Maximum flow and minimum cut in a small network: Dinic's algorithm (1970) with breadth-first levels and a current-arc
 * depth-first search, on arrays. Capacities are integers; CRN_FLOW_INFINITE is never cut.
 *
 * It stops when its task does. What flows by then is no more than the minimum cut: still a lower bound on it.
 */
#ifndef CRN_FLOW_NETWORK_H
#define CRN_FLOW_NETWORK_H

#include "solve/solver.h"

#define CRN_FLOW_INFINITE (INT64_MAX / 4)

typedef struct crn_flow_network {
    int32_t node_count, arc_count;
    int32_t *first;    /* of a node: its newest arc */
    int32_t *next;     /* of an arc; arcs 2k and 2k + 1 are each other's reverse */
    int32_t *head;     /* of an arc */
    int64_t *residual; /* of an arc */
    int32_t *level, *current, *queue, *path;
    const crn_task *task; /* asked whether to stop; NULL = it never stops */
    int64_t steps;        /* since it was last asked */
    bool stopped;         /* for good: what was maximised then and later is only some of the flow */
} crn_flow_network;

/** Room for nodes and arcs, in an arena. False when memory fails. */
bool crn_flow_network_new(const crn_task *task, crn_arena *arena, int32_t node_max, int32_t arc_max,
                          crn_flow_network *network);
/** Empties the network; it then has node_count nodes. */
void crn_flow_network_begin(crn_flow_network *network, int32_t node_count);
/** Adds an arc. */
void crn_flow_arc(crn_flow_network *network, int32_t from, int32_t to, int64_t capacity);
/**
 * Sends as much as possible, once all arcs are there, and returns how much. The capacities of all finite arcs must sum to
 * less than CRN_FLOW_INFINITE.
 */
int64_t crn_flow_maximise(crn_flow_network *network, int32_t source, int32_t sink);
/** After maximise: whether a node is on the source's side of the minimum cut. */
bool crn_flow_on_source_side(const crn_flow_network *network, int32_t node);

#endif
