/*
 * Sizes, rates and durations as people write them: "12000", "8GiB", "1.5GB/s", "500ms".
 *
 * A number is digits, with at most one point between digits; what a unit makes of it is computed exactly in integers
 * and rounded down. The value of 0.d1 d2 ... dk times a unit is found from the last digit to the first by
 * x := floor((d * unit + x) / 10), which is exact because floors of nested quotients nest.
 */
#include <cairn/solve.h>

#include <ctype.h>
#include <string.h>
#include <strings.h>

#include "base/checked.h"
#include "base/failure.h"
#include "solve/options.h"

typedef struct unit {
    const char *name;
    int64_t factor;
} unit;

/* A kind of quantity: its units, and its name in messages. */
typedef struct kind {
    const unit *units;
    const char *suffix;    /* after the unit */
    const char *suggested; /* the unit, where there is none; NULL = an integer needs none */
    const char *allowed;
} kind;

static const unit size_units[] = {
    {"B", 1},      {"KB", 1000},     {"MB", 1000000},     {"GB", 1000000000},     {"TB", 1000000000000},
    {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}, {"TiB", 1099511627776}, {NULL, 0},
};

static const unit duration_units[] = {
    {"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}, {"m", 60000000000}, {NULL, 0},
};

/* A number that was split: its digits before and after the point, and what follows it. */
typedef struct number {
    const char *whole, *fraction;
    size_t whole_count, fraction_count;
    const char *rest;
} number;

static size_t digit_count(const char *text)
{
    return strspn(text, "0123456789");
}

static bool split_number(const char *text, number *out)
{
    *out = (number){.whole = text, .whole_count = digit_count(text)};
    out->rest = text + out->whole_count;
    if (out->whole_count == 0)
        return false;
    if (*out->rest != '.')
        return true;
    out->fraction = out->rest + 1;
    out->fraction_count = digit_count(out->fraction);
    out->rest = out->fraction + out->fraction_count;
    return out->fraction_count > 0;
}

static const unit *find_unit(const unit *units, const char *name, size_t length)
{
    for (; units->name; units++)
        if (strlen(units->name) == length && memcmp(units->name, name, length) == 0)
            return units;
    return NULL;
}

static bool scale(const number *given, int64_t factor, int64_t *value)
{
    int64_t whole = 0, part = 0;
    for (size_t i = 0; i < given->whole_count; i++)
        if (!crn_mul(whole, 10, &whole) || !crn_add(whole, given->whole[i] - '0', &whole))
            return false;
    for (size_t i = given->fraction_count; i-- > 0;)
        part = ((given->fraction[i] - '0') * factor + part) / 10;
    return crn_mul(whole, factor, &whole) && crn_add(whole, part, value);
}

/* What follows a unit that was meant: the suffix, or nothing where it was forgotten. */
static bool may_end(const char *rest, const char *suffix)
{
    return *rest == '\0' || strcmp(rest, suffix) == 0;
}

/* "Gb", which everywhere else are bits. */
static bool is_bits(const char *rest, const char *suffix)
{
    return *rest && strchr("KMGT", *rest) && rest[1] == 'b' && may_end(rest + 2, suffix);
}

/*
 * The unit that was probably meant: by its letters without their case, without spaces before it, without the suffix, or
 * by a longer name.
 */
static const unit *meant_unit(const unit *units, const char *rest, const char *suffix)
{
    rest += strspn(rest, " ");
    if (units == duration_units && (strncmp(rest, "min", 3) == 0 || strncmp(rest, "sec", 3) == 0))
        return find_unit(units, rest, 1);
    for (; units->name; units++) {
        size_t length = strlen(units->name);
        if (strncasecmp(rest, units->name, length) == 0 && may_end(rest + length, suffix))
            return units;
    }
    return NULL;
}

/* "M" or "m" of 10^6 or 2^20: a prefix without its unit. */
static bool is_prefix(const char *rest, const char *suffix)
{
    return *rest && strchr("KMGTkmgt", *rest) && may_end(rest + 1, suffix);
}

static cairn_status refuse(const char *text, const kind *what, cairn_error *error)
{
    number given = {.fraction_count = 0};
    bool is_number = text && split_number(text, &given), is_size = what->units == size_units;
    const char *suffix = what->suffix, *allowed = what->allowed;
    const unit *meant = is_number ? meant_unit(what->units, given.rest, suffix) : NULL;
    if (is_number && is_size && is_prefix(given.rest, suffix)) {
        int length = (int)(given.rest - text), prefix = toupper((unsigned char)*given.rest);
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not %s; did you mean %.*s%cB%s or %.*s%ciB%s?", text,
                        allowed, length, text, prefix, suffix, length, text, prefix, suffix);
    }
    if (is_number && is_size && is_bits(given.rest, suffix))
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not %s; %cb are bits, of which a byte has 8", text, allowed,
                        *given.rest);
    if (is_number && is_size && strcmp(given.rest, "%") == 0)
        return crn_fail(error, CAIRN_BAD_INPUT,
                        "\"%s\" is not %s; only the budget of cairn.torch may be a share of the device's memory", text,
                        allowed);
    const char *missing = what->suggested ? what->suggested : given.fraction_count == 0 ? suffix : "";
    if (is_number && *missing && *given.rest == '\0')
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not %s; did you mean %s%s?", text, allowed, text, missing);
    if (!meant)
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not %s", text ? text : "", allowed);
    return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not %s; did you mean %.*s%s%s?", text, allowed,
                    (int)(given.rest - text), text, meant->name, suffix);
}

