/*
 * Prices of a box program, by the primal-dual hybrid gradient method (Chambolle and Pock 2011) with steps from row and
 * column sums (Pock and Chambolle 2011). Every step is reflected and averaged with where it began (Halpern 1967; Lu and
 * Yang 2024), which begins anew where that has brought it much nearer to a fixed point (Applegate et al. 2021).
 *
 * +, -, *, / and sqrt in a fixed order, each rounded by itself (the build forbids contraction to fused operations), so
 * that prices are the same everywhere. Slopes are linear in the prices, so those of averages are averages of slopes: a
 * step takes one pass by rows and one by columns.
 */
#include <math.h>
#include <string.h>

#include "solve/graph/box_program.h"

/*
 * CHUNK: the prices are judged after so many iterations, so that judging takes a small part of the time. LAGGING_MAX: the
 * search ends after so many chunks in a row that hardly raise the bound. HOPE_ITERATIONS: from then on the bound shows
 * whether the program can be solved well.
 */
enum { CHUNK = 64, LAGGING_MAX = 4, HOPE_ITERATIONS = 256 };

/* What the step in the prices is to that in the variables, at first, and how far it may go from there. */
static const double ratio_first = 0.01, ratio_range = 8;

/* Steps a little inside of what converges. */
static const double inside = 0.98;

/* It begins anew where the squared step is that share of the first, or that share and growing, or has lasted so long. */
static const double much_nearer = 0.04, nearer = 0.64, long_share = 0.36;

/* Squared distances of variables and prices that are next to none: their ratio says nothing. */
static const double x_still = 1e-18, y_still = 1e-24;

/* Chunks that raise the bound by less than that share of all costs are not worth while. */
static const double worth = 2e-5;

/* Prices that prove less than that share of what is to be passed, after some iterations, will hardly pass it. */
static const double hope = 0.8;

/* Since it last began. */
typedef struct course {
    int steps;
    double first, last; /* squared steps */
} course;

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
        p->y_step[r] = sum > 0 ? inside / sum : inside;
    }
    for (int32_t j = 0; j < p->column_count; j++)
        p->x_step[j] = p->x_step[j] > 0 ? 1 / p->x_step[j] : 1;
}

/* What columns cost with these prices. */
static void find_slopes(const crn_box_program *p, const double *y, double *slopes)
{
    for (int32_t j = 0; j < p->column_count; j++) {
        double slope = (double)p->cost[j] / p->total;
        for (int32_t e = p->column_begin[j]; e < p->column_begin[j + 1]; e++)
            slope += p->turned[e] * y[p->row[e]];
        slopes[j] = slope;
    }
}

/* What the next prices prove. */
static double value_of(const crn_box_program *p)
{
    double value = 0;
    for (int32_t j = 0; j < p->column_count; j++)
        value += p->slope_next[j] < 0 ? p->slope_next[j] : 0;
    for (int32_t r = 0; r < p->row_count; r++)
        value -= p->y_next[r] * p->right[r];
    return value;
}

static void take_if_best(crn_box_program *p)
{
    double value = value_of(p);
    if (value <= p->best)
        return;
    p->best = value;
    memcpy(p->y_best, p->y_next, (size_t)p->row_count * sizeof(double));
}

void crn_box_prices_begin(crn_box_program *p)
{
    p->best = 0;
    p->step_ratio = ratio_first;
    memset(p->y_best, 0, (size_t)p->row_count * sizeof(double));
    for (int32_t r = 0; r < p->row_count; r++)
        p->y_next[r] = crn_box_recall(p, p->row_name[r], p->y_start[r]);
    for (int32_t j = 0; j < p->column_count; j++)
        p->x_next[j] = crn_box_recall(p, p->column_name[j], 0);
    turn(p);
    find_slopes(p, p->y_next, p->slope_next);
    take_if_best(p);
}

