#include "solve/graph/exact_states.h"

#include <string.h>

enum { CAPACITY_MIN = 1 << 10 };

void crn_exact_states_init(crn_exact_states *all, cairn_allocator allocator)
{
    *all = (crn_exact_states){.allocator = allocator};
    crn_queue_init(&all->queue, allocator);
}

void crn_exact_states_close(crn_exact_states *all)
{
    crn_free(&all->allocator, all->table, (size_t)all->table_size, sizeof(*all->table));
    crn_queue_clear(&all->queue);
    all->table = NULL;
    all->table_size = 0;
}

void crn_exact_states_free(crn_exact_states *all)
{
    crn_exact_states_close(all);
    crn_free(&all->allocator, all->states, (size_t)all->capacity, sizeof(*all->states));
    crn_exact_states_init(all, all->allocator);
}

/* ---- the table ---- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

static bool is_same(const crn_exact_state *a, const crn_exact_state *b)
{
    return a->computed == b->computed && memcmp(&a->held, &b->held, sizeof(a->held)) == 0;
}

/* Where the state is, or would be. */
static int32_t *slot_of(const crn_exact_states *all, const crn_exact_state *state)
{
    uint64_t hash = state->computed;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        hash = mix(hash ^ state->held.word[i]) + 0x9e3779b97f4a7c15u;
    size_t mask = (size_t)all->table_size - 1, at = (size_t)hash & mask;
    while (all->table[at] >= 0 && !is_same(&all->states[all->table[at]], state))
        at = (at + 1) & mask;
    return &all->table[at];
}

static bool grow_states(crn_exact_states *all)
{
    int32_t capacity = all->capacity ? 2 * all->capacity : CAPACITY_MIN, size = 2 * capacity;
    size_t old = (size_t)all->capacity;
    crn_exact_state *states = crn_realloc(&all->allocator, all->states, old, (size_t)capacity, sizeof(*states));
    if (!states)
        return false;
    all->states = states;
    all->capacity = capacity;
    crn_free(&all->allocator, all->table, (size_t)all->table_size, sizeof(*all->table));
    all->table = crn_alloc(&all->allocator, (size_t)size, sizeof(*all->table));
    all->table_size = all->table ? size : 0;
    if (!all->table)
        return false;
    memset(all->table, 0xff, (size_t)size * sizeof(*all->table));
    for (int32_t i = 0; i < all->count; i++)
        *slot_of(all, &all->states[i]) = i;
    return true;
}

/* ---- reaching and settling ---- */

void crn_exact_reach(crn_exact_states *all, const crn_exact_state *way, int64_t bound, int32_t left)
{
    if (all->failed || (all->count == all->capacity && !grow_states(all)) || !crn_queue_make_room(&all->queue)) {
        all->failed = true;
        return;
    }
    int32_t *slot = slot_of(all, way);
    if (*slot < 0)
        *slot = all->count++;
    else if (all->states[*slot].spent <= way->spent)
        return;
    all->states[*slot] = *way;
    crn_queue_push(&all->queue, (crn_queue_entry){bound, left, *slot});
}

int32_t crn_exact_next(crn_exact_states *all, int64_t *bound)
{
    while (all->queue.count > 0) {
        crn_queue_entry entry = crn_queue_pop(&all->queue);
        if (all->states[entry.item].settled)
            continue;
        all->states[entry.item].settled = true;
        *bound = entry.bound;
        return entry.item;
    }
    return -1;
}
