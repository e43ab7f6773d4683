/*
 * The simulator: when each operation of a schedule starts and ends, and how much memory is in use then.
 *
 * It implements docs/reference/formats/schedule.md and depends on no solver. residency.c determines what is resident by
 * the order of the list alone; this file adds the times. Operations start in the order of the list, each on one of three
 * lanes (compute, to host, to device). Hence, when an operation is about to start, at most one earlier operation is
 * running on each lane, and everything that is still to come back (what a computation reserved beyond its result, what
 * it removes, values dropped while somebody reads them) comes back when one of those three ends. So the whole state of
 * time is three lanes: no queue of events, and constant time an operation in addition to that of residency.c.
 *
 * Memory in use falls as lanes end and rises only when an operation starts, so the peak is taken there.
 *
 * Lists of chains that nobody watches go through serial.c first, which is faster and judges most of them.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/failure.h"
#include "schedule/residency.h"
#include "schedule/serial.h"
#include "schedule/violation.h"

/* The latest operation of a lane, and what comes back when it ends. */
typedef struct lane_state {
    int64_t end_ns;
    int64_t device_bytes, host_bytes;
} lane_state;

/* When the copy in a storage can be read, and when its last reader or writer ends. */
typedef struct storage_times {
    int64_t ready_ns, busy_ns;
} storage_times;

/* The memory of one tier. */
typedef struct memory_tier {
    int64_t limit_bytes; /* CAIRN_NONE = none */
    int64_t used_bytes, peak_bytes;
} memory_tier;

typedef struct simulation {
    crn_residency residency;
    const cairn_schedule *schedule;
    const cairn_machine *machine;
    const cairn_observer *observer;
    cairn_replay *replay;
    storage_times *times; /* by storage */
    lane_state lanes[CAIRN_LANE_COUNT];
    memory_tier device, host;
    int64_t now_ns;      /* start of the last computation or transfer */
    int64_t makespan_ns; /* so far */
    int64_t compute_ns, recompute_ns;
} simulation;

/* ---- violations ---- */

/* "operation 17 (backward 3)" */
static void name_op(const simulation *s, int64_t position, char *text, size_t size)
{
    char op[CRN_OP_TEXT_MAX];
    crn_op_text(s->schedule->ops[position], s->schedule->kind, op);
    snprintf(text, size, "operation %" PRId64 " (%s)", position, op);
}

static void name_value(const simulation *s, int32_t value, char *text, size_t size)
{
    const cairn_chain *chain = s->residency.chain;
    if (value == CRN_NO_VALUE)
        text[0] = '\0';
    else if (!chain)
        snprintf(text, size, ": node %" PRId32, value);
    else if (value <= chain->stage_count)
        snprintf(text, size, ": output %" PRId32, value);
    else
        snprintf(text, size, ": saved %" PRId32, value - chain->stage_count);
}

static void violate_rule(simulation *s, int64_t position, cairn_violation_code code)
{
    char op[96], value[48];
    name_op(s, position, op, sizeof(op));
    name_value(s, s->residency.culprit, value, sizeof(value));
    crn_replay_violate(s->replay, code, position, "%s: %s%s", op, crn_violation_text(code), value);
}

static void violate_memory(simulation *s, int64_t position, bool on_host, int64_t needed_bytes, int64_t free_bytes)
{
    char op[96];
    name_op(s, position, op, sizeof(op));
    crn_replay_violate(s->replay, on_host ? CAIRN_VIOLATION_OVER_HOST_BUDGET : CAIRN_VIOLATION_OVER_BUDGET, position,
                       "%s needs %" PRId64 " bytes of %s memory and %" PRId64 " are free", op, needed_bytes,
                       on_host ? "host" : "device", free_bytes);
    s->replay->violation.needed_bytes = needed_bytes;
    s->replay->violation.free_bytes = free_bytes;
}

