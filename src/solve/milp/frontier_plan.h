/*
 * A frontier schedule as a table of what is held from stage to stage; all else follows.
 *
 * Given the handles held at the start of every stage, the least that each stage must compute follows by one traversal
 * of what it reads (Checkmate, section 5.1.1), and the drops follow too: right after the last reader of the stage, unless
 * the next stage begins with the storage. So a plan cannot be wrong, it can only need too much memory, and that the
 * simulator says.
 */
#ifndef CRN_FRONTIER_PLAN_H
#define CRN_FRONTIER_PLAN_H

#include "solve/milp/frontier_graph.h"

typedef struct crn_frontier_plan {
    const crn_frontier_graph *graph;
    bool *held;     /* [stage][node], count + 1 stages: the last is what the end leaves */
    bool *computed; /* [stage][node] */
    int32_t *stack; /* scratch */
    int32_t *last;  /* scratch: of a storage, its last reader in the stage */
    bool *exists;   /* scratch: of a node, whether its handle exists */
} crn_frontier_plan;

/** An empty plan: nothing held. From the arena. Errors: NO_MEMORY. */
cairn_status crn_frontier_plan_new(const crn_frontier_graph *graph, crn_arena *arena, crn_frontier_plan *plan,
                                   cairn_error *error);
static inline bool *crn_plan_row(const crn_frontier_plan *plan, bool *table, int32_t t)
{
    return table + (ptrdiff_t)t * plan->graph->model->node_count;
}

/**
 * Takes held as a wish: adds what must be held, fills in computed with the least that will do, and removes from held
 * what then serves nothing. False when a node that must not run twice would have to. O(T (T + E)).
 */
bool crn_frontier_plan_complete(crn_frontier_plan *plan);

/** Fills in held from a schedule without transfers: what is there when the recomputations for a stage begin. */
void crn_frontier_plan_read(crn_frontier_plan *plan, const cairn_op *ops, int64_t count);

/** Writes a complete plan as operations. Errors: the builder's. */
cairn_status crn_frontier_plan_emit(crn_frontier_plan *plan, cairn_builder *builder, cairn_error *error);

#endif
