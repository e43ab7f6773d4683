/*
 * select-cubic: checkpoints for the least memory in the sense of eq. 6.
 *
 * Source: Hong et al., algorithm 3; the problem and eq. 6 are in selection.h. For a bound s on every segment,
 *
 *   c(0) = d[0],   c(i) = d[i] + min over h < i with d[h+1] + ... + d[i-1] <= s of c(h)
 *
 * is the least sum of checkpoints up to i with i one of them; the minimum is one over a sliding window, found with a
 * queue in O(1). The answer is the least s + c(n) over all s that a segment can have, O(n^2) of them.
 *
 * Deviations: d[n] is a checkpoint (the printed answer would let it be part of a segment). Not all s are tried. c(n)
 * does not increase with s; so if the checkpoints found under s have no segment larger than s' <= s, nothing between
 * s' and s is better, and s' - 1 comes next; and once c(n) alone is not below the best answer, no smaller s can be.
 * O(n^3) time in the worst case, about n^2 where sizes are not made for it, O(n) memory. Optimal in eq. 6; of several
 * best answers the one with the largest segment.
 */
#include "solve/select/selection.h"

typedef struct cubic {
    int32_t n;
    const int64_t *d;
    int64_t *prefix; /* prefix[i] = d[0] + ... + d[i] */
    int64_t *c;
    int32_t *before; /* the checkpoint before i */
    int32_t *queue;
} cubic;

/* d[h+1] + ... + d[i-1] */
static int64_t between(const cubic *k, int32_t h, int32_t i)
{
    return k->prefix[i - 1] - k->prefix[h];
}

static void sweep(cubic *k, int64_t s)
{
    int32_t first = 0, end = 0;
    k->c[0] = k->d[0];
    for (int32_t i = 1; i <= k->n; i++) {
        while (end > first && k->c[k->queue[end - 1]] >= k->c[i - 1])
            end--;
        k->queue[end++] = i - 1;
        while (between(k, k->queue[first], i) > s)
            first++;
        k->before[i] = k->queue[first];
        k->c[i] = k->d[i] + k->c[k->queue[first]];
    }
}

static int64_t largest_segment(const cubic *k)
{
    int64_t largest = 0;
    for (int32_t i = k->n; i > 0; i = k->before[i])
        largest = crn_max(largest, between(k, k->before[i], i));
    return largest;
}

static void keep(const cubic *k, int64_t bytes, crn_selection *selection)
{
    selection->objective_bytes = bytes;
    for (int32_t i = k->n; i > 0; i = k->before[i])
        selection->next[k->before[i]] = i;
}

static void descend(const crn_task *task, cubic *k, crn_selection *selection)
{
    int64_t s = k->prefix[k->n];
    selection->objective_bytes = INT64_MAX;
    while (s >= 0) {
        sweep(k, s);
        if (k->c[k->n] >= selection->objective_bytes)
            return;
        s = largest_segment(k);
        if (s + k->c[k->n] < selection->objective_bytes)
            keep(k, s + k->c[k->n], selection);
        s--;
        if (crn_should_stop(task, NULL)) {
            selection->stopped_early = true;
            return;
        }
    }
}

static cairn_status choose(const crn_task *task, crn_selection *selection, cairn_error *error)
{
    size_t count = (size_t)selection->n + 1;
    cubic k = {.n = selection->n, .d = selection->size};
    k.prefix = crn_arena_alloc(&selection->arena, count, sizeof(*k.prefix));
    k.c = crn_arena_alloc(&selection->arena, count, sizeof(*k.c));
    k.before = crn_arena_alloc(&selection->arena, count, sizeof(*k.before));
    k.queue = crn_arena_alloc(&selection->arena, count, sizeof(*k.queue));
    if (!k.prefix || !k.c || !k.before || !k.queue)
        return crn_no_memory(error);
    k.prefix[0] = k.d[0];
    for (int32_t i = 1; i <= k.n; i++)
        k.prefix[i] = k.prefix[i - 1] + k.d[i];
    descend(task, &k, selection);
    return CAIRN_OK;
}

static cairn_status select_cubic_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_selection_open(task, choose, session, error);
}

/* As measured, for sizes of many kinds: the bounds that are tried are some n, not n^2. */
static int64_t select_cubic_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return crn_mul_saturating(n * n, 16);
}

const crn_solver crn_select_cubic_solver = {
    .info = {.name = "select-cubic",
             .takes_chains = true,
             .available = true,
             .minimizes_memory = true,
             .optimal_in = "eq6",
             .summary = "checkpoints that minimize eq. 6: all checkpoints and the largest segment",
             .source = "Hong et al., algorithm 3",
             .cost = "O(n^3) time, O(n) memory"},
    .options = "objective=eq6",
    .accepts = crn_selection_accepts,
    .work = select_cubic_work,
    .open = select_cubic_open,
    .close = crn_selection_close,
    .least = crn_selection_least,
    .solve = crn_selection_solve,
};
