/*
 * Residency (docs/reference/formats/schedule.md, "What is resident"). Constant time an operation; a graph's computation
 * looks at each of its dependencies. In every function below the checks stand in the order of precedence of their
 * violations.
 */
#include "schedule/residency.h"

#include "base/checked.h"
#include "base/failure.h"

/* ---- storages ---- */

static int32_t storage_new(crn_residency *r, int64_t bytes, int32_t option)
{
    int32_t made = r->storage_unused;
    if (made == CRN_NO_STORAGE)
        made = r->storage_count++;
    else
        r->storage_unused = r->storages[made].option;
    r->storages[made] = (crn_storage){bytes, 1, option};
    return made;
}

/* Takes one holder away; true when it was the last. */
static bool storage_leave(crn_residency *r, int32_t storage)
{
    crn_storage *left = &r->storages[storage];
    if (--left->holders > 0)
        return false;
    left->option = r->storage_unused;
    r->storage_unused = storage;
    return true;
}

static bool on_device(const crn_residency *r, int32_t value)
{
    return r->places[value].device != CRN_NO_STORAGE;
}

static bool on_host(const crn_residency *r, int32_t value)
{
    return r->places[value].host != CRN_NO_STORAGE;
}

static cairn_violation_code violation(crn_residency *r, cairn_violation_code code, int32_t value)
{
    r->culprit = value;
    return code;
}

/* ---- what effects are made of ---- */

static void effect_begin(const crn_residency *r, cairn_lane lane, crn_effect *effect)
{
    *effect = (crn_effect){.lane = lane, .reads = r->reads, .added = CRN_NO_STORAGE, .released = CRN_NO_STORAGE};
}

static void effect_read(crn_residency *r, int32_t storage, crn_effect *effect)
{
    r->reads[effect->read_count++] = storage;
}

static void effect_add(crn_residency *r, int32_t value, int64_t bytes, int32_t option, crn_effect *effect)
{
    effect->added = r->places[value].device = storage_new(r, bytes, option);
    effect->added_bytes += bytes;
}

static void effect_remove(crn_residency *r, int32_t value, crn_effect *effect)
{
    int32_t storage = r->places[value].device;
    r->places[value].device = CRN_NO_STORAGE;
    effect->removed[effect->removed_count++] = storage;
    effect->removed_bytes += r->storages[storage].bytes;
    storage_leave(r, storage);
}

/* A copy on the other tier, of the same size and option. */
static void effect_copy(crn_residency *r, int32_t from, int32_t *to, crn_effect *effect)
{
    effect_read(r, from, effect);
    effect->added_bytes = r->storages[from].bytes;
    effect->added = *to = storage_new(r, effect->added_bytes, r->storages[from].option);
}

static void effect_release(crn_residency *r, int32_t *copy, crn_effect *effect)
{
    if (storage_leave(r, *copy)) {
        effect->released = *copy;
        effect->released_bytes = r->storages[*copy].bytes;
    }
    *copy = CRN_NO_STORAGE;
}

/* ---- drops, discards and transfers, the same for chains and graphs once the kind's own rules are checked ---- */

static cairn_violation_code apply_offload(crn_residency *r, int32_t value, crn_effect *effect)
{
    if (!r->machine)
        return violation(r, CAIRN_VIOLATION_NO_MACHINE, CRN_NO_VALUE);
    if (on_host(r, value))
        return violation(r, CAIRN_VIOLATION_ALREADY_ON_HOST, value);
    if (!on_device(r, value))
        return violation(r, CAIRN_VIOLATION_NOT_RESIDENT, value);
    effect_begin(r, CAIRN_LANE_TO_HOST, effect);
    effect->on_host = true;
    effect_copy(r, r->places[value].device, &r->places[value].host, effect);
    return CAIRN_VIOLATION_NONE;
}

static cairn_violation_code apply_prefetch(crn_residency *r, int32_t value, crn_effect *effect)
{
    if (!r->machine)
        return violation(r, CAIRN_VIOLATION_NO_MACHINE, CRN_NO_VALUE);
    if (on_device(r, value))
        return violation(r, CAIRN_VIOLATION_ALREADY_RESIDENT, value);
    if (!on_host(r, value))
        return violation(r, CAIRN_VIOLATION_NOT_ON_HOST, value);
    effect_begin(r, CAIRN_LANE_TO_DEVICE, effect);
    effect_copy(r, r->places[value].host, &r->places[value].device, effect);
    return CAIRN_VIOLATION_NONE;
}

/* The copy that a drop or discard speaks of. */
static int32_t *copy_of(const crn_residency *r, cairn_op op, int32_t value)
{
    return op.code == CAIRN_OP_DISCARD ? &r->places[value].host : &r->places[value].device;
}

