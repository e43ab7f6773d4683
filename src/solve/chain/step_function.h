/*
 * Step functions of memory, exact in bytes: how long a sub-problem takes that may use m bytes.
 *
 * A step function is a list of points (bytes, ns), bytes ascending and ns descending: ns holds from its bytes on, up to
 * the next point; below the first it is infinite. What a dynamic program makes of them is the lower envelope of terms
 *
 *   term(m) = ns + first(m - first_shift) + second(m - second_shift)  for m >= from_bytes, else infinite:
 *
 * a sum at the same m, so a merge of two sorted lists. Merging all terms of an envelope is what would cost most of the
 * time, and nearly all of it in vain: at any m few terms come near the least one. So memory is cut into cells of equal
 * size, (i w, (i+1) w], and each step function carries its values at the borders i w. From those follow, for all terms
 * and by contiguous sums over the cells,
 *
 *   upper[i] = least term at the cell's lower border: what stays above it changes nothing in the cell;
 *   lower of a term = its value at the cell's upper border: the least that it can reach in the cell,
 *
 * with shifts that are not a whole number of cells rounded up in upper and down in lower.
 *
 * Only the terms with lower < upper[i] are merged within cell i, by walking along both lists; the rest is never looked
 * at. Two sizes of cells: first all terms over blocks of cells, then over the cells of a block those that are left. The
 * values at borders are in single precision, with a margin far beyond all rounding: they say what need not be looked
 * at, never what the answer is.
 */
#ifndef CRN_STEP_FUNCTION_H
#define CRN_STEP_FUNCTION_H

#include <cairn/base.h>
#include <stdatomic.h>

#include "base/memory.h"

/** More than any time that is a result: three of them can be added. Schedules of 73 years are not looked for. */
#define CRN_STEPS_INFINITE ((int64_t)1 << 61)

typedef struct crn_step {
    int64_t bytes, ns;
} crn_step;

enum { CRN_STEPS_BLOCK_LOG2 = 5, CRN_STEPS_BLOCK = 1 << CRN_STEPS_BLOCK_LOG2 };

/** Values of a step function, moved up by a shift, at the borders: infinite below low, constant from high on. */
typedef struct crn_borders {
    int64_t shift;
    const float *block;   /* of blocks 0..blocks */
    const float *cell;    /* border i at cell[i - low], i = low - BLOCK .. high + BLOCK */
    const uint8_t *steps; /* whether there is a point in cell i, at steps[i - low], i as above */
    int32_t low, high;
} crn_borders;

/** Envelopes mostly use a function with one of two shifts; only with others do borders have to be rounded. */
typedef struct crn_steps {
    const crn_step *points;
    int32_t count;
    crn_borders plain, moved; /* shift 0, and another one */
    const int32_t *point;     /* last point at or below border i at point[i - plain.low], i = plain.low .. plain.high */
} crn_steps;

/** The cells that all step functions of a program share: blocks of BLOCK cells. Points above top are left out. */
typedef struct crn_cells {
    int32_t blocks;
    int32_t width_log2; /* of a cell, in bytes */
    int64_t top_bytes;  /* blocks * BLOCK * width >= top */
} crn_cells;

/** About count cells, for points up to top. */
crn_cells crn_cells_for(int64_t top_bytes, int32_t count);

/** Sizes are at least 0, times in 0..CRN_STEPS_INFINITE. NULL = 0 for every m >= 0. */
typedef struct crn_term {
    const crn_steps *first, *second;
    int64_t first_shift, second_shift;
    int64_t from_bytes, ns;
} crn_term;

/** What making envelopes needs; one for each thread. */
typedef struct crn_envelope crn_envelope;

crn_envelope *crn_envelope_new(const cairn_allocator *allocator, const crn_cells *cells);
void crn_envelope_free(crn_envelope *envelope);

/** Forgets all terms. */
void crn_envelope_begin(crn_envelope *envelope);
/** Adds a term; what it refers to must stay until the end. False when memory fails. */
bool crn_envelope_add(crn_envelope *envelope, const crn_term *term);
/**
 * Makes the lower envelope of all terms, in the arena. moved_shift: the shift other than 0 with which it will be used
 * most. False when memory fails.
 */
bool crn_envelope_end(crn_envelope *envelope, int64_t moved_shift, crn_arena *arena, crn_steps *made);

/** What the threads of a program make step functions with: each has an envelope and an arena for points. */
typedef struct crn_step_makers {
    crn_envelope **envelopes;
    crn_arena *points;
    int count;
    atomic_bool failed; /* one of them had no memory */
} crn_step_makers;

/** So many, in the arena; false when memory fails. Zeroed ones can be cleared. */
bool crn_step_makers_init(crn_step_makers *makers, int count, const crn_cells *cells, crn_arena *arena);
/** Frees what only making takes; the step functions stay. */
void crn_step_makers_rest(crn_step_makers *makers);
void crn_step_makers_clear(crn_step_makers *makers);

/** Value at m; CRN_STEPS_INFINITE below the first point. */
int64_t crn_steps_at(const crn_steps *steps, const crn_cells *cells, int64_t bytes);
/** Value of a term at m. */
int64_t crn_term_at(const crn_term *term, const crn_cells *cells, int64_t bytes);

#endif
