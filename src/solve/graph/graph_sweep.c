#include "solve/graph/graph_sweep.h"

#include <string.h>

/* At most so many pieces wait at a time; what is left when there are more is recomputed whole. */
enum { PIECES_MAX = 128 };
/* Nodes that the choice of cuts may look at, for each event that a sequence has room for; some 2 are usual. */
enum { LOOKS_MAX = 32 };
/* Cuts at a time that an estimate of the work counts on, and how many such cuts take what the average one takes. */
enum { CUTS_MAX = 4, CHEAP_CUTS = 4 };
/* Budgets of the search: by bisection, then between what it ends at and the least peak; and those of crn_sweep_nth. */
enum { BISECTIONS = 14, SPREAD = 10, NTH_MAX = 16 };

/* Forward nodes after begin, up to end; kept_bytes: of the cuts that are resident while it is at hand. */
typedef struct piece {
    int32_t begin, end;
    int64_t kept_bytes;
} piece;

struct crn_sweep {
    const crn_graph_model *model;
    int32_t backward_begin;
    bool *again;    /* of a forward node: backward nodes need it, directly or not, and it may run again */
    int32_t *front; /* of a backward node: the last forward storage that it or a later one reads, -1 = none */
    /* Of a forward node, in bytes. Backward nodes whose front it is come right after it was recomputed. */
    int64_t *held;                  /* what backward nodes hold while it is brought back; with what never runs again */
    int64_t *own;                   /* what those nodes need, with the forward storages that they read */
    int64_t *own_alone;             /* the same without forward storages before it */
    int64_t *run;                   /* storages of the piece at hand while it is recomputed in it; scratch */
    int64_t *cut;                   /* those that cross the cut after it; scratch */
    int64_t *left;                  /* what the piece needs up to it, without another cut; scratch */
    int64_t *again_at;              /* what recomputing the piece up to it takes; scratch */
    int32_t *repeats[CUTS_MAX + 1]; /* [cuts][nodes]: how often each node is recomputed, at most */
    int64_t cheap_bytes;            /* what a cheap cut takes */
    piece waiting[PIECES_MAX + 1];  /* pieces whose cut is kept; then the one that is resident */
    int32_t waiting_count;
    int64_t looks;      /* nodes looked at so far, of one sequence */
    int64_t room_bytes; /* the budget without what is always resident */
    int64_t lower_bytes;
    int tries;
    bool asked_lower;
    int64_t fits_bytes, long_bytes; /* the least budget with room for the sequence, the most without; -1 = none yet */
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

/* The first of the uses from low on, not included high, that are beyond node `end`; high where there is none. */
static int32_t first_beyond(const crn_sweep *w, int32_t low, int32_t high, int32_t end)
{
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (w->model->use[middle] <= end)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The same of backward nodes whose front is `end` or before it; fronts fall along the uses. */
static int32_t first_in_front(const crn_sweep *w, int32_t low, int32_t high, int32_t end)
{
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (w->front[w->model->use[middle]] > end)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/*
 * The last forward node up to `end` at which storage s is read; s where there is none. Backward nodes read it when their
 * front is there.
 */
static int32_t last_use_until(const crn_sweep *w, int32_t s, int32_t end)
{
    const crn_graph_model *model = w->model;
    int32_t begin = model->use_begin[s], behind = model->use_begin[s + 1], last = s;
    int32_t forward = first_beyond(w, begin, behind, end);
    int32_t backward = first_beyond(w, forward, behind, w->backward_begin - 1);
    if (forward > begin)
        last = (int32_t)crn_max(last, model->use[forward - 1]);
    backward = first_in_front(w, backward, behind, end);
    if (backward < behind)
        last = (int32_t)crn_max(last, w->front[model->use[backward]]);
    return last;
}

static int32_t last_use(const crn_graph_model *model, int32_t s)
{
    return model->use_begin[s + 1] > model->use_begin[s] ? model->use[model->use_begin[s + 1] - 1] : s;
}

/* What is resident before each backward node without being recomputed: differences first, then their sums. */
static void find_resident(const crn_sweep *w, int64_t *resident)
{
    const crn_graph_model *model = w->model;
    int64_t sum = 0;
    for (int32_t s = 0; s < model->node_count; s++) {
        int32_t last = model->keep[s] ? model->node_count - 1 : last_use(model, s);
        int32_t first = (int32_t)crn_max(s + 1, w->backward_begin);
        if (model->root[s] != s || last < first || (s < w->backward_begin && may_run_again(model, s)))
            continue;
        resident[first] += model->bytes[s];
        if (last + 1 < model->node_count)
            resident[last + 1] -= model->bytes[s];
    }
    for (int32_t v = w->backward_begin; v < model->node_count; v++)
        resident[v] = sum += resident[v];
}

/*
 * What backward nodes hold and need, by their front. A forward storage that several of the same front read stays from the
 * first to the last of them, so they are looked at from the last. `seen` is scratch, zero.
 */
static void find_backward_needs(crn_sweep *w, const int64_t *resident, int32_t *seen)
{
    const crn_graph_model *model = w->model;
    int64_t read_bytes = 0, alone_bytes = 0;
    for (int32_t v = model->node_count - 1; v >= w->backward_begin; v--) {
        int32_t front = w->front[v];
        if (front < 0)
            continue;
        if (v + 1 == model->node_count || w->front[v + 1] != front)
            read_bytes = alone_bytes = 0;
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
            int32_t s = model->root[model->dep[i]];
            if (s >= w->backward_begin || !w->again[s] || seen[s] == front + 1)
                continue;
            seen[s] = front + 1;
            read_bytes += model->bytes[s];
            alone_bytes += s == front ? model->bytes[s] : 0;
        }
        int64_t by_itself = resident[v] + model->bytes[v] + model->extra[v];
        w->held[front] = crn_max(w->held[front], resident[v]);
        w->own[front] = crn_max(w->own[front], by_itself + read_bytes);
        w->own_alone[front] = crn_max(w->own_alone[front], by_itself + alone_bytes);
    }
}

/*
 * What is in memory within a piece. Only storages of the piece that its nodes read count: storages before the piece are
 * resident already, and nodes after the piece are not recomputed. Differences are computed first, then their sums.
 */
static void find_live(crn_sweep *w, int32_t begin, int32_t end)
{
    const crn_graph_model *model = w->model;
    int64_t live = 0;
    memset(w->cut + begin + 1, 0, (size_t)(end - begin) * sizeof(*w->cut));
    for (int32_t v = begin + 1; v <= end; v++) {
        if (!w->again[v] || model->root[v] != v)
            continue;
        w->cut[v] += model->bytes[v];
        w->cut[last_use_until(w, v, end)] -= model->bytes[v];
    }
    for (int32_t v = begin + 1; v <= end; v++) {
        w->run[v] = live + (w->again[v] ? model->bytes[v] + model->extra[v] : 0);
        w->cut[v] = live += w->cut[v];
    }
}

/* With r repeats and k cuts at a time, as many nodes as there are ways to choose k of k + r (Griewank 1992). */
static void count_repeats(crn_sweep *w)
{
    for (int64_t k = 1; k <= CUTS_MAX; k++) {
        int64_t reached = 1, r = 0;
        for (int32_t nodes = 1; nodes <= w->backward_begin; nodes++) {
            for (; reached < nodes; r++)
                reached = reached * (k + r + 1) / (r + 1);
            w->repeats[k][nodes] = (int32_t)r;
        }
    }
}

/* What a cheap cut takes, as a part of what the average one takes. */
static int64_t cheap_cut_bytes(crn_sweep *w)
{
    int64_t average = 0;
    find_live(w, -1, w->backward_begin - 1);
    for (int32_t v = 0; v < w->backward_begin; v++)
        average += w->cut[v] / w->backward_begin;
    return crn_max(1, average / CHEAP_CUTS);
}

static bool find_all(crn_sweep *w, crn_arena *scratch)
{
    int64_t *resident = crn_arena_alloc_zero(scratch, (size_t)w->model->node_count, sizeof(*resident));
    int32_t *seen = crn_arena_alloc_zero(scratch, (size_t)w->backward_begin + 1, sizeof(*seen));
    if (!resident || !seen)
        return false;
    find_needs(w);
    find_resident(w, resident);
    find_backward_needs(w, resident, seen);
    count_repeats(w);
    w->cheap_bytes = cheap_cut_bytes(w);
    return true;
}

crn_sweep *crn_sweep_new(const crn_graph_model *model, int32_t backward_begin, int64_t lower_bytes, crn_arena *arena)
{
    size_t forward = (size_t)backward_begin + 1;
    crn_sweep *w = crn_arena_alloc_zero(arena, 1, sizeof(*w));
    if (!w)
        return NULL;
    int64_t **columns[] = {&w->held, &w->own, &w->own_alone, &w->run, &w->cut, &w->left, &w->again_at};
    bool has_memory = true;
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++)
        has_memory &= (*columns[i] = crn_arena_alloc_zero(arena, forward, sizeof(**columns[i]))) != NULL;
    for (int k = 1; k <= CUTS_MAX; k++)
        has_memory &= (w->repeats[k] = crn_arena_alloc_zero(arena, forward, sizeof(*w->repeats[k]))) != NULL;
    w->again = crn_arena_alloc_zero(arena, (size_t)model->node_count, sizeof(*w->again));
    w->front = crn_arena_alloc_zero(arena, (size_t)model->node_count, sizeof(*w->front));
    w->model = model;
    w->backward_begin = backward_begin;
    w->lower_bytes = lower_bytes;
    w->fits_bytes = w->long_bytes = -1;
    crn_arena scratch;
    crn_arena_init(&scratch, model->arena.allocator);
    has_memory = has_memory && w->again && w->front && find_all(w, &scratch);
    crn_arena_clear(&scratch);
    return has_memory ? w : NULL;
}

static bool put(crn_sequence *sequence, int32_t v)
{
    if (sequence->count == sequence->capacity)
        return false;
    sequence->node[sequence->count++] = v;
    return true;
}

/* Recomputations of a piece of so many nodes, of which so many bytes can be kept. */
static int64_t work_of(const crn_sweep *w, int32_t nodes, int64_t spare_bytes)
{
    int64_t cuts = crn_min(1 + crn_max(0, spare_bytes) / w->cheap_bytes, CUTS_MAX);
    return (int64_t)nodes * w->repeats[cuts][nodes] * cuts / (cuts + 1);
}

/* What the piece needs up to each of its nodes, if nothing is kept within it. */
static void find_left(crn_sweep *w, piece p)
{
    int64_t most = 0, need = 0;
    for (int32_t v = p.begin + 1; v < p.end; v++) {
        most = crn_max(most, w->run[v]);
        w->again_at[v] = most + w->held[v];
        need = crn_max(need, crn_max(w->again_at[v], w->own[v]));
        w->left[v] = need;
    }
}

/*
 * The cut with the least work after which the rest of the piece fits the budget, as it is, beside what crosses the cut.
 * Cuts up to which the piece can be recomputed afterwards within the budget come first. Where there is none, the last
 * node is a piece of its own: what crosses that cut has been read when it is done.
 */
static piece best_rest(crn_sweep *w, piece p)
{
    piece best = {p.end - 1, p.end, p.kept_bytes};
    bool best_returns = false;
    int64_t least = INT64_MAX, held = 0, need = 0, room = w->room_bytes - p.kept_bytes;
    w->looks += p.end - p.begin;
    find_live(w, p.begin, p.end);
    find_left(w, p);
    for (int32_t c = p.end - 1; c > p.begin && need <= room; c--) {
        held = crn_max(held, w->held[c + 1]);
        need = crn_max(need, w->run[c + 1] + held);
        int64_t spare = room - w->cut[c], first_alone = crn_max(need, w->own_alone[c + 1]);
        need = crn_max(need, w->own[c + 1]);
        if (spare < first_alone)
            continue;
        int64_t work =
            c - p.begin + work_of(w, c - p.begin, room - w->left[c]) + work_of(w, p.end - c, spare - first_alone);
        bool returns = w->again_at[c] <= room;
        if (returns > best_returns || (returns == best_returns && work < least)) {
            least = work;
            best_returns = returns;
            best = (piece){c, p.end, p.kept_bytes + w->cut[c]};
        }
    }
    return best;
}

/* Cuts the piece that has just been computed, towards its end. The pieces before each cut wait. */
static void divide(crn_sweep *w, piece p)
{
    while (p.end - p.begin > 1 && w->waiting_count < PIECES_MAX) {
        piece rest = best_rest(w, p);
        w->waiting[w->waiting_count++] = (piece){p.begin, rest.begin, p.kept_bytes};
        p = rest;
    }
    w->waiting[w->waiting_count] = p; /* this one is resident */
}

/* Recomputes what the next backward nodes read, unless it is in the resident piece. */
static bool bring_back(crn_sweep *w, int32_t front, crn_sequence *sequence)
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
        divide(w, p);
        return w->looks / LOOKS_MAX <= (int64_t)sequence->capacity;
    }
    return true;
}

