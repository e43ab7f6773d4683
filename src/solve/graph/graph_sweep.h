/*
 * Schedules of little memory for training graphs: the forward is recomputed from cuts that few bytes cross.
 *
 * The forward nodes, those before the backward begins, lie in a row. A cut lies between two of them. The storages before
 * the cut that forward nodes after it read stay resident: from these, everything after the cut can be recomputed. The
 * backward nodes need forward values mostly from the end of the row to its beginning. So the row is halved repeatedly
 * towards its end, at the cuts near the middle that the fewest bytes cross, down to pieces of few bytes. The backward
 * nodes of the last piece come next. Then the piece before it is recomputed from its cut, halved in the same way, and
 * so on. Log T cuts are kept at a time. Every forward node is recomputed some (log T) / 2 times. This is the bisection
 * of reverse accumulation (Griewank 1992) on a graph.
 *
 * The bytes of a cut are counted in two ways, and both are tried. Counted within a piece, they are those of the piece's
 * storages that nodes of the piece after the cut read. Other storages are resident anyway, or have no reader left.
 * Where no cut near the middle is small, one farther away may be, before or after a skip. Counted over the whole
 * forward, they are those of all storages before the cut that forward nodes after it read.
 *
 * Any sequence is a schedule (graph_sequence.h), whatever the graph looks like: where it is not a training step, the peak
 * is merely no good. Storages that run once or are kept stay from their first computation on.
 */
#ifndef CRN_GRAPH_SWEEP_H
#define CRN_GRAPH_SWEEP_H

#include "solve/graph/graph_sequence.h"

typedef struct crn_sweep crn_sweep;

/** All memory is the arena's. backward_begin: first backward node. lower_bytes: what every schedule needs. NULL: no memory. */
crn_sweep *crn_sweep_new(const crn_graph_model *model, int32_t backward_begin, int64_t lower_bytes, crn_arena *arena);
/**
 * The sequence whose cuts are the cheapest near the middle, crossed by at most cut_bytes; where there is none, the last node
 * is a piece of its own, which takes no cut but more sweeps. False: it is longer than there is room for.
 */
bool crn_sweep_run(crn_sweep *sweep, int64_t cut_bytes, crn_sequence *sequence);
/** The i-th sequence of ever fewer bytes and ever more recomputations. False: there is none. */
bool crn_sweep_nth(crn_sweep *sweep, int i, crn_sequence *sequence);
/**
 * The next in the search for the least bytes: cuts half as large as long as there is room, then between the last two.
 * *has_room: there is one. False: the search has ended.
 */
bool crn_sweep_next(crn_sweep *sweep, crn_sequence *sequence, bool *has_room);

#endif
