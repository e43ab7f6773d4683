/*
 * graph-lp-round: the relaxation of graph-milp's program, rounded in two phases.
 *
 * Source    Jain et al., Checkmate (MLSys 2020), "two-phase rounding": solve the program with fractions allowed; hold what
 *           is held to at least a threshold; then each stage computes the least that it needs for that, by one traversal.
 * Here      Twenty thresholds instead of one half. What they make is written as operations and judged by the simulator;
 *           of what fits, the fastest. Rounding may need more memory than the fractions did, so the program is solved for
 *           the budget and for smaller ones.
 * Least     The least peak among roundings of the relaxation that minimizes the peak, and storing everything. That
 *           schedule answers budgets for which no rounding fits; smaller budgets are not tried.
 * Cost      Four linear programs of O(T^2 + T E) columns and O(T^3) entries: 0.1 s each at T = 50, a second at T = 100.
 */
#include "solve/milp/frontier_best.h"

/* What memory rows leave free of the budget, in one program after the other: rounding takes more than fractions do. */
static const double margins[] = {0, 0.05, 0.1, 0.2};

enum { MARGINS = sizeof(margins) / sizeof(margins[0]) };

typedef struct rounding {
    crn_frontier_graph *graph;
    crn_frontier_plan plan; /* scratch */
    crn_frontier_best smallest;
    int64_t lower_bytes;
    bool stopped_early;
    bool cut_short; /* by the iterations that were asked for */
    crn_arena arena;
} rounding;

static void round_close(const crn_task *task, void *session)
{
    rounding *r = session;
    (void)task;
    crn_frontier_best_free(&r->smallest);
    crn_frontier_graph_free(r->graph);
    crn_arena_clear(&r->arena);
}

/* ---- one program ---- */

typedef struct attempt {
    const crn_task *task;
    rounding *rounding;
    const crn_program_goal *goal;
    crn_frontier_best *best;
    bool stopped_early, cut_short;
    int64_t iterations; /* at most; 0 = there was nothing to relax */
} attempt;

static cairn_status relax(attempt *a, crn_frontier_program *program, cairn_error *error)
{
    crn_highs_reply reply = {.values =
                                 crn_arena_alloc(&program->arena, (size_t)program->linear.columns, sizeof(double))};
    crn_highs_question question = {.program = &program->linear,
                                   .relax = true,
                                   .iterations_max = crn_highs_iterations(a->task, &program->linear),
                                   .progress = {"relaxation", CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE}};
    if (!reply.values)
        return crn_no_memory(error);
    CRN_TRY(crn_highs_solve(a->task, &question, &reply, error));
    a->stopped_early = reply.stopped_early;
    a->cut_short = !reply.closed && a->task->settings->iterations >= 0;
    a->iterations = question.iterations_max;
    if (!reply.found)
        return CAIRN_OK;
    return crn_frontier_best_round(a->task, program, reply.values, a->goal, &a->rounding->plan, a->best, error);
}

static cairn_status attempt_goal(attempt *a, cairn_error *error)
{
    crn_frontier_program *program;
    a->stopped_early = crn_should_stop(a->task, NULL);
    if (a->stopped_early)
        return CAIRN_OK;
    CRN_TRY(crn_frontier_program_new(a->task, a->rounding->graph, a->goal, &program, error));
    cairn_status status = program->impossible ? CAIRN_OK : relax(a, program, error);
    crn_frontier_program_free(program);
    return status;
}

/* Holding everything is storing everything: the plan drops what serves nothing. */
static cairn_status store_all(const crn_task *task, rounding *r, int64_t budget_bytes, bool by_peak,
                              crn_frontier_best *best, cairn_error *error)
{
    crn_frontier_trial trial;
    size_t n = (size_t)r->graph->model->node_count;
    for (size_t at = 0; at < n * (n + 1); at++)
        r->plan.held[at] = true;
    return crn_frontier_best_try(task, &r->plan, budget_bytes, by_peak, best, &trial, error);
}

/* ---- the solver ---- */

