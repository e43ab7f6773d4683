/*
 * A* over the states of a short chain (chain_states.h): the fastest schedule within a budget, transfers excluded, or what
 * is known when the search is cut short.
 */
#ifndef CRN_CHAIN_STATES_SEARCH_H
#define CRN_CHAIN_STATES_SEARCH_H

#include "solve/chain/chain_states.h"

/** The most states that are left before the search is cut short. */
enum { CRN_STATES_WORK = 200000 };

typedef struct crn_states_found {
    int64_t bound_ns; /* no schedule takes less */
    bool found;       /* a schedule takes that long */
    bool cut_short;   /* by its work */
    bool stopped;     /* by the clock or by poll */
} crn_states_found;

/** bound_ns of *found is raised. The schedule that is found is added to the builder, where that is not NULL. */
cairn_status crn_chain_states_search(const crn_task *task, int64_t budget_bytes, crn_states_found *found,
                                     cairn_builder *builder, cairn_error *error);

#endif
