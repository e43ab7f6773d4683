#include "solve/offload/offload_plan.h"

#include <string.h>

static cairn_status add(cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option, cairn_error *error)
{
    cairn_op op = {.code = (uint8_t)code, .option = (uint16_t)option, .index = l};
    return cairn_builder_add(builder, op, error);
}

static cairn_status add_all(const crn_offload_plan *plan, cairn_builder *builder, cairn_error *error)
{
    for (int32_t l = 1; l <= plan->n; l++)
        CRN_TRY(add(builder, CAIRN_OP_FORWARD_SAVE, l, plan->option[l], error));
    for (int32_t l = plan->n; l >= 1; l--)
        CRN_TRY(add(builder, CAIRN_OP_BACKWARD, l, 0, error));
    return CAIRN_OK;
}

static cairn_status make_transfer(crn_offload_plan *plan, cairn_error *error)
{
    cairn_builder *builder;
    CRN_TRY(cairn_builder_new(plan->task.env, plan->task.problem, &builder, error));
    cairn_status status = add_all(plan, builder, error);
    if (status == CAIRN_OK)
        status = crn_transfer_new(&plan->task, cairn_builder_ops(builder), cairn_builder_count(builder),
                                  &plan->transfer, error);
    cairn_builder_free(builder);
    return status;
}

static cairn_status fill(crn_offload_plan *plan, const int32_t *option, cairn_error *error)
{
    size_t count = (size_t)plan->n + 1;
    plan->option = crn_arena_alloc(&plan->arena, count, sizeof(*plan->option));
    plan->wait = crn_arena_alloc(&plan->arena, count, sizeof(*plan->wait));
    plan->offloaded = crn_arena_alloc_zero(&plan->arena, 2 * count, sizeof(*plan->offloaded));
    plan->levels = crn_arena_alloc(&plan->arena, 2 * count, sizeof(*plan->levels));
    if (!plan->option || !plan->wait || !plan->offloaded || !plan->levels)
        return crn_no_memory(error);
    memcpy(plan->option, option, count * sizeof(*option));
    for (size_t l = 0; l < count; l++)
        plan->wait[l] = CRN_NO_COPY;
    CRN_TRY(make_transfer(plan, error));
    const crn_transfer *transfer = plan->transfer;
    for (int32_t w = 0; w < transfer->wait_count; w++)
        plan->wait[transfer->copies[transfer->waits[w].copy].value.index] = w;
    return CAIRN_OK;
}

cairn_status crn_offload_plan_new(const crn_task *task, const int32_t *option, crn_offload_plan **plan,
                                  cairn_error *error)
{
    crn_arena arena;
    *plan = NULL;
    crn_arena_init(&arena, crn_allocator(task->env));
    crn_offload_plan *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    made->task = *task;
    made->n = cairn_problem_chain(task->problem)->stage_count;
    cairn_status status = fill(made, option, error);
    if (status != CAIRN_OK) {
        crn_offload_plan_free(made);
        return status;
    }
    *plan = made;
    return CAIRN_OK;
}

void crn_offload_plan_free(crn_offload_plan *plan)
{
    if (!plan)
        return;
    crn_transfer_free(plan->transfer);
    crn_arena_clear(&plan->arena);
}

int64_t crn_offload_plan_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return crn_transfer_memory(task, 2 * n) + 40 * n + 65536;
}

/* ---- choices of options ---- */

/* Of a stage: the fastest option (the smaller saved set among equals), the smallest one (the faster), the first. */
static int32_t choose(const cairn_stage *stage, int profile)
{
    int32_t best = 0;
    for (int32_t k = 1; k < stage->option_count && profile < 2; k++) {
        const cairn_stage_option *a = &stage->options[k], *b = &stage->options[best];
        int64_t ns = a->forward_ns + a->backward_ns - b->forward_ns - b->backward_ns;
        int64_t bytes = a->saved_bytes - b->saved_bytes;
        int64_t first = profile == 0 ? ns : bytes, second = profile == 0 ? bytes : ns;
        if (first < 0 || (first == 0 && second < 0))
            best = k;
    }
    return best;
}

