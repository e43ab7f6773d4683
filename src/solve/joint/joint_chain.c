/*
 * joint-chain: chains in which every value may stay, be recomputed, or be offloaded.
 *
 * Problem   A chain with options and its link to host memory. Least time within the device's budget and the host's.
 * Lists     What is computed, and when, comes from a program in which the link has a price (chain_link_lists.h), and from
 *           solvers that know no link, at budgets from the least one to that of storing everything: chain-exact, which
 *           leaves out what is cheapest to compute again; chain-dp on the same chain where options exist a second time, as
 *           ones that keep only the stage's output, at a price or for as many stages as the link can serve; storing
 *           everything; and computing everything twice.
 * Fit       Each list is made to fit the budget by offloading copies, saved sets and outputs alike; the best lists are
 *           improved by ruin and recreate (joint_search.h, joint_fit.h), their transfers placed by transfer.h.
 * Never     worse than any solver without transfers that auto asks, nor than one without recomputation: their answers are
 *           among the starting points.
 * Optimal   When it meets the bound (joint_bound.c).
 * Cost      The other solvers', and rounds of O(operations) each: seconds at n = 100. Without a time limit, by work and
 *           not by the clock.
 */
#include <string.h>

#include "solve/joint/chain_link_lists.h"
#include "solve/joint/joint_portfolio.h"
#include "solve/joint/joint_session.h"

enum { GRID = 24, PRICED_GRID = 6, OFFERS = 6, OPTIONS_MAX = CAIRN_STAGE_OPTIONS_MAX, PRICED_SLOTS = 150 };

#define LISTS_OF "chain-exact"

/*
 * On what terms stages may be offloaded: at a price, in quarters of the time of the transfers; and all of them (0), or
 * only as many, evenly spread, as the link could serve if it were so many percent as fast as it is.
 */
typedef struct offer {
    int64_t quarters, percent;
} offer;

static const offer offers[OFFERS] = {{1, 0}, {4, 0}, {0, 50}, {0, 100}, {0, 150}, {0, 300}};

/* ---- lists of our own ---- */

static cairn_status add(cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option, cairn_error *error)
{
    cairn_op op = {.code = (uint8_t)code, .option = (uint16_t)option, .index = l};
    return cairn_builder_add(builder, op, error);
}

/* The option with which saving and going back need least. */
static int32_t smallest_option(const cairn_chain *chain, int32_t l)
{
    const cairn_stage *stage = &chain->stages[l - 1];
    int64_t made = (l > 1 ? chain->stages[l - 2].grad_bytes : chain->input_grad_bytes) + stage->weight_grad_bytes;
    int64_t least_bytes = INT64_MAX;
    int32_t least = 0;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t needed = option->saved_bytes +
                         crn_max(crn_max(0, option->forward_workspace_bytes), made + option->backward_workspace_bytes);
        if (needed < least_bytes) {
            least_bytes = needed;
            least = k;
        }
    }
    return least;
}

/* Forwards that keep outputs only, then each stage saved right before its backward: no operation needs less around it. */
static cairn_status list_twice(const cairn_chain *chain, cairn_builder *builder, cairn_error *error)
{
    int32_t n = chain->stage_count;
    for (int32_t l = 1; l <= n; l++) {
        bool once = chain->stages[l - 1].no_recompute;
        if (once || l < n)
            CRN_TRY(add(builder, once ? CAIRN_OP_FORWARD_SAVE : CAIRN_OP_FORWARD_KEEP, l,
                        once ? smallest_option(chain, l) : 0, error));
    }
    for (int32_t l = n; l >= 1; l--) {
        if (!chain->stages[l - 1].no_recompute)
            CRN_TRY(add(builder, CAIRN_OP_FORWARD_SAVE, l, smallest_option(chain, l), error));
        CRN_TRY(add(builder, CAIRN_OP_BACKWARD, l, 0, error));
    }
    return CAIRN_OK;
}

typedef enum choice { FASTEST, SMALLEST, FIRST, CHOICES } choice;

