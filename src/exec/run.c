/*
 * Replaying a verified chain schedule through the caller's functions.
 *
 * The list says everything but three things, which follow from what is resident and from the simulation: which value a
 * stage reads its input from; whether a transfer that was started must be waited for first; and when that is freed which
 * was released on its way. A release holds nothing up, so its transfer is waited for no sooner than the simulation has the
 * bytes back: before the first operation that starts when the transfer has ended there. What is to overlap does, and
 * memory is never more than simulated.
 */
#include <cairn/exec.h>

#include "base/failure.h"
#include "base/memory.h"
#include "schedule/schedule.h"

/* What is known of a[l] or A[l]. */
typedef struct value_state {
    bool resident;
    uint16_t option, host_option; /* of the copies of A[l] on the device and on the host */
    cairn_lane moving;            /* of a transfer that was started and not waited for; CAIRN_LANE_COMPUTE: of none */
    int64_t transfer_end_ns;      /* in the simulation */
} value_state;

/* When the simulation starts and ends an operation. */
typedef struct timing {
    int64_t start_ns, end_ns;
} timing;

typedef struct run {
    const cairn_exec_callbacks *call;
    const cairn_op *ops;
    int64_t count;
    timing *timings;     /* of the operations; NULL without transfers */
    value_state *values; /* of a[0], A[0], a[1], A[1], ... */
    cairn_op *released;  /* on their way, in order; there is room for all of a value's two copies */
    int32_t stage_count, released_count;
} run;

static value_state *state_of(run *r, int32_t stage, cairn_value value)
{
    return &r->values[2 * (size_t)stage + (size_t)value];
}

/* ---- transfers and releases ---- */

static int free_value(run *r, cairn_op op)
{
    bool is_on_host = op.code == CAIRN_OP_DISCARD;
    return (is_on_host ? r->call->discard : r->call->drop)(r->call->context, op.index, (cairn_value)op.value);
}

/* Waits for a value's transfer, if one is under way, and frees what was released of it meanwhile. */
static int settle(run *r, int32_t stage, cairn_value value)
{
    value_state *state = state_of(r, stage, value);
    int32_t kept = 0;
    if (state->moving == CAIRN_LANE_COMPUTE)
        return 0;
    state->moving = CAIRN_LANE_COMPUTE;
    int result = r->call->wait(r->call->context, stage, value);
    for (int32_t i = 0; i < r->released_count; i++) {
        cairn_op op = r->released[i];
        if (op.index != stage || op.value != value)
            r->released[kept++] = op;
        else if (result == 0)
            result = free_value(r, op);
    }
    r->released_count = kept;
    return result;
}

/* Frees what was released on its way and has arrived by then in the simulation. */
static int free_arrived(run *r, int64_t now_ns)
{
    int32_t i = 0;
    int result = 0;
    while (result == 0 && i < r->released_count) {
        cairn_op op = r->released[i];
        if (state_of(r, op.index, (cairn_value)op.value)->transfer_end_ns > now_ns)
            i++;
        else
            result = settle(r, op.index, (cairn_value)op.value);
    }
    return result;
}

static int run_release(run *r, cairn_op op)
{
    value_state *state = state_of(r, op.index, (cairn_value)op.value);
    if (op.code == CAIRN_OP_DROP)
        state->resident = false;
    if (state->moving == CAIRN_LANE_COMPUTE)
        return free_value(r, op);
    r->released[r->released_count++] = op;
    return 0;
}

static int run_transfer(run *r, cairn_op op, int64_t end_ns)
{
    cairn_value value = (cairn_value)op.value;
    value_state *state = state_of(r, op.index, value);
    bool back = op.code == CAIRN_OP_PREFETCH;
    int result = settle(r, op.index, value);
    if (result == 0)
        result = (back ? r->call->prefetch : r->call->offload)(r->call->context, op.index, value);
    state->moving = back ? CAIRN_LANE_TO_DEVICE : CAIRN_LANE_TO_HOST;
    state->transfer_end_ns = end_ns;
    state->resident |= back;
    if (back)
        state->option = state->host_option;
    else
        state->host_option = state->option;
    return result;
}

