/*
 * What memory costs in time.
 *
 * Prices are in units of W / (B * 2^20) ns a byte, W the sum of all forwards and the options' extra times, B what storing
 * everything takes. Costs are integers of 128 bits and times are in 64ths of ns, so nothing is rounded, and scales change
 * nothing. Sums of two costs up to CRN_COST_MAX fit.
 */
#ifndef CRN_CHAIN_PRICES_H
#define CRN_CHAIN_PRICES_H

#include "solve/chain_model.h"

/* Signed: differences of costs may be below 0. */
__extension__ typedef __int128 crn_cost;

#define CRN_COST_MAX ((crn_cost)1 << 125)

enum { CRN_PRICE_UNIT_LOG2 = 20, CRN_PRICE_LOG2_MAX = 27, CRN_TIME_PARTS = 64 };

/* A stage in a run (chain_run.h), with its fastest option. */
typedef struct crn_run_stage {
    int64_t saved_bytes, save_bytes, backward_bytes; /* the saved set; beside the current gradient; with it */
    int64_t keep_bytes, drop_bytes;                  /* crn_keep_bytes, crn_drop_bytes */
    int64_t alone_bytes;                             /* the least, with any option, to save it and to run it backward */
} crn_run_stage;

typedef struct crn_prices {
    const crn_chain_model *model;
    cairn_allocator allocator;
    int64_t weight_ns, full_bytes; /* W, B */
    int32_t run_max;               /* the longest run that is tried */
    bool are_exact;                /* else the numbers are too large for prices */
    crn_run_stage *stages;         /* stage l at l - 1 */
} crn_prices;

/** The problem (s, t) with m bytes, at a price. Stage l has place l - s + 1, the beginning place 0. */
typedef struct crn_priced {
    int32_t s, t;
    int64_t m;
    int64_t price;
    int slack;  /* of a recomputed run's saved sets, a share of 1/2^slack must fit */
    int charge; /* so many halves of the forward are estimated for the share that does not */
} crn_priced;

/** The longest run that is tried in a chain of n stages: a pass over all of them takes some 2^26 steps. */
int32_t crn_prices_run_max(int64_t n);
/** False when memory fails. Zeroed ones can be cleared. */
bool crn_prices_init(crn_prices *prices, const crn_chain_model *model, cairn_allocator allocator);
void crn_prices_clear(crn_prices *prices);

/** Of time, in 64ths of ns. */
static inline crn_cost crn_time_cost(const crn_prices *prices, int64_t parts)
{
    return ((crn_cost)parts * (crn_cost)prices->full_bytes) << CRN_PRICE_UNIT_LOG2;
}

static inline crn_cost crn_memory_cost(const crn_prices *prices, int64_t price, int64_t bytes)
{
    return (crn_cost)bytes * (crn_cost)prices->weight_ns * (crn_cost)(price * CRN_TIME_PARTS);
}

static inline crn_cost crn_piece_cost(const crn_prices *prices, int64_t price, int64_t bytes, int64_t ns)
{
    return crn_time_cost(prices, ns * CRN_TIME_PARTS) + crn_memory_cost(prices, price, bytes);
}

#endif
