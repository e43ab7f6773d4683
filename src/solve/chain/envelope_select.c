#include "solve/chain/envelope.h"

#include <math.h>
#include <string.h>

#include "base/vector.h"

/* Sums of three numbers in single precision are within 2^-22 of their size; this is far beyond. */
#define MARGIN (1.0F / (1 << 18))

enum { BLOCK = CRN_STEPS_BLOCK };

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
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

static void lower_blocks(crn_envelope *e, const crn_envelope_item *t)
{
    int32_t begin = larger(t->block_from, larger(t->first.block_up, t->second.block_up));
    if (begin <= e->cells.blocks)
        lower_sums(e->upper + begin, t->first.borders->block + (begin - t->first.block_up),
                   t->second.borders->block + (begin - t->second.block_up), t->ns, e->cells.blocks - begin + 1);
}

static bool add_chances(crn_envelope *e, int32_t term_index, int32_t begin, int32_t count)
{
    if (e->chance_count + (size_t)count > e->chance_capacity) {
        crn_envelope_chance *grown =
            crn_grow(&e->allocator, e->chances, &e->chance_capacity, e->chance_count + (size_t)count, sizeof(*grown));
        if (!grown)
            return false;
        e->chances = grown;
    }
    for (int32_t i = 0; i < count; i++)
        if (e->flag[i])
            e->chances[e->chance_count++] = (crn_envelope_chance){begin + i, term_index};
    return true;
}

static bool find_chances(crn_envelope *e, int32_t index)
{
    const crn_envelope_item *t = &e->items[index];
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
    memset(e->block_begin, 0, crn_border_count(&e->cells) * sizeof(*e->block_begin));
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

bool crn_envelope_select(crn_envelope *e)
{
    for (size_t b = 0; b < crn_border_count(&e->cells); b++)
        e->upper[b] = INFINITY;
    for (size_t i = 0; i < e->item_count; i++)
        lower_blocks(e, &e->items[i]);
    for (size_t b = 0; b < crn_border_count(&e->cells); b++)
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

static const uint8_t *steps_from(const crn_envelope *e, const crn_envelope_side *of, int32_t i)
{
    const crn_borders *borders = of->borders;
    if (of->up != of->down)
        return e->maybe;
    i -= of->up;
    i = i < borders->low - BLOCK ? borders->low - BLOCK : i;
    i = i > borders->high ? borders->high : i;
    return borders->steps + (i - borders->low);
}

void crn_envelope_lower_cells(const crn_envelope *e, int32_t block, float known, float upper[BLOCK])
{
    for (int32_t i = 0; i < BLOCK; i++)
        upper[i] = known;
    for (size_t c = e->block_begin[block]; c < e->block_begin[block + 1]; c++) {
        const crn_envelope_item *t = &e->items[e->sorted[c]];
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

bool crn_envelope_flag_cells(crn_envelope *e, int32_t block, const float upper[BLOCK])
{
    size_t begin = e->block_begin[block], count = e->block_begin[block + 1] - begin;
    if (count > e->flags_capacity) {
        crn_envelope_flags *grown = crn_grow(&e->allocator, e->flags, &e->flags_capacity, count, sizeof(*grown));
        if (!grown)
            return false;
        e->flags = grown;
    }
    for (size_t c = 0; c < count; c++) {
        const crn_envelope_item *t = &e->items[e->sorted[begin + c]];
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
