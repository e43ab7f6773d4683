#include "solve/graph/box_program.h"

#include <math.h>
#include <string.h>

/* Scaled costs sum to less than 2^TOTAL_BITS, and prices end there: a million of them fit 63 bits. */
enum {
    TOTAL_BITS = 42,
    ENTRIES_MAX = 1 << 20,
    CHUNK = 64,
    ENTRIES_OF_ROW = 2,
    ENTRIES_OF_COLUMN = 2,
    LAGGING_MAX = 3,
    HOPE_ITERATIONS = 192
};
enum { PRICE_MAX = 1024, COVER_COLUMNS_MAX = 1024 };

/* What the step in the prices is to that in the variables, at first, and how far it may go from there. */
static const double weight_first = 0.01, weight_range = 8;

/* Chunks that raise the bound by less than that share of all costs are not worth while. */
static const double worth = 2e-5;

/* Prices that prove less than that share of what is to be passed, after some iterations, will hardly pass it. */
static const double hope = 0.8;

/* The same before covers, which raise what is proved by some hundredths. */
static const double hope_of_covers = 0.95;

/* By how much a cover must be violated. */
static const double slack = 0.003;

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
    double **of_row[] = {&p->y, &p->y_sum, &p->y_best, &p->y_began, &p->y_step},
           **of_column[] = {&p->x, &p->x_ahead, &p->x_sum, &p->x_began, &p->x_step, &p->slope};
    bool fits = (p->row_begin = crn_arena_alloc(arena, rows, sizeof(int32_t))) &&
                (p->column_begin = crn_arena_alloc(arena, columns + 1, sizeof(int32_t))) &&
                (p->column = crn_arena_alloc(arena, entries, sizeof(int32_t))) &&
                (p->row = crn_arena_alloc(arena, entries, sizeof(int32_t))) &&
                (p->value = crn_arena_alloc(arena, entries, sizeof(double))) &&
                (p->turned = crn_arena_alloc(arena, entries, sizeof(double))) &&
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
}

int32_t crn_box_column(crn_box_program *p, int64_t cost, int64_t bytes)
{
    if (p->column_count == p->column_max) {
        p->is_full = true;
        return 0;
    }
    p->cost[p->column_count] = p->shift >= 0 ? cost << p->shift : cost >> -p->shift;
    p->bytes[p->column_count] = bytes;
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
    p->right[p->row_count++] = right;
    p->row_begin[p->row_count] = p->entry_count;
}

void crn_box_row(crn_box_program *p, int32_t right)
{
    end_row(p, -1, right);
}

void crn_box_sizes(crn_box_program *p, int64_t capacity)
{
    double unit = 1 / (double)crn_max(1, capacity);
    for (int32_t e = p->row_begin[p->row_count]; e < p->entry_count; e++)
        p->value[e] = (double)p->bytes[p->column[e]] * unit;
    end_row(p, capacity, capacity > 0 ? 1 : 0);
}

/* ---- prices ---- */

/* The entries by columns, and how long steps may be. */
static void turn(crn_box_program *p)
{
    memset(p->column_begin, 0, ((size_t)p->column_count + 2) * sizeof(*p->column_begin));
    for (int32_t e = 0; e < p->entry_count; e++)
        p->column_begin[p->column[e] + 2]++;
    for (int32_t j = 0; j <= p->column_count; j++)
        p->column_begin[j + 1] += p->column_begin[j];
    memset(p->x_step, 0, (size_t)p->column_count * sizeof(*p->x_step));
    for (int32_t r = 0; r < p->row_count; r++) {
        double sum = 0;
        for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++) {
            int32_t at = p->column_begin[p->column[e] + 1]++;
            double size = fabs(p->value[e]);
            p->row[at] = r;
            p->turned[at] = p->value[e];
            p->x_step[p->column[e]] += size;
            sum += size;
        }
        p->y_step[r] = sum > 0 ? 1 / sum : 1;
    }
    for (int32_t j = 0; j < p->column_count; j++)
        p->x_step[j] = p->x_step[j] > 0 ? 1 / p->x_step[j] : 1;
}