static cairn_violation_code apply_release(crn_residency *r, cairn_op op, int32_t value, crn_effect *effect)
{
    effect_begin(r, CAIRN_LANE_COUNT, effect);
    effect->on_host = op.code == CAIRN_OP_DISCARD;
    effect_release(r, copy_of(r, op, value), effect);
    return CAIRN_VIOLATION_NONE;
}

static cairn_violation_code missing(crn_residency *r, cairn_op op, int32_t value)
{
    return violation(r, op.code == CAIRN_OP_DISCARD ? CAIRN_VIOLATION_NOT_ON_HOST : CAIRN_VIOLATION_NOT_RESIDENT,
                     value);
}

/* ---- chains ---- */

static int32_t output_value(int32_t l)
{
    return l;
}

static int32_t saved_value(const crn_residency *r, int32_t l)
{
    return r->chain->stage_count + l;
}

static int copies_of(const crn_residency *r, int32_t value)
{
    return on_device(r, value) + on_host(r, value);
}

/* Whether a[l] and A[l] have one copy together, and a saved set that still waits for its backward stands on it. */
static bool is_last_input(const crn_residency *r, int32_t l)
{
    if (l == 0 || l == r->chain->stage_count || r->progress < l + 1 || copies_of(r, saved_value(r, l + 1)) == 0)
        return false;
    return copies_of(r, output_value(l)) + copies_of(r, saved_value(r, l)) == 1;
}

/* The storage that stage l reads its input from: that of a[l-1], else that of A[l-1]. */
static int32_t input_storage(const crn_residency *r, int32_t l)
{
    int32_t output = r->places[output_value(l - 1)].device;
    return output != CRN_NO_STORAGE || l == 1 ? output : r->places[saved_value(r, l - 1)].device;
}

static cairn_violation_code check_forward(crn_residency *r, cairn_op op, int32_t target)
{
    int32_t l = op.index;
    bool saves = op.code == CAIRN_OP_FORWARD_SAVE, drops = op.code == CAIRN_OP_FORWARD_DROP;
    if (drops && l == 1)
        return violation(r, CAIRN_VIOLATION_PINNED, output_value(0));
    if (r->chain->stages[l - 1].no_recompute && (!saves || r->computed[l - 1]))
        return violation(r, CAIRN_VIOLATION_RECOMPUTED, CRN_NO_VALUE);
    if (on_device(r, target))
        return violation(r, CAIRN_VIOLATION_ALREADY_RESIDENT, target);
    if (drops ? !on_device(r, output_value(l - 1)) : input_storage(r, l) == CRN_NO_STORAGE)
        return violation(r, CAIRN_VIOLATION_NOT_RESIDENT, output_value(l - 1));
    if (drops && is_last_input(r, l - 1))
        return violation(r, CAIRN_VIOLATION_INPUT_NEEDED, output_value(l - 1));
    return CAIRN_VIOLATION_NONE;
}

static cairn_violation_code apply_forward(crn_residency *r, cairn_op op, crn_effect *effect)
{
    const cairn_stage *stage = &r->chain->stages[op.index - 1];
    const cairn_stage_option *option = &stage->options[op.option];
    bool saves = op.code == CAIRN_OP_FORWARD_SAVE;
    int32_t target = saves ? saved_value(r, op.index) : output_value(op.index);
    cairn_violation_code code = check_forward(r, op, target);
    if (code != CAIRN_VIOLATION_NONE)
        return code;
    effect_begin(r, CAIRN_LANE_COMPUTE, effect);
    effect_read(r, input_storage(r, op.index), effect);
    effect_add(r, target, saves ? option->saved_bytes : stage->output_bytes, op.option, effect);
    if (op.code == CAIRN_OP_FORWARD_DROP)
        effect_remove(r, output_value(op.index - 1), effect);
    effect->compute_ns = saves ? option->forward_ns : stage->forward_only_ns;
    effect->workspace_bytes = saves ? option->forward_workspace_bytes : stage->forward_only_workspace_bytes;
    effect->repeats = r->computed[op.index - 1];
    r->computed[op.index - 1] = true;
    return CAIRN_VIOLATION_NONE;
}

static int64_t gradient_bytes(const cairn_chain *chain, int32_t l)
{
    return l == 0 ? chain->input_grad_bytes : chain->stages[l - 1].grad_bytes;
}

