/*
 * Rows of a dynamic program over m, and the one operation on them: the minimum with the sum of two others.
 *
 * A row is a function of m = 0, 1, ... that never increases: infinite below low, then values, constant above high. Values
 * are times in ns, in 32 bits where that is enough, which is twice as fast, else in 64; what does not fit counts as
 * infinite. Both widths are one text, slotted_rows_width.h.
 */
#ifndef CRN_SLOTTED_ROWS_H
#define CRN_SLOTTED_ROWS_H

#include <stddef.h>
#include <stdint.h>

/** More than any value of either width; three of them can be added. */
#define CRN_ROW_INFINITE ((int64_t)1 << 61)

/**
 * Rows are aligned to so many values, and so many less one are there before low and after high: with few slots most of a
 * table is that.
 */
enum { CRN_ROW_LINE = 8 };

/**
 * values[origin + m] for m = low..high; high < low: infinite wherever it is asked. origin is a multiple of the line and
 * may be "negative": sums of size_t wrap, and the sum with m does not.
 */
typedef struct crn_row {
    size_t origin;
    int64_t floor_ns; /* the constant above high; infinite until the row is finished */
    int32_t low, high;
} crn_row;

/** Rows of one width. values: the memory of all rows, aligned to CRN_ROW_LINE values. */
typedef struct crn_row_width {
    size_t value_bytes;
    int64_t infinite;
    /** Begins a row: more than most_ns everywhere, the same at the beginning and the end of the changes. */
    void (*clear)(void *values, const crn_row *row, int64_t most_ns);
    /** to(m) = min(to(m), ns + x(m - kept) + y(m)) for all m >= from. ns >= 0. */
    void (*relax)(void *values, const crn_row *to, const crn_row *x, int32_t kept, const crn_row *y, int64_t ns,
                  int32_t from);
    /** Ends the changes to a row, which is infinite from now on where it is more than most_ns; others may then read it. */
    void (*finish)(void *values, crn_row *row, int64_t most_ns);
    int64_t (*value)(const void *values, const crn_row *row, int32_t m);
} crn_row_width;

extern const crn_row_width crn_rows_of_32_bits, crn_rows_of_64_bits;

#endif
