#include "support/slow_replay.h"

#include <stdlib.h>
#include <string.h>

#include "support/slow_copies.h"

/* ---- times ---- */

static const cairn_stage *stage_of(const slow_list *r, cairn_op op)
{
    return &r->chain->stages[op.index - 1];
}

/* What operation i needs for its run: time, workspace, bytes that it adds. */
typedef struct demand {
    slow_wide ns, workspace_bytes, result_bytes, removed_bytes;
} demand;

static int64_t gradient_bytes(const slow_list *r, int l)
{
    return l == 0 ? r->chain->input_grad_bytes : r->chain->stages[l - 1].grad_bytes;
}

static slow_wide transfer_ns(const slow_list *r, cairn_op op, int64_t bytes)
{
    slow_wide rate = op.code == CAIRN_OP_OFFLOAD ? r->machine->to_host_bytes_per_s : r->machine->to_device_bytes_per_s;
    slow_wide ns = (slow_wide)bytes * 1000000000;
    return r->machine->latency_ns + ns / rate + (ns % rate > 0);
}

static demand backward_demand(const slow_list *r, int i)
{
    int l = r->ops[i].index;
    int saved = slow_copy_before(r, i, slow_make_value(true, l), DEVICE),
        input = slow_copy_before(r, i, slow_make_value(false, l - 1), DEVICE);
    const cairn_stage *stage = stage_of(r, r->ops[i]);
    const cairn_stage_option *option = &stage->options[slow_option_of(r, saved)];
    slow_wide removed = (slow_wide)gradient_bytes(r, l) + slow_bytes_of(r, saved);
    if (l > 1 && input != NO_COPY)
        removed += slow_bytes_of(r, input);
    return (demand){option->backward_ns, option->backward_workspace_bytes,
                    (slow_wide)gradient_bytes(r, l - 1) + stage->weight_grad_bytes, removed};
}

static demand demand_of(const slow_list *r, int i)
{
    cairn_op op = r->ops[i];
    if (op.code == CAIRN_OP_BACKWARD)
        return backward_demand(r, i);
    if (slow_is_transfer(op))
        return (demand){transfer_ns(r, op, slow_bytes_of(r, i)), 0, slow_bytes_of(r, i), 0};
    if (r->graph) {
        const cairn_node *node = &r->graph->nodes[op.index];
        return (demand){node->cost_ns, node->workspace_bytes, node->bytes, 0};
    }
    const cairn_stage *stage = stage_of(r, op);
    const cairn_stage_option *option = &stage->options[op.option];
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        return (demand){option->forward_ns, option->forward_workspace_bytes, option->saved_bytes, 0};
    slow_wide removed = 0;
    if (op.code == CAIRN_OP_FORWARD_DROP)
        removed = slow_bytes_of(r, slow_copy_before(r, i, slow_make_value(false, op.index - 1), DEVICE));
    return (demand){stage->forward_only_ns, stage->forward_only_workspace_bytes, stage->output_bytes, removed};
}

/* The operation before position i by which the last holder of maker's memory goes; -1 when it is still held. */
static int remover(const slow_list *r, int i, slow_tier tier, int maker)
{
    int last = -1;
    for (int j = maker < 0 ? 0 : maker; j < i; j++) {
        if (j != maker &&
            !(slow_makes(r->ops[j], slow_make_value(false, r->ops[j].index), tier) && slow_storage_of(r, j) == maker))
            continue;
        /* j makes a holder of that memory (the maker itself, or an alias): who unmakes it? */
        slow_value held = slow_is_transfer(r->ops[j])
                              ? slow_spoken_of(r->ops[j])
                              : slow_make_value(r->ops[j].code == CAIRN_OP_FORWARD_SAVE, r->ops[j].index);
        int k = j + 1;
        while (k < i && !slow_unmakes(r->ops[k], held, tier))
            k++;
        if (k == i)
            return -1;
        last = k > last ? k : last;
    }
    return last;
}

/* Memory of one tier in use at an instant, by what was issued before position i; what ends at the instant has ended. */
static slow_wide used_at(const slow_list *r, int i, slow_tier tier, slow_wide instant)
{
    slow_wide used = 0;
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
        if (slow_is_instant(op))
            continue;
        if (slow_computes(op) && r->end[j] > instant) {
            if (tier == DEVICE)
                used += r->reserved[j];
            continue;
        }
        bool is_there = op.code != CAIRN_OP_BACKWARD && tier == (op.code == CAIRN_OP_OFFLOAD ? HOST : DEVICE) &&
                        slow_storage_of(r, j) == j;
        int gone = is_there ? remover(r, i, tier, j) : -1;
        if (is_there && (gone < 0 || r->end[gone] > instant))
            used += slow_bytes_of(r, j);
    }
    return used;
}

static slow_wide last_start(const slow_list *r, int i)
{
    for (int j = i - 1; j >= 0; j--)
        if (!slow_is_instant(r->ops[j]))
            return r->start[j];
    return 0;
}

static int lane(const slow_list *r, cairn_op op)
{
    if (!slow_is_transfer(op))
        return 0;
    return op.code == CAIRN_OP_PREFETCH && !r->machine->shared_link ? 2 : 1;
}

static slow_wide later(slow_wide a, slow_wide b)
{
    return a > b ? a : b;
}

