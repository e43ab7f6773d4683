/*
 * select-acg: checkpoints for the least memory in the sense of eq. 6, on an arbitrary graph.
 *
 * Problem   Of the forward's storages some are checkpoints. The others fall into *independent segments*: sets with no
 *           dependency from one to another but through checkpoints, the connected components of what is left. Wanted is
 *           the least
 *
 *   sum of the bytes of all checkpoints + largest sum of bytes of a segment.
 *
 *           The last forward storage, outputs, and what must not run twice are always checkpoints.
 * Source    Feng & Huang, "Optimal gradient checkpoint search for arbitrary computation graphs" (2021): a graph is
 *           divided at single values into sets that can be solved each by itself, and those that lie side by side
 *           between the same two values likewise; for every bound s on the segments, the least sum of checkpoints. On a
 *           chain this is Hong et al.'s eq. 6, and the answer is that of select-cubic.
 *
 * Division  A part is a connected set of storages around which all are checkpoints, in index order. The frontier of a
 *           position in it: the storages before the position with a neighbour after it. With the frontiers of two
 *           positions as checkpoints, what lies between them is independent of the rest. So, with c(p) the least bytes
 *           of checkpoints up to position p, its frontier included, and new(p,q) what the frontier of q adds to p's,
 *
 *   c(q) = min over p < q of c(p) + new(p,q)              where no segment between p and q has more than s bytes
 *                          c(p) + new(p,q) + sum of c     over the parts between, for neighbouring narrow positions
 *                          c(p) + all bytes between       for neighbouring positions.
 *
 *           A position is narrow when its frontier is one storage: there the graph is in series, and what lies between
 *           two of them falls into branches, which are parts themselves. A part of no more than s bytes needs nothing.
 *           Frontiers of several storages are a third way, for sets that are neither in series nor parallel.
 *           After the last storage of a part a neighbour of no bytes is assumed, so that there is a position whose
 *           frontier is that storage: where branches meet at the very end, it is the one to be a checkpoint.
 * Bounds    Halved first, for an answer to beat. Then from above: the sum of checkpoints c does not increase with s, so when
 *           the largest segment found under s has s' bytes, s' - 1 comes next; and nothing under s beats an answer of f
 *           bytes with a segment of f - c or more, so those are passed by, until the checkpoints alone reach f. With more
 *           than PAIRS_EXACT pairs of positions each step is at least 1/STEPS of s, and the answer may be that much larger.
 * Schedule  The checkpoints stay; what the backward lacks is recomputed as little as possible (graph_replan.h).
 * Cost      O(P E + S P^2) for P positions, at most POSITIONS_MAX in a part, and S bounds; O(P^2 + E) memory. With a time
 *           limit there are as many positions as it has time for. Stopped before that, everything is a checkpoint.
 * Optimal   In eq. 6 over sets made of frontiers, branch by branch. Over all sets the problem is NP-hard (weighted vertex
 *           integrity).
 */
#include <string.h>

#include "solve/graph/acg_parts.h"

enum { PAIRS_EXACT = 1 << 17, STEPS = 256 };

/* ---- all bounds ---- */

/* The checkpoints under a bound on the segments, remembered where they are the best so far. Returns their bytes. */
static int64_t solve_under(crn_acg *a, int64_t s, int64_t *largest_bytes)
{
    size_t n = (size_t)a->model->node_count;
    int64_t checkpoints = 0, largest = 0;
    for (crn_acg_part *part = a->parts; part; part = part->sibling)
        checkpoints += crn_acg_solve(part, s);
    memset(a->kept, 0, n * sizeof(*a->kept));
    for (const crn_acg_part *part = a->parts; part; part = part->sibling)
        largest = crn_max(largest, crn_acg_mark(a, part, s));
    if (checkpoints + largest < a->objective_bytes) {
        a->objective_bytes = checkpoints + largest;
        memcpy(a->best_kept, a->kept, n * sizeof(*a->kept));
    }
    *largest_bytes = largest;
    return checkpoints;
}

static bool stops(const crn_task *task, crn_acg *a)
{
    a->stopped_early = a->stopped_early || crn_should_stop(task, NULL);
    return a->stopped_early;
}

static void descend(const crn_task *task, crn_acg *a)
{
    int64_t largest, next;
    a->objective_bytes = INT64_MAX;
    int64_t checkpoints = solve_under(a, INT64_MAX, &largest);
    for (int64_t s = largest / 2; s > 0 && checkpoints < a->objective_bytes && !stops(task, a); s /= 2)
        checkpoints = solve_under(a, s, &next);
    for (int64_t s = a->objective_bytes - 1; s >= 0 && !stops(task, a); s = next) {
        checkpoints = solve_under(a, s, &largest);
        if (checkpoints >= a->objective_bytes)
            break;
        next = largest - 1 - (a->pairs > PAIRS_EXACT ? largest / STEPS : 0);
        next = crn_min(next, a->objective_bytes - checkpoints - 1);
    }
}

/* Without parts: everything is a checkpoint. */
static void keep_all(crn_acg *a)
{
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        if (crn_acg_is_forward(a, s) && !crn_acg_is_fixed(a, s)) {
            a->best_kept[s] = true;
            a->objective_bytes += a->model->bytes[s];
        }
}

