#include "solve/graph/graph_sweep.h"

#include <string.h>

/* At most so many pieces wait at a time. Most are at most three quarters of the one before, so long rows fit. */
enum { PIECES_MAX = 128, TRIES = 12 };

/* Forward nodes after begin, up to end. */
typedef struct piece {
    int32_t begin, end;
} piece;

struct crn_sweep {
    const crn_graph_model *model;
    int32_t backward_begin;
    int64_t *whole_bytes; /* of forward storages that forward nodes after v read */
    int64_t *piece_bytes; /* the same within the piece at hand; scratch */
    int64_t *live_bytes;  /* the one of them by which cuts are chosen */
    bool *again;          /* of a forward node: backward nodes need it, directly or not, and it may run again */
    int32_t *front;       /* of a backward node: the last forward storage that it or a later one reads, -1 = none */
    piece waiting[PIECES_MAX + 1]; /* pieces whose cut is kept; then the one that is resident */
    int32_t waiting_count;
    int64_t lower_bytes;
    int tries;
    int64_t fits_bytes, long_bytes; /* the least cuts with room for the sequence, the most without */
};

static bool may_run_again(const crn_graph_model *model, int32_t s)
{
    return !model->once[s] && !model->keep[s];
}

/* From the last backward node to the first, then what those need, from the last to the first. */
static void find_needs(crn_sweep *w)
{
    const crn_graph_model *model = w->model;
    int32_t front = -1;
    for (int32_t v = model->node_count - 1; v >= 0; v--) {
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
            int32_t s = model->root[model->dep[i]];
            if (s >= w->backward_begin || !may_run_again(model, s) || (v < w->backward_begin && !w->again[v]))
                continue;
            w->again[s] = true;
            if (v >= w->backward_begin && s > front)
                front = s;
        }
        if (v >= w->backward_begin)
            w->front[v] = front;
    }
}

/* The last node up to `end` that reads storage s; s where there is none. */
static int32_t last_use_until(const crn_sweep *w, int32_t s, int32_t end)
{
    const crn_graph_model *model = w->model;
    int32_t low = model->use_begin[s], high = model->use_begin[s + 1];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (model->use[middle] <= end)
            low = middle + 1;
        else
            high = middle;
    }
    return low > model->use_begin[s] ? model->use[low - 1] : s;
}

/*
 * The bytes that cross each cut of a piece. Only storages of the piece that its nodes read count: storages before the
 * piece are resident already, and nodes after the piece are not recomputed. Storages that always stay do not count.
 * Differences are computed first, then their sums.
 */
static void find_live(crn_sweep *w, piece p)
{
    const crn_graph_model *model = w->model;
    int64_t live = 0;
    memset(w->live_bytes + p.begin + 1, 0, (size_t)(p.end - p.begin) * sizeof(*w->live_bytes));
    for (int32_t v = p.begin + 1; v <= p.end; v++) {
        if (!w->again[v] || model->root[v] != v)
            continue;
        w->live_bytes[v] += model->bytes[v];
        w->live_bytes[last_use_until(w, v, p.end)] -= model->bytes[v];
    }
    for (int32_t v = p.begin + 1; v <= p.end; v++)
        w->live_bytes[v] = live += w->live_bytes[v];
}

crn_sweep *crn_sweep_new(const crn_graph_model *model, int32_t backward_begin, int64_t lower_bytes, crn_arena *arena)
{
    size_t n = (size_t)model->node_count;
    crn_sweep *w = crn_arena_alloc_zero(arena, 1, sizeof(*w));
    if (!w)
        return NULL;
    w->model = model;
    w->backward_begin = backward_begin;
    w->lower_bytes = lower_bytes;
    w->whole_bytes = crn_arena_alloc_zero(arena, n, sizeof(*w->whole_bytes));
    w->piece_bytes = crn_arena_alloc_zero(arena, n, sizeof(*w->piece_bytes));
    w->again = crn_arena_alloc_zero(arena, n, sizeof(*w->again));
    w->front = crn_arena_alloc_zero(arena, n, sizeof(*w->front));
    if (!w->whole_bytes || !w->piece_bytes || !w->again || !w->front)
        return NULL;
    find_needs(w);
    w->live_bytes = w->whole_bytes;
    find_live(w, (piece){-1, backward_begin - 1});
    return w;
}

static bool put(crn_sequence *sequence, int32_t v)
{
    if (sequence->count == sequence->capacity)
        return false;
    sequence->node[sequence->count++] = v;
    return true;
}

/*
 * The cut in the middle half that the fewest bytes cross; of equal ones the nearest to the middle. At least two nodes.
 */
