#include "io/json_file.h"

#include <string.h>

#include "base/failure.h"

static cairn_status read_row(crn_file *file, size_t row, const crn_path *path)
{
    json_t *value;
    if (file->fields[row].type == CRN_FIELD_STREAM)
        return file->stream(file->context, row);
    CRN_TRY(crn_cursor_value(&file->cursor, JSON_REJECT_DUPLICATES, &value));
    cairn_status status = crn_field_read(value, file->fields, row, &file->target, path, file->cursor.error);
    json_decref(value);
    return status;
}

static cairn_status read_member(crn_file *file, const char *key, uint64_t *met)
{
    crn_path path = {NULL, key, 0};
    size_t row = crn_field_find(file->fields, file->field_count, key);
    if (row == file->field_count)
        return crn_field_unknown(file->fields, file->field_count, &path, file->cursor.error);
    if (*met >> row & 1) {
        crn_path_fail(file->cursor.error, CAIRN_BAD_INPUT, &path, "duplicate field");
        crn_cursor_peek(&file->cursor);
        crn_error_place(file->cursor.error, file->cursor.text, file->cursor.offset);
        return CAIRN_BAD_INPUT;
    }
    *met |= (uint64_t)1 << row;
    CRN_TRY(read_row(file, row, &path));
    return file->look(file->context, row);
}

static cairn_status read_members(crn_file *file)
{
    uint64_t met = 0;
    bool first = true, more;
    CRN_TRY(crn_cursor_open(&file->cursor, '{', "an object"));
    for (;;) {
        json_t *key;
        CRN_TRY(crn_cursor_step(&file->cursor, '}', &first, &more));
        if (!more)
            break;
        CRN_TRY(crn_cursor_key(&file->cursor, &key));
        cairn_status status = read_member(file, json_string_value(key), &met);
        json_decref(key);
        if (status != CAIRN_OK)
            return status;
    }
    CRN_TRY(crn_cursor_end(&file->cursor));
    return crn_fields_check(file->fields, file->field_count, file->target.seen, NULL, file->cursor.error);
}

cairn_status crn_file_read(crn_file *file, const char *text, size_t length, cairn_error *error)
{
    static const char byte_order_mark[] = "\xef\xbb\xbf";
    crn_cursor_init(&file->cursor, text, length, error);
    if ((int64_t)length > CAIRN_FILE_BYTES_MAX)
        return crn_fail(error, CAIRN_TOO_LARGE, "%zu bytes of JSON; at most %lld", length,
                        (long long)CAIRN_FILE_BYTES_MAX);
    if (length >= 3 && memcmp(text, byte_order_mark, 3) == 0) {
        crn_fail(error, CAIRN_PARSE, "the text begins with a byte order mark; write UTF-8 without one");
        crn_error_place(error, text, 0);
        return CAIRN_PARSE;
    }
    return read_members(file);
}

static cairn_status read_element(crn_file *file, const crn_element *element, const crn_path *path)
{
    crn_cursor *cursor = &file->cursor;
    crn_plain in = {cursor->text + cursor->offset, cursor->text + cursor->length};
    crn_plain_result result = file->by_tree ? CRN_PLAIN_ODD : element->plain(file->context, &in, path->index);
    if (result == CRN_PLAIN_NO_MEMORY)
        return crn_no_memory(cursor->error);
    if (result == CRN_PLAIN_TAKEN) {
        cursor->offset = (size_t)(in.at - cursor->text);
        return CAIRN_OK;
    }
    json_t *value;
    CRN_TRY(crn_cursor_value(cursor, JSON_REJECT_DUPLICATES, &value));
    cairn_status status = element->parsed(file->context, value, path->index, path, cursor->error);
    json_decref(value);
    return status;
}

cairn_status crn_file_elements(crn_file *file, const char *array, const crn_element *element)
{
    crn_path parent = {NULL, array, 0}, path = {&parent, NULL, 0};
    bool first = true, more;
    if (crn_cursor_peek(&file->cursor) != '[') { /* a list is expected: say what there is, if it is JSON at all */
        json_t *value;
        CRN_TRY(crn_cursor_value(&file->cursor, JSON_REJECT_DUPLICATES, &value));
        crn_type_fail(value, "a list", &parent, file->cursor.error);
        json_decref(value);
        return CAIRN_BAD_INPUT;
    }
    CRN_TRY(crn_cursor_open(&file->cursor, '[', "a list"));
    for (;; path.index++) {
        CRN_TRY(crn_cursor_step(&file->cursor, ']', &first, &more));
        if (!more)
            return CAIRN_OK;
        CRN_TRY(read_element(file, element, &path));
    }
}

static const crn_field machine_fields[] = {
    {"host_bytes", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_machine, host_bytes)},
    {"to_host_bytes_per_s", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_machine, to_host_bytes_per_s)},
    {"to_device_bytes_per_s", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(cairn_machine, to_device_bytes_per_s)},
    {"shared_link", CRN_FIELD_BOOL, 0, offsetof(cairn_machine, shared_link)},
    {"latency_ns", CRN_FIELD_COUNT, 0, offsetof(cairn_machine, latency_ns)},
};

cairn_status crn_file_machine(crn_file *file, cairn_machine *machine, bool *present)
{
    crn_path path = {NULL, "machine", 0};
    crn_target target = {machine, file->target.arena, 0};
    json_t *value;
    CRN_TRY(crn_cursor_value(&file->cursor, JSON_REJECT_DUPLICATES, &value));
    *machine = (cairn_machine){0};
    *present = !json_is_null(value);
    cairn_status status = CAIRN_OK;
    if (*present)
        status = crn_fields_read(value, machine_fields, sizeof(machine_fields) / sizeof(machine_fields[0]), &target,
                                 &path, file->cursor.error);
    json_decref(value);
    return status == CAIRN_OK && *present ? cairn_machine_check(machine, file->cursor.error) : status;
}

cairn_status crn_file_version(const crn_file *file, int64_t version)
{
    crn_path path = {NULL, "version", 0};
    if (version == 1)
        return CAIRN_OK;
    return crn_path_fail(file->cursor.error, CAIRN_BAD_INPUT, &path, "version %lld; this library reads version 1",
                         (long long)version);
}
