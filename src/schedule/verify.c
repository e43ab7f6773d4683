/* Verification: a replay, then the recorded makespan and peak against one under the recorded budget. */
#include <inttypes.h>

#include "base/failure.h"
#include "schedule/schedule.h"
#include "schedule/violation.h"

struct cairn_verified {
    cairn_allocator allocator;
    const cairn_problem *problem;
    const cairn_schedule *schedule;
    int64_t budget_bytes; /* as cairn_verify took it */
    cairn_replay replay;
};

/* Compares what is recorded with what the recorded budget gives; a difference becomes the violation of replay. */
static void compare_recorded(const cairn_schedule_info *recorded, const cairn_replay *found, cairn_replay *replay)
{
    bool wrong_makespan = recorded->makespan_ns != CAIRN_NONE && recorded->makespan_ns != found->makespan_ns;
    bool wrong_peak = recorded->peak_bytes != CAIRN_NONE && recorded->peak_bytes != found->peak_bytes;
    cairn_violation_code code = wrong_makespan ? CAIRN_VIOLATION_RECORDED_MAKESPAN : CAIRN_VIOLATION_RECORDED_PEAK;
    if (!wrong_makespan && !wrong_peak)
        return;
    if (!found->valid)
        crn_replay_violate(replay, code, CAIRN_NONE, "%s: there is none under the recorded budget (%s)",
                           crn_violation_text(code), found->violation.message);
    else
        crn_replay_violate(replay, code, CAIRN_NONE, "%s: %" PRId64 " is recorded and %" PRId64 " simulated",
                           crn_violation_text(code), wrong_makespan ? recorded->makespan_ns : recorded->peak_bytes,
                           wrong_makespan ? found->makespan_ns : found->peak_bytes);
}

static cairn_status judge(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                          int64_t budget_bytes, cairn_replay *replay, cairn_error *error)
{
    const cairn_schedule_info *recorded = &schedule->info;
    cairn_replay under_recorded;
    CRN_TRY(cairn_simulate(env, problem, schedule, budget_bytes, NULL, replay, error));
    if (!replay->valid || (recorded->makespan_ns == CAIRN_NONE && recorded->peak_bytes == CAIRN_NONE))
        return CAIRN_OK;
    under_recorded = *replay;
    if (budget_bytes != CAIRN_RECORDED && budget_bytes != recorded->budget_bytes)
        CRN_TRY(cairn_simulate(env, problem, schedule, CAIRN_RECORDED, NULL, &under_recorded, error));
    compare_recorded(recorded, &under_recorded, replay);
    return CAIRN_OK;
}

static cairn_status make_verified(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                                  int64_t budget_bytes, const cairn_replay *replay, cairn_verified **verified,
                                  cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    *verified = crn_alloc(&allocator, 1, sizeof(**verified));
    if (!*verified)
        return crn_no_memory(error);
    **verified = (cairn_verified){allocator, problem, schedule, budget_bytes, *replay};
    return CAIRN_OK;
}

cairn_status cairn_verify(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                          int64_t budget_bytes, cairn_verified **verified, cairn_replay *replay, cairn_error *error)
{
    if (verified)
        *verified = NULL;
    cairn_status status = judge(env, problem, schedule, budget_bytes, replay, error);
    if (status == CAIRN_OK && verified && replay->valid)
        status = make_verified(env, problem, schedule, budget_bytes, replay, verified, error);
    if (status != CAIRN_OK)
        crn_replay_clear(replay);
    return status;
}

const cairn_problem *cairn_verified_problem(const cairn_verified *verified)
{
    return verified->problem;
}

const cairn_schedule *cairn_verified_schedule(const cairn_verified *verified)
{
    return verified->schedule;
}

int64_t crn_verified_budget(const cairn_verified *verified)
{
    return verified->budget_bytes;
}

const cairn_replay *cairn_verified_replay(const cairn_verified *verified)
{
    return &verified->replay;
}

void cairn_verified_free(cairn_verified *verified)
{
    if (!verified)
        return;
    cairn_allocator allocator = verified->allocator;
    crn_free(&allocator, verified, 1, sizeof(*verified));
}
