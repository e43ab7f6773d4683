/*
 * Rows that integer variables satisfy and fractions may violate, for a box program. They are added where the last
 * variables violate them.
 */
#include <string.h>

#include "solve/graph/box_program.h"

enum { COVER_COLUMNS_MAX = 1024, UNITS_MAX = 32 };

/* By how much a row must be violated. */
static const double slack = 0.003;

static void price_new_row(crn_box_program *p)
{
    p->y_next[p->row_count - 1] = p->y_best[p->row_count - 1] = 0;
}

/* ---- covers ---- */

/* Whether a lacks less to 1 for its bytes than b: such columns pass the capacity soonest. */
static bool is_fuller(const crn_box_program *p, int32_t a, int32_t b)
{
    return (1 - p->x_next[a]) * (double)p->bytes[b] < (1 - p->x_next[b]) * (double)p->bytes[a];
}

/* Takes columns of a row until they pass its capacity: how many, at the front of `chosen`; 0 = all of them fit. */
static int32_t gather(const crn_box_program *p, int32_t r, int32_t *chosen, int64_t *over)
{
    int32_t begin = p->row_begin[r], count = p->row_begin[r + 1] - begin, taken = 0;
    *over = -p->capacity[r];
    memcpy(chosen, p->column + begin, (size_t)count * sizeof(*chosen));
    while (taken < count && *over <= 0) {
        int32_t best = taken;
        for (int32_t i = taken + 1; i < count; i++)
            best = is_fuller(p, chosen[i], chosen[best]) ? i : best;
        int32_t column = chosen[best];
        chosen[best] = chosen[taken];
        chosen[taken++] = column;
        *over += p->bytes[column];
    }
    return *over > 0 ? taken : 0;
}

/* Leaves out what is not needed to pass the capacity, those first that lack most; returns how many are left. */
static int32_t make_minimal(const crn_box_program *p, int32_t *chosen, int32_t count, int64_t over)
{
    for (int32_t i = count - 1; i >= 0; i--)
        if (p->bytes[chosen[i]] < over) {
            over -= p->bytes[chosen[i]];
            memmove(chosen + i, chosen + i + 1, (size_t)(count - i - 1) * sizeof(*chosen));
            count--;
        }
    return count;
}

/* Adds the columns of the row that are no smaller than any of these; returns how many there are with them. */
static int32_t extend(const crn_box_program *p, int32_t r, int32_t *chosen, int32_t count)
{
    int64_t largest = 0;
    int32_t all = 0;
    for (int32_t i = 0; i < count; i++)
        largest = crn_max(largest, p->bytes[chosen[i]]);
    for (int32_t i = 0; i < count; i++)
        if (p->bytes[chosen[i]] < largest)
            chosen[all++] = chosen[i];
    for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
        if (p->bytes[p->column[e]] >= largest)
            chosen[all++] = p->column[e];
    return all;
}

/*
 * Columns of a row of sizes that together pass its capacity are not all 1, so that their sum is at most their number less
 * one; and so is the sum with others that are no smaller than any of them.
 */
static bool add_cover(crn_box_program *p, int32_t r, int32_t *chosen)
{
    int64_t over;
    int32_t count = gather(p, r, chosen, &over);
    double sum = 0;
    if (count == 0)
        return false;
    count = make_minimal(p, chosen, count, over);
    int32_t all = extend(p, r, chosen, count);
    for (int32_t i = 0; i < all; i++)
        sum += p->x_next[chosen[i]];
    if (sum <= count - 1 + slack || p->entry_count + all > p->entry_max || p->row_count == p->row_max)
        return false;
    for (int32_t i = 0; i < all; i++)
        crn_box_entry(p, chosen[i], 1);
    crn_box_row(p, count - 1);
    price_new_row(p);
    return true;
}

/* ---- rounding ---- */

/* What a column of that size weighs where sizes are counted in units, of which the capacity leaves `rest` bytes. */
static int64_t rounded(int64_t bytes, int64_t unit, int64_t rest)
{
    return bytes / unit * (unit - rest) + crn_max(0, bytes % unit - rest);
}

/* By how much the last variables pass a row of rounded sizes, as a share of its capacity; below 0 where the row says nothing. */
static double passed_by(const crn_box_program *p, int32_t r, int64_t unit)
{
    int64_t rest = p->capacity[r] % unit, capacity = rounded(p->capacity[r], unit, rest);
    double sum = 0;
    if (rest == 0 || capacity <= 0)
        return -1;
    for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
        sum += p->x_next[p->column[e]] * (double)rounded(p->weight[e], unit, rest);
    return sum / (double)capacity - 1;
}

/* The size of a column that is neither 0 nor 1 by which the row is violated most; 0 = by none. */
static int64_t find_unit(const crn_box_program *p, int32_t r)
{
    double most = slack;
    int64_t best = 0, last = 0;
    int tries = 0;
    for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1] && tries < UNITS_MAX; e++) {
        double x = p->x_next[p->column[e]], passed;
        if (x < slack || x > 1 - slack || p->weight[e] == last || p->weight[e] <= 0)
            continue;
        last = p->weight[e];
        tries++;
        passed = passed_by(p, r, last);
        if (passed > most) {
            most = passed;
            best = last;
        }
    }
    return best;
}

/*
 * Mixed integer rounding (Nemhauser and Wolsey 1990). Let the capacity be q u + rest, and the size of a column k u + b,
 * for a unit u. Integer variables x satisfy  sum of (k (u - rest) + max(0, b - rest)) x <= q (u - rest).
 */
static bool add_rounded(crn_box_program *p, int32_t r)
{
    int32_t begin = p->row_begin[r], count = p->row_begin[r + 1] - begin;
    int64_t unit = find_unit(p, r);
    if (unit == 0 || p->entry_count + count > p->entry_max || p->row_count == p->row_max)
        return false;
    int64_t rest = p->capacity[r] % unit;
    for (int32_t e = begin; e < begin + count; e++) {
        int64_t weight = rounded(p->weight[e], unit, rest);
        if (weight == 0)
            continue;
        p->weight[p->entry_count] = weight;
        crn_box_entry(p, p->column[e], 1);
    }
    crn_box_weights(p, rounded(p->capacity[r], unit, rest));
    price_new_row(p);
    return true;
}

static bool add_rows(crn_box_program *p, int32_t r)
{
    bool cover = add_cover(p, r, p->row); /* the entries by columns are made anew */
    return add_rounded(p, r) || cover;
}

bool crn_box_covers_add(crn_box_program *p, int32_t rows)
{
    bool any = false;
    for (int32_t r = 0; r < rows; r++)
        if (p->capacity[r] >= 0 && p->row_begin[r + 1] - p->row_begin[r] <= COVER_COLUMNS_MAX)
            any = add_rows(p, r) || any;
    return any;
}
