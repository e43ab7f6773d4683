/* cairn-schedule, version 1. */
#include <cairn/io.h>
#include <string.h>

#include "base/failure.h"
#include "base/utf8.h"
#include "io/read_schedule.h"

typedef struct schedule_draft {
    crn_file file;
    crn_arena arena;
    const cairn_problem *problem;
    cairn_builder *builder;
    const char *format;
    int64_t version;
    cairn_schedule_info info;
    cairn_machine machine;
} schedule_draft;

enum schedule_row {
    ROW_FORMAT,
    ROW_VERSION,
    ROW_PROBLEM,
    ROW_SOLVER,
    ROW_BUDGET,
    ROW_MACHINE,
    ROW_MAKESPAN,
    ROW_PEAK,
    ROW_LOWER_BOUND,
    ROW_OPS,
    ROW_COUNT
};

static const crn_field schedule_fields[ROW_COUNT] = {
    [ROW_FORMAT] = {"format", CRN_FIELD_TEXT, CRN_REQUIRED, offsetof(schedule_draft, format)},
    [ROW_VERSION] = {"version", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(schedule_draft, version)},
    [ROW_PROBLEM] = {"problem", CRN_FIELD_STREAM, CRN_REQUIRED, 0},
    [ROW_SOLVER] = {"solver", CRN_FIELD_TEXT, CRN_NULLABLE, offsetof(schedule_draft, info.solver)},
    [ROW_BUDGET] = {"budget_bytes", CRN_FIELD_COUNT, CRN_NULLABLE, offsetof(schedule_draft, info.budget_bytes)},
    [ROW_MACHINE] = {"machine", CRN_FIELD_STREAM, 0, 0},
    [ROW_MAKESPAN] = {"makespan_ns", CRN_FIELD_COUNT, CRN_NULLABLE, offsetof(schedule_draft, info.makespan_ns)},
    [ROW_PEAK] = {"peak_bytes", CRN_FIELD_COUNT, CRN_NULLABLE, offsetof(schedule_draft, info.peak_bytes)},
    [ROW_LOWER_BOUND] = {"lower_bound_ns", CRN_FIELD_COUNT, CRN_NULLABLE,
                         offsetof(schedule_draft, info.lower_bound_ns)},
    [ROW_OPS] = {"ops", CRN_FIELD_STREAM, CRN_REQUIRED, 0},
};

/* ---- the problem that the schedule is for ---- */

typedef struct problem_draft {
    const char *format, *hash;
} problem_draft;

static const crn_field reference_fields[] = {
    {"format", CRN_FIELD_TEXT, CRN_REQUIRED, offsetof(problem_draft, format)},
    {"hash", CRN_FIELD_TEXT, CRN_REQUIRED, offsetof(problem_draft, hash)},
};

static bool is_hash(const char *text)
{
    return strncmp(text, "sha256:", 7) == 0 && strlen(text) == 7 + 64 && strspn(text + 7, "0123456789abcdef") == 64;
}

static cairn_status check_reference(const schedule_draft *draft, const problem_draft *made, const crn_path *path)
{
    crn_path format = {path, "format", 0}, hash = {path, "hash", 0};
    cairn_error *error = draft->file.cursor.error;
    bool is_chain = cairn_problem_kind_of(draft->problem) == CAIRN_KIND_CHAIN;
    if (strcmp(made->format, "cairn-chain") != 0 && strcmp(made->format, "cairn-graph") != 0)
        return crn_path_fail(error, CAIRN_BAD_INPUT, &format, "neither \"cairn-chain\" nor \"cairn-graph\"");
    if (!is_hash(made->hash))
        return crn_path_fail(error, CAIRN_BAD_INPUT, &hash, "not \"sha256:\" and 64 digits 0-9, a-f");
    if (strcmp(made->format, is_chain ? "cairn-chain" : "cairn-graph") != 0)
        return crn_path_fail(error, CAIRN_MISMATCH, &format, "the schedule is for a %s, the problem is a %s",
                             is_chain ? "cairn-graph" : "cairn-chain", is_chain ? "cairn-chain" : "cairn-graph");
    if (strcmp(made->hash, cairn_problem_hash(draft->problem)) != 0)
        return crn_path_fail(error, CAIRN_MISMATCH, &hash, "the schedule is for another problem; this one has %s",
                             cairn_problem_hash(draft->problem));
    return CAIRN_OK;
}

static cairn_status read_reference(schedule_draft *draft)
{
    problem_draft made = {NULL, NULL};
    crn_path path = {NULL, "problem", 0};
    crn_target target = {&made, &draft->arena, 0};
    json_t *value;
    CRN_TRY(crn_cursor_value(&draft->file.cursor, JSON_REJECT_DUPLICATES, &value));
    cairn_status status =
        crn_fields_read(value, reference_fields, sizeof(reference_fields) / sizeof(reference_fields[0]), &target, &path,
                        draft->file.cursor.error);
    json_decref(value);
    CRN_TRY(status);
    return check_reference(draft, &made, &path);
}

/* ---- operations ---- */