/* Where a plain step leads. */
static void find_next(crn_box_program *p)
{
    for (int32_t j = 0; j < p->column_count; j++) {
        double next = p->x[j] - p->x_step[j] / p->step_ratio * p->slope[j];
        next = next < 0 ? 0 : next > 1 ? 1 : next;
        p->x_ahead[j] = 2 * next - p->x[j];
        p->x_next[j] = next;
    }
    for (int32_t r = 0; r < p->row_count; r++) {
        double over = -p->right[r];
        for (int32_t e = p->row_begin[r]; e < p->row_begin[r + 1]; e++)
            over += p->value[e] * p->x_ahead[p->column[e]];
        double next = p->y[r] + p->y_step[r] * p->step_ratio * over;
        p->y_next[r] = next < 0 ? 0 : next;
    }
    find_slopes(p, p->y_next, p->slope_next);
}

static double moved(const double *from, const double *to, const double *step, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++)
        sum += (to[i] - from[i]) * (to[i] - from[i]) / step[i];
    return sum;
}

static double squared_step(const crn_box_program *p)
{
    return moved(p->x, p->x_next, p->x_step, p->column_count) * p->step_ratio +
           moved(p->y, p->y_next, p->y_step, p->row_count) / p->step_ratio;
}

/* Twice as far, and back towards where it began, ever less. */
static void take_step(crn_box_program *p, course *c)
{
    double back = 1 / (double)(c->steps + 2), go = 1 - back;
    for (int32_t j = 0; j < p->column_count; j++) {
        p->x[j] = go * p->x_ahead[j] + back * p->x_began[j];
        p->slope[j] = go * (2 * p->slope_next[j] - p->slope[j]) + back * p->slope_began[j];
    }
    for (int32_t r = 0; r < p->row_count; r++)
        p->y[r] = go * (2 * p->y_next[r] - p->y[r]) + back * p->y_began[r];
    c->steps++;
}

/* Prices that moved more than variables did want longer steps. */
static void adapt_ratio(crn_box_program *p)
{
    double x_moved = moved(p->x_began, p->x_next, p->x_step, p->column_count),
           y_moved = moved(p->y_began, p->y_next, p->y_step, p->row_count);
    if (x_moved < x_still || y_moved < y_still)
        return;
    double wanted = sqrt(sqrt(y_moved / x_moved) * p->step_ratio);
    wanted = wanted > ratio_first * ratio_range ? ratio_first * ratio_range : wanted;
    p->step_ratio = wanted < ratio_first / ratio_range ? ratio_first / ratio_range : wanted;
}

static void begin_at_next(crn_box_program *p, course *c)
{
    size_t columns = (size_t)p->column_count * sizeof(double), rows = (size_t)p->row_count * sizeof(double);
    memcpy(p->x, p->x_next, columns);
    memcpy(p->x_began, p->x_next, columns);
    memcpy(p->y, p->y_next, rows);
    memcpy(p->y_began, p->y_next, rows);
    find_slopes(p, p->y, p->slope);
    memcpy(p->slope_began, p->slope, columns);
    *c = (course){.last = INFINITY};
}

static void run_chunk(crn_box_program *p, course *c)
{
    for (int k = 0; k < CHUNK; k++) {
        find_next(p);
        if (c->steps == 0)
            c->first = squared_step(p);
        if (k + 1 < CHUNK)
            take_step(p, c);
    }
}

static void end_chunk(crn_box_program *p, course *c, int iterations)
{
    double step = squared_step(p);
    take_if_best(p);
    if (step <= much_nearer * c->first || (step <= nearer * c->first && step > c->last) ||
        c->steps >= long_share * iterations) {
        adapt_ratio(p);
        begin_at_next(p, c);
    } else {
        take_step(p, c);
        c->last = step;
    }
}

bool crn_box_prices_find(crn_box_program *p, crn_box_limit *limit)
{
    double hopeless = hope * ldexp((double)limit->enough, p->shift) / p->total;
    int lagging = 0;
    course c;
    turn(p);
    begin_at_next(p, &c);
    for (int i = 0; i < limit->iterations && lagging < LAGGING_MAX && limit->work > 0; i += CHUNK) {
        double before = p->best;
        run_chunk(p, &c);
        end_chunk(p, &c, i + CHUNK);
        lagging = p->best - before < worth ? lagging + 1 : 0;
        if (i >= HOPE_ITERATIONS && p->best < hopeless)
            return false;
        limit->work -= (int64_t)CHUNK * (p->entry_count + p->column_count + p->row_count);
        if (crn_should_stop(limit->task, NULL))
            return false;
    }
    return limit->work > 0;
}