static void keep_fixed(crn_acg *a)
{
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        if (crn_acg_is_forward(a, s) && crn_acg_is_fixed(a, s)) {
            a->best_kept[s] = true;
            a->objective_bytes += a->model->bytes[s];
        }
}

/* ---- the session ---- */

/* The simulator's peak: what a pass over the sequence finds may be more, where aliases are recomputed. */
static cairn_status measure(const crn_task *task, crn_acg *a, cairn_error *error)
{
    cairn_builder *builder;
    cairn_replay replay;
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    cairn_status status = crn_sequence_emit(&a->eval, &a->replan.sequence, builder, error);
    if (status == CAIRN_OK)
        status = crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, error);
    cairn_builder_free(builder);
    if (status != CAIRN_OK)
        return status;
    a->peak_bytes = replay.valid ? replay.peak_bytes : INT64_MAX;
    return replay.valid || replay.violation.code == CAIRN_VIOLATION_OVERFLOW
               ? CAIRN_OK
               : crn_fail(error, CAIRN_INTERNAL, "select-acg: %s", replay.violation.message);
}

static cairn_status fill(const crn_task *task, crn_acg *a, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &a->model, error));
    int32_t capacity = crn_sequence_capacity(a->model->node_count, CRN_REPLAN_TIMES);
    CRN_TRY(crn_sequence_eval_new(a->model, &a->arena, capacity, &a->eval, error));
    CRN_TRY(crn_replan_new(a->model, &a->arena, capacity, &a->replan, error));
    crn_replan_find_backward(&a->replan, cairn_problem_graph(task->problem), &a->eval);
    bool is_divided = crn_acg_make(a, task);
    if (!is_divided && !a->stopped_early)
        return crn_no_memory(error);
    if (is_divided)
        descend(task, a);
    else
        keep_all(a);
    keep_fixed(a);
    if (!crn_replan_make(&a->replan, a->best_kept))
        return crn_fail(error, CAIRN_TOO_LARGE, "the schedule would have more than %lld computations",
                        (long long)capacity);
    return measure(task, a, error);
}

static void select_acg_close(const crn_task *task, void *session)
{
    crn_acg *a = session;
    (void)task;
    crn_graph_model_free(a->model);
    crn_arena_clear(&a->arena);
}

static cairn_status select_acg_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    crn_acg *a = crn_arena_alloc_zero(&arena, 1, sizeof(*a));
    *session = a;
    if (!a)
        return crn_no_memory(error);
    a->arena = arena;
    return fill(task, a, error);
}

static cairn_status select_acg_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const crn_acg *a = session;
    (void)task;
    (void)error;
    least->bytes = a->peak_bytes == INT64_MAX ? CAIRN_NONE : a->peak_bytes;
    least->is_rough = a->stopped_early;
    return CAIRN_OK;
}

static cairn_status list_checkpoints(const crn_task *task, const crn_acg *a, crn_answer *answer, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    int32_t count = 0;
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        count += a->best_kept[s];
    answer->checkpoints = crn_alloc(&allocator, (size_t)count, sizeof(*answer->checkpoints));
    if (!answer->checkpoints)
        return crn_no_memory(error);
    answer->checkpoint_count = 0;
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        if (a->best_kept[s])
            answer->checkpoints[answer->checkpoint_count++] = s;
    return CAIRN_OK;
}

static cairn_status select_acg_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                     cairn_error *error)
{
    crn_acg *a = session;
    answer->stopped_early = a->stopped_early;
    if (a->peak_bytes == INT64_MAX || (budget_bytes != CAIRN_NONE && a->peak_bytes > budget_bytes))
        return CAIRN_OK;
    CRN_TRY(list_checkpoints(task, a, answer, error));
    answer->objective_bytes = a->objective_bytes;
    answer->found = true;
    return crn_sequence_emit(&a->eval, &a->replan.sequence, answer->builder, error);
}

/* Parts lie in parts, but what is in a child is not in another; twice the largest level is plenty in practice. */
static int64_t select_acg_memory(const crn_task *task)
{
    int64_t nodes = cairn_problem_graph(task->problem)->node_count;
    return nodes * (crn_min(nodes, CRN_ACG_POSITIONS_MAX) * (int64_t)sizeof(crn_acg_piece) + 512);
}

static int64_t select_acg_work(const crn_task *task)
{
    int64_t nodes = cairn_problem_graph(task->problem)->node_count, positions = crn_min(nodes, CRN_ACG_POSITIONS_MAX);
    return nodes * positions * 64;
}

const crn_solver crn_select_acg_solver = {
    .info = {.name = "select-acg",
             .takes_graphs = true,
             .available = true,
             .minimizes_memory = true,
             .optimal_in = "",
             .summary = "checkpoints that minimize eq. 6 on a graph divided into independent segments",
             .source = "Feng & Huang 2021; Hong et al., eq. 6",
             .cost = "O(P E + S P^2) for P positions and S bounds"},
    .memory = select_acg_memory,
    .work = select_acg_work,
    .open = select_acg_open,
    .close = select_acg_close,
    .least = select_acg_least,
    .solve = select_acg_solve,
};
