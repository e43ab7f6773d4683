/*
 * revolve-hetero: the fastest persistent schedule of the adjoint model: only outputs are kept, and a stage is saved right
 * before its backward.
 *
 * Source: Griewank and Walther, "Evaluating derivatives" (2008), for steps of different times; with outputs of different
 * sizes Gruslys et al. (2016), appendix C; the "revolve" strategy of Beaumont et al. (2019), section 5.3.
 *
 * It is the program of chain-dp (chain_dp.c) without saving ahead. With its thresholds,
 *
 *   C(s,s,m) = min over k of uF_k[s] + uB_k[s]                                 if it fits
 *   C(s,t,m) = min over s' of way(s, s'-1) + C(s', t, m - a[s'-1]) + C(s, s'-1, m),     s < s' <= t
 *
 * where the way is forward_keep s, forward_drop s+1, ..., forward_drop s'-1. Optimal, where no size is rounded to slots,
 * among such schedules that are persistent: what is kept stays until the backward that reads it. Where sizes differ,
 * giving up a kept output for one further on can be faster; docs/explanation/solvers/revolve.md has numbers. Every
 * stage but the last is run at least twice, whatever the budget. O(n^3 S), like chain-dp.
 */
#include "solve/chain/slotted.h"

static cairn_status revolve_hetero_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    for (int32_t l = 1; l < chain->stage_count; l++)
        if (chain->stages[l - 1].no_recompute)
            return crn_fail_at(error, CAIRN_UNSUPPORTED, l, NULL,
                               "revolve-hetero runs all stages but the last twice, and stage %d must not be", l);
    return CAIRN_OK;
}

static cairn_status revolve_hetero_open(const crn_task *task, void **state, cairn_error *error)
{
    return crn_slotted_open(task, true, state, error);
}

const crn_solver crn_revolve_hetero_solver = {
    .info = {.name = "revolve-hetero",
             .takes_chains = true,
             .available = true,
             .optimal_in = "persistent-outputs",
             .summary =
                 "fastest persistent schedule that keeps only outputs, a stage saved right before its backward; slots",
             .source = "Griewank, Walther 2008; Gruslys et al. 2016; Beaumont et al. 2019, section 5.3",
             .cost = "O(n^3 S) time, O(n^2 S) memory"},
    .options = "slots",
    .rank = 10,
    .accepts = revolve_hetero_accepts,
    .memory = crn_slotted_memory,
    .work = crn_slotted_work,
    .open = revolve_hetero_open,
    .close = crn_slotted_close,
    .least = crn_slotted_least,
    .solve = crn_slotted_solve,
};
