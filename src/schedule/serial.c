#include "schedule/serial.h"

#include "base/checked.h"
#include "base/failure.h"

/* What there is of stage l (of the input: its output alone). */
typedef struct stage_state {
    bool output;   /* a[l] is resident */
    bool computed; /* a forward was issued */
    uint8_t saved; /* 1 + the option of A[l], 0 where it is not resident */
} stage_state;

_Static_assert(CAIRN_STAGE_OPTIONS_MAX < UINT8_MAX, "an option and one more fit a byte");

typedef struct serial {
    const cairn_chain *chain;
    stage_state *stages; /* 0..n */
    int32_t progress;    /* the current gradient is d[progress] */
    int64_t limit_bytes; /* INT64_MAX where there is no budget */
    int64_t used_bytes, peak_bytes;
    int64_t makespan_ns, recompute_ns;
} serial;

static const cairn_stage *stage_of(const serial *s, int32_t l)
{
    return &s->chain->stages[l - 1];
}

static int64_t gradient_bytes(const serial *s, int32_t l)
{
    return l == 0 ? s->chain->input_grad_bytes : stage_of(s, l)->grad_bytes;
}

static bool has_input(const serial *s, int32_t l)
{
    return s->stages[l - 1].output || s->stages[l - 1].saved;
}

/* Whether a saved set that waits for its backward stands on a[l] or A[l], and the other one is not there. */
static bool is_last_input(const serial *s, int32_t l)
{
    return l < s->progress && s->stages[l + 1].saved && s->stages[l].output != (s->stages[l].saved > 0);
}

/* A computation, which adds and removes so many bytes. */
static bool compute(serial *s, int64_t added_bytes, int64_t removed_bytes, int64_t workspace_bytes, int64_t ns)
{
    int64_t grown = added_bytes - removed_bytes;
    int64_t reserved = crn_max(0, crn_max(grown, added_bytes + workspace_bytes));
    if (reserved > s->limit_bytes - s->used_bytes || !crn_add(s->makespan_ns, ns, &s->makespan_ns))
        return false;
    s->peak_bytes = crn_max(s->peak_bytes, s->used_bytes + reserved);
    s->used_bytes += grown;
    return true;
}

/* The time of a forward that is not the stage's first counts as recomputation. */
static void count_forward(serial *s, int32_t l, int64_t ns)
{
    s->recompute_ns += s->stages[l].computed ? ns : 0;
    s->stages[l].computed = true;
}

static bool save(serial *s, int32_t l, int32_t k)
{
    const cairn_stage *stage = stage_of(s, l);
    const cairn_stage_option *option = &stage->options[k];
    if (s->stages[l].saved || (stage->no_recompute && s->stages[l].computed) || !has_input(s, l))
        return false;
    if (!compute(s, option->saved_bytes, 0, option->forward_workspace_bytes, option->forward_ns))
        return false;
    count_forward(s, l, option->forward_ns);
    s->stages[l].saved = (uint8_t)(k + 1);
    return true;
}

static bool forward(serial *s, int32_t l, bool drops)
{
    const cairn_stage *stage = stage_of(s, l);
    if (s->stages[l].output || stage->no_recompute || !has_input(s, l))
        return false;
    if (drops && (l == 1 || !s->stages[l - 1].output || is_last_input(s, l - 1)))
        return false;
    int64_t removed = drops ? stage_of(s, l - 1)->output_bytes : 0;
    if (!compute(s, stage->output_bytes, removed, stage->forward_only_workspace_bytes, stage->forward_only_ns))
        return false;
    count_forward(s, l, stage->forward_only_ns);
    s->stages[l].output = true;
    if (drops)
        s->stages[l - 1].output = false;
    return true;
}

static bool backward(serial *s, int32_t l)
{
    if (l != s->progress || !s->stages[l].saved || !has_input(s, l))
        return false;
    const cairn_stage *stage = stage_of(s, l);
    const cairn_stage_option *option = &stage->options[s->stages[l].saved - 1];
    bool removes_input = l > 1 && s->stages[l - 1].output;
    int64_t input_bytes = removes_input ? stage_of(s, l - 1)->output_bytes : 0;
    if (!compute(s, gradient_bytes(s, l - 1) + stage->weight_grad_bytes,
                 stage->grad_bytes + option->saved_bytes + input_bytes, option->backward_workspace_bytes,
                 option->backward_ns))
        return false;
    s->stages[l].saved = 0;
    s->stages[l - 1].output = l == 1;
    s->progress = l - 1;
    return true;
}

static bool drop(serial *s, int32_t l, bool of_saved)
{
    stage_state *state = &s->stages[l];
    if (l == 0 || !(of_saved ? state->saved > 0 : state->output) || is_last_input(s, l))
        return false;
    if (of_saved) {
        s->used_bytes -= stage_of(s, l)->options[state->saved - 1].saved_bytes;
        state->saved = 0;
    } else {
        s->used_bytes -= stage_of(s, l)->output_bytes;
        state->output = false;
    }
    return true;
}

static bool step(serial *s, cairn_op op)
{
    switch (op.code) {
    case CAIRN_OP_FORWARD_SAVE:
        return save(s, op.index, op.option);
    case CAIRN_OP_FORWARD_KEEP:
    case CAIRN_OP_FORWARD_DROP:
        return forward(s, op.index, op.code == CAIRN_OP_FORWARD_DROP);
    case CAIRN_OP_BACKWARD:
        return backward(s, op.index);
    case CAIRN_OP_DROP:
        return drop(s, op.index, op.value == CAIRN_VALUE_SAVED);
    default:
        return false;
    }
}

static bool run(serial *s, const cairn_op *ops, int64_t count)
{
    if (s->used_bytes > s->limit_bytes)
        return false;
    for (int64_t i = 0; i < count; i++)
        if (!step(s, ops[i]))
            return false;
    return s->progress == 0;
}

cairn_status crn_serial_replay(cairn_allocator allocator, const cairn_chain *chain, const cairn_schedule *schedule,
                               int64_t initial_bytes, int64_t budget_bytes, cairn_replay *replay, cairn_error *error)
{
    size_t count = (size_t)chain->stage_count + 1;
    serial s = {.chain = chain,
                .stages = crn_alloc_zero(&allocator, count, sizeof(*s.stages)),
                .progress = chain->stage_count,
                .limit_bytes = crn_limit_of(budget_bytes),
                .used_bytes = initial_bytes,
                .peak_bytes = initial_bytes};
    if (!s.stages)
        return crn_no_memory(error);
    s.stages[0].output = true;
    if (run(&s, schedule->ops, schedule->count)) {
        replay->valid = true;
        replay->makespan_ns = replay->compute_ns = s.makespan_ns;
        replay->recompute_ns = s.recompute_ns;
        replay->peak_bytes = s.peak_bytes;
        replay->host_peak_bytes = replay->stall_ns = 0;
    }
    crn_free(&allocator, s.stages, count, sizeof(*s.stages));
    return CAIRN_OK;
}
