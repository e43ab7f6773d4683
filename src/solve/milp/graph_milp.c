/*
 * graph-milp: the best frontier schedule of a graph under a byte budget, by integer programming.
 *
 * Problem   As graph-search's: nodes in a fixed order of first computation, each may be computed again.
 * Class     Frontier schedules (frontier_graph.h): Jain et al., Checkmate (2020), section 4.2, with storages instead of
 *           nodes where memory is concerned.
 * Program   frontier_program.h, solved by HiGHS (highs_library.h), which is looked for at run time.
 * Course    graph-search's answer, graph-exact's from 20 to 64 nodes, is where it starts and what it must beat. If that
 *           meets the lower bound there is nothing to do. Else branch and bound, until the least time is proved, or the
 *           work limit or the clock stops it. What HiGHS proposes is completed, written as operations and judged by the
 *           simulator; where its tolerances let a plan pass that is a few bytes too large, it is asked again with a
 *           budget that is a little smaller.
 * Optimal   Among frontier schedules, when closed. HiGHS's bound holds for that class only, so it is never called a lower
 *           bound on all schedules; the answer carries graph-bound's.
 * Least     The least peak of frontier schedules by a second program, or that of the start where it is less; smaller
 *           budgets are not tried.
 * Cost      Columns O(T^2 + T E), entries O(T^3); memory about 2 KB for an entry. Seconds at T = 50
 *           (docs/explanation/solvers/graph-milp.md).
 * Machine   Transfers are left to other solvers.
 */
#include <math.h>
#include <stdio.h>

#include "solve/milp/frontier_best.h"

/* The graphs that graph-exact is asked about first. */
enum { EXACT_NODES_MIN = 20, EXACT_NODES_MAX = 64 };

/* Of the time that is left, what the start may take. */
enum { START_SHARE = 5 };
#define START_NS_MAX ((int64_t)3000000000)

/* HiGHS takes a row for satisfied when it is passed by up to 10^-6 of its size. */
#define SECOND_MARGIN 4e-6

typedef struct milp {
    crn_frontier_graph *graph;
    crn_frontier_plan plan; /* scratch */
    const crn_solver *first;
    void *first_state;
    crn_frontier_best smallest; /* the schedule with the least peak */
    crn_least least;
    bool least_is_known;
    bool least_is_cut; /* memory, or the iterations that were asked for, ended the search for it */
    crn_arena arena;
} milp;

static void milp_close(const crn_task *task, void *session)
{
    milp *s = session;
    crn_solver_close(s->first, task, s->first_state);
    crn_frontier_best_free(&s->smallest);
    crn_frontier_graph_free(s->graph);
    crn_arena_clear(&s->arena);
}

/* Programs of smaller graphs are solved at once; larger graphs have too many states for an exact search. */
static const crn_solver *first_solver(const crn_task *task)
{
    int32_t count = cairn_problem_graph(task->problem)->node_count;
    return crn_solver_find(count >= EXACT_NODES_MIN && count <= EXACT_NODES_MAX ? "graph-exact" : "graph-search");
}

static cairn_status fill(const crn_task *task, milp *s, cairn_error *error)
{
    CRN_TRY(crn_frontier_graph_new(task, &s->graph, error));
    CRN_TRY(crn_frontier_plan_new(s->graph, &s->arena, &s->plan, error));
    CRN_TRY(crn_frontier_best_new(task, &s->smallest, error));
    s->first = first_solver(task);
    return crn_solver_open(s->first, task, &s->first_state, error);
}

static cairn_status milp_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    milp *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    return fill(task, s, error);
}

/* ---- the start ---- */

/* The first solver's answer to a budget, into best. Being stopped is not its end: the rest of the time is branch and bound's. */
static cairn_status ask_first(const crn_task *task, milp *s, int64_t budget_bytes, bool by_peak,
                              crn_frontier_best *best, int64_t *lower_bound_ns, cairn_error *error)
{
    crn_task part = *task;
    crn_frontier_trial trial;
    crn_answer answer = {.lower_bound_ns = CAIRN_NONE, .objective_bytes = CAIRN_NONE, .checkpoint_count = -1};
    if (task->deadline_ns != CAIRN_NONE) {
        int64_t now_ns = crn_clock_ns(), left_ns = crn_max(0, task->deadline_ns - now_ns);
        part.deadline_ns = now_ns + crn_min(left_ns / START_SHARE, START_NS_MAX);
    }
    cairn_builder_truncate(best->scratch, 0);
    answer.builder = best->scratch;
    cairn_status status = s->first->solve(&part, s->first_state, budget_bytes, &answer, error);
    if (status == CAIRN_CANCELLED && !crn_should_stop(task, NULL))
        return CAIRN_OK;
    CRN_TRY(status);
    *lower_bound_ns = crn_max(*lower_bound_ns, answer.lower_bound_ns);
    return answer.found ? crn_frontier_best_judge(task, budget_bytes, by_peak, best, &trial, error) : CAIRN_OK;
}