bool crn_sweep_run(crn_sweep *w, int64_t budget_bytes, crn_sequence *sequence)
{
    const crn_graph_model *model = w->model;
    sequence->count = w->waiting_count = 0;
    w->looks = 0;
    w->room_bytes = budget_bytes - model->fixed_bytes;
    for (int32_t v = 0; v < w->backward_begin; v++)
        if (!put(sequence, v))
            return false;
    divide(w, (piece){-1, w->backward_begin - 1, 0});
    for (int32_t v = w->backward_begin; v < model->node_count; v++)
        if ((w->front[v] >= 0 && !bring_back(w, w->front[v], sequence)) || !put(sequence, v))
            return false;
    return true;
}

bool crn_sweep_nth(crn_sweep *w, int i, int64_t budget_bytes, crn_sequence *sequence)
{
    int64_t above = crn_max(0, budget_bytes - w->lower_bytes);
    return i < NTH_MAX && crn_sweep_run(w, budget_bytes - above / NTH_MAX * i, sequence);
}

/*
 * Twice the bound, which is soon done, and twice as much until there is room; the bound; then by bisection; then between
 * what that ends at and the least peak.
 */
static int64_t next_budget(const crn_sweep *w, int64_t peak_bytes)
{
    if (w->tries >= BISECTIONS)
        return w->fits_bytes + (peak_bytes - w->fits_bytes) / (SPREAD + 1) * (w->tries - BISECTIONS + 1);
    if (w->fits_bytes < 0) {
        int64_t from = crn_max(w->lower_bytes, w->long_bytes);
        return from + crn_min(from, INT64_MAX - from);
    }
    if (!w->asked_lower)
        return w->lower_bytes;
    return w->long_bytes + (w->fits_bytes - w->long_bytes) / 2;
}

bool crn_sweep_next(crn_sweep *w, int64_t peak_bytes, crn_sequence *sequence, bool *has_room)
{
    if (w->tries >= BISECTIONS && (w->fits_bytes < 0 || w->fits_bytes >= peak_bytes))
        return false;
    if (w->tries == BISECTIONS + SPREAD)
        return false;
    int64_t budget_bytes = next_budget(w, peak_bytes);
    *has_room = crn_sweep_run(w, budget_bytes, sequence);
    w->asked_lower |= budget_bytes == w->lower_bytes;
    w->tries++;
    if (w->tries > BISECTIONS)
        return true;
    if (*has_room)
        w->fits_bytes = budget_bytes;
    else
        w->long_bytes = budget_bytes;
    if (w->asked_lower && w->fits_bytes - crn_max(w->long_bytes, w->lower_bytes) <= w->fits_bytes / 1024)
        w->tries = BISECTIONS;
    return true;
}
