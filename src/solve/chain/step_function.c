#include "solve/chain/step_function.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "solve/chain/envelope.h"

enum { BLOCK_LOG2 = CRN_STEPS_BLOCK_LOG2, BLOCK = 1 << BLOCK_LOG2 };

static const crn_step origin = {0, 0};
static const int32_t first_point = 0;

/* ---- memory ---- */

static size_t zero_count(const crn_cells *cells)
{
    return crn_border_count(cells) + 2 * BLOCK;
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
    e->upper = crn_alloc(allocator, crn_border_count(cells), sizeof(*e->upper));
    e->flag = crn_alloc(allocator, crn_border_count(cells), sizeof(*e->flag));
    e->block_begin = crn_alloc(allocator, crn_border_count(cells), sizeof(*e->block_begin));
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
    crn_free(&allocator, e->upper, crn_border_count(&e->cells), sizeof(*e->upper));
    crn_free(&allocator, e->flag, crn_border_count(&e->cells), sizeof(*e->flag));
    crn_free(&allocator, e->block_begin, crn_border_count(&e->cells), sizeof(*e->block_begin));
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

static crn_envelope_side side_of(const crn_steps *steps, int64_t shift, int32_t width_log2)
{
    const crn_borders *borders = shift == steps->moved.shift ? &steps->moved : &steps->plain;
    int64_t rest = shift - borders->shift;
    return (crn_envelope_side){.borders = borders,
                               .up = crn_border_up(rest, width_log2),
                               .down = crn_border_down(rest, width_log2),
                               .block_up = crn_border_up(rest, width_log2 + BLOCK_LOG2),
                               .block_down = crn_border_down(rest, width_log2 + BLOCK_LOG2)};
}

static crn_envelope_item item_of(const crn_term *t, int32_t width_log2)
{
    return (crn_envelope_item){.term = *t,
                               .first = side_of(t->first, t->first_shift, width_log2),
                               .second = side_of(t->second, t->second_shift, width_log2),
                               .from = crn_border_up(t->from_bytes, width_log2),
                               .block_from = crn_border_up(t->from_bytes, width_log2 + BLOCK_LOG2),
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
        crn_envelope_item *grown =
            crn_grow(&e->allocator, e->items, &e->item_capacity, e->item_count + 1, sizeof(*grown));
        if (!grown)
            return false;
        e->items = grown;
    }
    e->items[e->item_count++] = item_of(&t, e->cells.width_log2);
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
        while (at < made->count && made->points[at].bytes + borders->shift <= crn_border_bytes(borders->low + i, width))
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
                             .low = crn_border_up(made->points[0].bytes + shift, width),
                             .high = crn_border_up(made->points[made->count - 1].bytes + shift, width)};
    float *block = crn_arena_alloc(arena, crn_border_count(&e->cells), sizeof(*block));
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
    const crn_envelope_points *p = &e->made;
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
    size_t borders = (size_t)(crn_border_up(list[p->count - 1].bytes, width) - crn_border_up(list[0].bytes, width)) + 1;
    int32_t *point = crn_arena_alloc(arena, borders, sizeof(*point));
    made->point = point;
    return point && make_borders(e, 0, arena, made, &made->plain, point) &&
           make_borders(e, moved_shift, arena, made, &made->moved, NULL);
}

bool crn_envelope_end(crn_envelope *e, int64_t moved_shift, crn_arena *arena, crn_steps *made)
{
    e->made.count = 0;
    if (!crn_envelope_select(e))
        return false;
    for (int32_t block = 0; block < e->cells.blocks; block++)
        if (e->block_begin[block] < e->block_begin[block + 1] && !crn_envelope_merge_block(e, block))
            return false;
    return keep(e, moved_shift, arena, made);
}

/* ---- values ---- */

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

/* Near the border below it, there are few points in a cell. */
int32_t crn_steps_find(const crn_steps *steps, const crn_cells *cells, int64_t bytes)
{
    if (bytes < 0)
        return -1;
    int32_t border = crn_border_down(bytes, cells->width_log2);
    if (border >= steps->plain.high)
        return steps->count - 1;
    return advance(steps, border < steps->plain.low ? -1 : steps->point[border - steps->plain.low], bytes);
}

int64_t crn_steps_at(const crn_steps *steps, const crn_cells *cells, int64_t bytes)
{
    int32_t at = steps->count > 0 ? crn_steps_find(steps, cells, bytes) : -1;
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
