#include "solve/graph/exact_states.h"

#include <string.h>

enum { CAPACITY_MIN = 1 << 10 };

void crn_exact_states_init(crn_exact_states *all, cairn_allocator allocator)
{
    *all = (crn_exact_states){.allocator = allocator};
}

void crn_exact_states_close(crn_exact_states *all)
{
    crn_free(&all->allocator, all->table, (size_t)all->table_size, sizeof(*all->table));
    crn_free(&all->allocator, all->queue, (size_t)all->queue_capacity, sizeof(*all->queue));
    all->table = NULL;
    all->queue = NULL;
    all->table_size = all->queue_count = all->queue_capacity = 0;
}

void crn_exact_states_free(crn_exact_states *all)
{
    crn_exact_states_close(all);
    crn_free(&all->allocator, all->states, (size_t)all->capacity, sizeof(*all->states));
    *all = (crn_exact_states){.allocator = all->allocator};
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

/* ---- the queue ---- */

/* By bound, then those that are nearer to the end, then the older ones: the search is the same everywhere. */
static bool is_before(const crn_exact_entry *a, const crn_exact_entry *b)
{
    if (a->bound != b->bound)
        return a->bound < b->bound;
    return a->left != b->left ? a->left < b->left : a->state < b->state;
}

static bool grow_queue(crn_exact_states *all)
{
    if (all->queue_capacity > INT32_MAX / 2)
        return false;
    int32_t capacity = all->queue_capacity ? 2 * all->queue_capacity : CAPACITY_MIN;
    size_t old = (size_t)all->queue_capacity;
    crn_exact_entry *queue = crn_realloc(&all->allocator, all->queue, old, (size_t)capacity, sizeof(*queue));
    if (!queue)
        return false;
    all->queue = queue;
    all->queue_capacity = capacity;
    return true;
}

static void push(crn_exact_states *all, crn_exact_entry entry)
{
    int32_t at = all->queue_count++;
    for (; at > 0 && is_before(&entry, &all->queue[(at - 1) / 2]); at = (at - 1) / 2)
        all->queue[at] = all->queue[(at - 1) / 2];
    all->queue[at] = entry;
}

static crn_exact_entry pop(crn_exact_states *all)
{
    crn_exact_entry first = all->queue[0], last = all->queue[--all->queue_count];
    int32_t at = 0;
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child + 1 < all->queue_count && is_before(&all->queue[child + 1], &all->queue[child]))
            child++;
        if (child >= all->queue_count || !is_before(&all->queue[child], &last))
            break;
        all->queue[at] = all->queue[child];
        at = child;
    }
    all->queue[at] = last;
    return first;
}

/* ---- reaching and settling ---- */

void crn_exact_reach(crn_exact_states *all, const crn_exact_state *way, int64_t bound, int32_t left)
{
    if (all->failed || (all->count == all->capacity && !grow_states(all)) ||
        (all->queue_count == all->queue_capacity && !grow_queue(all))) {
        all->failed = true;
        return;
    }
    int32_t *slot = slot_of(all, way);
    if (*slot < 0)
        *slot = all->count++;
    else if (all->states[*slot].spent <= way->spent)
        return;
    all->states[*slot] = *way;
    push(all, (crn_exact_entry){bound, *slot, left});
}

int32_t crn_exact_next(crn_exact_states *all, int64_t *bound)
{
    while (all->queue_count > 0) {
        crn_exact_entry entry = pop(all);
        if (all->states[entry.state].settled)
            continue;
        all->states[entry.state].settled = true;
        *bound = entry.bound;
        return entry.state;
    }
    return -1;
}
