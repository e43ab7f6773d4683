/*
 * A graph as the frontier programs see it.
 *
 * Stage t begins after the first computation of node t - 1 and ends with that of node t. In a *frontier* schedule every
 * node is computed at most once in a stage, in index order (Jain et al., Checkmate, 2020, section 4.2), and a storage is
 * held or dropped with all its handles: the names (a root node and its aliases) under which it can be read.
 */
#ifndef CRN_FRONTIER_GRAPH_H
#define CRN_FRONTIER_GRAPH_H

#include "solve/solver.h"

typedef struct crn_frontier_graph {
    int32_t count; /* nodes, and stages */
    int64_t fixed_bytes;
    const int64_t *cost;      /* of a node, ns */
    const int64_t *bytes;     /* of a node; 0 for aliases */
    const int64_t *extra;     /* max(0, workspace) of a node */
    const int32_t *root;      /* storage of a node, named by its root */
    const int32_t *dep_begin; /* node -> the handles that it reads, the base of an alias included; count + 1 entries */
    const int32_t *dep;       /* */
    const int32_t *reader_begin; /* storage -> nodes that read one of its handles, ascending, each once */
    const int32_t *reader;       /* */
    const int32_t *latest;       /* of a node: the last stage in which its handle can be of any use */
    const int32_t *always_from;  /* of a node: from the start of this stage on its handle is there; count + 1 = never */
    const bool *once;            /* of a node: it must not run twice */
    int64_t total_cost;
    int64_t bytes_unit; /* greatest common divisor of all sizes, at least 1 */
    int64_t cost_unit;  /* of all costs, at least 1 */
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
    return v < t && t <= graph->latest[v] && !graph->once[v] && t < graph->always_from[v];
}

/** Whether the handle of v may be there at the start of stage t, or not: a decision. */
static inline bool crn_may_hold(const crn_frontier_graph *graph, int32_t t, int32_t v)
{
    return v < t && t <= graph->latest[v] && t < graph->always_from[v];
}

#endif
