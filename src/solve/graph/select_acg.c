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
 *           Behind the last storage of a part a neighbour of no bytes is assumed, so that there is a position whose
 *           frontier is that storage: where branches meet at the very end, it is the one to be a checkpoint.
 * Bounds    From above: the sum of checkpoints does not increase with s, so when the largest segment found under s has
 *           s' bytes, s' - 1 comes next, until the checkpoints alone reach the best answer. With more than PAIRS_EXACT
 *           pairs of positions each step is at least 1/STEPS of s, and the answer may be that much larger.
 * Schedule  The checkpoints stay; what the backward lacks is computed again as little as possible (graph_replan.h).
 * Cost      O(P E + S P^2) for P positions, at most POSITIONS_MAX in a part, and S bounds; O(P^2 + E) memory.
 * Optimal   In eq. 6 over sets made of frontiers, branch by branch. Over all sets the problem is NP-hard (weighted vertex
 *           integrity).
 */
#include <string.h>

#include "solve/graph/graph_replan.h"

enum { POSITIONS_MAX = 768, PARTS_DEEP_MAX = 64, PAIRS_EXACT = 1 << 17, STEPS = 256 };

/* Between two positions p < q of a part. */
typedef struct acg_piece {
    int64_t largest_bytes; /* of a segment, with both frontiers as checkpoints */
    int64_t new_bytes;     /* of q's frontier without p's */
} acg_piece;

typedef enum acg_way { WAY_PIECE, WAY_PARTS, WAY_ALL } acg_way;

typedef struct acg_part acg_part;

struct acg_part {
    int32_t count, depth;
    int32_t *storage; /* ascending */
    int32_t *reach;   /* of member x: its last neighbour in the part, as a member; x if none is after it */
    int64_t *before;  /* before[x]: bytes of the members before x */
    int32_t *position, positions;
    bool *narrow;        /* of a position */
    acg_piece *piece;    /* of positions p < q: piece[q * (q - 1) / 2 + p] */
    acg_part *child;     /* parts between neighbouring narrow positions */
    acg_part *sibling;   /* the next child of the same parent */
    int32_t child_after; /* of a child: the position of the parent at which its place begins */
    int32_t child_until; /* and ends */
    /* under the present bound */
    int64_t *least, *inner; /* c(q); sum of c over the children that end at q, INT64_MAX where there are none */
    int32_t *from;
    uint8_t *way;
    int64_t cost; /* c of the part */
};

typedef struct acg {
    crn_graph_model *model;
    crn_arena arena;
    crn_replan replan;
    crn_sequence_eval eval;
    bool *kept, *best_kept;               /* of a storage */
    int32_t *neighbour_begin, *neighbour; /* of a storage: those that read it or that it reads */
    int32_t *local;                       /* of a storage: its number in the part that is being made, -1 = not in it */
    int32_t *leader;                      /* of a member, while segments are joined */
    int64_t *joined_bytes;                /* of a leader */
    int32_t *member_count;                /* of a leader */
    acg_part **owner;                     /* of a leader */
    int64_t *frontier_bytes;              /* scratch, of a position */
    int32_t *frontier_count;
    acg_part *parts; /* of the whole, as siblings */
    int64_t pairs;
    int64_t objective_bytes, peak_bytes; /* INT64_MAX: it would take more than 2^63 - 1 ns, so there is no schedule */
    bool stopped_early;
} acg;

/* ---- the forward's storages and who is beside whom ---- */

static bool is_forward(const acg *a, int32_t s)
{
    return s < a->replan.turn && a->model->root[s] == s;
}

static bool is_fixed(const acg *a, int32_t s)
{
    return crn_always_stays(a->model, s) || s == a->model->root[a->replan.turn - 1];
}

