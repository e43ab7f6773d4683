#include "solve/chain/envelope.h"

#include <math.h>
#include <string.h>

enum { BLOCK = CRN_STEPS_BLOCK };

static bool crn_envelope_reserve_points(crn_envelope *e, crn_envelope_points *p, size_t count)
{
    if (count <= p->capacity)
        return true;
    crn_step *grown = crn_grow(&e->allocator, p->list, &p->capacity, count, sizeof(*grown));
    if (grown)
        p->list = grown;
    return grown != NULL;
}

static void push(crn_envelope_points *p, int64_t bytes, int64_t ns)
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
    crn_envelope_points swap = e->cell;
    e->cell = e->merged;
    e->merged = swap;
}

/* Lowers the envelope in (low, high] by a term; least = its value at low. */
static bool lower_cell(crn_envelope *e, const crn_term *t, int64_t low, int64_t high, int64_t least)
{
    if (low >= high || t->from_bytes > high)
        return true;
    int64_t begin = crn_max(low + 1, t->from_bytes);
    int32_t first_end = crn_steps_find(t->first, &e->cells, high - t->first_shift);
    int32_t second_end = crn_steps_find(t->second, &e->cells, high - t->second_shift);
    if (t->ns + t->first->points[first_end].ns + t->second->points[second_end].ns >= least)
        return true;
    int32_t first = crn_steps_find(t->first, &e->cells, begin - t->first_shift);
    int32_t second = crn_steps_find(t->second, &e->cells, begin - t->second_shift);
    size_t most = (size_t)(first_end - first) + (size_t)(second_end - second) + 1;
    if (!crn_envelope_reserve_points(e, &e->merged, e->cell.count + most))
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
    int64_t low = number == 0 ? -1 : crn_border_bytes(number, e->cells.width_log2);
    int64_t high = crn_min(crn_border_bytes(number + 1, e->cells.width_log2), e->cells.top_bytes);
    size_t begin = e->block_begin[block], count = e->block_begin[block + 1] - begin;
    e->cell.count = 0;
    for (size_t c = 0; c < count; c++)
        if (e->flags[c].cell[cell] && !lower_cell(e, &e->items[e->sorted[begin + c]].term, low, high, last_ns(e)))
            return false;
    if (!crn_envelope_reserve_points(e, &e->made, e->made.count + e->cell.count))
        return false;
    if (e->cell.count > 0)
        memcpy(e->made.list + e->made.count, e->cell.list, e->cell.count * sizeof(*e->cell.list));
    e->made.count += e->cell.count;
    return true;
}

bool crn_envelope_merge_block(crn_envelope *e, int32_t block)
{
    float upper[BLOCK];
    crn_envelope_lower_cells(e, block, e->made.count > 0 ? (float)last_ns(e) : INFINITY, upper);
    if (!crn_envelope_flag_cells(e, block, upper))
        return false;
    for (int32_t cell = 0; cell < BLOCK; cell++)
        if (!merge_cell(e, block, cell))
            return false;
    return true;
}
