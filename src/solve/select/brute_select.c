/*
 * brute-select: the best checkpoints by trying all sets. The oracle of the selection solvers.
 *
 * The problem and both objectives are in selection.h; option "objective" says which (eq9, or eq6). Each of the
 * 2^(n-1) sets is measured by the definition, so nothing here depends on a recurrence. O(2^n n) time; refused above
 * LAYERS_MAX layers. Optimal in the objective.
 */
#include "solve/select/selection.h"

enum { LAYERS_MAX = 16 };

/* Bit i of a set says whether i is a checkpoint; 0 and n are. */
static bool is_in(uint32_t set, int32_t i)
{
    return (set >> i & 1) != 0;
}

static int64_t checkpoint_bytes(const crn_selection *selection, uint32_t set, int32_t last)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i <= last; i++)
        bytes += is_in(set, i) ? selection->size[i] : 0;
    return bytes;
}

/* Eq. 6's part, or eq. 9's, of the segment that ends at checkpoint i. */
static int64_t segment_bytes(const crn_selection *selection, uint32_t set, int32_t i, bool eq6)
{
    int64_t between = 0, largest = 0;
    int32_t h = i - 1;
    for (; !is_in(set, h); h--) {
        between += selection->size[h];
        largest = crn_max(largest, selection->size[h]);
    }
    largest = crn_max(largest, selection->size[h]);
    return eq6 ? checkpoint_bytes(selection, set, selection->n) + between
               : checkpoint_bytes(selection, set, i) + between + largest;
}

static int64_t measure(const crn_selection *selection, uint32_t set, bool eq6)
{
    int64_t bytes = 0;
    for (int32_t i = 1; i <= selection->n; i++)
        if (is_in(set, i))
            bytes = crn_max(bytes, segment_bytes(selection, set, i, eq6));
    return bytes;
}

static cairn_status choose(const crn_task *task, crn_selection *selection, cairn_error *error)
{
    uint32_t ends = (uint32_t)1 << selection->n | 1, best = 0;
    selection->objective_bytes = INT64_MAX;
    (void)error;
    for (uint32_t set = ends; set < (uint32_t)2 << selection->n; set += 2) {
        int64_t bytes = measure(selection, set, task->settings->objective_eq6);
        if (bytes < selection->objective_bytes) {
            selection->objective_bytes = bytes;
            best = set;
        }
    }
    for (int32_t i = selection->n, j = i; i >= 0; i--)
        if (is_in(best, i)) {
            selection->next[i] = j;
            j = i;
        }
    return CAIRN_OK;
}

static cairn_status brute_select_accepts(const crn_task *task, cairn_error *error)
{
    int32_t n = cairn_problem_chain(task->problem)->stage_count;
    if (n > LAYERS_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "brute-select takes at most %d layers, not %d", LAYERS_MAX, (int)n);
    return crn_selection_accepts(task, error);
}

static cairn_status brute_select_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_selection_open(task, choose, session, error);
}

static cairn_status brute_select_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                       cairn_error *error)
{
    answer->optimal_in = task->settings->objective_eq6 ? "eq6" : "eq9";
    return crn_selection_solve(task, session, budget_bytes, answer, error);
}

const crn_solver crn_brute_select_solver = {
    .info = {.name = "brute-select",
             .takes_chains = true,
             .available = true,
             .minimizes_memory = true,
             .exhaustive = true,
             .optimal_in = "",
             .summary = "the best checkpoints of at most 16 layers, by trying all sets; the oracle",
             .source = "Hong et al., eqs. 6 and 9",
             .cost = "O(2^n n)"},
    .options = "objective",
    .accepts = brute_select_accepts,
    .open = brute_select_open,
    .close = crn_selection_close,
    .least = crn_selection_least,
    .solve = brute_select_solve,
};
