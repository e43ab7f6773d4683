/*
 * graph-exact: the optimum over all schedules of a small graph under a byte budget, or how near it the answer is.
 *
 * Problem   As graph-search's: nodes in a fixed order of first computation, each may be computed again.
 * State     How many nodes have been computed, and which handles are there. A storage is dropped with all its handles:
 *           while one of them is there the others cost nothing.
 * Moves     Compute the next node, or an earlier one that is gone and may still serve, where what it reads is there.
 *           What does not fit beside it is dropped just before: no sooner, for what is held can be dropped later; and
 *           nothing that could have stayed. What can no longer serve is dropped at once.
 * Search    A*: by the time spent on recomputation and a lower bound on what is still to be spent, that of
 *           graph_suffix.h for the handles that are there. States that cannot beat graph-search's answer are not kept.
 * Bound     Where it ends without having looked at all, for want of work, time or memory, the least bound of a state
 *           that is left; the answer is graph-search's then.
 * Optimal   Over all schedules, when it ends.
 * Least     Without costs: is there any schedule with a smaller peak? From graph-search's least memory down.
 * Cost      Exponential in what fits: the tighter the budget the fewer sets. 10^4 to 10^6 states at 49 nodes; a state
 *           takes some microseconds and 100 bytes. Their number is limited.
 * Source    Hart, Nilsson, Raphael 1968 for the search.
 * Machine   Transfers are left to other solvers.
 */
#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"
#include "solve/graph/exact_states.h"
#include "solve/graph/graph_suffix.h"

/* Without a time limit: moves that are looked at times nodes, a dozen seconds; and moves to one of --iterations. */
#define WORK_MAX ((int64_t)2500000000)
enum { MOVES_EACH = 1000, POLL_EVERY = 4096, SUFFIX_WORK = 1000000000 };

_Static_assert((int)CRN_EXACT_NODES_MAX <= (int)CRN_SUFFIX_LISTED_MAX, "states ask for what is left at any moment");

/* Of the time that is left, what the start may take, and then the states; where that ends them, graph-search goes on. */
enum { START_SHARE = 4, STATES_SHARE = 3 };

typedef struct exact {
    crn_graph_model *model;
    const crn_solver *search;
    void *search_state;
    crn_exact_set reads[CRN_EXACT_NODES_MAX];      /* of a node */
    crn_exact_set members[CRN_EXACT_NODES_MAX];    /* of a storage: its nodes */
    crn_exact_set useful[CRN_EXACT_NODES_MAX + 1]; /* nodes computed before that may still serve */
    crn_exact_set kept[CRN_EXACT_NODES_MAX + 1]; /* handles that stay, for their storage holds an output that exists */
    int32_t by_bytes[CRN_EXACT_NODES_MAX];       /* storages that take some, the largest first */
    int32_t sized_count;
    cairn_builder *smallest; /* the schedule with the least peak that is known */
    crn_least least;
    bool least_is_known;
    bool least_is_cut; /* memory, or the iterations that were asked for, ended the search for it */
} exact;

/* ---- sets ---- */

static bool has(const crn_exact_set *set, int32_t v)
{
    return crn_suffix_has(set->word, v);
}

static crn_exact_set with(crn_exact_set set, int32_t v)
{
    crn_suffix_put(set.word, v);
    return set;
}

static crn_exact_set without(crn_exact_set set, const crn_exact_set *other)
{
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        set.word[i] &= ~other->word[i];
    return set;
}

static crn_exact_set both(crn_exact_set set, const crn_exact_set *other)
{
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        set.word[i] |= other->word[i];
    return set;
}

static bool meet(const crn_exact_set *a, const crn_exact_set *b)
{
    uint64_t common = 0;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        common |= a->word[i] & b->word[i];
    return common != 0;
}

static bool contains(const crn_exact_set *set, const crn_exact_set *other)
{
    uint64_t missing = 0;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        missing |= other->word[i] & ~set->word[i];
    return missing == 0;
}

/* ---- opening ---- */

static void exact_close(const crn_task *task, void *session)
{
    exact *s = session;
    cairn_allocator allocator = crn_allocator(task->env);
    crn_solver_close(s->search, task, s->search_state);
    cairn_builder_free(s->smallest);
    crn_graph_model_free(s->model);
    crn_free(&allocator, s, 1, sizeof(*s));
}