/* Every stage saved once, with an option of a kind. */
static cairn_status list_once(const cairn_chain *chain, choice kind, cairn_builder *builder, cairn_error *error)
{
    int32_t n = chain->stage_count;
    for (int32_t l = 1; l <= n; l++) {
        const cairn_stage *stage = &chain->stages[l - 1];
        int32_t chosen = 0;
        for (int32_t k = 1; k < stage->option_count && kind != FIRST; k++) {
            const cairn_stage_option *a = &stage->options[k], *b = &stage->options[chosen];
            bool faster = a->forward_ns + a->backward_ns < b->forward_ns + b->backward_ns;
            if (kind == FASTEST ? faster : a->saved_bytes < b->saved_bytes)
                chosen = k;
        }
        CRN_TRY(add(builder, CAIRN_OP_FORWARD_SAVE, l, chosen, error));
    }
    for (int32_t l = n; l >= 1; l--)
        CRN_TRY(add(builder, CAIRN_OP_BACKWARD, l, 0, error));
    return CAIRN_OK;
}

static cairn_status offer_own_lists(crn_joint_search *search, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(search->task->problem);
    cairn_builder *builder;
    CRN_TRY(cairn_builder_new(search->task->env, search->task->problem, &builder, error));
    cairn_status status = list_twice(chain, builder, error);
    if (status == CAIRN_OK)
        status = crn_joint_offer_list(search, builder, NULL, error);
    for (int kind = 0; status == CAIRN_OK && kind < CHOICES; kind++) {
        cairn_builder_truncate(builder, 0);
        status = list_once(chain, (choice)kind, builder, error);
        if (status == CAIRN_OK)
            status = crn_joint_offer_list(search, builder, NULL, error);
    }
    cairn_builder_free(builder);
    return status;
}

/* ---- lists of solvers that know no link ---- */

/* Budgets evenly spaced above some bytes, the last that of storing everything. */
static int32_t make_grid(const crn_joint *s, int64_t from_bytes, int32_t count, int64_t *budgets)
{
    int64_t span = s->store_all_bytes - from_bytes;
    for (int32_t i = 0; i < count; i++)
        budgets[i] = from_bytes + span / count * (i + 1);
    return span > 0 ? count : 0;
}

static cairn_status take_list(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    crn_joint_search *search = context;
    (void)budget_bytes;
    return crn_joint_is_done(search) ? CAIRN_OK : crn_joint_offer_list(search, own->builder, NULL, error);
}

/*
 * All solvers that know no link, chain-exact at budgets beyond ours as well; where their answers are known, only the
 * latter, if it is at hand.
 */
static cairn_status offer_alone(const crn_joint *s, crn_joint_search *search, int64_t budget_bytes, cairn_error *error)
{
    int64_t budgets[GRID + 1] = {budget_bytes}, least_bytes;
    crn_task sub = crn_task_without_machine(search->task);
    CRN_TRY(crn_least_lower(&sub, &least_bytes, error));
    int32_t count = 1 + make_grid(s, least_bytes, GRID, budgets + 1);
    if (search->task->known)
        return crn_joint_ask_shared(&sub, budgets + 1, count - 1, take_list, search, &search->cut_short, error);
    return crn_joint_ask_alone(search, LISTS_OF, budgets, count, error);
}

/* ---- offloading as an option ---- */

/* The chain with every option twice: option k + K of a stage with K options is option k, offloaded at a price. */
typedef struct priced {
    crn_joint_search *search;
    cairn_stage *stages;
    cairn_stage_option *options;
    bool *offloaded; /* of a stage, from 0: the second half of its options is offloaded */
    cairn_chain chain;
    cairn_problem *problem;
} priced;

