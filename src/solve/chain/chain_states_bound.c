/*
 * A lower bound on the makespan of every schedule of a short chain within a budget, transfers excluded: where the search
 * over states (chain_states_search.h) ends, the optimum; where it is cut short, the least estimate of what is left.
 */
#include "solve/chain/chain_states_search.h"

/* The latest budget and what was found, kept for the next call; with more time, a search that was stopped gives more. */
typedef struct kept_bound {
    int64_t budget_bytes;
    crn_states_found found;
} kept_bound;

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    kept_bound *last = *kept;
    if (!crn_chain_states_take(cairn_problem_chain(task->problem)) || task->machine || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    if (!last || last->budget_bytes != budget_bytes || (last->found.stopped && !crn_task_is_past(task))) {
        kept_bound now = {.budget_bytes = budget_bytes};
        if (last && last->budget_bytes == budget_bytes)
            now.found.bound_ns = last->found.bound_ns;
        CRN_TRY(crn_chain_states_search(task, budget_bytes, &now.found, NULL, error));
        last = last ? last : crn_alloc(&allocator, 1, sizeof(*last));
        if (!last)
            return crn_no_memory(error);
        *last = now;
        *kept = last;
    }
    *bound_ns = crn_max(*bound_ns, last->found.bound_ns);
    return CAIRN_OK;
}

static void forget(const crn_task *task, void *kept)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, kept, 1, sizeof(kept_bound));
}

const crn_bound_method crn_chain_states_method = {.name = "states", .raise_makespan = raise_makespan, .forget = forget};
