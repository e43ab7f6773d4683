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
    int64_t first_bytes, solve_bytes;  /* what no plan of its own can do without: for the first stage, for the others */
    int64_t ns;                        /* their forwards */
} crn_run;

/** What stage l needs, saved with the option that needs least and then run backward. */
static inline int64_t crn_run_stage_bytes(const crn_chain_model *model, int32_t l)
{
    const cairn_stage *stage = crn_stage(model, l);
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, crn_piece_save_bytes(model, l, l, &stage->options[k]));
    return least;
}

/** One stage more, of which there are some, if the run may be that long and fits by itself. At first it is last + 1..last. */
static inline bool crn_run_lengthen(const crn_prices *prices, const crn_priced *problem, crn_run *run)
{
    const crn_chain_model *model = prices->model;
    int32_t first = run->first - 1;
    if (run->last - first >= prices->run_max || model->fence[first] <= run->last)
        return false;
    const cairn_stage *stage = crn_stage(model, first);
    const cairn_stage_option *option = &stage->options[crn_fastest_option(stage)];
    int64_t here = crn_piece_save_bytes(model, first, run->last, option);
    if (first < run->last) {
        here = crn_max(here, option->saved_bytes + run->full_bytes);
        run->dropped_bytes = crn_max(run->dropped_bytes, crn_drop_bytes(model, first + 1));
        run->solve_bytes = crn_max(run->solve_bytes, model->output[first] + run->first_bytes);
    }
    if (problem->slack > 0)
        run->first_bytes = crn_run_stage_bytes(model, first);
    run->first = first;
    run->full_bytes = here;
    run->ns += stage->forward_only_ns;
    return (crn_wide)problem->m << problem->slack >= (crn_wide)here;
}

/** What passing the run needs. */
static inline int64_t crn_run_pass_bytes(const crn_prices *prices, const crn_priced *problem, const crn_run *run)
{
    const crn_chain_model *model = prices->model;
    return model->base[problem->t] + crn_max(crn_keep_bytes(crn_stage(model, run->first)), run->dropped_bytes);
}

#endif
