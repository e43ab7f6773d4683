#include "solve/chain_model.h"

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

int32_t crn_fastest_option(const cairn_stage *stage)
{
    int32_t fastest = 0;
    for (int32_t k = 1; k < stage->option_count; k++)
        if (crn_option_ns(&stage->options[k]) < crn_option_ns(&stage->options[fastest]))
            fastest = k;
    return fastest;
}

int64_t crn_least_backward_bytes(const crn_chain_model *model, int32_t l)
{
    const cairn_stage *stage = crn_stage(model, l);
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, crn_backward_bytes(model, l, &stage->options[k]));
    return least;
}

size_t crn_option_total(const crn_chain_model *model)
{
    size_t total = 0;
    for (int32_t l = 1; l <= model->n; l++)
        total += (size_t)crn_stage(model, l)->option_count;
    return total;
}

int64_t crn_chain_full_bytes(const crn_chain_model *model)
{
    int64_t full = 0; /* of stages l..n */
    for (int32_t l = model->n; l >= 1; l--) {
        const cairn_stage *stage = crn_stage(model, l);
        int64_t fastest_ns = crn_option_ns(&stage->options[crn_fastest_option(stage)]), least = INT64_MAX;
        for (int32_t k = 0; k < stage->option_count; k++) {
            const cairn_stage_option *option = &stage->options[k];
            int64_t needed = crn_max(model->base[model->n] + crn_save_bytes(option), option->saved_bytes + full);
            if (crn_option_ns(option) == fastest_ns)
                least = crn_min(least, crn_max(needed, crn_backward_bytes(model, l, option)));
        }
        full = least;
    }
    return full;
}

cairn_status crn_chain_emit(cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option, cairn_value value,
                            cairn_error *error)
{
    cairn_op op = {.code = (uint8_t)code, .value = (uint8_t)value, .option = (uint16_t)option, .index = l};
    return cairn_builder_add(builder, op, error);
}
