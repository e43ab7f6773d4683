#include "support/slow_replay.h"

#include <stdlib.h>
#include <string.h>

__extension__ typedef __int128 wide; /* sums that cannot overflow */

enum { MOST = TEST_SLOW_OPS_MAX };

/* A copy is named by the position of the operation that makes it. */
enum { NO_COPY = -2, AT_START = -1 };

typedef enum where { DEVICE, HOST } where;

typedef struct replay {
    const cairn_chain *chain;
    const cairn_graph *graph;
    const cairn_machine *machine;
    const cairn_op *ops;
    int64_t fixed_bytes;
    wide start[MOST], end[MOST]; /* of drops and discards: when the memory comes back */
    wide reserved[MOST];         /* of computations */
} replay;

/* A value: a[index] or A[index] of a chain, node index of a graph. */
typedef struct value {
    bool saved;
    int index;
} value;

static value make_value(bool saved, int index)
{
    return (value){saved, index};
}

static bool same_value(value a, value b)
{
    return a.saved == b.saved && a.index == b.index;
}

/* ---- what an operation is ---- */

static bool is_transfer(cairn_op op)
{
    return op.code == CAIRN_OP_OFFLOAD || op.code == CAIRN_OP_PREFETCH;
}

static bool is_instant(cairn_op op)
{
    return op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_DISCARD;
}

static bool is_forward(cairn_op op)
{
    return op.code == CAIRN_OP_FORWARD_SAVE || op.code == CAIRN_OP_FORWARD_KEEP || op.code == CAIRN_OP_FORWARD_DROP;
}

static bool computes(cairn_op op)
{
    return is_forward(op) || op.code == CAIRN_OP_BACKWARD || op.code == CAIRN_OP_COMPUTE;
}

static value spoken_of(cairn_op op)
{
    return make_value(op.value == CAIRN_VALUE_SAVED, op.index);
}

/* Whether the operation makes a copy of the value there. */
static bool makes(cairn_op op, value v, where tier)
{
    if (tier == HOST)
        return op.code == CAIRN_OP_OFFLOAD && same_value(spoken_of(op), v);
    switch (op.code) {
    case CAIRN_OP_FORWARD_SAVE:
        return v.saved && v.index == op.index;
    case CAIRN_OP_FORWARD_KEEP:
    case CAIRN_OP_FORWARD_DROP:
        return !v.saved && v.index == op.index;
    case CAIRN_OP_COMPUTE:
        return v.index == op.index;
    case CAIRN_OP_PREFETCH:
        return same_value(spoken_of(op), v);
    default:
        return false;
    }
}