static void price_option(const cairn_machine *machine, const cairn_stage *stage, int64_t price,
                         cairn_stage_option *option)
{
    int64_t out_ns = cairn_transfer_ns(option->saved_bytes, machine->to_host_bytes_per_s, machine->latency_ns);
    int64_t back_ns = cairn_transfer_ns(option->saved_bytes, machine->to_device_bytes_per_s, machine->latency_ns);
    int64_t away = option->saved_bytes - stage->output_bytes, limit = INT64_MAX >> 32;
    int64_t leave_ns = crn_min(out_ns < 0 ? limit : crn_mul_saturating(out_ns / 4, price), limit);
    int64_t return_ns = crn_min(back_ns < 0 ? limit : crn_mul_saturating(back_ns / 4, price), limit);
    option->forward_ns = crn_add_saturating(option->forward_ns, leave_ns);
    option->backward_ns = crn_add_saturating(option->backward_ns, return_ns);
    option->saved_bytes = stage->output_bytes;
    option->forward_workspace_bytes = crn_max(0, option->forward_workspace_bytes) + away;
    option->backward_workspace_bytes += away;
}

/* Whether the link, which earns time as stages run and spends it on their saved sets, has enough for this stage. */
static bool can_pay(const cairn_machine *machine, const cairn_stage *stage, int64_t percent, double *earned_ns)
{
    const cairn_stage_option *option = &stage->options[0];
    double out_ns = (double)cairn_transfer_ns(option->saved_bytes, machine->to_host_bytes_per_s, machine->latency_ns);
    double back_ns =
        (double)cairn_transfer_ns(option->saved_bytes, machine->to_device_bytes_per_s, machine->latency_ns);
    double cost_ns = machine->shared_link ? out_ns + back_ns : out_ns;
    double time_ns = (double)option->forward_ns + (machine->shared_link ? (double)option->backward_ns : 0);
    if (percent == 0 || out_ns < 0 || back_ns < 0)
        return percent == 0;
    *earned_ns += time_ns * (double)percent / 100;
    if (*earned_ns < cost_ns)
        return false;
    *earned_ns -= cost_ns;
    return true;
}

static void price_stages(priced *p, const cairn_chain *chain, const cairn_machine *machine, const offer *terms)
{
    cairn_stage_option *next = p->options;
    double earned_ns = 0;
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        p->stages[i] = *stage;
        p->stages[i].options = next;
        p->stages[i].option_count = 2 * stage->option_count;
        memcpy(next, stage->options, (size_t)stage->option_count * sizeof(*next));
        next += stage->option_count;
        memcpy(next, stage->options, (size_t)stage->option_count * sizeof(*next));
        p->offloaded[i] = can_pay(machine, stage, terms->percent, &earned_ns);
        for (int32_t k = 0; k < stage->option_count; k++, next++)
            if (p->offloaded[i])
                price_option(machine, stage, terms->quarters, next);
    }
}

/* The answer in terms of the chain as it is, and which computations make what is offloaded. */
static cairn_status take_priced(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    priced *p = context;
    const cairn_chain *chain = cairn_problem_chain(p->search->task->problem);
    int64_t count = cairn_builder_count(own->builder), events = 0;
    cairn_builder *builder;
    (void)budget_bytes;
    if (crn_joint_is_done(p->search))
        return CAIRN_OK;
    bool *goes = crn_alloc_zero(&p->search->allocator, (size_t)count, sizeof(*goes));
    if (!goes)
        return crn_no_memory(error);
    cairn_status status = cairn_builder_new(p->search->task->env, p->search->task->problem, &builder, error);
    for (int64_t i = 0; status == CAIRN_OK && i < count; i++) {
        cairn_op op = cairn_builder_ops(own->builder)[i];
        int32_t options = op.code == CAIRN_OP_FORWARD_SAVE ? chain->stages[op.index - 1].option_count : 1;
        goes[events] = op.option >= options && p->offloaded[op.index - 1];
        op.option = (uint16_t)(op.option % options);
        events += op.code <= CAIRN_OP_BACKWARD;
        status = cairn_builder_add(builder, op, error);
    }
    if (status == CAIRN_OK)
        status = crn_joint_offer_list(p->search, builder, goes, error);
    cairn_builder_free(builder);
    crn_free(&p->search->allocator, goes, (size_t)count, sizeof(*goes));
    return status;
}

