/*
 * Lower bounds on the makespan of every schedule of a graph within a budget, and on the memory that any of them needs.
 *
 * Look at the moment just before node t is computed for the first time, and at a window that ends just before node e
 * is. Nodes t .. e-1 read values of nodes before t. Each of these is resident at that moment, or it is recomputed
 * inside the window. What is resident fits what the budget leaves beside node t. What is recomputed comes after what it
 * reads, of which the same holds. Price residency at lambda per byte. Then
 *
 *     min over closed sets of  lambda * bytes(kept) + cost(recomputed)   -   lambda * bytes(left)
 *
 * is at most the time that the window spends on recomputation, for every lambda >= 0: it is a Lagrangian relaxation. The
 * minimum is a closure problem with two yes-or-no questions for each storage (needed? recomputed?), so one minimum cut.
 * It is concave in lambda; a few cuts find its maximum. Windows that do not overlap add up.
 *
 * Capacities are integers, rounded so that the bound stays one; docs/explanation/solvers/graph-bound.md has the proof.
 */
#ifndef CRN_GRAPH_BOUND_H
#define CRN_GRAPH_BOUND_H

#include "solve/graph_model.h"

typedef struct crn_graph_bounder crn_graph_bounder;

enum { CRN_GRAPH_CUTS_MAX = 48 };

/** Bounds on what windows between some nodes spend on recomputation. */
typedef struct crn_graph_windows {
    int32_t count, cut[CRN_GRAPH_CUTS_MAX + 1];                /* nodes, ascending; cut[count] is the end */
    int64_t spent[CRN_GRAPH_CUTS_MAX][CRN_GRAPH_CUTS_MAX + 1]; /* window [cut[i], cut[j]), i < j */
} crn_graph_windows;

/** When the task stops, what was bounded by then still holds. */
cairn_status crn_graph_bounder_new(const crn_task *task, const crn_graph_model *model, crn_graph_bounder **bounder,
                                   cairn_error *error);
void crn_graph_bounder_free(crn_graph_bounder *bounder);

/**
 * A lower bound on the time spent on recomputation in window [t, e) by every schedule within the budget; INT64_MAX when
 * it proves that there is none.
 */
int64_t crn_graph_bound_window(crn_graph_bounder *bounder, int64_t budget_bytes, int32_t t, int32_t e);

/** A lower bound on the makespan, over the best windows that the work limit allows to look at. */
int64_t crn_graph_bound_makespan(crn_graph_bounder *bounder, int64_t budget_bytes);

/**
 * A lower bound on the memory of every schedule: at the moment before node t, the least bytes from which all that is
 * still to be read can be computed, beside node t itself; over the nodes that the work limit allows to look at.
 */
int64_t crn_graph_bound_memory(crn_graph_bounder *bounder);

#endif
