/*
 * Solvers by a dynamic program over m in slots: its answer, or the schedule of least memory where that is faster.
 */
#include "solve/chain/slotted.h"

#include "solve/chain/chain_pieces.h"
#include "solve/chain/slotted_program.h"

typedef struct session {
    crn_chain_table table;
    int64_t full_bytes; /* m from which on everything can be kept, with the fastest options: emit_full */
    int64_t least_ns;   /* time of the schedule of least memory; CAIRN_NONE = not known yet */
} session;

/* m with which all outputs can be kept, and each stage saved with its fastest option right before its backward. */
static int64_t outputs_bytes(const crn_chain_model *model)
{
    int64_t needed = 0;
    for (int32_t l = model->n; l >= 1; l--) {
        const cairn_stage *stage = crn_stage(model, l);
        int64_t here = crn_piece_save_bytes(model, l, l, &stage->options[crn_fastest_option(stage)]);
        if (l < model->n)
            here = crn_max(crn_max(here, model->base[model->n] + crn_keep_bytes(stage)), stage->output_bytes + needed);
        needed = here;
    }
    return needed;
}

void crn_slotted_close(const crn_task *task, void *state)
{
    session *open = state;
    cairn_allocator allocator = crn_allocator(task->env);
    crn_chain_table_clear(&open->table);
    crn_free(&allocator, open, 1, sizeof(*open));
}

cairn_status crn_slotted_open(const crn_task *task, bool outputs_only, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    session *made = crn_alloc(&allocator, 1, sizeof(*made));
    *state = made;
    if (!made)
        return crn_no_memory(error);
    CRN_TRY(crn_chain_table_init(&made->table, task, outputs_only, error));
    const crn_chain_model *model = &made->table.model;
    made->full_bytes = outputs_only ? outputs_bytes(model) : crn_pieces_full_bytes(model, 1, model->n);
    made->least_ns = CAIRN_NONE;
    return CAIRN_OK;
}

cairn_status crn_slotted_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    const session *open = state;
    (void)task;
    (void)error;
    least->bytes = crn_chain_table_least(&open->table);
    return CAIRN_OK;
}

static cairn_status emit_save(const crn_chain_model *model, int32_t l, cairn_builder *builder, cairn_error *error)
{
    return crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, l, crn_fastest_option(crn_stage(model, l)), 0, error);
}

static cairn_status emit_full(const crn_chain_model *model, cairn_builder *builder, cairn_error *error)
{
    for (int32_t l = 1; l < model->n; l++)
        CRN_TRY(model->outputs_only ? crn_chain_emit(builder, CAIRN_OP_FORWARD_KEEP, l, 0, 0, error)
                                    : emit_save(model, l, builder, error));
    for (int32_t l = model->n; l >= 1; l--) {
        if (l == model->n || model->outputs_only)
            CRN_TRY(emit_save(model, l, builder, error));
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_BACKWARD, l, 0, 0, error));
    }
    return CAIRN_OK;
}

/* Emits the schedule of least memory and tells its time, once; INT64_MAX where it is too long, in operations or in ns. */
static cairn_status emit_least(session *open, const crn_task *task, cairn_builder *builder, cairn_error *error)
{
    cairn_replay replay;
    cairn_status status = crn_chain_table_emit(&open->table, task, builder, error);
    if (status == CAIRN_TOO_LARGE) {
        open->least_ns = INT64_MAX;
        return CAIRN_OK;
    }
    if (status != CAIRN_OK || open->least_ns != CAIRN_NONE)
        return status;
    CRN_TRY(crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, error));
    open->least_ns = replay.valid ? replay.makespan_ns : INT64_MAX;
    return CAIRN_OK;
}

