/*
 * The moments of a moment program: a search for the set of up to CRN_MOMENTS_MAX moments that gives the largest bound.
 *
 * The search starts from two sets: the moments of the best windows, and those at which most memory is taken in even
 * parts of the graph. The better set gets one more moment in every gap. Then single moments are added, moved and left
 * out, as long as that raises the bound. Every program starts from the prices of the last one that raised the bound of
 * its start (box_memory.c). So, where windows are taken together, a program with one more moment starts from a bound that
 * is no lower.
 */
#ifndef CRN_MOMENT_SEARCH_H
#define CRN_MOMENT_SEARCH_H

#include "solve/graph/graph_window.h"
#include "solve/graph/moment_program.h"

/**
 * Raises *again_ns, the time that every schedule spends on recomputation at least, by programs over several moments. It
 * tries only moments whose windows to the end have a bound above zero. Work is limited. When the task stops, the bound
 * that is proved by then holds. Errors: NO_MEMORY, with *again_ns as it was; under a memory limit the bound goes without it.
 */
cairn_status crn_moments_raise(const crn_task *task, const crn_graph_bounder *bounder, int64_t *again_ns,
                               cairn_error *error);

#endif
