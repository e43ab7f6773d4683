/* cairn-chain and cairn-graph, version 1. */
#include "io/read_problem.h"

#include <cairn/io.h>
#include <stdio.h>
#include <string.h>

#include "base/failure.h"
#include "base/utf8.h"
#include "problem/problem.h"

enum problem_row {
    ROW_FORMAT,
    ROW_VERSION,
    ROW_NAME,
    ROW_PROVENANCE,
    ROW_FIXED,
    ROW_MACHINE,
    ROW_INPUT,
    ROW_INPUT_GRAD,
    ROW_STAGES,
    ROW_NODES,
    ROW_BACKWARD,
    ROW_COUNT
};

static const crn_field problem_fields[ROW_COUNT] = {
    [ROW_FORMAT] = {"format", CRN_FIELD_TEXT, CRN_REQUIRED, offsetof(crn_draft, format)},
    [ROW_VERSION] = {"version", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(crn_draft, version)},
    [ROW_NAME] = {"name", CRN_FIELD_TEXT, 0, offsetof(crn_draft, name)},
    [ROW_PROVENANCE] = {"provenance", CRN_FIELD_STREAM, 0, 0},
    [ROW_FIXED] = {"fixed_bytes", CRN_FIELD_COUNT, 0, offsetof(crn_draft, fixed_bytes)},
    [ROW_MACHINE] = {"machine", CRN_FIELD_STREAM, 0, 0},
    [ROW_INPUT] = {"input_bytes", CRN_FIELD_COUNT, 0, offsetof(crn_draft, input_bytes)},
    [ROW_INPUT_GRAD] = {"input_grad_bytes", CRN_FIELD_COUNT, 0, offsetof(crn_draft, input_grad_bytes)},
    [ROW_STAGES] = {"stages", CRN_FIELD_STREAM, 0, 0},
    [ROW_NODES] = {"nodes", CRN_FIELD_STREAM, 0, 0},
    [ROW_BACKWARD] = {"backward_begins_at", CRN_FIELD_COUNT, 0, offsetof(crn_draft, backward_begins_at)},
};

/* Which rows belong to which of the two formats, and which of those must be there. */
typedef struct row_set {
    uint64_t allowed, required;
} row_set;

#define ROW(row) ((uint64_t)1 << (row))
static const uint64_t common_rows =
    ROW(ROW_FORMAT) | ROW(ROW_VERSION) | ROW(ROW_NAME) | ROW(ROW_PROVENANCE) | ROW(ROW_FIXED) | ROW(ROW_MACHINE);
static const row_set chain_rows = {ROW(ROW_INPUT) | ROW(ROW_INPUT_GRAD) | ROW(ROW_STAGES),
                                   ROW(ROW_INPUT) | ROW(ROW_STAGES)};
static const row_set graph_rows = {ROW(ROW_NODES) | ROW(ROW_BACKWARD), ROW(ROW_NODES)};
#undef ROW

void *crn_draft_grow(crn_draft *draft, void *elements, int64_t count, size_t size)
{
    if (count < draft->capacity)
        return elements;
    int64_t grown = draft->capacity > 0 ? draft->capacity + draft->capacity / 2 : 16;
    void *moved = crn_arena_resize(&draft->elements, (size_t)draft->capacity, (size_t)grown, size);
    if (moved)
        draft->capacity = grown;
    return moved;
}

/* Everything that was read, the spare room after the last element given back. */
static cairn_status gather(crn_draft *draft, size_t count, size_t size, void **elements, cairn_error *error)
{
    if (count > 0) {
        *elements = crn_arena_resize(&draft->elements, (size_t)draft->capacity, count, size);
        if (!*elements)
            return crn_no_memory(error);
        draft->capacity = (int64_t)count;
    }
    crn_arena_join(&draft->lists, &draft->arena);
    crn_arena_join(&draft->elements, &draft->lists);
    return CAIRN_OK;
}

/* What is no object is read, to say what it is. */
static cairn_status refuse_provenance(crn_cursor *cursor)
{
    crn_path path = {NULL, "provenance", 0};
    json_t *value;
    CRN_TRY(crn_cursor_value(cursor, JSON_REJECT_DUPLICATES, &value));
    cairn_status status = crn_type_fail(value, "an object", &path, cursor->error);
    json_decref(value);
    return status;
}

/* Kept as it is, byte for byte; it only has to be JSON, whatever the size of its numbers. */
static cairn_status read_provenance(crn_draft *draft)
{
    crn_cursor *cursor = &draft->file.cursor;
    if (crn_cursor_peek(cursor) != '{')
        return refuse_provenance(cursor);
    const char *begin = cursor->text + cursor->offset;
    CRN_TRY(crn_cursor_skip(cursor));
    size_t length = (size_t)(cursor->text + cursor->offset - begin);
    char *copy = crn_arena_alloc(&draft->arena, length + 1, 1);
    if (!copy)
        return crn_no_memory(cursor->error);
    memcpy(copy, begin, length);
    copy[length] = '\0';
    draft->provenance = copy;
    return CAIRN_OK;
}

static cairn_status stream_row(void *context, size_t row)
{
    crn_draft *draft = context;
    draft->file.target.seen |= (uint64_t)1 << row;
    switch (row) {
    case ROW_PROVENANCE:
        return read_provenance(draft);
    case ROW_MACHINE:
        return crn_file_machine(&draft->file, &draft->machine, &draft->has_machine);
    case ROW_STAGES:
        return crn_file_elements(&draft->file, "stages", &crn_stage_element);
    default:
        return crn_file_elements(&draft->file, "nodes", &crn_node_element);
    }
}

static bool is_format(const crn_draft *draft, const char *format)
{
    return strcmp(draft->format, format) == 0;
}