/* Sets over a session: they do not depend on the budget. */
static void fill_sets(exact *s)
{
    const crn_graph_model *model = s->model;
    int32_t n = model->node_count;
    for (int32_t v = 0; v < n; v++) {
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
            s->reads[v] = with(s->reads[v], model->dep[i]);
        s->members[model->root[v]] = with(s->members[model->root[v]], v);
    }
    for (int32_t t = n - 1; t >= 0; t--) { /* what t reads, and what serves after it or to compute that */
        crn_exact_set itself = with((crn_exact_set){{0}}, t);
        s->useful[t] = without(both(s->useful[t + 1], &s->reads[t]), &itself);
        for (int32_t v = t - 1; v >= 0; v--)
            if (has(&s->useful[t], v))
                s->useful[t] = both(s->useful[t], &s->reads[v]);
    }
    for (int32_t t = 0; t <= n; t++)
        for (int32_t v = 0; v < t; v++)
            if (model->keep[model->root[v]] && model->keep_from[model->root[v]] < t)
                s->kept[t] = with(s->kept[t], v);
}

static void order_storages(exact *s)
{
    const crn_graph_model *model = s->model;
    for (int32_t v = 0; v < model->node_count; v++) {
        if (model->root[v] != v || model->bytes[v] == 0)
            continue;
        int32_t at = s->sized_count++;
        for (; at > 0 && model->bytes[s->by_bytes[at - 1]] < model->bytes[v]; at--)
            s->by_bytes[at] = s->by_bytes[at - 1];
        s->by_bytes[at] = v;
    }
}

static cairn_status exact_open(const crn_task *task, void **session, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    exact *s = crn_alloc_zero(&allocator, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->search = crn_solver_find("graph-search");
    CRN_TRY(crn_graph_model_new(task, &s->model, error));
    CRN_TRY(cairn_builder_new(task->env, task->problem, &s->smallest, error));
    fill_sets(s);
    order_storages(s);
    return crn_solver_open(s->search, task, &s->search_state, error);
}

/* ---- one search ---- */

typedef enum ending {
    FOUND,     /* one that is the best there is */
    EXHAUSTED, /* there is none */
    STOPPED,   /* by the clock or the caller */
    FULL,      /* no memory for more states */
    LIMITED    /* by work */
} ending;

typedef struct run {
    const crn_task *task;
    const exact *session;
    const crn_graph_suffix *suffix; /* NULL = any schedule will do */
    int64_t budget_bytes;           /* without the fixed ones */
    int64_t below_ns;               /* what must be spent less than */
    int64_t states_max, moves_max, moves;
    bool halted; /* by the clock, the caller or a limit */
    crn_exact_states states;
    int64_t bound_ns; /* no way is left that spends less */
    int32_t last;     /* the state that was found */
    /* the state that is looked at; what may be dropped for a move from it, the largest first, and the bytes of a rest of it */
    int32_t from;
    const crn_exact_state *at;
    int32_t candidate_count, candidates[CRN_EXACT_NODES_MAX];
    int64_t bytes_from[CRN_EXACT_NODES_MAX + 1];
} run;

static int64_t held_bytes(const exact *s, const crn_exact_set *held)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < s->sized_count; i++)
        if (has(held, s->by_bytes[i]))
            bytes += s->model->bytes[s->by_bytes[i]];
    return bytes;
}

/* A move: node v is computed after some storages have been dropped. */
typedef struct move {
    int32_t node, computed; /* and how many have been then */
    int64_t spent;
} move;

static bool is_told_to_stop(const run *r)
{
    int64_t total_ns = r->session->model->total_cost;
    int64_t best_ns = r->below_ns < INT64_MAX ? total_ns + r->below_ns : CAIRN_NONE;
    int64_t limit = crn_work_limit(r->task, r->moves_max);
    const cairn_progress progress = {"exact search", r->moves, limit > 0 ? limit : CAIRN_NONE, best_ns,
                                     total_ns + r->bound_ns};
    return crn_should_stop(r->task, &progress);
}

/* A state that was not kept may have been on the way to the best one. */
static bool is_full(const run *r)
{
    return r->states.failed || r->states.count >= r->states_max;
}

/* The least that is spent by way of a move that leaves these handles; INT64_MAX = not less than what must be beaten. */
static int64_t bound_of(run *r, const move *m, const crn_exact_set *held)
{
    r->halted =
        r->halted || ++r->moves > r->moves_max || is_full(r) || (r->moves % POLL_EVERY == 0 && is_told_to_stop(r));
    if (r->halted)
        return INT64_MAX;
    if (!r->suffix)
        return 0;
    int64_t rest_ns = crn_graph_suffix_rest(r->suffix, m->computed, held->word);
    int64_t bound_ns = crn_add_saturating(m->spent, rest_ns);
    return bound_ns < r->below_ns ? bound_ns : INT64_MAX;
}