static cairn_status find_smallest(const crn_task *task, rounding *r, cairn_error *error)
{
    CRN_TRY(crn_least_lower(task, &r->lower_bytes, error));
    CRN_TRY(store_all(task, r, INT64_MAX, true, &r->smallest, error));
    crn_program_goal goal = {
        .minimize_peak = true, .budget_bytes = r->smallest.replay.peak_bytes, .lower_bytes = r->lower_bytes};
    attempt a = {.task = task, .rounding = r, .goal = &goal, .best = &r->smallest};
    if (goal.budget_bytes > r->lower_bytes)
        CRN_TRY(attempt_goal(&a, error));
    r->stopped_early = a.stopped_early;
    r->cut_short = a.cut_short;
    return CAIRN_OK;
}

static cairn_status fill(const crn_task *task, rounding *r, cairn_error *error)
{
    CRN_TRY(crn_frontier_graph_new(task, &r->graph, error));
    CRN_TRY(crn_frontier_plan_new(r->graph, &r->arena, &r->plan, error));
    CRN_TRY(crn_frontier_best_new(task, &r->smallest, error));
    return find_smallest(task, r, error);
}

static cairn_status round_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    rounding *r = crn_arena_alloc_zero(&arena, 1, sizeof(*r));
    *session = r;
    if (!r)
        return crn_no_memory(error);
    r->arena = arena;
    return fill(task, r, error);
}

static cairn_status round_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const rounding *r = session;
    (void)task;
    (void)error;
    least->bytes = r->smallest.replay.peak_bytes;
    least->lower_bytes = r->lower_bytes;
    least->is_exact = least->bytes == least->lower_bytes;
    return CAIRN_OK;
}

/* The fastest of all roundings, unless everything can be stored. */
static cairn_status find_best(const crn_task *task, rounding *r, int64_t budget_bytes, crn_frontier_best *best,
                              crn_answer *answer, cairn_error *error)
{
    CRN_TRY(store_all(task, r, budget_bytes, false, best, error));
    if (best->found)
        return CAIRN_OK;
    for (int i = 0; i < MARGINS && !answer->stopped_early; i++) {
        crn_program_goal goal = {.budget_bytes = budget_bytes, .margin = margins[i]};
        attempt a = {.task = task, .rounding = r, .goal = &goal, .best = best};
        CRN_TRY(attempt_goal(&a, error));
        answer->stopped_early = a.stopped_early;
        answer->iterations =
            crn_max(answer->iterations, crn_work_limit(task, a.iterations / CRN_HIGHS_ITERATIONS_EACH));
    }
    return CAIRN_OK;
}

static cairn_status round_within(const crn_task *task, rounding *r, int64_t budget_bytes, crn_frontier_best *best,
                                 crn_answer *answer, cairn_error *error)
{
    if (r->smallest.replay.peak_bytes > budget_bytes) {
        answer->stopped_early = r->stopped_early;
        answer->cut_short = r->cut_short;
        return CAIRN_OK;
    }
    CRN_TRY(find_best(task, r, budget_bytes, best, answer, error));
    answer->found = true;
    return crn_frontier_best_emit(best->found ? best : &r->smallest, answer->builder, error);
}

static cairn_status round_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    crn_frontier_best best;
    int64_t budget = crn_limit_of(budget_bytes);
    cairn_status status = crn_frontier_best_new(task, &best, error);
    if (status == CAIRN_OK)
        status = round_within(task, session, budget, &best, answer, error);
    crn_frontier_best_free(&best);
    return status;
}

static int64_t round_memory(const crn_task *task)
{
    return crn_frontier_program_bytes(cairn_problem_graph(task->problem));
}

#define INFO(is_available)                                                                             \
    {                                                                                                  \
        .name = "graph-lp-round", .takes_graphs = true, .available = (is_available), .optimal_in = "", \
        .summary = "relaxation of graph-milp's program, rounded",                                      \
        .source = "Jain et al. 2020 (Checkmate), two-phase rounding",                                  \
        .cost = "a second at T = 50, some seconds at T = 100; memory O(T^3)",                          \
    }

static const cairn_solver_info absent = INFO(false);

const crn_solver crn_graph_lp_round_solver = {
    .info = INFO(true),
    .options = "iterations seed",
    .absent = &absent,
    .available = crn_highs_available,
    .accepts = crn_frontier_accepts,
    .memory = round_memory,
    .open = round_open,
    .close = round_close,
    .least = round_least,
    .solve = round_solve,
};
