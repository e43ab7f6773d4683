/*
 * brute-chain: the optimum of a tiny chain over all schedules without transfers, by Dijkstra's algorithm over states.
 *
 * A state is the current gradient d[c], which outputs a[1..n-1] are resident, and which saved sets A[1..n], each with its
 * option. Every operation of the format is a step, drops at no cost and at any moment, with the simulator's rules:
 * A[l] keeps its input alive, forward_drop and backward remove what they remove, a stage that must not be recomputed is
 * saved once. A step is possible when max(before, after, before + result + workspace) fits the budget. Left out is only
 * what helps no schedule: computing a[l] for l >= c or saving A[l] for l > c, which nothing reads any more, and dropping
 * the saved set of a stage that could not be saved again.
 *
 * The makespan is a shortest path, the least memory a path whose greatest step is least: the same search with another
 * way to add. (n + 1) * 2^(n-1) * product of (K_l + 1) states, 24 bytes each; n <= 6. This is the oracle of the tests:
 * it shares nothing with the dynamic programs.
 */
#include <string.h>

#include "base/queue.h"
#include "solve/solver.h"

enum { STAGES_MAX = 6, STATES_MAX = 1 << 22, POLL_EVERY = 8192 };

typedef struct state {
    int32_t grad;                  /* c */
    bool output[STAGES_MAX + 2];   /* a[l], 1 <= l < n */
    int32_t saved[STAGES_MAX + 2]; /* A[l]: 0 = none, else option + 1 */
} state;

typedef struct search {
    const crn_task *task;
    const cairn_chain *chain;
    int32_t n, state_count, per_grad;
    int64_t budget_bytes; /* INT64_MAX = none */
    bool by_memory;       /* keys are peaks, not times */
    int64_t *key;         /* of a state: least so far */
    int32_t *length;      /* forwards and backwards on the way there */
    int32_t *parent;
    cairn_op *op;    /* that leads from the parent to the state */
    crn_queue queue; /* of states; of two of equal key, the one with fewer forwards and backwards is first */
    crn_arena arena;
    cairn_allocator allocator;
    bool failed; /* no memory */
} search;

/* ---- states as numbers ---- */

static int64_t count_states(const cairn_chain *chain)
{
    int64_t count = (int64_t)chain->stage_count + 1;
    for (int32_t l = 1; l <= chain->stage_count && count <= STATES_MAX; l++)
        count *= (l < chain->stage_count ? 2 : 1) * ((int64_t)chain->stages[l - 1].option_count + 1);
    return count;
}

static int32_t encode(const search *s, const state *from)
{
    int32_t number = from->grad;
    for (int32_t l = 1; l <= s->n; l++) {
        number = number * (s->chain->stages[l - 1].option_count + 1) + from->saved[l];
        if (l < s->n)
            number = 2 * number + from->output[l];
    }
    return number;
}

static state decode(const search *s, int32_t number)
{
    state to;
    memset(&to, 0, sizeof(to));
    for (int32_t l = s->n; l >= 1; l--) {
        int32_t radix = s->chain->stages[l - 1].option_count + 1;
        if (l < s->n) {
            to.output[l] = number % 2 != 0;
            number /= 2;
        }
        to.saved[l] = number % radix;
        number /= radix;
    }
    to.grad = number;
    return to;
}

static int64_t grad_bytes(const cairn_chain *chain, int32_t l)
{
    return l > 0 ? chain->stages[l - 1].grad_bytes : chain->input_grad_bytes;
}

static int64_t resident_bytes(const search *s, const state *at)
{
    int64_t bytes = cairn_problem_info_of(s->task->problem)->fixed_bytes + s->chain->input_bytes;
    bytes += grad_bytes(s->chain, at->grad);
    for (int32_t l = 1; l <= s->n; l++) {
        const cairn_stage *stage = &s->chain->stages[l - 1];
        bytes += l > at->grad ? stage->weight_grad_bytes : 0;
        bytes += at->output[l] ? stage->output_bytes : 0;
        bytes += at->saved[l] ? stage->options[at->saved[l] - 1].saved_bytes : 0;
    }
    return bytes;
}

/* Whether what a[l], A[l] or both were is still there for a saved set that needs it. */
static bool inputs_are_there(const search *s, const state *at)
{
    for (int32_t l = 2; l <= s->n; l++)
        if (at->saved[l] && !at->output[l - 1] && !at->saved[l - 1])
            return false;
    return true;
}

/* ---- steps ---- */

/* The state that is being left. */
typedef struct leaving {
    search *s;
    int32_t number, length;
    int64_t key, before_bytes;
} leaving;