/* ---- computations ---- */

/*
 * Waits for what a stage reads its input from: a[l-1] where it is resident, else A[l-1]. Its way to the host is waited for
 * only if it is removed, too.
 */
static int settle_input(run *r, int32_t stage, bool removed)
{
    bool alone = state_of(r, stage - 1, CAIRN_VALUE_OUTPUT)->resident;
    cairn_value from = alone ? CAIRN_VALUE_OUTPUT : CAIRN_VALUE_SAVED;
    bool waits = removed || state_of(r, stage - 1, from)->moving == CAIRN_LANE_TO_DEVICE;
    return waits ? settle(r, stage - 1, from) : 0;
}

static int run_forward(run *r, cairn_op op)
{
    bool save = op.code == CAIRN_OP_FORWARD_SAVE, drop = op.code == CAIRN_OP_FORWARD_DROP;
    cairn_value made = save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT;
    int result = settle_input(r, op.index, drop);
    if (result == 0)
        result = settle(r, op.index, made); /* what is still to be freed of it has its place */
    if (result == 0)
        result = r->call->forward(r->call->context, op.index, op.option, save, drop);
    state_of(r, op.index, made)->resident = true;
    state_of(r, op.index, made)->option = op.option;
    if (drop)
        state_of(r, op.index - 1, CAIRN_VALUE_OUTPUT)->resident = false;
    return result;
}

static int run_backward(run *r, cairn_op op)
{
    value_state *own = state_of(r, op.index, CAIRN_VALUE_SAVED);
    value_state *before = state_of(r, op.index - 1, CAIRN_VALUE_OUTPUT);
    bool free_input = op.index > 1 && before->resident;
    int result = settle_input(r, op.index, free_input);
    if (result == 0)
        result = settle(r, op.index, CAIRN_VALUE_SAVED);
    if (result == 0)
        result = r->call->backward(r->call->context, op.index, own->option, free_input);
    own->resident = false;
    if (free_input)
        before->resident = false;
    return result;
}

/* ---- the list ---- */

static int run_op(run *r, int64_t position)
{
    cairn_op op = r->ops[position];
    bool is_release = op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_DISCARD;
    int result = r->timings && !is_release ? free_arrived(r, r->timings[position].start_ns) : 0;
    if (result != 0)
        return result;
    switch ((cairn_op_code)op.code) {
    case CAIRN_OP_FORWARD_SAVE:
    case CAIRN_OP_FORWARD_KEEP:
    case CAIRN_OP_FORWARD_DROP:
        return run_forward(r, op);
    case CAIRN_OP_BACKWARD:
        return run_backward(r, op);
    case CAIRN_OP_DROP:
    case CAIRN_OP_DISCARD:
        return run_release(r, op);
    default:
        return run_transfer(r, op, r->timings[position].end_ns);
    }
}

/* The callback that an operation needs is there. */
static bool has_callback(const cairn_exec_callbacks *call, cairn_op op)
{
    switch ((cairn_op_code)op.code) {
    case CAIRN_OP_BACKWARD:
        return call->backward != NULL;
    case CAIRN_OP_DROP:
        return call->drop != NULL;
    case CAIRN_OP_OFFLOAD:
        return call->offload != NULL && call->wait != NULL;
    case CAIRN_OP_PREFETCH:
        return call->prefetch != NULL && call->wait != NULL;
    case CAIRN_OP_DISCARD:
        return call->discard != NULL;
    default:
        return call->forward != NULL;
    }
}

static cairn_status check(const cairn_schedule *schedule, const cairn_exec_callbacks *call, bool *has_transfers,
                          cairn_error *error)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    *has_transfers = false;
    if (cairn_schedule_kind(schedule) != CAIRN_KIND_CHAIN)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "the schedule is a graph's; this executor runs chains");
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++) {
        if (!has_callback(call, ops[i]))
            return crn_fail_at(error, CAIRN_BAD_ARGUMENT, i, NULL, "operation %lld, %s, has no callback", (long long)i,
                               cairn_op_name((cairn_op_code)ops[i].code));
        *has_transfers |= ops[i].code == CAIRN_OP_OFFLOAD || ops[i].code == CAIRN_OP_PREFETCH;
    }
    return CAIRN_OK;
}

