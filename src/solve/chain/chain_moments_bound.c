/*
 * A lower bound on the makespan of every schedule of a chain within a budget, transfers excluded: the Lagrangian relaxation
 * of the memory at several moments.
 *
 * A moment is T_c, just before the backward of a stage c. What is resident of the stages before c fits in the room of the
 * moment: what the budget leaves beside what backward c needs at least. With a price for each byte at each moment,
 *
 *   work + the least of (time of forwards that run again + prices of what is resident) - prices of all room
 *
 * is a bound. chain_moments.h says which forwards must run again, and finds the least. docs/explanation/solvers/chain-bound.md
 * has the proof.
 *
 * Moments lie denser at the end of the chain, where memory is fullest. Of neighbouring stages the one that leaves least room
 * gives the moment. Prices rise at moments whose room is exceeded, and fall at others: a subgradient method, whose step aims
 * at a level above the best bound. The level comes nearer when it is not reached. The method begins with the best price
 * of the moment before the last backward alone. It is asked only where there is a time limit, and ends with it, or where the
 * level has become as near as LEVEL_LEAST.
 *
 * Cost  O(n (J + 3^w)) time for each set of prices, J moments and a window of w of them, O(n (J + w 3^w)) memory: 3 KB a
 *       stage, with three options a stage 5 KB.
 */
#include <math.h>

#include "solve/chain/chain_moments.h"

/*
 * The last part of the chain is divided into LATE_MOMENTS groups, the rest into EARLY_MOMENTS. Each group gives one moment.
 * The last part is 1 / LATE_PARTS of the chain, but at least LATE_MOMENTS stages. Chains of fewer than STAGES_MIN stages
 * have the bound of chain_states_bound.c.
 */
enum { STAGES_MIN = 13, STAGES_MAX = 20000, LATE_MOMENTS = 30, EARLY_MOMENTS = 42, LATE_PARTS = 7 };
_Static_assert(1 + LATE_MOMENTS + EARLY_MOMENTS <= CRN_MOMENTS_MAX, "too many moments");
/* No price, and no sum of prices, is more than 2^PRICE_LOG2_MAX units of a price: 64 W / B. */
enum { PRICE_LOG2_MAX = 26 };
/* How far above the best bound the level is at first and in the end, in units of W; after how many steps it comes nearer. */
#define LEVEL_FIRST 0.2
#define LEVEL_LEAST 0.00002
#define LEVEL_NEARER 0.7
enum { PATIENCE = 10 };
/* A rise by less than this part of the level counts as a failure. */
#define RISE_LEAST 0.1
/* How much of the direction of the last step stays in the next. */
#define INERTIA 0.75

typedef struct search {
    crn_moments moments;
    crn_ascent *at;
    double prices[CRN_MOMENTS_MAX];
} search;

/* ---- moments ---- */

/* False: backward l does not fit. */
static bool add_moment(crn_moments *moments, int32_t l, int64_t available_bytes)
{
    int64_t room = available_bytes - crn_least_backward_bytes(moments->model, l);
    if (room >= 0)
        moments->list[moments->count++] = (crn_moment){.stage = l, .room = crn_moments_units(moments, room) + 1};
    return room >= 0;
}

/* Of each of `groups` groups of the stages low..high the one that leaves least room, the last group first. */
static bool add_groups(crn_moments *moments, int32_t low, int32_t high, int32_t groups, int64_t available_bytes)
{
    int32_t count = high - low + 1;
    groups = groups < count ? groups : count;
    for (int32_t g = groups - 1; g >= 0; g--) {
        int32_t first = low + (int32_t)((int64_t)count * g / groups);
        int32_t last = low + (int32_t)((int64_t)count * (g + 1) / groups) - 1, tightest = last;
        for (int32_t l = last - 1; l >= first; l--)
            if (crn_least_backward_bytes(moments->model, l) > crn_least_backward_bytes(moments->model, tightest))
                tightest = l;
        if (!add_moment(moments, tightest, available_bytes))
            return false;
    }
    return true;
}

