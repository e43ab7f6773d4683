/*
 * Lists of a graph without transfers for which recomputing and offloading are chosen together.
 *
 * With a price for each nanosecond on the link, to fetch a value costs what its transfers take times the price. So the search
 * over sequences of computations (graph/graph_improve.h) can choose, for each value that does not fit, whether to recompute
 * or to fetch it; graph/link_times.h says when the link has time. The list is the sequence without the fetches, and what was
 * fetched is offloaded to begin with.
 *
 * At a price of 1, the link is as dear as the processor. At 0, everything is fetched for which the link has time. Which price
 * is best depends on the link, so several are tried. The real schedule of each list says which one is best. Besides, there
 * are lists without fetches that fit a larger budget.
 */
#ifndef CRN_LINK_LISTS_H
#define CRN_LINK_LISTS_H

#include "solve/solver.h"

/** Who takes the lists. */
typedef struct crn_link_sink {
    void *context;
    /**
     * Takes a list. goes: by computation, whether what it makes is offloaded to begin with. improve: the list is worth
     * improving; else it is only to be judged. *makespan_ns: of its schedule, INT64_MAX where it does not fit.
     */
    cairn_status (*take)(void *context, const cairn_builder *list, const bool *goes, bool improve, int64_t *makespan_ns,
                         cairn_error *error);
    /** Whether no more lists are wanted. */
    bool (*is_done)(void *context);
} crn_link_sink;

/**
 * Gives lists of the task's graph for its machine to the sink. start: a schedule within the budget, to begin with; where it
 * is empty or has transfers, the search begins with storing everything. rounds: of the search at the best price, at most.
 * Polls. Errors: NO_MEMORY, and the sink's.
 */
cairn_status crn_link_lists(const crn_task *task, int64_t budget_bytes, const cairn_builder *start, int64_t rounds,
                            const crn_link_sink *sink, cairn_error *error);
/** An upper estimate of its memory for a graph of so many nodes, the sink's aside. */
int64_t crn_link_lists_memory(int32_t node_count);

#endif
