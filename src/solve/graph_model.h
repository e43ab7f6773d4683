/*
 * A graph as the graph solvers see it: compact arrays, and storages instead of nodes where memory is concerned.
 *
 * A storage is a root node with all its aliases; it is named by its root. It is resident from the computation of the
 * root until its last handle is dropped. Handles cost nothing, so solvers never drop one without the others.
 */
#ifndef CRN_GRAPH_MODEL_H
#define CRN_GRAPH_MODEL_H

#include "solve/solver.h"

/** A link to the host, and what it costs to use it. */
typedef struct crn_graph_link {
    int64_t *price_ns;         /* of a storage: what a fetch counts as; CAIRN_NONE = it always stays */
    int64_t *out_ns, *back_ns; /* of a storage that may be fetched: its transfers */
    int64_t host_bytes;        /* INT64_MAX = all storages fit at once */
} crn_graph_link;

typedef struct crn_graph_model {
    int32_t node_count;
    int64_t fixed_bytes;
    const int64_t *cost;      /* of a node, ns */
    const int64_t *bytes;     /* of a node; 0 for aliases */
    const int64_t *extra;     /* max(0, workspace) of a node */
    const int32_t *root;      /* storage of a node */
    const int32_t *dep_begin; /* node -> its dependencies, the base of an alias included; node_count + 1 entries */
    const int32_t *dep;
    const int32_t *use_begin; /* storage -> nodes that read one of its handles, ascending, each once */
    const int32_t *use;
    const bool *keep;           /* of a storage: one of its nodes is an output */
    const int32_t *keep_from;   /* of a storage: first node that must be kept, or node_count */
    const bool *once;           /* of a storage: one of its nodes must not run twice */
    const bool *once_node;      /* of a node: it must not run twice */
    const crn_graph_link *link; /* NULL = nothing is fetched */
    int64_t total_cost;
    crn_arena arena;
} crn_graph_model;

/** Builds the model of a task's graph. Errors: NO_MEMORY. Cost: O(T + E). */
cairn_status crn_graph_model_new(const crn_task *task, crn_graph_model **model, cairn_error *error);
void crn_graph_model_free(crn_graph_model *model);

/*
 * A cost as prices count it: what costs nothing counts as next to nothing, so that memory decides among such. Prices that
 * are quotients of costs and sizes then keep their order when all costs or all sizes are multiplied.
 */
static inline double crn_priced_cost(int64_t cost)
{
    return cost > 0 ? (double)cost : 0x1p-200;
}

#endif