/* ---- one program ---- */

/* What a program proved. */
typedef struct proof {
    bool closed;
    bool stopped_early, out_of_memory;
    int64_t bound;      /* ns of recomputation, or bytes without the fixed ones; CAIRN_NONE */
    int64_t iterations; /* at most; 0 = there was nothing to search for */
} proof;

typedef struct attempt {
    const crn_task *task;
    milp *session;
    const crn_program_goal *goal;
    crn_frontier_best *best;
    int64_t lower_bound_ns; /* on all schedules, for those who watch */
    crn_frontier_program *program;
    crn_highs_question question;
    crn_highs_reply reply;
    crn_frontier_trial trial; /* of what HiGHS proposed */
} attempt;

/* The best schedule so far as a frontier plan, where it is one that fits. */
static cairn_status find_start(attempt *a, double *values, cairn_error *error)
{
    crn_frontier_best *best = a->best;
    crn_frontier_plan *plan = &a->session->plan;
    if (!best->found)
        return CAIRN_OK;
    crn_frontier_plan_read(plan, cairn_builder_ops(best->builder), cairn_builder_count(best->builder));
    crn_frontier_trial trial;
    CRN_TRY(crn_frontier_best_try(a->task, plan, a->goal->budget_bytes, a->goal->minimize_peak, best, &trial, error));
    if (trial != CRN_TRIAL_FITS)
        return CAIRN_OK;
    crn_frontier_program_point(a->program, plan, a->goal->budget_bytes, values);
    a->question.start = values;
    return CAIRN_OK;
}

static cairn_status ask_highs(attempt *a, cairn_error *error)
{
    crn_frontier_plan *plan = &a->session->plan;
    double relaxed = a->reply.bound;
    CRN_TRY(crn_highs_solve(a->task, &a->question, &a->reply, error));
    a->reply.bound = fmax(a->reply.bound, relaxed);
    if (!a->reply.found)
        return CAIRN_OK;
    crn_frontier_program_plan(a->program, a->reply.values, 0.5, plan);
    return crn_frontier_best_try(a->task, plan, a->goal->budget_bytes, a->goal->minimize_peak, a->best, &a->trial,
                                 error);
}

/*
 * The relaxation first: its rounding is a start where graph-search's answer is no frontier plan, and for the peak it
 * often is the end.
 */
static cairn_status ask_relaxation(attempt *a, cairn_error *error)
{
    crn_highs_question question = a->question;
    question.relax = true;
    CRN_TRY(crn_highs_solve(a->task, &question, &a->reply, error));
    if (!a->reply.found)
        return CAIRN_OK;
    return crn_frontier_best_round(a->task, a->program, a->reply.values, a->goal, &a->session->plan, a->best, error);
}

/* Nothing lies between the best schedule and the bound, or there is no frontier schedule at all. */
static bool is_closed(const attempt *a)
{
    const cairn_replay *replay = &a->best->replay;
    const crn_graph_model *model = a->session->graph->model;
    int64_t reached =
        a->goal->minimize_peak ? replay->peak_bytes - model->fixed_bytes : replay->makespan_ns - model->total_cost;
    return a->best->found ? crn_frontier_program_closes(a->program, reached, a->reply.bound)
                          : a->reply.closed && !a->reply.found;
}

static cairn_status attempt_program(attempt *a, cairn_error *error)
{
    size_t columns = (size_t)a->program->linear.columns;
    crn_arena *arena = &a->program->arena;
    double *start = crn_arena_alloc(arena, columns, sizeof(*start));
    a->reply.values = crn_arena_alloc(arena, columns, sizeof(*start));
    if (!start || !a->reply.values)
        return crn_no_memory(error);
    a->question = (crn_highs_question){.program = &a->program->linear,
                                       .gap = a->program->objective_gap,
                                       .iterations_max = crn_highs_iterations(a->task, &a->program->linear),
                                       .progress = {"branch and bound", 0, CAIRN_NONE, CAIRN_NONE, a->lower_bound_ns}};
    if (a->best->found && !a->goal->minimize_peak)
        a->question.progress.best_ns = a->best->replay.makespan_ns;
    CRN_TRY(ask_relaxation(a, error));
    a->trial = CRN_TRIAL_FITS;
    if (is_closed(a) || !a->reply.closed) /* a limit that the relaxation does not keep to leaves nothing for more */
        return CAIRN_OK;
    CRN_TRY(find_start(a, start, error));
    return ask_highs(a, error);
}