static cairn_status check_format(const crn_draft *draft)
{
    crn_path path = {NULL, "format", 0};
    char shown[48];
    if (is_format(draft, "cairn-chain") || is_format(draft, "cairn-graph"))
        return CAIRN_OK;
    return crn_path_fail(draft->file.cursor.error, CAIRN_BAD_INPUT, &path,
                         "\"%s\" where a problem is expected: \"cairn-chain\" or \"cairn-graph\"%s",
                         crn_printable(draft->format, shown, sizeof(shown)),
                         is_format(draft, "cairn-torch-plan") ? ", which is what a plan has under \"problem\"" : "");
}

static cairn_status look_at_row(void *context, size_t row)
{
    const crn_draft *draft = context;
    if (row == ROW_FORMAT)
        return check_format(draft);
    if (row == ROW_VERSION)
        return crn_file_version(&draft->file, draft->version);
    return CAIRN_OK;
}

/* The format may stand after the fields that it allows, so what belongs to the other one is found here. */
static cairn_status check_rows(const crn_draft *draft, const row_set *rows)
{
    uint64_t seen = draft->file.target.seen;
    cairn_error *error = draft->file.cursor.error;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        crn_path path = {NULL, problem_fields[i].name, 0};
        if (seen & ~(rows->allowed | common_rows) & (uint64_t)1 << i)
            return crn_path_fail(error, CAIRN_BAD_INPUT, &path, "unknown field in a %s", draft->format);
    }
    for (size_t i = 0; i < ROW_COUNT; i++)
        if (rows->required & ~seen & (uint64_t)1 << i)
            return crn_path_fail(error, CAIRN_BAD_INPUT, NULL, "%s is missing", problem_fields[i].name);
    return CAIRN_OK;
}

/* An error of a constructor names a stage or node; the path makes it a place in the file. */
static void complete_path(cairn_error *error, const char *array, int64_t first)
{
    if (error && error->path[0] == '\0' && error->index != CAIRN_NONE)
        snprintf(error->path, sizeof(error->path), "%s[%lld]", array, (long long)(error->index - first));
}

static cairn_status make_chain(const cairn_env *env, crn_draft *draft, const cairn_problem_info *info,
                               cairn_problem **problem)
{
    cairn_error *error = draft->file.cursor.error;
    CRN_TRY(check_rows(draft, &chain_rows));
    if (!(draft->file.target.seen >> ROW_INPUT_GRAD & 1))
        draft->input_grad_bytes = draft->input_bytes;
    void *stages = NULL;
    CRN_TRY(gather(draft, (size_t)draft->stage_count, sizeof(*draft->stages), &stages, error));
    cairn_chain chain = {draft->input_bytes, draft->input_grad_bytes, (int32_t)draft->stage_count, stages};
    cairn_status status = crn_problem_make_chain(env, &chain, info, &draft->elements, problem, error);
    if (status != CAIRN_OK)
        complete_path(error, "stages", 1);
    return status;
}

static cairn_status make_graph(const cairn_env *env, crn_draft *draft, const cairn_problem_info *info,
                               cairn_problem **problem)
{
    cairn_error *error = draft->file.cursor.error;
    crn_path path = {NULL, "backward_begins_at", 0};
    CRN_TRY(check_rows(draft, &graph_rows));
    if (draft->backward_begins_at > draft->node_count)
        return crn_path_fail(error, CAIRN_BAD_INPUT, &path, "%lld; at most the number of nodes, %lld",
                             (long long)draft->backward_begins_at, (long long)draft->node_count);
    void *nodes = NULL;
    CRN_TRY(gather(draft, (size_t)draft->node_count, sizeof(*draft->nodes), &nodes, error));
    cairn_graph graph = {(int32_t)draft->node_count, nodes, (int32_t)draft->backward_begins_at};
    cairn_status status = crn_problem_make_graph(env, &graph, info, &draft->elements, problem, error);
    if (status != CAIRN_OK)
        complete_path(error, "nodes", 0);
    return status;
}

static cairn_status read_and_make(const cairn_env *env, crn_draft *draft, const char *text, size_t length,
                                  cairn_problem **problem, cairn_error *error)
{
    CRN_TRY(crn_file_read(&draft->file, text, length, error));
    cairn_problem_info info = {draft->name, draft->provenance, draft->fixed_bytes,
                               draft->has_machine ? &draft->machine : NULL};
    return is_format(draft, "cairn-chain") ? make_chain(env, draft, &info, problem)
                                           : make_graph(env, draft, &info, problem);
}

cairn_status crn_problem_read(const cairn_env *env, const char *text, size_t length, bool by_tree,
                              cairn_problem **problem, cairn_error *error)
{
    crn_draft draft = {.name = "", .provenance = "{}", .backward_begins_at = -1};
    *problem = NULL;
    crn_arena_init(&draft.arena, crn_allocator(env));
    draft.lists = draft.elements = draft.arena;
    draft.file = (crn_file){.fields = problem_fields,
                            .field_count = ROW_COUNT,
                            .target = {&draft, &draft.arena, 0},
                            .context = &draft,
                            .stream = stream_row,
                            .look = look_at_row,
                            .by_tree = by_tree};
    cairn_status status = read_and_make(env, &draft, text, length, problem, error);
    if (status != CAIRN_OK)
        crn_error_locate(error, text, length);
    crn_arena_clear(&draft.elements);
    crn_arena_clear(&draft.lists);
    crn_arena_clear(&draft.arena);
    return status;
}

cairn_status cairn_problem_read(const cairn_env *env, const char *text, size_t length, cairn_problem **problem,
                                cairn_error *error)
{
    return crn_problem_read(env, text, length, false, problem, error);
}
