#include "solve/chain/chain_prices.h"

#include "solve/chain/chain_pieces.h"

/* W stays below 2^WEIGHT_LOG2, W * B below 2^PRODUCT_LOG2: times and costs then fit. */
enum { WEIGHT_LOG2 = 55, PRODUCT_LOG2 = 89 };

/* Recomputed pieces of more than RUN_STEPS / n stages are not tried, unless that is less than RUN_MIN. */
enum { RUN_MIN = 16, RUN_STEPS = 1 << 26 };

int32_t crn_prices_run_max(int64_t n)
{
    return (int32_t)crn_max(RUN_MIN, RUN_STEPS / n);
}

static int64_t weight_of(const crn_chain_model *model)
{
    int64_t sum = 0;
    for (int32_t l = 1; l <= model->n; l++) {
        const cairn_stage *stage = crn_stage(model, l);
        int64_t longest = stage->forward_only_ns;
        for (int32_t k = 0; k < stage->option_count; k++)
            longest = crn_max(longest, crn_option_ns(&stage->options[k]));
        sum = crn_add_saturating(sum, longest);
    }
    return sum;
}

static crn_run_stage stage_of(const crn_chain_model *model, int32_t l)
{
    const cairn_stage *stage = crn_stage(model, l);
    const cairn_stage_option *fastest = &stage->options[crn_fastest_option(stage)];
    int64_t alone = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        alone = crn_min(alone, crn_piece_save_bytes(model, l, l, &stage->options[k]));
    return (crn_run_stage){.saved_bytes = fastest->saved_bytes,
                           .save_bytes = crn_save_bytes(fastest),
                           .backward_bytes = crn_backward_bytes(model, l, fastest),
                           .keep_bytes = crn_keep_bytes(stage),
                           .drop_bytes = crn_drop_bytes(model, l),
                           .alone_bytes = alone};
}

bool crn_prices_init(crn_prices *prices, const crn_chain_model *model, cairn_allocator allocator)
{
    *prices = (crn_prices){.model = model,
                           .allocator = allocator,
                           .weight_ns = weight_of(model),
                           .full_bytes = crn_pieces_full_bytes(model, 1, model->n),
                           .run_max = crn_prices_run_max(model->n)};
    prices->are_exact = prices->weight_ns >> WEIGHT_LOG2 == 0 &&
                        (crn_wide)prices->weight_ns * (crn_wide)prices->full_bytes >> PRODUCT_LOG2 == 0;
    prices->stages = crn_alloc(&prices->allocator, (size_t)model->n, sizeof(*prices->stages));
    for (int32_t l = 1; prices->stages && l <= model->n; l++)
        prices->stages[l - 1] = stage_of(model, l);
    return prices->stages;
}

void crn_prices_clear(crn_prices *prices)
{
    if (prices->model)
        crn_free(&prices->allocator, prices->stages, (size_t)prices->model->n, sizeof(*prices->stages));
}
