/* Arithmetic on sizes and times that reports overflow instead of wrapping. Each returns true when the result fits. */
#ifndef CRN_CHECKED_H
#define CRN_CHECKED_H

#include <cairn/base.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** 128 bits, for products on the way to a quotient. */
__extension__ typedef unsigned __int128 crn_wide;

static inline bool crn_add(int64_t a, int64_t b, int64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool crn_sub(int64_t a, int64_t b, int64_t *difference)
{
    return !__builtin_sub_overflow(a, b, difference);
}

static inline bool crn_mul(int64_t a, int64_t b, int64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

static inline bool crn_mul_size(size_t a, size_t b, size_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* Of numbers that are not negative, for estimates: INT64_MAX stands for all that is too large. */
static inline int64_t crn_add_saturating(int64_t a, int64_t b)
{
    int64_t sum;
    return crn_add(a, b, &sum) ? sum : INT64_MAX;
}

static inline int64_t crn_mul_saturating(int64_t a, int64_t b)
{
    int64_t product;
    return crn_mul(a, b, &product) ? product : INT64_MAX;
}

static inline int64_t crn_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t crn_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/** A budget to compare with; CAIRN_NONE = no size passes it. */
static inline int64_t crn_limit_of(int64_t budget_bytes)
{
    return budget_bytes == CAIRN_NONE ? INT64_MAX : budget_bytes;
}

#endif