static void violate_start(simulation *s)
{
    int64_t needed = s->device.used_bytes, budget = s->device.limit_bytes;
    crn_replay_violate(s->replay, CAIRN_VIOLATION_OVER_BUDGET, 0,
                       "what is resident from the start needs %" PRId64 " bytes of a budget of %" PRId64, needed,
                       budget);
    s->replay->violation.needed_bytes = needed;
    s->replay->violation.free_bytes = budget;
}

/* ---- memory ---- */

static void observe_memory(const simulation *s, int64_t time_ns)
{
    if (s->observer && s->observer->memory)
        s->observer->memory(s->observer->context, time_ns, s->device.used_bytes, s->host.used_bytes);
}

/* The lane that is the first to end of those on which something is to come back; NULL when there is none. */
static lane_state *first_return(simulation *s)
{
    lane_state *first = NULL;
    for (int i = 0; i < CAIRN_LANE_COUNT; i++) {
        lane_state *lane = &s->lanes[i];
        if ((lane->device_bytes > 0 || lane->host_bytes > 0) && (!first || lane->end_ns < first->end_ns))
            first = lane;
    }
    return first;
}

static void take_return(simulation *s, lane_state *lane)
{
    s->device.used_bytes -= lane->device_bytes;
    s->host.used_bytes -= lane->host_bytes;
    lane->device_bytes = lane->host_bytes = 0;
    observe_memory(s, lane->end_ns);
}

static void take_returns_until(simulation *s, int64_t time_ns)
{
    for (lane_state *lane = first_return(s); lane && lane->end_ns <= time_ns; lane = first_return(s))
        take_return(s, lane);
}

static bool fits(const memory_tier *tier, int64_t bytes)
{
    return tier->limit_bytes == CAIRN_NONE || bytes <= tier->limit_bytes - tier->used_bytes;
}

/*
 * Moves the start on to where bytes fit. False when they do not fit even after everything that is pending came back.
 * What ends at the start ends before it, so the peak does not count it.
 */
static bool wait_for_memory(simulation *s, const memory_tier *tier, int64_t bytes, int64_t *start_ns)
{
    take_returns_until(s, *start_ns);
    while (!fits(tier, bytes)) {
        lane_state *lane = first_return(s);
        if (!lane)
            return false;
        *start_ns = lane->end_ns;
        take_returns_until(s, *start_ns);
    }
    return true;
}

static bool reserve(memory_tier *tier, int64_t bytes)
{
    if (!crn_add(tier->used_bytes, bytes, &tier->used_bytes))
        return false;
    tier->peak_bytes = crn_max(tier->peak_bytes, tier->used_bytes);
    return true;
}

/* ---- one operation ---- */

/* A drop or discard: the memory comes back now, or with the last reader or writer of the copy. */
static void release(simulation *s, const crn_effect *effect)
{
    if (effect->released == CRN_NO_STORAGE)
        return;
    int64_t busy_ns = s->times[effect->released].busy_ns;
    int64_t device_bytes = effect->on_host ? 0 : effect->released_bytes;
    int64_t host_bytes = effect->on_host ? effect->released_bytes : 0;
    if (busy_ns <= s->now_ns) {
        s->device.used_bytes -= device_bytes;
        s->host.used_bytes -= host_bytes;
        observe_memory(s, s->now_ns);
        return;
    }
    int i = 0; /* whatever ends after now is the latest of its lane */
    while (i < CAIRN_LANE_COUNT - 1 && s->lanes[i].end_ns != busy_ns)
        i++;
    assert(s->lanes[i].end_ns == busy_ns);
    s->lanes[i].device_bytes += device_bytes;
    s->lanes[i].host_bytes += host_bytes;
}

static lane_state *lane_of(simulation *s, cairn_lane lane)
{
    bool shared = lane == CAIRN_LANE_TO_DEVICE && s->machine->shared_link;
    return &s->lanes[shared ? CAIRN_LANE_TO_HOST : lane];
}