static void arrive(run *r, const move *m, crn_exact_set held, int64_t bound_ns)
{
    const exact *s = r->session;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        held.word[i] &= s->useful[m->computed].word[i] | s->kept[m->computed].word[i];
    crn_exact_state way = {
        .held = held, .spent = m->spent, .parent = r->from, .computed = (uint8_t)m->computed, .node = (uint8_t)m->node};
    crn_exact_reach(&r->states, &way, bound_ns, s->model->node_count - m->computed);
}

/* All ways to drop candidates from number i on so that `over` bytes go and none could stay. */
static void drop_some(run *r, const move *m, int32_t i, int64_t over, const crn_exact_set *held)
{
    const exact *s = r->session;
    for (; i < r->candidate_count && r->bytes_from[i] >= over && !r->halted; i++) {
        int32_t root = r->candidates[i];
        crn_exact_set left = without(*held, &s->members[root]);
        int64_t bound_ns = bound_of(r, m, &left);
        if (bound_ns == INT64_MAX)
            continue;
        if (s->model->bytes[root] >= over)
            arrive(r, m, left, bound_ns);
        else
            drop_some(r, m, i + 1, over - s->model->bytes[root], &left);
    }
}

/* All that is there, but for what the node reads, and outputs. */
static void find_candidates(run *r, int32_t node)
{
    const exact *s = r->session;
    r->candidate_count = 0;
    for (int32_t i = 0; i < s->sized_count; i++) {
        int32_t root = s->by_bytes[i];
        if (has(&r->at->held, root) && !has(&s->kept[r->at->computed], root) &&
            !meet(&s->members[root], &s->reads[node]))
            r->candidates[r->candidate_count++] = root;
    }
    r->bytes_from[r->candidate_count] = 0;
    for (int32_t i = r->candidate_count - 1; i >= 0; i--)
        r->bytes_from[i] = r->bytes_from[i + 1] + s->model->bytes[r->candidates[i]];
}

static void try_compute(run *r, int32_t v, int64_t bytes)
{
    const exact *s = r->session;
    const crn_graph_model *model = s->model;
    bool is_first = v == r->at->computed;
    move m = {.node = v, .computed = r->at->computed + is_first, .spent = r->at->spent};
    if (!contains(&r->at->held, &s->reads[v]) || (!is_first && model->once_node[v]))
        return;
    if (!is_first && r->suffix)
        m.spent = crn_add_saturating(m.spent, model->cost[v]);
    crn_exact_set held = with(r->at->held, v);
    int64_t over, needed = crn_add_saturating(crn_add_saturating(bytes, model->bytes[v]), model->extra[v]);
    if (!crn_sub(needed, r->budget_bytes, &over))
        over = INT64_MAX;
    int64_t bound_ns = bound_of(r, &m, &held);
    if (bound_ns == INT64_MAX)
        return;
    if (over <= 0) {
        arrive(r, &m, held, bound_ns);
    } else {
        find_candidates(r, v);
        drop_some(r, &m, 0, over, &held);
    }
}

static void expand(run *r, int32_t from)
{
    const exact *s = r->session;
    crn_exact_state state = r->states.states[from]; /* the array may move */
    r->from = from;
    r->at = &state;
    int64_t bytes = held_bytes(s, &state.held);
    crn_exact_set gone = without(s->useful[state.computed], &state.held);
    for (int32_t v = 0; v < state.computed; v++)
        if (has(&gone, v))
            try_compute(r, v, bytes);
    try_compute(r, state.computed, bytes);
    r->at = NULL;
}

/* Best bound first, so that the first complete state is the best. */
static ending search_states(run *r)
{
    crn_exact_state start = {.parent = -1};
    move none = {0};
    int64_t bound_ns = bound_of(r, &none, &start.held);
    if (bound_ns != INT64_MAX)
        crn_exact_reach(&r->states, &start, bound_ns, r->session->model->node_count);
    while (!r->halted && !r->states.failed) {
        r->last = crn_exact_next(&r->states, &bound_ns);
        if (r->last < 0)
            return EXHAUSTED;
        r->bound_ns = crn_max(r->bound_ns, bound_ns);
        if (r->states.states[r->last].computed == r->session->model->node_count)
            return FOUND;
        expand(r, r->last);
    }
    if (crn_should_stop(r->task, NULL))
        return STOPPED;
    return is_full(r) ? FULL : LIMITED;
}

