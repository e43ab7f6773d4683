/*
 * chain-states: the fastest of all schedules of a short chain without transfers.
 *
 * Problem   A chain of up to 16 stages, with up to three options each. Least time within the budget.
 * Search    A* over the states of the simulator's model (chain_states_search.h): one of the fastest schedules is among its
 *           paths.
 * Optimal   Among all schedules without transfers. Where the search is cut short by its work, there is no answer.
 * Least     chain-weak's; with less, it may find a schedule all the same.
 * Cost      200,000 states are expanded at most: a few tenths of a second.
 */
#include <stdio.h>

#include "solve/chain/chain_states_search.h"

extern const crn_bound_method crn_chain_states_method;

static cairn_status states_accepts(const crn_task *task, cairn_error *error)
{
    return crn_chain_states_accept(cairn_problem_chain(task->problem), error);
}

/* Measured: some 32 states are expanded for each set of stages; each takes a microsecond, and reaches four new ones at most. */
static int64_t expanded_states(const crn_task *task)
{
    return crn_min(INT64_C(32) << cairn_problem_chain(task->problem)->stage_count, CRN_STATES_WORK);
}

static int64_t states_work(const crn_task *task)
{
    const int64_t state_ns = 1000;
    return state_ns * expanded_states(task);
}

static int64_t states_memory(const crn_task *task)
{
    const int64_t state_bytes = 4 * INT64_C(160); /* and its entries in the queue and in the table, while they grow */
    return state_bytes * expanded_states(task) + 65536;
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

/* Stopped by the clock, it is OK without a schedule: what the search has proved is said all the same. */
static cairn_status states_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    crn_states_found found;
    void *own = NULL, **kept = task->machine ? NULL : crn_bound_kept(task, &crn_chain_states_method);
    (void)session;
    cairn_status status =
        crn_chain_states_search(task, kept ? kept : &own, crn_limit_of(budget_bytes), &found, answer->builder, error);
    if (own)
        crn_chain_states_forget(task, own);
    CRN_TRY(status);
    answer->found = found.found;
    answer->optimal_in_class = found.found && !task->machine; /* with transfers less may do */
    answer->lower_bound_ns = task->machine ? CAIRN_NONE : found.bound_ns;
    answer->stopped_early = found.stopped;
    answer->cut_short = found.cut_short;
    if (found.cut_short)
        snprintf(answer->reason, CAIRN_REASON_MAX, "none was found within %d states; chain-weak and auto may find one",
                 CRN_STATES_WORK);
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
