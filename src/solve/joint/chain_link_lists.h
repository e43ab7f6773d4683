/*
 * Lists of a chain for which recomputing and offloading are chosen together: the best ones at several prices of the link
 * (chain_link_program.h).
 *
 * At a price of 1, a nanosecond on the link is as dear as one of the processor. Which price is best depends on the link: the
 * real schedule of each list says.
 */
#ifndef CRN_CHAIN_LINK_LISTS_H
#define CRN_CHAIN_LINK_LISTS_H

#include "solve/joint/joint_search.h"

/** Gives them to the search. Where memory is too small for it, the search is cut short. Polls. Errors: the search's. */
cairn_status crn_chain_link_lists(crn_joint_search *search, cairn_error *error);

#endif
