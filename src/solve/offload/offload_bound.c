/*
 * A lower bound for chains without recomputation: proposition 3 of Beaumont et al. (2019), made stronger.
 *
 * While operation p runs, all saved sets that a later backward reads exist somewhere, so D_p, what they and p need beyond
 * the budget, is on the host. It left after forward 1, the first to make something, and is back before backward 2, for
 * A[l] is read by backward l + 1 already. So
 *
 *     T >= max(before_p, F_1 + out(D_p)) + u_p + max(after_p, in(D_p) + B_2 + B_1),
 *
 * out and in being the times of one transfer of that size: several take no less. The paper has max(sum, 2 D / bandwidth).
 * With options each term is the least over them. Computing a saved set again makes D_p smaller, so nothing of this holds
 * with recomputation.
 */
#include <inttypes.h>
#include <stdio.h>

#include "solve/offload/offload_plan.h"

typedef struct walk {
    const cairn_chain *chain;
    const cairn_machine *machine;
    int64_t budget_bytes, total_ns, first_ns, last_ns; /* sum of all; F_1; B_2 + B_1 */
    int64_t best_ns;
} walk;

static int64_t least_ns(const cairn_stage *stage, bool backward)
{
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, backward ? stage->options[k].backward_ns : stage->options[k].forward_ns);
    return least;
}

static int64_t least_saved(const cairn_stage *stage)
{
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, stage->options[k].saved_bytes);
    return least;
}

/* The least that a stage saves and needs beside it: for its forward made is 0 and the workspace the forward's. */
static int64_t least_running(const cairn_stage *stage, bool backward, int64_t made)
{
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t workspace = backward ? option->backward_workspace_bytes : option->forward_workspace_bytes;
        least = crn_min(least, option->saved_bytes + crn_max(0, made + workspace));
    }
    return least;
}

/* An operation of time ns, before which ns of others run, that needs so many bytes when nothing is away. */
static void look_at(walk *w, int64_t before_ns, int64_t ns, int64_t needed_bytes)
{
    int64_t away = needed_bytes - w->budget_bytes;
    if (away <= 0)
        return;
    int64_t out_ns = cairn_transfer_ns(away, w->machine->to_host_bytes_per_s, w->machine->latency_ns);
    int64_t in_ns = cairn_transfer_ns(away, w->machine->to_device_bytes_per_s, w->machine->latency_ns);
    if (out_ns == CAIRN_NONE || in_ns == CAIRN_NONE || away > w->machine->host_bytes) {
        w->best_ns = INT64_MAX;
        return;
    }
    int64_t until_ns = crn_max(before_ns, crn_add_saturating(w->first_ns, out_ns));
    int64_t after_ns = crn_max(w->total_ns - before_ns - ns, crn_add_saturating(in_ns, w->last_ns));
    w->best_ns = crn_max(w->best_ns, crn_add_saturating(crn_add_saturating(until_ns, ns), after_ns));
}

static walk walk_begin(const crn_task *task, int64_t budget_bytes)
{
    walk w = {.chain = cairn_problem_chain(task->problem), .machine = task->machine, .budget_bytes = budget_bytes};
    for (int32_t l = 1; l <= w.chain->stage_count; l++) {
        const cairn_stage *stage = &w.chain->stages[l - 1];
        int64_t backward_ns = least_ns(stage, true);
        w.total_ns += least_ns(stage, false) + backward_ns;
        w.last_ns += l <= 2 ? backward_ns : 0;
    }
    w.first_ns = least_ns(&w.chain->stages[0], false);
    w.best_ns = w.total_ns;
    return w;
}

int64_t crn_offload_bound(const crn_task *task, int64_t budget_bytes)
{
    walk w = walk_begin(task, budget_bytes);
    int32_t n = w.chain->stage_count;
    int64_t always = cairn_problem_info_of(task->problem)->fixed_bytes + w.chain->input_bytes;
    int64_t before_ns = 0, saved = 0, grads = 0;
    for (int32_t l = 1; l <= n; l++) {
        const cairn_stage *stage = &w.chain->stages[l - 1];
        int64_t ns = least_ns(stage, false), gradient = w.chain->stages[n - 1].grad_bytes;
        look_at(&w, before_ns, ns, always + gradient + saved + least_running(stage, false, 0));
        saved += least_saved(stage);
        before_ns += ns;
    }
    for (int32_t l = n; l >= 1; l--) {
        const cairn_stage *stage = &w.chain->stages[l - 1];
        int64_t ns = least_ns(stage, true);
        int64_t made = l > 1 ? w.chain->stages[l - 2].grad_bytes : w.chain->input_grad_bytes;
        saved -= least_saved(stage);
        look_at(&w, before_ns, ns,
                always + stage->grad_bytes + grads + saved +
                    least_running(stage, true, made + stage->weight_grad_bytes));
        grads += stage->weight_grad_bytes;
        before_ns += ns;
    }
    return w.best_ns;
}

void crn_offload_explain(const crn_task *task, int64_t budget_bytes, crn_answer *answer)
{
    snprintf(answer->reason, sizeof(answer->reason),
             "no schedule without recomputation is faster than %" PRId64 " ns within this budget",
             crn_offload_bound(task, budget_bytes));
}
