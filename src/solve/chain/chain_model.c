#include "solve/chain/chain_model.h"

static void fill(crn_chain_model *model)
{
    int32_t n = model->n;
    int64_t grads = 0;
    model->fence[n + 1] = n + 1;
    for (int32_t l = n; l >= 1; l--) {
        const cairn_stage *stage = crn_stage(model, l);
        model->output[l] = stage->output_bytes;
        model->base[l] = stage->grad_bytes + grads;
        model->fence[l] = stage->no_recompute ? l : model->fence[l + 1];
        grads += stage->weight_grad_bytes;
    }
    model->output[0] = model->chain->input_bytes;
    model->base[0] = model->chain->input_grad_bytes + grads;
}

cairn_status crn_chain_model_init(crn_chain_model *model, const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    size_t count = (size_t)chain->stage_count + 2;
    *model = (crn_chain_model){.chain = chain, .n = chain->stage_count, .work_ns = crn_work_ns(task->problem)};
    model->always_bytes = cairn_problem_info_of(task->problem)->fixed_bytes + chain->input_bytes;
    crn_arena_init(&model->arena, crn_allocator(task->env));
    model->output = crn_arena_alloc(&model->arena, count, sizeof(*model->output));
    model->base = crn_arena_alloc(&model->arena, count, sizeof(*model->base));
    model->fence = crn_arena_alloc(&model->arena, count, sizeof(*model->fence));
    if (!model->output || !model->base || !model->fence)
        return crn_no_memory(error);
    fill(model);
    return CAIRN_OK;
}

void crn_chain_model_clear(crn_chain_model *model)
{
    crn_arena_clear(&model->arena);
}

cairn_status crn_chain_emit(cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option, cairn_value value,
                            cairn_error *error)
{
    cairn_op op = {.code = (uint8_t)code, .value = (uint8_t)value, .option = (uint16_t)option, .index = l};
    return cairn_builder_add(builder, op, error);
}