/* Calls for both ends of every edge between storages that may be in segments. write: lists them, else counts them. */
static void visit_neighbours(acg *a, bool write)
{
    const crn_graph_model *model = a->model;
    for (int32_t s = 0; s < a->replan.turn; s++) {
        if (!is_forward(a, s) || is_fixed(a, s))
            continue;
        for (int32_t i = model->use_begin[s]; i < model->use_begin[s + 1] && model->use[i] < a->replan.turn; i++) {
            int32_t other = model->root[model->use[i]];
            if (other == s || is_fixed(a, other))
                continue;
            if (write) {
                a->neighbour[a->neighbour_begin[s + 1]++] = other;
                a->neighbour[a->neighbour_begin[other + 1]++] = s;
            } else {
                a->neighbour_begin[s + 2]++;
                a->neighbour_begin[other + 2]++;
            }
        }
    }
}

static bool list_neighbours(acg *a)
{
    size_t n = (size_t)a->model->node_count;
    a->neighbour_begin = crn_arena_alloc_zero(&a->arena, n + 2, sizeof(*a->neighbour_begin));
    if (!a->neighbour_begin)
        return false;
    visit_neighbours(a, false);
    for (size_t s = 0; s < n; s++)
        a->neighbour_begin[s + 2] += a->neighbour_begin[s + 1];
    a->neighbour = crn_arena_alloc(&a->arena, (size_t)a->neighbour_begin[n + 1], sizeof(*a->neighbour));
    if (!a->neighbour)
        return false;
    visit_neighbours(a, true);
    return true;
}

/* ---- joining members of a part into connected sets ---- */

static int32_t leader_of(acg *a, int32_t x)
{
    while (a->leader[x] != x)
        x = a->leader[x] = a->leader[a->leader[x]];
    return x;
}

static int64_t join(acg *a, int32_t x, int32_t y)
{
    int32_t i = leader_of(a, x), j = leader_of(a, y);
    if (i == j)
        return a->joined_bytes[i];
    a->leader[j] = i;
    return a->joined_bytes[i] += a->joined_bytes[j];
}

/*
 * Adds member x to the sets of those after it and before q that are not in q's frontier. Returns the bytes of its set;
 * 0 when it is in the frontier itself.
 */
static int64_t admit(acg *a, const acg_part *part, int32_t x, int32_t q)
{
    int32_t s = part->storage[x];
    if (part->reach[x] >= q) {
        a->leader[x] = -1;
        return 0;
    }
    a->leader[x] = x;
    int64_t bytes = a->joined_bytes[x] = a->model->bytes[s];
    for (int32_t i = a->neighbour_begin[s]; i < a->neighbour_begin[s + 1]; i++) {
        int32_t y = a->local[a->neighbour[i]];
        if (y > x && y < q && a->leader[y] >= 0)
            bytes = join(a, x, y);
    }
    return bytes;
}

/* ---- making a part ---- */

static void number_members(acg *a, acg_part *part)
{
    for (int32_t x = 0; x < part->count; x++)
        a->local[part->storage[x]] = x;
    part->before[0] = 0;
    for (int32_t x = 0; x < part->count; x++) {
        int32_t s = part->storage[x];
        part->before[x + 1] = part->before[x] + a->model->bytes[s];
        part->reach[x] = x;
        for (int32_t i = a->neighbour_begin[s]; i < a->neighbour_begin[s + 1]; i++)
            part->reach[x] = (int32_t)crn_max(part->reach[x], a->local[a->neighbour[i]]);
    }
    part->before[part->count + 1] = part->before[part->count];
    if (part->count > 0)
        part->reach[part->count - 1] = part->count;
}