/* The earliest start that order, lane and data allow; memory may want a later one. */
static int64_t earliest_start(simulation *s, const crn_effect *effect)
{
    int64_t start_ns = crn_max(s->now_ns, lane_of(s, effect->lane)->end_ns);
    for (int32_t i = 0; i < effect->read_count; i++)
        start_ns = crn_max(start_ns, s->times[effect->reads[i]].ready_ns);
    for (int32_t i = 0; i < effect->removed_count; i++)
        start_ns = crn_max(start_ns, s->times[effect->removed[i]].busy_ns);
    return start_ns;
}

/* How long it takes; CAIRN_NONE when that passes 2^63 - 1. */
static int64_t duration(const simulation *s, const crn_effect *effect)
{
    const cairn_machine *machine = s->machine;
    if (effect->lane == CAIRN_LANE_COMPUTE)
        return effect->compute_ns;
    return cairn_transfer_ns(effect->added_bytes,
                             effect->on_host ? machine->to_host_bytes_per_s : machine->to_device_bytes_per_s,
                             machine->latency_ns);
}

/* What it reserves at its start: max(0, after - before, result + workspace) where it computes. */
static int64_t reservation(const crn_effect *effect)
{
    if (effect->lane != CAIRN_LANE_COMPUTE)
        return effect->added_bytes;
    return crn_max(0,
                   crn_max(effect->added_bytes - effect->removed_bytes, effect->added_bytes + effect->workspace_bytes));
}

static void occupy(simulation *s, const crn_effect *effect, int64_t start_ns, int64_t end_ns, int64_t reserved_bytes)
{
    lane_state *lane = lane_of(s, effect->lane);
    s->now_ns = start_ns;
    s->makespan_ns = crn_max(s->makespan_ns, end_ns);
    lane->end_ns = end_ns;
    if (effect->lane == CAIRN_LANE_COMPUTE) {
        lane->device_bytes = reserved_bytes - (effect->added_bytes - effect->removed_bytes);
        s->compute_ns += effect->compute_ns;
        s->recompute_ns += effect->repeats ? effect->compute_ns : 0;
    }
    for (int32_t i = 0; i < effect->read_count; i++)
        s->times[effect->reads[i]].busy_ns = crn_max(s->times[effect->reads[i]].busy_ns, end_ns);
    if (effect->added != CRN_NO_STORAGE)
        s->times[effect->added] = (storage_times){end_ns, end_ns};
}

/* Starts a computation or transfer; false after a violation. */
static bool start(simulation *s, int64_t position, const crn_effect *effect)
{
    memory_tier *tier = effect->on_host ? &s->host : &s->device;
    int64_t start_ns = earliest_start(s, effect), bytes = reservation(effect), ns = duration(s, effect), end_ns;
    if (!wait_for_memory(s, tier, bytes, &start_ns)) {
        violate_memory(s, position, effect->on_host, bytes, tier->limit_bytes - tier->used_bytes);
        return false;
    }
    if (ns == CAIRN_NONE || !crn_add(start_ns, ns, &end_ns) || !reserve(tier, bytes)) {
        violate_rule(s, position, CAIRN_VIOLATION_OVERFLOW);
        return false;
    }
    occupy(s, effect, start_ns, end_ns, bytes);
    observe_memory(s, start_ns);
    if (s->observer && s->observer->op)
        s->observer->op(s->observer->context, position, s->schedule->ops[position], effect->lane, start_ns, end_ns);
    return true;
}

static bool step(simulation *s, int64_t position)
{
    crn_effect effect;
    cairn_violation_code code = crn_residency_apply(&s->residency, s->schedule->ops[position], &effect);
    if (code != CAIRN_VIOLATION_NONE) {
        violate_rule(s, position, code);
        return false;
    }
    if (position == 0 && !fits(&s->device, 0)) {
        violate_start(s);
        return false;
    }
    if (effect.lane == CAIRN_LANE_COUNT) {
        release(s, &effect);
        return true;
    }
    return start(s, position, &effect);
}

/* ---- the whole ---- */

