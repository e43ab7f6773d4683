/*
 * Lower bounds on linear programs whose variables lie between 0 and 1:
 *
 *     min  c x   where  A x <= b,  0 <= x <= 1
 *
 * For all prices y >= 0 of the rows, every x that keeps to them has  c x >= c x + y (A x - b), so that
 *
 *     sum over columns of  min(0, c + y A)  -  y b
 *
 * is a lower bound. Good prices are found in floating point (box_prices.c). Rows that integer variables satisfy are
 * added where fractions violate them (box_covers.c). The bound that the prices prove is computed in integers. Any
 * prices prove a bound, so the search for prices may stop at any time.
 *
 * Entries are 1 or -1, but for rows of sizes: sum of bytes of columns <= capacity, and rows of other weights.
 *
 * Cost   An iteration O(entries). Memory O(entries).
 */
#ifndef CRN_BOX_PROGRAM_H
#define CRN_BOX_PROGRAM_H

#include "solve/solver.h"

/**
 * Where the next program starts: the prices of rows and the values of variables, by name, and the rows that were added.
 * A name stands for one row or one column of a program. A row that was added to one program also holds in others, for
 * the columns of the same names.
 */
typedef struct crn_box_memory {
    uint64_t *name; /* of a slot; 0 = free */
    double *value;
    int32_t *place; /* of a slot: the column of that name, while rows are added again */
    int32_t slot_count, used;
    int32_t row_count, entry_count; /* added rows */
    int32_t row_max, entry_max;
    int32_t *row_begin, *right;
    int64_t *capacity, *weight; /* of a row, of an entry */
    uint64_t *column_name;
    double *price;
} crn_box_memory;

typedef struct crn_box_program {
    int32_t row_count, row_max, column_count, column_max, entry_count, entry_max;
    bool is_full;       /* what was added last did not fit: nothing may be asked */
    uint64_t name;      /* of the next row or column, which starts from what that name had before; 0 = it has none */
    int shift;          /* costs are scaled by 2^shift, which may be below 1 */
    double total;       /* the scaled cost of everything: the unit of floating-point costs and prices */
    int32_t *row_begin; /* row_count + 1 */
    uint64_t *row_name, *column_name;
    crn_box_memory memory;
    int32_t *column_begin;                           /* column_count + 1; by solve */
    int32_t *column, *row;                           /* of an entry, by rows; by columns */
    double *value, *turned;                          /* the same; of sizes in units of their row's capacity */
    int64_t *weight;                                 /* of an entry of a row with a capacity */
    int64_t *cost, *bytes;                           /* of a column; cost scaled, rounded down */
    int64_t *capacity;                               /* of a row; -1 = a row of 1 and -1 */
    int32_t *right;                                  /* of such a row */
    double best;                                     /* what the best prices prove, in units of the total */
    double step_ratio;                               /* of prices to variables */
    double *y_start;                                 /* of a row: its price where nothing is remembered */
    double *y, *y_next, *y_best, *y_began, *y_step;  /* of a row */
    double *x, *x_next, *x_ahead, *x_began, *x_step; /* of a column */
    double *slope, *slope_next, *slope_began;        /* what a column costs with the prices of its rows */
} crn_box_program;

/** Room for so many entries, in an arena, for problems whose costs sum to total_cost. False when memory fails. */
bool crn_box_program_new(crn_arena *arena, int32_t entry_max, int64_t total_cost, crn_box_program *p);

void crn_box_begin(crn_box_program *p);
/** Adds a column and returns it. */
int32_t crn_box_column(crn_box_program *p, int64_t cost, int64_t bytes);
/** Adds an entry to the row that is being made: 1 or -1, or, before crn_box_sizes, the bytes of the column. */
void crn_box_entry(crn_box_program *p, int32_t column, int sign);
void crn_box_row(crn_box_program *p, int32_t right);
/** The price at which the last row starts where nothing is remembered: what a column of that cost costs. */
void crn_box_start_at(crn_box_program *p, int64_t cost);
void crn_box_sizes(crn_box_program *p, int64_t capacity);
/** The same where the entries' weights are set already. */
void crn_box_weights(crn_box_program *p, int64_t capacity);

/** How long to look for prices. */
typedef struct crn_box_limit {
    const crn_task *task; /* stops it */
    int iterations;       /* in a round */
    int rounds;           /* of covers */
    int64_t enough;       /* a bound that is to be passed: far below it, it stops early */
    int64_t work;         /* entries looked at; what is left is put back */
    bool remembers;       /* keeps prices that pass it for the start of the next program */
} crn_box_limit;

/**
 * A lower bound on the cost, in the unit of the columns' costs; 0 = none. Costs and variables are integers: it is
 * rounded up.
 */
int64_t crn_box_bound(crn_box_program *p, crn_box_limit *limit);

/* ---- of its parts ---- */

/** Starts at what is remembered, or 0. */
void crn_box_prices_begin(crn_box_program *p);
/** Takes the best prices and the last variables for the start of programs to come, and the rows from that one on. */
void crn_box_remember(crn_box_program *p, int32_t first_added);
/** Adds the remembered rows of which there are columns here. */
void crn_box_recall_rows(crn_box_program *p);
/** What was remembered by that name; else `otherwise`. */
double crn_box_recall(const crn_box_program *p, uint64_t name, double otherwise);
bool crn_box_memory_new(crn_arena *arena, int32_t entry_max, crn_box_memory *memory);

/** Goes on from the last prices. False where it is to end: by limits, or for there is no hope. */
bool crn_box_prices_find(crn_box_program *p, crn_box_limit *limit);
/**
 * Adds rows that integer variables satisfy and the last ones violate, for the first `rows` rows. False: none was added.
 */
bool crn_box_covers_add(crn_box_program *p, int32_t rows);

#endif
