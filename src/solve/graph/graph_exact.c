/*
 * graph-exact: the optimum over all schedules of a small graph under a byte budget, or how near it the answer is.
 *
 * Problem   As graph-search's: nodes in a fixed order of first computation, each may be recomputed.
 * State     How many nodes have been computed, and which handles are resident. A storage is dropped with all its
 *           handles: while one of them is resident the others cost nothing.
 * Moves     Compute the next node, or recompute an earlier one that may still serve. What the node reads must be
 *           resident. Storages that do not fit beside the node are dropped just before it. An earlier drop is not
 *           tried, because whatever is held can be dropped later. Nothing is dropped that would have fitted. A storage
 *           that can no longer serve is dropped at once.
 * Search    A*: by the time spent on recomputation plus a lower bound on what is still to be spent, that of
 *           graph_suffix.h for the resident handles. States that cannot beat graph-search's answer are not kept.
 * Bound     The search may end early, for want of work, time or memory. Then the bound is the least bound of a state
 *           that is left, and the answer is graph-search's.
 * Optimal   Over all schedules, when it ends.
 * Least     Without costs: does any schedule have a smaller peak? From graph-search's least memory down.
 * Cost      Exponential in what fits: the tighter the budget the fewer sets. 10^4 to 10^6 states at 49 nodes; a state
 *           takes some microseconds and up to CRN_EXACT_STATE_BYTES bytes. Their number is limited.
 * Source    Hart, Nilsson, Raphael 1968 for the search.
 * Machine   Transfers are left to other solvers.
 */
#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"
#include "solve/baselines.h"
#include "solve/graph/exact_search.h"

enum { SUFFIX_WORK = 1000000000 };

_Static_assert((int)CRN_EXACT_NODES_MAX <= (int)CRN_SUFFIX_LISTED_MAX, "states ask for what is left at any moment");

/*
 * Of the time that is left, one of so many parts: what the start may take, then the states, and of that what may go by before
 * they have a bound to be guided by. Where that ends them, graph-search goes on.
 */
enum { START_SHARE = 4, STATES_SHARE = 3, SUFFIX_SHARE = 4 };

typedef struct exact {
    crn_graph_model *model;
    const crn_solver *search;
    void *search_state;
    crn_exact_graph graph;
    cairn_builder *smallest; /* the schedule with the least peak that is known */
    crn_least least;
    bool least_is_known;
    bool least_is_cut; /* memory, or the iterations that were asked for, ended the search for it */
} exact;

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
    crn_exact_graph_init(&s->graph, s->model);
    return crn_solver_open(s->search, task, &s->search_state, error);
}

/* ---- judging ---- */

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
static cairn_status take_smaller(const crn_exact_run *r, exact *s, cairn_builder *builder, crn_exact_ending *how,
                                 cairn_error *error)
{
    cairn_replay replay;
    CRN_TRY(crn_exact_emit(r, builder, error));
    CRN_TRY(crn_replay(r->task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, error));
    if (replay.violation.code == CAIRN_VIOLATION_OVERFLOW) {
        *how = CRN_EXACT_LIMITED;
        return CAIRN_OK;
    }
    CRN_TRY(check_valid(&replay, error));
    s->least.bytes = replay.peak_bytes;
    cairn_builder_truncate(s->smallest, 0);
    return crn_builder_add_all(s->smallest, cairn_builder_ops(builder), cairn_builder_count(builder), error);
}

/* Looks for a schedule with a smaller peak than the least; moves = how many all such searches have looked at. */
static cairn_status shrink(const crn_task *task, exact *s, int64_t *moves, crn_exact_ending *how, cairn_error *error)
{
    crn_exact_run r = {.task = task,
                       .graph = &s->graph,
                       .budget_bytes = s->least.bytes - 1 - s->model->fixed_bytes,
                       .below_ns = INT64_MAX,
                       .moves = *moves};
    cairn_builder *builder;
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    *how = crn_exact_search(&r);
    *moves = r.moves;
    cairn_status status = *how == CRN_EXACT_FOUND ? take_smaller(&r, s, builder, how, error) : CAIRN_OK;
    cairn_builder_free(builder);
    crn_exact_states_free(&r.states);
    return status;
}

