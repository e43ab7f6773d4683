/*
 * offload-greedy: the first saved sets of a chain go to the host, as few as fit.
 *
 * Problem   A chain and its link to host memory; every stage saves once and nothing is computed again. Least time.
 * Rule      Where transfers may be split at any byte, sending the first k values, as little as possible, is optimal: what
 *           was made first waits longest, and to send less never costs time. GREEDY rounds up to whole values (Beaumont,
 *           Eyraud-Dubois, Shilova: Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training, 2019,
 *           section 4, theorem 2). The schedule is the no-wait, ordered one of transfer.h.
 * Options   Each stage has its fastest one, its smallest or its first: three choices are tried.
 * Optimal   Not by construction: values are whole, transfers take latency, the host may be too small for the first k.
 * Cost      O(n log n).
 */
#include <string.h>

#include "solve/offload/offload_plan.h"

typedef struct greedy {
    crn_offload_plan *plans[CRN_OFFLOAD_PROFILES];
    int32_t most[CRN_OFFLOAD_PROFILES]; /* how many stages the host takes */
    int64_t least_bytes;
    bool *goes, *best;
    crn_arena arena;
} greedy;

static void greedy_close(const crn_task *task, void *session)
{
    greedy *s = session;
    (void)task;
    crn_offload_profiles_free(s->plans);
    crn_arena_clear(&s->arena);
}

static int64_t need_of(const greedy *s, const crn_offload_plan *plan, int32_t k)
{
    for (int32_t l = 0; l <= plan->n; l++)
        s->goes[l] = l >= 1 && l <= k;
    return crn_offload_need(plan, s->goes);
}

/* The least k from which on the budget suffices, most + 1 where none does: more that goes never needs more memory. */
static int32_t fewest(const greedy *s, int profile, int64_t budget_bytes)
{
    int32_t low = 0, high = s->most[profile] + 1;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (need_of(s, s->plans[profile], middle) <= budget_bytes)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int32_t most_that_fit(const crn_offload_plan *plan)
{
    int64_t left = plan->task.machine->host_bytes;
    int32_t l = 0;
    while (l < plan->n && (!crn_offload_may_go(plan, l + 1) || crn_offload_bytes(plan, l + 1) <= left)) {
        l++;
        left -= crn_offload_may_go(plan, l) ? crn_offload_bytes(plan, l) : 0;
    }
    return l;
}

static cairn_status greedy_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    size_t count = (size_t)cairn_problem_chain(task->problem)->stage_count + 1;
    crn_arena_init(&arena, crn_allocator(task->env));
    greedy *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    s->least_bytes = INT64_MAX;
    s->goes = crn_arena_alloc_zero(&s->arena, count, sizeof(bool));
    s->best = crn_arena_alloc_zero(&s->arena, count, sizeof(bool));
    if (!s->goes || !s->best)
        return crn_no_memory(error);
    CRN_TRY(crn_offload_profiles(task, s->plans, error));
    for (int i = 0; i < CRN_OFFLOAD_PROFILES; i++)
        if (s->plans[i]) {
            s->most[i] = most_that_fit(s->plans[i]);
            s->least_bytes = crn_min(s->least_bytes, need_of(s, s->plans[i], s->most[i]));
        }
    return CAIRN_OK;
}

static cairn_status greedy_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const greedy *s = session;
    (void)task;
    (void)error;
    least->bytes = s->least_bytes;
    return CAIRN_OK;
}

static cairn_status greedy_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    greedy *s = session;
    int64_t budget = crn_limit_of(budget_bytes);
    crn_offload_best best = {.makespan_ns = INT64_MAX, .goes = s->best};
    (void)task;
    for (int i = 0; i < CRN_OFFLOAD_PROFILES; i++) {
        if (!s->plans[i])
            continue;
        int32_t k = fewest(s, i, budget);
        if (k > s->most[i])
            continue;
        need_of(s, s->plans[i], k); /* sets goes */
        CRN_TRY(crn_offload_try(s->plans[i], s->goes, budget, &best, error));
    }
    return crn_offload_answer(&best, budget, answer, error);
}

static int64_t greedy_memory(const crn_task *task)
{
    return CRN_OFFLOAD_PROFILES * crn_offload_plan_memory(task);
}

const crn_solver crn_offload_greedy_solver = {
    .info = {.name = "offload-greedy",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "",
             .summary = "the first saved sets are offloaded, as few as fit",
             .source = "Beaumont, Eyraud-Dubois, Shilova 2019, section 4",
             .cost = "O(n log n)"},
    .memory = greedy_memory,
    .open = greedy_open,
    .close = greedy_close,
    .least = greedy_least,
    .solve = greedy_solve,
};
