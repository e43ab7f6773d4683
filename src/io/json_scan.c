#include "io/json_scan.h"

#include <stdint.h>
#include <string.h>

#include "base/utf8.h"

const char crn_json_too_deep[] = "nested more than 2048 levels deep";

/* The objects and lists that are open: bit i is set where level i is an object. */
typedef struct levels {
    uint8_t is_object[CRN_JSON_DEPTH_MAX / 8];
    size_t depth;
} levels;

static bool fail(crn_scan *scan, const char *fault)
{
    scan->fault = scan->offset < scan->length ? fault : "the text ends in the middle of a value";
    return false;
}

/* The byte at hand; -1 at the end. */
static int here(const crn_scan *scan)
{
    return scan->offset < scan->length ? (unsigned char)scan->text[scan->offset] : -1;
}

static int after_space(crn_scan *scan)
{
    while (here(scan) == ' ' || here(scan) == '\n' || here(scan) == '\t' || here(scan) == '\r')
        scan->offset++;
    return here(scan);
}

/* ---- values without levels ---- */

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

static bool scan_digits(crn_scan *scan)
{
    if (!is_digit(here(scan)))
        return fail(scan, "a digit is expected");
    while (is_digit(here(scan)))
        scan->offset++;
    return true;
}

static bool scan_number(crn_scan *scan)
{
    if (here(scan) == '-')
        scan->offset++;
    if (here(scan) == '0')
        scan->offset++;
    else if (!scan_digits(scan))
        return false;
    if (here(scan) == '.') {
        scan->offset++;
        if (!scan_digits(scan))
            return false;
    }
    if (here(scan) != 'e' && here(scan) != 'E')
        return true;
    scan->offset++;
    if (here(scan) == '+' || here(scan) == '-')
        scan->offset++;
    return scan_digits(scan);
}

static bool scan_escape(crn_scan *scan)
{
    scan->offset++;
    int c = here(scan);
    if (c < 0 || !strchr("\"\\/bfnrtu", c) || c == '\0')
        return fail(scan, "no escape sequence of JSON");
    scan->offset++;
    for (int i = 0; c == 'u' && i < 4; i++, scan->offset++)
        if (here(scan) <= 0 || !strchr("0123456789abcdefABCDEF", here(scan)))
            return fail(scan, "four hexadecimal digits are expected");
    return true;
}

static bool scan_string(crn_scan *scan)
{
    if (here(scan) != '"')
        return fail(scan, "a string is expected");
    scan->offset++;
    while (here(scan) != '"') {
        if (here(scan) < 0x20) /* the end of the text is less, too */
            return fail(scan, "a control character in a string");
        if (here(scan) == '\\') {
            if (!scan_escape(scan))
                return false;
            continue;
        }
        size_t bytes = crn_utf8_sequence(scan->text + scan->offset, scan->length - scan->offset);
        if (bytes == 0)
            return fail(scan, "a string is not UTF-8");
        scan->offset += bytes;
    }
    scan->offset++;
    return true;
}

static bool scan_word(crn_scan *scan, const char *word)
{
    for (; *word; word++, scan->offset++)
        if (here(scan) != (unsigned char)*word)
            return fail(scan, "a value is expected");
    return true;
}

static bool scan_plain(crn_scan *scan)
{
    switch (here(scan)) {
    case '"':
        return scan_string(scan);
    case 't':
        return scan_word(scan, "true");
    case 'f':
        return scan_word(scan, "false");
    case 'n':
        return scan_word(scan, "null");
    default:
        break;
    }
    if (here(scan) != '-' && !is_digit(here(scan)))
        return fail(scan, "a value is expected");
    return scan_number(scan);
}

/* ---- objects and lists ---- */

static bool in_object(const levels *open)
{
    size_t level = open->depth - 1;
    return open->is_object[level / 8] >> level % 8 & 1;
}

static bool scan_key(crn_scan *scan)
{
    after_space(scan);
    if (!scan_string(scan))
        return false;
    if (after_space(scan) != ':')
        return fail(scan, "':' is expected");
    scan->offset++;
    return true;
}

/* Takes a bracket; *is_empty: and the one that closes it. */
static bool open_level(crn_scan *scan, levels *open, bool *is_empty)
{
    bool is_object = here(scan) == '{';
    if (open->depth == CRN_JSON_DEPTH_MAX)
        return fail(scan, crn_json_too_deep);
    uint8_t bit = (uint8_t)(1U << open->depth % 8), *byte = &open->is_object[open->depth / 8];
    *byte = (uint8_t)(is_object ? *byte | bit : *byte & ~bit);
    open->depth++;
    scan->offset++;
    *is_empty = after_space(scan) == (is_object ? '}' : ']');
    return *is_empty || !is_object || scan_key(scan);
}

/* After a value, or before the bracket of what is empty: closes what ends here, up to the next value or the end of all. */
static bool close_levels(crn_scan *scan, levels *open)
{
    while (open->depth > 0) {
        int c = after_space(scan);
        if (c == ',') {
            scan->offset++;
            return !in_object(open) || scan_key(scan);
        }
        if (c != (in_object(open) ? '}' : ']'))
            return fail(scan, in_object(open) ? "',' or '}' is expected" : "',' or ']' is expected");
        scan->offset++;
        open->depth--;
    }
    return true;
}

bool crn_json_scan(crn_scan *scan)
{
    levels open = {.depth = 0};
    do {
        int c = after_space(scan);
        bool is_empty = true;
        if (c != '{' && c != '[') {
            if (!scan_plain(scan))
                return false;
        } else if (!open_level(scan, &open, &is_empty)) {
            return false;
        }
        if (is_empty && !close_levels(scan, &open))
            return false;
    } while (open.depth > 0);
    return true;
}
