#include "solve/chain/step_function.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/vector.h"

/* Sums of three numbers in single precision are within 2^-22 of their size; this is far beyond. */
#define MARGIN (1.0F / (1 << 18))

enum { BLOCK_LOG2 = CRN_STEPS_BLOCK_LOG2, BLOCK = 1 << BLOCK_LOG2 };

/* One of the two functions of a term, as borders see it. */
typedef struct side {
    const crn_borders *borders;
    int32_t up, down;             /* what is left of the shift, in cells */
    int32_t block_up, block_down; /* and in blocks */
} side;

/* A term, prepared. */
typedef struct item {
    crn_term term;
    side first, second;
    int32_t from, block_from; /* first border, and block's border, at which the term has a value */
    float ns;
} item;

/* A term that may be the least in a block. */
typedef struct chance {
    int32_t block, term;
} chance;

/* Of a term that may be the least in the block at hand: in which of its cells. */
typedef struct flags {
    uint8_t cell[BLOCK];
} flags;

typedef struct points {
    crn_step *list;
    size_t count, capacity;
} points;

struct crn_envelope {
    cairn_allocator allocator;
    crn_cells cells;
    crn_steps nothing;    /* 0 for every m */
    float *zero, *upper;  /* of blocks */
    uint8_t *never;       /* zeros, too */
    uint8_t maybe[BLOCK]; /* ones */
    uint8_t *flag;
    size_t *block_begin;
    item *items;
    chance *chances;
    int32_t *sorted; /* terms of the chances, by block */
    flags *flags;    /* of the chances of a block */
    size_t item_count, item_capacity, chance_count, chance_capacity, sorted_capacity, flags_capacity;
    points made, cell, merged;
};

static const crn_step origin = {0, 0};
static const int32_t first_point = 0;

/* ---- memory ---- */

static bool reserve_points(crn_envelope *e, points *p, size_t count)
{
    if (count <= p->capacity)
        return true;
    crn_step *grown = crn_grow(&e->allocator, p->list, &p->capacity, count, sizeof(*grown));
    if (grown)
        p->list = grown;
    return grown != NULL;
}

static size_t border_count(const crn_cells *cells)
{
    return (size_t)cells->blocks + 1;
}

static size_t zero_count(const crn_cells *cells)
{
    return border_count(cells) + 2 * BLOCK;
}

crn_envelope *crn_envelope_new(const cairn_allocator *allocator, const crn_cells *cells)
{
    crn_envelope *e = crn_alloc_zero(allocator, 1, sizeof(*e));
    if (!e)
        return NULL;
    e->allocator = *allocator;
    e->cells = *cells;
    e->zero = crn_alloc_zero(allocator, zero_count(cells), sizeof(*e->zero));
    e->never = crn_alloc_zero(allocator, zero_count(cells), sizeof(*e->never));
    e->upper = crn_alloc(allocator, border_count(cells), sizeof(*e->upper));
    e->flag = crn_alloc(allocator, border_count(cells), sizeof(*e->flag));
    e->block_begin = crn_alloc(allocator, border_count(cells), sizeof(*e->block_begin));
    memset(e->maybe, 1, sizeof(e->maybe));
    e->nothing = (crn_steps){.points = &origin, .count = 1, .point = &first_point};
    e->nothing.plain = (crn_borders){.block = e->zero, .cell = e->zero + BLOCK, .steps = e->never + BLOCK};
    e->nothing.moved = e->nothing.plain;
    if (e->zero && e->never && e->upper && e->flag && e->block_begin)
        return e;
    crn_envelope_free(e);
    return NULL;
}

void crn_envelope_free(crn_envelope *e)
{
    if (!e)
        return;
    cairn_allocator allocator = e->allocator;
    crn_free(&allocator, e->zero, zero_count(&e->cells), sizeof(*e->zero));
    crn_free(&allocator, e->never, zero_count(&e->cells), sizeof(*e->never));
    crn_free(&allocator, e->upper, border_count(&e->cells), sizeof(*e->upper));
    crn_free(&allocator, e->flag, border_count(&e->cells), sizeof(*e->flag));
    crn_free(&allocator, e->block_begin, border_count(&e->cells), sizeof(*e->block_begin));
    crn_free(&allocator, e->items, e->item_capacity, sizeof(*e->items));
    crn_free(&allocator, e->chances, e->chance_capacity, sizeof(*e->chances));
    crn_free(&allocator, e->sorted, e->sorted_capacity, sizeof(*e->sorted));
    crn_free(&allocator, e->flags, e->flags_capacity, sizeof(*e->flags));
    crn_free(&allocator, e->made.list, e->made.capacity, sizeof(*e->made.list));
    crn_free(&allocator, e->cell.list, e->cell.capacity, sizeof(*e->cell.list));
    crn_free(&allocator, e->merged.list, e->merged.capacity, sizeof(*e->merged.list));
    crn_free(&allocator, e, 1, sizeof(*e));
}

