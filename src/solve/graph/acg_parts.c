#include "solve/graph/acg_parts.h"

#include <string.h>

enum { PARTS_DEEP_MAX = 64 };

/*
 * What a storage of a part, or a neighbour of one, takes for each position (measure_pieces), and the share of the time
 * limit that all of them may take together.
 */
enum { POSITION_NS = 160, POSITIONS_SHARE = 4, POSITIONS_MIN = 16 };

/* Storages and neighbours looked at between two questions whether to stop. */
enum { POLL_STEPS = 1 << 17 };

typedef enum way { WAY_PIECE, WAY_PARTS, WAY_ALL } way;

/* ---- the forward's storages, and which of them are neighbours ---- */

bool crn_acg_is_forward(const crn_acg *a, int32_t s)
{
    return s < a->replan.backward_begin && a->model->root[s] == s;
}

bool crn_acg_is_fixed(const crn_acg *a, int32_t s)
{
    return crn_always_stays(a->model, s) || s == a->model->root[a->replan.backward_begin - 1];
}

/* Calls for both ends of every edge between storages that may be in segments. write: lists them, else counts them. */
static void visit_neighbours(crn_acg *a, bool write)
{
    const crn_graph_model *model = a->model;
    for (int32_t s = 0; s < a->replan.backward_begin; s++) {
        if (!crn_acg_is_forward(a, s) || crn_acg_is_fixed(a, s))
            continue;
        for (int32_t i = model->use_begin[s]; i < model->use_begin[s + 1] && model->use[i] < a->replan.backward_begin;
             i++) {
            int32_t other = model->root[model->use[i]];
            if (other == s || crn_acg_is_fixed(a, other))
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

static bool list_neighbours(crn_acg *a)
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

static int32_t leader_of(crn_acg *a, int32_t x)
{
    while (a->leader[x] != x)
        x = a->leader[x] = a->leader[a->leader[x]];
    return x;
}

static int64_t join(crn_acg *a, int32_t x, int32_t y)
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
static int64_t admit(crn_acg *a, const crn_acg_part *part, int32_t x, int32_t q)
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

static void number_members(crn_acg *a, crn_acg_part *part)
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
static void measure_frontiers(crn_acg *a, const crn_acg_part *part)
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
 * Positions: all, or where there are too many, of each of positions_max stretches the one with the lightest frontier, the
 * first of several.
 */
static void choose_positions(crn_acg *a, crn_acg_part *part)
{
    int32_t inside = part->count, stretches = (int32_t)crn_min(inside, a->positions_max - 2);
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

static crn_acg_piece *piece_of(const crn_acg_part *part, int32_t p, int32_t q)
{
    return &part->piece[(int64_t)q * (q - 1) / 2 + p];
}

static bool is_stopped(crn_acg *a, int64_t steps)
{
    a->steps += steps;
    if (a->steps < POLL_STEPS)
        return a->stopped_early;
    a->steps = 0;
    a->stopped_early = a->stopped_early || crn_should_stop(a->task, NULL);
    return a->stopped_early;
}

/* False when it was stopped. */
static bool measure_pieces(crn_acg *a, const crn_acg_part *part)
{
    for (int32_t q = 1; q < part->positions && !is_stopped(a, part->position[q]); q++) {
        int64_t largest = 0, added = 0;
        int32_t end = part->position[q], p = q - 1;
        if (part->position[p] == part->count)
            *piece_of(part, p--, q) = (crn_acg_piece){0, 0};
        for (int32_t x = (int32_t)crn_min(end, part->count) - 1; x >= 0; x--) {
            largest = crn_max(largest, admit(a, part, x, end));
            added += a->leader[x] < 0 ? a->model->bytes[part->storage[x]] : 0;
            if (x == part->position[p])
                *piece_of(part, p--, q) = (crn_acg_piece){largest, added};
        }
    }
    return !a->stopped_early;
}

/* Room for count members, none of which is in it yet. */
static crn_acg_part *part_new(crn_acg *a, int32_t count, int32_t depth)
{
    crn_acg_part *part = crn_arena_alloc_zero(&a->arena, 1, sizeof(*part));
    size_t members = (size_t)count + 2, positions = (size_t)crn_min(count + 2, a->positions_max);
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
static bool add_parts(crn_acg *a, const crn_acg_part *parent, int32_t after, int32_t until, crn_acg_part **list)
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
        crn_acg_part *part = a->owner[leader];
        if (!part) {
            part = a->owner[leader] = part_new(a, a->member_count[leader], parent->depth + 1);
            if (!part)
                return false;
            part->child_until = until;
            part->sibling = *list;
            *list = part;
        }
        part->storage[part->count++] = parent->storage[x];
    }
    return true;
}

/* The parts between neighbouring narrow positions. */
static bool add_children(crn_acg *a, crn_acg_part *part)
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

static void forget_members(crn_acg *a, const crn_acg_part *part)
{
    for (int32_t x = 0; x < part->count; x++)
        a->local[part->storage[x]] = -1;
}

static bool part_fill(crn_acg *a, crn_acg_part *part)
{
    number_members(a, part);
    measure_frontiers(a, part);
    choose_positions(a, part);
    a->pairs += (int64_t)part->positions * (part->positions - 1) / 2;
    bool fits = measure_pieces(a, part) && add_children(a, part);
    forget_members(a, part);
    for (crn_acg_part *child = part->child; fits && child; child = child->sibling)
        fits = part_fill(a, child);
    return fits;
}

static bool reserve(crn_acg *a)
{
    size_t n = (size_t)a->model->node_count;
    a->kept = crn_arena_alloc_zero(&a->arena, n, sizeof(*a->kept));
    a->best_kept = crn_arena_alloc_zero(&a->arena, n, sizeof(*a->best_kept));
    a->local = crn_arena_alloc(&a->arena, n, sizeof(*a->local));
    a->leader = crn_arena_alloc(&a->arena, n, sizeof(*a->leader));
    a->member_count = crn_arena_alloc(&a->arena, n, sizeof(*a->member_count));
    a->owner = crn_arena_alloc(&a->arena, n, sizeof(crn_acg_part *));
    a->joined_bytes = crn_arena_alloc(&a->arena, n, sizeof(*a->joined_bytes));
    a->frontier_bytes = crn_arena_alloc(&a->arena, n + 2, sizeof(*a->frontier_bytes));
    a->frontier_count = crn_arena_alloc(&a->arena, n + 2, sizeof(*a->frontier_count));
    if (!a->kept || !a->best_kept || !a->local || !a->leader || !a->member_count || !a->owner || !a->joined_bytes ||
        !a->frontier_bytes || !a->frontier_count)
        return false;
    memset(a->local, 0xff, n * sizeof(*a->local));
    return true;
}

/* The connected sets of the whole forward. */
static bool divide(crn_acg *a)
{
    int32_t count = 0;
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        count += crn_acg_is_forward(a, s) && !crn_acg_is_fixed(a, s);
    crn_acg_part *whole = part_new(a, count, 0);
    if (!whole)
        return false;
    for (int32_t s = 0; s < a->replan.backward_begin; s++)
        if (crn_acg_is_forward(a, s) && !crn_acg_is_fixed(a, s))
            whole->storage[whole->count++] = s;
    number_members(a, whole);
    int32_t ends[2] = {0, count + 1};
    whole->position = ends;
    bool fits = add_parts(a, whole, 0, 1, &a->parts);
    forget_members(a, whole);
    for (crn_acg_part *part = a->parts; fits && part; part = part->sibling)
        fits = part_fill(a, part);
    return fits;
}

static int32_t positions_for(const crn_acg *a)
{
    if (a->task->deadline_ns == CAIRN_NONE)
        return CRN_ACG_POSITIONS_MAX;
    int64_t size = (int64_t)a->replan.backward_begin + a->neighbour_begin[a->model->node_count + 1];
    int64_t left_ns = a->task->deadline_ns - crn_clock_ns();
    return (int32_t)crn_max(POSITIONS_MIN,
                            crn_min(CRN_ACG_POSITIONS_MAX, left_ns / POSITIONS_SHARE / (POSITION_NS * size)));
}

bool crn_acg_make(crn_acg *a, const crn_task *task)
{
    a->task = task;
    bool made = reserve(a) && list_neighbours(a);
    a->positions_max = made ? positions_for(a) : 0;
    made = made && divide(a);
    a->task = NULL;
    return made;
}

/* ---- one bound ---- */

static void solve_children(crn_acg_part *part, int64_t s)
{
    for (int32_t q = 0; q < part->positions; q++)
        part->inner[q] = INT64_MAX;
    for (crn_acg_part *child = part->child; child; child = child->sibling) {
        int64_t *inner = &part->inner[child->child_until];
        *inner = (*inner == INT64_MAX ? 0 : *inner) + crn_acg_solve(child, s);
    }
}

static void offer(crn_acg_part *part, int32_t p, int32_t q, way how, int64_t bytes)
{
    if (bytes >= part->least[q])
        return;
    part->least[q] = bytes;
    part->from[q] = p;
    part->way[q] = (uint8_t)how;
}

static void reach_position(crn_acg_part *part, int32_t q, int64_t s)
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

/* Recursion is at most PARTS_DEEP_MAX deep. */
int64_t crn_acg_solve(crn_acg_part *part, int64_t s)
{
    if (part->before[part->count] <= s)
        return 0;
    solve_children(part, s);
    part->least[0] = 0;
    for (int32_t q = 1; q < part->positions; q++)
        reach_position(part, q, s);
    return part->least[part->positions - 1];
}

int64_t crn_acg_mark(crn_acg *a, const crn_acg_part *part, int64_t s)
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
        for (const crn_acg_part *child = part->child; child && part->way[q] == WAY_PARTS; child = child->sibling)
            if (child->child_until == q)
                largest = crn_max(largest, crn_acg_mark(a, child, s));
    }
    return largest;
}
