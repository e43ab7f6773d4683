/* Other solvers as sources of schedules and lists; see joint_portfolio.h. */
#include "solve/joint/joint_portfolio.h"

#include <string.h>

/* ---- one solver ---- */

static bool is_cut_short(cairn_status status)
{
    return status == CAIRN_CANCELLED || status == CAIRN_NO_MEMORY || status == CAIRN_MEMORY_LIMIT;
}

static bool is_passed_over(cairn_status status)
{
    return is_cut_short(status) || status == CAIRN_UNSUPPORTED || status == CAIRN_UNAVAILABLE;
}

static cairn_status ask_once(const crn_task *task, const crn_solver *solver, void *state, int64_t budget_bytes,
                             crn_joint_take take, void *context, bool *cut_short, cairn_error *error)
{
    crn_answer own;
    CRN_TRY(crn_answer_init(&own, task, error));
    cairn_status status = solver->solve(task, state, budget_bytes, &own, error);
    *cut_short = *cut_short || own.stopped_early || own.cut_short;
    if (status == CAIRN_OK && own.found)
        status = take(context, budget_bytes, &own, error);
    crn_answer_clear(&own, task);
    return status;
}

static cairn_status ask_least(const crn_task *task, const crn_solver *solver, void *state, int64_t *least_bytes,
                              bool *cut_short, cairn_error *error)
{
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    if (!least_bytes || !solver->least)
        return CAIRN_OK;
    CRN_TRY(solver->least(task, state, &least, error));
    *cut_short = *cut_short || least.is_rough;
    if (least.bytes != CAIRN_NONE)
        *least_bytes = crn_min(*least_bytes, least.bytes);
    return CAIRN_OK;
}

cairn_status crn_joint_ask(const crn_task *task, const char *name, const int64_t *budgets, int32_t count,
                           crn_joint_take take, void *context, int64_t *least_bytes, bool *cut_short,
                           cairn_error *error)
{
    const crn_solver *solver = crn_solver_find(name);
    void *state;
    if (!solver || crn_solver_accepts(solver, task, NULL) != CAIRN_OK)
        return CAIRN_OK;
    if (solver->memory && solver->memory(task) > crn_memory_limit(task->settings)) {
        *cut_short = *cut_short || task->settings->memory_limit_bytes != CAIRN_NONE;
        return CAIRN_OK;
    }
    cairn_status status = crn_solver_open(solver, task, &state, error);
    for (int32_t i = 0; status == CAIRN_OK && i < count && (i == 0 || !crn_should_stop(task, NULL)); i++)
        status = ask_once(task, solver, state, budgets[i], take, context, cut_short, error);
    if (status == CAIRN_OK)
        status = ask_least(task, solver, state, least_bytes, cut_short, error);
    crn_solver_close(solver, task, state);
    *cut_short = *cut_short || is_cut_short(status) || crn_task_is_past(task);
    return is_passed_over(status) ? CAIRN_OK : status;
}

cairn_status crn_joint_ask_shared(const crn_task *task, const int64_t *budgets, int32_t count, crn_joint_take take,
                                  void *context, bool *cut_short, cairn_error *error)
{
    const crn_shared_session *shared = task->shared;
    cairn_status status = CAIRN_OK;
    for (int32_t i = 0; shared && status == CAIRN_OK && i < count && !crn_should_stop(task, NULL); i++)
        status = ask_once(task, shared->solver, shared->state, budgets[i], take, context, cut_short, error);
    *cut_short = *cut_short || is_cut_short(status);
    return is_passed_over(status) ? CAIRN_OK : status;
}

/* ---- all solvers without transfers ---- */

/*
 * Of the time that is left, one of so many parts is for them; and of that, what those may take that are asked first, so
 * that there is something to go on with when it ends.
 */
enum { ALONE_SHARE = 2, QUICK_SHARE = 16 };

/* When solvers are asked: the quick ones under a time limit, the others, and those that may take too long. */
typedef enum turn { QUICK, USUAL, DEAR } turn;

typedef struct candidate {
    const crn_solver *solver;
    turn turn;
} candidate;

