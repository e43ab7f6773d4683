/*
 * chain-states: the fastest of all schedules of a short chain without transfers.
 *
 * Problem   A chain of up to 16 stages, with up to three options each. Least time within the budget.
 * Search    A* over the states of the simulator's model (chain_states_search.h), in which one of the fastest schedules is.
 * Optimal   Among all schedules without transfers. Where the search is cut short by its work, there is no answer.
 * Least     chain-weak's; with less, it may find a schedule all the same.
 * Cost      200,000 states at most: a few tenths of a second. 12 stages take some 43,000.
 */
#include "solve/chain/chain_states_search.h"

static cairn_status states_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    if (crn_chain_states_take(chain))
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNSUPPORTED,
                    "chain-states takes at most %d stages with at most %d options each, and the chain has %d stages",
                    CRN_STATES_STAGES_MAX, CRN_STATES_OPTIONS_MAX, chain->stage_count);
}

/* Measured: some twelve states are left for each set of stages; each takes a microsecond, and leads to four at most. */
static int64_t states_left(const crn_task *task)
{
    return crn_min(INT64_C(12) << cairn_problem_chain(task->problem)->stage_count, CRN_STATES_WORK);
}

static int64_t states_work(const crn_task *task)
{
    const int64_t state_ns = 1000;
    return state_ns * states_left(task);
}

static int64_t states_memory(const crn_task *task)
{
    const int64_t state_bytes = 4 * INT64_C(160); /* and its entries in the queue and in the table, while they grow */
    return state_bytes * states_left(task);
}

static cairn_status states_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const crn_solver *weak = crn_solver_find("chain-weak");
    crn_task question = *task;
    void *state;
    (void)session;
    question.budget_max_bytes = 0; /* costs no tables */
    cairn_status status = crn_solver_open(weak, &question, &state, error);
    if (status == CAIRN_OK)
        status = weak->least(&question, state, least, error);
    crn_solver_close(weak, &question, state);
    return status;
}

static cairn_status states_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    crn_states_found found = {.bound_ns = 0};
    (void)session;
    CRN_TRY(crn_chain_states_search(task, crn_limit_of(budget_bytes), &found, answer->builder, error));
    answer->found = answer->optimal_in_class = found.found;
    answer->stopped_early = found.stopped;
    answer->cut_short = found.cut_short;
    answer->lower_bound_ns = task->machine ? CAIRN_NONE : found.bound_ns;
    return CAIRN_OK;
}

const crn_solver crn_chain_states_solver = {
    .info = {.name = "chain-states",
             .takes_chains = true,
             .available = true,
             .optimal_in = "all",
             .summary = "the fastest of all schedules of a short chain",
             .source = "A* over the states of the simulator's model",
             .cost = "up to a few tenths of a second; at most 16 stages"},
    .accepts = states_accepts,
    .memory = states_memory,
    .work = states_work,
    .least = states_least,
    .solve = states_solve,
};
