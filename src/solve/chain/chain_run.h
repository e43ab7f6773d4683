/*
 * A run: consecutive stages that may become a recomputed piece (chain_pieces.h), while its first stage moves down.
 */
#ifndef CRN_CHAIN_RUN_H
#define CRN_CHAIN_RUN_H

#include "solve/chain/chain_pieces.h"
#include "solve/chain/chain_prices.h"

typedef struct crn_run {
    int32_t first, last;
    int64_t full_bytes, dropped_bytes; /* to save all of them; the most that a forward_drop of them needs */
    int64_t solve_bytes;               /* the most that one of them but the first needs beside the output before it */
    int64_t ns;                        /* their forwards */
} crn_run;

/** One stage more, of which there are some, if the run may be that long and fits by itself. It begins as last + 1..last. */
static inline bool crn_run_lengthen(const crn_prices *prices, const crn_priced *problem, crn_run *run)
{
    const crn_chain_model *model = prices->model;
    int32_t first = run->first - 1;
    if (run->last - first >= prices->run_max || model->fence[first] <= run->last)
        return false;
    const crn_run_stage *stage = &prices->stages[first - 1];
    int64_t here = crn_max(model->base[run->last] + stage->save_bytes, stage->backward_bytes);
    if (first < run->last) {
        here = crn_max(here, stage->saved_bytes + run->full_bytes);
        run->dropped_bytes = crn_max(run->dropped_bytes, stage[1].drop_bytes);
        run->solve_bytes = crn_max(run->solve_bytes, model->output[first] + stage[1].alone_bytes);
    }
    run->first = first;
    run->full_bytes = here;
    run->ns += crn_stage(model, first)->forward_only_ns;
    return (crn_wide)problem->m << problem->slack >= (crn_wide)here;
}

/** What passing the run needs. */
static inline int64_t crn_run_pass_bytes(const crn_prices *prices, const crn_priced *problem, const crn_run *run)
{
    return prices->model->base[problem->t] + crn_max(prices->stages[run->first - 1].keep_bytes, run->dropped_bytes);
}

/** What no plan of its own can do without. */
static inline int64_t crn_run_solve_bytes(const crn_prices *prices, const crn_run *run)
{
    return crn_max(prices->stages[run->first - 1].alone_bytes, run->solve_bytes);
}

#endif
