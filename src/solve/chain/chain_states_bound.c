/*
 * A lower bound on the makespan of every schedule of a short chain within a budget, transfers excluded: where the search
 * over states (chain_states_search.h) ends, the optimum; where it is cut short, the least estimate of the open states.
 */
#include "solve/chain/chain_states_search.h"

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    crn_states_found found;
    if (!chain || task->machine || budget_bytes == CAIRN_NONE || crn_chain_states_accept(chain, NULL) != CAIRN_OK)
        return CAIRN_OK;
    CRN_TRY(crn_chain_states_search(task, kept, budget_bytes, &found, NULL, error));
    *bound_ns = crn_max(*bound_ns, found.bound_ns);
    return CAIRN_OK;
}

const crn_bound_method crn_chain_states_method = {
    .name = "states", .raise_makespan = raise_makespan, .forget = crn_chain_states_forget};
