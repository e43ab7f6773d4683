#include "io/json_path.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "io/json_cursor.h"

/* ---- paths ---- */

static void render(const crn_path *path, char *out, size_t size)
{
    out[0] = '\0';
    if (!path)
        return;
    render(path->parent, out, size);
    size_t used = strlen(out);
    char name[64];
    if (!path->field)
        snprintf(out + used, size - used, "[%" PRId64 "]", path->index);
    else
        snprintf(out + used, size - used, "%s%s", used > 0 ? "." : "", crn_printable(path->field, name, sizeof(name)));
}

/* The index of the stage (from 1), node or operation (from 0) that a path leads into. */
static int64_t index_in(const crn_path *path)
{
    for (; path; path = path->parent)
        if (!path->field && path->parent && !path->parent->parent)
            return path->index + (strcmp(path->parent->field, "stages") == 0);
    return CAIRN_NONE;
}

cairn_status crn_path_fail(cairn_error *error, cairn_status status, const crn_path *path, const char *format, ...)
{
    char where[CAIRN_ERROR_PATH_MAX], message[CAIRN_ERROR_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    render(path, where, sizeof(where));
    return crn_fail_at(error, status, index_in(path), where, "%s", message);
}

/* ---- positions ---- */

/* Steps over a value that was parsed before, by its brackets and quotes. */
static void skip_value(crn_cursor *cursor)
{
    int depth = 0;
    bool quoted = false;
    crn_cursor_peek(cursor);
    for (; cursor->offset < cursor->length; cursor->offset++) {
        char c = cursor->text[cursor->offset];
        if (quoted) {
            if (c == '\\')
                cursor->offset++;
            else if (c == '"')
                quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']' || c == ',') {
            if (depth == 0)
                return;
            depth -= c != ',';
        }
    }
}

/* From an object to the value of one of its members; the cursor stays where it was when there is none. */
static bool enter_member(crn_cursor *cursor, const char *name, size_t length)
{
    crn_cursor inside = *cursor;
    bool first = true, more;
    json_t *key;
    if (crn_cursor_open(&inside, '{', "") != CAIRN_OK)
        return false;
    while (crn_cursor_step(&inside, '}', &first, &more) == CAIRN_OK && more &&
           crn_cursor_key(&inside, &key) == CAIRN_OK) {
        bool found = json_string_length(key) == length && memcmp(json_string_value(key), name, length) == 0;
        json_decref(key);
        if (found) {
            *cursor = inside;
            return true;
        }
        skip_value(&inside);
    }
    return false;
}

static bool enter_element(crn_cursor *cursor, long long index)
{
    crn_cursor inside = *cursor;
    bool first = true, more;
    if (crn_cursor_open(&inside, '[', "") != CAIRN_OK)
        return false;
    while (crn_cursor_step(&inside, ']', &first, &more) == CAIRN_OK && more) {
        if (index-- == 0) {
            *cursor = inside;
            return true;
        }
        skip_value(&inside);
    }
    return false;
}

/* Follows one step of a path, "name" or "[index]"; gives what follows it. */
static const char *follow(crn_cursor *cursor, const char *step, bool *found)
{
    if (*step == '[') {
        char *end;
        *found = enter_element(cursor, strtoll(step + 1, &end, 10));
        return *end == ']' ? end + 1 : end;
    }
    step += *step == '.';
    size_t length = strcspn(step, ".[");
    *found = length > 0 && enter_member(cursor, step, length);
    return step + length;
}

static void take_out(char *text, size_t length)
{
    memmove(text, text + length, strlen(text + length) + 1);
}

void crn_error_locate(cairn_error *error, const char *text, size_t length)
{
    static const char only_option[] = ".options[0]";
    crn_cursor cursor;
    bool found = true;
    if (!error || error->offset != CAIRN_NONE || (error->path[0] == '\0' && error->status != CAIRN_BAD_INPUT))
        return;
    crn_cursor_init(&cursor, text, length, NULL);
    for (char *step = error->path; *step && found;) {
        const char *next = follow(&cursor, step, &found);
        if (!found && strncmp(step, only_option, strlen(only_option)) == 0) {
            take_out(step, strlen(only_option));
            found = true;
        } else {
            step = error->path + (next - error->path);
        }
    }
    crn_cursor_peek(&cursor);
    crn_error_place(error, text, cursor.offset);
}