/* ---- terms ---- */

/* Number of the border at or below, and at or above. What is past all borders is all the same. */
static int32_t down(int64_t bytes, int32_t width_log2)
{
    return (int32_t)crn_min(bytes >> width_log2, INT32_MAX / 4);
}

static int32_t up(int64_t bytes, int32_t width_log2)
{
    return bytes > 0 ? down(bytes - 1, width_log2) + 1 : 0;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Where border i is; the last ones may be past 2^63 - 1. */
static int64_t border_bytes(int64_t i, int32_t width_log2)
{
    return i > INT64_MAX >> width_log2 ? INT64_MAX : i << width_log2;
}

static side side_of(const crn_steps *steps, int64_t shift, int32_t width_log2)
{
    const crn_borders *borders = shift == steps->moved.shift ? &steps->moved : &steps->plain;
    int64_t rest = shift - borders->shift;
    return (side){.borders = borders,
                  .up = up(rest, width_log2),
                  .down = down(rest, width_log2),
                  .block_up = up(rest, width_log2 + BLOCK_LOG2),
                  .block_down = down(rest, width_log2 + BLOCK_LOG2)};
}

static item item_of(const crn_term *t, int32_t width_log2)
{
    return (item){.term = *t,
                  .first = side_of(t->first, t->first_shift, width_log2),
                  .second = side_of(t->second, t->second_shift, width_log2),
                  .from = up(t->from_bytes, width_log2),
                  .block_from = up(t->from_bytes, width_log2 + BLOCK_LOG2),
                  .ns = (float)t->ns};
}

void crn_envelope_begin(crn_envelope *e)
{
    e->item_count = 0;
}

bool crn_envelope_add(crn_envelope *e, const crn_term *term)
{
    crn_term t = *term;
    t.first = t.first ? t.first : &e->nothing;
    t.second = t.second ? t.second : &e->nothing;
    if (t.first->count == 0 || t.second->count == 0)
        return true;
    t.from_bytes = crn_max(t.from_bytes, t.first->points[0].bytes + t.first_shift);
    t.from_bytes = crn_max(t.from_bytes, t.second->points[0].bytes + t.second_shift);
    if (t.from_bytes > e->cells.top_bytes || t.ns >= CRN_STEPS_INFINITE)
        return true;
    if (e->item_count == e->item_capacity) {
        item *grown = crn_grow(&e->allocator, e->items, &e->item_capacity, e->item_count + 1, sizeof(*grown));
        if (!grown)
            return false;
        e->items = grown;
    }
    e->items[e->item_count++] = item_of(&t, e->cells.width_log2);
    return true;
}

/* ---- which terms may matter in which block ---- */

CRN_VECTOR static void lower_sums(float *restrict upper, const float *restrict first, const float *restrict second,
                                  float ns, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        float sum = ns + first[i] + second[i];
        upper[i] = sum < upper[i] ? sum : upper[i];
    }
}

/* flag[i] = whether a term with a point in cell i gets below upper[i] there. One without changes nothing in it. */
CRN_VECTOR static void flag_steps(uint8_t *restrict flag, const float *restrict upper, const float *restrict first,
                                  const float *restrict second, const uint8_t *restrict first_steps,
                                  const uint8_t *restrict second_steps, float ns)
{
    for (int32_t i = 0; i < BLOCK; i++)
        flag[i] = (ns + first[i] + second[i] < upper[i]) & (first_steps[i] | second_steps[i]);
}

/* flag[i] = whether the term may get below upper[i]; returns whether it may anywhere. */
CRN_VECTOR static uint8_t flag_sums(uint8_t *restrict flag, const float *restrict upper, const float *restrict first,
                                    const float *restrict second, float ns, int32_t count)
{
    uint8_t any = 0;
    for (int32_t i = 0; i < count; i++) {
        flag[i] = ns + first[i] + second[i] < upper[i];
        any |= flag[i];
    }
    return any;
}