static int64_t initial_bytes(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    int64_t bytes = cairn_problem_info_of(problem)->fixed_bytes;
    return chain ? bytes + chain->input_bytes + chain->stages[chain->stage_count - 1].grad_bytes : bytes;
}

static cairn_status simulation_init(simulation *s, const cairn_env *env, const cairn_problem *problem,
                                    const cairn_schedule *schedule, int64_t budget_bytes, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    const cairn_machine *machine = schedule->info.machine;
    s->schedule = schedule;
    s->machine = machine ? machine : cairn_problem_info_of(problem)->machine;
    s->device = (memory_tier){budget_bytes, initial_bytes(problem), initial_bytes(problem)};
    s->host = (memory_tier){s->machine ? s->machine->host_bytes : 0, 0, 0};
    CRN_TRY(crn_residency_init(&s->residency, allocator, problem, s->machine, schedule->count, error));
    s->times = crn_alloc(&allocator, (size_t)s->residency.storage_capacity, sizeof(*s->times));
    if (!s->times) {
        crn_residency_free(&s->residency);
        return crn_no_memory(error);
    }
    for (int32_t i = 0; i < s->residency.storage_count; i++) /* those made later are filled in then */
        s->times[i] = (storage_times){0, 0};
    return CAIRN_OK;
}

static void simulation_free(simulation *s)
{
    crn_free(&s->residency.allocator, s->times, (size_t)s->residency.storage_capacity, sizeof(*s->times));
    crn_residency_free(&s->residency);
}

static void conclude(simulation *s)
{
    cairn_replay *replay = s->replay;
    take_returns_until(s, INT64_MAX);
    if (!crn_residency_complete(&s->residency)) {
        int32_t next = s->residency.progress;
        crn_replay_violate(replay, CAIRN_VIOLATION_INCOMPLETE, CAIRN_NONE, "%s: %s %" PRId32 " is missing",
                           crn_violation_text(CAIRN_VIOLATION_INCOMPLETE), s->residency.chain ? "backward" : "compute",
                           next);
        return;
    }
    replay->valid = true;
    replay->makespan_ns = s->makespan_ns;
    replay->peak_bytes = s->device.peak_bytes;
    replay->host_peak_bytes = s->host.peak_bytes;
    replay->compute_ns = s->compute_ns;
    replay->recompute_ns = s->recompute_ns;
    replay->stall_ns = s->makespan_ns - s->compute_ns;
}

static void run(simulation *s)
{
    observe_memory(s, 0);
    if (s->schedule->count == 0 && !fits(&s->device, 0)) {
        violate_start(s);
        return;
    }
    for (int64_t i = 0; i < s->schedule->count; i++)
        if (!step(s, i))
            return;
    conclude(s);
}

cairn_status cairn_simulate(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                            int64_t budget_bytes, const cairn_observer *observer, cairn_replay *replay,
                            cairn_error *error)
{
    simulation s = {.observer = observer, .replay = replay};
    crn_replay_clear(replay);
    if (strcmp(schedule->problem_hash, cairn_problem_hash(problem)) != 0)
        return crn_fail(error, CAIRN_MISMATCH, "the schedule was made for the problem %s, not %s",
                        schedule->problem_hash, cairn_problem_hash(problem));
    if (budget_bytes == CAIRN_RECORDED)
        budget_bytes = schedule->info.budget_bytes;
    if (budget_bytes < CAIRN_NONE)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "the budget is %" PRId64 " bytes; at least 0", budget_bytes);
    if (cairn_problem_chain(problem) && !observer) {
        CRN_TRY(crn_serial_replay(crn_allocator(env), cairn_problem_chain(problem), schedule, initial_bytes(problem),
                                  budget_bytes, replay, error));
        if (replay->valid)
            return CAIRN_OK;
    }
    CRN_TRY(simulation_init(&s, env, problem, schedule, budget_bytes, error));
    run(&s);
    simulation_free(&s);
    return CAIRN_OK;
}