/* An operation of time ns that adds result bytes, and the state after it. Drops: result and workspace 0. */
static void take_step(const leaving *from, const state *to, cairn_op op, int64_t ns, int64_t result, int64_t workspace)
{
    search *s = from->s;
    int64_t key, during = from->before_bytes + result + workspace;
    if (!inputs_are_there(s, to))
        return;
    int64_t needed = crn_max(crn_max(from->before_bytes, resident_bytes(s, to)), during);
    if (needed > s->budget_bytes)
        return;
    if (s->by_memory)
        key = crn_max(from->key, needed);
    else if (!crn_add(from->key, ns, &key))
        return;
    int32_t number = encode(s, to), length = from->length + (op.code != CAIRN_OP_DROP);
    if (key > s->key[number] || (key == s->key[number] && length >= s->length[number]))
        return;
    s->key[number] = key;
    s->length[number] = length;
    s->parent[number] = from->number;
    s->op[number] = op;
    s->failed = s->failed || !crn_queue_make_room(&s->queue);
    if (!s->failed)
        crn_queue_push(&s->queue, (crn_queue_entry){key, length, number});
}

static cairn_op op_of(cairn_op_code code, int32_t l)
{
    return (cairn_op){.code = (uint8_t)code, .index = l};
}

static bool has_input(const state *at, int32_t l)
{
    return l == 1 || at->output[l - 1] || at->saved[l - 1];
}

static void forwards(const leaving *from, const state *at, int32_t l)
{
    const cairn_stage *stage = &from->s->chain->stages[l - 1];
    state to = *at;
    if (!has_input(at, l))
        return;
    for (int32_t k = 0; !at->saved[l] && k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        cairn_op op = op_of(CAIRN_OP_FORWARD_SAVE, l);
        op.option = (uint16_t)k;
        to.saved[l] = k + 1;
        take_step(from, &to, op, option->forward_ns, option->saved_bytes, option->forward_workspace_bytes);
    }
    if (l >= at->grad || stage->no_recompute || at->output[l])
        return;
    to = *at;
    to.output[l] = true;
    take_step(from, &to, op_of(CAIRN_OP_FORWARD_KEEP, l), stage->forward_only_ns, stage->output_bytes,
              stage->forward_only_workspace_bytes);
    if (l == 1 || !at->output[l - 1])
        return;
    to.output[l - 1] = false;
    take_step(from, &to, op_of(CAIRN_OP_FORWARD_DROP, l), stage->forward_only_ns, stage->output_bytes,
              stage->forward_only_workspace_bytes);
}

static void drops(const leaving *from, const state *at, int32_t l)
{
    cairn_op op = op_of(CAIRN_OP_DROP, l);
    state to = *at;
    if (at->output[l]) {
        to.output[l] = false;
        op.value = CAIRN_VALUE_OUTPUT;
        take_step(from, &to, op, 0, 0, 0);
        to = *at;
    }
    if (at->saved[l] && !from->s->chain->stages[l - 1].no_recompute) {
        to.saved[l] = 0;
        op.value = CAIRN_VALUE_SAVED;
        take_step(from, &to, op, 0, 0, 0);
    }
}

static void backward(const leaving *from, const state *at)
{
    int32_t c = at->grad;
    const cairn_stage *stage = &from->s->chain->stages[c - 1];
    state to = *at;
    if (!at->saved[c] || !has_input(at, c))
        return;
    const cairn_stage_option *option = &stage->options[at->saved[c] - 1];
    to.grad = c - 1;
    to.saved[c] = 0;
    to.output[c - 1] = false;
    take_step(from, &to, op_of(CAIRN_OP_BACKWARD, c), option->backward_ns,
              grad_bytes(from->s->chain, c - 1) + stage->weight_grad_bytes, option->backward_workspace_bytes);
}

static void leave(search *s, crn_queue_entry top)
{
    state at = decode(s, top.item);
    leaving from = {s, top.item, top.rank, top.bound, resident_bytes(s, &at)};
    for (int32_t l = 1; l <= at.grad; l++) {
        forwards(&from, &at, l);
        drops(&from, &at, l);
    }
    backward(&from, &at);
}

/* ---- the search ---- */

static cairn_status search_begin(search *s, const crn_task *task, int64_t budget_bytes, bool by_memory,
                                 cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    size_t count = (size_t)count_states(chain);
    *s = (search){.task = task,
                  .chain = chain,
                  .n = chain->stage_count,
                  .state_count = (int32_t)count,
                  .per_grad = (int32_t)count / (chain->stage_count + 1),
                  .budget_bytes = crn_limit_of(budget_bytes),
                  .by_memory = by_memory,
                  .allocator = crn_allocator(task->env)};
    crn_arena_init(&s->arena, s->allocator);
    crn_queue_init(&s->queue, s->allocator);
    s->key = crn_arena_alloc(&s->arena, count, sizeof(*s->key));
    s->length = crn_arena_alloc(&s->arena, count, sizeof(*s->length));
    s->parent = crn_arena_alloc(&s->arena, count, sizeof(*s->parent));
    s->op = crn_arena_alloc(&s->arena, count, sizeof(*s->op));
    if (!s->key || !s->length || !s->parent || !s->op)
        return crn_no_memory(error);
    for (size_t i = 0; i < count; i++)
        s->key[i] = INT64_MAX;
    return CAIRN_OK;
}

