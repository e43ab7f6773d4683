/*
 * Below the least budget under which a walk has succeeded: the budgets at which to walk again.
 *
 * More memory can lead a walk astray, so what succeeds is no interval, and what bisection ends at need not be the least.
 * But the walks of a rule are finitely many: one that needed less than its budget goes the same way under every budget
 * between the two (graph_walk.h), so the next that differs is just below what was needed. First budgets evenly spaced,
 * for a large step down; then all that differ, from the top. Where the work is used up before the bound on memory is
 * reached, smaller budgets remain that nobody has tried.
 */
#ifndef CRN_GRAPH_DESCENT_H
#define CRN_GRAPH_DESCENT_H

#include "solve/graph/graph_walk.h"

enum { CRN_DESCENT_RULES_MAX = 15 };

typedef struct crn_descent {
    int32_t node_count;
    int rule_count;                            /* rules are numbers here */
    int64_t lower_bytes;                       /* no schedule is below */
    int64_t from_bytes[CRN_DESCENT_RULES_MAX]; /* of a rule: from here on up its walks are known */
    int64_t stride_bytes;                      /* at least so far down with each walk; 0 = before the first one */
    int64_t work;                              /* of all walks: events times nodes */
} crn_descent;

/** A walk to be made. */
typedef struct crn_descent_step {
    int rule;
    int64_t budget_bytes;
} crn_descent_step;

void crn_descent_init(crn_descent *descent, int32_t node_count, int rule_count, int64_t lower_bytes);
/** The next walk below the least that is known. False: there is none, or no work is left for it. */
bool crn_descent_next(crn_descent *descent, int64_t least_bytes, crn_descent_step *step);
/** After that walk, unless it was stopped. */
void crn_descent_note(crn_descent *descent, const crn_descent_step *step, const crn_walk *walk,
                      const crn_sequence *sequence);

#endif
