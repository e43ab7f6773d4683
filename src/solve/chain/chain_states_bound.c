/*
 * A lower bound on the makespan of every schedule of a short chain within a budget, transfers excluded: by A* over the
 * states of the simulator's model (chain_states.h). Where the search ends, the bound is the optimum; where its work is
 * used up, it is the least estimate of the states that are left.
 */
#include <string.h>

#include "base/queue.h"
#include "solve/chain/chain_states.h"

enum { WORK = 200000, POLL_EVERY = 1024 };

typedef struct state {
    crn_state is;
    int64_t estimate_ns; /* in all */
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
    bool failed;  /* no memory */
    bool stopped; /* by the clock or by poll */
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
    int64_t estimate_ns = crn_add_saturating(to->ns, crn_chain_states_left_ns(&s->model, to->at));
    if (estimate_ns == INT64_MAX)
        return;
    if (*slot < 0)
        *slot = (int32_t)s->count++;
    s->states[*slot] = (state){*to, estimate_ns};
    crn_queue_push(&s->queue, (crn_queue_entry){estimate_ns, crn_chain_states_next_backward(to->at), *slot});
}

/* ---- the search ---- */

/* Raises the bound to the least estimate that is left, as long as there is one and work. */
static void run(search *s, int64_t *bound_ns)
{
    crn_state from;
    if (crn_chain_states_first(&s->model, &from))
        reach(s, &from);
    for (int64_t work = 0; s->queue.count > 0 && !s->failed && work < WORK; work++) {
        crn_queue_entry top = crn_queue_pop(&s->queue);
        const state *at = &s->states[top.item];
        if (top.bound > at->estimate_ns)
            continue; /* it was reached in less time since */
        *bound_ns = crn_max(*bound_ns, top.bound);
        s->stopped = work % POLL_EVERY == 0 && crn_should_stop(s->task, NULL);
        from = at->is; /* reaching others may move it */
        if (crn_chain_states_next_backward(from.at) == 0 || s->stopped)
            return;
        crn_chain_states_leave(&s->model, &from, reach, s);
    }
}

/* The latest budget and its bound, kept for the next call; with more time, a search that was stopped gives more. */
typedef struct found {
    int64_t budget_bytes, bound_ns;
    bool stopped;
} found;

static cairn_status find_bound(const crn_task *task, int64_t budget_bytes, found *bound, cairn_error *error)
{
    search s = {.task = task, .allocator = crn_allocator(task->env)};
    crn_queue_init(&s.queue, s.allocator);
    crn_chain_states_init(&s.model, task->problem, budget_bytes);
    run(&s, &bound->bound_ns);
    bound->stopped = s.stopped;
    crn_queue_clear(&s.queue);
    crn_free(&s.allocator, s.states, s.capacity, sizeof(*s.states));
    crn_free(&s.allocator, s.slots, s.slot_count, sizeof(*s.slots));
    return s.failed ? crn_no_memory(error) : CAIRN_OK;
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    found *last = *kept;
    if (!crn_chain_states_take(cairn_problem_chain(task->problem)) || task->machine || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    if (!last || last->budget_bytes != budget_bytes || (last->stopped && !crn_task_is_past(task))) {
        found bound = {.budget_bytes = budget_bytes};
        if (last && last->budget_bytes == budget_bytes)
            bound.bound_ns = last->bound_ns;
        CRN_TRY(find_bound(task, budget_bytes, &bound, error));
        last = last ? last : crn_alloc(&allocator, 1, sizeof(*last));
        if (!last)
            return crn_no_memory(error);
        *last = bound;
        *kept = last;
    }
    *bound_ns = crn_max(*bound_ns, last->bound_ns);
    return CAIRN_OK;
}

static void forget(const crn_task *task, void *kept)
{
    const cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, kept, 1, sizeof(found));
}

const crn_bound_method crn_chain_states_method = {.name = "states", .raise_makespan = raise_makespan, .forget = forget};