/* A number and a unit of the table, or an integer where it needs none. */
static cairn_status parse(const char *text, const kind *what, int64_t *value, cairn_error *error)
{
    number given;
    size_t length = 0, suffix_length = strlen(what->suffix);
    int64_t factor = 1;
    bool valid = text && split_number(text, &given);
    if (valid) {
        length = strlen(given.rest);
        valid = length >= suffix_length && strcmp(given.rest + length - suffix_length, what->suffix) == 0;
    }
    if (valid && length > suffix_length) {
        const unit *found = find_unit(what->units, given.rest, length - suffix_length);
        valid = found != NULL;
        factor = found ? found->factor : 1;
    } else if (valid) {
        valid = !what->suggested && given.fraction_count == 0;
    }
    if (!valid)
        return refuse(text, what, error);
    if (!scale(&given, factor, value))
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" passes 2^63 - 1", text);
    return CAIRN_OK;
}

cairn_status cairn_parse_size(const char *text, int64_t *bytes, cairn_error *error)
{
    static const kind size = {size_units, "", NULL,
                              "a size such as 8GiB: an integer of bytes, or a number and, without a space, B, KB, MB, "
                              "GB, TB, KiB, MiB, GiB or TiB"};
    return parse(text, &size, bytes, error);
}

cairn_status cairn_parse_rate(const char *text, int64_t *bytes_per_s, cairn_error *error)
{
    static const kind rate = {size_units, "/s", NULL,
                              "a rate such as 12GB/s: an integer, or a number and, without a space, B, KB, MB, GB, "
                              "TB, KiB, MiB, GiB or TiB, and then /s"};
    return parse(text, &rate, bytes_per_s, error);
}

cairn_status cairn_parse_duration(const char *text, int64_t *ns, cairn_error *error)
{
    static const kind duration = {duration_units, "", "s",
                                  "a duration such as 500ms: a number and, without a space, ns, us, ms, s or m"};
    return parse(text, &duration, ns, error);
}

cairn_status crn_parse_latency(const char *text, int64_t *ns, cairn_error *error)
{
    static const kind latency = {duration_units, "", "us",
                                 "a duration such as 10us: a number and, without a space, ns, us, ms, s or m"};
    return parse(text, &latency, ns, error);
}
