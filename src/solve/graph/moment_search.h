/*
 * The moments of a moment program: which of them say most.
 *
 * More moments are not always better: what is computed again counts once in each window. So sets of a few to two dozen
 * moments are tried, those at which most memory is taken in even parts of the graph, then single moments are added,
 * moved and left out, as long as that raises the bound.
 */
#ifndef CRN_MOMENT_SEARCH_H
#define CRN_MOMENT_SEARCH_H

#include "solve/graph/graph_window.h"
#include "solve/graph/moment_program.h"

/**
 * Raises *again_ns, what every schedule spends on recomputation, by programs over several moments, among those whose
 * windows to the end the bounder has found to be worth something. Bounded by work; when the task stops, what was found
 * by then holds. Errors: NO_MEMORY, with *again_ns as it was; under a memory limit the bound goes without it.
 */
cairn_status crn_moments_raise(const crn_task *task, const crn_graph_bounder *bounder, int64_t *again_ns,
                               cairn_error *error);

#endif
