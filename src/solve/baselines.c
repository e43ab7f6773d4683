#include "solve/baselines.h"

#include <stdio.h>
#include <string.h>

bool crn_is_baseline(const crn_solver *solver)
{
    return !solver->work && !solver->is_anytime && !solver->available && !solver->info.exhaustive &&
           strcmp(solver->info.name, "auto") != 0;
}

int64_t crn_baselines_end(const crn_task *task)
{
    return crn_task_part(task, CRN_BASELINES_SHARE).deadline_ns;
}

crn_task crn_baseline_part(const crn_task *task, const crn_solver *solver, int64_t pool_end_ns, int64_t left)
{
    crn_task part = *task;
    if (solver->is_quick || task->deadline_ns == CAIRN_NONE)
        return crn_task_part(task, 2);
    part.deadline_ns = pool_end_ns;
    return crn_task_part(&part, left);
}

/* Whether the clock may cut a solver off: its estimate exceeds half of the time, or it has no estimate of its work. */
bool crn_may_be_cut(const crn_solver *solver, const crn_task *task)
{
    if (task->deadline_ns == CAIRN_NONE || task->settings->minimize_memory || solver->is_quick ||
        strcmp(solver->info.name, "auto") == 0)
        return false;
    return !solver->work || solver->work(task) > (task->deadline_ns - crn_clock_ns()) / 2;
}

/* ---- the better of two ---- */

static cairn_status replay_of(const crn_task *task, int64_t budget_bytes, const crn_answer *answer,
                              cairn_replay *replay, cairn_error *error)
{
    *replay = (cairn_replay){.valid = false};
    if (!answer->found)
        return CAIRN_OK;
    return crn_replay(task, cairn_builder_ops(answer->builder), cairn_builder_count(answer->builder), budget_bytes,
                      replay, error);
}

static bool is_better(const cairn_replay *replay, const cairn_replay *than)
{
    if (!replay->valid || !than->valid)
        return replay->valid;
    return replay->makespan_ns < than->makespan_ns;
}

cairn_status crn_take_better(const crn_task *task, int64_t budget_bytes, crn_answer *answer, crn_answer *other,
                             cairn_error *error)
{
    cairn_replay own, others;
    CRN_TRY(replay_of(task, budget_bytes, answer, &own, error));
    CRN_TRY(replay_of(task, budget_bytes, other, &others, error));
    if (!is_better(&others, &own))
        return CAIRN_OK;
    cairn_builder *builder = answer->builder;
    answer->builder = other->builder;
    other->builder = builder;
    other->found = answer->found;
    answer->found = true;
    answer->optimal_in_class = false;
    snprintf(answer->reason, CAIRN_REASON_MAX, "stopped before it had found as much as %s, whose schedule this is",
             other->solver);
    return CAIRN_OK;
}

/* ---- all baselines ---- */

static bool is_asked(const crn_solver *solver, const crn_task *task)
{
    return crn_is_baseline(solver) && crn_solver_accepts(solver, task, NULL) == CAIRN_OK;
}

/* How many are asked, the quick ones or the others. */
static int64_t count_asked(const crn_task *task, bool quick)
{
    int64_t count = 0;
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++)
        count += (*solver)->is_quick == quick && is_asked(*solver, task);
    return count;
}

static cairn_status ask_one(const crn_task *part, const crn_solver *solver, int64_t budget_bytes, crn_answer *answer,
                            cairn_error *error)
{
    void *state;
    CRN_TRY(crn_solver_open(solver, part, &state, error));
    cairn_status status = solver->solve(part, state, budget_bytes, answer, error);
    crn_solver_close(solver, part, state);
    answer->solver = solver->info.name;
    return status;
}

/* Asks one, and keeps the better schedule and its solver's name. */
static cairn_status consider(const crn_task *part, const crn_solver *solver, int64_t budget_bytes, crn_answer *best,
                             cairn_error *error)
{
    crn_answer own;
    CRN_TRY(crn_answer_init(&own, part, error));
    cairn_status status = ask_one(part, solver, budget_bytes, &own, error);
    bool had_one = best->found;
    if (status == CAIRN_OK && own.found) {
        const cairn_builder *before = best->builder;
        status = crn_take_better(part, budget_bytes, best, &own, error);
        if (best->builder != before || !had_one)
            best->solver = own.solver;
    }
    crn_answer_clear(&own, part);
    return status;
}

static bool is_forgiven(cairn_status status)
{
    return status == CAIRN_OK || status == CAIRN_CANCELLED || status == CAIRN_NO_MEMORY;
}

static cairn_status ask_all(const crn_task *task, bool quick, int64_t budget_bytes, crn_answer *answer,
                            cairn_error *error)
{
    const int64_t end_ns = crn_baselines_end(task);
    int64_t left = count_asked(task, quick);
    for (const crn_solver *const *solver = crn_solvers; *solver && !crn_should_stop(task, NULL); solver++) {
        if ((*solver)->is_quick != quick || !is_asked(*solver, task))
            continue;
        const crn_task part = crn_baseline_part(task, *solver, end_ns, left--);
        cairn_status status = consider(&part, *solver, budget_bytes, answer, error);
        if (!is_forgiven(status))
            return status;
    }
    return CAIRN_OK;
}

cairn_status crn_baselines_solve(const crn_task *task, const crn_solver *whose, int64_t budget_bytes,
                                 crn_answer *answer, cairn_error *error)
{
    CRN_TRY(ask_all(task, true, budget_bytes, answer, error));
    return crn_is_baseline(whose) ? CAIRN_OK : ask_all(task, false, budget_bytes, answer, error);
}