static void lower_blocks(crn_envelope *e, const item *t)
{
    int32_t begin = larger(t->block_from, larger(t->first.block_up, t->second.block_up));
    if (begin <= e->cells.blocks)
        lower_sums(e->upper + begin, t->first.borders->block + (begin - t->first.block_up),
                   t->second.borders->block + (begin - t->second.block_up), t->ns, e->cells.blocks - begin + 1);
}

static bool add_chances(crn_envelope *e, int32_t term_index, int32_t begin, int32_t count)
{
    if (e->chance_count + (size_t)count > e->chance_capacity) {
        chance *grown =
            crn_grow(&e->allocator, e->chances, &e->chance_capacity, e->chance_count + (size_t)count, sizeof(*grown));
        if (!grown)
            return false;
        e->chances = grown;
    }
    for (int32_t i = 0; i < count; i++)
        if (e->flag[i])
            e->chances[e->chance_count++] = (chance){begin + i, term_index};
    return true;
}

static bool find_chances(crn_envelope *e, int32_t index)
{
    const item *t = &e->items[index];
    int32_t begin = larger(larger(t->block_from, larger(t->first.block_down, t->second.block_down)) - 1, 0);
    int32_t count = e->cells.blocks - begin;
    if (count <= 0)
        return true;
    if (!flag_sums(e->flag, e->upper + begin, t->first.borders->block + (begin + 1 - t->first.block_down),
                   t->second.borders->block + (begin + 1 - t->second.block_down), t->ns, count))
        return true;
    return add_chances(e, index, begin, count);
}

/* By block, and within one in the order of the terms. */
static bool sort_chances(crn_envelope *e)
{
    if (e->chance_count > e->sorted_capacity) {
        int32_t *grown = crn_grow(&e->allocator, e->sorted, &e->sorted_capacity, e->chance_count, sizeof(*grown));
        if (!grown)
            return false;
        e->sorted = grown;
    }
    memset(e->block_begin, 0, border_count(&e->cells) * sizeof(*e->block_begin));
    for (size_t i = 0; i < e->chance_count; i++)
        e->block_begin[e->chances[i].block + 1]++;
    for (int32_t b = 0; b < e->cells.blocks; b++)
        e->block_begin[b + 1] += e->block_begin[b];
    for (size_t i = 0; i < e->chance_count; i++)
        e->sorted[e->block_begin[e->chances[i].block]++] = e->chances[i].term;
    for (int32_t b = e->cells.blocks; b > 0; b--)
        e->block_begin[b] = e->block_begin[b - 1];
    e->block_begin[0] = 0;
    return true;
}

static bool select_chances(crn_envelope *e)
{
    for (size_t b = 0; b < border_count(&e->cells); b++)
        e->upper[b] = INFINITY;
    for (size_t i = 0; i < e->item_count; i++)
        lower_blocks(e, &e->items[i]);
    for (size_t b = 0; b < border_count(&e->cells); b++)
        e->upper[b] *= 1 + 3 * MARGIN;
    e->upper[0] = INFINITY; /* the first cell holds m = 0 as well */
    e->chance_count = 0;
    for (size_t i = 0; i < e->item_count; i++)
        if (!find_chances(e, (int32_t)i))
            return false;
    return sort_chances(e);
}

/* ---- which may matter in which cell of a block ---- */

/* Values at BLOCK borders from border i on. */
static const float *borders_from(const crn_borders *borders, int32_t i)
{
    i = i < borders->low - BLOCK ? borders->low - BLOCK : i;
    i = i > borders->high ? borders->high : i;
    return borders->cell + (i - borders->low);
}

static const uint8_t *steps_from(const crn_envelope *e, const side *of, int32_t i)
{
    const crn_borders *borders = of->borders;
    if (of->up != of->down)
        return e->maybe;
    i -= of->up;
    i = i < borders->low - BLOCK ? borders->low - BLOCK : i;
    i = i > borders->high ? borders->high : i;
    return borders->steps + (i - borders->low);
}

