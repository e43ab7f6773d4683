/*
 * One cut of a chain into halves again and again, for the lower bound of chain_bound.c: tables of the time that each part
 * takes at least, over what room the budget leaves to it.
 */
#ifndef CRN_CHAIN_HALVING_H
#define CRN_CHAIN_HALVING_H

#include <stdatomic.h>

#include "solve/chain/chain_front.h"
#include "solve/chain_model.h"

enum { CRN_HALVING_LEVELS_MAX = 32, CRN_HALVING_DEPTH_MAX = 64 };

#define CRN_HALVING_UNITS CRN_FRONT_BYTES_MAX

/** How fine: 2^cells_log2 cells of room, levels of room for fronts, points of a front. Longer chains get no bound. */
typedef struct crn_halving_resolution {
    int64_t stages_max;
    int cells_log2, levels, points;
} crn_halving_resolution;

/** What may be kept of a part, something at least, and the least time that the part then takes in all. */
typedef struct crn_halving_level {
    int64_t empty_ns;     /* when nothing is kept */
    crn_front kept[2][2]; /* by: its first stage needs a value of the stage before; its last stage has one */
    int32_t number;       /* equal for levels that are alike */
} crn_halving_level;

/** Stages lo..hi. Its memory serves one part after the other. */
typedef struct crn_halving_part {
    int32_t lo, hi;
    int64_t first_ns;  /* sum of the least forwards */
    int64_t *after_ns; /* of cells of room */
    crn_halving_level levels[CRN_HALVING_LEVELS_MAX];
    crn_point *points; /* of all fronts */
    size_t point_count, point_capacity;
} crn_halving_part;

/** What one cut works with, and the next one after it on the same thread. */
typedef struct crn_halving_buffers {
    crn_front_maker *maker;
    crn_point *scratch[2]; /* room for 4 fronts each */
    crn_halving_part whole;
    crn_halving_part *halves[CRN_HALVING_DEPTH_MAX]; /* the two parts at each depth; 20,000 stages go down 40 levels */
} crn_halving_buffers;

/** One cut. */
typedef struct crn_halving {
    const crn_task *task;
    const crn_chain_model *model;
    crn_halving_resolution resolution;
    int32_t cut;
    int64_t full_bytes; /* CRN_HALVING_UNITS */
    int32_t top[CRN_HALVING_LEVELS_MAX];
    int64_t *whole_ns; /* what was found: of cells of room */
    crn_halving_buffers *buffers;
    cairn_allocator allocator;
    atomic_bool *stopped; /* of all cuts */
    bool failed, polls;
} crn_halving;

static inline int64_t crn_halving_units(const crn_halving *b, int64_t bytes)
{
    return bytes > b->full_bytes ? CRN_HALVING_UNITS + 1
                                 : (int64_t)((crn_wide)bytes * (crn_wide)CRN_HALVING_UNITS / (crn_wide)b->full_bytes);
}

static inline int32_t crn_halving_cells(const crn_halving *b)
{
    return 1 << b->resolution.cells_log2;
}

static inline int64_t crn_halving_cell_units(const crn_halving *b, int64_t cells)
{
    return cells * (CRN_HALVING_UNITS >> b->resolution.cells_log2);
}

/* Whole cells. */
static inline int32_t crn_halving_whole_cells(const crn_halving *b, int64_t units)
{
    return (int32_t)(units / crn_halving_cell_units(b, 1));
}

/** Whether two cuts make the same parts of up to so many stages, as they do of few. */
bool crn_halving_cut_alike(int32_t stages, int32_t cut, int32_t other);

/** Runs cut i of an array of them, as an iteration of a team: fills in whole_ns, unless it failed or was stopped. */
void crn_halving_run(void *context, int64_t i, int worker);

/** Frees what a cut, and those that share its buffers, worked with. */
void crn_halving_free_buffers(const crn_halving *b);

#endif