/* Member x is in the frontiers of positions x + 1 .. reach[x]. */
static void measure_frontiers(acg *a, const acg_part *part)
{
    memset(a->frontier_bytes, 0, ((size_t)part->count + 2) * sizeof(*a->frontier_bytes));
    memset(a->frontier_count, 0, ((size_t)part->count + 2) * sizeof(*a->frontier_count));
    for (int32_t x = 0; x < part->count; x++) {
        int64_t bytes = a->model->bytes[part->storage[x]];
        a->frontier_count[x + 1]++;
        a->frontier_count[part->reach[x] + 1]--;
        a->frontier_bytes[x + 1] += bytes;
        a->frontier_bytes[part->reach[x] + 1] -= bytes;
    }
    for (int32_t p = 1; p <= part->count; p++) {
        a->frontier_count[p] += a->frontier_count[p - 1];
        a->frontier_bytes[p] += a->frontier_bytes[p - 1];
    }
}

/*
 * Positions: all, or where there are too many, of each of POSITIONS_MAX stretches the one with the lightest frontier,
 * the first of several.
 */
static void choose_positions(acg *a, acg_part *part)
{
    int32_t inside = part->count, stretches = (int32_t)crn_min(inside, POSITIONS_MAX - 2);
    part->positions = 0;
    part->position[part->positions++] = 0;
    for (int32_t k = 0; k < stretches; k++) {
        int32_t begin = 1 + (int32_t)((int64_t)inside * k / stretches);
        int32_t end = 1 + (int32_t)((int64_t)inside * (k + 1) / stretches), best = begin;
        for (int32_t p = begin + 1; p < end; p++)
            if (a->frontier_bytes[p] < a->frontier_bytes[best])
                best = p;
        part->position[part->positions++] = best;
    }
    part->position[part->positions++] = part->count + 1;
    for (int32_t i = 0; i < part->positions; i++)
        part->narrow[i] = i == 0 || i == part->positions - 1 || a->frontier_count[part->position[i]] <= 1;
}

static acg_piece *piece_of(const acg_part *part, int32_t p, int32_t q)
{
    return &part->piece[(int64_t)q * (q - 1) / 2 + p];
}

static void measure_pieces(acg *a, const acg_part *part)
{
    for (int32_t q = 1; q < part->positions; q++) {
        int64_t largest = 0, added = 0;
        int32_t end = part->position[q], p = q - 1;
        if (part->position[p] == part->count)
            *piece_of(part, p--, q) = (acg_piece){0, 0};
        for (int32_t x = (int32_t)crn_min(end, part->count) - 1; x >= 0; x--) {
            largest = crn_max(largest, admit(a, part, x, end));
            added += a->leader[x] < 0 ? a->model->bytes[part->storage[x]] : 0;
            if (x == part->position[p])
                *piece_of(part, p--, q) = (acg_piece){largest, added};
        }
    }
}

/* Room for count members, none of which is in it yet. */
static acg_part *part_new(acg *a, int32_t count, int32_t depth)
{
    acg_part *part = crn_arena_alloc_zero(&a->arena, 1, sizeof(*part));
    size_t members = (size_t)count + 2, positions = (size_t)crn_min(count + 2, POSITIONS_MAX);
    if (!part)
        return NULL;
    part->depth = depth;
    part->storage = crn_arena_alloc(&a->arena, members, sizeof(*part->storage));
    part->reach = crn_arena_alloc(&a->arena, members, sizeof(*part->reach));
    part->before = crn_arena_alloc(&a->arena, members, sizeof(*part->before));
    part->position = crn_arena_alloc(&a->arena, positions, sizeof(*part->position));
    part->narrow = crn_arena_alloc(&a->arena, positions, sizeof(*part->narrow));
    part->least = crn_arena_alloc(&a->arena, positions, sizeof(*part->least));
    part->inner = crn_arena_alloc(&a->arena, positions, sizeof(*part->inner));
    part->from = crn_arena_alloc(&a->arena, positions, sizeof(*part->from));
    part->way = crn_arena_alloc(&a->arena, positions, sizeof(*part->way));
    part->piece = crn_arena_alloc(&a->arena, positions * (positions - 1) / 2, sizeof(*part->piece));
    return part->storage && part->reach && part->before && part->position && part->narrow && part->least &&
                   part->inner && part->from && part->way && part->piece
               ? part
               : NULL;
}