static cairn_status fail_callback(const run *r, int64_t position, int result, cairn_error *error)
{
    cairn_op op = r->ops[position];
    return crn_fail_at(error, CAIRN_CALLBACK, position, NULL, "the callback of operation %lld, %s %d, returned %d",
                       (long long)position, cairn_op_name((cairn_op_code)op.code), op.index, result);
}

/* Waits for all transfers that are still under way, those of what was released first. */
static int settle_all(run *r)
{
    int result = free_arrived(r, INT64_MAX);
    for (int32_t stage = 0; stage <= r->stage_count; stage++) {
        if (result == 0)
            result = settle(r, stage, CAIRN_VALUE_OUTPUT);
        if (result == 0)
            result = settle(r, stage, CAIRN_VALUE_SAVED);
    }
    return result;
}

static cairn_status run_all(run *r, cairn_error *error)
{
    for (int64_t i = 0; i < r->count; i++) {
        int result = run_op(r, i);
        if (result != 0)
            return fail_callback(r, i, result, error);
    }
    int result = settle_all(r);
    return result == 0 ? CAIRN_OK : fail_callback(r, r->count - 1, result, error);
}

static void note_timing(void *context, int64_t position, cairn_op op, cairn_lane lane, int64_t start_ns, int64_t end_ns)
{
    run *r = context;
    (void)op, (void)lane;
    r->timings[position] = (timing){start_ns, end_ns};
}

static size_t value_count(const run *r)
{
    return 2 * ((size_t)r->stage_count + 1);
}

/* Also after a failure, release_run frees what there is. */
static cairn_status prepare(run *r, const cairn_env *env, const cairn_verified *verified, bool has_transfers,
                            cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    cairn_observer observer = {.context = r, .op = note_timing};
    cairn_replay replay;
    r->values = crn_alloc_zero(&allocator, value_count(r), sizeof(*r->values));
    if (!r->values)
        return crn_no_memory(error);
    state_of(r, 0, CAIRN_VALUE_OUTPUT)->resident = true;
    if (!has_transfers)
        return CAIRN_OK;
    r->released = crn_alloc(&allocator, 2 * value_count(r), sizeof(*r->released));
    r->timings = crn_alloc_zero(&allocator, (size_t)r->count, sizeof(*r->timings));
    if (!r->released || !r->timings)
        return crn_no_memory(error);
    return cairn_simulate(env, cairn_verified_problem(verified), cairn_verified_schedule(verified),
                          crn_verified_budget(verified), &observer, &replay, error);
}

static void release_run(run *r, const cairn_env *env)
{
    cairn_allocator allocator = crn_allocator(env);
    if (r->timings)
        crn_free(&allocator, r->timings, (size_t)r->count, sizeof(*r->timings));
    if (r->released)
        crn_free(&allocator, r->released, 2 * value_count(r), sizeof(*r->released));
    if (r->values)
        crn_free(&allocator, r->values, value_count(r), sizeof(*r->values));
}

cairn_status cairn_exec_run(const cairn_env *env, const cairn_verified *verified, const cairn_exec_callbacks *callbacks,
                            cairn_error *error)
{
    bool has_transfers;
    if (!verified)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "there is no verified schedule to run: is it valid?");
    const cairn_schedule *schedule = cairn_verified_schedule(verified);
    CRN_TRY(check(schedule, callbacks, &has_transfers, error));
    run r = {.call = callbacks,
             .ops = cairn_schedule_ops(schedule),
             .count = cairn_schedule_count(schedule),
             .stage_count = cairn_problem_chain(cairn_verified_problem(verified))->stage_count};
    cairn_status status = prepare(&r, env, verified, has_transfers, error);
    if (status == CAIRN_OK)
        status = run_all(&r, error);
    release_run(&r, env);
    return status;
}
