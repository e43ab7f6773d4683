/*
 * Schedules of little memory for training graphs: the forward is recomputed from cuts that few bytes cross.
 *
 * The forward nodes, those before the backward begins, lie in a row. A cut lies between two of them. The storages before
 * the cut that forward nodes after it read stay resident: from these, everything after the cut can be recomputed. The
 * backward nodes need forward values mostly from the end of the row to its beginning. So the row is cut repeatedly
 * towards its end, down to single nodes. The backward nodes of the last piece come next. Then the piece before it is
 * recomputed from its cut, cut in the same way, and so on. This is the checkpointing of reverse accumulation (Griewank
 * 1992) on a graph.
 *
 * Where to cut follows from a budget. A piece that is recomputed as it is needs what its nodes take while they run in a
 * row, beside what backward nodes hold then. Only cuts after which this fits, beside what crosses the cuts that are kept,
 * are allowed. Of these the one is taken with which the piece takes the fewest recomputations: so many cuts fit into the
 * memory that is left, and so far apart they are then (the binomial of Griewank 1992). So a piece whose nodes are small
 * is cut often, and one whose nodes take almost the budget is recomputed from few cuts, and more often.
 *
 * Any sequence is a schedule (graph_sequence.h), whatever the graph looks like: where it is not a training step, the peak
 * is merely no good. Storages that run once or are kept stay from their first computation on.
 */
#ifndef CRN_GRAPH_SWEEP_H
#define CRN_GRAPH_SWEEP_H

#include "solve/graph/graph_sequence.h"

typedef struct crn_sweep crn_sweep;

/**
 * All memory is the arena's. backward_begin: the first backward node. lower_bytes: what every schedule needs. NULL: no
 * memory.
 */
crn_sweep *crn_sweep_new(const crn_graph_model *model, int32_t backward_begin, int64_t lower_bytes, crn_arena *arena);
/**
 * The sequence whose cuts are chosen for a budget; its peak may be above it, where the forward in a row takes more. False:
 * it is longer than there is room for, or its cuts take too long.
 */
bool crn_sweep_run(crn_sweep *sweep, int64_t budget_bytes, crn_sequence *sequence);
/** The i-th sequence for a budget: of ever fewer bytes and ever more recomputations. False: there is none. */
bool crn_sweep_nth(crn_sweep *sweep, int i, int64_t budget_bytes, crn_sequence *sequence);
/**
 * The next in the search for the least peak, of which peak_bytes is the least so far. *has_room: there is one. False: the
 * search has ended.
 */
bool crn_sweep_next(crn_sweep *sweep, int64_t peak_bytes, crn_sequence *sequence, bool *has_room);

#endif
