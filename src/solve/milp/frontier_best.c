#include "solve/milp/frontier_best.h"

#include "schedule/schedule.h"

enum { THRESHOLDS = 20 };

/* HiGHS's, of fractions: what is one threshold but for it counts as that threshold. */
#define TOLERANCE 1e-6

cairn_status crn_frontier_best_new(const crn_task *task, crn_frontier_best *best, cairn_error *error)
{
    *best = (crn_frontier_best){.found = false};
    CRN_TRY(cairn_builder_new(task->env, task->problem, &best->builder, error));
    return cairn_builder_new(task->env, task->problem, &best->scratch, error);
}

void crn_frontier_best_free(crn_frontier_best *best)
{
    cairn_builder_free(best->builder);
    cairn_builder_free(best->scratch);
}

static bool is_better(const crn_frontier_best *best, const cairn_replay *replay, bool by_peak)
{
    int64_t peak = replay->peak_bytes - best->replay.peak_bytes;
    int64_t makespan = replay->makespan_ns - best->replay.makespan_ns;
    int64_t first = by_peak ? peak : makespan, second = by_peak ? makespan : peak;
    return !best->found || first < 0 || (first == 0 && second < 0);
}

cairn_status crn_frontier_best_judge(const crn_task *task, int64_t budget_bytes, bool by_peak, crn_frontier_best *best,
                                     crn_frontier_trial *trial, cairn_error *error)
{
    cairn_replay replay;
    cairn_builder *tried = best->scratch;
    CRN_TRY(crn_replay(task, cairn_builder_ops(tried), cairn_builder_count(tried), CAIRN_NONE, &replay, error));
    *trial = CRN_TRIAL_IMPOSSIBLE;
    if (replay.violation.code == CAIRN_VIOLATION_OVERFLOW)
        return CAIRN_OK;
    if (!replay.valid)
        return crn_fail_at(error, CAIRN_INTERNAL, replay.violation.op, NULL, "a frontier plan is not a schedule: %s",
                           replay.violation.message);
    *trial = replay.peak_bytes <= budget_bytes ? CRN_TRIAL_FITS : CRN_TRIAL_TOO_LARGE;
    if (*trial == CRN_TRIAL_FITS && is_better(best, &replay, by_peak)) {
        best->scratch = best->builder;
        best->builder = tried;
        best->replay = replay;
        best->found = true;
    }
    return CAIRN_OK;
}

cairn_status crn_frontier_best_try(const crn_task *task, crn_frontier_plan *plan, int64_t budget_bytes, bool by_peak,
                                   crn_frontier_best *best, crn_frontier_trial *trial, cairn_error *error)
{
    *trial = CRN_TRIAL_IMPOSSIBLE;
    if (!crn_frontier_plan_complete(plan))
        return CAIRN_OK;
    cairn_builder_truncate(best->scratch, 0);
    CRN_TRY(crn_frontier_plan_emit(plan, best->scratch, error));
    return crn_frontier_best_judge(task, budget_bytes, by_peak, best, trial, error);
}

cairn_status crn_frontier_best_round(const crn_task *task, const crn_frontier_program *program, const double *values,
                                     const crn_program_goal *goal, crn_frontier_plan *plan, crn_frontier_best *best,
                                     cairn_error *error)
{
    crn_frontier_trial trial;
    for (int i = 1; i <= THRESHOLDS; i++) {
        crn_frontier_program_plan(program, values, (double)i / THRESHOLDS - TOLERANCE, plan);
        CRN_TRY(crn_frontier_best_try(task, plan, goal->budget_bytes, goal->minimize_peak, best, &trial, error));
    }
    return CAIRN_OK;
}

cairn_status crn_frontier_best_emit(const crn_frontier_best *best, cairn_builder *builder, cairn_error *error)
{
    return crn_builder_add_all(builder, cairn_builder_ops(best->builder), cairn_builder_count(best->builder), error);
}
