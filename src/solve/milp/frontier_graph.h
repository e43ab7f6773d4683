/*
 * A graph as the frontier programs see it.
 *
 * Stage t begins after the first computation of node t - 1 and ends with that of node t. In a *frontier* schedule every
 * node is computed at most once in a stage, in index order (Jain et al., Checkmate, 2020, section 4.2), and a storage is
 * held or dropped with all its handles: the names (a root node and its aliases) under which it can be read.
 */
#ifndef CRN_FRONTIER_GRAPH_H
#define CRN_FRONTIER_GRAPH_H

#include "solve/graph_model.h"

typedef struct crn_frontier_graph {
    crn_graph_model *model;     /* one stage for each of its nodes */
    const int32_t *latest;      /* of a node: the last stage in which its handle can be of any use */
    const int32_t *always_from; /* of a node: from the start of this stage on its handle is there; beyond all = never */
    int64_t bytes_unit;         /* greatest common divisor of all sizes, at least 1 */
    int64_t cost_unit;          /* of all costs, at least 1 */
    crn_arena arena;
} crn_frontier_graph;

/** OK, or UNSUPPORTED: programs of cubic size are for graphs of at most some hundred nodes. */
cairn_status crn_frontier_accepts(const crn_task *task, cairn_error *error);

/** Errors: NO_MEMORY. Cost: O(T + E). */
cairn_status crn_frontier_graph_new(const crn_task *task, crn_frontier_graph **graph, cairn_error *error);
void crn_frontier_graph_free(crn_frontier_graph *graph);

/** Whether node v may be computed again in stage t. */
static inline bool crn_may_recompute(const crn_frontier_graph *graph, int32_t t, int32_t v)
{
    return v < t && t <= graph->latest[v] && !graph->model->once_node[v] && t < graph->always_from[v];
}

/** Whether the handle of v may be there at the start of stage t, or not: a decision. */
static inline bool crn_may_hold(const crn_frontier_graph *graph, int32_t t, int32_t v)
{
    return v < t && t <= graph->latest[v] && t < graph->always_from[v];
}

#endif