/* What a column costs with the prices of its rows. */
static void find_slopes(crn_box_program *p, const double *y)
{
    for (int32_t j = 0; j < p->column_count; j++) {
        double slope = (double)p->cost[j] / p->total;
        for (int32_t e = p->column_begin[j]; e < p->column_begin[j + 1]; e++)
            slope += p->turned[e] * y[p->row[e]];
        p->slope[j] = slope;
    }
}

/* Leaves the slopes at these prices behind. */
static double value_at(crn_box_program *p, const double *y)
{
    double value = 0;
    find_slopes(p, y);
    for (int32_t j = 0; j < p->column_count; j++)
        value += p->slope[j] < 0 ? p->slope[j] : 0;
    for (int32_t r = 0; r < p->row_count; r++)
        value -= y[r] * p->right[r];
    return value;
}

/* From slopes at y to those at the next y. */
static void iterate(crn_box_program *p, double weight)
{
    for (int32_t j = 0; j < p->column_count; j++) {
        double next = p->x[j] - p->x_step[j] / weight * p->slope[j];
        next = next < 0 ? 0 : next > 1 ? 1 : next;
        p->x_ahead[j] = 2 * next - p->x[j];
        p->x[j] = next;
        p->x_sum[j] += next;
    }
    for (int32_t r = 0; r < p->row_count; r++) {
        double over = -p->right[r];
        for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
            over += p->value[e] * p->x_ahead[p->column[e]];
        double next = p->y[r] + p->y_step[r] * weight * over;
        p->y[r] = next < 0 ? 0 : next;
        p->y_sum[r] += p->y[r];
    }
    find_slopes(p, p->y);
}

static void begin_chunk(crn_box_program *p)
{
    memcpy(p->x_began, p->x, (size_t)p->column_count * sizeof(double));
    memcpy(p->y_began, p->y, (size_t)p->row_count * sizeof(double));
    memset(p->x_sum, 0, (size_t)p->column_count * sizeof(double));
    memset(p->y_sum, 0, (size_t)p->row_count * sizeof(double));
}

/* Prices that moved more than variables did want longer steps. */
static double next_weight(const crn_box_program *p, double weight)
{
    double x_moved = 0, y_moved = 0;
    for (int32_t j = 0; j < p->column_count; j++)
        x_moved += (p->x[j] - p->x_began[j]) * (p->x[j] - p->x_began[j]) / p->x_step[j];
    for (int32_t r = 0; r < p->row_count; r++)
        y_moved += (p->y[r] - p->y_began[r]) * (p->y[r] - p->y_began[r]) / p->y_step[r];
    if (x_moved < 1e-18 || y_moved < 1e-24)
        return weight;
    double wanted = sqrt(sqrt(y_moved / x_moved) * weight);
    wanted = wanted > weight_first * weight_range ? weight_first * weight_range : wanted;
    return wanted < weight_first / weight_range ? weight_first / weight_range : wanted;
}

/* Goes on from the last prices or from their average, whichever proves more; *best is the most so far. */
static void end_chunk(crn_box_program *p, double *best)
{
    for (int32_t r = 0; r < p->row_count; r++)
        p->y_sum[r] /= CHUNK;
    double average = value_at(p, p->y_sum), last = value_at(p, p->y);
    if (average > last) {
        memcpy(p->y, p->y_sum, (size_t)p->row_count * sizeof(double));
        for (int32_t j = 0; j < p->column_count; j++)
            p->x[j] = p->x_sum[j] / CHUNK;
        find_slopes(p, p->y);
        last = average;
    }
    if (last > *best) {
        *best = last;
        memcpy(p->y_best, p->y, (size_t)p->row_count * sizeof(double));
    }
}