/* ---- operations ---- */

static cairn_status emit_drops(cairn_builder *builder, const crn_exact_set *handles, int32_t count, cairn_error *error)
{
    for (int32_t v = 0; v < count; v++)
        if (has(handles, v))
            CRN_TRY(cairn_builder_add(builder, (cairn_op){CAIRN_OP_DROP, 0, 0, v}, error));
    return CAIRN_OK;
}

/* What the node reads is dropped after it; so is the node itself where it is no use. */
static cairn_status emit_move(const exact *s, const crn_exact_state *from, const crn_exact_state *to,
                              cairn_builder *builder, cairn_error *error)
{
    int32_t n = s->model->node_count;
    crn_exact_set read = {{0}};
    for (int32_t v = 0; v < n; v++)
        if (has(&s->reads[to->node], v))
            read = both(read, &s->members[s->model->root[v]]);
    crn_exact_set dropped = without(from->held, &to->held), before = without(dropped, &read);
    crn_exact_set made = with(dropped, to->node), after = without(made, &before);
    after = without(after, &to->held);
    CRN_TRY(emit_drops(builder, &before, n, error));
    CRN_TRY(cairn_builder_add(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, to->node}, error));
    return emit_drops(builder, &after, n, error);
}

static cairn_status emit(const run *r, cairn_builder *builder, cairn_error *error)
{
    const crn_exact_state *states = r->states.states;
    int32_t length = 0;
    for (int32_t at = r->last; states[at].parent >= 0; at = states[at].parent)
        length++;
    int32_t *path = crn_alloc(&r->states.allocator, (size_t)length + 1, sizeof(*path));
    if (!path)
        return crn_no_memory(error);
    int32_t i = length;
    for (int32_t at = r->last; at >= 0; at = states[at].parent)
        path[i--] = at;
    cairn_status status = CAIRN_OK;
    for (i = 1; i <= length && status == CAIRN_OK; i++)
        status = emit_move(r->session, &states[path[i - 1]], &states[path[i]], builder, error);
    crn_free(&r->states.allocator, path, (size_t)length + 1, sizeof(*path));
    return status;
}

/* ---- a run from its beginning to its end ---- */

/* A quarter of what may be allocated is for states. */
static int64_t states_that_fit(const crn_task *task)
{
    return crn_min(crn_memory_limit(task->settings) / 4 / CRN_EXACT_STATE_BYTES, INT32_MAX / 4);
}

static int64_t moves_of(const crn_task *task)
{
    int64_t iterations = task->settings->iterations;
    if (iterations >= 0)
        return crn_mul_saturating(iterations, MOVES_EACH);
    return task->deadline_ns != CAIRN_NONE ? INT64_MAX
                                           : WORK_MAX / (cairn_problem_graph(task->problem)->node_count + 1);
}

/* Without memory for more states it ends like any search that is cut short: what is known by then holds. */
static ending run_search(run *r)
{
    r->states_max = states_that_fit(r->task);
    r->moves_max = moves_of(r->task);
    crn_exact_states_init(&r->states, crn_allocator(r->task->env));
    ending how = search_states(r);
    crn_exact_states_close(&r->states);
    return how;
}

static cairn_status check_valid(const cairn_replay *replay, cairn_error *error)
{
    if (replay->valid)
        return CAIRN_OK;
    return crn_fail_at(error, CAIRN_INTERNAL, replay->violation.op, NULL, "an exact search made no schedule: %s",
                       replay->violation.message);
}

/* Peak and makespan of a schedule. */
static cairn_status judge(const crn_task *task, const cairn_builder *builder, cairn_replay *replay, cairn_error *error)
{
    CRN_TRY(crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, replay, error));
    return check_valid(replay, error);
}

/* ---- least memory ---- */

/* The schedule of a run that did not look at times. One that takes more than 2^63 - 1 ns is none, and ends the looking. */
static cairn_status take_smaller(const run *r, exact *s, cairn_builder *builder, ending *how, cairn_error *error)
{
    cairn_replay replay;
    CRN_TRY(emit(r, builder, error));
    CRN_TRY(crn_replay(r->task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, error));
    if (replay.violation.code == CAIRN_VIOLATION_OVERFLOW) {
        *how = LIMITED;
        return CAIRN_OK;
    }
    CRN_TRY(check_valid(&replay, error));
    s->least.bytes = replay.peak_bytes;
    cairn_builder_truncate(s->smallest, 0);
    return crn_builder_add_all(s->smallest, cairn_builder_ops(builder), cairn_builder_count(builder), error);
}