static void search_end(search *s)
{
    crn_queue_clear(&s->queue);
    crn_arena_clear(&s->arena);
}

/* The number of the first state reached in which d[0] has been computed, or -1. */
static cairn_status search_run(search *s, int32_t *goal, cairn_error *error)
{
    state start = {.grad = s->n};
    int64_t bytes = resident_bytes(s, &start), popped = 0;
    int32_t first = encode(s, &start);
    *goal = -1;
    if (bytes > s->budget_bytes)
        return CAIRN_OK;
    s->key[first] = s->by_memory ? bytes : 0;
    s->length[first] = 0;
    s->parent[first] = -1;
    if (!crn_queue_make_room(&s->queue))
        return crn_no_memory(error);
    crn_queue_push(&s->queue, (crn_queue_entry){s->key[first], 0, first});
    while (s->queue.count > 0 && !s->failed) {
        crn_queue_entry top = crn_queue_pop(&s->queue);
        if (top.bound > s->key[top.item] || top.rank > s->length[top.item])
            continue;
        if (top.item < s->per_grad) { /* grad 0 */
            *goal = top.item;
            return CAIRN_OK;
        }
        if (++popped % POLL_EVERY == 0 && crn_should_stop(s->task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %lld states", (long long)popped);
        leave(s, top);
    }
    return s->failed ? crn_no_memory(error) : CAIRN_OK;
}

static cairn_status emit(const search *s, int32_t goal, cairn_builder *builder, cairn_error *error)
{
    int64_t count = 0;
    for (int32_t at = goal; s->parent[at] >= 0; at = s->parent[at])
        count++;
    cairn_op *ops = crn_alloc(&s->allocator, (size_t)count, sizeof(*ops));
    cairn_status status = CAIRN_OK;
    if (!ops)
        return crn_no_memory(error);
    int64_t i = count;
    for (int32_t at = goal; s->parent[at] >= 0; at = s->parent[at])
        ops[--i] = s->op[at];
    for (i = 0; status == CAIRN_OK && i < count; i++)
        status = cairn_builder_add(builder, ops[i], error);
    crn_free(&s->allocator, ops, (size_t)count, sizeof(*ops));
    return status;
}

/* ---- the solver ---- */

static cairn_status brute_chain_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    if (chain->stage_count > STAGES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "brute-chain takes at most %d stages, and the chain has %d",
                        STAGES_MAX, chain->stage_count);
    if (count_states(chain) > STATES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED,
                        "brute-chain takes at most %d states; with these options there are more", STATES_MAX);
    return CAIRN_OK;
}

static int64_t brute_chain_memory(const crn_task *task)
{
    const int64_t of_state = (int64_t)(sizeof(int64_t) + 2 * sizeof(int32_t) + sizeof(cairn_op)); /* key .. op */
    const int64_t of_queue = 4 * (int64_t)sizeof(crn_queue_entry); /* it holds a state several times */
    return count_states(cairn_problem_chain(task->problem)) * (of_state + of_queue) + 65536;
}

enum { STATE_NS = 200 };

static int64_t brute_chain_work(const crn_task *task)
{
    return STATE_NS * count_states(cairn_problem_chain(task->problem));
}

static cairn_status brute_chain_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    search s;
    int32_t goal = -1;
    (void)session;
    cairn_status status = search_begin(&s, task, CAIRN_NONE, true, error);
    if (status == CAIRN_OK)
        status = search_run(&s, &goal, error);
    if (status == CAIRN_OK && goal >= 0) {
        least->bytes = s.key[goal];
        least->is_exact = !task->machine;
    }
    search_end(&s);
    return status;
}

static cairn_status brute_chain_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                      cairn_error *error)
{
    search s;
    int32_t goal = -1;
    (void)session;
    cairn_status status = search_begin(&s, task, budget_bytes, false, error);
    if (status == CAIRN_OK)
        status = search_run(&s, &goal, error);
    if (status == CAIRN_OK && goal >= 0) {
        answer->found = true;
        answer->optimal_in_class = !task->machine;
        answer->lower_bound_ns = task->machine ? CAIRN_NONE : s.key[goal];
        status = emit(&s, goal, answer->builder, error);
    }
    search_end(&s);
    return status;
}

const crn_solver crn_brute_chain_solver = {
    .info = {.name = "brute-chain",
             .takes_chains = true,
             .exhaustive = true,
             .available = true,
             .optimal_in = "all",
             .summary = "the optimum of a tiny chain over all schedules without transfers",
             .source = "Dijkstra 1959, over the states of the simulator's model",
             .cost = "exponential; at most 6 stages"},
    .rank = 40,
    .accepts = brute_chain_accepts,
    .memory = brute_chain_memory,
    .work = brute_chain_work,
    .least = brute_chain_least,
    .solve = brute_chain_solve,
};
