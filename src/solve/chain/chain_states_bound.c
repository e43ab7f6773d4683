/*
 * A lower bound on the makespan of every schedule of a short chain within a budget, transfers excluded: by A* over the
 * states of the simulator's model. Where the search ends, the bound is the optimum; where its work is used up, it is
 * the least estimate of the states that are left.
 *
 * A state is the next backward c, and the outputs and saved sets that are resident. Steps that help no schedule are
 * left out. A value is dropped only where another operation does not fit, or where its stage can be saved with another
 * option. An output is computed beside its own saved set only where the next stage's saved set needs it once that is
 * dropped.
 *
 * The estimate of a state is a lower bound on the time that is left. Every stage l <= c takes at least the least of
 * uF_k[l] + uB_k[l], or uB_k[l] if that is less and A_k[l] is resident. If neither a[c-1] nor A[c-1] is resident, the
 * stages behind the last resident value run forward before backward c. Those of them whose saved set is not resident
 * when backward c runs take a second forward. The memory beside that backward limits how many saved sets can be
 * resident: a knapsack, whose fractional optimum bounds the forwards that are avoided.
 */
#include <string.h>

#include "base/queue.h"
#include "solve/chain/chain_model.h"

enum { STAGES_MAX = 12, OPTIONS_MAX = 3, WORK = 200000, POLL_EVERY = 1024 };

/* Bit l of output: a[l] is there. Two bits of saved for each stage: 0 = none, else option + 1. */
typedef struct place {
    uint64_t saved;
    uint32_t output;
    int32_t grad;
} place;

typedef struct state {
    place at;
    int64_t ns, estimate_ns; /* so far, and at least in all */
    int64_t bytes;           /* resident beside the gradients */
} state;

typedef struct stage_times {
    int64_t once_ns;        /* least uF_k + uB_k */
    int64_t again_ns;       /* least forward */
    int64_t kept_bytes;     /* least saved bytes */
    int64_t backward_bytes; /* least of what its backward takes beside the gradients that are there */
} stage_times;

typedef struct search {
    const crn_task *task;
    const cairn_chain *chain;
    int32_t n;
    int64_t budget_bytes;
    int64_t gradients_bytes[STAGES_MAX + 1]; /* what is always there, and the gradients while d[c] is the one at hand */
    stage_times times[STAGES_MAX + 1];
    int32_t by_price[STAGES_MAX]; /* stages, the most time for its bytes first */
    state *states;
    size_t count, capacity;
    int32_t *slots; /* a hash table of states, at most half full; -1 = empty */
    size_t slot_count;
    crn_queue queue;
    cairn_allocator allocator;
    bool failed;  /* no memory */
    bool stopped; /* by the clock or by poll */
} search;

static int32_t saved_of(const place *at, int32_t l)
{
    return (int32_t)(at->saved >> 2 * l & 3);
}

static bool has_output(const place *at, int32_t l)
{
    return at->output >> l & 1;
}

static bool has_input(const place *at, int32_t l)
{
    return l == 1 || has_output(at, l - 1) || saved_of(at, l - 1);
}

static const cairn_stage *stage_at(const search *s, int32_t l)
{
    return &s->chain->stages[l - 1];
}

static int64_t grad_bytes(const search *s, int32_t l)
{
    return l > 0 ? stage_at(s, l)->grad_bytes : s->chain->input_grad_bytes;
}

static int64_t saved_bytes(const search *s, const place *at, int32_t l)
{
    int32_t k = saved_of(at, l);
    return k ? stage_at(s, l)->options[k - 1].saved_bytes : 0;
}

/* ---- the estimate ---- */

/* The most time that saving some of the stages first..c-1 spares, within so many bytes. */
static int64_t spared_ns(const search *s, int32_t first, int32_t c, int64_t room_bytes)
{
    int64_t spared = 0;
    for (int32_t i = 0; i < s->n; i++) {
        int32_t l = s->by_price[i];
        if (l < first || l >= c)
            continue;
        const stage_times *t = &s->times[l];
        if (t->kept_bytes > room_bytes)
            return spared + (room_bytes > 0
                                 ? (int64_t)((crn_wide)t->again_ns * (crn_wide)room_bytes / (crn_wide)t->kept_bytes) + 1
                                 : 0);
        room_bytes -= t->kept_bytes;
        spared += t->again_ns;
    }
    return spared;
}

static int64_t left_ns(const search *s, const place *at)
{
    int32_t c = at->grad, first = c;
    int64_t ns = 0, forwards = 0;
    for (int32_t l = 1; l <= c; l++) {
        int32_t k = saved_of(at, l);
        ns += k ? crn_min(stage_at(s, l)->options[k - 1].backward_ns, s->times[l].once_ns) : s->times[l].once_ns;
    }
    while (first > 1 && !has_output(at, first - 1) && !saved_of(at, first - 1))
        forwards += s->times[--first].again_ns;
    if (first == c)
        return ns;
    int64_t room = s->budget_bytes - s->gradients_bytes[c] - s->times[c].backward_bytes;
    return ns + forwards - crn_min(forwards, spared_ns(s, first, c, room));
}