typedef struct asking {
    crn_joint_search *search;
    candidate candidates[CRN_SOLVERS_MAX];
    int count;
    const crn_solver *solver; /* who is being asked */
    int64_t budget_bytes;     /* the search's, as solvers want it */
    int64_t quick_work;       /* who takes no more is quick; below 0 = nobody is */
    int rank;                 /* of those that answered completely */
} asking;

static cairn_status take_answer(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    asking *a = context;
    if (budget_bytes == a->budget_bytes) {
        if (!own->stopped_early && !own->cut_short && a->solver->rank > a->rank)
            a->rank = a->solver->rank;
        CRN_TRY(crn_joint_offer(a->search, own->builder, a->solver->info.name, error));
    }
    if (budget_bytes == CAIRN_NONE || a->search->best_ns <= a->search->bound_ns)
        return CAIRN_OK;
    return crn_joint_offer_list(a->search, own->builder, NULL, error);
}

static bool is_alone(const crn_task *sub, const crn_solver *solver)
{
    const cairn_solver_info *info = &solver->info;
    return strcmp(info->name, "auto") != 0 && !info->needs_machine && !info->minimizes_memory && !solver->available &&
           crn_solver_accepts(solver, sub, NULL) == CAIRN_OK;
}

static turn turn_of(const asking *a, const crn_task *sub, const crn_solver *solver)
{
    int64_t work = solver->work ? solver->work(sub) : 0;
    if (work > CRN_WORK_MAX)
        return DEAR;
    return work <= a->quick_work && !solver->has_own_bound ? QUICK : USUAL;
}

/* The strongest first, in the order of the registry among equals. */
static void list_solvers(asking *a, const crn_task *sub)
{
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++) {
        int at = a->count;
        if (!is_alone(sub, *solver))
            continue;
        for (; at > 0 && a->candidates[at - 1].solver->rank < (*solver)->rank; at--)
            a->candidates[at] = a->candidates[at - 1];
        a->candidates[at] = (candidate){*solver, turn_of(a, sub, *solver)};
        a->count++;
    }
}

static cairn_status ask_ranked(asking *a, const crn_task *sub, turn whose, const char *lists_of, const int64_t *budgets,
                               int32_t count, cairn_error *error)
{
    crn_joint_search *search = a->search;
    for (int i = 0; i < a->count; i++) {
        a->solver = a->candidates[i].solver;
        const char *name = a->solver->info.name;
        bool lists = lists_of && strcmp(name, lists_of) == 0,
             covered = a->solver->rank > 0 && a->solver->rank < a->rank;
        if (a->candidates[i].turn != whose || search->best_ns <= search->bound_ns ||
            (whose == DEAR && search->best_ns < INT64_MAX) || (covered && !lists) || crn_should_stop(sub, NULL))
            continue;
        CRN_TRY(crn_joint_ask(sub, name, lists ? budgets : &a->budget_bytes, lists ? count : 1, take_answer, a, NULL,
                              &a->search->cut_short, error));
    }
    return CAIRN_OK;
}

cairn_status crn_joint_ask_alone(crn_joint_search *search, const char *lists_of, const int64_t *budgets, int32_t count,
                                 cairn_error *error)
{
    crn_task sub = crn_task_part(search->task, ALONE_SHARE);
    asking a = {.search = search,
                .budget_bytes = search->budget_bytes == INT64_MAX ? CAIRN_NONE : search->budget_bytes,
                .quick_work = -1};
    if (sub.deadline_ns != CAIRN_NONE)
        a.quick_work = crn_max(0, sub.deadline_ns - crn_clock_ns()) / QUICK_SHARE;
    sub.machine = NULL;
    for (int32_t i = 0; i < count; i++)
        if (sub.budget_max_bytes != CAIRN_NONE)
            sub.budget_max_bytes = crn_max(sub.budget_max_bytes, budgets[i]);
    list_solvers(&a, &sub);
    CRN_TRY(ask_ranked(&a, &sub, QUICK, lists_of, budgets, count, error));
    CRN_TRY(ask_ranked(&a, &sub, USUAL, lists_of, budgets, count, error));
    return ask_ranked(&a, &sub, DEAR, NULL, NULL, 0, error);
}
