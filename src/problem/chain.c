/* Chains: validation and copying. */
#include <stdio.h>
#include <string.h>

#include "base/failure.h"
#include "problem/problem.h"
#include "problem/total.h"

/* A field of stage l (1-based), or of one of its options (0-based, -1 for the stage itself), that must not be negative. */
static cairn_status check_field(int64_t value, const char *field, int32_t l, int32_t k, cairn_error *error)
{
    char path[CAIRN_ERROR_PATH_MAX];
    if (value >= 0)
        return CAIRN_OK;
    if (l == 0)
        snprintf(path, sizeof(path), "%s", field);
    else if (k < 0)
        snprintf(path, sizeof(path), "stages[%d].%s", l - 1, field);
    else
        snprintf(path, sizeof(path), "stages[%d].options[%d].%s", l - 1, k, field);
    return crn_fail_at(error, CAIRN_BAD_INPUT, l == 0 ? CAIRN_NONE : l, path, "%s is %lld; at least 0", field,
                       (long long)value);
}

static cairn_status check_option(const cairn_stage *stage, int32_t l, int32_t k, cairn_error *error)
{
    const cairn_stage_option *option = &stage->options[k];
    CRN_TRY(check_field(option->saved_bytes, "saved_bytes", l, k, error));
    CRN_TRY(check_field(option->forward_ns, "forward_ns", l, k, error));
    CRN_TRY(check_field(option->backward_ns, "backward_ns", l, k, error));
    if (option->saved_bytes < stage->output_bytes) {
        char path[CAIRN_ERROR_PATH_MAX];
        snprintf(path, sizeof(path), "stages[%d].options[%d].saved_bytes", l - 1, k);
        return crn_fail_at(error, CAIRN_BAD_INPUT, l, path,
                           "saved_bytes is %lld, less than output_bytes %lld, which it includes",
                           (long long)option->saved_bytes, (long long)stage->output_bytes);
    }
    return CAIRN_OK;
}

static cairn_status check_stage(const cairn_stage *stage, int32_t l, cairn_error *error)
{
    CRN_TRY(check_field(stage->output_bytes, "output_bytes", l, -1, error));
    CRN_TRY(check_field(stage->grad_bytes, "grad_bytes", l, -1, error));
    CRN_TRY(check_field(stage->weight_grad_bytes, "weight_grad_bytes", l, -1, error));
    CRN_TRY(check_field(stage->forward_only_ns, "forward_only_ns", l, -1, error));
    if (stage->option_count < 1 || stage->option_count > CAIRN_STAGE_OPTIONS_MAX) {
        char path[CAIRN_ERROR_PATH_MAX];
        snprintf(path, sizeof(path), "stages[%d].options", l - 1);
        return crn_fail_at(error, stage->option_count < 1 ? CAIRN_BAD_INPUT : CAIRN_TOO_LARGE, l, path,
                           "%d options; a stage has 1 to %d", stage->option_count, CAIRN_STAGE_OPTIONS_MAX);
    }
    for (int32_t k = 0; k < stage->option_count; k++)
        CRN_TRY(check_option(stage, l, k, error));
    return CAIRN_OK;
}

static int64_t largest_saved(const cairn_stage *stage)
{
    int64_t largest = 0;
    for (int32_t k = 0; k < stage->option_count; k++)
        largest = crn_max(largest, stage->options[k].saved_bytes);
    return largest;
}

static void add_stage(const cairn_stage *stage, crn_total *bytes, crn_total *ns)
{
    crn_total_add(bytes, stage->output_bytes);
    crn_total_add(bytes, largest_saved(stage));
    crn_total_add(bytes, stage->grad_bytes);
    crn_total_add(bytes, stage->weight_grad_bytes);
    crn_total_add(bytes, stage->forward_only_workspace_bytes);
    crn_total_add(ns, stage->forward_only_ns);
    for (int32_t k = 0; k < stage->option_count; k++) {
        crn_total_add(bytes, stage->options[k].forward_workspace_bytes);
        crn_total_add(bytes, stage->options[k].backward_workspace_bytes);
        crn_total_add(ns, stage->options[k].forward_ns);
        crn_total_add(ns, stage->options[k].backward_ns);
    }
}

static int64_t least_work_ns(const cairn_stage *stage)
{
    int64_t least_ns = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++)
        least_ns = crn_min(least_ns, stage->options[k].forward_ns + stage->options[k].backward_ns);
    return least_ns;
}