static cairn_violation_code apply_backward(crn_residency *r, cairn_op op, crn_effect *effect)
{
    int32_t l = op.index, saved = saved_value(r, l), input = output_value(l - 1);
    if (r->progress != l)
        return violation(r, CAIRN_VIOLATION_WRONG_ORDER, CRN_NO_VALUE);
    if (!on_device(r, saved))
        return violation(r, CAIRN_VIOLATION_NOT_RESIDENT, saved);
    if (input_storage(r, l) == CRN_NO_STORAGE)
        return violation(r, CAIRN_VIOLATION_NOT_RESIDENT, input);
    const cairn_stage *stage = &r->chain->stages[l - 1];
    const cairn_stage_option *option = &stage->options[r->storages[r->places[saved].device].option];
    effect_begin(r, CAIRN_LANE_COMPUTE, effect);
    effect_read(r, r->places[saved].device, effect);
    effect_read(r, input_storage(r, l), effect);
    effect->added_bytes = gradient_bytes(r->chain, l - 1) + stage->weight_grad_bytes;
    effect->removed_bytes = gradient_bytes(r->chain, l);
    effect_remove(r, saved, effect);
    if (l > 1 && on_device(r, input))
        effect_remove(r, input, effect);
    effect->compute_ns = option->backward_ns;
    effect->workspace_bytes = option->backward_workspace_bytes;
    r->progress = l - 1;
    return CAIRN_VIOLATION_NONE;
}

static cairn_violation_code apply_chain_release(crn_residency *r, cairn_op op, int32_t value, crn_effect *effect)
{
    if (*copy_of(r, op, value) == CRN_NO_STORAGE)
        return missing(r, op, value);
    if (is_last_input(r, op.index))
        return violation(r, CAIRN_VIOLATION_INPUT_NEEDED, value);
    return apply_release(r, op, value, effect);
}

static cairn_violation_code apply_chain(crn_residency *r, cairn_op op, crn_effect *effect)
{
    int32_t value = op.value == CAIRN_VALUE_SAVED ? saved_value(r, op.index) : output_value(op.index);
    switch (op.code) {
    case CAIRN_OP_FORWARD_SAVE:
    case CAIRN_OP_FORWARD_KEEP:
    case CAIRN_OP_FORWARD_DROP:
        return apply_forward(r, op, effect);
    case CAIRN_OP_BACKWARD:
        return apply_backward(r, op, effect);
    case CAIRN_OP_DISCARD: /* the input has no host copy, so there is nothing to pin */
        return apply_chain_release(r, op, value, effect);
    default:
        break;
    }
    if (value == output_value(0))
        return violation(r, CAIRN_VIOLATION_PINNED, value);
    if (op.code == CAIRN_OP_DROP)
        return apply_chain_release(r, op, value, effect);
    return op.code == CAIRN_OP_OFFLOAD ? apply_offload(r, value, effect) : apply_prefetch(r, value, effect);
}

/* ---- graphs ---- */

/* The storages that node v reads, base included; the first node that is missing, or CRN_NO_VALUE. */
static int32_t gather_reads(crn_residency *r, const cairn_node *node, int32_t *count)
{
    *count = 0;
    for (int32_t i = 0; i < node->dep_count; i++) {
        int32_t storage = r->places[node->deps[i]].device;
        if (storage == CRN_NO_STORAGE)
            return node->deps[i];
        r->reads[(*count)++] = storage;
    }
    if (node->alias_of < 0)
        return CRN_NO_VALUE;
    r->reads[(*count)++] = r->places[node->alias_of].device;
    return on_device(r, node->alias_of) ? CRN_NO_VALUE : node->alias_of;
}

static cairn_violation_code check_compute(crn_residency *r, const cairn_node *node, int32_t v, int32_t *read_count)
{
    if (v > r->progress)
        return violation(r, CAIRN_VIOLATION_WRONG_ORDER, r->progress);
    if (node->no_recompute && r->computed[v])
        return violation(r, CAIRN_VIOLATION_RECOMPUTED, CRN_NO_VALUE);
    if (on_device(r, v))
        return violation(r, CAIRN_VIOLATION_ALREADY_RESIDENT, v);
    int32_t absent = gather_reads(r, node, read_count);
    return absent == CRN_NO_VALUE ? CAIRN_VIOLATION_NONE : violation(r, CAIRN_VIOLATION_NOT_RESIDENT, absent);
}

static cairn_violation_code apply_compute(crn_residency *r, int32_t v, crn_effect *effect)
{
    const cairn_node *node = &r->graph->nodes[v];
    int32_t read_count = 0;
    cairn_violation_code code = check_compute(r, node, v, &read_count);
    if (code != CAIRN_VIOLATION_NONE)
        return code;
    effect_begin(r, CAIRN_LANE_COMPUTE, effect);
    effect->read_count = read_count;
    if (node->alias_of >= 0) {
        r->places[v].device = r->places[node->alias_of].device;
        r->storages[r->places[v].device].holders++;
    } else {
        effect_add(r, v, node->bytes, 0, effect);
    }
    effect->compute_ns = node->cost_ns;
    effect->workspace_bytes = node->workspace_bytes;
    effect->repeats = r->computed[v];
    r->computed[v] = true;
    if (v == r->progress)
        r->progress++;
    return CAIRN_VIOLATION_NONE;
}

