/*
 * joint-graph: graphs in which every value may stay, be recomputed, or be offloaded.
 *
 * Problem   A graph and its link to host memory. Least time within the device's budget and the host's.
 * Lists     What is computed, and when, comes from a search in which a value that does not fit is recomputed or fetched
 *           from the host, at several prices of the link (link_lists.h); from searches without fetches under larger budgets;
 *           from graph-search at such budgets, where the real one is too small for it; and from storing everything.
 * Fit       Each list is made to fit the budget by offloading storages; a storage leaves and comes back with its base,
 *           aliases are computed again, outputs need not come back. The best lists are improved by ruin and recreate
 *           (joint_search.h, joint_fit.h), their transfers placed by transfer.h.
 * Never     worse than any solver without transfers that auto asks: their answers are among the starting points.
 * Optimal   When it meets the bound (joint_bound.c).
 * Cost      graph-search's, and half as much again: seconds at T = 400. Without a time limit, by work and
 *           not by the clock.
 */
#include "solve/joint/joint_portfolio.h"
#include "solve/joint/joint_session.h"
#include "solve/link_lists.h"

enum { GRID = 8, SHARE = 24, FIRST_SHARE = 4 };

/* ---- lists ---- */

static cairn_status take_list(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    crn_joint_search *search = context;
    (void)budget_bytes;
    if (crn_joint_is_done(search))
        return CAIRN_OK;
    return crn_joint_offer_list(search, own->builder, NULL, error);
}

static cairn_status offer_store_all(crn_joint_search *search, cairn_error *error)
{
    static const int64_t none = CAIRN_NONE;
    crn_task sub = crn_task_without_machine(search->task);
    sub.budget_max_bytes = CAIRN_NONE;
    return crn_joint_ask(&sub, "store-all", &none, 1, take_list, search, NULL, &search->cut_short, error);
}

static int64_t default_rounds(const crn_task *task, int64_t work)
{
    return crn_max(16, work / (cairn_problem_graph(task->problem)->node_count + 100));
}

/* For one of several runs of graph-search. */
static crn_settings with_fewer_rounds(const crn_task *task)
{
    crn_settings settings = *task->settings;
    int64_t rounds = default_rounds(task, INT64_C(30000000)) / SHARE;
    settings.iterations = settings.iterations >= 0 ? crn_min(settings.iterations, rounds) : rounds;
    return settings;
}

static cairn_status take_link_list(void *context, const cairn_builder *list, const bool *goes, bool improve,
                                   int64_t *makespan_ns, cairn_error *error)
{
    return crn_joint_try_list(context, list, goes, improve, makespan_ns, error);
}

static bool is_done(void *context)
{
    return crn_joint_is_done(context);
}

/* Lists under larger budgets, the smallest first. */
typedef struct larger {
    crn_joint_search *search;
    bool has_smallest;
} larger;

/* Without memory for them, the search goes on with the lists that it has. */
static cairn_status offer_link_lists(crn_joint_search *search, const cairn_builder *start, cairn_error *error)
{
    const crn_link_sink sink = {search, take_link_list, is_done};
    bool by_work = search->task->deadline_ns == CAIRN_NONE;
    int64_t rounds = by_work ? with_fewer_rounds(search->task).iterations : INT64_MAX;
    cairn_status status = crn_link_lists(search->task, search->budget_bytes, start, rounds, &sink, error);
    search->cut_short = search->cut_short || status == CAIRN_NO_MEMORY;
    return status == CAIRN_NO_MEMORY ? CAIRN_OK : status;
}

/* A list that needs more than the budget; from the smallest one, others for the link. */
static cairn_status take_larger(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    larger *lists = context;
    bool is_smallest = !lists->has_smallest;
    (void)budget_bytes;
    if (crn_joint_is_done(lists->search))
        return CAIRN_OK;
    lists->has_smallest = true;
    CRN_TRY(crn_joint_offer_list(lists->search, own->builder, NULL, error));
    return is_smallest ? offer_link_lists(lists->search, own->builder, error) : CAIRN_OK;
}

/* graph-search at budgets from its least to storing everything, each with a share of its usual rounds. */
static cairn_status offer_larger(const crn_joint *s, crn_joint_search *search, cairn_error *error)
{
    int64_t budgets[GRID], span = s->store_all_bytes - s->lists_bytes;
    larger lists = {search, false};
    crn_task sub = crn_task_without_machine(search->task);
    const crn_settings settings = with_fewer_rounds(&sub);
    sub.settings = &settings;
    sub.budget_max_bytes = CAIRN_NONE;
    for (int32_t i = 0; i < GRID; i++)
        budgets[i] = s->lists_bytes + crn_max(0, span) / GRID * i;
    return crn_joint_ask(&sub, "graph-search", budgets, GRID, take_larger, &lists, NULL, &search->cut_short, error);
}

/* From the best schedule without transfers that is known; where the budget is too small for one, from larger ones. */
static cairn_status offer_lists(const crn_joint *s, crn_joint_search *search, cairn_error *error)
{
    const crn_task *task = search->task;
    const cairn_builder *known = task->known_list ? task->known_list : task->known ? task->known : search->best;
    if (search->budget_bytes < s->lists_bytes && s->lists_bytes < INT64_MAX)
        return offer_larger(s, search, error);
    return offer_link_lists(search, known, error);
}

