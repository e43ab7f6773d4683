/*
 * Graphs of a few nodes, where walks cannot do what the smallest budgets take ("not searched" in graph_search.c):
 * exhaustive search answers in their place, which leaves the other problems to the walks.
 */
#ifndef CRN_GRAPH_TINY_H
#define CRN_GRAPH_TINY_H

#include "solve/solver.h"

/** The least of a graph without transfers, in place of the one that is there; nothing changes where the graph is too large. */
cairn_status crn_tiny_least(const crn_task *task, crn_least *least, cairn_error *error);
/** An answer without transfers; none where the graph is too large. Keeps the bound that the answer has, or raises it. */
cairn_status crn_tiny_solve(const crn_task *task, int64_t budget_bytes, crn_answer *answer, cairn_error *error);

#endif