static void conclude(const attempt *a, proof *proved)
{
    proved->stopped_early = a->reply.stopped_early;
    proved->bound = crn_frontier_program_bound(a->program, a->reply.bound);
    proved->closed = is_closed(a);
    proved->iterations = a->question.iterations_max;
}

static cairn_status solve_program(attempt *a, proof *proved, cairn_error *error)
{
    CRN_TRY(crn_frontier_program_new(a->task, a->session->graph, a->goal, &a->program, error));
    cairn_status status = CAIRN_OK;
    if (a->program->impossible)
        a->reply = (crn_highs_reply){.closed = true};
    else
        status = attempt_program(a, error);
    if (status == CAIRN_OK)
        conclude(a, proved);
    crn_frontier_program_free(a->program);
    return status;
}

/*
 * Branch and bound for a goal. The bound of the first program holds for the class; a second one, when HiGHS's proposal
 * to the first was too large by its tolerances, only looks for a better schedule.
 */
static cairn_status improve(const crn_task *task, milp *s, const crn_program_goal *goal, int64_t lower_bound_ns,
                            crn_frontier_best *best, proof *proved, cairn_error *error)
{
    attempt first = {.task = task, .session = s, .goal = goal, .best = best, .lower_bound_ns = lower_bound_ns};
    CRN_TRY(solve_program(&first, proved, error));
    if (proved->closed || first.trial != CRN_TRIAL_TOO_LARGE)
        return CAIRN_OK;
    proof ignored;
    crn_program_goal smaller = *goal;
    smaller.margin = SECOND_MARGIN;
    attempt second = first;
    second.goal = &smaller;
    CRN_TRY(solve_program(&second, &ignored, error));
    proved->stopped_early = proved->stopped_early || ignored.stopped_early;
    return CAIRN_OK;
}

/* Want of memory, for the program or in HiGHS, leaves what was found before. */
static cairn_status try_to_improve(const crn_task *task, milp *s, const crn_program_goal *goal, int64_t lower_bound_ns,
                                   crn_frontier_best *best, proof *proved, cairn_error *error)
{
    cairn_status status = improve(task, s, goal, lower_bound_ns, best, proved, error);
    if (status != CAIRN_NO_MEMORY || !best->found)
        return status;
    *proved = (proof){.out_of_memory = true, .bound = CAIRN_NONE};
    return CAIRN_OK;
}

/* ---- least memory ---- */

/* From graph-search's least schedule down. */
static cairn_status find_smallest(const crn_task *task, milp *s, crn_least *least, bool *is_known, cairn_error *error)
{
    proof proved = {.closed = true};
    int64_t ignored_ns = CAIRN_NONE;
    CRN_TRY(s->first->least(task, s->first_state, least, error));
    *is_known = true;
    if (least->bytes == CAIRN_NONE || least->bytes == least->lower_bytes)
        return CAIRN_OK;
    *is_known = !crn_should_stop(task, NULL);
    if (!*is_known)
        return CAIRN_OK;
    CRN_TRY(ask_first(task, s, least->bytes, true, &s->smallest, &ignored_ns, error));
    crn_program_goal goal = {.minimize_peak = true, .budget_bytes = least->bytes, .lower_bytes = least->lower_bytes};
    CRN_TRY(try_to_improve(task, s, &goal, CAIRN_NONE, &s->smallest, &proved, error));
    if (s->smallest.found)
        least->bytes = crn_min(least->bytes, s->smallest.replay.peak_bytes);
    least->is_exact = least->bytes == least->lower_bytes;
    *is_known = !proved.stopped_early;
    s->least_is_cut = proved.out_of_memory || (!proved.closed && task->settings->iterations >= 0);
    return CAIRN_OK;
}

static cairn_status milp_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    milp *s = session;
    if (!s->least_is_known)
        CRN_TRY(find_smallest(task, s, &s->least, &s->least_is_known, error));
    *least = s->least;
    return CAIRN_OK;
}

/* ---- solving ---- */

