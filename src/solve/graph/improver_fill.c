/*
 * Fill: recomputations, and fetches, whose instance can stay in memory instead are removed, the most expensive first.
 */
#include <stdlib.h>

#include "solve/graph/improver.h"

/* Removals of a pass that lead to another one: one in so many. */
enum { HARDLY = 1024 };

/* Bytes more on all events in [from, to). */
static void raise_levels(crn_improver *im, int32_t from, int32_t to, int64_t bytes)
{
    for (int32_t e = from; e < to; e++) {
        im->eval.level[e] += bytes;
        im->block_level[e / CRN_IMPROVER_BLOCK] = crn_max(im->block_level[e / CRN_IMPROVER_BLOCK], im->eval.level[e]);
    }
}

static int compare_gains(const void *a, const void *b)
{
    const crn_improver_gain *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? 1 : -1;
    return (x->event > y->event) - (x->event < y->event);
}

/* The recomputations, the most expensive first, give or take a random factor; following[] links their storage's instances. */
static int32_t list_gains(crn_improver *im)
{
    int32_t count = 0;
    for (int32_t e = 0; e < im->trial.count; e++) {
        im->following[e] = -1;
        if (!crn_improver_recomputes(im, e))
            continue;
        double cost = crn_priced_cost(crn_event_cost(im->model, im->trial.node[e]));
        im->gains[count++] = (crn_improver_gain){cost * crn_improver_factor(im), e};
        im->following[im->eval.previous[e]] = e;
    }
    qsort(im->gains, (size_t)count, sizeof(*im->gains), compare_gains);
    return count;
}

/* Lets the instance before e live on instead of computing e, where memory allows; levels, lives and links are kept up to date. */
static bool absorb(crn_improver *im, int32_t e)
{
    crn_sequence_eval *eval = &im->eval;
    int32_t before = eval->previous[e], from = eval->last[before] + 1;
    int64_t bytes = im->model->bytes[crn_improver_node(im, e)];
    if (eval->last[e] > e) { /* somebody reads it */
        if (!crn_improver_has_room(im, from, e, bytes))
            return false;
        raise_levels(im, from, e, bytes);
        eval->last[before] = eval->last[e];
    } else {
        eval->level[e] -= bytes;
    }
    im->following[before] = im->following[e];
    if (im->following[e] >= 0)
        eval->previous[im->following[e]] = before;
    im->trial.node[e] = -1;
    return true;
}

static void close_up(crn_sequence *sequence)
{
    int32_t count = 0;
    for (int32_t e = 0; e < sequence->count; e++)
        if (sequence->node[e] >= 0)
            sequence->node[count++] = sequence->node[e];
    sequence->count = count;
}

/*
 * Removing one recomputation may free the memory, or the only reader, of another: until nothing more goes, or hardly
 * anything. In long sequences the last ones go a few at a time, and each time all are looked at.
 */
void crn_improver_fill(crn_improver *im)
{
    for (;;) {
        int32_t removed = 0, count = list_gains(im);
        for (int32_t i = 0; i < count && (i % CRN_IMPROVER_POLL_EVERY > 0 || !crn_improver_is_stopped(im)); i++)
            removed += absorb(im, im->gains[i].event);
        if (removed == 0)
            return;
        close_up(&im->trial);
        crn_improver_judge(im);
        if (removed < count / HARDLY || crn_improver_is_stopped(im))
            return;
    }
}