/* The earliest start of operation i, memory apart. */
static slow_wide earliest_start(const slow_list *r, int i)
{
    slow_wide earliest = last_start(r, i);
    for (int j = 0; j < i; j++) {
        cairn_op op = r->ops[j];
        if (slow_is_instant(op))
            continue;
        if (lane(r, op) == lane(r, r->ops[i]))
            earliest = later(earliest, r->end[j]);
        slow_tier tier = op.code == CAIRN_OP_OFFLOAD ? HOST : DEVICE;
        if (op.code != CAIRN_OP_BACKWARD && slow_storage_of(r, j) == j && slow_reads(r, i, tier, j))
            earliest = later(earliest, r->end[j]); /* j made what i reads */
        /* Does j move into or out of what i removes? */
        for (int l = 0; slow_is_transfer(op) && r->chain && l <= r->chain->stage_count; l++)
            for (int saved = 0; saved <= 1; saved++) {
                slow_value v = slow_make_value(saved, l);
                int copy = slow_unmakes(r->ops[i], v, DEVICE) ? slow_copy_before(r, i, v, DEVICE) : NO_COPY;
                if (copy != NO_COPY && (copy == j || slow_reads(r, j, DEVICE, copy)))
                    earliest = later(earliest, r->end[j]);
            }
    }
    return earliest;
}

/* When the memory of a drop or discard at position i comes back. */
static slow_wide return_time(const slow_list *r, int i)
{
    slow_tier tier = r->ops[i].code == CAIRN_OP_DISCARD ? HOST : DEVICE;
    int maker = slow_storage_of(r, slow_copy_before(r, i, slow_spoken_of(r->ops[i]), tier));
    slow_wide back = last_start(r, i);
    for (int j = 0; j < i; j++)
        if (!slow_is_instant(r->ops[j]) && (j == maker || slow_reads(r, j, tier, maker)))
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

static cairn_replay judged_memory(slow_tier tier, int64_t op, slow_wide needed, slow_wide free_bytes)
{
    cairn_replay result = judged(tier == HOST ? CAIRN_VIOLATION_OVER_HOST_BUDGET : CAIRN_VIOLATION_OVER_BUDGET, op);
    result.violation.needed_bytes = (int64_t)needed;
    result.violation.free_bytes = (int64_t)free_bytes;
    return result;
}

/* Fixes the start of operation i: the first of all instants at which anything ends where its memory is free. */
static bool find_start(slow_list *r, int i, slow_tier tier, slow_wide needed, slow_wide limit)
{
    slow_wide earliest = earliest_start(r, i), best = -1;
    for (int j = -1; j < i; j++) {
        slow_wide instant = j < 0 ? earliest : r->end[j];
        if (instant >= earliest && (best < 0 || instant < best) &&
            (limit == CAIRN_NONE || used_at(r, i, tier, instant) + needed <= limit))
            best = instant;
    }
    r->start[i] = best;
    return best >= 0;
}

static bool is_complete(const slow_list *r, int count)
{
    if (r->chain)
        return slow_gradient_before(r, count) == 0;
    for (int v = 0; v < r->graph->node_count; v++)
        if (!slow_ran_before(r, count, v))
            return false;
    return true;
}

cairn_replay test_slow_replay(const cairn_problem *problem, const cairn_machine *machine, const cairn_op *ops,
                              int64_t count, int64_t budget_bytes)
{
    static const slow_wide most = INT64_MAX, forever = (slow_wide)INT64_MAX * 2;
    slow_list r;
    cairn_replay result = judged(CAIRN_VIOLATION_NONE, CAIRN_NONE);
    if (count > TEST_SLOW_OPS_MAX)
        abort();
    memset(&r, 0, sizeof(r));
    r.chain = cairn_problem_chain(problem);
    r.graph = cairn_problem_graph(problem);
    r.machine = machine;
    r.ops = ops;
    r.fixed_bytes = cairn_problem_info_of(problem)->fixed_bytes;
    slow_wide peak[2] = {used_at(&r, 0, DEVICE, 0), 0}, makespan = 0, compute = 0, recompute = 0;
    bool fits_at_start = budget_bytes == CAIRN_NONE || peak[DEVICE] <= budget_bytes;
    if (count == 0 && !fits_at_start)
        return judged_memory(DEVICE, 0, peak[DEVICE], budget_bytes);
    for (int i = 0; i < count; i++) {
        cairn_violation_code code = slow_first_violation(&r, i);
        if (code != CAIRN_VIOLATION_NONE)
            return judged(code, i);
        if (!fits_at_start)
            return judged_memory(DEVICE, 0, peak[DEVICE], budget_bytes);
        if (slow_is_instant(ops[i])) {
            r.end[i] = return_time(&r, i);
            continue;
        }
        slow_tier tier = ops[i].code == CAIRN_OP_OFFLOAD ? HOST : DEVICE;
        slow_wide limit = tier == HOST ? machine->host_bytes : budget_bytes;
        demand d = demand_of(&r, i);
        slow_wide needed = later(later(0, d.result_bytes - d.removed_bytes), d.result_bytes + d.workspace_bytes);
        if (!find_start(&r, i, tier, needed, limit))
            return judged_memory(tier, i, needed, limit - used_at(&r, i, tier, forever));
        r.reserved[i] = needed;
        r.end[i] = r.start[i] + d.ns;
        slow_wide used = used_at(&r, i, tier, r.start[i]) + needed;
        if (r.end[i] > most || used > most)
            return judged(CAIRN_VIOLATION_OVERFLOW, i);
        peak[tier] = later(peak[tier], used);
        makespan = later(makespan, r.end[i]);
        compute += slow_computes(ops[i]) ? d.ns : 0;
        recompute += slow_computes(ops[i]) && ops[i].code != CAIRN_OP_BACKWARD && slow_ran_before(&r, i, ops[i].index)
                         ? d.ns
                         : 0;
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
