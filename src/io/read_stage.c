/* A stage of a cairn-chain. */
#include "base/failure.h"
#include "io/read_problem.h"

typedef struct stage_draft {
    cairn_stage stage;
    cairn_stage_option only; /* the option whose fields stand in the stage itself */
    json_t *options;
} stage_draft;

enum stage_row {
    ROW_NAME,
    ROW_OUTPUT,
    ROW_GRAD,
    ROW_WEIGHT_GRAD,
    ROW_NO_RECOMPUTE,
    ROW_FORWARD_ONLY,
    ROW_FORWARD_ONLY_WORKSPACE,
    ROW_OPTIONS,
    ROW_SAVED,
    ROW_FORWARD,
    ROW_BACKWARD,
    ROW_FORWARD_WORKSPACE,
    ROW_BACKWARD_WORKSPACE,
    ROW_COUNT
};

static const crn_field stage_fields[ROW_COUNT] = {
    [ROW_NAME] = {"name", CRN_FIELD_TEXT, 0, offsetof(stage_draft, stage.name)},
    [ROW_OUTPUT] = {"output_bytes", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(stage_draft, stage.output_bytes)},
    [ROW_GRAD] = {"grad_bytes", CRN_FIELD_COUNT, 0, offsetof(stage_draft, stage.grad_bytes)},
    [ROW_WEIGHT_GRAD] = {"weight_grad_bytes", CRN_FIELD_COUNT, 0, offsetof(stage_draft, stage.weight_grad_bytes)},
    [ROW_NO_RECOMPUTE] = {"no_recompute", CRN_FIELD_BOOL, 0, offsetof(stage_draft, stage.no_recompute)},
    [ROW_FORWARD_ONLY] = {"forward_only_ns", CRN_FIELD_COUNT, 0, offsetof(stage_draft, stage.forward_only_ns)},
    [ROW_FORWARD_ONLY_WORKSPACE] = {"forward_only_workspace_bytes", CRN_FIELD_SIGNED, 0,
                                    offsetof(stage_draft, stage.forward_only_workspace_bytes)},
    [ROW_OPTIONS] = {"options", CRN_FIELD_LIST, 0, offsetof(stage_draft, options)},
    [ROW_SAVED] = {"saved_bytes", CRN_FIELD_COUNT, 0, offsetof(stage_draft, only.saved_bytes)},
    [ROW_FORWARD] = {"forward_ns", CRN_FIELD_COUNT, 0, offsetof(stage_draft, only.forward_ns)},
    [ROW_BACKWARD] = {"backward_ns", CRN_FIELD_COUNT, 0, offsetof(stage_draft, only.backward_ns)},
    [ROW_FORWARD_WORKSPACE] = {"forward_workspace_bytes", CRN_FIELD_SIGNED, 0,
                               offsetof(stage_draft, only.forward_workspace_bytes)},
    [ROW_BACKWARD_WORKSPACE] = {"backward_workspace_bytes", CRN_FIELD_SIGNED, 0,
                                offsetof(stage_draft, only.backward_workspace_bytes)},
};

static const crn_field option_fields[] = {
    {"name", CRN_FIELD_TEXT, 0, offsetof(cairn_stage_option, name)},
    {"saved_bytes", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_stage_option, saved_bytes)},
    {"forward_ns", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_stage_option, forward_ns)},
    {"backward_ns", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_stage_option, backward_ns)},
    {"forward_workspace_bytes", CRN_FIELD_SIGNED, 0, offsetof(cairn_stage_option, forward_workspace_bytes)},
    {"backward_workspace_bytes", CRN_FIELD_SIGNED, 0, offsetof(cairn_stage_option, backward_workspace_bytes)},
};

static bool saw(uint64_t seen, enum stage_row row)
{
    return seen >> row & 1;
}

static cairn_status read_options(crn_draft *draft, stage_draft *made, const crn_path *path, cairn_error *error)
{
    crn_path list = {path, "options", 0}, here = {&list, NULL, 0};
    size_t count = json_array_size(made->options);
    if (count == 0)
        return crn_path_fail(error, CAIRN_BAD_INPUT, &list, "no options; a stage has at least one");
    if (count > CAIRN_STAGE_OPTIONS_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, &list, "%zu options; at most %d", count, CAIRN_STAGE_OPTIONS_MAX);
    cairn_stage_option *options = crn_arena_alloc_zero(&draft->arena, count, sizeof(*options));
    if (!options)
        return crn_no_memory(error);
    for (size_t k = 0; k < count; k++) {
        crn_target target = {&options[k], &draft->arena, 0};
        here.index = (int64_t)k;
        options[k].name = "";
        CRN_TRY(crn_fields_read(json_array_get(made->options, k), option_fields,
                                sizeof(option_fields) / sizeof(option_fields[0]), &target, &here, error));
    }
    made->stage.options = options;
    made->stage.option_count = (int32_t)count;
    return CAIRN_OK;
}

/* The stage holds the fields of its only option itself. */
static cairn_status take_only_option(crn_draft *draft, stage_draft *made, uint64_t seen, const crn_path *path,
                                     cairn_error *error)
{
    for (enum stage_row row = ROW_SAVED; row <= ROW_BACKWARD; row++)
        if (!saw(seen, row))
            return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%s is missing, or options", stage_fields[row].name);
    cairn_stage_option *option = crn_arena_alloc(&draft->arena, 1, sizeof(*option));
    if (!option)
        return crn_no_memory(error);
    *option = made->only;
    option->name = "keep";
    made->stage.options = option;
    made->stage.option_count = 1;
    return CAIRN_OK;
}

static cairn_status take_options(crn_draft *draft, stage_draft *made, uint64_t seen, const crn_path *path,
                                 cairn_error *error)
{
    if (!saw(seen, ROW_OPTIONS))
        return take_only_option(draft, made, seen, path, error);
    for (enum stage_row row = ROW_SAVED; row < ROW_COUNT; row++) {
        crn_path here = {path, stage_fields[row].name, 0};
        if (saw(seen, row))
            return crn_path_fail(error, CAIRN_BAD_INPUT, &here, "stands beside options; it belongs into each of them");
    }
    return read_options(draft, made, path, error);
}

static void fill_defaults(cairn_stage *stage, uint64_t seen)
{
    if (!saw(seen, ROW_GRAD))
        stage->grad_bytes = stage->output_bytes;
    if (!saw(seen, ROW_FORWARD_ONLY))
        stage->forward_only_ns = stage->options[0].forward_ns;
    if (!saw(seen, ROW_FORWARD_ONLY_WORKSPACE))
        stage->forward_only_workspace_bytes = stage->options[0].forward_workspace_bytes;
}

cairn_status crn_read_stage(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error)
{
    crn_draft *draft = context;
    stage_draft made = {.stage.name = ""};
    crn_target target = {&made, &draft->arena, 0};
    if (index >= CAIRN_STAGES_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, path, "more than %lld stages", (long long)CAIRN_STAGES_MAX);
    CRN_TRY(crn_fields_read(value, stage_fields, ROW_COUNT, &target, path, error));
    CRN_TRY(take_options(draft, &made, target.seen, path, error));
    fill_defaults(&made.stage, target.seen);
    cairn_stage *stages =
        crn_draft_grow(draft, draft->stages, draft->stage_count, &draft->stage_capacity, sizeof(*stages));
    if (!stages)
        return crn_no_memory(error);
    draft->stages = stages;
    stages[draft->stage_count++] = made.stage;
    return CAIRN_OK;
}