/* For which kinds of problem the format has an operation. */
enum { CHAIN = 1 << CAIRN_KIND_CHAIN, GRAPH = 1 << CAIRN_KIND_GRAPH, BOTH = CHAIN | GRAPH };

typedef struct op_syntax {
    const char *name;
    uint8_t code;
    int kinds;
} op_syntax;

static const op_syntax op_table[] = {
#define CAIRN_X(constant, name, kinds) {name, CAIRN_OP_##constant, kinds},
    CAIRN_OP_MAP(CAIRN_X)
#undef CAIRN_X
};

static cairn_status find_op(json_t *name, bool chain, const op_syntax **syntax, const crn_path *path,
                            cairn_error *error)
{
    char shown[48];
    if (!json_is_string(name))
        return crn_type_fail(name, "the name of an operation", path, error);
    for (size_t i = 0; i < sizeof(op_table) / sizeof(op_table[0]); i++) {
        *syntax = &op_table[i];
        if (strcmp(op_table[i].name, json_string_value(name)) == 0 && (op_table[i].kinds & (chain ? CHAIN : GRAPH)))
            return CAIRN_OK;
    }
    return crn_path_fail(error, CAIRN_BAD_INPUT, path, "\"%s\" is no operation of a %s",
                         crn_printable(json_string_value(name), shown, sizeof(shown)), chain ? "chain" : "graph");
}

static cairn_status read_value_name(json_t *name, cairn_op *op, const crn_path *path, cairn_error *error)
{
    const char *text = json_string_value(name);
    if (!text || (strcmp(text, "output") != 0 && strcmp(text, "saved") != 0))
        return crn_path_fail(error, CAIRN_BAD_INPUT, path, "a value of a stage is \"output\" or \"saved\"");
    op->value = strcmp(text, "saved") == 0 ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT;
    return CAIRN_OK;
}

static cairn_status check_length(size_t count, size_t least, size_t most, const char *name, const crn_path *path,
                                 cairn_error *error)
{
    if (count >= least && count <= most)
        return CAIRN_OK;
    return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%s with %zu elements; it has %zu%s", name, count, least,
                         most > least ? " or one more" : "");
}

static cairn_status read_option(json_t *value, cairn_op *op, const crn_path *path, cairn_error *error)
{
    int32_t option;
    CRN_TRY(crn_index_read(value, &option, path, error));
    if (option >= CAIRN_STAGE_OPTIONS_MAX)
        return crn_path_fail(error, CAIRN_BAD_INPUT, path, "there is no option %d", option);
    op->option = (uint16_t)option;
    return CAIRN_OK;
}

/* ["forward_save", l, k], ["drop", "output", l], ["compute", v], ... */
static cairn_status parse_op(json_t *list, bool chain, cairn_op *op, const crn_path *path, cairn_error *error)
{
    const op_syntax *syntax;
    crn_path name = {path, NULL, 0}, second = {path, NULL, 1}, third = {path, NULL, 2};
    if (!json_is_array(list) || json_array_size(list) == 0)
        return crn_type_fail(list, "an operation, [\"name\", ...],", path, error);
    CRN_TRY(find_op(json_array_get(list, 0), chain, &syntax, &name, error));
    size_t count = json_array_size(list);
    bool saves = syntax->code == CAIRN_OP_FORWARD_SAVE, has_value = chain && syntax->kinds == BOTH;
    *op = (cairn_op){.code = syntax->code};
    CRN_TRY(check_length(count, has_value ? 3 : 2, has_value || saves ? 3 : 2, syntax->name, path, error));
    if (has_value) {
        CRN_TRY(read_value_name(json_array_get(list, 1), op, &second, error));
        return crn_index_read(json_array_get(list, 2), &op->index, &third, error);
    }
    CRN_TRY(crn_index_read(json_array_get(list, 1), &op->index, &second, error));
    return count == 3 ? read_option(json_array_get(list, 2), op, &third, error) : CAIRN_OK;
}

static cairn_status read_op(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error)
{
    schedule_draft *draft = context;
    cairn_op op;
    if (index >= CAIRN_OPS_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, path, "more than %lld operations", (long long)CAIRN_OPS_MAX);
    CRN_TRY(parse_op(value, cairn_problem_kind_of(draft->problem) == CAIRN_KIND_CHAIN, &op, path, error));
    cairn_error reason;
    cairn_status status = cairn_builder_add(draft->builder, op, &reason);
    return status == CAIRN_OK ? CAIRN_OK : crn_path_fail(error, status, path, "%s", reason.message);
}

/* ---- operations in their plain form ---- */

static const op_syntax *find_plain_op(crn_plain *in, bool chain)
{
    const char *name;
    size_t length;
    if (!crn_plain_take(in, '[') || !crn_plain_text(in, &name, &length))
        return NULL;
    for (size_t i = 0; i < sizeof(op_table) / sizeof(op_table[0]); i++)
        if (strncmp(op_table[i].name, name, length) == 0 && op_table[i].name[length] == '\0' &&
            (op_table[i].kinds & (chain ? CHAIN : GRAPH)))
            return &op_table[i];
    return NULL;
}

