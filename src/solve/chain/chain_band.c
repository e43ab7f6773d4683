#include "solve/chain/chain_band.h"

static crn_cost least_of(crn_cost a, crn_cost b)
{
    return a < b ? a : b;
}

/* The least cost of saving stage l with an option that fits in m. */
static crn_cost saved_cost(const crn_prices *prices, const crn_priced *problem, int32_t l)
{
    const cairn_stage *stage = crn_stage(prices->model, l);
    int64_t least_ns = crn_option_ns(&stage->options[crn_fastest_option(stage)]);
    crn_cost least = CRN_COST_MAX;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        if (crn_piece_save_bytes(prices->model, l, problem->t, option) <= problem->m)
            least = least_of(
                least, crn_piece_cost(prices, problem->price, option->saved_bytes, crn_option_ns(option) - least_ns));
    }
    return least;
}

/*
 * Upwards: the least cost up to each stage; false: stopped. A run that cannot be cheaper than the best so far ends the
 * longer ones, too.
 */
static bool go_up(crn_band *band, const crn_task *task, const crn_prices *prices, const crn_priced *problem)
{
    crn_band_place *at = band->places;
    int64_t passed_ns = 0;
    at[0].least = at[0].ahead = 0;
    for (int32_t l = problem->s; l <= problem->t; l++) {
        int32_t place = l - problem->s + 1;
        crn_run run = {.first = l + 1, .last = l};
        passed_ns += crn_stage(prices->model, l)->forward_only_ns;
        crn_cost kept = crn_memory_cost(prices, problem->price, prices->model->output[l]);
        crn_cost passed = crn_time_cost(prices, passed_ns * CRN_TIME_PARTS);
        crn_cost least = at[place - 1].least + saved_cost(prices, problem, l);
        while (l < problem->t && run.first > problem->s &&
               at[run.first - 1 - problem->s].ahead + passed + kept < least &&
               crn_run_lengthen(prices, problem, &run)) {
            crn_cost before = at[run.first - problem->s].least;
            least = least_of(least, before + kept + crn_time_cost(prices, run.ns * CRN_TIME_PARTS));
        }
        at[place].least = least_of(least, CRN_COST_MAX);
        at[place].ahead = least_of(at[place - 1].ahead, at[place].least - passed);
        if (crn_should_stop(task, NULL))
            return false;
    }
    return true;
}

/* Downwards: the rest of each stage; false: stopped. */
static bool go_down(crn_band *band, const crn_task *task, const crn_prices *prices, const crn_priced *problem)
{
    crn_band_place *at = band->places;
    int32_t count = problem->t - problem->s + 1;
    int64_t passed_ns = 0;
    for (int32_t place = 0; place < count; place++) {
        at[place].rest = CRN_COST_MAX;
        passed_ns += crn_stage(prices->model, problem->s + place)->forward_only_ns;
    }
    at[count].rest = 0;
    for (int32_t l = problem->t; l >= problem->s; l--) {
        crn_run run = {.first = l + 1, .last = l};
        crn_band_place *before = &at[l - problem->s];
        crn_cost rest = before[1].rest;
        before->rest = least_of(before->rest, rest + saved_cost(prices, problem, l));
        crn_cost after = rest + crn_memory_cost(prices, problem->price, prices->model->output[l]);
        crn_cost passed = after + crn_time_cost(prices, passed_ns * CRN_TIME_PARTS);
        while (l < problem->t && run.first > problem->s &&
               at[run.first - 1 - problem->s].ahead + passed <= band->limit &&
               crn_run_lengthen(prices, problem, &run)) {
            before = &at[run.first - problem->s];
            before->rest = least_of(before->rest, after + crn_time_cost(prices, run.ns * CRN_TIME_PARTS));
        }
        passed_ns -= crn_stage(prices->model, l)->forward_only_ns;
        if (crn_should_stop(task, NULL))
            return false;
    }
    return true;
}

/* What is kept in the end leaves room for the last stage, which is saved: its backward needs more than its saved set. */
static int64_t kept_most(const crn_prices *prices, const crn_priced *problem)
{
    const cairn_stage *stage = crn_stage(prices->model, problem->t);
    int64_t beside = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t needed = crn_piece_save_bytes(prices->model, problem->t, problem->t, option);
        beside = crn_min(beside, needed - option->saved_bytes);
    }
    return problem->m - beside;
}

void crn_band_limit(crn_band *band, const crn_prices *prices, const crn_priced *problem, int64_t parts)
{
    band->limit = crn_time_cost(prices, parts) + crn_memory_cost(prices, problem->price, kept_most(prices, problem));
}

cairn_status crn_band_make(crn_band *band, const crn_task *task, const crn_prices *prices, const crn_priced *problem,
                           int64_t parts, cairn_error *error)
{
    size_t count = (size_t)(problem->t - problem->s) + 2;
    if (count > band->capacity) {
        crn_band_place *places = crn_grow(&prices->allocator, band->places, &band->capacity, count, sizeof(*places));
        if (!places)
            return crn_no_memory(error);
        band->places = places;
    }
    for (size_t i = 0; i < count; i++) {
        band->places[i].low = 0;
        band->places[i].high = (int64_t)1 << CRN_SHARE_LOG2;
    }
    crn_band_limit(band, prices, problem, parts);
    if (!go_up(band, task, prices, problem) || !go_down(band, task, prices, problem))
        return crn_fail(error, CAIRN_CANCELLED, "stopped while making a band");
    return CAIRN_OK;
}

void crn_band_clear(crn_band *band, const cairn_allocator *allocator)
{
    crn_free(allocator, band->places, band->capacity, sizeof(*band->places));
}