/* Where twice the options are too many, or their sums too large, there are no such lists. */
static cairn_status offer_on_terms(const crn_joint *s, priced *p, const offer *terms, cairn_error *error)
{
    const crn_task *task = p->search->task;
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    crn_settings settings = *task->settings;
    crn_task sub = crn_task_without_machine(task);
    int64_t budgets[PRICED_GRID];
    cairn_problem_info info = {.fixed_bytes = cairn_problem_info_of(task->problem)->fixed_bytes};
    price_stages(p, chain, task->machine, terms);
    p->chain = *chain;
    p->chain.stages = p->stages;
    cairn_status status = cairn_problem_new_chain(task->env, &p->chain, &info, &p->problem, error);
    if (status != CAIRN_OK)
        return status == CAIRN_NO_MEMORY ? status : CAIRN_OK;
    settings.slots = crn_min(settings.slots, PRICED_SLOTS);
    sub.settings = &settings;
    sub.problem = p->problem;
    sub.bounds = NULL; /* they are of the chain as it is */
    sub.budget_max_bytes = s->store_all_bytes;
    int32_t count = make_grid(s, s->least_bytes, PRICED_GRID, budgets);
    status = crn_joint_ask(&sub, "chain-dp", budgets, count, take_priced, p, NULL, &p->search->cut_short, error);
    cairn_problem_free(p->problem);
    return status;
}

static cairn_status offer_priced_lists(const crn_joint *s, crn_joint_search *search, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(search->task->problem);
    priced p = {.search = search};
    size_t stages = (size_t)chain->stage_count, options = 0;
    for (size_t i = 0; i < stages; i++) {
        options += 2 * (size_t)chain->stages[i].option_count;
        if (2 * chain->stages[i].option_count > OPTIONS_MAX)
            return CAIRN_OK;
    }
    p.stages = crn_alloc(&search->allocator, stages, sizeof(*p.stages));
    p.options = crn_alloc(&search->allocator, options, sizeof(*p.options));
    p.offloaded = crn_alloc(&search->allocator, stages, sizeof(*p.offloaded));
    cairn_status status = p.stages && p.options && p.offloaded ? CAIRN_OK : crn_no_memory(error);
    for (int i = 0; status == CAIRN_OK && i < OFFERS && !crn_joint_is_done(search); i++)
        status = offer_on_terms(s, &p, &offers[i], error);
    crn_free(&search->allocator, p.stages, stages, sizeof(*p.stages));
    crn_free(&search->allocator, p.options, options, sizeof(*p.options));
    crn_free(&search->allocator, p.offloaded, stages, sizeof(*p.offloaded));
    return status;
}

/* ---- complete schedules of the others ---- */

static const char *const offloaders[] = {"offload-greedy", "offload-vdnn", "offload-dp", "offload-exact"};

enum { OFFLOADERS = sizeof(offloaders) / sizeof(offloaders[0]) };

/* Who is asked, for the reason. */
typedef struct asking {
    crn_joint_search *search;
    const char *name;
} asking;

static cairn_status take_schedule(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    asking *a = context;
    (void)budget_bytes;
    return crn_joint_offer(a->search, own->builder, own->solver ? own->solver : a->name, error);
}

static cairn_status offer_answers(crn_joint_search *search, int64_t budget_bytes, cairn_error *error)
{
    crn_task sub = crn_task_without_machine(search->task);
    asking a = {search, "brute-chain"};
    CRN_TRY(crn_joint_ask(&sub, a.name, &budget_bytes, 1, take_schedule, &a, NULL, &search->cut_short, error));
    for (int i = 0; i < OFFLOADERS && !crn_joint_is_done(search); i++) {
        a.name = offloaders[i];
        CRN_TRY(
            crn_joint_ask(search->task, a.name, &budget_bytes, 1, take_schedule, &a, NULL, &search->cut_short, error));
    }
    return CAIRN_OK;
}

/* ---- the solver ---- */

static cairn_status least_of_others(const crn_task *task, crn_joint *s, cairn_error *error)
{
    crn_task sub = crn_task_without_machine(task);
    CRN_TRY(crn_joint_ask(&sub, "auto", NULL, 0, NULL, NULL, &s->least_bytes, &s->is_rough, error));
    CRN_TRY(crn_joint_ask(&sub, "brute-chain", NULL, 0, NULL, NULL, &s->least_bytes, &s->is_rough, error));
    for (int i = 0; i < OFFLOADERS; i++)
        CRN_TRY(crn_joint_ask(task, offloaders[i], NULL, 0, NULL, NULL, &s->least_bytes, &s->is_rough, error));
    return CAIRN_OK;
}

