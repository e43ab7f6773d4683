#include "base/unit_text.h"

#include <inttypes.h>
#include <stdio.h>

typedef struct scale {
    const char *unit;
    double factor;
} scale;

/* Three digits, in the largest unit of which there is one at least, once rounded. */
static const char *format(int64_t value, const scale *scales, size_t count, char *out, size_t size)
{
    size_t i = 0;
    if (value < 0) {
        snprintf(out, size, "-");
        return out;
    }
    while (i + 1 < count && (double)value >= scales[i + 1].factor - scales[i].factor / 2)
        i++;
    double shown = (double)value / scales[i].factor;
    int digits = i == 0 || shown >= 99.95 ? 0 : shown >= 9.995 ? 1 : 2;
    snprintf(out, size, "%.*f %s", digits, shown, scales[i].unit);
    return out;
}

const char *crn_format_bytes(int64_t bytes, char *out, size_t size)
{
    static const scale scales[] = {
        {"B", 1}, {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};
    return format(bytes, scales, sizeof(scales) / sizeof(scales[0]), out, size);
}

const char *crn_format_budget(int64_t bytes, char *out, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    static const int64_t powers[] = {1, 10, 100};
    int unit = 0, digits = 3;
    int64_t factor = 1, shown = 1000;
    if (bytes < 1024)
        return crn_format_bytes(bytes, out, size);
    for (; unit < 4 && bytes / factor >= 1023; unit++)
        factor *= 1024;
    while (shown >= 1000 && digits > 0) { /* three digits, or four of what is nearly the next unit */
        int64_t power = powers[--digits];
        shown = bytes / factor * power + (bytes % factor * power + factor - 1) / factor;
    }
    if (digits == 0)
        snprintf(out, size, "%" PRId64 " %s", shown, units[unit]);
    else
        snprintf(out, size, "%" PRId64 ".%0*" PRId64 " %s", shown / powers[digits], digits, shown % powers[digits],
                 units[unit]);
    return out;
}

const char *crn_format_ns(int64_t ns, char *out, size_t size)
{
    static const scale scales[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
    return format(ns, scales, sizeof(scales) / sizeof(scales[0]), out, size);
}

const char *crn_format_bytes_exactly(int64_t bytes, char *out, size_t size)
{
    char about[32];
    if (bytes < 1024)
        snprintf(out, size, "%" PRId64 " bytes", bytes);
    else
        snprintf(out, size, "%s (%" PRId64 " bytes)", crn_format_budget(bytes, about, sizeof(about)), bytes);
    return out;
}
