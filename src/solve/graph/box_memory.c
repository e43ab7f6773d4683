/*
 * Where a box program starts. It takes the prices and variables of an earlier program, for rows and columns of the same
 * names. It also takes the rows that box_covers.c added to the earlier program. Good prices of one program are good
 * ones of a program that differs little. So the new program starts from a bound that is about as good.
 */
#include <string.h>

#include "solve/graph/box_program.h"

enum { ROWS_OF_ENTRIES = 64, ENTRIES_SHARE = 4, FULL = 3 };

bool crn_box_memory_new(crn_arena *arena, int32_t entry_max, crn_box_memory *memory)
{
    int32_t slots = 64;
    while (slots < entry_max)
        slots *= 2;
    *memory = (crn_box_memory){.slot_count = slots, .row_max = entry_max / ROWS_OF_ENTRIES + 1};
    memory->entry_max = entry_max / ENTRIES_SHARE + 1;
    size_t rows = (size_t)memory->row_max, entries = (size_t)memory->entry_max;
    return (memory->name = crn_arena_alloc_zero(arena, (size_t)slots, sizeof(uint64_t))) &&
           (memory->value = crn_arena_alloc(arena, (size_t)slots, sizeof(double))) &&
           (memory->place = crn_arena_alloc(arena, (size_t)slots, sizeof(int32_t))) &&
           (memory->row_begin = crn_arena_alloc_zero(arena, rows + 1, sizeof(int32_t))) &&
           (memory->right = crn_arena_alloc(arena, rows, sizeof(int32_t))) &&
           (memory->capacity = crn_arena_alloc(arena, rows, sizeof(int64_t))) &&
           (memory->price = crn_arena_alloc(arena, rows, sizeof(double))) &&
           (memory->weight = crn_arena_alloc(arena, entries, sizeof(int64_t))) &&
           (memory->column_name = crn_arena_alloc(arena, entries, sizeof(uint64_t)));
}

/* The slot of a name, or the free one where it belongs. */
static int32_t slot_of(const crn_box_memory *m, uint64_t name)
{
    uint64_t mixed = name * 0x9e3779b97f4a7c15u;
    int32_t slot = (int32_t)((mixed >> 32) & (uint64_t)(m->slot_count - 1));
    while (m->name[slot] != 0 && m->name[slot] != name)
        slot = (slot + 1) & (m->slot_count - 1);
    return slot;
}

static void put(crn_box_memory *m, uint64_t name, double value)
{
    if (name == 0 || m->used >= m->slot_count / (FULL + 1) * FULL)
        return;
    int32_t slot = slot_of(m, name);
    m->used += m->name[slot] == 0;
    m->name[slot] = name;
    m->value[slot] = value;
}

double crn_box_recall(const crn_box_program *p, uint64_t name, double otherwise)
{
    const crn_box_memory *m = &p->memory;
    if (name == 0 || m->used == 0)
        return otherwise;
    int32_t slot = slot_of(m, name);
    return m->name[slot] == name ? m->value[slot] : otherwise;
}

/* Copies row r into the memory. Leaves it out where the memory is full. */
static void keep_row(const crn_box_program *p, crn_box_memory *m, int32_t r)
{
    int32_t begin = p->row_begin[r], count = p->row_begin[r + 1] - begin, at = m->entry_count;
    if (m->row_count == m->row_max || m->entry_count + count > m->entry_max)
        return;
    for (int32_t e = begin; e < begin + count; e++) {
        m->column_name[at] = p->column_name[p->column[e]];
        m->weight[at++] = p->capacity[r] < 0 ? 1 : p->weight[e];
    }
    m->right[m->row_count] = p->right[r];
    m->capacity[m->row_count] = p->capacity[r];
    m->price[m->row_count++] = p->y_best[r];
    m->row_begin[m->row_count] = m->entry_count = at;
}

void crn_box_remember(crn_box_program *p, int32_t first_added)
{
    crn_box_memory *m = &p->memory;
    memset(m->name, 0, (size_t)m->slot_count * sizeof(*m->name));
    m->used = m->row_count = m->entry_count = 0;
    for (int32_t r = 0; r < first_added; r++)
        put(m, p->row_name[r], p->y_best[r]);
    for (int32_t j = 0; j < p->column_count; j++)
        put(m, p->column_name[j], p->x_next[j]);
    for (int32_t r = first_added; r < p->row_count; r++)
        if (p->y_best[r] > 0)
            keep_row(p, m, r);
}

/*
 * Adds row r of the memory. Such a row says that a weighted sum of columns is at most a number. No weight is negative,
 * so the row also holds without the columns that this program lacks.
 */
static void add_row(crn_box_program *p, int32_t r)
{
    const crn_box_memory *m = &p->memory;
    int32_t begin = m->row_begin[r], end = m->row_begin[r + 1], entries = 0;
    if (p->row_count == p->row_max || p->entry_count + end - begin > p->entry_max)
        return;
    for (int32_t e = begin; e < end; e++) {
        int32_t slot = m->column_name[e] == 0 ? -1 : slot_of(m, m->column_name[e]);
        if (slot < 0 || m->name[slot] != m->column_name[e] || m->place[slot] < 0)
            continue;
        p->weight[p->entry_count] = m->weight[e];
        crn_box_entry(p, m->place[slot], 1);
        entries++;
    }
    if (entries == 0)
        return;
    if (m->capacity[r] >= 0)
        crn_box_weights(p, m->capacity[r]);
    else
        crn_box_row(p, m->right[r]);
    p->y_start[p->row_count - 1] = m->price[r];
}

void crn_box_recall_rows(crn_box_program *p)
{
    crn_box_memory *m = &p->memory;
    if (m->row_count == 0)
        return;
    memset(m->place, 0xff, (size_t)m->slot_count * sizeof(*m->place));
    for (int32_t j = 0; j < p->column_count; j++) {
        int32_t slot = p->column_name[j] == 0 ? -1 : slot_of(m, p->column_name[j]);
        if (slot >= 0 && m->name[slot] == p->column_name[j])
            m->place[slot] = j;
    }
    for (int32_t r = 0; r < m->row_count; r++)
        add_row(p, r);
}