/* What the table has for one budget, in rows of a width. *finite: whether there is anything in that width. */
static cairn_status improve_with(const session *open, const crn_task *task, int64_t available,
                                 const crn_row_width *width, crn_answer *answer, bool *finite, cairn_error *error)
{
    crn_slotted_program p;
    cairn_status status = crn_slotted_program_make(&p, &open->table, task, available, width, error);
    if (status == CAIRN_OK) {
        int64_t value = crn_slotted_value(&p, 1, p.n, p.slots), makespan_ns;
        *finite = value < CRN_ROW_INFINITE;
        answer->optimal_in_class = crn_slotted_is_exact(&p) && !open->table.gave_up;
        if (*finite && crn_add(p.model->work_ns, value, &makespan_ns) && makespan_ns <= open->least_ns) {
            answer->found = true;
            cairn_builder_truncate(answer->builder, 0);
            status = crn_chain_unfold(task, p.model, crn_slotted_decide, &p, p.slots, answer->builder, error);
        }
    }
    crn_arena_clear(&p.arena);
    return status;
}

static int64_t pair_count(const crn_task *task)
{
    return (int64_t)crn_pair_count(cairn_problem_chain(task->problem)->stage_count);
}

/* In rows of a width. Estimates that pass 2^63 - 1 are 2^63 - 1. */
static int64_t memory_with(const crn_task *task, const crn_row_width *width)
{
    int64_t rows =
        pair_count(task) + cairn_problem_chain(task->problem)->stage_count; /* those of the first answer, too */
    int64_t values = task->settings->slots + 4 * CRN_ROW_LINE;
    int64_t bytes = crn_mul_saturating(rows, (int64_t)width->value_bytes * values + 2 * (int64_t)sizeof(crn_row));
    return crn_add_saturating(bytes, crn_chain_table_memory(cairn_problem_chain(task->problem)));
}

/*
 * Replaces the schedule of least memory by the table's where that is faster. 32 bits are tried where all that is faster
 * fits, or is likely to; a finite answer in them is the answer, for no part of it is greater than the whole. Where there is
 * none and 64 bits pass the memory limit, the schedule of least memory stays.
 */
static cairn_status improve(const session *open, const crn_task *task, int64_t available, crn_answer *answer,
                            cairn_error *error)
{
    int64_t work_ns = open->table.model.work_ns, infinite = crn_rows_of_32_bits.infinite;
    bool finite = false, all_fits = open->least_ns - work_ns < infinite;
    if (all_fits || work_ns / 2 < infinite)
        CRN_TRY(improve_with(open, task, available, &crn_rows_of_32_bits, answer, &finite, error));
    if (finite || all_fits)
        return CAIRN_OK;
    if (memory_with(task, &crn_rows_of_64_bits) > crn_memory_limit(task->settings)) {
        answer->cut_short = true;
        return CAIRN_OK;
    }
    return improve_with(open, task, available, &crn_rows_of_64_bits, answer, &finite, error);
}

cairn_status crn_slotted_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    session *open = state;
    const crn_chain_model *model = &open->table.model;
    if (budget_bytes != CAIRN_NONE && budget_bytes < crn_chain_table_least(&open->table))
        return CAIRN_OK;
    if (budget_bytes == CAIRN_NONE || budget_bytes - model->always_bytes >= open->full_bytes) {
        answer->found = answer->optimal_in_class = true;
        return emit_full(model, answer->builder, error);
    }
    CRN_TRY(emit_least(open, task, answer->builder, error));
    answer->found = open->least_ns < INT64_MAX;
    cairn_status status = improve(open, task, budget_bytes - model->always_bytes, answer, error);
    if (status != CAIRN_CANCELLED || !answer->found)
        return status;
    answer->stopped_early = true; /* the schedule of least memory is an answer */
    return CAIRN_OK;
}

int64_t crn_slotted_memory(const crn_task *task)
{
    bool is_short = crn_work_ns(task->problem) / 2 < crn_rows_of_32_bits.infinite;
    return memory_with(task, is_short ? &crn_rows_of_32_bits : &crn_rows_of_64_bits);
}

int64_t crn_slotted_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return crn_mul_saturating(crn_mul_saturating(pair_count(task), n / 3 + 1), task->settings->slots / 8 + 20);
}