/* upper[i] of the cells of a block, from that of all terms that may matter in it; known = the envelope's value before. */
static void lower_cells(const crn_envelope *e, int32_t block, float known, float upper[BLOCK])
{
    for (int32_t i = 0; i < BLOCK; i++)
        upper[i] = known;
    for (size_t c = e->block_begin[block]; c < e->block_begin[block + 1]; c++) {
        const item *t = &e->items[e->sorted[c]];
        const float *first = borders_from(t->first.borders, block * BLOCK - t->first.up);
        const float *second = borders_from(t->second.borders, block * BLOCK - t->second.up);
        int32_t begin = larger(t->from - block * BLOCK, 0);
        if (begin < BLOCK && t->ns + first[BLOCK - 1] + second[BLOCK - 1] < upper[begin])
            lower_sums(upper + begin, first + begin, second + begin, t->ns, BLOCK - begin);
    }
    for (int32_t i = 0; i < BLOCK; i++)
        upper[i] *= 1 + 3 * MARGIN;
    if (block == 0)
        upper[0] = INFINITY;
}

static bool flag_cells(crn_envelope *e, int32_t block, const float upper[BLOCK])
{
    size_t begin = e->block_begin[block], count = e->block_begin[block + 1] - begin;
    if (count > e->flags_capacity) {
        flags *grown = crn_grow(&e->allocator, e->flags, &e->flags_capacity, count, sizeof(*grown));
        if (!grown)
            return false;
        e->flags = grown;
    }
    for (size_t c = 0; c < count; c++) {
        const item *t = &e->items[e->sorted[begin + c]];
        const float *first = borders_from(t->first.borders, block * BLOCK + 1 - t->first.down);
        const float *second = borders_from(t->second.borders, block * BLOCK + 1 - t->second.down);
        flag_steps(e->flags[c].cell, upper, first, second, steps_from(e, &t->first, block * BLOCK),
                   steps_from(e, &t->second, block * BLOCK), t->ns);
        int32_t start = larger(t->from - 1, 0) - block * BLOCK; /* the cell that the term begins in */
        if (start >= 0 && start < BLOCK)
            e->flags[c].cell[start] = 1;
    }
    return true;
}

/* ---- merging ---- */

/* The last point at or below bytes, from the point at on (-1 = before the first). */
static int32_t advance(const crn_steps *steps, int32_t at, int64_t bytes)
{
    int32_t stride = 1, end;
    while (at + stride < steps->count && steps->points[at + stride].bytes <= bytes) {
        at += stride;
        stride *= 2;
    }
    end = at + stride < steps->count ? at + stride : steps->count; /* points[end] is above */
    while (end - at > 1) {
        int32_t middle = at + (end - at) / 2;
        if (steps->points[middle].bytes <= bytes)
            at = middle;
        else
            end = middle;
    }
    return at;
}

/* The last point at or below bytes; -1 = none. Near the border below it, there are few points in a cell. */
static int32_t find(const crn_steps *steps, const crn_cells *cells, int64_t bytes)
{
    if (bytes < 0)
        return -1;
    int32_t border = down(bytes, cells->width_log2);
    if (border >= steps->plain.high)
        return steps->count - 1;
    return advance(steps, border < steps->plain.low ? -1 : steps->point[border - steps->plain.low], bytes);
}

static void push(points *p, int64_t bytes, int64_t ns)
{
    if (p->count > 0 && p->list[p->count - 1].bytes == bytes)
        p->count--;
    p->list[p->count++] = (crn_step){bytes, ns};
}

static int64_t next_bytes(const crn_steps *steps, int32_t at, int64_t shift)
{
    return at + 1 < steps->count ? steps->points[at + 1].bytes + shift : INT64_MAX;
}

/*
 * Merges a term over [bytes, high] with the points of the cell; i and j are the points of its lists at bytes, least is
 * the value of the envelope before.
 */
static void merge(crn_envelope *e, const crn_term *t, int32_t i, int32_t j, int64_t bytes, int64_t high, int64_t least)
{
    const crn_step *old = e->cell.list, *old_end = e->cell.count > 0 ? old + e->cell.count : old; /* old may be NULL */
    e->merged.count = 0;
    while (bytes <= high) {
        int64_t next_first = next_bytes(t->first, i, t->first_shift);
        int64_t next_second = next_bytes(t->second, j, t->second_shift);
        int64_t ns = t->ns + t->first->points[i].ns + t->second->points[j].ns;
        for (; old < old_end && old->bytes <= bytes; old++)
            if (old->ns < least)
                push(&e->merged, old->bytes, least = old->ns);
        if (ns < least)
            push(&e->merged, bytes, least = ns);
        bool first_ends = i + 1 == t->first->count, second_ends = j + 1 == t->second->count;
        if (first_ends && second_ends)
            break;
        bytes = crn_min(next_first, next_second);
        i += !first_ends && next_first == bytes;
        j += !second_ends && next_second == bytes;
    }
    for (; old < old_end; old++)
        if (old->ns < least)
            push(&e->merged, old->bytes, least = old->ns);
    points swap = e->cell;
    e->cell = e->merged;
    e->merged = swap;
}