/* With what computing everything twice fits when all that waits is offloaded. */
static cairn_status least_of_twice(const crn_task *task, crn_joint *s, cairn_error *error)
{
    cairn_builder *builder;
    crn_transfer *transfer = NULL;
    crn_fit *fit;
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    cairn_status status = list_twice(cairn_problem_chain(task->problem), builder, error);
    if (status == CAIRN_OK)
        status = crn_transfer_new(task, cairn_builder_ops(builder), cairn_builder_count(builder), &transfer, error);
    cairn_builder_free(builder);
    CRN_TRY(status);
    CRN_TRY(crn_fit_new(transfer, 1, &fit, error));
    s->least_bytes = crn_min(s->least_bytes, crn_fit_need(fit));
    crn_fit_free(fit);
    return CAIRN_OK;
}

static cairn_status lower_least(const crn_task *task, crn_joint *s, cairn_error *error)
{
    CRN_TRY(least_of_others(task, s, error));
    return least_of_twice(task, s, error);
}

static cairn_status joint_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_joint_open(task, lower_least, session, error);
}

static int64_t usual_rounds(const crn_task *task)
{
    return INT64_C(600000) / (4 * (int64_t)cairn_problem_chain(task->problem)->stage_count + 60);
}

static int64_t rounds_of(const crn_task *task)
{
    return crn_joint_rounds(task, usual_rounds(task));
}

/* From the least budget on; where that was not looked for, from what computing everything twice needs. */
static cairn_status offer_all_priced(const crn_joint *s, crn_joint_search *search, cairn_error *error)
{
    crn_joint from = *s;
    if (search->task->known)
        CRN_TRY(least_of_twice(search->task, &from, error));
    return offer_priced_lists(&from, search, error);
}

static cairn_status search_all(const crn_joint *s, crn_joint_search *search, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    CRN_TRY(crn_joint_offer_known(search, error));
    CRN_TRY(offer_own_lists(search, error));
    if (!crn_joint_is_done(search) && !search->task->known)
        CRN_TRY(offer_answers(search, budget_bytes, error));
    if (!crn_joint_is_done(search))
        CRN_TRY(crn_chain_link_lists(search, error));
    if (!crn_joint_is_done(search))
        CRN_TRY(offer_alone(s, search, budget_bytes, error));
    if (!crn_joint_is_done(search))
        CRN_TRY(offer_all_priced(s, search, error));
    answer->iterations = crn_work_limit(search->task, rounds_of(search->task));
    return crn_joint_improve(search, rounds_of(search->task), answer, error);
}

static cairn_status joint_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    return crn_joint_solve(task, session, budget_bytes, search_all, answer, error);
}

static int64_t joint_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return (crn_joint_pool_size(task) + 2) * crn_transfer_memory(task, 8 * n + 64) + (1 << 20);
}

/* Of the usual rounds: more of them, or a time limit, are asked for by somebody who wants to wait. */
static int64_t joint_work(const crn_task *task)
{
    int64_t round_ns = 400 * (int64_t)cairn_problem_chain(task->problem)->stage_count;
    return crn_max(16, usual_rounds(task)) * round_ns;
}

const crn_solver crn_joint_chain_solver = {
    .info = {.name = "joint-chain",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "",
             .summary = "values stay, are recomputed or offloaded: never worse than either alone",
             .source = "Cairn",
             .cost = "seconds at n = 100"},
    .options = "slots segments iterations seed",
    .memory = joint_memory,
    .work = joint_work,
    .rank = CRN_RANK_ALL,
    .is_anytime = true,
    .has_own_bound = true,
    .lists_of = LISTS_OF,
    .open = joint_open,
    .close = crn_joint_close,
    .least = crn_joint_least,
    .solve = joint_solve,
};
