/* The best schedule so far, as the simulator judges it: where proposals of a program or of a rounding are tried. */
#ifndef CRN_FRONTIER_BEST_H
#define CRN_FRONTIER_BEST_H

#include "solve/milp/frontier_program.h"

typedef struct crn_frontier_best {
    cairn_builder *builder; /* its operations */
    cairn_builder *scratch; /* of the one that is tried */
    cairn_replay replay;
    bool found;
} crn_frontier_best;

typedef enum crn_frontier_trial {
    CRN_TRIAL_IMPOSSIBLE, /* it would compute twice what must run once, or take more than 2^63 - 1 ns */
    CRN_TRIAL_TOO_LARGE,  /* it does not fit */
    CRN_TRIAL_FITS        /* it does, and is the best now unless that was better */
} crn_frontier_trial;

cairn_status crn_frontier_best_new(const crn_task *task, crn_frontier_best *best, cairn_error *error);
void crn_frontier_best_free(crn_frontier_best *best);

/** Judges what scratch holds; by_peak: the smaller peak is better, else the smaller makespan. */
cairn_status crn_frontier_best_judge(const crn_task *task, int64_t budget_bytes, bool by_peak, crn_frontier_best *best,
                                     crn_frontier_trial *trial, cairn_error *error);
/** Completes the plan, from the handles that it wishes to hold, and judges it. */
cairn_status crn_frontier_best_try(const crn_task *task, crn_frontier_plan *plan, int64_t budget_bytes, bool by_peak,
                                   crn_frontier_best *best, crn_frontier_trial *trial, cairn_error *error);
/**
 * Two-phase rounding of a point of the program's relaxation: for twenty thresholds, hold what is held to at least that
 * much, and try the plan that this completes to.
 */
cairn_status crn_frontier_best_round(const crn_task *task, const crn_frontier_program *program, const double *values,
                                     const crn_program_goal *goal, crn_frontier_plan *plan, crn_frontier_best *best,
                                     cairn_error *error);
/** Appends its operations. Errors: the builder's. */
cairn_status crn_frontier_best_emit(const crn_frontier_best *best, cairn_builder *builder, cairn_error *error);

#endif
