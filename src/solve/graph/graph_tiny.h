/*
 * Graphs of a few nodes. The smallest budgets may take schedules that walks do not search ("Not searched" in
 * graph_search.c). So exhaustive search answers in place of the walks. Larger graphs are left to the walks.
 */
#ifndef CRN_GRAPH_TINY_H
#define CRN_GRAPH_TINY_H

#include "solve/solver.h"

/** Replaces *least by the least memory of the graph without transfers. Leaves it as it is where the graph is too large. */
cairn_status crn_tiny_least(const crn_task *task, crn_least *least, cairn_error *error);
/** An answer without transfers; none where the graph is too large. Keeps the bound that the answer has, or raises it. */
cairn_status crn_tiny_solve(const crn_task *task, int64_t budget_bytes, crn_answer *answer, cairn_error *error);

#endif
