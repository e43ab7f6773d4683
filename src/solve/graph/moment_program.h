/*
 * What schedules within a budget must spend on recomputation, as a linear program over several moments.
 *
 * Moments are the starts of the first computations of some nodes t_0 < t_1 < ..; window i lasts from moment i to the
 * next one, the last to the end. For storages s of nodes before t_i that are read from then on, or serve to compute such a one:
 *
 *     held(s, i)     it is resident at moment i; what is held fits beside t_i
 *     again(s, i)    it is recomputed in window i, which costs its time
 *     later(s, i)    it is recomputed after moment i; and the same for some windows from moment i on together
 *
 *     held(s, i) + again(s, i) >= 1           where window i reads s
 *     again(s, i) <= held(d, i) + again(d, i) for all d that s reads
 *     held(s, i+1) <= held(s, i) + again(s, i)
 *     held(s, i) + later(s, i) >= 1           where it is read after moment i
 *     later(s, i) <= held(d, i) + later(d, i)
 *     later(s, i) <= sum of again(s, j) for j >= i
 *
 * and of windows i .. j-1 together all that is said of one window, with the sum of again(s, i) .. again(s, j-1) above.
 *
 * Every schedule satisfies them, with variables 0 and 1. Those of one moment alone are the minimum cut of graph_bound.h.
 */
#ifndef CRN_MOMENT_PROGRAM_H
#define CRN_MOMENT_PROGRAM_H

#include "solve/graph/box_program.h"
#include "solve/graph_model.h"

enum { CRN_MOMENTS_MAX = 48 };

typedef struct crn_moment_program {
    const crn_graph_model *model;
    int64_t budget_bytes;
    crn_box_program box;
    int32_t *held[CRN_MOMENTS_MAX], *again[CRN_MOMENTS_MAX]; /* of a storage: its column, or HELD, or NONE */
    int32_t *together;                                       /* of the windows that are being set out */
    int32_t *members;                                        /* storages of a moment */
    bool *is_member, *is_read, *is_seen;
} crn_moment_program;

/** Room for programs of so many entries. False when memory fails. */
bool crn_moment_program_new(crn_arena *arena, const crn_graph_model *model, int64_t budget_bytes, int32_t entry_max,
                            crn_moment_program *p);

/** A lower bound on the time spent on recomputation after the first moment; 0 also where the program does not fit. */
int64_t crn_moment_bound(crn_moment_program *p, const int32_t *moments, int count, crn_box_limit *limit);

#endif
