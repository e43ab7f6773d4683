/*
 * Lists of a graph for which recomputing and offloading are chosen together.
 *
 * With a price for each nanosecond on the link, to fetch a value costs what its transfers take times the price. So the search
 * over sequences of computations (graph_improve.h) can choose, for each value that does not fit, whether to recompute it or
 * to fetch it; link_times.h says when the link has time. The list is the sequence without the fetches, and what was fetched
 * is offloaded to begin with.
 *
 * At a price of 1, the link is as dear as the processor. At 0, everything is fetched for which the link has time. Which price
 * is best depends on the link, so several are tried. The real schedule of each list says which one is best.
 */
#ifndef CRN_JOINT_PRICED_H
#define CRN_JOINT_PRICED_H

#include "solve/joint/joint_search.h"

/**
 * Offers the lists that it finds, and those that fit larger budgets without a link. start: a schedule within the budget to start from; where it is empty or has transfers,
 * the search starts from storing everything. rounds: of the search at the best price, at most. Polls.
 */
cairn_status crn_joint_offer_priced(crn_joint_search *search, const cairn_builder *start, int64_t rounds,
                                    cairn_error *error);
/** An upper estimate of the memory for a graph of so many nodes. */
int64_t crn_joint_priced_memory(int32_t node_count);

#endif