/* False: a backward does not fit. */
static bool choose_moments(crn_moments *moments, int64_t available_bytes)
{
    int32_t n = moments->model->n;
    int32_t late = (int32_t)crn_max(crn_min(n - 2, LATE_MOMENTS), n / LATE_PARTS);
    moments->count = 0;
    return add_moment(moments, n, available_bytes) &&
           add_groups(moments, n - late, n - 1, LATE_MOMENTS, available_bytes) &&
           (n - late <= 2 || add_groups(moments, 2, n - late - 1, EARLY_MOMENTS, available_bytes));
}

/* ---- prices ---- */

/* Rounds the prices, after scaling them down where their sum is too large, and evaluates them. False: stopped. */
static bool evaluate(search *s, double *units)
{
    const double most = (double)((int64_t)1 << PRICE_LOG2_MAX);
    crn_moments *moments = &s->moments;
    double sum = 0;
    int64_t found;
    for (int32_t j = 0; j < moments->count; j++)
        sum += s->prices[j];
    for (int32_t j = 0; j < moments->count; j++)
        moments->list[j].price = (int64_t)(s->prices[j] * (sum > most ? most / sum : 1));
    if (!crn_moments_evaluate(moments, &found))
        return false;
    *units = (double)found;
    const crn_wide unit = (crn_wide)1 << CRN_MOMENTS_TIME_LOG2; /* of W; a makespan is a whole number: rounded up */
    crn_wide ns = found > 0 ? ((crn_wide)found * (crn_wide)moments->forward_ns + unit - 1) / unit : 0;
    int64_t gained_ns = ns < (crn_wide)INT64_MAX ? (int64_t)ns : INT64_MAX;
    s->at->bound_ns = crn_max(s->at->bound_ns, crn_add_saturating(moments->model->work_ns, gained_ns));
    return true;
}

/* The best price of the first moment alone: the last at which the bound still rises. */
static bool find_first_price(search *s)
{
    int32_t count = s->moments.count;
    int64_t low = 0, high = (int64_t)1 << PRICE_LOG2_MAX;
    bool runs = true;
    s->moments.count = 1;
    while (low < high && runs) {
        int64_t middle = low + (high - low) / 2;
        double units;
        s->prices[0] = (double)middle;
        runs = evaluate(s, &units);
        if (s->moments.list[0].used > s->moments.list[0].room)
            low = middle + 1;
        else
            high = middle;
    }
    s->moments.count = count;
    s->prices[0] = (double)low;
    return runs;
}

/* The prices at hand are the best. */
static void keep(search *s, double units)
{
    s->at->best_units = units;
    for (int32_t j = 0; j < s->moments.count; j++)
        s->at->best[j] = s->prices[j];
}

static void take(search *s, double units)
{
    crn_ascent *at = s->at;
    at->failures = units > at->best_units + at->level * RISE_LEAST ? 0 : at->failures + 1;
    if (units > at->best_units)
        keep(s, units);
}

/* A step towards the level, along what room is exceeded now and was before. False: there is nowhere to go. */
static bool move(search *s, double units)
{
    const crn_moments *moments = &s->moments;
    double scale = 0, *direction = s->at->direction;
    for (int32_t j = 0; j < moments->count; j++) {
        direction[j] = (double)(moments->list[j].used - moments->list[j].room) + INERTIA * direction[j];
        scale += s->prices[j] > 0 || direction[j] > 0 ? direction[j] * direction[j] : 0;
    }
    if (scale <= 0)
        return false;
    double step = (s->at->best_units + s->at->level - units) / scale * (double)(1 << CRN_MOMENTS_PRICE_SHIFT);
    for (int32_t j = 0; j < moments->count; j++)
        s->prices[j] = fmax(0, s->prices[j] + step * direction[j]);
    return true;
}

