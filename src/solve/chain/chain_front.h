/*
 * Fronts: what must be kept against what it costs. A front is a list of points (bytes, ns), bytes ascending, ns
 * descending, that no other point beats; it stands for the step function "least ns with at most so many bytes".
 *
 * Fronts are united and added (a + b holds every sum of a point of a and one of b). There may be more sums than room:
 * then points are replaced by one with the least bytes and the least ns of them. So what is made is never above the true
 * front, and lower bounds stay lower bounds. Which points are merged depends on the numbers alone.
 */
#ifndef CRN_CHAIN_FRONT_H
#define CRN_CHAIN_FRONT_H

#include <cairn/base.h>

#include "base/memory.h"

/** Points with more bytes than this are left out: nothing can keep so much. */
#define CRN_FRONT_BYTES_MAX ((int64_t)1 << 40)
/** What cannot be done. Two can be added. Points that take so long are left out. */
#define CRN_FRONT_NEVER ((int64_t)1 << 61)

typedef struct crn_point {
    int64_t bytes, ns;
} crn_point;

typedef struct crn_front {
    const crn_point *points;
    int32_t count;
} crn_front;

/** Makes one front after the other. */
typedef struct crn_front_maker crn_front_maker;

/** NULL when memory fails. */
crn_front_maker *crn_front_maker_new(const cairn_allocator *allocator);
void crn_front_maker_free(crn_front_maker *maker);

/** Begins a front. */
void crn_front_begin(crn_front_maker *maker);
/**
 * Adds all sums of a point of a and one of b; both must stay until the end. At most 8 of these. Up to 512 points of a may
 * be in any order; it is quickest when b is the longer one.
 */
void crn_front_add_sums(crn_front_maker *maker, crn_front a, crn_front b);
/**
 * Ends the front: at most most points into points, none with less than floor_ns, which says that nothing does better.
 * Returns how many there are.
 */
int32_t crn_front_end(crn_front_maker *maker, int64_t floor_ns, crn_point *points, int32_t most);

#endif