/* Lowers the envelope in (low, high] by a term; least = its value at low. */
static bool lower_cell(crn_envelope *e, const crn_term *t, int64_t low, int64_t high, int64_t least)
{
    if (low >= high || t->from_bytes > high)
        return true;
    int64_t begin = crn_max(low + 1, t->from_bytes);
    int32_t first_end = find(t->first, &e->cells, high - t->first_shift);
    int32_t second_end = find(t->second, &e->cells, high - t->second_shift);
    if (t->ns + t->first->points[first_end].ns + t->second->points[second_end].ns >= least)
        return true;
    int32_t first = find(t->first, &e->cells, begin - t->first_shift);
    int32_t second = find(t->second, &e->cells, begin - t->second_shift);
    size_t most = (size_t)(first_end - first) + (size_t)(second_end - second) + 1;
    if (!reserve_points(e, &e->merged, e->cell.count + most))
        return false;
    merge(e, t, first, second, begin, high, least);
    return true;
}

static int64_t last_ns(const crn_envelope *e)
{
    return e->made.count > 0 ? e->made.list[e->made.count - 1].ns : CRN_STEPS_INFINITE;
}

static bool merge_cell(crn_envelope *e, int32_t block, int32_t cell)
{
    int64_t number = (int64_t)block * BLOCK + cell;
    int64_t low = number == 0 ? -1 : border_bytes(number, e->cells.width_log2);
    int64_t high = crn_min(border_bytes(number + 1, e->cells.width_log2), e->cells.top_bytes);
    size_t begin = e->block_begin[block], count = e->block_begin[block + 1] - begin;
    e->cell.count = 0;
    for (size_t c = 0; c < count; c++)
        if (e->flags[c].cell[cell] && !lower_cell(e, &e->items[e->sorted[begin + c]].term, low, high, last_ns(e)))
            return false;
    if (!reserve_points(e, &e->made, e->made.count + e->cell.count))
        return false;
    if (e->cell.count > 0)
        memcpy(e->made.list + e->made.count, e->cell.list, e->cell.count * sizeof(*e->cell.list));
    e->made.count += e->cell.count;
    return true;
}

static bool merge_block(crn_envelope *e, int32_t block)
{
    float upper[BLOCK];
    lower_cells(e, block, e->made.count > 0 ? (float)last_ns(e) : INFINITY, upper);
    if (!flag_cells(e, block, upper))
        return false;
    for (int32_t cell = 0; cell < BLOCK; cell++)
        if (!merge_cell(e, block, cell))
            return false;
    return true;
}

/* ---- the result ---- */

/* From BLOCK borders before the first point to as many after the last. point[i] may be NULL. */
static bool make_cell_borders(const crn_envelope *e, crn_arena *arena, const crn_steps *made, crn_borders *borders,
                              int32_t *point)
{
    int32_t at = 0, width = e->cells.width_log2, count = borders->high - borders->low + 1;
    float *cell = crn_arena_alloc(arena, (size_t)count + 2 * BLOCK, sizeof(*cell));
    uint8_t *steps = crn_arena_alloc_zero(arena, (size_t)count + 2 * BLOCK, sizeof(*steps));
    if (!cell || !steps)
        return false;
    for (int32_t i = 0; i < BLOCK; i++)
        cell[i] = INFINITY;
    for (int32_t i = 0; i < count + BLOCK; i++) {
        while (at < made->count && made->points[at].bytes + borders->shift <= border_bytes(borders->low + i, width))
            steps[BLOCK + i - 1] = 1, at++;
        if (point && i < count)
            point[i] = at - 1;
        cell[BLOCK + i] = (float)made->points[at - 1].ns;
    }
    borders->cell = cell + BLOCK;
    borders->steps = steps + BLOCK;
    return true;
}