/* Goes on from the last prices. False where it is to end: by limits, or for there is no hope. */
static bool find_prices(crn_box_program *p, crn_box_limit *limit, double *most)
{
    double best = *most, weight = weight_first, hopeless = hope * ldexp((double)limit->enough, p->shift) / p->total;
    int lagging = 0;
    turn(p);
    find_slopes(p, p->y);
    for (int i = 0; i < limit->iterations && lagging < LAGGING_MAX && limit->work > 0; i += CHUNK) {
        double before = best;
        begin_chunk(p);
        for (int k = 0; k < CHUNK; k++)
            iterate(p, weight);
        weight = next_weight(p, weight);
        end_chunk(p, &best);
        lagging = best - before < worth ? lagging + 1 : 0;
        if (i >= HOPE_ITERATIONS && best < hopeless)
            return false;
        limit->work -= (int64_t)CHUNK * (p->entry_count + p->column_count + p->row_count);
        if (crn_should_stop(limit->task, NULL))
            return false;
    }
    *most = best;
    return limit->work > 0;
}

/* ---- covers ---- */

/* Whether a lacks less to 1 for its bytes than b: such columns pass the capacity soonest. */
static bool is_fuller(const crn_box_program *p, int32_t a, int32_t b)
{
    return (1 - p->x_ahead[a]) * (double)p->bytes[b] < (1 - p->x_ahead[b]) * (double)p->bytes[a];
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
        sum += p->x_ahead[chosen[i]];
    if (sum <= count - 1 + slack || p->entry_count + all > p->entry_max || p->row_count == p->row_max)
        return false;
    for (int32_t i = 0; i < all; i++)
        crn_box_entry(p, chosen[i], 1);
    crn_box_row(p, count - 1);
    p->y[p->row_count - 1] = p->y_best[p->row_count - 1] = 0;
    return true;
}

/* One for each row of sizes that has one; returns whether there are any. */
static bool add_covers(crn_box_program *p, int32_t rows)
{
    bool any = false;
    for (int32_t j = 0; j < p->column_count; j++)
        p->x_ahead[j] = p->x_sum[j] / CHUNK; /* the last variables go up and down around their average */
    for (int32_t r = 0; r < rows; r++)
        if (p->capacity[r] >= 0 && p->row_begin[r + 1] - p->row_begin[r] <= COVER_COLUMNS_MAX)
            any = add_cover(p, r, p->row) || any; /* the entries by columns are made anew */
    return any;
}

/* ---- what prices prove ---- */

/* Of a row, in the unit of scaled costs: rounded, so that sizes within the capacity never pay more than what it takes. */
static wide_sum price_row(crn_box_program *p, int32_t r, int64_t *slope)
{
    double price = p->y_best[r] < PRICE_MAX ? p->y_best[r] : PRICE_MAX;
    if (p->capacity[r] < 0) {
        int64_t whole = (int64_t)((price < 1 ? price : 1) * p->total);
        for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
            slope[p->column[e]] += p->value[e] > 0 ? whole : -whole;
        return (wide_sum)whole * p->right[r];
    }
    double of_byte = price * p->total / (double)crn_max(1, p->capacity[r]);
    for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
        slope[p->column[e]] += (int64_t)floor(of_byte * (double)p->bytes[p->column[e]] * (1 - 0x1p-40));
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
    double best = 0;
    memset(p->y, 0, (size_t)rows * sizeof(double));
    memset(p->y_best, 0, (size_t)rows * sizeof(double));
    memset(p->x, 0, (size_t)p->column_count * sizeof(double));
    memset(p->x_sum, 0, (size_t)p->column_count * sizeof(double)); /* read by covers, also after no iteration at all */
    double near = hope_of_covers * ldexp((double)limit->enough, p->shift) / p->total;
    for (int round = 0; find_prices(p, limit, &best) && best >= near && round < limit->rounds; round++)
        if (!add_covers(p, rows))
            break;
    return prove(p);
}
