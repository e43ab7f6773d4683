#include "solve/offload/offload_least.h"

#include <stdlib.h>
#include <string.h>

enum { STATES = 512, CHOICES = CRN_OFFLOAD_PROFILES + 1, POLL_EVERY = 64 };

/* ---- options with which no operation needs much ---- */

typedef struct smallest {
    const cairn_chain *chain;
    int64_t (*need)[CAIRN_STAGE_OPTIONS_MAX]; /* of a stage and option: least greatest need of the stages so far */
    uint8_t (*from)[CAIRN_STAGE_OPTIONS_MAX];
} smallest;

/* What stage l needs beside the input and its gradient, with option k after a saved set of so many bytes. */
static int64_t stage_need(const cairn_chain *chain, int32_t l, int32_t k, int64_t before_bytes, int64_t grads_bytes)
{
    const cairn_stage *stage = &chain->stages[l - 1];
    const cairn_stage_option *option = &stage->options[k];
    int64_t made = l > 1 ? chain->stages[l - 2].grad_bytes : chain->input_grad_bytes;
    int64_t forward = chain->stages[chain->stage_count - 1].grad_bytes + crn_max(0, option->forward_workspace_bytes);
    int64_t backward = stage->grad_bytes + grads_bytes +
                       crn_max(0, made + stage->weight_grad_bytes + option->backward_workspace_bytes);
    return before_bytes + option->saved_bytes + crn_max(forward, backward);
}

static void reach(const smallest *s, int32_t l, int32_t k, int64_t grads_bytes)
{
    const cairn_stage *before = l > 1 ? &s->chain->stages[l - 2] : NULL;
    s->need[l][k] = INT64_MAX;
    s->from[l][k] = 0;
    for (int32_t j = 0; j < (before ? before->option_count : 1); j++) {
        int64_t bytes = before ? before->options[j].saved_bytes : 0;
        int64_t need = crn_max(before ? s->need[l - 1][j] : 0, stage_need(s->chain, l, k, bytes, grads_bytes));
        if (need < s->need[l][k]) {
            s->need[l][k] = need;
            s->from[l][k] = (uint8_t)j;
        }
    }
}

static cairn_status choose_smallest(const crn_task *task, int32_t *option, cairn_error *error)
{
    smallest s = {.chain = cairn_problem_chain(task->problem)};
    cairn_allocator allocator = crn_allocator(task->env);
    size_t count = (size_t)s.chain->stage_count + 1;
    int64_t grads_bytes = 0;
    int32_t n = s.chain->stage_count, best = 0;
    s.need = crn_alloc(&allocator, count, sizeof(*s.need));
    s.from = crn_alloc(&allocator, count, sizeof(*s.from));
    cairn_status status = s.need && s.from ? CAIRN_OK : crn_no_memory(error);
    for (int32_t l = 1; l <= n; l++)
        grads_bytes += s.chain->stages[l - 1].weight_grad_bytes;
    for (int32_t l = 1; status == CAIRN_OK && l <= n; l++) {
        grads_bytes -= s.chain->stages[l - 1].weight_grad_bytes;
        for (int32_t k = 0; k < s.chain->stages[l - 1].option_count; k++)
            reach(&s, l, k, grads_bytes);
    }
    for (int32_t k = 1; status == CAIRN_OK && k < s.chain->stages[n - 1].option_count; k++)
        best = s.need[n][k] < s.need[n][best] ? k : best;
    for (int32_t l = n; status == CAIRN_OK && l >= 1; l--) {
        option[l] = best;
        best = s.from[l][best];
    }
    crn_free(&allocator, s.need, count, sizeof(*s.need));
    crn_free(&allocator, s.from, count, sizeof(*s.from));
    return status;
}

/* ---- what goes when not everything can ---- */

typedef struct packing {
    int64_t host_bytes, need_bytes;
    int32_t parent;
    bool goes;
} packing;

static int compare_packings(const void *left, const void *right)
{
    const packing *a = left, *b = right;
    if (a->host_bytes != b->host_bytes)
        return a->host_bytes < b->host_bytes ? -1 : 1;
    if (a->need_bytes != b->need_bytes)
        return a->need_bytes < b->need_bytes ? -1 : 1;
    return (a->parent > b->parent) - (a->parent < b->parent);
}

/* Sorted by host bytes; of those left over, evenly spaced ones. */
static int32_t prune(packing *list, int32_t count)
{
    int32_t kept = 0;
    qsort(list, (size_t)count, sizeof(*list), compare_packings);
    for (int32_t i = 0; i < count; i++)
        if (kept == 0 || list[i].need_bytes < list[kept - 1].need_bytes)
            list[kept++] = list[i];
    for (int32_t i = 0; kept > STATES && i < STATES; i++)
        list[i] = list[(int64_t)i * (kept - 1) / (STATES - 1)];
    return (int32_t)crn_min(kept, STATES);
}

/* What the two operations need that come after A[l] may have gone: forward l + 2 and backward l + 2. */
static int64_t need_after(const crn_offload_plan *plan, int32_t l, int64_t away_bytes)
{
    int32_t forward = l + 1, backward = 2 * plan->n - l - 2;
    const crn_event *events = plan->transfer->events;
    return crn_max(events[forward].level_bytes, events[backward].level_bytes) - away_bytes;
}