/*
 * Connected sets among the members between two positions that are not in the frontier of the second, as parts. While
 * the parent's numbers are valid; so the new parts get their members only.
 */
static bool add_parts(acg *a, const acg_part *parent, int32_t after, int32_t until, acg_part **list)
{
    int32_t begin = parent->position[after], end = (int32_t)crn_min(parent->position[until], parent->count);
    for (int32_t x = end - 1; x >= begin; x--) {
        admit(a, parent, x, parent->position[until]);
        a->member_count[x] = 0;
        a->owner[x] = NULL;
    }
    for (int32_t x = begin; x < end; x++)
        if (a->leader[x] >= 0)
            a->member_count[leader_of(a, x)]++;
    for (int32_t x = begin; x < end; x++) {
        if (a->leader[x] < 0)
            continue;
        int32_t leader = leader_of(a, x);
        acg_part *part = a->owner[leader];
        if (!part) {
            part = a->owner[leader] = part_new(a, a->member_count[leader], parent->depth + 1);
            if (!part)
                return false;
            part->child_after = after;
            part->child_until = until;
            part->sibling = *list;
            *list = part;
        }
        part->storage[part->count++] = parent->storage[x];
    }
    return true;
}

/* The parts between neighbouring narrow positions. */
static bool add_children(acg *a, acg_part *part)
{
    int32_t after = 0;
    if (part->depth >= PARTS_DEEP_MAX)
        return true;
    for (int32_t until = 1; until < part->positions; until++) {
        if (!part->narrow[until])
            continue;
        bool is_all = after == 0 && until == part->positions - 1;
        bool is_empty = part->position[until] - part->position[after] < 2;
        if (!is_all && !is_empty && !add_parts(a, part, after, until, &part->child))
            return false;
        after = until;
    }
    return true;
}

static void forget_members(acg *a, const acg_part *part)
{
    for (int32_t x = 0; x < part->count; x++)
        a->local[part->storage[x]] = -1;
}

static bool part_fill(acg *a, acg_part *part)
{
    number_members(a, part);
    measure_frontiers(a, part);
    choose_positions(a, part);
    measure_pieces(a, part);
    a->pairs += (int64_t)part->positions * (part->positions - 1) / 2;
    bool fits = add_children(a, part);
    forget_members(a, part);
    for (acg_part *child = part->child; fits && child; child = child->sibling)
        fits = part_fill(a, child);
    return fits;
}

/* The connected sets of the whole forward. */
static bool divide(acg *a)
{
    int32_t count = 0;
    for (int32_t s = 0; s < a->replan.turn; s++)
        count += is_forward(a, s) && !is_fixed(a, s);
    acg_part *whole = part_new(a, count, 0);
    if (!whole)
        return false;
    for (int32_t s = 0; s < a->replan.turn; s++)
        if (is_forward(a, s) && !is_fixed(a, s))
            whole->storage[whole->count++] = s;
    number_members(a, whole);
    int32_t ends[2] = {0, count + 1};
    whole->position = ends;
    bool fits = add_parts(a, whole, 0, 1, &a->parts);
    forget_members(a, whole);
    for (acg_part *part = a->parts; fits && part; part = part->sibling)
        fits = part_fill(a, part);
    return fits;
}

/* ---- one bound ---- */

static int64_t part_solve(acg_part *part, int64_t s);

static void solve_children(acg_part *part, int64_t s)
{
    for (int32_t q = 0; q < part->positions; q++)
        part->inner[q] = INT64_MAX;
    for (acg_part *child = part->child; child; child = child->sibling) {
        int64_t *inner = &part->inner[child->child_until];
        *inner = (*inner == INT64_MAX ? 0 : *inner) + part_solve(child, s);
    }
}

