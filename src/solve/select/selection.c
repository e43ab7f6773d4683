#include "solve/select/selection.h"

#include "schedule/schedule.h"

/* ---- the schedule ---- */

enum { BATCH = 256 };

/*
 * Operations, and the memory that they take, counted as the simulator does. So the least budget is known without
 * simulating, which matters at a million layers; for the same reason operations go to the builder in batches.
 */
typedef struct emission {
    const crn_selection *selection;
    cairn_builder *builder; /* NULL = only count */
    cairn_error *error;
    cairn_status status;
    int64_t resident_bytes, peak_bytes;
    int32_t waiting_count;
    cairn_op waiting[BATCH];
} emission;

static const cairn_stage *stage_of(const emission *out, int32_t l)
{
    return &out->selection->chain->stages[l - 1];
}

static void charge(emission *out, int64_t result_bytes, int64_t workspace_bytes, int64_t removed_bytes)
{
    int64_t during = out->resident_bytes + result_bytes + workspace_bytes;
    out->peak_bytes = crn_max(out->peak_bytes, during);
    out->resident_bytes += result_bytes - removed_bytes;
    out->peak_bytes = crn_max(out->peak_bytes, out->resident_bytes);
}

static void flush(emission *out)
{
    if (out->builder && out->status == CAIRN_OK)
        out->status = crn_builder_add_all(out->builder, out->waiting, out->waiting_count, out->error);
    out->waiting_count = 0;
}

static void put(emission *out, cairn_op_code code, int32_t l, int32_t option)
{
    if (out->waiting_count == BATCH)
        flush(out);
    out->waiting[out->waiting_count++] = (cairn_op){.code = (uint8_t)code, .option = (uint16_t)option, .index = l};
}

/* The option that saves least; of several the one whose backward needs least, then the fastest. */
static int32_t option_of(const cairn_stage *stage)
{
    int32_t best = 0;
    for (int32_t k = 1; k < stage->option_count; k++) {
        const cairn_stage_option *a = &stage->options[k], *b = &stage->options[best];
        int64_t order = a->saved_bytes - b->saved_bytes;
        if (order == 0 && a->backward_workspace_bytes != b->backward_workspace_bytes)
            order = a->backward_workspace_bytes < b->backward_workspace_bytes ? -1 : 1;
        if (order == 0)
            order = (a->forward_ns + a->backward_ns) - (b->forward_ns + b->backward_ns);
        best = order < 0 ? k : best;
    }
    return best;
}

static void put_keep(emission *out, int32_t l)
{
    charge(out, stage_of(out, l)->output_bytes, stage_of(out, l)->forward_only_workspace_bytes, 0);
    put(out, CAIRN_OP_FORWARD_KEEP, l, 0);
}

static void put_drop(emission *out, int32_t l)
{
    charge(out, stage_of(out, l)->output_bytes, stage_of(out, l)->forward_only_workspace_bytes,
           out->selection->size[l - 1]);
    put(out, CAIRN_OP_FORWARD_DROP, l, 0);
}

static void put_save(emission *out, int32_t l)
{
    int32_t k = option_of(stage_of(out, l));
    const cairn_stage_option *option = &stage_of(out, l)->options[k];
    charge(out, option->saved_bytes, option->forward_workspace_bytes, 0);
    put(out, CAIRN_OP_FORWARD_SAVE, l, k);
}

static void put_backward(emission *out, int32_t l, bool removes_input)
{
    const cairn_stage *stage = stage_of(out, l);
    const cairn_stage_option *option = &stage->options[option_of(stage)];
    int64_t input_grad = l > 1 ? stage_of(out, l - 1)->grad_bytes : out->selection->chain->input_grad_bytes;
    charge(out, input_grad + stage->weight_grad_bytes, option->backward_workspace_bytes,
           stage->grad_bytes + option->saved_bytes + (removes_input ? out->selection->size[l - 1] : 0));
    put(out, CAIRN_OP_BACKWARD, l, 0);
}

/* Whether the segment (h, i) is one layer that is as well saved in the forward. */
static bool is_saved_at_once(const emission *out, int32_t h, int32_t i)
{
    const cairn_stage *stage = stage_of(out, i);
    if (i > h + 1)
        return false;
    const cairn_stage_option *option = &stage->options[option_of(stage)];
    return option->saved_bytes == stage->output_bytes &&
           crn_max(0, option->forward_workspace_bytes) <= crn_max(0, stage->forward_only_workspace_bytes);
}

static void put_forward(emission *out, int32_t h, int32_t i)
{
    if (is_saved_at_once(out, h, i)) {
        put_save(out, i);
        return;
    }
    put_keep(out, h + 1);
    for (int32_t l = h + 2; l <= i; l++)
        put_drop(out, l);
}

/* is_output: checkpoint h, the one before, is resident as an output, so that the last backward removes it. */
static void put_reverse(emission *out, int32_t h, int32_t i, bool is_saved, bool is_output)
{
    for (int32_t l = h + 1; l <= i && !is_saved; l++)
        put_save(out, l);
    for (int32_t l = i; l > h; l--)
        put_backward(out, l, l == h + 1 && is_output);
}