/* Whether no copy of the value is left there after the operation, by its own doing. */
static bool unmakes(cairn_op op, value v, where tier)
{
    switch (op.code) {
    case CAIRN_OP_DISCARD:
        return tier == HOST && same_value(spoken_of(op), v);
    case CAIRN_OP_DROP:
        return tier == DEVICE && same_value(spoken_of(op), v);
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

/* The copy of a value that is there before operation i, by the order of the list. */
static int copy_before(const replay *r, int i, value v, where tier)
{
    for (int j = i - 1; j >= 0; j--) {
        if (makes(r->ops[j], v, tier))
            return j;
        if (unmakes(r->ops[j], v, tier))
            return NO_COPY;
    }
    return r->chain && tier == DEVICE && !v.saved && v.index == 0 ? AT_START : NO_COPY;
}

static bool has(const replay *r, int i, value v, where tier)
{
    return copy_before(r, i, v, tier) != NO_COPY;
}

static bool has_any(const replay *r, int i, value v)
{
    return has(r, i, v, DEVICE) || has(r, i, v, HOST);
}

/* The gradient that is there before operation i. */
static int gradient_before(const replay *r, int i)
{
    int l = r->chain->stage_count;
    for (int j = 0; j < i; j++)
        l -= r->ops[j].code == CAIRN_OP_BACKWARD;
    return l;
}

/* Whether the stage or node of operation i was run before, be it with another option. */
static bool ran_before(const replay *r, int i, int index)
{
    for (int j = 0; j < i; j++)
        if (r->ops[j].index == index && (is_forward(r->ops[j]) || r->ops[j].code == CAIRN_OP_COMPUTE))
            return true;
    return false;
}

/* ---- copies ---- */

/* The option of a saved set that operation maker put there. */
static int option_of(const replay *r, int maker)
{
    cairn_op op = r->ops[maker];
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        return op.option;
    where source = op.code == CAIRN_OP_OFFLOAD ? DEVICE : HOST;
    return option_of(r, copy_before(r, maker, spoken_of(op), source));
}

/* The operation that made the memory in which an output of a node lies: that of the node whose alias it is. */
static int storage_of(const replay *r, int maker)
{
    if (r->chain || maker < 0 || r->ops[maker].code != CAIRN_OP_COMPUTE)
        return maker;
    int base = r->graph->nodes[r->ops[maker].index].alias_of;
    return base < 0 ? maker : storage_of(r, copy_before(r, maker, make_value(false, base), DEVICE));
}

static int64_t bytes_of(const replay *r, int maker)
{
    if (maker == AT_START)
        return r->chain->input_bytes;
    cairn_op op = r->ops[maker];
    if (r->graph)
        return r->graph->nodes[op.index].bytes;
    const cairn_stage *stage = &r->chain->stages[op.index - 1];
    if (op.code == CAIRN_OP_FORWARD_SAVE || (is_transfer(op) && op.value == CAIRN_VALUE_SAVED))
        return stage->options[option_of(r, maker)].saved_bytes;
    return stage->output_bytes;
}

/* The input that stage l reads before operation i: a[l-1] when it is there, else A[l-1]. */
static value input_of(const replay *r, int i, int l)
{
    value output = make_value(false, l - 1), saved = make_value(true, l - 1);
    return !has(r, i, output, DEVICE) && l > 1 && has(r, i, saved, DEVICE) ? saved : output;
}

/* Whether operation i reads or writes the memory that maker made on that tier. */
static bool touches_value(const replay *r, int i, value v, where tier, int maker)
{
    int copy = copy_before(r, i, v, tier);
    return copy != NO_COPY && storage_of(r, copy) == maker;
}

static bool reads(const replay *r, int i, where tier, int maker)
{
    cairn_op op = r->ops[i];
    if (is_instant(op))
        return false;
    if (is_transfer(op))
        return tier == (op.code == CAIRN_OP_OFFLOAD ? DEVICE : HOST) && touches_value(r, i, spoken_of(op), tier, maker);
    if (tier == HOST)
        return false;
    if (r->chain)
        return touches_value(r, i, input_of(r, i, op.index), DEVICE, maker) ||
               (op.code == CAIRN_OP_BACKWARD && touches_value(r, i, make_value(true, op.index), DEVICE, maker));
    const cairn_node *node = &r->graph->nodes[op.index];
    for (int k = 0; k < node->dep_count; k++)
        if (touches_value(r, i, make_value(false, node->deps[k]), DEVICE, maker))
            return true;
    return node->alias_of >= 0 && touches_value(r, i, make_value(false, node->alias_of), DEVICE, maker);
}

/* ---- violations ---- */

static bool is_pinned(const replay *r, cairn_op op)
{
    if (r->graph)
        return false;
    if (op.code == CAIRN_OP_FORWARD_DROP)
        return op.index == 1;
    return (op.code == CAIRN_OP_DROP || is_transfer(op)) && same_value(spoken_of(op), make_value(false, 0));
}

static bool is_out_of_order(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_BACKWARD)
        return gradient_before(r, i) != op.index;
    for (int u = 0; op.code == CAIRN_OP_COMPUTE && u < op.index; u++)
        if (!ran_before(r, i, u))
            return true;
    return false;
}

static bool is_recomputed(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_COMPUTE)
        return r->graph->nodes[op.index].no_recompute && ran_before(r, i, op.index);
    if (!is_forward(op) || !r->chain->stages[op.index - 1].no_recompute)
        return false;
    return op.code != CAIRN_OP_FORWARD_SAVE || ran_before(r, i, op.index);
}

static bool drops_kept(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    return r->graph && is_instant(op) && r->graph->nodes[op.index].keep && has_any(r, i, spoken_of(op)) &&
           !has_any(r, i + 1, spoken_of(op));
}

static bool moves_alias(const replay *r, cairn_op op)
{
    return r->graph && is_transfer(op) && r->graph->nodes[op.index].alias_of >= 0;
}

static bool has_already(const replay *r, int i, where tier)
{
    cairn_op op = r->ops[i];
    if (r->chain) {
        for (int l = 0; l <= r->chain->stage_count; l++)
            for (int saved = 0; saved <= 1; saved++)
                if (makes(op, make_value(saved, l), tier) && has(r, i, make_value(saved, l), tier))
                    return true;
        return false;
    }
    return makes(op, make_value(false, op.index), tier) && has(r, i, make_value(false, op.index), tier);
}

static bool lacks_host_copy(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    return (op.code == CAIRN_OP_PREFETCH || op.code == CAIRN_OP_DISCARD) && !has(r, i, spoken_of(op), HOST);
}

