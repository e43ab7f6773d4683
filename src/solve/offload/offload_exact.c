/*
 * offload-exact: the optimum of a small chain over all schedules with transfers and without recomputation.
 *
 * Problem   A chain and its link to host memory; every stage saves once. Which saved sets are offloaded, in which
 *           order transfers and computations start: all of it. Least time.
 * Search    Branch and bound over lists of operations, the state of time being the simulator's own: three lanes, and when
 *           each copy can be read and freed. A step issues the next computation (with each option), an offload or a
 *           prefetch; copies are dropped and discarded as soon as they may be, for that only frees memory earlier. A copy
 *           may be offloaded again and again.
 * Bounds    A state's makespan is at least what its lanes still have to do. Of states in which the same copies are in the
 *           same places one that is nowhere later, and never has more memory still to come back, dominates: all that can
 *           follow the other can follow it, no later (docs/reference/formats/schedule.md: operations start as early as
 *           they can). The least bound is looked at first, so the first complete state is the optimum.
 * Start     The best ordered, no-wait schedule (transfer.h) of all sets that may be offloaded and all combinations of
 *           options: an incumbent that the search has to beat.
 * Cost      Exponential. At most STAGES_MAX stages and COMBINATIONS_MAX combinations of options; at LABELS_MAX states the
 *           search gives up and the incumbent is the answer. This is the oracle of the tests of the others.
 */
#include <stdio.h>

#include "solve/offload/offload_plan.h"
#include "solve/offload/offload_search.h"

enum { COMBINATIONS_MAX = 64 };

static int32_t combinations(const cairn_chain *chain)
{
    int32_t product = 1;
    for (int32_t l = 1; l <= chain->stage_count && product <= COMBINATIONS_MAX; l++)
        product *= chain->stages[l - 1].option_count;
    return product;
}

static cairn_status exact_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    if (chain->stage_count > CRN_OFFLOAD_STAGES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "offload-exact takes at most %d stages, and the chain has %d",
                        CRN_OFFLOAD_STAGES_MAX, chain->stage_count);
    if (combinations(chain) > COMBINATIONS_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED,
                        "offload-exact takes at most %d combinations of options, and the chain has more",
                        COMBINATIONS_MAX);
    return CAIRN_OK;
}

/* The incumbent: every combination of options, every set of stages. */
typedef struct start_of {
    crn_offload_plan *plan; /* of the best */
    crn_offload_best best;
    bool best_goes[CRN_OFFLOAD_STAGES_MAX + 1];
    int64_t need_bytes; /* the least of all */
} start_of;

static cairn_status try_sets(start_of *start, crn_offload_plan *plan, int64_t budget_bytes, cairn_error *error)
{
    for (uint32_t set = 0; set < 1u << plan->n; set++) {
        bool goes[CRN_OFFLOAD_STAGES_MAX + 1] = {false}, may_go = true;
        for (int32_t l = 1; l <= plan->n; l++) {
            goes[l] = (set >> (l - 1) & 1) != 0;
            may_go &= !goes[l] || crn_offload_may_go(plan, l);
        }
        if (!may_go)
            continue;
        int64_t need_bytes = crn_offload_need(plan, goes);
        start->need_bytes = crn_min(start->need_bytes, need_bytes);
        if (need_bytes <= budget_bytes && need_bytes < INT64_MAX)
            CRN_TRY(crn_offload_try(plan, goes, budget_bytes, &start->best, error));
    }
    return CAIRN_OK;
}

static bool next_combination(const cairn_chain *chain, int32_t *option)
{
    for (int32_t l = 1; l <= chain->stage_count; l++) {
        if (++option[l] < chain->stages[l - 1].option_count)
            return true;
        option[l] = 0;
    }
    return false;
}

static cairn_status find_start(start_of *start, const crn_task *task, int64_t budget_bytes, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int32_t option[CRN_OFFLOAD_STAGES_MAX + 1] = {0};
    *start = (start_of){.best = {.makespan_ns = INT64_MAX}, .need_bytes = INT64_MAX};
    start->best.goes = start->best_goes;
    do {
        crn_offload_plan *plan;
        CRN_TRY(crn_offload_plan_new(task, option, &plan, error));
        cairn_status status = try_sets(start, plan, budget_bytes, error);
        crn_offload_plan *old = start->best.plan == plan ? start->plan : plan;
        start->plan = start->best.plan == plan ? plan : start->plan;
        crn_offload_plan_free(old);
        CRN_TRY(status);
    } while (next_combination(chain, option));
    return CAIRN_OK;
}

static cairn_status exact_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    crn_offload_search s = {0};
    start_of start;
    int32_t goal = -1;
    (void)session;
    cairn_status status = find_start(&start, task, -1, error);
    least->bytes = start.need_bytes;
    if (status == CAIRN_OK)
        status = crn_offload_search_begin(&s, task, INT64_MAX, true, start.need_bytes, error);
    if (status == CAIRN_OK)
        status = crn_offload_search_run(&s, &goal, error);
    if (status == CAIRN_OK && goal >= 0)
        least->bytes = s.labels[goal].bound;
    crn_offload_search_end(&s);
    crn_offload_plan_free(start.plan);
    return status;
}

/* A search that overflowed has found nothing (goal < 0), and there may be something. */
static cairn_status answer_with(const crn_offload_search *s, int32_t goal, const start_of *start, crn_answer *answer,
                                cairn_error *error)
{
    answer->optimal_in_class = !s->overflow && !answer->stopped_early;
    answer->cut_short = s->overflow && start->best.makespan_ns == INT64_MAX;
    if (answer->cut_short)
        snprintf(answer->reason, CAIRN_REASON_MAX, "none was found among the %d states that it may look at",
                 CRN_OFFLOAD_LABELS_MAX);
    if (goal < 0)
        return crn_offload_answer(&start->best, s->budget_bytes, answer, error);
    answer->found = true;
    crn_offload_explain(s->task, s->budget_bytes, answer);
    return crn_offload_search_emit(s, goal, answer->builder, error);
}

static cairn_status exact_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    crn_offload_search s = {0};
    start_of start;
    int32_t goal = -1;
    int64_t budget = crn_limit_of(budget_bytes);
    (void)session;
    cairn_status status = find_start(&start, task, budget, error);
    if (status == CAIRN_OK)
        status = crn_offload_search_begin(&s, task, budget, false, start.best.makespan_ns, error);
    if (status == CAIRN_OK)
        status = crn_offload_search_run(&s, &goal, error);
    answer->stopped_early =
        status == CAIRN_CANCELLED && start.best.makespan_ns < INT64_MAX; /* the start is an answer */
    if (status == CAIRN_OK || answer->stopped_early)
        status = answer_with(&s, goal, &start, answer, error);
    crn_offload_search_end(&s);
    crn_offload_plan_free(start.plan);
    return status;
}

static int64_t exact_memory(const crn_task *task)
{
    (void)task;
    return 2 * CRN_OFFLOAD_LABELS_MAX * (int64_t)(sizeof(crn_offload_label) + sizeof(crn_queue_entry)) +
           CRN_OFFLOAD_TABLE_SIZE * 4;
}

const crn_solver crn_offload_exact_solver = {
    .info = {.name = "offload-exact",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "offload",
             .summary = "the optimum of a small chain over all schedules that compute nothing again",
             .source = "branch and bound over lists of operations, with dominance",
             .cost = "exponential; at most 6 stages"},
    .accepts = exact_accepts,
    .memory = exact_memory,
    .least = exact_least,
    .solve = exact_solve,
};
