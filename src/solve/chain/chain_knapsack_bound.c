/*
 * A lower bound on the makespan of every schedule of a chain within a budget, transfers excluded: the knapsack of the moment
 * before the last stage's backward.
 *
 * At that moment A_k[n] is resident, and each stage l < n is in one of three states:
 *
 *   SAVED k   A_k[l] is resident, and with it a value of stage l-1, which it refers to (a[0] always is)
 *   OUTPUT    only a[l] is resident
 *   NOTHING   no value of l is resident
 *
 * Every stage has run forward before, and unless it is SAVED it runs forward again afterwards, for its backward needs a
 * saved set. So, beyond the least forward and backward of each stage, it takes
 *
 *   SAVED k   extra = uF_k + min(uB_k, least) - least,   least = min over j of uF_j + uB_j
 *   others    extra = the least forward of l, saving or not; infinite for a stage that must not be recomputed,
 *
 * and the values take A_k[l], a[l] and nothing. They fit in room = what the budget leaves beside fixed_bytes, a[0] and the
 * least backward_k[n]. Priced at any lambda >= 0 a byte,
 *
 *   work + min over all states of (sum of extra + lambda * bytes) - lambda * room
 *
 * is a bound: one pass over the stages for each lambda, whatever the budget. It is concave in lambda, so bisection finds the
 * best of the grid lambda = k * W / (B * 2^20), W the sum of the least forwards, B what storing everything takes.
 *
 * It counts one recomputation a stage, so it is weak where stages are recomputed more often, near the least budget; there
 * chain_bound.c is better. Elsewhere the loss is that of rounding one item of a knapsack, so it gets tight with n.
 *
 * All numbers are multiplied by B * 2^20 and exact in 128 bits, and the quotient is rounded down: scaling all sizes or all
 * times changes nothing, and the best of a grid that does not depend on the budget never rises with it. O(n) time and memory.
 */
#include "solve/chain_model.h"

/* lambda in units of W / (B * 2^GRID_LOG2), up to 2^PRICE_LOG2 of them; W * B stays below 2^PRODUCT_LOG2. */
enum { GRID_LOG2 = 20, PRICE_LOG2 = 27, PRODUCT_LOG2 = 96, STAGES_MAX = 1 << 17 };

/* More than any sum of what is not infinite; two of them can be added. */
#define NEVER ((crn_wide)1 << 126)

typedef struct item {
    int64_t bytes, ns; /* ns = INT64_MAX: never */
} item;

/* One budget's question. */
typedef struct knapsack {
    const crn_chain_model *model;
    item *saved;                    /* SAVED: of all options of all stages, one after the other */
    int64_t *again_ns;              /* extra where a stage is not SAVED; INT64_MAX: it must be */
    int64_t forward_ns, full_bytes; /* W, B */
    int64_t room_bytes;
} knapsack;

/* The best way to be in a state: its priced cost, and the bytes of its values, which give the slope in lambda. */
typedef struct path {
    crn_wide cost;
    int64_t bytes;
} path;

static path lesser(path a, path b)
{
    return b.cost < a.cost ? b : a;
}

static int64_t least_ns(const cairn_stage *stage)
{
    return crn_option_ns(&stage->options[crn_fastest_option(stage)]);
}

/* ---- one price ---- */

static path with_item(const knapsack *p, path before, int64_t bytes, int64_t ns, int64_t price)
{
    if (before.cost >= NEVER || ns == INT64_MAX || bytes > p->room_bytes)
        return (path){NEVER, 0};
    crn_wide cost = ((crn_wide)ns * (crn_wide)p->full_bytes) << GRID_LOG2;
    cost += (crn_wide)bytes * (crn_wide)price * (crn_wide)p->forward_ns;
    return (path){before.cost + cost, crn_add_saturating(before.bytes, bytes)};
}

/* The least cost of stages 1..n-1 when a value of the last of them is resident, as A[n] needs. */
static path cheapest(const knapsack *p, int64_t price)
{
    path nothing = {NEVER, 0}, value = {0, 0}; /* by whether the stage before has a value; a[0] is one */
    const item *saved = p->saved;
    for (int32_t l = 1; l < p->model->n; l++) {
        const cairn_stage *stage = crn_stage(p->model, l);
        path any = lesser(value, nothing), kept = {NEVER, 0};
        for (int32_t k = 0; k < stage->option_count; k++, saved++)
            kept = lesser(kept, with_item(p, value, saved->bytes, saved->ns, price));
        value = lesser(kept, with_item(p, any, stage->output_bytes, p->again_ns[l], price));
        nothing = with_item(p, any, 0, p->again_ns[l], price);
    }
    return value;
}

