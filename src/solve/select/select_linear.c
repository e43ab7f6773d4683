/*
 * select-linear: checkpoints for the least memory in the sense of eq. 9, in linear time.
 *
 * Source: Hong et al., algorithm 6, corrected; the problem and eq. 9 are in selection.h, the recurrence for M and U in
 * select_quadratic.c. For i from n - 1 down to 0 the best j > i is to be found.
 *
 *   Q         The j that can be best: those without a smaller j' of M(j') <= M(j), for U(i,j') <= U(i,j) as well. In
 *             increasing order of j, M strictly decreases along Q and U(i,.) does not decrease.
 *   crossed   The j of Q with U(i,j) >= M(j): they stand at its end, and stay crossed as i goes down, for U(i-1,j) >=
 *             U(i,j). Let p be the last that is not crossed, q the first that is. Before p the maximum is M, which is
 *             larger than M(p); after q it is U, which is not less than U(i,q). So the best is p, if M(p) <= U(i,q),
 *             else q, and it is the first of all best ones.
 *   M(i)      enters Q at its front and removes what is not less from there. M(i) >= M(q), so that q goes only if
 *             they are equal (then d[i] = 0). From then on U(.,j) >= M(i) for all j after q: nothing of them is ever
 *             better than i or what takes its place, and q is "none" until another element is crossed.
 *   max       in U(i,j): the records of d[i], d[i+1], ... (larger than all before) on a stack with i on top; the
 *             largest of d[i .. j-1] is the last record before j. The records for p and for q only move to the top.
 *
 * Each element enters and leaves Q and the stack once, and each pointer moves in one direction: O(n) time and memory.
 *
 * Deviations: the printed algorithm compares j with j + 1; it is the next element of Q after j that must be compared,
 * since j + 1 may have left Q, and then what is known of it is no candidate. The range includes j = n and i = 0. What
 * happens when the last choice has left Q, which sizes of zero bring about, is not said in print.
 * Optimal in eq. 9.
 */
#include "solve/select/selection.h"

typedef struct sweep {
    const int64_t *d, *prefix; /* prefix[j] = d[1] + ... + d[j] */
    int64_t *M;
    int32_t *queue, queue_count; /* Q; its front is queue[queue_count - 1] */
    int32_t crossed;             /* elements queue[0 .. crossed - 1] are; queue[crossed] is p */
    bool has_q;                  /* q is queue[crossed - 1]; else there is none */
    int32_t *record, record_count;
    int32_t p_record, q_record; /* positions of the largest of d[i .. p-1] and d[i .. q-1] */
} sweep;

static void push_record(sweep *w, int32_t i)
{
    while (w->record_count > 0 && w->d[w->record[w->record_count - 1]] <= w->d[i])
        w->record_count--;
    w->p_record = (int32_t)crn_min(w->p_record, w->record_count);
    w->q_record = (int32_t)crn_min(w->q_record, w->record_count);
    w->record[w->record_count++] = i;
}

static int64_t segment_bytes(const sweep *w, int32_t i, int32_t j, int32_t record)
{
    return w->prefix[j] - w->prefix[i] + w->d[w->record[record]];
}

static bool next_is_crossed(sweep *w, int32_t i)
{
    if (w->crossed == w->queue_count)
        return false;
    int32_t p = w->queue[w->crossed];
    while (w->record[w->p_record] >= p)
        w->p_record++;
    return segment_bytes(w, i, p, w->p_record) >= w->M[p];
}

/* The best j; its max(M(j), U(i,j)) goes to *bytes. */
static int32_t best_next(sweep *w, int32_t i, int64_t *bytes)
{
    while (next_is_crossed(w, i)) {
        w->crossed++;
        w->has_q = true;
        w->q_record = w->p_record;
    }
    int64_t at_q = w->has_q ? segment_bytes(w, i, w->queue[w->crossed - 1], w->q_record) : INT64_MAX;
    if (w->crossed < w->queue_count && w->M[w->queue[w->crossed]] <= at_q) {
        *bytes = w->M[w->queue[w->crossed]];
        return w->queue[w->crossed];
    }
    *bytes = at_q;
    return w->queue[w->crossed - 1];
}

static void enter_queue(sweep *w, int32_t i)
{
    while (w->queue_count > 0 && w->M[w->queue[w->queue_count - 1]] >= w->M[i])
        w->queue_count--;
    if (w->crossed > w->queue_count) {
        w->crossed = w->queue_count;
        w->has_q = false;
    }
    w->queue[w->queue_count++] = i;
}

static bool reserve(const crn_selection *selection, crn_arena *arena, sweep *w, int64_t **prefix)
{
    size_t count = (size_t)selection->n + 1;
    *w = (sweep){.d = selection->size};
    w->prefix = *prefix = crn_arena_alloc(arena, count, sizeof(**prefix));
    w->M = crn_arena_alloc(arena, count, sizeof(*w->M));
    w->queue = crn_arena_alloc(arena, count, sizeof(*w->queue));
    w->record = crn_arena_alloc(arena, count, sizeof(*w->record));
    return w->prefix && w->M && w->queue && w->record;
}

static void choose_with(crn_selection *selection, sweep *w, int64_t *prefix)
{
    int32_t n = selection->n;
    prefix[0] = 0;
    for (int32_t j = 1; j <= n; j++)
        prefix[j] = prefix[j - 1] + w->d[j];
    w->M[n] = w->d[n];
    enter_queue(w, n);
    for (int32_t i = n - 1; i >= 0; i--) {
        int64_t bytes;
        push_record(w, i);
        selection->next[i] = best_next(w, i, &bytes);
        w->M[i] = w->d[i] + bytes;
        enter_queue(w, i);
    }
    selection->objective_bytes = w->M[0];
}

/* What it needs beside the choice goes before the schedule is made, whose operations then take the same pages. */
static cairn_status choose(const crn_task *task, crn_selection *selection, cairn_error *error)
{
    crn_arena arena;
    sweep w;
    int64_t *prefix;
    crn_arena_init(&arena, crn_allocator(task->env));
    bool fits = reserve(selection, &arena, &w, &prefix);
    if (fits)
        choose_with(selection, &w, prefix);
    crn_arena_clear(&arena);
    return fits ? CAIRN_OK : crn_no_memory(error);
}

static cairn_status select_linear_open(const crn_task *task, void **session, cairn_error *error)
{
    return crn_selection_open(task, choose, session, error);
}

const crn_solver crn_select_linear_solver = {
    .info = {.name = "select-linear",
             .takes_chains = true,
             .available = true,
             .minimizes_memory = true,
             .optimal_in = "eq9",
             .summary = "the choice of select-quadratic in linear time",
             .source = "Hong et al., algorithm 6, corrected",
             .cost = "O(n) time and memory"},
    .rank = 2, /* the same set of checkpoints as select-quadratic */
    .options = "objective=eq9",
    .accepts = crn_selection_accepts,
    .open = select_linear_open,
    .close = crn_selection_close,
    .least = crn_selection_least,
    .solve = crn_selection_solve,
};
