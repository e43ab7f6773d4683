/*
 * select-quadratic: checkpoints for the least memory in the sense of eq. 9, by the plain recurrence.
 *
 * Source: Hong et al., algorithm 5; the problem and eq. 9 are in selection.h. With d[i] a checkpoint,
 *
 *   M(n) = d[n],   M(i) = d[i] + min over i < j <= n of max(M(j), U(i,j)),
 *   U(i,j) = d[i+1] + ... + d[j] + max(d[i], ..., d[j-1]):
 *
 * j is the next checkpoint; the peak comes after it, or while the segment (i,j) is reversed. M(0) is the answer.
 *
 * Deviations: the printed range of eq. 13 leaves out j = n, without which a chain of one segment could not be; i goes
 * down to 0, so that the objective counts the input. Of several best j the first, as select-linear takes it.
 * O(n^2) time, O(n) memory. Optimal in eq. 9.
 */
#include "solve/select/selection.h"

/* Steps between two questions whether to stop. */
enum { POLL_STEPS = 1 << 22 };

static int64_t best_from(const crn_selection *selection, const int64_t *M, int32_t i, int32_t *best_j)
{
    const int64_t *d = selection->size;
    int64_t best = INT64_MAX, sum = 0, largest = 0;
    for (int32_t j = i + 1; j <= selection->n; j++) {
        sum += d[j];
        largest = crn_max(largest, d[j - 1]);
        int64_t bytes = crn_max(M[j], sum + largest);
        if (bytes < best) {
            best = bytes;
            *best_j = j;
        }
    }
    return best;
}

static cairn_status choose(const crn_task *task, crn_selection *selection, cairn_error *error)
{
    int32_t n = selection->n;
    int64_t steps = 0;
    int64_t *M = crn_arena_alloc(&selection->arena, (size_t)n + 1, sizeof(*M));
    if (!M)
        return crn_no_memory(error);
    M[n] = selection->size[n];
    for (int32_t i = n - 1; i >= 0; i--) {
        M[i] = selection->size[i] + best_from(selection, M, i, &selection->next[i]);
        steps += n - i;
        if (steps < POLL_STEPS)
            continue;
        steps = 0;
        if (crn_should_stop(task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped while choosing checkpoints");
    }
    selection->objective_bytes = M[0];
    return CAIRN_OK;
}

static cairn_status select_quadratic_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_selection_open(task, choose, session, error);
}

static int64_t select_quadratic_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return n * n;
}

const crn_solver crn_select_quadratic_solver = {
    .info = {.name = "select-quadratic",
             .takes_chains = true,
             .available = true,
             .minimizes_memory = true,
             .optimal_in = "eq9",
             .summary = "checkpoints that minimize eq. 9: outputs released as the backward goes, a gradient buffer",
             .source = "Hong et al., algorithm 5",
             .cost = "O(n^2) time, O(n) memory"},
    .rank = 1,
    .options = "objective=eq9",
    .accepts = crn_selection_accepts,
    .work = select_quadratic_work,
    .open = select_quadratic_open,
    .close = crn_selection_close,
    .least = crn_selection_least,
    .solve = crn_selection_solve,
};
