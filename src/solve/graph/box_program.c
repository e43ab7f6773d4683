#include "solve/graph/box_program.h"

#include <math.h>
#include <string.h>

/*
 * Scaled costs sum to less than 2^TOTAL_BITS. No price of a row of 1 and -1 is larger, so a million of them fit 63 bits.
 * A row of sizes may cost PRICE_MAX times as much. Slopes saturate there: one that is too low only weakens the bound.
 */
enum { TOTAL_BITS = 42, ENTRIES_MAX = 1 << 20, ENTRIES_OF_ROW = 2, ENTRIES_OF_COLUMN = 2, PRICE_MAX = 1024 };

/* Covers raise a bound by some hundredths. They are added only to prices that prove at least this share of the goal. */
static const double hope_of_covers = 0.8;

__extension__ typedef __int128 wide_sum;

bool crn_box_program_new(crn_arena *arena, int32_t entry_max, int64_t total_cost, crn_box_program *p)
{
    entry_max = (int32_t)crn_min(entry_max, ENTRIES_MAX);
    size_t entries = (size_t)entry_max, rows = entries / ENTRIES_OF_ROW + 1, columns = entries / ENTRIES_OF_COLUMN + 1;
    *p = (crn_box_program){.entry_max = entry_max, .row_max = (int32_t)rows - 1, .column_max = (int32_t)columns - 1};
    while (p->shift < 20 && total_cost < (INT64_C(1) << (TOTAL_BITS - 1)) >> p->shift)
        p->shift++;
    while (p->shift > -30 && total_cost >> -crn_min(p->shift, 0) >= INT64_C(1) << TOTAL_BITS)
        p->shift--;
    p->total = ldexp((double)(total_cost > 0 ? total_cost : 1), p->shift);
    double **of_row[] = {&p->y, &p->y_next, &p->y_best, &p->y_began, &p->y_step, &p->y_start},
           **of_column[] = {&p->x,      &p->x_next, &p->x_ahead,    &p->x_began,
                            &p->x_step, &p->slope,  &p->slope_next, &p->slope_began};
    bool fits = (p->row_begin = crn_arena_alloc(arena, rows, sizeof(int32_t))) &&
                (p->column_begin = crn_arena_alloc(arena, columns + 1, sizeof(int32_t))) &&
                (p->row_name = crn_arena_alloc(arena, rows, sizeof(uint64_t))) &&
                (p->column_name = crn_arena_alloc(arena, columns, sizeof(uint64_t))) &&
                crn_box_memory_new(arena, entry_max, &p->memory) &&
                (p->column = crn_arena_alloc(arena, entries, sizeof(int32_t))) &&
                (p->row = crn_arena_alloc(arena, entries, sizeof(int32_t))) &&
                (p->value = crn_arena_alloc(arena, entries, sizeof(double))) &&
                (p->turned = crn_arena_alloc(arena, entries, sizeof(double))) &&
                (p->weight = crn_arena_alloc(arena, entries, sizeof(int64_t))) &&
                (p->cost = crn_arena_alloc(arena, columns, sizeof(int64_t))) &&
                (p->bytes = crn_arena_alloc(arena, columns, sizeof(int64_t))) &&
                (p->capacity = crn_arena_alloc(arena, rows, sizeof(int64_t))) &&
                (p->right = crn_arena_alloc(arena, rows, sizeof(int32_t)));
    for (size_t i = 0; fits && i < sizeof(of_row) / sizeof(of_row[0]); i++)
        fits = (*of_row[i] = crn_arena_alloc(arena, rows, sizeof(double)));
    for (size_t i = 0; fits && i < sizeof(of_column) / sizeof(of_column[0]); i++)
        fits = (*of_column[i] = crn_arena_alloc(arena, columns, sizeof(double)));
    return fits;
}

void crn_box_begin(crn_box_program *p)
{
    p->row_count = p->column_count = p->entry_count = 0;
    p->row_begin[0] = 0;
    p->is_full = false;
    p->name = 0;
}

static int64_t scaled(const crn_box_program *p, int64_t cost)
{
    return p->shift >= 0 ? cost << p->shift : cost >> -p->shift;
}