/* Looks for a schedule with a smaller peak than the least; moves = how many all such searches have looked at. */
static cairn_status shrink(const crn_task *task, exact *s, int64_t *moves, ending *how, cairn_error *error)
{
    run r = {.task = task,
             .session = s,
             .budget_bytes = s->least.bytes - 1 - s->model->fixed_bytes,
             .below_ns = INT64_MAX,
             .moves = *moves};
    cairn_builder *builder;
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    *how = run_search(&r);
    *moves = r.moves;
    cairn_status status = *how == FOUND ? take_smaller(&r, s, builder, how, error) : CAIRN_OK;
    cairn_builder_free(builder);
    crn_exact_states_free(&r.states);
    return status;
}

static cairn_status find_least(const crn_task *task, exact *s, cairn_error *error)
{
    ending how = FOUND;
    int64_t moves = 0;
    cairn_builder_truncate(s->smallest, 0);
    CRN_TRY(s->search->least(task, s->search_state, &s->least, error));
    while (how == FOUND && s->least.bytes != CAIRN_NONE && s->least.bytes > s->least.lower_bytes)
        CRN_TRY(shrink(task, s, &moves, &how, error));
    if (how == EXHAUSTED && !task->machine) /* of schedules that transfer nothing */
        s->least.lower_bytes = s->least.bytes;
    s->least.is_exact = s->least.bytes == s->least.lower_bytes && !task->machine;
    s->least_is_known = how != STOPPED;
    s->least_is_cut = how == FULL || (how == LIMITED && task->settings->iterations >= 0);
    return CAIRN_OK;
}

static cairn_status exact_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    exact *s = session;
    if (!s->least_is_known)
        CRN_TRY(find_least(task, s, error));
    *least = s->least;
    return CAIRN_OK;
}

/* ---- solving ---- */

/* graph-search's answer, which is where the search begins. */
static cairn_status ask_search(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    const crn_task part = crn_task_part(task, START_SHARE);
    cairn_status status = s->search->solve(&part, s->search_state, budget_bytes, answer, error);
    answer->stopped_early = false;
    return status == CAIRN_CANCELLED && !crn_should_stop(task, NULL) ? CAIRN_OK : status;
}

/*
 * The schedule with the least peak answers budgets for which graph-search found none in its part of the time. Where that
 * is graph-search's own, found since, it is asked once more.
 */
static cairn_status answer_smallest(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer,
                                    cairn_error *error)
{
    crn_least least;
    CRN_TRY(exact_least(task, s, &least, error));
    answer->stopped_early = !s->least_is_known;
    answer->cut_short = s->least_is_cut;
    if (least.bytes == CAIRN_NONE || least.bytes > budget_bytes)
        return CAIRN_OK;
    int64_t count = cairn_builder_count(s->smallest);
    if (count == 0)
        return s->search->solve(task, s->search_state, budget_bytes, answer, error);
    answer->found = true;
    return crn_builder_add_all(answer->builder, cairn_builder_ops(s->smallest), count, error);
}

static cairn_status improve(const crn_task *task, exact *s, const crn_graph_suffix *suffix, int64_t makespan_ns,
                            crn_answer *answer, ending *how, cairn_error *error)
{
    run r = {.task = task,
             .session = s,
             .suffix = suffix,
             .budget_bytes = suffix->budget_bytes,
             .below_ns = makespan_ns - s->model->total_cost};
    cairn_status status = CAIRN_OK;
    *how = run_search(&r);
    if (*how == FOUND) {
        cairn_builder_truncate(answer->builder, 0);
        status = emit(&r, answer->builder, error);
        makespan_ns = s->model->total_cost + r.states.states[r.last].spent;
    }
    bool closed = *how == FOUND || *how == EXHAUSTED;
    int64_t bound_ns = closed ? makespan_ns : s->model->total_cost + crn_min(r.bound_ns, r.below_ns);
    if (status == CAIRN_OK)
        answer->lower_bound_ns = crn_max(answer->lower_bound_ns, bound_ns);
    crn_exact_states_free(&r.states);
    return status;
}