static bool make_borders(const crn_envelope *e, int64_t shift, crn_arena *arena, const crn_steps *made,
                         crn_borders *borders, int32_t *point)
{
    int32_t width = e->cells.width_log2;
    *borders = (crn_borders){.shift = shift,
                             .low = up(made->points[0].bytes + shift, width),
                             .high = up(made->points[made->count - 1].bytes + shift, width)};
    float *block = crn_arena_alloc(arena, border_count(&e->cells), sizeof(*block));
    if (!block || !make_cell_borders(e, arena, made, borders, point))
        return false;
    for (int32_t b = 0; b <= e->cells.blocks; b++) {
        int32_t i = b * BLOCK;
        block[b] = i < borders->low ? INFINITY : borders->cell[(i < borders->high ? i : borders->high) - borders->low];
    }
    borders->block = block;
    return true;
}

static bool keep(const crn_envelope *e, int64_t moved_shift, crn_arena *arena, crn_steps *made)
{
    const points *p = &e->made;
    *made = (crn_steps){.count = 0};
    if (p->count == 0)
        return true;
    crn_step *list = crn_arena_alloc(arena, p->count, sizeof(*list));
    if (!list)
        return false;
    memcpy(list, p->list, p->count * sizeof(*list));
    made->points = list;
    made->count = (int32_t)p->count;
    int32_t width = e->cells.width_log2;
    size_t borders = (size_t)(up(list[p->count - 1].bytes, width) - up(list[0].bytes, width)) + 1;
    int32_t *point = crn_arena_alloc(arena, borders, sizeof(*point));
    made->point = point;
    return point && make_borders(e, 0, arena, made, &made->plain, point) &&
           make_borders(e, moved_shift, arena, made, &made->moved, NULL);
}

bool crn_envelope_end(crn_envelope *e, int64_t moved_shift, crn_arena *arena, crn_steps *made)
{
    e->made.count = 0;
    if (!select_chances(e))
        return false;
    for (int32_t block = 0; block < e->cells.blocks; block++)
        if (e->block_begin[block] < e->block_begin[block + 1] && !merge_block(e, block))
            return false;
    return keep(e, moved_shift, arena, made);
}

int64_t crn_steps_at(const crn_steps *steps, const crn_cells *cells, int64_t bytes)
{
    int32_t at = steps->count > 0 ? find(steps, cells, bytes) : -1;
    return at < 0 ? CRN_STEPS_INFINITE : steps->points[at].ns;
}

int64_t crn_term_at(const crn_term *term, const crn_cells *cells, int64_t bytes)
{
    if (bytes < term->from_bytes)
        return CRN_STEPS_INFINITE;
    int64_t ns = term->ns;
    if (term->first)
        ns = crn_add_saturating(ns, crn_steps_at(term->first, cells, bytes - term->first_shift));
    if (term->second)
        ns = crn_add_saturating(ns, crn_steps_at(term->second, cells, bytes - term->second_shift));
    return ns;
}

crn_cells crn_cells_for(int64_t top_bytes, int32_t count)
{
    crn_cells cells = {.top_bytes = top_bytes};
    while (top_bytes >> cells.width_log2 >= count)
        cells.width_log2++;
    cells.blocks = (int32_t)(top_bytes >> (cells.width_log2 + BLOCK_LOG2)) + 1;
    return cells;
}

/* ---- for many threads ---- */

bool crn_step_makers_init(crn_step_makers *makers, int count, const crn_cells *cells, crn_arena *arena)
{
    atomic_init(&makers->failed, false);
    makers->points = crn_arena_alloc(arena, (size_t)count, sizeof(*makers->points));
    /* NOLINTNEXTLINE(bugprone-sizeof-expression): an array of pointers */
    makers->envelopes = crn_arena_alloc_zero(arena, (size_t)count, sizeof(*makers->envelopes));
    if (!makers->points || !makers->envelopes)
        return false;
    makers->count = count;
    for (int i = 0; i < count; i++)
        crn_arena_init(&makers->points[i], arena->allocator);
    for (int i = 0; i < count; i++)
        if (!(makers->envelopes[i] = crn_envelope_new(&arena->allocator, cells)))
            return false;
    return true;
}

void crn_step_makers_rest(crn_step_makers *makers)
{
    for (int i = 0; i < makers->count; i++) {
        crn_envelope_free(makers->envelopes[i]);
        makers->envelopes[i] = NULL;
    }
}

void crn_step_makers_clear(crn_step_makers *makers)
{
    crn_step_makers_rest(makers);
    for (int i = 0; i < makers->count; i++)
        crn_arena_clear(&makers->points[i]);
    makers->count = 0;
}
