/*
 * Schedules of little memory for training graphs: forwards swept again from cuts that few bytes cross.
 *
 * The forward nodes, those before the turn, lie in a row. At a cut between two of them live the storages that forward nodes
 * behind it read; whoever has them can compute what lies behind. The backward nodes need forward values mostly from the
 * end of the row to its beginning. So the row is halved again and again towards its end, at cuts near the middle with
 * the fewest bytes, down to pieces of few bytes; the backward nodes of the last piece come next; then the piece before is
 * computed from its cut, halved in the same way, and so on. Log T cuts are alive at a time. Every forward node is computed
 * some (log T) / 2 times more. This is the bisection of reverse accumulation (Griewank 1992) on a graph.
 *
 * Two ways of choosing cuts are tried. By the piece, a cut counts the storages of its piece that the piece reads behind it:
 * others are alive anyway, or their readers are done with; and where no cut near the middle is cheap, one elsewhere may be,
 * before or after a skip. By the whole, it counts all that forward nodes behind it read.
 *
 * Any sequence is a schedule (graph_sequence.h), whatever the graph looks like: where it is not a training step, the peak
 * is merely no good. Storages that run once or are kept stay from their first computation on.
 */
#ifndef CRN_GRAPH_SWEEP_H
#define CRN_GRAPH_SWEEP_H

#include "solve/graph/graph_sequence.h"

typedef struct crn_sweep crn_sweep;

/** All memory is the arena's. turn: the first backward node; lower_bytes: what every schedule needs. NULL: no memory. */
crn_sweep *crn_sweep_new(const crn_graph_model *model, int32_t turn, int64_t lower_bytes, crn_arena *arena);
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