static bool lacks_device_copy(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_OFFLOAD)
        return !has(r, i, spoken_of(op), DEVICE);
    if (op.code == CAIRN_OP_FORWARD_DROP)
        return !has(r, i, make_value(false, op.index - 1), DEVICE);
    if (op.code == CAIRN_OP_BACKWARD && !has(r, i, make_value(true, op.index), DEVICE))
        return true;
    if (is_forward(op) || op.code == CAIRN_OP_BACKWARD)
        return !has(r, i, input_of(r, i, op.index), DEVICE);
    if (op.code != CAIRN_OP_COMPUTE)
        return false;
    const cairn_node *node = &r->graph->nodes[op.index];
    for (int k = 0; k < node->dep_count; k++)
        if (!has(r, i, make_value(false, node->deps[k]), DEVICE))
            return true;
    return node->alias_of >= 0 && !has(r, i, make_value(false, node->alias_of), DEVICE);
}

/* Whether, after operation i, a saved set that waits for its backward has no input any more. */
static bool leaves_no_input(const replay *r, int i)
{
    for (int l = 2; r->chain && l <= r->chain->stage_count && l <= gradient_before(r, i + 1); l++)
        if (has_any(r, i + 1, make_value(true, l)) && !has_any(r, i + 1, make_value(true, l - 1)) &&
            !has_any(r, i + 1, make_value(false, l - 1)))
            return true;
    return false;
}