static cairn_status start(const crn_task *task, milp *s, int64_t budget_bytes, crn_frontier_best *best,
                          crn_answer *answer, cairn_error *error)
{
    crn_least least;
    CRN_TRY(ask_first(task, s, budget_bytes, false, best, &answer->lower_bound_ns, error));
    if (best->found)
        return CAIRN_OK;
    CRN_TRY(milp_least(task, s, &least, error));
    answer->stopped_early = !s->least_is_known;
    answer->cut_short = s->least_is_cut;
    if (least.bytes == CAIRN_NONE || least.bytes > budget_bytes)
        return CAIRN_OK;
    if (!s->smallest.found || s->smallest.replay.peak_bytes > budget_bytes) { /* the first solver's, found since */
        CRN_TRY(ask_first(task, s, budget_bytes, false, best, &answer->lower_bound_ns, error));
        answer->stopped_early = !best->found;
        return CAIRN_OK;
    }
    crn_frontier_trial trial;
    cairn_builder_truncate(best->scratch, 0);
    CRN_TRY(crn_frontier_best_emit(&s->smallest, best->scratch, error));
    return crn_frontier_best_judge(task, budget_bytes, false, best, &trial, error);
}

static void say_how_open(const crn_frontier_graph *graph, const crn_frontier_best *best, const proof *proved,
                         char reason[CAIRN_REASON_MAX])
{
    int64_t makespan_ns = best->replay.makespan_ns, bound_ns = graph->model->total_cost + proved->bound;
    if (proved->out_of_memory)
        snprintf(reason, CAIRN_REASON_MAX, "not closed: no memory for branch and bound (option memory-limit)");
    else if (proved->bound == CAIRN_NONE)
        snprintf(reason, CAIRN_REASON_MAX, "not closed, and nothing known of frontier schedules alone");
    else
        snprintf(reason, CAIRN_REASON_MAX, "not closed: frontier schedules take at least %lld ns (%.3g %% less)",
                 (long long)bound_ns, 100 * (double)(makespan_ns - bound_ns) / (double)makespan_ns);
}

static cairn_status improve_answer(const crn_task *task, milp *s, int64_t budget_bytes, crn_frontier_best *best,
                                   crn_answer *answer, cairn_error *error)
{
    proof proved = {.closed = true};
    crn_program_goal goal = {.budget_bytes = budget_bytes, .lower_bytes = s->graph->model->fixed_bytes};
    if (best->replay.makespan_ns > answer->lower_bound_ns && crn_should_stop(task, NULL))
        proved = (proof){.stopped_early = true, .bound = CAIRN_NONE};
    else if (best->replay.makespan_ns > answer->lower_bound_ns)
        CRN_TRY(try_to_improve(task, s, &goal, answer->lower_bound_ns, best, &proved, error));
    answer->iterations = crn_work_limit(task, proved.iterations / CRN_HIGHS_ITERATIONS_EACH);
    answer->optimal_in_class = proved.closed;
    answer->stopped_early = proved.stopped_early;
    if (!proved.closed)
        say_how_open(s->graph, best, &proved, answer->reason);
    answer->found = true;
    return crn_frontier_best_emit(best, answer->builder, error);
}

static cairn_status solve_with(const crn_task *task, milp *s, int64_t budget_bytes, crn_frontier_best *best,
                               crn_answer *answer, cairn_error *error)
{
    const char *method;
    int64_t budget = crn_limit_of(budget_bytes);
    CRN_TRY(crn_lower_bound(task, budget_bytes, &answer->lower_bound_ns, &method, error));
    CRN_TRY(start(task, s, budget, best, answer, error));
    return best->found ? improve_answer(task, s, budget, best, answer, error) : CAIRN_OK;
}

static cairn_status milp_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    crn_frontier_best best;
    cairn_status status = crn_frontier_best_new(task, &best, error);
    if (status == CAIRN_OK)
        status = solve_with(task, session, budget_bytes, &best, answer, error);
    crn_frontier_best_free(&best);
    return status;
}

static int64_t milp_memory(const crn_task *task)
{
    int64_t own = crn_frontier_program_bytes(cairn_problem_graph(task->problem));
    int64_t start = first_solver(task)->memory(task);
    return crn_add_saturating(own, start);
}

#define INFO(is_available)                                                                                           \
    {                                                                                                                \
        .name = "graph-milp", .takes_graphs = true, .available = (is_available), .optimal_in = "frontier",           \
        .summary = "integer program of stages in which each node runs at most once, by HiGHS",                       \
        .source = "Jain et al. 2020 (Checkmate), section 4", .cost = "seconds to a minute at T = 50; memory O(T^3)", \
    }

static const cairn_solver_info absent = INFO(false);

const crn_solver crn_graph_milp_solver = {
    .info = INFO(true),
    .options = "iterations seed",
    .absent = &absent,
    .available = crn_highs_available,
    .accepts = crn_frontier_accepts,
    .memory = milp_memory,
    .open = milp_open,
    .close = milp_close,
    .least = milp_least,
    .solve = milp_solve,
};
