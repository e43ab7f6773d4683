/* Whom auto may ask, and in which order; auto.c says why. */
#include "solve/auto.h"

#include <string.h>

#include "solve/baselines.h"
#include "solve/options.h"

/* Of the time left: what exhaustive search must fit to be first, what is small, what may come before one that takes all. */
enum { EXHAUSTIVE_SHARE = 4, SMALL_SHARE = 16, BEFORE_SHARE = 4 };

/* What nobody will stop. */
#define WORK_SHORT ((int64_t)1000000000)

bool crn_auto_may_ask(const crn_solver *solver, const crn_task *task)
{
    const cairn_solver_info *info = &solver->info;
    return strcmp(info->name, "auto") != 0 && !solver->available &&
           info->minimizes_memory == task->settings->minimize_memory &&
           crn_solver_takes_objective(solver, task->settings) && crn_solver_accepts(solver, task, NULL) == CAIRN_OK;
}

/* The longest work of those that are asked; what is too costly is not. */
static int64_t longest_work(const crn_auto *session)
{
    int64_t longest = 0;
    for (int i = 0; i < session->count; i++)
        if (session->candidates[i].work <= CRN_WORK_MAX)
            longest = crn_max(longest, session->candidates[i].work);
    return longest;
}

/* Whether its answer makes those needless that take all the time that they are given. */
static bool covers_anytime(const crn_task *task, const crn_solver *solver)
{
    for (const crn_solver *const *other = crn_solvers; *other; other++)
        if ((*other)->is_anytime && !(*other)->has_own_bound && (*other)->rank >= solver->rank &&
            crn_auto_may_ask(*other, task))
            return false;
    return true;
}

/* Which solvers come before others; what exhaustive search takes is known well. */
static int turn_of(const crn_task *task, const crn_candidate *c, int64_t longest)
{
    const crn_solver *solver = c->solver;
    if (strcmp(solver->info.name, "store-all") == 0)
        return 0;
    if (task->deadline_ns == CAIRN_NONE)
        return longest > WORK_SHORT && c->work <= longest / CRN_CHEAP_SHARE && !solver->has_own_bound ? 1 : 2;
    if (solver->info.exhaustive && c->work < (task->deadline_ns - crn_clock_ns()) / EXHAUSTIVE_SHARE)
        return 1;
    if (crn_is_baseline(solver))
        return solver->is_quick ? 2 : 3;
    if (solver->rank == CRN_RANK_ALL && solver->is_anytime)
        return CRN_TURN_LAST;
    int64_t left_ns = task->deadline_ns - crn_clock_ns();
    if (solver->is_anytime) /* it takes all that it is given, whatever its work */
        return solver->has_own_bound ? 4 : 6;
    if (c->work < left_ns / SMALL_SHARE)
        return 4;
    return c->work < (covers_anytime(task, solver) ? left_ns : left_ns / BEFORE_SHARE) ? CRN_TURN_SURE : 7;
}

static bool comes_before(const crn_candidate *a, const crn_candidate *b, bool has_deadline)
{
    if (a->turn != b->turn)
        return a->turn < b->turn;
    if ((has_deadline || a->turn == 1) && a->work != b->work)
        return a->work < b->work;
    return a->solver->rank > b->solver->rank;
}

/* Insertion keeps the order of the registry among equals. */
void crn_auto_put_in_order(crn_auto *session, const crn_task *task)
{
    const int64_t longest = longest_work(session);
    for (int k = 0; k < session->count; k++) {
        crn_candidate moved = session->candidates[k];
        int i = k;
        moved.turn = turn_of(task, &moved, longest);
        for (; i > 0 && comes_before(&moved, &session->candidates[i - 1], task->deadline_ns != CAIRN_NONE); i--)
            session->candidates[i] = session->candidates[i - 1];
        session->candidates[i] = moved;
    }
}