/* What a price proves beyond the work, rounded down; *rises: the values take more than the room, so a higher price may do. */
static int64_t proved_ns(const knapsack *p, int64_t price, bool *rises)
{
    path best = cheapest(p, price);
    crn_wide room = (crn_wide)p->room_bytes * (crn_wide)price * (crn_wide)p->forward_ns;
    *rises = best.bytes > p->room_bytes;
    if (best.cost >= NEVER || best.cost <= room)
        return 0;
    crn_wide left = best.cost - room, unit = (crn_wide)p->full_bytes << GRID_LOG2, ns = left / unit;
    return ns < (crn_wide)INT64_MAX ? (int64_t)ns : INT64_MAX;
}

/* The best of the grid is the last price at which the bound still rises, or the one after it. */
static int64_t best_price(const crn_task *task, const knapsack *p)
{
    int64_t low = 0, high = (int64_t)1 << PRICE_LOG2, best_ns = 0;
    while (low < high && !crn_task_is_past(task)) {
        int64_t price = low + (high - low) / 2;
        bool rises;
        best_ns = crn_max(best_ns, proved_ns(p, price, &rises));
        if (rises)
            low = price + 1;
        else
            high = price;
    }
    return best_ns;
}

/* ---- one budget ---- */

static void fill(knapsack *p)
{
    item *saved = p->saved;
    for (int32_t l = 1; l < p->model->n; l++) {
        const cairn_stage *stage = crn_stage(p->model, l);
        int64_t least = least_ns(stage), forward = crn_least_forward_ns(stage);
        for (int32_t k = 0; k < stage->option_count; k++, saved++) {
            const cairn_stage_option *option = &stage->options[k];
            *saved = (item){option->saved_bytes, option->forward_ns - crn_max(0, least - option->backward_ns)};
        }
        p->again_ns[l] = stage->no_recompute ? INT64_MAX : forward;
        p->forward_ns = crn_add_saturating(p->forward_ns, forward);
    }
}

/* Whether the numbers fit, and there is something to prove. */
static bool is_useful(const knapsack *p)
{
    if (p->forward_ns == 0 || p->full_bytes == 0 || p->room_bytes < 0 || p->room_bytes > p->full_bytes)
        return false;
    return (crn_wide)p->forward_ns * (crn_wide)p->full_bytes >> PRODUCT_LOG2 == 0;
}

static cairn_status find_bound(const crn_task *task, crn_chain_model *model, int64_t budget_bytes, int64_t *found_ns,
                               cairn_error *error)
{
    knapsack p = {.model = model, .full_bytes = crn_chain_full_bytes(model)};
    int64_t available_bytes = budget_bytes - model->always_bytes;
    p.room_bytes = available_bytes - crn_least_backward_bytes(model, model->n);
    if (available_bytes >= p.full_bytes || p.room_bytes < 0)
        return CAIRN_OK;
    p.saved = crn_arena_alloc(&model->arena, crn_option_total(model), sizeof(*p.saved));
    p.again_ns = crn_arena_alloc(&model->arena, (size_t)model->n + 1, sizeof(*p.again_ns));
    if (!p.saved || !p.again_ns)
        return crn_no_memory(error);
    fill(&p);
    if (is_useful(&p))
        *found_ns = crn_add_saturating(model->work_ns, best_price(task, &p));
    return CAIRN_OK;
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t found_ns = 0;
    crn_chain_model model;
    (void)kept;
    if (!chain || task->machine || budget_bytes == CAIRN_NONE || chain->stage_count < 2 ||
        chain->stage_count > STAGES_MAX)
        return CAIRN_OK;
    cairn_status status = crn_chain_model_init(&model, task, error);
    if (status == CAIRN_OK)
        status = find_bound(task, &model, budget_bytes, &found_ns, error);
    crn_chain_model_clear(&model);
    if (status == CAIRN_OK)
        *bound_ns = crn_max(*bound_ns, found_ns);
    return status;
}

const crn_bound_method crn_chain_knapsack_method = {.name = "knapsack", .raise_makespan = raise_makespan};
