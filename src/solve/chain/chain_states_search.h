/*
 * A* over the states of a short chain (chain_states.h): the fastest schedule within a budget, transfers excluded, or what
 * is known when the search is cut short.
 */
#ifndef CRN_CHAIN_STATES_SEARCH_H
#define CRN_CHAIN_STATES_SEARCH_H

#include "solve/chain/chain_states.h"

/** The most states that are expanded before the search is cut short. */
enum { CRN_STATES_WORK = 200000 };

typedef struct crn_states_found {
    int64_t bound_ns; /* no schedule takes less */
    bool found;       /* a schedule takes that long */
    bool cut_short;   /* by its work */
    bool stopped;     /* by the clock or by poll */
} crn_states_found;

/**
 * What the search finds. *kept: what was found about the latest budget, or NULL; the search is not made again where more
 * of it would find no more. The schedule that is found is added to the builder, where that is not NULL.
 */
cairn_status crn_chain_states_search(const crn_task *task, void **kept, int64_t budget_bytes, crn_states_found *found,
                                     cairn_builder *builder, cairn_error *error);
/** Frees what was kept. */
void crn_chain_states_forget(const crn_task *task, void *kept);

#endif