static bool plain_number(crn_plain *in, int64_t limit, int64_t *number)
{
    return crn_plain_take(in, ',') && crn_plain_integer(in, number) && *number >= 0 && *number < limit;
}

static bool plain_value_name(crn_plain *in, cairn_op *op)
{
    const char *name;
    size_t length;
    if (!crn_plain_take(in, ',') || !crn_plain_text(in, &name, &length))
        return false;
    bool is_saved = length == 5 && memcmp(name, "saved", 5) == 0;
    op->value = is_saved ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT;
    return is_saved || (length == 6 && memcmp(name, "output", 6) == 0);
}

static bool parse_plain_op(crn_plain *in, bool chain, cairn_op *op)
{
    int64_t index, option = 0;
    const op_syntax *syntax = find_plain_op(in, chain);
    if (!syntax)
        return false;
    *op = (cairn_op){.code = syntax->code};
    if (chain && syntax->kinds == BOTH && !plain_value_name(in, op))
        return false;
    if (!plain_number(in, (int64_t)INT32_MAX + 1, &index))
        return false;
    bool closed = crn_plain_take(in, ']');
    if (!closed && syntax->code == CAIRN_OP_FORWARD_SAVE)
        closed = plain_number(in, CAIRN_STAGE_OPTIONS_MAX, &option) && crn_plain_take(in, ']');
    op->index = (int32_t)index;
    op->option = (uint16_t)option;
    return closed;
}

/* What the builder refuses is odd, too: the other way says where. */
static crn_plain_result read_plain_op(void *context, crn_plain *in, int64_t index)
{
    schedule_draft *draft = context;
    cairn_op op;
    if (index >= CAIRN_OPS_MAX || !parse_plain_op(in, cairn_problem_kind_of(draft->problem) == CAIRN_KIND_CHAIN, &op))
        return CRN_PLAIN_ODD;
    cairn_status status = cairn_builder_add(draft->builder, op, NULL);
    if (status == CAIRN_NO_MEMORY)
        return CRN_PLAIN_NO_MEMORY;
    return status == CAIRN_OK ? CRN_PLAIN_TAKEN : CRN_PLAIN_ODD;
}

static const crn_element op_element = {read_plain_op, read_op};

/* ---- the file ---- */

static cairn_status stream_row(void *context, size_t row)
{
    schedule_draft *draft = context;
    bool present;
    draft->file.target.seen |= (uint64_t)1 << row;
    switch (row) {
    case ROW_PROBLEM:
        return read_reference(draft);
    case ROW_MACHINE:
        CRN_TRY(crn_file_machine(&draft->file, &draft->machine, &present));
        draft->info.machine = present ? &draft->machine : NULL;
        return CAIRN_OK;
    default:
        return crn_file_elements(&draft->file, "ops", &op_element);
    }
}

static cairn_status look_at_row(void *context, size_t row)
{
    const schedule_draft *draft = context;
    crn_path path = {NULL, "format", 0};
    char shown[48];
    if (row == ROW_VERSION)
        return crn_file_version(&draft->file, draft->version);
    if (row == ROW_FORMAT && strcmp(draft->format, "cairn-schedule") != 0)
        return crn_path_fail(
            draft->file.cursor.error, CAIRN_BAD_INPUT, &path,
            "\"%s\" where a schedule is expected: \"cairn-schedule\"%s",
            crn_printable(draft->format, shown, sizeof(shown)),
            strcmp(draft->format, "cairn-torch-plan") == 0 ? ", which is what a plan has under \"schedule\"" : "");
    return CAIRN_OK;
}

static cairn_status read_and_finish(const cairn_env *env, schedule_draft *draft, const char *text, size_t length,
                                    cairn_schedule **schedule, cairn_error *error)
{
    CRN_TRY(cairn_builder_new(env, draft->problem, &draft->builder, error));
    CRN_TRY(crn_file_read(&draft->file, text, length, error));
    return cairn_builder_finish(draft->builder, &draft->info, schedule, error);
}

cairn_status crn_schedule_read(const cairn_env *env, const cairn_problem *problem, const char *text, size_t length,
                               bool by_tree, cairn_schedule **schedule, cairn_error *error)
{
    schedule_draft draft = {.problem = problem, .info = CAIRN_SCHEDULE_INFO_INIT};
    *schedule = NULL;
    crn_arena_init(&draft.arena, crn_allocator(env));
    draft.file = (crn_file){.fields = schedule_fields,
                            .field_count = ROW_COUNT,
                            .target = {&draft, &draft.arena, 0},
                            .context = &draft,
                            .stream = stream_row,
                            .look = look_at_row,
                            .by_tree = by_tree};
    cairn_status status = read_and_finish(env, &draft, text, length, schedule, error);
    if (status != CAIRN_OK)
        crn_error_locate(error, text, length);
    cairn_builder_free(draft.builder);
    crn_arena_clear(&draft.arena);
    return status;
}

cairn_status cairn_schedule_read(const cairn_env *env, const cairn_problem *problem, const char *text, size_t length,
                                 cairn_schedule **schedule, cairn_error *error)
{
    return crn_schedule_read(env, problem, text, length, false, schedule, error);
}
