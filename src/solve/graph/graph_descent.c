#include "solve/graph/graph_descent.h"

/*
 * Limit on events times nodes of all walks of a descent. One such product takes some ten nanoseconds: about a second.
 */
#define WORK_MAX ((int64_t)100000000)
enum { COARSE_PARTS = 16 };

void crn_descent_init(crn_descent *descent, int32_t node_count, int rule_count, int64_t lower_bytes)
{
    *descent = (crn_descent){.node_count = node_count, .rule_count = rule_count, .lower_bytes = lower_bytes};
}

static void begin_pass(crn_descent *d, int64_t stride_bytes)
{
    d->stride_bytes = stride_bytes;
    for (int i = 0; i < d->rule_count; i++)
        d->from_bytes[i] = INT64_MAX;
}

/* The rule that has come down least, so that all rules are done with what lies above. */
static crn_descent_step highest(const crn_descent *d, int64_t least_bytes)
{
    int rule = 0;
    for (int i = 1; i < d->rule_count; i++)
        if (d->from_bytes[i] > d->from_bytes[rule])
            rule = i;
    return (crn_descent_step){rule, crn_min(d->from_bytes[rule], least_bytes) - 1};
}

bool crn_descent_next(crn_descent *d, int64_t least_bytes, crn_descent_step *step)
{
    int64_t shortest_walk = (int64_t)d->node_count * d->node_count;
    if (d->work + shortest_walk > WORK_MAX || least_bytes <= d->lower_bytes)
        return false;
    if (d->stride_bytes == 0)
        begin_pass(d, (least_bytes - d->lower_bytes) / COARSE_PARTS + 1);
    *step = highest(d, least_bytes);
    if (step->budget_bytes < d->lower_bytes && d->stride_bytes > 1) {
        begin_pass(d, 1);
        *step = highest(d, least_bytes);
    }
    return step->budget_bytes >= d->lower_bytes;
}

void crn_descent_note(crn_descent *d, const crn_descent_step *step, const crn_walk *walk, const crn_sequence *sequence)
{
    d->from_bytes[step->rule] = crn_min(crn_walk_needed(walk), step->budget_bytes - d->stride_bytes + 1);
    d->work += ((int64_t)sequence->count + 1) * d->node_count;
}
