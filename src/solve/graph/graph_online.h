/*
 * What other solvers take from graph-online: the schedule with the least peak among its walks.
 */
#ifndef CRN_GRAPH_ONLINE_H
#define CRN_GRAPH_ONLINE_H

#include "solve/graph/graph_sequence.h"

extern const crn_solver crn_graph_online_solver;

/** The sequence with the least peak of a session of graph-online, which owns it; looked for in the task's time. */
cairn_status crn_graph_online_smallest(const crn_task *task, void *session, const crn_sequence **sequence,
                                       cairn_error *error);

#endif