static void offer(acg_part *part, int32_t p, int32_t q, acg_way way, int64_t bytes)
{
    if (bytes >= part->least[q])
        return;
    part->least[q] = bytes;
    part->from[q] = p;
    part->way[q] = (uint8_t)way;
}

static void reach_position(acg_part *part, int32_t q, int64_t s)
{
    part->least[q] = INT64_MAX;
    for (int32_t p = q - 1; p >= 0 && piece_of(part, p, q)->largest_bytes <= s; p--)
        offer(part, p, q, WAY_PIECE, part->least[p] + piece_of(part, p, q)->new_bytes);
    offer(part, q - 1, q, WAY_ALL,
          part->least[q - 1] + part->before[part->position[q]] - part->before[part->position[q - 1]]);
    if (part->inner[q] == INT64_MAX)
        return;
    int32_t p = q - 1;
    while (!part->narrow[p])
        p--;
    offer(part, p, q, WAY_PARTS, part->least[p] + piece_of(part, p, q)->new_bytes + part->inner[q]);
}

/* The least bytes of checkpoints in a part. Recursion is at most PARTS_DEEP_MAX deep. */
static int64_t part_solve(acg_part *part, int64_t s)
{
    part->cost = 0;
    if (part->before[part->count] <= s)
        return 0;
    solve_children(part, s);
    part->least[0] = 0;
    for (int32_t q = 1; q < part->positions; q++)
        reach_position(part, q, s);
    return part->cost = part->least[part->positions - 1];
}

/* Marks the checkpoints of a part that was solved; returns the bytes of its largest segment. */
static int64_t part_mark(acg *a, const acg_part *part, int64_t s)
{
    int64_t largest = 0;
    if (part->before[part->count] <= s)
        return part->before[part->count];
    for (int32_t q = part->positions - 1; q > 0; q = part->from[q]) {
        int32_t p = part->from[q], end = part->position[q];
        for (int32_t x = part->position[p]; x < end && x < part->count; x++)
            if (part->way[q] == WAY_ALL || part->reach[x] >= end)
                a->kept[part->storage[x]] = true;
        if (part->way[q] == WAY_PIECE)
            largest = crn_max(largest, piece_of(part, p, q)->largest_bytes);
        for (const acg_part *child = part->child; child && part->way[q] == WAY_PARTS; child = child->sibling)
            if (child->child_until == q)
                largest = crn_max(largest, part_mark(a, child, s));
    }
    return largest;
}

/* ---- all bounds ---- */

static void descend(const crn_task *task, acg *a)
{
    size_t n = (size_t)a->model->node_count;
    int64_t s = INT64_MAX, found = INT64_MAX;
    while (s >= 0) {
        int64_t checkpoints = 0, largest = 0;
        for (acg_part *part = a->parts; part; part = part->sibling)
            checkpoints += part_solve(part, s);
        if (checkpoints >= found)
            break;
        memset(a->kept, 0, n * sizeof(*a->kept));
        for (const acg_part *part = a->parts; part; part = part->sibling)
            largest = crn_max(largest, part_mark(a, part, s));
        if (checkpoints + largest < found) {
            found = checkpoints + largest;
            memcpy(a->best_kept, a->kept, n * sizeof(*a->kept));
        }
        s = largest - 1 - (a->pairs > PAIRS_EXACT ? largest / STEPS : 0);
        if (crn_should_stop(task, NULL)) {
            a->stopped_early = true;
            break;
        }
    }
    a->objective_bytes = found;
}

static void keep_fixed(acg *a)
{
    for (int32_t s = 0; s < a->replan.turn; s++)
        if (is_forward(a, s) && is_fixed(a, s)) {
            a->best_kept[s] = true;
            a->objective_bytes += a->model->bytes[s];
        }
}

/* ---- the session ---- */