static cairn_status check_totals(const cairn_chain *chain, int64_t fixed_bytes, int64_t *work_ns, cairn_error *error)
{
    crn_total bytes = {fixed_bytes, false}, ns = {0, false};
    *work_ns = 0;
    crn_total_add(&bytes, chain->input_bytes);
    crn_total_add(&bytes, chain->input_grad_bytes);
    for (int32_t l = 1; l <= chain->stage_count; l++) {
        add_stage(&chain->stages[l - 1], &bytes, &ns);
        if (bytes.overflow || ns.overflow)
            return crn_fail_at(error, CAIRN_OVERFLOW, l, NULL, "the sum of all %s passes 2^63 - 1 at stage %d",
                               bytes.overflow ? "sizes" : "times", l);
        *work_ns += least_work_ns(&chain->stages[l - 1]);
    }
    return CAIRN_OK;
}

static cairn_status check_chain(const cairn_chain *chain, int64_t fixed_bytes, int64_t *work_ns, cairn_error *error)
{
    if (chain->stage_count < 1)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "stages", "a chain has at least one stage");
    if (chain->stage_count > CAIRN_STAGES_MAX)
        return crn_fail_at(error, CAIRN_TOO_LARGE, CAIRN_NONE, "stages", "%d stages; at most %lld", chain->stage_count,
                           (long long)CAIRN_STAGES_MAX);
    CRN_TRY(check_field(chain->input_bytes, "input_bytes", 0, -1, error));
    CRN_TRY(check_field(chain->input_grad_bytes, "input_grad_bytes", 0, -1, error));
    for (int32_t l = 1; l <= chain->stage_count; l++)
        CRN_TRY(check_stage(&chain->stages[l - 1], l, error));
    return check_totals(chain, fixed_bytes, work_ns, error);
}

/* NULL when there is no memory for it. */
static const char *copy_name(crn_arena *arena, const char *name)
{
    return name && name[0] ? crn_arena_text(arena, name) : "";
}

static bool copy_names(crn_arena *arena, cairn_stage *stage, cairn_stage_option *options)
{
    stage->name = copy_name(arena, stage->name);
    if (!stage->name)
        return false;
    for (int32_t k = 0; k < stage->option_count; k++) {
        options[k].name = copy_name(arena, options[k].name);
        if (!options[k].name)
            return false;
    }
    return true;
}

/* Options stand in one array and names behind it: whoever goes through the stages meets numbers alone. */
static cairn_status copy_chain(cairn_problem *problem, const cairn_chain *chain, cairn_error *error)
{
    size_t count = 0;
    for (int32_t i = 0; i < chain->stage_count; i++)
        count += (size_t)chain->stages[i].option_count;
    cairn_stage *stages = crn_arena_alloc(&problem->arena, (size_t)chain->stage_count, sizeof(*stages));
    cairn_stage_option *options = crn_arena_alloc(&problem->arena, count, sizeof(*options));
    if (!stages || !options)
        return crn_no_memory(error);
    problem->chain = *chain;
    problem->chain.stages = stages;
    for (int32_t i = 0; i < chain->stage_count; i++) {
        stages[i] = chain->stages[i];
        memcpy(options, stages[i].options, (size_t)stages[i].option_count * sizeof(*options));
        stages[i].options = options;
        if (!copy_names(&problem->arena, &stages[i], options))
            return crn_no_memory(error);
        options += stages[i].option_count;
    }
    return CAIRN_OK;
}

static cairn_status take_chain(cairn_problem *problem, const cairn_chain *chain, crn_arena *own)
{
    problem->chain = *chain;
    crn_arena_join(&problem->arena, own);
    return CAIRN_OK;
}

cairn_status crn_problem_make_chain(const cairn_env *env, const cairn_chain *chain, const cairn_problem_info *info,
                                    crn_arena *own, cairn_problem **problem, cairn_error *error)
{
    cairn_problem *made;
    *problem = NULL;
    CRN_TRY(crn_problem_begin(env, CAIRN_KIND_CHAIN, info, own, &made, error));
    cairn_status status = check_chain(chain, made->info.fixed_bytes, &made->work_ns, error);
    if (status == CAIRN_OK)
        status = own ? take_chain(made, chain, own) : copy_chain(made, chain, error);
    if (status != CAIRN_OK) {
        cairn_problem_free(made);
        return status;
    }
    crn_problem_hash_fill(made);
    *problem = made;
    return CAIRN_OK;
}

cairn_status cairn_problem_new_chain(const cairn_env *env, const cairn_chain *chain, const cairn_problem_info *info,
                                     cairn_problem **problem, cairn_error *error)
{
    return crn_problem_make_chain(env, chain, info, NULL, problem, error);
}