static cairn_status improve_answer(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer,
                                   cairn_error *error)
{
    cairn_replay replay;
    crn_graph_suffix *suffix;
    ending how = EXHAUSTED;
    CRN_TRY(judge(task, answer->builder, &replay, error));
    if (replay.makespan_ns > answer->lower_bound_ns) {
        CRN_TRY(crn_graph_suffix_new(task, s->model, budget_bytes, SUFFIX_WORK, NULL, &suffix, error));
        cairn_status status = improve(task, s, suffix, replay.makespan_ns, answer, &how, error);
        crn_graph_suffix_free(suffix);
        CRN_TRY(status);
    }
    answer->stopped_early = how == STOPPED;
    answer->optimal_in_class = how == FOUND || how == EXHAUSTED;
    if (how == LIMITED || how == FULL)
        snprintf(answer->reason, CAIRN_REASON_MAX, "not closed with the states that %s",
                 how == FULL ? "memory has room for (option memory-limit)" : "it may look at");
    return CAIRN_OK;
}

/* Where the clock ends it graph-search goes on with what time is left; the better schedule is the answer. */
static cairn_status go_on(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer, cairn_error *error)
{
    crn_answer more;
    cairn_replay own, others;
    CRN_TRY(judge(task, answer->builder, &own, error));
    CRN_TRY(crn_answer_init(&more, task, error));
    cairn_status status = s->search->solve(task, s->search_state, budget_bytes, &more, error);
    if (status == CAIRN_OK && more.found)
        status = judge(task, more.builder, &others, error);
    if (status == CAIRN_OK && more.found && others.makespan_ns < own.makespan_ns) {
        cairn_builder *builder = answer->builder;
        answer->builder = more.builder;
        more.builder = builder;
    }
    crn_answer_clear(&more, task);
    return status == CAIRN_CANCELLED ? CAIRN_OK : status;
}

/* With a machine: the best without transfers, of which nothing is claimed, for with them less may do. */
static cairn_status improve_in_place(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer,
                                     cairn_error *error)
{
    const crn_task alone = crn_task_without_machine(task);
    int64_t bound_ns = answer->lower_bound_ns;
    CRN_TRY(improve_answer(&alone, s, budget_bytes, answer, error));
    if (answer->optimal_in_class)
        snprintf(answer->reason, CAIRN_REASON_MAX, "the best without transfers, which graph-exact does not search");
    answer->optimal_in_class = false;
    answer->lower_bound_ns = bound_ns;
    return CAIRN_OK;
}

static cairn_status exact_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    exact *s = session;
    const char *method;
    int64_t budget = crn_limit_of(budget_bytes);
    CRN_TRY(crn_lower_bound(task, budget_bytes, &answer->lower_bound_ns, &method, error));
    CRN_TRY(ask_search(task, s, budget_bytes, answer, error));
    answer->iterations = crn_work_limit(task, moves_of(task) / MOVES_EACH);
    if (!answer->found)
        CRN_TRY(answer_smallest(task, s, budget, answer, error));
    if (!answer->found)
        return CAIRN_OK;
    const crn_task part = crn_task_part(task, STATES_SHARE);
    CRN_TRY(task->machine ? improve_in_place(&part, s, budget, answer, error)
                          : improve_answer(&part, s, budget, answer, error));
    return answer->stopped_early ? go_on(task, s, budget_bytes, answer, error) : CAIRN_OK;
}

static cairn_status exact_accepts(const crn_task *task, cairn_error *error)
{
    int32_t count = cairn_problem_graph(task->problem)->node_count;
    if (count <= CRN_EXACT_NODES_MAX)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNSUPPORTED, "graph-exact takes at most %d nodes, not %d", CRN_EXACT_NODES_MAX, count);
}

static int64_t exact_memory(const crn_task *task)
{
    const crn_solver *search = crn_solver_find("graph-search");
    int64_t states = crn_min(states_that_fit(task), moves_of(task));
    return crn_add_saturating(search->memory(task), states * CRN_EXACT_STATE_BYTES);
}

const crn_solver crn_graph_exact_solver = {
    .info =
        {
            .name = "graph-exact",
            .takes_graphs = true,
            .available = true,
            .optimal_in = "all",
            .summary = "exact search over what is held, at most 128 nodes; stopped, a better bound",
            .source = "Cairn; A* after Hart, Nilsson, Raphael 1968",
            .cost = "exponential; seconds at T = 50",
        },
    .options = "iterations seed",
    .rank = 30,
    .is_anytime = true,
    .has_own_bound = true,
    .accepts = exact_accepts,
    .memory = exact_memory,
    .open = exact_open,
    .close = exact_close,
    .least = exact_least,
    .solve = exact_solve,
};