static bool reserve(acg *a)
{
    size_t n = (size_t)a->model->node_count;
    a->kept = crn_arena_alloc_zero(&a->arena, n, sizeof(*a->kept));
    a->best_kept = crn_arena_alloc_zero(&a->arena, n, sizeof(*a->best_kept));
    a->local = crn_arena_alloc(&a->arena, n, sizeof(*a->local));
    a->leader = crn_arena_alloc(&a->arena, n, sizeof(*a->leader));
    a->member_count = crn_arena_alloc(&a->arena, n, sizeof(*a->member_count));
    a->owner = crn_arena_alloc(&a->arena, n, sizeof(acg_part *));
    a->joined_bytes = crn_arena_alloc(&a->arena, n, sizeof(*a->joined_bytes));
    a->frontier_bytes = crn_arena_alloc(&a->arena, n + 2, sizeof(*a->frontier_bytes));
    a->frontier_count = crn_arena_alloc(&a->arena, n + 2, sizeof(*a->frontier_count));
    if (!a->kept || !a->best_kept || !a->local || !a->leader || !a->member_count || !a->owner || !a->joined_bytes ||
        !a->frontier_bytes || !a->frontier_count)
        return false;
    memset(a->local, 0xff, n * sizeof(*a->local));
    return true;
}

/* The simulator's peak: what a pass over the sequence finds may be more, where aliases are computed again. */
static cairn_status measure(const crn_task *task, acg *a, cairn_error *error)
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

static cairn_status fill(const crn_task *task, acg *a, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &a->model, error));
    int32_t capacity = crn_sequence_capacity(a->model->node_count, 3);
    CRN_TRY(crn_sequence_eval_new(a->model, &a->arena, capacity, &a->eval, error));
    CRN_TRY(crn_replan_new(a->model, &a->arena, capacity, &a->replan, error));
    a->replan.turn = crn_replan_find_turn(&a->replan, cairn_problem_graph(task->problem), &a->eval);
    if (!reserve(a) || !list_neighbours(a) || !divide(a))
        return crn_no_memory(error);
    descend(task, a);
    keep_fixed(a);
    if (!crn_replan_make(&a->replan, a->best_kept))
        return crn_fail(error, CAIRN_TOO_LARGE, "the schedule would have more than %lld computations",
                        (long long)capacity);
    return measure(task, a, error);
}

static void select_acg_close(const crn_task *task, void *session)
{
    acg *a = session;
    (void)task;
    crn_graph_model_free(a->model);
    crn_arena_clear(&a->arena);
}

static cairn_status select_acg_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    acg *a = crn_arena_alloc_zero(&arena, 1, sizeof(*a));
    *session = a;
    if (!a)
        return crn_no_memory(error);
    a->arena = arena;
    return fill(task, a, error);
}

static cairn_status select_acg_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const acg *a = session;
    (void)task;
    (void)error;
    least->bytes = a->peak_bytes == INT64_MAX ? CAIRN_NONE : a->peak_bytes;
    return CAIRN_OK;
}

static cairn_status list_checkpoints(const crn_task *task, const acg *a, crn_answer *answer, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    int32_t count = 0;
    for (int32_t s = 0; s < a->replan.turn; s++)
        count += a->best_kept[s];
    answer->checkpoints = crn_alloc(&allocator, (size_t)count, sizeof(*answer->checkpoints));
    if (!answer->checkpoints)
        return crn_no_memory(error);
    answer->checkpoint_count = 0;
    for (int32_t s = 0; s < a->replan.turn; s++)
        if (a->best_kept[s])
            answer->checkpoints[answer->checkpoint_count++] = s;
    return CAIRN_OK;
}

static cairn_status select_acg_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                     cairn_error *error)
{
    acg *a = session;
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
    return nodes * (crn_min(nodes, POSITIONS_MAX) * (int64_t)sizeof(acg_piece) + 512);
}

static int64_t select_acg_work(const crn_task *task)
{
    int64_t nodes = cairn_problem_graph(task->problem)->node_count, positions = crn_min(nodes, POSITIONS_MAX);
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