int32_t crn_box_column(crn_box_program *p, int64_t cost, int64_t bytes)
{
    if (p->column_count == p->column_max) {
        p->is_full = true;
        return 0;
    }
    p->cost[p->column_count] = scaled(p, cost);
    p->bytes[p->column_count] = bytes;
    p->column_name[p->column_count] = p->name;
    p->name = 0;
    return p->column_count++;
}

void crn_box_entry(crn_box_program *p, int32_t column, int sign)
{
    if (p->entry_count == p->entry_max) {
        p->is_full = true;
        return;
    }
    p->column[p->entry_count] = column;
    p->value[p->entry_count++] = sign;
}

static void end_row(crn_box_program *p, int64_t capacity, int32_t right)
{
    if (p->row_count == p->row_max) {
        p->is_full = true;
        return;
    }
    p->capacity[p->row_count] = capacity;
    p->row_name[p->row_count] = p->name;
    p->y_start[p->row_count] = 0;
    p->name = 0;
    p->right[p->row_count++] = right;
    p->row_begin[p->row_count] = p->entry_count;
}

void crn_box_row(crn_box_program *p, int32_t right)
{
    end_row(p, -1, right);
}

void crn_box_start_at(crn_box_program *p, int64_t cost)
{
    if (p->row_count > 0)
        p->y_start[p->row_count - 1] = (double)scaled(p, cost) / p->total;
}

void crn_box_sizes(crn_box_program *p, int64_t capacity)
{
    for (int32_t e = p->row_begin[p->row_count]; e < p->entry_count; e++)
        p->weight[e] = p->bytes[p->column[e]];
    crn_box_weights(p, capacity);
}

void crn_box_weights(crn_box_program *p, int64_t capacity)
{
    double unit = 1 / (double)crn_max(1, capacity);
    for (int32_t e = p->row_begin[p->row_count]; e < p->entry_count; e++)
        p->value[e] = (double)p->weight[e] * unit;
    end_row(p, capacity, capacity > 0 ? 1 : 0);
}

/* ---- what prices prove ---- */

/* Of a row, in the unit of scaled costs: rounded, so that sizes within the capacity never pay more than what it takes. */
static wide_sum price_row(crn_box_program *p, int32_t r, int64_t *slope)
{
    double price = p->y_best[r] < PRICE_MAX ? p->y_best[r] : PRICE_MAX;
    if (p->capacity[r] < 0) {
        int64_t whole = (int64_t)((price < 1 ? price : 1) * p->total);
        for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
            slope[p->column[e]] = crn_add_saturating(slope[p->column[e]], p->value[e] > 0 ? whole : -whole);
        return (wide_sum)whole * p->right[r];
    }
    double of_byte = price * p->total / (double)crn_max(1, p->capacity[r]);
    for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
        slope[p->column[e]] =
            crn_add_saturating(slope[p->column[e]], (int64_t)floor(of_byte * (double)p->weight[e] * (1 - 0x1p-40)));
    return (wide_sum)ceil(of_byte * (double)p->capacity[r] * (1 + 0x1p-40));
}

static int64_t prove(crn_box_program *p)
{
    int64_t *slope = (int64_t *)(void *)p->slope;
    wide_sum bound = 0;
    memcpy(slope, p->cost, (size_t)p->column_count * sizeof(*slope));
    for (int32_t r = 0; r < p->row_count; r++)
        bound -= price_row(p, r, slope);
    for (int32_t j = 0; j < p->column_count; j++)
        bound += slope[j] < 0 ? slope[j] : 0;
    if (bound <= 0)
        return 0;
    if (p->shift < 0)
        return (int64_t)(bound << -p->shift);
    return (int64_t)((bound + (((wide_sum)1 << p->shift) - 1)) >> p->shift);
}

int64_t crn_box_bound(crn_box_program *p, crn_box_limit *limit)
{
    if (p->is_full || p->row_count == 0 || p->column_count == 0)
        return 0;
    int32_t rows = p->row_count;
    double near = hope_of_covers * ldexp((double)limit->enough, p->shift) / p->total;
    crn_box_recall_rows(p);
    crn_box_prices_begin(p);
    for (int round = 0; crn_box_prices_find(p, limit) && p->best >= near && round < limit->rounds; round++)
        if (!crn_box_covers_add(p, rows))
            break;
    int64_t bound = prove(p);
    if (limit->remembers && bound > limit->enough)
        crn_box_remember(p, rows);
    return bound;
}
