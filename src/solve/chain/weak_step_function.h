/*
 * The program of weak_model.h in bytes: a step function of memory for each part (step_function.h), as in chain-exact. One run
 * answers all budgets, and nothing is rounded.
 *
 * Parts whose stages are alike share one table: those of (s,t,l) depend on the stages s-1..l, and are counted without
 * the weight gradients that exist at d[l]. So what counts is the number of distinct sub-chains, times their length.
 */
#ifndef CRN_WEAK_STEP_FUNCTION_H
#define CRN_WEAK_STEP_FUNCTION_H

#include "solve/chain/subchain.h"
#include "solve/chain/weak_unfold.h"

typedef struct crn_weak_steps crn_weak_steps;

/**
 * Tables for up to so much memory beside what is always there. Errors: NO_MEMORY, CANCELLED. Free with
 * crn_weak_steps_free.
 */
cairn_status crn_weak_steps_new(const crn_weak_model *model, const crn_task *task, int64_t top_bytes,
                                crn_weak_steps **steps, cairn_error *error);
void crn_weak_steps_free(crn_weak_steps *p);

/**
 * Puts the fastest schedule for available_bytes in place of what is in the builder, if it takes less than less_than_ns
 * beyond the least of all stages; of equally fast ones one that needs little memory.
 */
cairn_status crn_weak_steps_solve(const crn_weak_steps *p, const crn_task *task, int64_t available_bytes,
                                  int64_t less_than_ns, cairn_builder *builder, bool *found, cairn_error *error);

/** Of the tables of a problem: their bytes, and elementary steps to make them. INT64_MAX: far too much. */
typedef struct crn_weak_estimate {
    int64_t bytes, work;
} crn_weak_estimate;

/** False when there is no memory to look at the problem. */
bool crn_weak_steps_estimate(const crn_task *task, crn_weak_estimate *made);

#endif