static cairn_violation_code first_violation(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    bool applies[CAIRN_VIOLATION_COUNT] = {
        [CAIRN_VIOLATION_PINNED] = is_pinned(r, op),
        [CAIRN_VIOLATION_WRONG_ORDER] = is_out_of_order(r, i),
        [CAIRN_VIOLATION_RECOMPUTED] = is_recomputed(r, i),
        [CAIRN_VIOLATION_KEEP_DROPPED] = drops_kept(r, i),
        [CAIRN_VIOLATION_ALIAS_MOVED] = moves_alias(r, op),
        [CAIRN_VIOLATION_NO_MACHINE] = is_transfer(op) && !r->machine,
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

/* ---- times ---- */

static const cairn_stage *stage_of(const replay *r, cairn_op op)
{
    return &r->chain->stages[op.index - 1];
}

/* What operation i needs for its run: time, workspace, bytes that it adds. */
typedef struct demand {
    wide ns, workspace_bytes, result_bytes, removed_bytes;
} demand;

static int64_t gradient_bytes(const replay *r, int l)
{
    return l == 0 ? r->chain->input_grad_bytes : r->chain->stages[l - 1].grad_bytes;
}

static wide transfer_ns(const replay *r, cairn_op op, int64_t bytes)
{
    wide rate = op.code == CAIRN_OP_OFFLOAD ? r->machine->to_host_bytes_per_s : r->machine->to_device_bytes_per_s;
    wide ns = (wide)bytes * 1000000000;
    return r->machine->latency_ns + ns / rate + (ns % rate > 0);
}

static demand backward_demand(const replay *r, int i)
{
    int l = r->ops[i].index;
    int saved = copy_before(r, i, make_value(true, l), DEVICE),
        input = copy_before(r, i, make_value(false, l - 1), DEVICE);
    const cairn_stage *stage = stage_of(r, r->ops[i]);
    const cairn_stage_option *option = &stage->options[option_of(r, saved)];
    wide removed = (wide)gradient_bytes(r, l) + bytes_of(r, saved);
    if (l > 1 && input != NO_COPY)
        removed += bytes_of(r, input);
    return (demand){option->backward_ns, option->backward_workspace_bytes,
                    (wide)gradient_bytes(r, l - 1) + stage->weight_grad_bytes, removed};
}

static demand demand_of(const replay *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_BACKWARD)
        return backward_demand(r, i);
    if (is_transfer(op))
        return (demand){transfer_ns(r, op, bytes_of(r, i)), 0, bytes_of(r, i), 0};
    if (r->graph) {
        const cairn_node *node = &r->graph->nodes[op.index];
        return (demand){node->cost_ns, node->workspace_bytes, node->bytes, 0};
    }
    const cairn_stage *stage = stage_of(r, op);
    const cairn_stage_option *option = &stage->options[op.option];
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        return (demand){option->forward_ns, option->forward_workspace_bytes, option->saved_bytes, 0};
    wide removed = 0;
    if (op.code == CAIRN_OP_FORWARD_DROP)
        removed = bytes_of(r, copy_before(r, i, make_value(false, op.index - 1), DEVICE));
    return (demand){stage->forward_only_ns, stage->forward_only_workspace_bytes, stage->output_bytes, removed};
}

/* The operation before position i by which the last holder of maker's memory goes; -1 when it is still held. */
static int remover(const replay *r, int i, where tier, int maker)
{
    int last = -1;
    for (int j = maker < 0 ? 0 : maker; j < i; j++) {
        if (j != maker && !(makes(r->ops[j], make_value(false, r->ops[j].index), tier) && storage_of(r, j) == maker))
            continue;
        /* j makes a holder of that memory (the maker itself, or an alias): who unmakes it? */
        value held = is_transfer(r->ops[j]) ? spoken_of(r->ops[j])
                                            : make_value(r->ops[j].code == CAIRN_OP_FORWARD_SAVE, r->ops[j].index);
        int k = j + 1;
        while (k < i && !unmakes(r->ops[k], held, tier))
            k++;
        if (k == i)
            return -1;
        last = k > last ? k : last;
    }
    return last;
}

/* Memory of one tier in use at an instant, by what was issued before position i; what ends at the instant has ended. */
static wide used_at(const replay *r, int i, where tier, wide instant)
{
    wide used = 0;
    if (tier == DEVICE) {
        used = r->fixed_bytes;
        if (r->chain) {
            used += r->chain->input_bytes;
            int gradient = r->chain->stage_count;
            for (int j = 0; j < i; j++)
                if (r->ops[j].code == CAIRN_OP_BACKWARD && r->end[j] <= instant) {
                    used += stage_of(r, r->ops[j])->weight_grad_bytes;
                    gradient--;
                }
            used += gradient_bytes(r, gradient);
        }
    }
    for (int j = 0; j < i; j++) {
        cairn_op op = r->ops[j];
        if (is_instant(op))
            continue;
        if (computes(op) && r->end[j] > instant) {
            if (tier == DEVICE)
                used += r->reserved[j];
            continue;
        }
        bool is_there = op.code != CAIRN_OP_BACKWARD && tier == (op.code == CAIRN_OP_OFFLOAD ? HOST : DEVICE) &&
                        storage_of(r, j) == j;
        int gone = is_there ? remover(r, i, tier, j) : -1;
        if (is_there && (gone < 0 || r->end[gone] > instant))
            used += bytes_of(r, j);
    }
    return used;
}

static wide last_start(const replay *r, int i)
{
    for (int j = i - 1; j >= 0; j--)
        if (!is_instant(r->ops[j]))
            return r->start[j];
    return 0;
}

static int lane(const replay *r, cairn_op op)
{
    if (!is_transfer(op))
        return 0;
    return op.code == CAIRN_OP_PREFETCH && !r->machine->shared_link ? 2 : 1;
}

static wide later(wide a, wide b)
{
    return a > b ? a : b;
}

/* The earliest start of operation i, memory apart. */
static wide earliest_start(const replay *r, int i)
{
    wide earliest = last_start(r, i);
    for (int j = 0; j < i; j++) {
        cairn_op op = r->ops[j];
        if (is_instant(op))
            continue;
        if (lane(r, op) == lane(r, r->ops[i]))
            earliest = later(earliest, r->end[j]);
        where tier = op.code == CAIRN_OP_OFFLOAD ? HOST : DEVICE;
        if (op.code != CAIRN_OP_BACKWARD && storage_of(r, j) == j && reads(r, i, tier, j))
            earliest = later(earliest, r->end[j]); /* j made what i reads */
        /* Does j move into or out of what i removes? */
        for (int l = 0; is_transfer(op) && r->chain && l <= r->chain->stage_count; l++)
            for (int saved = 0; saved <= 1; saved++) {
                value v = make_value(saved, l);
                int copy = unmakes(r->ops[i], v, DEVICE) ? copy_before(r, i, v, DEVICE) : NO_COPY;
                if (copy != NO_COPY && (copy == j || reads(r, j, DEVICE, copy)))
                    earliest = later(earliest, r->end[j]);
            }
    }
    return earliest;
}

/* When the memory of a drop or discard at position i comes back. */
static wide return_time(const replay *r, int i)
{
    where tier = r->ops[i].code == CAIRN_OP_DISCARD ? HOST : DEVICE;
    int maker = storage_of(r, copy_before(r, i, spoken_of(r->ops[i]), tier));
    wide back = last_start(r, i);
    for (int j = 0; j < i; j++)
        if (!is_instant(r->ops[j]) && (j == maker || reads(r, j, tier, maker)))
            back = later(back, r->end[j]);
    return back;
}

/* ---- the judge ---- */

static cairn_replay judged(cairn_violation_code code, int64_t op)
{
    cairn_replay result = {.violation = {.code = code, .op = op, .needed_bytes = CAIRN_NONE, .free_bytes = CAIRN_NONE}};
    result.makespan_ns = result.peak_bytes = result.host_peak_bytes = CAIRN_NONE;
    result.compute_ns = result.recompute_ns = result.stall_ns = CAIRN_NONE;
    return result;
}

static cairn_replay judged_memory(where tier, int64_t op, wide needed, wide free_bytes)
{
    cairn_replay result = judged(tier == HOST ? CAIRN_VIOLATION_OVER_HOST_BUDGET : CAIRN_VIOLATION_OVER_BUDGET, op);
    result.violation.needed_bytes = (int64_t)needed;
    result.violation.free_bytes = (int64_t)free_bytes;
    return result;
}

/* Fixes the start of operation i: the first of all instants at which anything ends where its memory is free. */
static bool find_start(replay *r, int i, where tier, wide needed, wide limit)
{
    wide earliest = earliest_start(r, i), best = -1;
    for (int j = -1; j < i; j++) {
        wide instant = j < 0 ? earliest : r->end[j];
        if (instant >= earliest && (best < 0 || instant < best) &&
            (limit == CAIRN_NONE || used_at(r, i, tier, instant) + needed <= limit))
            best = instant;
    }
    r->start[i] = best;
    return best >= 0;
}

static bool is_complete(const replay *r, int count)
{
    if (r->chain)
        return gradient_before(r, count) == 0;
    for (int v = 0; v < r->graph->node_count; v++)
        if (!ran_before(r, count, v))
            return false;
    return true;
}

cairn_replay test_slow_replay(const cairn_problem *problem, const cairn_machine *machine, const cairn_op *ops,
                              int64_t count, int64_t budget_bytes)
{
    static const wide most = INT64_MAX, forever = (wide)INT64_MAX * 2;
    replay r;
    cairn_replay result = judged(CAIRN_VIOLATION_NONE, CAIRN_NONE);
    if (count > MOST)
        abort();
    memset(&r, 0, sizeof(r));
    r.chain = cairn_problem_chain(problem);
    r.graph = cairn_problem_graph(problem);
    r.machine = machine;
    r.ops = ops;
    r.fixed_bytes = cairn_problem_info_of(problem)->fixed_bytes;
    wide peak[2] = {used_at(&r, 0, DEVICE, 0), 0}, makespan = 0, compute = 0, recompute = 0;
    bool fits_at_start = budget_bytes == CAIRN_NONE || peak[DEVICE] <= budget_bytes;
    if (count == 0 && !fits_at_start)
        return judged_memory(DEVICE, 0, peak[DEVICE], budget_bytes);
    for (int i = 0; i < count; i++) {
        cairn_violation_code code = first_violation(&r, i);
        if (code != CAIRN_VIOLATION_NONE)
            return judged(code, i);
        if (!fits_at_start)
            return judged_memory(DEVICE, 0, peak[DEVICE], budget_bytes);
        if (is_instant(ops[i])) {
            r.end[i] = return_time(&r, i);
            continue;
        }
        where tier = ops[i].code == CAIRN_OP_OFFLOAD ? HOST : DEVICE;
        wide limit = tier == HOST ? machine->host_bytes : budget_bytes;
        demand d = demand_of(&r, i);
        wide needed = later(later(0, d.result_bytes - d.removed_bytes), d.result_bytes + d.workspace_bytes);
        if (!find_start(&r, i, tier, needed, limit))
            return judged_memory(tier, i, needed, limit - used_at(&r, i, tier, forever));
        r.reserved[i] = needed;
        r.end[i] = r.start[i] + d.ns;
        wide used = used_at(&r, i, tier, r.start[i]) + needed;
        if (r.end[i] > most || used > most)
            return judged(CAIRN_VIOLATION_OVERFLOW, i);
        peak[tier] = later(peak[tier], used);
        makespan = later(makespan, r.end[i]);
        compute += computes(ops[i]) ? d.ns : 0;
        recompute += computes(ops[i]) && ops[i].code != CAIRN_OP_BACKWARD && ran_before(&r, i, ops[i].index) ? d.ns : 0;
    }
    if (!is_complete(&r, (int)count))
        return judged(CAIRN_VIOLATION_INCOMPLETE, CAIRN_NONE);
    result.valid = true;
    result.makespan_ns = (int64_t)makespan;
    result.peak_bytes = (int64_t)peak[DEVICE];
    result.host_peak_bytes = (int64_t)peak[HOST];
    result.compute_ns = (int64_t)compute;
    result.recompute_ns = (int64_t)recompute;
    result.stall_ns = (int64_t)(makespan - compute);
    return result;
}