static bool begin(search *s)
{
    crn_ascent *at = s->at;
    double units;
    if (!find_first_price(s) || !evaluate(s, &units))
        return false;
    at->is_begun = true;
    at->level = LEVEL_FIRST * (double)((int64_t)1 << CRN_MOMENTS_TIME_LOG2);
    keep(s, units);
    return true;
}

static void return_to_best(search *s)
{
    for (int32_t j = 0; j < s->moments.count; j++)
        s->prices[j] = s->at->best[j];
}

/* Raises the bound until the level is near or time ends. */
static void ascend(search *s)
{
    crn_ascent *at = s->at;
    const double least = LEVEL_LEAST * (double)((int64_t)1 << CRN_MOMENTS_TIME_LOG2);
    if (!at->is_begun && !begin(s))
        return;
    return_to_best(s);
    while (at->level > least) {
        double units;
        if (!evaluate(s, &units))
            return;
        take(s, units);
        if (!move(s, units))
            break;
        if (at->failures >= PATIENCE) {
            at->level *= LEVEL_NEARER;
            at->failures = 0;
            return_to_best(s);
        }
    }
    at->is_done = true;
}

/* ---- one budget ---- */

static int64_t forward_ns_of(const crn_chain_model *model)
{
    int64_t sum = 0;
    for (int32_t l = 1; l <= model->n; l++)
        sum = crn_add_saturating(sum, crn_least_forward_ns(crn_stage(model, l)));
    return sum;
}

static bool is_useful(const crn_moments *moments, int64_t available_bytes)
{
    return moments->forward_ns > 0 && available_bytes >= 0 && available_bytes < moments->full_bytes;
}

static cairn_status ascend_with(const crn_task *task, crn_chain_model *model, crn_ascent *at, cairn_error *error)
{
    search s = {.moments = {.task = task,
                            .model = model,
                            .forward_ns = forward_ns_of(model),
                            .full_bytes = crn_chain_full_bytes(model),
                            .window = CRN_MOMENTS_WINDOW},
                .at = at};
    int64_t available_bytes = at->budget_bytes - model->always_bytes;
    at->is_done = !is_useful(&s.moments, available_bytes) || !choose_moments(&s.moments, available_bytes);
    if (at->is_done)
        return CAIRN_OK;
    if (!crn_moments_init(&s.moments, &model->arena))
        return crn_no_memory(error);
    ascend(&s);
    return CAIRN_OK;
}

cairn_status crn_moments_ascend(const crn_task *task, crn_ascent *at, cairn_error *error)
{
    crn_chain_model model;
    cairn_status status = crn_chain_model_init(&model, task, error);
    if (status == CAIRN_OK)
        status = ascend_with(task, &model, at, error);
    crn_chain_model_clear(&model);
    return status;
}

static bool takes(const cairn_chain *chain)
{
    bool fits = chain && chain->stage_count >= STAGES_MIN && chain->stage_count <= STAGES_MAX;
    for (int32_t l = 0; fits && l < chain->stage_count; l++)
        fits = chain->stages[l].option_count <= CRN_MOMENTS_OPTIONS_MAX;
    return fits;
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    crn_ascent *at = *kept;
    if (!takes(cairn_problem_chain(task->problem)) || task->machine || budget_bytes == CAIRN_NONE ||
        task->deadline_ns == CAIRN_NONE)
        return CAIRN_OK;
    if (!at)
        *kept = at = crn_alloc_zero(&allocator, 1, sizeof(*at));
    if (!at)
        return crn_no_memory(error);
    if (at->budget_bytes != budget_bytes)
        *at = (crn_ascent){.budget_bytes = budget_bytes};
    if (!at->is_done && !crn_task_is_past(task))
        CRN_TRY(crn_moments_ascend(task, at, error));
    *bound_ns = crn_max(*bound_ns, at->bound_ns);
    return CAIRN_OK;
}

static void forget(const crn_task *task, void *kept)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, kept, 1, sizeof(crn_ascent));
}

const crn_bound_method crn_chain_moments_method = {
    .name = "moments", .raise_makespan = raise_makespan, .forget = forget};
