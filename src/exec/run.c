/*
 * Replaying a verified chain schedule through the caller's functions.
 *
 * The list says everything but two things, which follow from what is resident: which value a stage reads its input from,
 * and whether a transfer that was started must be waited for first. Both are kept track of here; nothing is decided.
 */
#include <cairn/exec.h>

#include "base/failure.h"
#include "base/memory.h"

/* What is known of a[l] and of A[l], indexed by stage and by cairn_value. */
typedef struct value_state {
    bool resident[2];
    bool moving[2]; /* a transfer was started and not waited for */
    uint16_t option;
} value_state;

typedef struct run {
    const cairn_exec_callbacks *call;
    value_state *values; /* stage_count + 1 */
    int32_t stage_count;
} run;

static int settle(run *r, int32_t stage, cairn_value value)
{
    if (!r->values[stage].moving[value])
        return 0;
    r->values[stage].moving[value] = false;
    return r->call->wait(r->call->context, stage, value);
}

/* Waits for what a stage reads its input from: a[l-1] where it is resident, else A[l-1]. */
static int settle_input(run *r, int32_t stage)
{
    cairn_value from = r->values[stage - 1].resident[CAIRN_VALUE_OUTPUT] ? CAIRN_VALUE_OUTPUT : CAIRN_VALUE_SAVED;
    return settle(r, stage - 1, from);
}

static int run_forward(run *r, cairn_op op)
{
    bool save = op.code == CAIRN_OP_FORWARD_SAVE, drop = op.code == CAIRN_OP_FORWARD_DROP;
    int result = settle_input(r, op.index);
    if (result == 0)
        result = r->call->forward(r->call->context, op.index, op.option, save, drop);
    r->values[op.index].resident[save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT] = true;
    if (save)
        r->values[op.index].option = op.option;
    if (drop)
        r->values[op.index - 1].resident[CAIRN_VALUE_OUTPUT] = false;
    return result;
}

static int run_backward(run *r, cairn_op op)
{
    value_state *before = &r->values[op.index - 1], *own = &r->values[op.index];
    bool free_input = op.index > 1 && before->resident[CAIRN_VALUE_OUTPUT];
    int result = settle_input(r, op.index);
    if (result == 0)
        result = settle(r, op.index, CAIRN_VALUE_SAVED);
    if (result == 0)
        result = r->call->backward(r->call->context, op.index, own->option, free_input);
    own->resident[CAIRN_VALUE_SAVED] = false;
    if (free_input)
        before->resident[CAIRN_VALUE_OUTPUT] = false;
    return result;
}

static int run_release(run *r, cairn_op op)
{
    cairn_value value = (cairn_value)op.value;
    int result = settle(r, op.index, value);
    if (op.code == CAIRN_OP_DISCARD)
        return result ? result : r->call->discard(r->call->context, op.index, value);
    r->values[op.index].resident[value] = false;
    return result ? result : r->call->drop(r->call->context, op.index, value);
}

static int run_transfer(run *r, cairn_op op)
{
    cairn_value value = (cairn_value)op.value;
    bool back = op.code == CAIRN_OP_PREFETCH;
    int result = settle(r, op.index, value);
    if (result == 0)
        result = (back ? r->call->prefetch : r->call->offload)(r->call->context, op.index, value);
    r->values[op.index].moving[value] = true;
    if (back)
        r->values[op.index].resident[value] = true;
    return result;
}

static int run_op(run *r, cairn_op op)
{
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
        return run_transfer(r, op);
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

static cairn_status check(const cairn_schedule *schedule, const cairn_exec_callbacks *call, cairn_error *error)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    if (cairn_schedule_kind(schedule) != CAIRN_KIND_CHAIN)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "the schedule is a graph's; this executor runs chains");
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++)
        if (!has_callback(call, ops[i]))
            return crn_fail_at(error, CAIRN_BAD_ARGUMENT, i, NULL, "operation %lld, %s, has no callback", (long long)i,
                               cairn_op_name((cairn_op_code)ops[i].code));
    return CAIRN_OK;
}

static cairn_status run_all(run *r, const cairn_schedule *schedule, cairn_error *error)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++) {
        int result = run_op(r, ops[i]);
        if (result != 0)
            return crn_fail_at(error, CAIRN_CALLBACK, i, NULL, "the callback of operation %lld, %s %d, returned %d",
                               (long long)i, cairn_op_name((cairn_op_code)ops[i].code), ops[i].index, result);
    }
    return CAIRN_OK;
}

cairn_status cairn_exec_run(const cairn_env *env, const cairn_verified *verified, const cairn_exec_callbacks *callbacks,
                            cairn_error *error)
{
    if (!verified)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "there is no verified schedule to run: is it valid?");
    const cairn_schedule *schedule = cairn_verified_schedule(verified);
    cairn_allocator allocator = crn_allocator(env);
    CRN_TRY(check(schedule, callbacks, error));
    run r = {.call = callbacks, .stage_count = cairn_problem_chain(cairn_verified_problem(verified))->stage_count};
    size_t count = (size_t)r.stage_count + 1;
    r.values = crn_alloc_zero(&allocator, count, sizeof(*r.values));
    if (!r.values)
        return crn_no_memory(error);
    r.values[0].resident[CAIRN_VALUE_OUTPUT] = true;
    cairn_status status = run_all(&r, schedule, error);
    crn_free(&allocator, r.values, count, sizeof(*r.values));
    return status;
}
