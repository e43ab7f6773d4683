#include "io/json_cursor.h"

#include <string.h>

#include "base/failure.h"
#include "base/utf8.h"
#include "io/json_path.h"
#include "io/json_scan.h"

void crn_cursor_init(crn_cursor *cursor, const char *text, size_t length, cairn_error *error)
{
    *cursor = (crn_cursor){text, length, 0, error};
}

void crn_error_place(cairn_error *error, const char *text, size_t offset)
{
    int64_t line = 1;
    size_t start = 0;
    if (!error)
        return;
    for (size_t i = 0; i < offset; i++)
        if (text[i] == '\n') {
            line++;
            start = i + 1;
        }
    error->offset = (int64_t)offset;
    error->line = line;
    error->column = (int64_t)(offset - start) + 1;
}

static cairn_status fail_here(crn_cursor *cursor, const char *message)
{
    crn_fail(cursor->error, CAIRN_PARSE, "%s", message);
    crn_error_place(cursor->error, cursor->text, cursor->offset);
    return CAIRN_PARSE;
}

static cairn_status expected(crn_cursor *cursor, const char *what)
{
    char shown[24], message[128];
    if (cursor->offset >= cursor->length) {
        snprintf(message, sizeof(message), "the text ends where %s is expected", what);
    } else {
        char found[2] = {cursor->text[cursor->offset], '\0'};
        snprintf(message, sizeof(message), "'%s' where %s is expected", crn_printable(found, shown, sizeof(shown)),
                 what);
    }
    return fail_here(cursor, message);
}

int crn_cursor_peek(crn_cursor *cursor)
{
    while (cursor->offset < cursor->length) {
        char c = cursor->text[cursor->offset];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r')
            return (unsigned char)c;
        cursor->offset++;
    }
    return -1;
}

/* jansson counts the bytes that it took from where it was told to begin, the one at fault included if it is UTF-8. */
static size_t fault_offset(const crn_cursor *cursor, const json_error_t *fault)
{
    size_t taken = fault->position > 0 ? (size_t)fault->position : 0;
    if (json_error_code(fault) == json_error_premature_end_of_input || taken > cursor->length - cursor->offset)
        return cursor->length;
    bool counted = taken > 0 && json_error_code(fault) != json_error_invalid_utf8;
    return cursor->offset + (counted ? taken - 1 : taken);
}

static const char *fault_text(const json_error_t *fault)
{
    switch (json_error_code(fault)) {
    case json_error_null_character:
    case json_error_null_byte_in_key:
        return "a string with a NUL character";
    case json_error_stack_overflow:
        return crn_json_too_deep;
    case json_error_premature_end_of_input:
        return "the text ends in the middle of a value";
    default:
        return fault->text;
    }
}

static bool is_of_number(char c)
{
    return c != '\0' && strchr("0123456789+-.eE", c) != NULL;
}

/* A number that passes what can be held is shown, and its beginning is the place. */
static cairn_status number_failure(crn_cursor *cursor, const json_error_t *fault)
{
    enum { SHOWN_MAX = 40 };
    size_t begin = fault_offset(cursor, fault), end;
    while (begin > cursor->offset && !is_of_number(cursor->text[begin]))
        begin--;
    while (begin > cursor->offset && is_of_number(cursor->text[begin - 1]))
        begin--;
    for (end = begin; end < cursor->length && is_of_number(cursor->text[end]);)
        end++;
    bool is_long = end - begin > SHOWN_MAX;
    crn_fail(cursor->error, CAIRN_OVERFLOW, "%.*s%s does not fit; numbers go from -2^63 to 2^63 - 1",
             is_long ? SHOWN_MAX : (int)(end - begin), cursor->text + begin, is_long ? "..." : "");
    crn_error_place(cursor->error, cursor->text, begin);
    return CAIRN_OVERFLOW;
}

static cairn_status parse_failure(crn_cursor *cursor, const json_error_t *fault)
{
    char shown[JSON_ERROR_TEXT_LENGTH];
    if (json_error_code(fault) == json_error_out_of_memory || fault->text[0] == '\0')
        return crn_no_memory(cursor->error);
    if (json_error_code(fault) == json_error_numeric_overflow)
        return number_failure(cursor, fault);
    crn_fail(cursor->error, CAIRN_PARSE, "%s", crn_printable(fault_text(fault), shown, sizeof(shown)));
    crn_error_place(cursor->error, cursor->text, fault_offset(cursor, fault));
    return CAIRN_PARSE;
}

cairn_status crn_cursor_value(crn_cursor *cursor, size_t flags, json_t **value)
{
    json_error_t fault;
    *value = NULL;
    if (crn_cursor_peek(cursor) < 0)
        return expected(cursor, "a value");
    *value = json_loadb(cursor->text + cursor->offset, cursor->length - cursor->offset,
                        JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK | flags, &fault);
    if (!*value)
        return parse_failure(cursor, &fault);
    cursor->offset += (size_t)fault.position;
    return CAIRN_OK;
}

cairn_status crn_cursor_skip(crn_cursor *cursor)
{
    crn_scan scan = {cursor->text, cursor->length, cursor->offset, NULL};
    if (!crn_json_scan(&scan)) {
        crn_fail(cursor->error, CAIRN_PARSE, "%s", scan.fault);
        crn_error_place(cursor->error, cursor->text, scan.offset);
        return CAIRN_PARSE;
    }
    cursor->offset = scan.offset;
    return CAIRN_OK;
}

cairn_status crn_cursor_open(crn_cursor *cursor, char bracket, const char *what)
{
    if (crn_cursor_peek(cursor) != (unsigned char)bracket)
        return expected(cursor, what);
    cursor->offset++;
    return CAIRN_OK;
}

cairn_status crn_cursor_step(crn_cursor *cursor, char close, bool *first, bool *more)
{
    int next = crn_cursor_peek(cursor);
    *more = next != close;
    if (!*more) {
        cursor->offset++;
        return CAIRN_OK;
    }
    if (!*first) {
        if (next != ',')
            return expected(cursor, close == '}' ? "',' or '}'" : "',' or ']'");
        cursor->offset++;
    }
    *first = false;
    return CAIRN_OK;
}

cairn_status crn_cursor_key(crn_cursor *cursor, json_t **key)
{
    *key = NULL;
    if (crn_cursor_peek(cursor) != '"')
        return expected(cursor, "a key in quotes");
    CRN_TRY(crn_cursor_value(cursor, 0, key));
    if (crn_cursor_peek(cursor) == ':') {
        cursor->offset++;
        return CAIRN_OK;
    }
    json_decref(*key);
    *key = NULL;
    return expected(cursor, "':'");
}

cairn_status crn_cursor_end(crn_cursor *cursor)
{
    return crn_cursor_peek(cursor) < 0 ? CAIRN_OK : fail_here(cursor, "text after the end of the object");
}