static int32_t best_cut(const crn_sweep *w, piece p)
{
    int32_t count = p.end - p.begin, best = p.begin + count / 2;
    for (int32_t away = 1; away <= count / 4; away++) {
        int32_t before = p.begin + count / 2 - away, after = p.begin + count / 2 + away;
        if (before > p.begin && w->live_bytes[before] < w->live_bytes[best])
            best = before;
        if (after < p.end && w->live_bytes[after] < w->live_bytes[best])
            best = after;
    }
    return best;
}

/* The cut nearest the middle that few bytes cross, beyond the middle half; else before the last node. */
static int32_t distant_cut(const crn_sweep *w, piece p, int64_t cut_bytes)
{
    int32_t count = p.end - p.begin, middle = p.begin + count / 2;
    for (int32_t away = count / 4 + 1; away <= count / 2; away++) {
        if (middle + away < p.end && w->live_bytes[middle + away] <= cut_bytes)
            return middle + away;
        if (middle - away > p.begin && w->live_bytes[middle - away] <= cut_bytes)
            return middle - away;
    }
    return p.end - 1;
}

/*
 * Halves the piece that has just been computed, towards its end. The pieces before each cut wait. Where no cut has few
 * bytes, the last node is a piece of its own; the nodes before it are recomputed from the cut at which the piece
 * begins.
 */
static void halve(crn_sweep *w, piece p, int64_t cut_bytes)
{
    while (p.end - p.begin > 1 && w->waiting_count < PIECES_MAX) {
        bool by_piece = w->live_bytes == w->piece_bytes;
        if (by_piece)
            find_live(w, p);
        int32_t cut = best_cut(w, p);
        cut = w->live_bytes[cut] <= cut_bytes ? cut : by_piece ? distant_cut(w, p, cut_bytes) : p.end - 1;
        w->waiting[w->waiting_count++] = (piece){p.begin, cut};
        p.begin = cut;
    }
    w->waiting[w->waiting_count] = p; /* this one is resident */
}

/* Recomputes what the next backward nodes read, unless it is in the resident piece. */
static bool bring_back(crn_sweep *w, int32_t front, int64_t cut_bytes, crn_sequence *sequence)
{
    if (front > w->waiting[w->waiting_count].begin)
        return true;
    while (w->waiting_count > 0) {
        piece p = w->waiting[--w->waiting_count];
        if (front <= p.begin)
            continue;
        p.end = (int32_t)crn_min(p.end, front);
        for (int32_t v = p.begin + 1; v <= p.end; v++)
            if (w->again[v] && !put(sequence, v))
                return false;
        halve(w, p, cut_bytes);
        return true;
    }
    return true;
}

bool crn_sweep_run(crn_sweep *w, int64_t cut_bytes, crn_sequence *sequence)
{
    const crn_graph_model *model = w->model;
    sequence->count = w->waiting_count = 0;
    for (int32_t v = 0; v < w->backward_begin; v++)
        if (!put(sequence, v))
            return false;
    halve(w, (piece){-1, w->backward_begin - 1}, cut_bytes);
    for (int32_t v = w->backward_begin; v < model->node_count; v++)
        if ((w->front[v] >= 0 && !bring_back(w, w->front[v], cut_bytes, sequence)) || !put(sequence, v))
            return false;
    return true;
}

static void choose_by(crn_sweep *w, bool by_piece)
{
    w->live_bytes = by_piece ? w->piece_bytes : w->whole_bytes;
}

bool crn_sweep_nth(crn_sweep *w, int i, crn_sequence *sequence)
{
    choose_by(w, i < TRIES);
    int try = i % TRIES;
    return i < 2 * TRIES && crn_sweep_run(w, try == 0 ? INT64_MAX : w->lower_bytes >> try, sequence);
}

bool crn_sweep_next(crn_sweep *w, crn_sequence *sequence, bool *has_room)
{
    int try = w->tries % TRIES;
    int64_t cut_bytes = try == 0 ? INT64_MAX : w->long_bytes + (w->fits_bytes - w->long_bytes) / 2;
    if (w->tries == 2 * TRIES)
        return false;
    w->long_bytes = try == 0 ? 0 : w->long_bytes;
    choose_by(w, w->tries < TRIES);
    *has_room = crn_sweep_run(w, cut_bytes, sequence);
    if (*has_room)
        w->fits_bytes = try == 0 ? w->lower_bytes : cut_bytes;
    else
        w->long_bytes = cut_bytes;
    w->tries++;
    return true;
}