/* ---- states ---- */

static uint64_t hash(const place *at)
{
    uint64_t h = (at->saved ^ (uint64_t)at->output << 34 ^ (uint64_t)at->grad << 58) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

static bool is_same(const place *x, const place *y)
{
    return x->saved == y->saved && x->output == y->output && x->grad == y->grad;
}

/* The slot of a state: its own, or the empty one where it belongs. */
static int32_t *slot_of(const search *s, const place *at)
{
    size_t mask = s->slot_count - 1, i = (size_t)hash(at) & mask;
    while (s->slots[i] >= 0 && !is_same(&s->states[s->slots[i]].at, at))
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
        *slot_of(s, &s->states[i].at) = (int32_t)i;
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

static void reach(search *s, const place *to, int64_t ns, int64_t bytes)
{
    s->failed = s->failed || !make_room(s);
    if (s->failed)
        return;
    int32_t *slot = slot_of(s, to);
    if (*slot >= 0 && s->states[*slot].ns <= ns)
        return;
    if (*slot < 0)
        *slot = (int32_t)s->count++;
    int64_t estimate_ns = crn_add_saturating(ns, left_ns(s, to));
    s->states[*slot] = (state){*to, ns, estimate_ns, bytes};
    crn_queue_push(&s->queue, (crn_queue_entry){estimate_ns, to->grad, *slot});
}

/* ---- steps ---- */

typedef struct leaving {
    search *s;
    state from;
    bool is_tight; /* something did not fit */
} leaving;

/* To a state with so many bytes more beside the gradients; during the step there are during_bytes more than before. */
static void take_step(leaving *from, const place *to, int64_t ns, int64_t more_bytes, int64_t during_bytes)
{
    search *s = from->s;
    int64_t bytes = from->from.bytes + more_bytes, before = from->from.bytes + s->gradients_bytes[from->from.at.grad];
    if (crn_max(bytes + s->gradients_bytes[to->grad], before + during_bytes) > s->budget_bytes)
        from->is_tight = true;
    else
        reach(s, to, crn_add_saturating(from->from.ns, ns), bytes);
}

static void forwards(leaving *from, int32_t l)
{
    const place *at = &from->from.at;
    const cairn_stage *stage = stage_at(from->s, l);
    place to = *at;
    if (!has_input(at, l))
        return;
    for (int32_t k = 0; !saved_of(at, l) && k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        to.saved = at->saved | (uint64_t)(k + 1) << 2 * l;
        take_step(from, &to, option->forward_ns, option->saved_bytes,
                  option->saved_bytes + option->forward_workspace_bytes);
    }
    if (l >= at->grad || stage->no_recompute || has_output(at, l) || (saved_of(at, l) && !saved_of(at, l + 1)))
        return;
    int64_t during = stage->output_bytes + stage->forward_only_workspace_bytes;
    to = *at;
    to.output |= 1U << l;
    take_step(from, &to, stage->forward_only_ns, stage->output_bytes, during);
    if (l == 1 || !has_output(at, l - 1) || stage->forward_only_workspace_bytes >= 0)
        return;
    to.output &= ~(1U << (l - 1)); /* forward_drop, where it takes less than computing and dropping */
    take_step(from, &to, stage->forward_only_ns, stage->output_bytes - stage_at(from->s, l - 1)->output_bytes, during);
}

/* Whether a value of stage l can be dropped: the saved set of stage l + 1 needs a[l] or A[l]. */
static bool may_go(const place *at, int32_t l, bool other_is_there)
{
    return other_is_there || !saved_of(at, l + 1);
}

static void drops(leaving *from, int32_t l)
{
    const place *at = &from->from.at;
    place to = *at;
    int32_t k = saved_of(at, l);
    if (has_output(at, l) && may_go(at, l, k)) {
        to.output &= ~(1U << l);
        take_step(from, &to, 0, -stage_at(from->s, l)->output_bytes, 0);
        to = *at;
    }
    if (k && !stage_at(from->s, l)->no_recompute && may_go(at, l, has_output(at, l))) {
        to.saved &= ~((uint64_t)3 << 2 * l);
        take_step(from, &to, 0, -saved_bytes(from->s, at, l), 0);
    }
}

static void backward(leaving *from)
{
    const place *at = &from->from.at;
    int32_t c = at->grad, k = saved_of(at, c);
    const cairn_stage *stage = stage_at(from->s, c);
    place to = *at;
    if (!k || !has_input(at, c))
        return;
    const cairn_stage_option *option = &stage->options[k - 1];
    int64_t less = option->saved_bytes;
    if (c > 1 && has_output(at, c - 1))
        less += stage_at(from->s, c - 1)->output_bytes;
    to.grad = c - 1;
    to.saved &= ~((uint64_t)3 << 2 * c);
    to.output &= ~(1U << (c - 1));
    take_step(from, &to, option->backward_ns, -less,
              grad_bytes(from->s, c - 1) + stage->weight_grad_bytes + option->backward_workspace_bytes);
}

static void leave(search *s, int32_t item)
{
    leaving from = {.s = s, .from = s->states[item]};
    for (int32_t l = 1; l <= from.from.at.grad; l++)
        forwards(&from, l);
    backward(&from);
    for (int32_t l = 1; l <= from.from.at.grad; l++)
        if (from.is_tight || stage_at(s, l)->option_count > 1)
            drops(&from, l);
}

/* ---- the search ---- */

/* Whether x spares no less time for its bytes than y. What takes no bytes comes first, even if it spares no time. */
static bool is_no_dearer(const stage_times *x, const stage_times *y)
{
    if (x->kept_bytes == 0 || y->kept_bytes == 0)
        return x->kept_bytes == 0;
    return (crn_wide)x->again_ns * (crn_wide)y->kept_bytes >= (crn_wide)y->again_ns * (crn_wide)x->kept_bytes;
}

/* Puts stage l where it belongs among those before it. */
static void sort_in(search *s, int32_t l)
{
    int32_t i = l - 1;
    for (; i > 0 && !is_no_dearer(&s->times[s->by_price[i - 1]], &s->times[l]); i--)
        s->by_price[i] = s->by_price[i - 1];
    s->by_price[i] = l;
}

static void fill_stage(search *s, int32_t l)
{
    const cairn_stage *stage = stage_at(s, l);
    stage_times *t = &s->times[l];
    int64_t result = grad_bytes(s, l - 1) + stage->weight_grad_bytes;
    *t = (stage_times){INT64_MAX, stage->forward_only_ns, INT64_MAX, INT64_MAX};
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t backward = option->saved_bytes + crn_max(0, result + option->backward_workspace_bytes);
        t->once_ns = crn_min(t->once_ns, crn_add_saturating(option->forward_ns, option->backward_ns));
        t->again_ns = crn_min(t->again_ns, option->forward_ns);
        t->kept_bytes = crn_min(t->kept_bytes, option->saved_bytes);
        t->backward_bytes = crn_min(t->backward_bytes, backward);
    }
}

static void fill(search *s)
{
    int64_t weights = cairn_problem_info_of(s->task->problem)->fixed_bytes + s->chain->input_bytes;
    for (int32_t c = s->n; c >= 0; c--) {
        s->gradients_bytes[c] = weights + grad_bytes(s, c);
        weights += c > 0 ? stage_at(s, c)->weight_grad_bytes : 0;
    }
    for (int32_t l = 1; l <= s->n; l++) {
        fill_stage(s, l);
        sort_in(s, l);
    }
}

/* Raises the bound to the least estimate that is left, as long as there is one and work. */
static void run(search *s, int64_t *bound_ns)
{
    place start = {.grad = s->n};
    if (s->gradients_bytes[s->n] <= s->budget_bytes)
        reach(s, &start, 0, 0);
    for (int64_t work = 0; s->queue.count > 0 && !s->failed && work < WORK; work++) {
        crn_queue_entry top = crn_queue_pop(&s->queue);
        const state *at = &s->states[top.item];
        if (top.bound > at->estimate_ns)
            continue; /* it was reached in less time since */
        *bound_ns = crn_max(*bound_ns, top.bound);
        s->stopped = work % POLL_EVERY == 0 && crn_should_stop(s->task, NULL);
        if (at->at.grad == 0 || s->stopped)
            return;
        leave(s, top.item);
    }
}

static bool takes(const cairn_chain *chain)
{
    bool fits = chain && chain->stage_count <= STAGES_MAX;
    for (int32_t l = 1; fits && l <= chain->stage_count; l++)
        fits = chain->stages[l - 1].option_count <= OPTIONS_MAX;
    return fits;
}

/* The latest budget and its bound, kept for the next call; with more time, a search that was stopped gives more. */
typedef struct found {
    int64_t budget_bytes, bound_ns;
    bool stopped;
} found;

static cairn_status find_bound(const crn_task *task, const cairn_chain *chain, int64_t budget_bytes, found *bound,
                               cairn_error *error)
{
    search s = {.task = task,
                .chain = chain,
                .n = chain->stage_count,
                .budget_bytes = budget_bytes,
                .allocator = crn_allocator(task->env)};
    crn_queue_init(&s.queue, s.allocator);
    fill(&s);
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
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    const cairn_allocator allocator = crn_allocator(task->env);
    found *last = *kept;
    if (!takes(chain) || task->machine || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    if (!last || last->budget_bytes != budget_bytes || (last->stopped && !crn_task_is_past(task))) {
        found bound = {.budget_bytes = budget_bytes};
        if (last && last->budget_bytes == budget_bytes)
            bound.bound_ns = last->bound_ns;
        CRN_TRY(find_bound(task, chain, budget_bytes, &bound, error));
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