/* ---- the solver ---- */

static cairn_status take_schedule(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    (void)budget_bytes;
    return crn_joint_offer(context, own->builder, "brute-graph", error);
}

static cairn_status take_search(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    (void)budget_bytes;
    return crn_joint_offer(context, own->builder, "graph-search", error);
}

/* For whoever stops it: an answer without transfers, before lists are made to fit, which may take longer. */
static cairn_status offer_first(crn_joint_search *search, int64_t budget_bytes, cairn_error *error)
{
    const crn_task sub = crn_task_without_machine(search->task);
    crn_task part = crn_task_part(&sub, FIRST_SHARE);
    const crn_settings settings = with_fewer_rounds(&sub);
    if (sub.deadline_ns == CAIRN_NONE)
        part.settings = &settings;
    return crn_joint_ask(&part, "graph-search", &budget_bytes, 1, take_search, search, NULL, &search->cut_short, error);
}

/* With what a list fits when all that waits is offloaded. */
typedef struct need {
    const crn_task *task;
    int64_t bytes;
} need;

static cairn_status take_need(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    need *n = context;
    crn_transfer *transfer;
    crn_fit *fit;
    (void)budget_bytes;
    cairn_status status =
        crn_transfer_new(n->task, cairn_builder_ops(own->builder), cairn_builder_count(own->builder), &transfer, error);
    if (status != CAIRN_OK)
        return status == CAIRN_UNSUPPORTED ? CAIRN_OK : status;
    CRN_TRY(crn_fit_new(transfer, 1, &fit, error));
    n->bytes = crn_fit_need(fit);
    crn_fit_free(fit);
    return CAIRN_OK;
}

static cairn_status lower_least(const crn_task *task, crn_joint *s, cairn_error *error)
{
    static const int64_t none = CAIRN_NONE;
    crn_task sub = crn_task_without_machine(task);
    need storing = {task, INT64_MAX};
    sub.budget_max_bytes = CAIRN_NONE;
    CRN_TRY(crn_joint_ask(&sub, "graph-search", NULL, 0, NULL, NULL, &s->lists_bytes, &s->is_rough, error));
    s->least_bytes = s->lists_bytes;
    CRN_TRY(crn_joint_ask(&sub, "auto", NULL, 0, NULL, NULL, &s->least_bytes, &s->is_rough, error));
    CRN_TRY(crn_joint_ask(&sub, "brute-graph", NULL, 0, NULL, NULL, &s->least_bytes, &s->is_rough, error));
    CRN_TRY(crn_joint_ask(&sub, "store-all", &none, 1, take_need, &storing, NULL, &s->is_rough, error));
    s->least_bytes = crn_min(s->least_bytes, storing.bytes);
    return CAIRN_OK;
}

static cairn_status joint_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_joint_open(task, lower_least, session, error);
}

static int64_t rounds_of(const crn_task *task)
{
    return crn_joint_rounds(task, default_rounds(task, INT64_C(1500000)));
}

static cairn_status search_all(const crn_joint *s, crn_joint_search *search, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    crn_task sub = crn_task_without_machine(search->task);
    CRN_TRY(search->task->known ? crn_joint_offer_known(search, error) : offer_first(search, budget_bytes, error));
    CRN_TRY(offer_store_all(search, error));
    if (!crn_joint_is_done(search))
        CRN_TRY(offer_lists(s, search, error));
    if (!crn_joint_is_done(search))
        CRN_TRY(crn_joint_ask(&sub, "brute-graph", &budget_bytes, 1, take_schedule, search, NULL, &search->cut_short,
                              error));
    if (!crn_joint_is_done(search) && !search->task->known)
        CRN_TRY(crn_joint_ask_alone(search, NULL, NULL, 0, error));
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
    const crn_solver *search = crn_solver_find("graph-search");
    int64_t nodes = cairn_problem_graph(task->problem)->node_count;
    return (crn_joint_pool_size(task) + 2) * crn_transfer_memory(task, 4 * nodes + 64) + search->memory(task) +
           crn_link_lists_memory((int32_t)nodes) + (1 << 20);
}

/* Measured: ten seconds or more for graphs of some hundred nodes, of which the larger ones get fewer rounds. */
static int64_t joint_work(const crn_task *task)
{
    const int64_t node_ns = 25000000, most_ns = INT64_C(10000000000);
    return crn_min(node_ns * cairn_problem_graph(task->problem)->node_count, most_ns);
}

const crn_solver crn_joint_graph_solver = {
    .info = {.name = "joint-graph",
             .takes_graphs = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "",
             .summary = "values stay, are recomputed or offloaded: never worse than recomputation alone",
             .source = "Cairn",
             .cost = "seconds at T = 400"},
    .options = "iterations seed",
    .memory = joint_memory,
    .work = joint_work,
    .rank = CRN_RANK_ALL,
    .is_anytime = true,
    .has_own_bound = true,
    .open = joint_open,
    .close = crn_joint_close,
    .least = crn_joint_least,
    .solve = joint_solve,
};
