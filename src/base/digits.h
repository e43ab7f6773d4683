/* The digits of an integer: long files are mostly numbers, and a format takes several times as long. */
#ifndef CRN_DIGITS_H
#define CRN_DIGITS_H

#include <stdint.h>

enum { CRN_DIGITS_MAX = 20 }; /* with the sign */

/** Writes value so that its last digit stands before end; gives where it begins. */
static inline char *crn_digits_before(char *end, int64_t value)
{
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    do
        *--end = (char)('0' + rest % 10);
    while ((rest /= 10) > 0);
    if (value < 0)
        *--end = '-';
    return end;
}

#endif
