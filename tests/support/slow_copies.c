#include "support/slow_copies.h"

slow_value slow_make_value(bool saved, int index)
{
    return (slow_value){saved, index};
}

bool slow_same_value(slow_value a, slow_value b)
{
    return a.saved == b.saved && a.index == b.index;
}

/* ---- what an operation is ---- */

bool slow_is_transfer(cairn_op op)
{
    return op.code == CAIRN_OP_OFFLOAD || op.code == CAIRN_OP_PREFETCH;
}

bool slow_is_instant(cairn_op op)
{
    return op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_DISCARD;
}

bool slow_is_forward(cairn_op op)
{
    return op.code == CAIRN_OP_FORWARD_SAVE || op.code == CAIRN_OP_FORWARD_KEEP || op.code == CAIRN_OP_FORWARD_DROP;
}

bool slow_computes(cairn_op op)
{
    return slow_is_forward(op) || op.code == CAIRN_OP_BACKWARD || op.code == CAIRN_OP_COMPUTE;
}

slow_value slow_spoken_of(cairn_op op)
{
    return slow_make_value(op.value == CAIRN_VALUE_SAVED, op.index);
}

bool slow_makes(cairn_op op, slow_value v, slow_tier tier)
{
    if (tier == HOST)
        return op.code == CAIRN_OP_OFFLOAD && slow_same_value(slow_spoken_of(op), v);
    switch (op.code) {
    case CAIRN_OP_FORWARD_SAVE:
        return v.saved && v.index == op.index;
    case CAIRN_OP_FORWARD_KEEP:
    case CAIRN_OP_FORWARD_DROP:
        return !v.saved && v.index == op.index;
    case CAIRN_OP_COMPUTE:
        return v.index == op.index;
    case CAIRN_OP_PREFETCH:
        return slow_same_value(slow_spoken_of(op), v);
    default:
        return false;
    }
}

bool slow_unmakes(cairn_op op, slow_value v, slow_tier tier)
{
    switch (op.code) {
    case CAIRN_OP_DISCARD:
        return tier == HOST && slow_same_value(slow_spoken_of(op), v);
    case CAIRN_OP_DROP:
        return tier == DEVICE && slow_same_value(slow_spoken_of(op), v);
    case CAIRN_OP_FORWARD_DROP:
        return tier == DEVICE && !v.saved && v.index == op.index - 1;
    case CAIRN_OP_BACKWARD:
        if (tier == HOST)
            return false;
        return v.saved ? v.index == op.index : v.index == op.index - 1 && op.index > 1;
    default:
        return false;
    }
}

int slow_copy_before(const slow_list *r, int i, slow_value v, slow_tier tier)
{
    for (int j = i - 1; j >= 0; j--) {
        if (slow_makes(r->ops[j], v, tier))
            return j;
        if (slow_unmakes(r->ops[j], v, tier))
            return NO_COPY;
    }
    return r->chain && tier == DEVICE && !v.saved && v.index == 0 ? AT_START : NO_COPY;
}

bool slow_has(const slow_list *r, int i, slow_value v, slow_tier tier)
{
    return slow_copy_before(r, i, v, tier) != NO_COPY;
}

bool slow_has_any(const slow_list *r, int i, slow_value v)
{
    return slow_has(r, i, v, DEVICE) || slow_has(r, i, v, HOST);
}

int slow_gradient_before(const slow_list *r, int i)
{
    int l = r->chain->stage_count;
    for (int j = 0; j < i; j++)
        l -= r->ops[j].code == CAIRN_OP_BACKWARD;
    return l;
}

bool slow_ran_before(const slow_list *r, int i, int index)
{
    for (int j = 0; j < i; j++)
        if (r->ops[j].index == index && (slow_is_forward(r->ops[j]) || r->ops[j].code == CAIRN_OP_COMPUTE))
            return true;
    return false;
}

/* ---- copies ---- */

int slow_option_of(const slow_list *r, int maker)
{
    cairn_op op = r->ops[maker];
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        return op.option;
    slow_tier source = op.code == CAIRN_OP_OFFLOAD ? DEVICE : HOST;
    return slow_option_of(r, slow_copy_before(r, maker, slow_spoken_of(op), source));
}

int slow_storage_of(const slow_list *r, int maker)
{
    if (r->chain || maker < 0 || r->ops[maker].code != CAIRN_OP_COMPUTE)
        return maker;
    int base = r->graph->nodes[r->ops[maker].index].alias_of;
    return base < 0 ? maker : slow_storage_of(r, slow_copy_before(r, maker, slow_make_value(false, base), DEVICE));
}

int64_t slow_bytes_of(const slow_list *r, int maker)
{
    if (maker == AT_START)
        return r->chain->input_bytes;
    cairn_op op = r->ops[maker];
    if (r->graph)
        return r->graph->nodes[op.index].bytes;
    const cairn_stage *stage = &r->chain->stages[op.index - 1];
    if (op.code == CAIRN_OP_FORWARD_SAVE || (slow_is_transfer(op) && op.value == CAIRN_VALUE_SAVED))
        return stage->options[slow_option_of(r, maker)].saved_bytes;
    return stage->output_bytes;
}

slow_value slow_input_of(const slow_list *r, int i, int l)
{
    slow_value output = slow_make_value(false, l - 1), saved = slow_make_value(true, l - 1);
    return !slow_has(r, i, output, DEVICE) && l > 1 && slow_has(r, i, saved, DEVICE) ? saved : output;
}

/* Whether operation i reads or writes the memory that maker made on that tier. */
static bool slow_touches_value(const slow_list *r, int i, slow_value v, slow_tier tier, int maker)
{
    int copy = slow_copy_before(r, i, v, tier);
    return copy != NO_COPY && slow_storage_of(r, copy) == maker;
}

bool slow_reads(const slow_list *r, int i, slow_tier tier, int maker)
{
    cairn_op op = r->ops[i];
    if (slow_is_instant(op))
        return false;
    if (slow_is_transfer(op))
        return tier == (op.code == CAIRN_OP_OFFLOAD ? DEVICE : HOST) &&
               slow_touches_value(r, i, slow_spoken_of(op), tier, maker);
    if (tier == HOST)
        return false;
    if (r->chain)
        return slow_touches_value(r, i, slow_input_of(r, i, op.index), DEVICE, maker) ||
               (op.code == CAIRN_OP_BACKWARD &&
                slow_touches_value(r, i, slow_make_value(true, op.index), DEVICE, maker));
    const cairn_node *node = &r->graph->nodes[op.index];
    for (int k = 0; k < node->dep_count; k++)
        if (slow_touches_value(r, i, slow_make_value(false, node->deps[k]), DEVICE, maker))
            return true;
    return node->alias_of >= 0 && slow_touches_value(r, i, slow_make_value(false, node->alias_of), DEVICE, maker);
}
