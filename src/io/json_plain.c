#include "io/json_plain.h"

#include <string.h>

#include "base/utf8.h"

enum { DIGITS_MAX = 18 }; /* always below 2^63 */

static void skip_space(crn_plain *in)
{
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\n' || *in->at == '\t' || *in->at == '\r'))
        in->at++;
}

bool crn_plain_take(crn_plain *in, char byte)
{
    skip_space(in);
    if (in->at == in->end || *in->at != byte)
        return false;
    in->at++;
    return true;
}

bool crn_plain_step(crn_plain *in, char close, bool *first, bool *more)
{
    bool is_first = *first;
    *first = false;
    *more = !crn_plain_take(in, close);
    return !*more || is_first || crn_plain_take(in, ',');
}

bool crn_plain_integer(crn_plain *in, int64_t *value)
{
    skip_space(in);
    bool is_negative = in->at < in->end && *in->at == '-';
    in->at += is_negative;
    const char *begin = in->at;
    int64_t read = 0;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && in->at - begin < DIGITS_MAX)
        read = 10 * read + (*in->at++ - '0');
    bool is_padded = in->at - begin > 1 && *begin == '0';
    *value = is_negative ? -read : read;
    return in->at > begin && !is_padded;
}

bool crn_plain_text(crn_plain *in, const char **begin, size_t *length)
{
    if (!crn_plain_take(in, '"'))
        return false;
    *begin = in->at;
    for (size_t bytes = 1; in->at < in->end && bytes > 0; in->at += bytes) {
        unsigned char c = (unsigned char)*in->at;
        if (c == '"') {
            *length = (size_t)(in->at++ - *begin);
            return true;
        }
        bool is_ascii = c >= 0x20 && c < 0x80 && c != '\\';
        bytes = is_ascii ? 1 : c < 0x80 ? 0 : crn_utf8_sequence(in->at, (size_t)(in->end - in->at));
    }
    return false;
}

size_t crn_plain_count(crn_plain in)
{
    size_t commas = 0;
    skip_space(&in);
    if (in.at == in.end || *in.at == ']')
        return 0;
    for (; in.at < in.end && *in.at != ']'; in.at++)
        commas += *in.at == ',';
    return commas + 1;
}

static bool take_word(crn_plain *in, const char *word)
{
    size_t length = strlen(word);
    skip_space(in);
    if ((size_t)(in->end - in->at) < length || memcmp(in->at, word, length) != 0)
        return false;
    in->at += length;
    return true;
}

static bool read_bool(crn_plain *in, bool *value)
{
    *value = take_word(in, "true");
    return *value || take_word(in, "false");
}

static crn_plain_result read_text(crn_plain *in, const char **text, crn_arena *arena)
{
    const char *begin;
    size_t length;
    if (!crn_plain_text(in, &begin, &length))
        return CRN_PLAIN_ODD;
    char *copy = crn_arena_alloc(arena, length + 1, 1);
    if (!copy)
        return CRN_PLAIN_NO_MEMORY;
    memcpy(copy, begin, length);
    copy[length] = '\0';
    *text = copy;
    return CRN_PLAIN_TAKEN;
}

static crn_plain_result result_of(bool taken)
{
    return taken ? CRN_PLAIN_TAKEN : CRN_PLAIN_ODD;
}

static crn_plain_result read_value(crn_plain *in, const crn_field *field, crn_target *target)
{
    void *place = (char *)target->structure + field->offset;
    switch (field->type) {
    case CRN_FIELD_COUNT:
        return result_of(crn_plain_integer(in, place) && *(int64_t *)place >= 0);
    case CRN_FIELD_SIGNED:
        return result_of(crn_plain_integer(in, place));
    case CRN_FIELD_TEXT:
        return read_text(in, place, target->arena);
    case CRN_FIELD_BOOL:
        return result_of(read_bool(in, place));
    default:
        return CRN_PLAIN_ODD;
    }
}

/* Goes past a key in quotes if it is this one. */
static bool take_key(crn_plain *in, const char *name)
{
    const char *at = in->at + 1;
    while (at < in->end && *name && *at == *name) {
        at++;
        name++;
    }
    if (*name || at == in->end || *at != '"')
        return false;
    in->at = at + 1;
    return true;
}

/*
 * Goes past a key and the colon; count when it is that of no row. Programs write fields in one order, so the search
 * begins with the row that follows the one before.
 */
static size_t take_row(crn_plain *in, const crn_field *fields, size_t count, size_t next)
{
    skip_space(in);
    if (in->at == in->end || *in->at != '"')
        return count;
    for (size_t k = 0, i = next; k < count; k++, i++) {
        i = i < count ? i : 0;
        if (take_key(in, fields[i].name))
            return crn_plain_take(in, ':') ? i : count;
    }
    return count;
}

crn_plain_result crn_plain_fields(crn_plain *in, const crn_field *fields, size_t count, crn_target *target,
                                  crn_plain_list list, void *context)
{
    uint64_t met = 0;
    size_t row = SIZE_MAX; /* none yet: the next one is 0 */
    bool first = true, more;
    if (!crn_plain_take(in, '{'))
        return CRN_PLAIN_ODD;
    while (crn_plain_step(in, '}', &first, &more)) {
        if (!more)
            return result_of(crn_fields_check(fields, count, target->seen, NULL, NULL) == CAIRN_OK);
        row = take_row(in, fields, count, row + 1);
        if (row == count || (met >> row & 1))
            return CRN_PLAIN_ODD;
        met |= (uint64_t)1 << row;
        if ((fields[row].rules & CRN_NULLABLE) && take_word(in, "null"))
            continue;
        target->seen |= (uint64_t)1 << row;
        crn_plain_result result =
            fields[row].type == CRN_FIELD_LIST ? list(context, in) : read_value(in, &fields[row], target);
        if (result != CRN_PLAIN_TAKEN)
            return result;
    }
    return CRN_PLAIN_ODD;
}