/* The first two stages' operations, and all others with what goes before them. */
static int64_t need_before(const crn_offload_plan *plan)
{
    int64_t most = plan->transfer->start_bytes;
    for (int32_t l = 1; l <= 2 && l <= plan->n; l++)
        most = crn_max(most, crn_max(plan->transfer->events[l - 1].level_bytes,
                                     plan->transfer->events[2 * plan->n - l].level_bytes));
    return most;
}

/* What becomes of the states after stage l - 1 when A[l] stays or goes; returns how many there are. */
static int32_t pack_stage(const crn_offload_plan *plan, int32_t l, const packing *from, int32_t count, packing *to)
{
    int32_t made = 0;
    for (int32_t i = 0; i < count; i++)
        for (int go = 0; go <= crn_offload_may_go(plan, l); go++) {
            int64_t host_bytes = from[i].host_bytes + (go ? crn_offload_bytes(plan, l) : 0);
            int64_t need_bytes = crn_max(from[i].need_bytes, need_after(plan, l, host_bytes));
            if (host_bytes <= plan->task.machine->host_bytes)
                to[made++] = (packing){host_bytes, need_bytes, i, go};
        }
    return prune(to, made);
}

static cairn_status pack(const crn_offload_plan *plan, bool *goes, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(plan->task.env);
    size_t room = ((size_t)plan->n + 1) * 2 * STATES;
    packing *all = crn_alloc(&allocator, room, sizeof(*all));
    int32_t count = 1;
    if (!all)
        return crn_no_memory(error);
    all[0] = (packing){0, need_before(plan), -1, false};
    for (int32_t l = 1; l <= plan->n - 2; l++) {
        if (l % POLL_EVERY == 0 && crn_should_stop(&plan->task, NULL)) {
            crn_free(&allocator, all, room, sizeof(*all));
            return crn_fail(error, CAIRN_CANCELLED, "stopped while finding the least memory");
        }
        packing *from = all + (ptrdiff_t)(l - 1) * 2 * STATES;
        count = pack_stage(plan, l, from, count, from + (ptrdiff_t)2 * STATES);
    }
    memset(goes, 0, (size_t)plan->n + 1);
    int32_t at = count - 1; /* the most on the host, the least need */
    for (int32_t l = plan->n - 2; l >= 1; l--) {
        const packing *taken = &all[(ptrdiff_t)l * 2 * STATES + at];
        goes[l] = taken->goes;
        at = taken->parent;
    }
    crn_free(&allocator, all, room, sizeof(*all));
    return CAIRN_OK;
}

/* ---- the best of all choices of options ---- */

static cairn_status find_set(const crn_offload_plan *plan, bool *goes, cairn_error *error)
{
    memset(goes, 0, (size_t)plan->n + 1);
    for (int32_t l = 1; l <= plan->n; l++)
        goes[l] = crn_offload_may_go(plan, l);
    if (crn_offload_need(plan, goes) < INT64_MAX)
        return CAIRN_OK;
    return pack(plan, goes, error);
}

static cairn_status fill(crn_offload_least *least, crn_offload_plan *plans[CHOICES], const crn_task *task, bool *goes,
                         int32_t *option, cairn_error *error)
{
    size_t count = (size_t)cairn_problem_chain(task->problem)->stage_count + 1;
    CRN_TRY(crn_offload_profiles(task, plans, error));
    CRN_TRY(choose_smallest(task, option, error));
    CRN_TRY(crn_offload_plan_new(task, option, &plans[CRN_OFFLOAD_PROFILES], error));
    least->need_bytes = INT64_MAX;
    for (int i = 0; i < CHOICES; i++) {
        if (!plans[i])
            continue;
        cairn_status status = find_set(plans[i], goes, error);
        if (status == CAIRN_CANCELLED && least->plan)
            return CAIRN_OK; /* what is known will do */
        CRN_TRY(status);
        int64_t need_bytes = crn_offload_need(plans[i], goes);
        if (need_bytes >= least->need_bytes)
            continue;
        least->need_bytes = need_bytes;
        least->plan = plans[i];
        memcpy(least->goes, goes, count);
    }
    return CAIRN_OK;
}

cairn_status crn_offload_least_find(crn_offload_least *least, const crn_task *task, cairn_error *error)
{
    crn_offload_plan *plans[CHOICES] = {NULL};
    size_t count = (size_t)cairn_problem_chain(task->problem)->stage_count + 1;
    *least = (crn_offload_least){0};
    crn_arena_init(&least->arena, crn_allocator(task->env));
    bool *goes = crn_arena_alloc(&least->arena, count, sizeof(*goes));
    int32_t *option = crn_arena_alloc_zero(&least->arena, count, sizeof(*option));
    least->goes = crn_arena_alloc_zero(&least->arena, count, sizeof(*least->goes));
    bool fits = goes && option && least->goes;
    cairn_status status = fits ? fill(least, plans, task, goes, option, error) : crn_no_memory(error);
    for (int i = 0; i < CHOICES; i++)
        if (plans[i] != least->plan)
            crn_offload_plan_free(plans[i]);
    return status;
}

void crn_offload_least_clear(crn_offload_least *least)
{
    crn_offload_plan_free(least->plan);
    least->plan = NULL;
    crn_arena_clear(&least->arena);
}

int64_t crn_offload_least_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    int64_t choosing = n * CAIRN_STAGE_OPTIONS_MAX * 9, packing_bytes = 2 * n * STATES * (int64_t)sizeof(packing);
    return CHOICES * crn_offload_plan_memory(task) + crn_max(choosing, packing_bytes) + 65536;
}
