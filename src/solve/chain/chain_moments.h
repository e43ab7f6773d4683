/*
 * The least priced cost of a chain over several moments, for the lower bound of chain_moments_bound.c.
 *
 * Moment j is T_c, just before the backward of stage c = stage[j]; stage[0] = n, and stages fall from moment to moment.
 * Interval j lasts from moment j to the next one, the last to the end. Every byte of a stage before c that is resident at
 * moment j costs price[j]. Every forward of stage l after moment 0 costs its least forward time. A state of stage l at
 * moment j is one of
 *
 *   0        nothing of l is resident
 *   1        only a[l] is
 *   2 + k    A_k[l] is
 *
 * Stage l runs forward in interval j
 *   - if stage l + 1 does and nothing of l is resident at moment j, for that forward reads a value of l;
 *   - if a value of l is resident at moment j + 1 that is not at moment j; a[l] in place of A_k[l] does not count, another
 *     A_k[l] does;
 *   - if backward l is in interval j, or opens the next, and no A_k[l] is resident at moment j.
 * If A_k[l + 1] is resident at moment j, so is a value of l. If an A_k[l] is resident at the last moment before backward l,
 * the stage takes the lesser of two times: what option k takes beyond the least, and a forward more. A stage with
 * no_recompute never runs again.
 *
 * The least cost over all states that follow these rules is found stage by stage, from n - 1 down to 1. What stage l needs
 * to know of stage l + 1 is, for each moment, one of: it runs in the interval, it has a saved set at the moment, or neither.
 * These demands are kept for the latest moments, a window of them, 3^window combinations; of earlier moments only whether a
 * saved set was resident at all of them. To forget a demand lowers the cost, so that the cost stays a lower bound.
 *
 * All numbers are integers: times in units of W * 2^-40, W the least forwards of all stages; bytes in units of B * 2^-32, B
 * what storing everything takes; prices in 2^-20 of W / B. Times, sizes and priced sizes are rounded down, room up.
 */
#ifndef CRN_CHAIN_MOMENTS_H
#define CRN_CHAIN_MOMENTS_H

#include "solve/chain_model.h"

enum {
    CRN_MOMENTS_MAX = 73,
    CRN_MOMENTS_WINDOW = 4,
    CRN_MOMENTS_OPTIONS_MAX = 3,
    CRN_MOMENTS_TIME_LOG2 = 40,
    CRN_MOMENTS_BYTES_LOG2 = 32,
    CRN_MOMENTS_PRICE_LOG2 = 20,
    /* A price times units of bytes, shifted right by so much, is in units of time. */
    CRN_MOMENTS_PRICE_SHIFT = CRN_MOMENTS_PRICE_LOG2 - (CRN_MOMENTS_TIME_LOG2 - CRN_MOMENTS_BYTES_LOG2)
};

typedef struct crn_moment {
    int32_t stage;
    int64_t room; /* for the values of the stages before it */
    int64_t price;
    int64_t used; /* by the states of least cost */
} crn_moment;

typedef struct crn_moments {
    const crn_task *task;
    const crn_chain_model *model;
    int64_t forward_ns, full_bytes; /* W, B */
    int32_t window;                 /* for how many moments demands are kept, 1 .. CRN_MOMENTS_WINDOW */
    int32_t count;
    crn_moment list[CRN_MOMENTS_MAX];
    struct crn_moments_stage *stages; /* 1..n - 1 */
    struct crn_moments_work *work;    /* of an evaluation */
} crn_moments;

/** The units of a size, rounded down. */
int64_t crn_moments_units(const crn_moments *moments, int64_t bytes);
/**
 * Memory for evaluations, from the model's arena; moments->list is not read. False: memory fails. `task`, `model`,
 * `forward_ns` and `full_bytes` are set.
 */
bool crn_moments_init(crn_moments *moments, crn_arena *arena);
/**
 * The least cost less what the prices of all room are, in units of time, for the prices of list[0..count-1]; fills in
 * `used`. False: the clock or poll stopped it.
 */
bool crn_moments_evaluate(crn_moments *moments, int64_t *units);

/* ---- chain_moments_bound.c ---- */

/** Where the search for prices of one budget is; zeroed but for the budget at first. A first price not found is lost. */
typedef struct crn_ascent {
    int64_t budget_bytes, bound_ns;
    bool is_begun, is_done;
    int32_t failures; /* steps since the bound rose enough */
    double level;     /* above the best, in units of time */
    double best_units;
    double best[CRN_MOMENTS_MAX]; /* prices */
    double direction[CRN_MOMENTS_MAX];
} crn_ascent;

/** Goes on with the search for prices, which raises bound_ns, to its end or the task's. Chains of two stages or more. */
cairn_status crn_moments_ascend(const crn_task *task, crn_ascent *at, cairn_error *error);

#endif
