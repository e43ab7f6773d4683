/*
 * How the envelopes of step_function.h are made: terms prepared for borders, which of them may matter in which block and
 * cell, and the merge within a cell.
 */
#ifndef CRN_ENVELOPE_H
#define CRN_ENVELOPE_H

#include "base/checked.h"
#include "solve/chain/step_function.h"

/* One of the two functions of a term, as borders see it. */
typedef struct crn_envelope_side {
    const crn_borders *borders;
    int32_t up, down;             /* what is left of the shift, in cells */
    int32_t block_up, block_down; /* and in blocks */
} crn_envelope_side;

/* A term, prepared. */
typedef struct crn_envelope_item {
    crn_term term;
    crn_envelope_side first, second;
    int32_t from, block_from; /* first border, and block's border, at which the term has a value */
    float ns;
} crn_envelope_item;

/* A term that may be the least in a block. */
typedef struct crn_envelope_chance {
    int32_t block, term;
} crn_envelope_chance;

/* Of a term that may be the least in the block at hand: in which of its cells. */
typedef struct crn_envelope_flags {
    uint8_t cell[CRN_STEPS_BLOCK];
} crn_envelope_flags;

typedef struct crn_envelope_points {
    crn_step *list;
    size_t count, capacity;
} crn_envelope_points;

struct crn_envelope {
    cairn_allocator allocator;
    crn_cells cells;
    crn_steps nothing;              /* 0 for every m */
    float *zero, *upper;            /* of blocks */
    uint8_t *never;                 /* zeros, too */
    uint8_t maybe[CRN_STEPS_BLOCK]; /* ones */
    uint8_t *flag;
    size_t *block_begin;
    crn_envelope_item *items;
    crn_envelope_chance *chances;
    int32_t *sorted;           /* terms of the chances, by block */
    crn_envelope_flags *flags; /* of the chances of a block */
    size_t item_count, item_capacity, chance_count, chance_capacity, sorted_capacity, flags_capacity;
    crn_envelope_points made, cell, merged;
};

/** Number of the border at or below, and at or above. What is past all borders is all the same. */
static inline int32_t crn_border_down(int64_t bytes, int32_t width_log2)
{
    return (int32_t)crn_min(bytes >> width_log2, INT32_MAX / 4);
}

static inline int32_t crn_border_up(int64_t bytes, int32_t width_log2)
{
    return bytes > 0 ? crn_border_down(bytes - 1, width_log2) + 1 : 0;
}

/** Where border i is; the last ones may be past 2^63 - 1. */
static inline int64_t crn_border_bytes(int64_t i, int32_t width_log2)
{
    return i > INT64_MAX >> width_log2 ? INT64_MAX : i << width_log2;
}

static inline size_t crn_border_count(const crn_cells *cells)
{
    return (size_t)cells->blocks + 1;
}

/** Finds the terms that may be the least in each block, sorted by block. False when memory fails. */
bool crn_envelope_select(crn_envelope *e);

/** upper[i] of the cells of a block, from that of all terms that may matter in it; known = the envelope's value before. */
void crn_envelope_lower_cells(const crn_envelope *e, int32_t block, float known, float upper[CRN_STEPS_BLOCK]);

/** Flags, of the terms that may matter in a block, the cells in which they may. False when memory fails. */
bool crn_envelope_flag_cells(crn_envelope *e, int32_t block, const float upper[CRN_STEPS_BLOCK]);

/** Appends the envelope of a block to what was made. False when memory fails. */
bool crn_envelope_merge_block(crn_envelope *e, int32_t block);

/** The last point at or below bytes; -1 = none. */
int32_t crn_steps_find(const crn_steps *steps, const crn_cells *cells, int64_t bytes);

#endif