static bool is_new(crn_offload_plan *const *plans, int profile, const int32_t *option, int32_t n)
{
    for (int other = 0; other < profile; other++)
        if (plans[other] && memcmp(plans[other]->option + 1, option + 1, (size_t)n * sizeof(*option)) == 0)
            return false;
    return true;
}

cairn_status crn_offload_profiles(const crn_task *task, crn_offload_plan *plans[CRN_OFFLOAD_PROFILES],
                                  cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    cairn_allocator allocator = crn_allocator(task->env);
    size_t count = (size_t)chain->stage_count + 1;
    int32_t *option = crn_alloc_zero(&allocator, count, sizeof(*option));
    cairn_status status = option ? CAIRN_OK : crn_no_memory(error);
    for (int profile = 0; profile < CRN_OFFLOAD_PROFILES; profile++)
        plans[profile] = NULL;
    for (int profile = 0; status == CAIRN_OK && profile < CRN_OFFLOAD_PROFILES; profile++) {
        for (int32_t l = 1; l <= chain->stage_count; l++)
            option[l] = choose(&chain->stages[l - 1], profile);
        if (is_new(plans, profile, option, chain->stage_count))
            status = crn_offload_plan_new(task, option, &plans[profile], error);
    }
    crn_free(&allocator, option, count, sizeof(*option));
    if (status != CAIRN_OK)
        crn_offload_profiles_free(plans);
    return status;
}

void crn_offload_profiles_free(crn_offload_plan *plans[CRN_OFFLOAD_PROFILES])
{
    for (int profile = 0; profile < CRN_OFFLOAD_PROFILES; profile++) {
        crn_offload_plan_free(plans[profile]);
        plans[profile] = NULL;
    }
}

/* ---- sets of stages ---- */

bool crn_offload_may_go(const crn_offload_plan *plan, int32_t l)
{
    return plan->wait[l] != CRN_NO_COPY;
}

int64_t crn_offload_bytes(const crn_offload_plan *plan, int32_t l)
{
    return cairn_problem_chain(plan->task.problem)->stages[l - 1].options[plan->option[l]].saved_bytes;
}

static void set_offloaded(const crn_offload_plan *plan, const bool *goes)
{
    for (int32_t l = 1; l <= plan->n; l++)
        if (crn_offload_may_go(plan, l))
            plan->offloaded[plan->wait[l]] = goes[l];
}

int64_t crn_offload_need(const crn_offload_plan *plan, const bool *goes)
{
    int64_t host_bytes = 0, most = plan->transfer->start_bytes;
    set_offloaded(plan, goes);
    for (int32_t l = 1; l <= plan->n; l++)
        host_bytes += goes[l] && crn_offload_may_go(plan, l) ? crn_offload_bytes(plan, l) : 0;
    if (host_bytes > plan->task.machine->host_bytes)
        return INT64_MAX;
    crn_transfer_levels(plan->transfer, plan->offloaded, plan->levels);
    for (int32_t e = 0; e < plan->transfer->event_count; e++)
        most = crn_max(most, plan->levels[e]);
    return most;
}

cairn_status crn_offload_try(const crn_offload_plan *plan, const bool *goes, int64_t budget_bytes,
                             crn_offload_best *best, cairn_error *error)
{
    set_offloaded(plan, goes);
    for (int patient = 0; patient < 2; patient++) {
        int64_t makespan_ns;
        CRN_TRY(
            crn_transfer_schedule(plan->transfer, plan->offloaded, budget_bytes, patient, NULL, &makespan_ns, error));
        if (makespan_ns >= best->makespan_ns)
            continue;
        best->makespan_ns = makespan_ns;
        best->plan = plan;
        best->patient = patient;
        memcpy(best->goes, goes, (size_t)plan->n + 1);
    }
    return CAIRN_OK;
}

cairn_status crn_offload_answer(const crn_offload_best *best, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    int64_t makespan_ns;
    if (best->makespan_ns == INT64_MAX)
        return CAIRN_OK;
    set_offloaded(best->plan, best->goes);
    answer->found = true;
    crn_offload_explain(&best->plan->task, budget_bytes, answer);
    return crn_transfer_schedule(best->plan->transfer, best->plan->offloaded, budget_bytes, best->patient,
                                 answer->builder, &makespan_ns, error);
}