static cairn_violation_code apply_graph_release(crn_residency *r, cairn_op op, crn_effect *effect)
{
    bool present = *copy_of(r, op, op.index) != CRN_NO_STORAGE;
    if (r->graph->nodes[op.index].keep && present && copies_of(r, op.index) == 1)
        return violation(r, CAIRN_VIOLATION_KEEP_DROPPED, op.index);
    if (!present)
        return missing(r, op, op.index);
    return apply_release(r, op, op.index, effect);
}

static cairn_violation_code apply_graph(crn_residency *r, cairn_op op, crn_effect *effect)
{
    if (op.code == CAIRN_OP_COMPUTE)
        return apply_compute(r, op.index, effect);
    if (op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_DISCARD)
        return apply_graph_release(r, op, effect);
    if (r->graph->nodes[op.index].alias_of >= 0)
        return violation(r, CAIRN_VIOLATION_ALIAS_MOVED, op.index);
    return op.code == CAIRN_OP_OFFLOAD ? apply_offload(r, op.index, effect) : apply_prefetch(r, op.index, effect);
}

/* ---- the whole ---- */

cairn_violation_code crn_residency_apply(crn_residency *residency, cairn_op op, crn_effect *effect)
{
    return residency->chain ? apply_chain(residency, op, effect) : apply_graph(residency, op, effect);
}

bool crn_residency_complete(const crn_residency *residency)
{
    return residency->progress == (residency->chain ? 0 : residency->graph->node_count);
}

/* Reads of one operation: a backward has two; a node its dependencies and its base. */
static int32_t most_reads(const crn_residency *r)
{
    int32_t most = 2;
    for (int32_t v = 0; r->graph && v < r->graph->node_count; v++)
        if (r->graph->nodes[v].dep_count >= most)
            most = r->graph->nodes[v].dep_count + 1;
    return most;
}

static int32_t step_count(const crn_residency *r)
{
    return r->chain ? r->chain->stage_count : r->graph->node_count;
}

cairn_status crn_residency_init(crn_residency *residency, cairn_allocator allocator, const cairn_problem *problem,
                                const cairn_machine *machine, int64_t op_count, cairn_error *error)
{
    crn_residency *r = residency;
    *r = (crn_residency){.allocator = allocator, .machine = machine, .culprit = CRN_NO_VALUE};
    r->chain = cairn_problem_chain(problem);
    r->graph = cairn_problem_graph(problem);
    r->value_count = r->chain ? 2 * r->chain->stage_count + 1 : r->graph->node_count;
    r->progress = r->chain ? r->chain->stage_count : 0;
    /* Each value has at most one copy a tier, each operation makes at most one storage, and a[0] is there before. */
    r->storage_capacity = (int32_t)crn_min(2 * (int64_t)r->value_count, op_count + 1);
    r->storage_unused = CRN_NO_STORAGE;
    r->read_capacity = most_reads(r);
    r->places = crn_alloc(&allocator, (size_t)r->value_count, sizeof(*r->places));
    r->computed = crn_alloc_zero(&allocator, (size_t)step_count(r), sizeof(*r->computed));
    r->storages = crn_alloc(&allocator, (size_t)r->storage_capacity, sizeof(*r->storages));
    r->reads = crn_alloc(&allocator, (size_t)r->read_capacity, sizeof(*r->reads));
    if (!r->places || !r->computed || !r->storages || !r->reads) {
        crn_residency_free(r);
        return crn_no_memory(error);
    }
    for (int32_t i = 0; i < r->value_count; i++)
        r->places[i] = (crn_place){CRN_NO_STORAGE, CRN_NO_STORAGE};
    if (r->chain)
        r->places[output_value(0)].device = storage_new(r, r->chain->input_bytes, 0);
    return CAIRN_OK;
}

void crn_residency_free(crn_residency *residency)
{
    crn_residency *r = residency;
    crn_free(&r->allocator, r->places, (size_t)r->value_count, sizeof(*r->places));
    crn_free(&r->allocator, r->computed, (size_t)step_count(r), sizeof(*r->computed));
    crn_free(&r->allocator, r->storages, (size_t)r->storage_capacity, sizeof(*r->storages));
    crn_free(&r->allocator, r->reads, (size_t)r->read_capacity, sizeof(*r->reads));
}
