/* A stage of a cairn-chain. */
#include <string.h>

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

enum { OPTION_ROWS = sizeof(option_fields) / sizeof(option_fields[0]) };

static bool saw(uint64_t seen, enum stage_row row)
{
    return seen >> row & 1;
}

static cairn_status check_option_count(size_t count, const crn_path *path, cairn_error *error)
{
    crn_path list = {path, "options", 0};
    if (count == 0)
        return crn_path_fail(error, CAIRN_BAD_INPUT, &list, "no options; a stage has at least one");
    if (count > CAIRN_STAGE_OPTIONS_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, &list, "%zu options; at most %d", count, CAIRN_STAGE_OPTIONS_MAX);
    return CAIRN_OK;
}

static cairn_status read_options(crn_draft *draft, stage_draft *made, const crn_path *path, cairn_error *error)
{
    crn_path list = {path, "options", 0}, here = {&list, NULL, 0};
    size_t count = json_array_size(made->options);
    CRN_TRY(check_option_count(count, path, error));
    cairn_stage_option *options = crn_arena_alloc_zero(&draft->lists, count, sizeof(*options));
    if (!options)
        return crn_no_memory(error);
    for (size_t k = 0; k < count; k++) {
        crn_target target = {&options[k], &draft->arena, 0};
        here.index = (int64_t)k;
        options[k].name = "";
        CRN_TRY(crn_fields_read(json_array_get(made->options, k), option_fields, OPTION_ROWS, &target, &here, error));
    }
    made->stage.options = options;
    made->stage.option_count = (int32_t)count;
    return CAIRN_OK;
}

/* The stage holds the fields of its only option itself: those that it must have. */
static enum stage_row missing_row(uint64_t seen)
{
    enum stage_row row = ROW_SAVED;
    while (row <= ROW_BACKWARD && saw(seen, row))
        row++;
    return row;
}

/* The first field of an only option that is there; ROW_COUNT when there is none. */
static enum stage_row only_row(uint64_t seen)
{
    enum stage_row row = ROW_SAVED;
    while (row < ROW_COUNT && !saw(seen, row))
        row++;
    return row;
}

static bool take_only_option(crn_draft *draft, stage_draft *made)
{
    cairn_stage_option *option = crn_arena_alloc(&draft->lists, 1, sizeof(*option));
    if (!option)
        return false;
    *option = made->only;
    option->name = "keep";
    made->stage.options = option;
    made->stage.option_count = 1;
    return true;
}

static cairn_status take_options(crn_draft *draft, stage_draft *made, uint64_t seen, const crn_path *path,
                                 cairn_error *error)
{
    if (!saw(seen, ROW_OPTIONS)) {
        enum stage_row row = missing_row(seen);
        if (row <= ROW_BACKWARD)
            return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%s is missing, or options", stage_fields[row].name);
        return take_only_option(draft, made) ? CAIRN_OK : crn_no_memory(error);
    }
    enum stage_row row = only_row(seen);
    if (row < ROW_COUNT) {
        crn_path here = {path, stage_fields[row].name, 0};
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

/* False: out of memory. */
static bool add_stage(crn_draft *draft, stage_draft *made, uint64_t seen)
{
    fill_defaults(&made->stage, seen);
    cairn_stage *stages = crn_draft_grow(draft, draft->stages, draft->stage_count, sizeof(*stages));
    if (!stages)
        return false;
    draft->stages = stages;
    stages[draft->stage_count++] = made->stage;
    return true;
}

static cairn_status read_stage(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error)
{
    crn_draft *draft = context;
    stage_draft made = {.stage.name = ""};
    crn_target target = {&made, &draft->arena, 0};
    if (index >= CAIRN_STAGES_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, path, "more than %lld stages", (long long)CAIRN_STAGES_MAX);
    CRN_TRY(crn_fields_read(value, stage_fields, ROW_COUNT, &target, path, error));
    CRN_TRY(take_options(draft, &made, target.seen, path, error));
    return add_stage(draft, &made, target.seen) ? CAIRN_OK : crn_no_memory(error);
}

/* ---- the plain form ---- */

typedef struct plain_stage {
    crn_draft *draft;
    stage_draft made;
} plain_stage;

static crn_plain_result keep_options(plain_stage *plain, const cairn_stage_option *options, size_t count)
{
    cairn_stage_option *kept = crn_arena_alloc(&plain->draft->lists, count, sizeof(*kept));
    if (!kept)
        return CRN_PLAIN_NO_MEMORY;
    memcpy(kept, options, count * sizeof(*kept));
    plain->made.stage.options = kept;
    plain->made.stage.option_count = (int32_t)count;
    return CRN_PLAIN_TAKEN;
}

static crn_plain_result plain_options(void *context, crn_plain *in)
{
    plain_stage *plain = context;
    cairn_stage_option options[CAIRN_STAGE_OPTIONS_MAX] = {0};
    size_t count = 0;
    bool first = true, more = crn_plain_take(in, '[');
    while (more && crn_plain_step(in, ']', &first, &more)) {
        if (!more)
            return count > 0 ? keep_options(plain, options, count) : CRN_PLAIN_ODD;
        if (count == CAIRN_STAGE_OPTIONS_MAX)
            return CRN_PLAIN_ODD;
        crn_target target = {&options[count], &plain->draft->arena, 0};
        options[count++].name = "";
        crn_plain_result result = crn_plain_fields(in, option_fields, OPTION_ROWS, &target, NULL, NULL);
        if (result != CRN_PLAIN_TAKEN)
            return result;
    }
    return CRN_PLAIN_ODD;
}

static crn_plain_result read_plain_stage(void *context, crn_plain *in, int64_t index)
{
    plain_stage plain = {context, {.stage.name = ""}};
    crn_target target = {&plain.made, &plain.draft->arena, 0};
    if (index >= CAIRN_STAGES_MAX)
        return CRN_PLAIN_ODD;
    crn_plain_result result = crn_plain_fields(in, stage_fields, ROW_COUNT, &target, plain_options, &plain);
    if (result != CRN_PLAIN_TAKEN)
        return result;
    bool has_options = saw(target.seen, ROW_OPTIONS);
    if (has_options ? only_row(target.seen) < ROW_COUNT : missing_row(target.seen) <= ROW_BACKWARD)
        return CRN_PLAIN_ODD;
    if (!has_options && !take_only_option(plain.draft, &plain.made))
        return CRN_PLAIN_NO_MEMORY;
    return add_stage(plain.draft, &plain.made, target.seen) ? CRN_PLAIN_TAKEN : CRN_PLAIN_NO_MEMORY;
}

const crn_element crn_stage_element = {read_plain_stage, read_stage};