/* checkpoints[0..count-1], ascending, without 0 and with n. */
static cairn_status emit(const crn_task *task, crn_selection *selection, const int32_t *checkpoints, int32_t count,
                         cairn_builder *builder, cairn_error *error)
{
    const cairn_chain *chain = selection->chain;
    emission out = {.selection = selection, .builder = builder, .error = error, .status = CAIRN_OK};
    out.resident_bytes = cairn_problem_info_of(task->problem)->fixed_bytes + chain->input_bytes +
                         chain->stages[chain->stage_count - 1].grad_bytes;
    out.peak_bytes = out.resident_bytes;
    for (int32_t c = 0; c + 1 < count; c++)
        put_forward(&out, c > 0 ? checkpoints[c - 1] : 0, checkpoints[c]);
    for (int32_t c = count - 1; c >= 0; c--) {
        int32_t h = c > 0 ? checkpoints[c - 1] : 0, before = c > 1 ? checkpoints[c - 2] : 0;
        bool is_saved = c + 1 < count && is_saved_at_once(&out, h, checkpoints[c]);
        put_reverse(&out, h, checkpoints[c], is_saved, h > 0 && !is_saved_at_once(&out, before, h));
    }
    flush(&out);
    selection->peak_bytes = out.peak_bytes;
    return out.status;
}

static int32_t count_checkpoints(const crn_selection *selection)
{
    int32_t count = 0;
    for (int32_t h = 0; h != selection->n; h = selection->next[h])
        count++;
    return count;
}

static int32_t *list_checkpoints(const crn_task *task, const crn_selection *selection, int32_t count)
{
    cairn_allocator allocator = crn_allocator(task->env);
    int32_t *list = crn_alloc(&allocator, (size_t)count, sizeof(*list));
    for (int32_t c = 0, h = 0; list && c < count; c++)
        list[c] = h = selection->next[h];
    return list;
}

/* ---- the session ---- */

cairn_status crn_selection_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    for (int32_t l = 1; l <= chain->stage_count; l++)
        if (chain->stages[l - 1].no_recompute)
            return crn_fail_at(error, CAIRN_UNSUPPORTED, l, "no_recompute",
                               "checkpoint selection computes every stage again, and stage %d must not be", (int)l);
    return CAIRN_OK;
}

/* Both objectives are at most the sum of all sizes and one more. */
static cairn_status check_sums(const crn_selection *selection, cairn_error *error)
{
    int64_t total = 0, largest = 0;
    bool fits = true;
    for (int32_t i = 0; i <= selection->n && fits; i++) {
        fits = crn_add(total, selection->size[i], &total);
        largest = crn_max(largest, selection->size[i]);
    }
    if (fits && crn_add(total, largest, &total))
        return CAIRN_OK;
    return crn_fail(error, CAIRN_OVERFLOW, "the outputs and a gradient together pass 2^63 - 1 bytes");
}

static cairn_status measure(const crn_task *task, crn_selection *selection, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    int32_t count = count_checkpoints(selection);
    int32_t *checkpoints = list_checkpoints(task, selection, count);
    if (!checkpoints)
        return crn_no_memory(error);
    cairn_status status = emit(task, selection, checkpoints, count, NULL, error);
    crn_free(&allocator, checkpoints, (size_t)count, sizeof(*checkpoints));
    return status;
}

static cairn_status fill(const crn_task *task, crn_selection *selection, crn_choose *choose, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    size_t count = (size_t)chain->stage_count + 1;
    int64_t *size = crn_arena_alloc(&selection->arena, count, sizeof(*size));
    selection->chain = chain;
    selection->n = chain->stage_count;
    selection->size = size;
    selection->next = crn_arena_alloc(&selection->arena, count, sizeof(*selection->next));
    if (!size || !selection->next)
        return crn_no_memory(error);
    size[0] = chain->input_bytes;
    for (int32_t l = 1; l <= selection->n; l++)
        size[l] = chain->stages[l - 1].output_bytes;
    CRN_TRY(check_sums(selection, error));
    selection->peak_bytes = CAIRN_NONE;
    return choose(task, selection, error);
}

cairn_status crn_selection_open(const crn_task *task, crn_choose *choose, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    crn_selection *selection = crn_arena_alloc_zero(&arena, 1, sizeof(*selection));
    *session = selection;
    if (!selection)
        return crn_no_memory(error);
    selection->arena = arena;
    return fill(task, selection, choose, error);
}

void crn_selection_close(const crn_task *task, void *session)
{
    crn_selection *selection = session;
    (void)task;
    crn_arena_clear(&selection->arena);
}

cairn_status crn_selection_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    crn_selection *selection = session;
    if (selection->peak_bytes == CAIRN_NONE)
        CRN_TRY(measure(task, selection, error));
    least->bytes = selection->peak_bytes;
    return CAIRN_OK;
}

static bool is_over(const crn_selection *selection, int64_t budget_bytes)
{
    return budget_bytes != CAIRN_NONE && selection->peak_bytes > budget_bytes;
}

cairn_status crn_selection_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    crn_selection *selection = session;
    answer->stopped_early = selection->stopped_early;
    if (is_over(selection, budget_bytes))
        return CAIRN_OK;
    int32_t count = count_checkpoints(selection);
    answer->checkpoints = list_checkpoints(task, selection, count);
    if (!answer->checkpoints)
        return crn_no_memory(error);
    answer->checkpoint_count = count;
    CRN_TRY(crn_builder_reserve(answer->builder, 3 * (int64_t)selection->n, error)); /* at most: forward twice */
    CRN_TRY(emit(task, selection, answer->checkpoints, count, answer->builder, error));
    if (is_over(selection, budget_bytes)) {
        cairn_builder_truncate(answer->builder, 0);
        return CAIRN_OK;
    }
    answer->objective_bytes = selection->objective_bytes;
    answer->optimal_in_class = !selection->stopped_early;
    answer->found = true;
    return CAIRN_OK;
}
