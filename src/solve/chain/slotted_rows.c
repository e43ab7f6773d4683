#include "solve/chain/slotted_rows.h"

#include <stdbool.h>

#include "base/vector.h"

enum { LINE = CRN_ROW_LINE, BLOCK = 4 * LINE };

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Four infinite values, or three and a time, can be added without wrapping. */
#define VALUE uint32_t
#define INFINITE ((uint32_t)1 << 30)
#define NAME(word) word##_32
#include "solve/chain/slotted_rows_width.h"
#undef VALUE
#undef INFINITE
#undef NAME

#define VALUE int64_t
#define INFINITE CRN_ROW_INFINITE
#define NAME(word) word##_64
#include "solve/chain/slotted_rows_width.h"
#undef VALUE
#undef INFINITE
#undef NAME

const crn_row_width crn_rows_of_32_bits = {sizeof(uint32_t), (int64_t)1 << 30, clear_32, relax_32, finish_32, value_32};
const crn_row_width crn_rows_of_64_bits = {sizeof(int64_t), CRN_ROW_INFINITE, clear_64, relax_64, finish_64, value_64};
