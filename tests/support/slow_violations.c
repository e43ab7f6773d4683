#include "support/slow_copies.h"

static bool is_pinned(const slow_list *r, cairn_op op)
{
    if (r->graph)
        return false;
    if (op.code == CAIRN_OP_FORWARD_DROP)
        return op.index == 1;
    return (op.code == CAIRN_OP_DROP || slow_is_transfer(op)) &&
           slow_same_value(slow_spoken_of(op), slow_make_value(false, 0));
}

static bool is_out_of_order(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_BACKWARD)
        return slow_gradient_before(r, i) != op.index;
    for (int u = 0; op.code == CAIRN_OP_COMPUTE && u < op.index; u++)
        if (!slow_ran_before(r, i, u))
            return true;
    return false;
}

static bool is_recomputed(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_COMPUTE)
        return r->graph->nodes[op.index].no_recompute && slow_ran_before(r, i, op.index);
    if (!slow_is_forward(op) || !r->chain->stages[op.index - 1].no_recompute)
        return false;
    return op.code != CAIRN_OP_FORWARD_SAVE || slow_ran_before(r, i, op.index);
}

static bool drops_kept(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    return r->graph && slow_is_instant(op) && r->graph->nodes[op.index].keep &&
           slow_has_any(r, i, slow_spoken_of(op)) && !slow_has_any(r, i + 1, slow_spoken_of(op));
}

static bool moves_alias(const slow_list *r, cairn_op op)
{
    return r->graph && slow_is_transfer(op) && r->graph->nodes[op.index].alias_of >= 0;
}

static bool has_already(const slow_list *r, int i, slow_tier tier)
{
    cairn_op op = r->ops[i];
    if (r->chain) {
        for (int l = 0; l <= r->chain->stage_count; l++)
            for (int saved = 0; saved <= 1; saved++)
                if (slow_makes(op, slow_make_value(saved, l), tier) && slow_has(r, i, slow_make_value(saved, l), tier))
                    return true;
        return false;
    }
    return slow_makes(op, slow_make_value(false, op.index), tier) &&
           slow_has(r, i, slow_make_value(false, op.index), tier);
}

static bool lacks_host_copy(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    return (op.code == CAIRN_OP_PREFETCH || op.code == CAIRN_OP_DISCARD) && !slow_has(r, i, slow_spoken_of(op), HOST);
}

static bool lacks_device_copy(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_OFFLOAD)
        return !slow_has(r, i, slow_spoken_of(op), DEVICE);
    if (op.code == CAIRN_OP_FORWARD_DROP)
        return !slow_has(r, i, slow_make_value(false, op.index - 1), DEVICE);
    if (op.code == CAIRN_OP_BACKWARD && !slow_has(r, i, slow_make_value(true, op.index), DEVICE))
        return true;
    if (slow_is_forward(op) || op.code == CAIRN_OP_BACKWARD)
        return !slow_has(r, i, slow_input_of(r, i, op.index), DEVICE);
    if (op.code != CAIRN_OP_COMPUTE)
        return false;
    const cairn_node *node = &r->graph->nodes[op.index];
    for (int k = 0; k < node->dep_count; k++)
        if (!slow_has(r, i, slow_make_value(false, node->deps[k]), DEVICE))
            return true;
    return node->alias_of >= 0 && !slow_has(r, i, slow_make_value(false, node->alias_of), DEVICE);
}

/* Whether, after operation i, a saved set that waits for its backward has no input any more. */
static bool leaves_no_input(const slow_list *r, int i)
{
    for (int l = 2; r->chain && l <= r->chain->stage_count && l <= slow_gradient_before(r, i + 1); l++)
        if (slow_has_any(r, i + 1, slow_make_value(true, l)) && !slow_has_any(r, i + 1, slow_make_value(true, l - 1)) &&
            !slow_has_any(r, i + 1, slow_make_value(false, l - 1)))
            return true;
    return false;
}

cairn_violation_code slow_first_violation(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    bool applies[CAIRN_VIOLATION_COUNT] = {
        [CAIRN_VIOLATION_PINNED] = is_pinned(r, op),
        [CAIRN_VIOLATION_WRONG_ORDER] = is_out_of_order(r, i),
        [CAIRN_VIOLATION_RECOMPUTED] = is_recomputed(r, i),
        [CAIRN_VIOLATION_KEEP_DROPPED] = drops_kept(r, i),
        [CAIRN_VIOLATION_ALIAS_MOVED] = moves_alias(r, op),
        [CAIRN_VIOLATION_NO_MACHINE] = slow_is_transfer(op) && !r->machine,
        [CAIRN_VIOLATION_ALREADY_RESIDENT] = has_already(r, i, DEVICE),
        [CAIRN_VIOLATION_ALREADY_ON_HOST] = has_already(r, i, HOST),
        [CAIRN_VIOLATION_NOT_ON_HOST] = lacks_host_copy(r, i),
        [CAIRN_VIOLATION_NOT_RESIDENT] = lacks_device_copy(r, i),
        [CAIRN_VIOLATION_INPUT_NEEDED] = leaves_no_input(r, i),
    };
    for (int code = 1; code < CAIRN_VIOLATION_COUNT; code++)
        if (applies[code])
            return (cairn_violation_code)code;
    return CAIRN_VIOLATION_NONE;
}
