#include "solve/chain/chain_states_search.h"

#include <string.h>

#include "base/queue.h"

enum { POLL_EVERY = 1024 };

typedef struct state {
    crn_state is;
    int64_t estimate_ns; /* in all */
    int32_t parent;      /* -1 = the first */
} state;

typedef struct search {
    const crn_task *task;
    crn_chain_states model;
    state *states;
    size_t count, capacity;
    int32_t *slots; /* a hash table of states, at most half full; -1 = empty */
    size_t slot_count;
    crn_queue queue;
    cairn_allocator allocator;
    int32_t expanded; /* the state whose steps are taken */
    bool failed;      /* no memory */
} search;

/* ---- states ---- */

static size_t hash(crn_place at)
{
    uint64_t h = at * 0x9E3779B97F4A7C15u;
    return (size_t)(h ^ h >> 29);
}

/* The slot of a state: its own, or the empty one where it belongs. */
static int32_t *slot_of(const search *s, crn_place at)
{
    size_t mask = s->slot_count - 1, i = hash(at) & mask;
    while (s->slots[i] >= 0 && s->states[s->slots[i]].is.at != at)
        i = (i + 1) & mask;
    return &s->slots[i];
}

static bool grow_slots(search *s)
{
    size_t old = s->slot_count, count = old > 0 ? 2 * old : 256;
    int32_t *slots = crn_alloc(&s->allocator, count, sizeof(*slots));
    if (!slots)
        return false;
    memset(slots, -1, count * sizeof(*slots));
    crn_free(&s->allocator, s->slots, old, sizeof(*slots));
    s->slots = slots;
    s->slot_count = count;
    for (size_t i = 0; i < s->count; i++)
        *slot_of(s, s->states[i].is.at) = (int32_t)i;
    return true;
}

/* Room for one more state, and for it in the queue. */
static bool make_room(search *s)
{
    if (s->count == s->capacity) {
        state *grown = crn_grow(&s->allocator, s->states, &s->capacity, s->count + 1, sizeof(*grown));
        if (!grown)
            return false;
        s->states = grown;
    }
    return (2 * s->count < s->slot_count || grow_slots(s)) && crn_queue_make_room(&s->queue);
}

static void reach(void *context, const crn_state *to)
{
    search *s = context;
    s->failed = s->failed || !make_room(s);
    if (s->failed)
        return;
    int32_t *slot = slot_of(s, to->at);
    if (*slot >= 0 && s->states[*slot].is.ns <= to->ns)
        return;
    int64_t estimate_ns = crn_add_saturating(to->ns, crn_chain_states_remaining_ns(&s->model, to->at));
    if (estimate_ns == INT64_MAX)
        return;
    if (*slot < 0)
        *slot = (int32_t)s->count++;
    s->states[*slot] = (state){*to, estimate_ns, s->expanded};
    crn_queue_push(&s->queue, (crn_queue_entry){estimate_ns, crn_chain_states_next_backward(to->at), *slot});
}

/* ---- the search ---- */

/* The number of the last state of a fastest schedule; -1 where the search was cut short or there is none. */
static int32_t run(search *s, crn_states_found *found)
{
    crn_state from;
    s->expanded = -1;
    if (crn_chain_states_first(&s->model, &from))
        reach(s, &from);
    for (int64_t work = 0; s->queue.count > 0 && !s->failed; work++) {
        crn_queue_entry top = crn_queue_pop(&s->queue);
        const state *at = &s->states[top.item];
        if (top.bound > at->estimate_ns)
            continue; /* it was reached in less time since */
        found->bound_ns = crn_max(found->bound_ns, top.bound);
        from = at->is; /* reaching others may move it */
        if (crn_chain_states_next_backward(from.at) == 0)
            return top.item;
        found->stopped = work % POLL_EVERY == 0 && crn_should_stop(s->task, NULL);
        found->cut_short = work >= CRN_STATES_WORK;
        if (found->stopped || found->cut_short)
            return -1;
        s->expanded = top.item;
        crn_chain_states_expand(&s->model, &from, reach, s);
    }
    return -1;
}

/* The steps from the first state to one of them, in order: `next` becomes what follows a state. */
static cairn_status emit(const search *s, int32_t last, int32_t *next, cairn_builder *builder, cairn_error *error)
{
    int32_t first = last;
    next[last] = -1;
    for (; s->states[first].parent >= 0; first = s->states[first].parent)
        next[s->states[first].parent] = first;
    for (int32_t i = first; next[i] >= 0; i = next[i])
        CRN_TRY(crn_chain_states_add_step(&s->model, s->states[i].is.at, s->states[next[i]].is.at, builder, error));
    return CAIRN_OK;
}

static cairn_status search_states(const crn_task *task, int64_t budget_bytes, crn_states_found *found,
                                  cairn_builder *builder, cairn_error *error)
{
    search s = {.task = task, .allocator = crn_allocator(task->env)};
    cairn_status status = CAIRN_OK;
    *found = (crn_states_found){.bound_ns = found->bound_ns};
    crn_queue_init(&s.queue, s.allocator);
    crn_chain_states_init(&s.model, task->problem, budget_bytes);
    int32_t last = run(&s, found);
    found->found = last >= 0;
    if (s.failed)
        status = crn_no_memory(error);
    else if (found->found && builder) {
        int32_t *next = crn_alloc(&s.allocator, s.count, sizeof(*next));
        status = next ? emit(&s, last, next, builder, error) : crn_no_memory(error);
        crn_free(&s.allocator, next, s.count, sizeof(*next));
    }
    crn_queue_clear(&s.queue);
    crn_free(&s.allocator, s.states, s.capacity, sizeof(*s.states));
    crn_free(&s.allocator, s.slots, s.slot_count, sizeof(*s.slots));
    return status;
}

/* ---- what is kept ---- */

typedef struct kept_found {
    int64_t budget_bytes;
    crn_states_found found;
} kept_found;

/* Whether the search about a budget would find what it has found: the clock did not stop it, and no schedule is asked for. */
static bool says_all(const crn_task *task, const kept_found *last, int64_t budget_bytes, bool asks_schedule)
{
    if (!last || last->budget_bytes != budget_bytes || (last->found.found && asks_schedule))
        return false;
    return !last->found.stopped || crn_task_is_past(task);
}

cairn_status crn_chain_states_search(const crn_task *task, void **kept, int64_t budget_bytes, crn_states_found *found,
                                     cairn_builder *builder, cairn_error *error)
{
    const crn_task alone = crn_task_without_machine(task);
    const cairn_allocator allocator = crn_allocator(task->env);
    kept_found *last = *kept;
    int64_t least_bytes;
    *found = last && last->budget_bytes == budget_bytes ? last->found : (crn_states_found){.bound_ns = 0};
    if (says_all(task, last, budget_bytes, builder != NULL))
        return CAIRN_OK;
    CRN_TRY(crn_least_lower(&alone, &least_bytes, error));
    if (budget_bytes < least_bytes)
        return CAIRN_OK;
    CRN_TRY(search_states(task, budget_bytes, found, builder, error));
    last = last ? last : crn_alloc(&allocator, 1, sizeof(*last));
    if (!last)
        return crn_no_memory(error);
    *last = (kept_found){budget_bytes, *found};
    *kept = last;
    return CAIRN_OK;
}

void crn_chain_states_forget(const crn_task *task, void *kept)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, kept, 1, sizeof(kept_found));
}