static cairn_status find_least(const crn_task *task, exact *s, cairn_error *error)
{
    crn_exact_ending how = CRN_EXACT_FOUND;
    int64_t moves = 0;
    cairn_builder_truncate(s->smallest, 0);
    CRN_TRY(s->search->least(task, s->search_state, &s->least, error));
    while (how == CRN_EXACT_FOUND && s->least.bytes != CAIRN_NONE && s->least.bytes > s->least.lower_bytes)
        CRN_TRY(shrink(task, s, &moves, &how, error));
    if (how == CRN_EXACT_EXHAUSTED && !task->machine) /* of schedules that transfer nothing */
        s->least.lower_bytes = s->least.bytes;
    s->least.is_exact = s->least.bytes == s->least.lower_bytes && !task->machine;
    s->least_is_known = how != CRN_EXACT_STOPPED;
    s->least_is_cut = how == CRN_EXACT_FULL || (how == CRN_EXACT_LIMITED && task->settings->iterations >= 0);
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
                            crn_answer *answer, crn_exact_ending *how, cairn_error *error)
{
    crn_exact_run r = {.task = task,
                       .graph = &s->graph,
                       .suffix = suffix,
                       .budget_bytes = suffix->budget_bytes,
                       .below_ns = makespan_ns - s->model->total_cost};
    cairn_status status = CAIRN_OK;
    *how = crn_exact_search(&r);
    if (*how == CRN_EXACT_FOUND) {
        cairn_builder_truncate(answer->builder, 0);
        status = crn_exact_emit(&r, answer->builder, error);
        makespan_ns = s->model->total_cost + r.states.states[r.last].spent;
    }
    bool closed = *how == CRN_EXACT_FOUND || *how == CRN_EXACT_EXHAUSTED;
    int64_t bound_ns = closed ? makespan_ns : s->model->total_cost + crn_min(r.bound_ns, r.below_ns);
    if (status == CAIRN_OK)
        answer->lower_bound_ns = crn_max(answer->lower_bound_ns, bound_ns);
    crn_exact_states_free(&r.states);
    return status;
}

/* Where the bound alone takes long, states would not end in time. */
static cairn_status improve_by_states(const crn_task *task, exact *s, int64_t budget_bytes, int64_t makespan_ns,
                                      crn_answer *answer, crn_exact_ending *how, cairn_error *error)
{
    const crn_task part = crn_task_part(task, SUFFIX_SHARE);
    crn_graph_suffix *suffix;
    CRN_TRY(crn_graph_suffix_new(&part, s->model, budget_bytes, SUFFIX_WORK, NULL, &suffix, error));
    *how = CRN_EXACT_STOPPED;
    cairn_status status =
        crn_should_stop(&part, NULL) ? CAIRN_OK : improve(task, s, suffix, makespan_ns, answer, how, error);
    crn_graph_suffix_free(suffix);
    return status;
}

static cairn_status improve_answer(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer,
                                   cairn_error *error)
{
    cairn_replay replay;
    crn_exact_ending how = CRN_EXACT_EXHAUSTED;
    CRN_TRY(judge(task, answer->builder, &replay, error));
    if (replay.makespan_ns > answer->lower_bound_ns)
        CRN_TRY(improve_by_states(task, s, budget_bytes, replay.makespan_ns, answer, &how, error));
    answer->stopped_early = how == CRN_EXACT_STOPPED;
    answer->optimal_in_class = how == CRN_EXACT_FOUND || how == CRN_EXACT_EXHAUSTED;
    if (how == CRN_EXACT_LIMITED || how == CRN_EXACT_FULL)
        snprintf(answer->reason, CAIRN_REASON_MAX, "not closed with the states that %s",
                 how == CRN_EXACT_FULL ? "memory has room for (option memory-limit)" : "it may look at");
    return CAIRN_OK;
}

/* Where the clock ends it graph-search goes on with what time is left; the better schedule is the answer. */
static cairn_status go_on(const crn_task *task, exact *s, int64_t budget_bytes, crn_answer *answer, cairn_error *error)
{
    crn_answer more;
    CRN_TRY(crn_answer_init(&more, task, error));
    more.solver = s->search->info.name;
    cairn_status status = s->search->solve(task, s->search_state, budget_bytes, &more, error);
    if (status == CAIRN_OK)
        status = crn_take_better(task, budget_bytes, answer, &more, error);
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
    answer->iterations = crn_work_limit(task, crn_exact_moves(task) / CRN_EXACT_MOVES_EACH);
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
    int64_t states = crn_min(crn_exact_states_max(task), crn_exact_moves(task));
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
