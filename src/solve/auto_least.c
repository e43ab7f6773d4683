/* The least memory that auto reports: the least of the solvers that it may ask. */
#include "solve/auto.h"

#include <string.h>

#include "solve/baselines.h"

static void merge_least(crn_least *best, const crn_least *own)
{
    best->lower_bytes = crn_max(best->lower_bytes, own->lower_bytes);
    if (own->bytes != CAIRN_NONE && (best->bytes == CAIRN_NONE || own->bytes < best->bytes))
        best->bytes = own->bytes;
    best->is_exact |= own->is_exact;
}

/* A session that is open knows; else one is opened for this question alone, which costs no tables. */
static cairn_status least_of(const crn_task *task, const crn_candidate *c, crn_least *own, cairn_error *error)
{
    crn_task question = *task;
    void *state;
    if (c->is_open)
        return c->solver->least(task, c->state, own, error);
    question.budget_max_bytes = 0;
    CRN_TRY(crn_solver_open(c->solver, &question, &state, error));
    cairn_status status = c->solver->least(&question, state, own, error);
    crn_solver_close(c->solver, &question, state);
    return status;
}

/*
 * Whether a candidate is left out here, too: those that minimize memory have no other way to their least than to solve.
 * `rank` is the highest of those that have answered.
 */
static bool is_left_out(const crn_task *task, const crn_candidate *c, int rank, const crn_least *least)
{
    bool is_dear = !c->is_open && c->work > CRN_WORK_MAX && least->bytes != CAIRN_NONE;
    return task->settings->minimize_memory && (crn_candidate_is_covered(c, rank) || is_dear);
}

/*
 * The others before the baselines: those have a way to their least of its own, which often ends the question, while a
 * baseline has to try all of its schedules.
 */
cairn_status crn_auto_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    crn_auto *session = state;
    cairn_status failed = CAIRN_OK;
    const char *known = NULL; /* whose least is in that of one that has answered */
    int rank = 0, count = session->count;
    CRN_TRY(crn_least_lower(task, &least->lower_bytes, error));
    for (int k = 0; k < 2 * count && !least->is_exact && least->bytes != least->lower_bytes; k++) {
        const crn_task part = crn_task_part(task, k < count ? 2 : 2 * count - k);
        crn_candidate *c = &session->candidates[k % count];
        crn_least own = {CAIRN_NONE, false, CAIRN_NONE, false};
        if (!c->solver->least || crn_is_baseline(c->solver) != (k >= count) || is_left_out(task, c, rank, least) ||
            (known && strcmp(known, c->solver->info.name) == 0))
            continue;
        cairn_status status = least_of(&part, c, &own, error);
        if (status == CAIRN_OK) {
            merge_least(least, &own);
            rank = c->solver->rank > rank ? c->solver->rank : rank;
            known = c->solver->has_least_of ? c->solver->has_least_of : known;
        } else
            failed = status;
        least->is_rough = least->is_rough || own.is_rough || status != CAIRN_OK || crn_task_is_past(&part);
    }
    return least->bytes == CAIRN_NONE ? failed : CAIRN_OK;
}
