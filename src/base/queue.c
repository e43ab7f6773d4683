#include "base/queue.h"

enum { CAPACITY_MIN = 1 << 10 };

void crn_queue_init(crn_queue *queue, cairn_allocator allocator)
{
    *queue = (crn_queue){.allocator = allocator};
}

void crn_queue_clear(crn_queue *queue)
{
    crn_free(&queue->allocator, queue->entries, (size_t)queue->capacity, sizeof(*queue->entries));
    crn_queue_init(queue, queue->allocator);
}

bool crn_queue_reserve(crn_queue *queue, int32_t capacity)
{
    if (capacity <= queue->capacity)
        return true;
    crn_queue_entry *entries =
        crn_realloc(&queue->allocator, queue->entries, (size_t)queue->capacity, (size_t)capacity, sizeof(*entries));
    if (!entries)
        return false;
    queue->entries = entries;
    queue->capacity = capacity;
    return true;
}

bool crn_queue_make_room(crn_queue *queue)
{
    if (queue->count < queue->capacity)
        return true;
    if (queue->capacity > INT32_MAX / 2)
        return false;
    return crn_queue_reserve(queue, queue->capacity ? 2 * queue->capacity : CAPACITY_MIN);
}

static bool is_before(const crn_queue_entry *a, const crn_queue_entry *b)
{
    if (a->bound != b->bound)
        return a->bound < b->bound;
    return a->rank != b->rank ? a->rank < b->rank : a->item < b->item;
}

void crn_queue_push(crn_queue *queue, crn_queue_entry entry)
{
    crn_queue_entry *entries = queue->entries;
    int32_t at = queue->count++;
    for (; at > 0 && is_before(&entry, &entries[(at - 1) / 2]); at = (at - 1) / 2)
        entries[at] = entries[(at - 1) / 2];
    entries[at] = entry;
}

crn_queue_entry crn_queue_pop(crn_queue *queue)
{
    crn_queue_entry *entries = queue->entries, first = entries[0], last = entries[--queue->count];
    int32_t at = 0, child;
    while ((child = 2 * at + 1) < queue->count) {
        if (child + 1 < queue->count && is_before(&entries[child + 1], &entries[child]))
            child++;
        if (!is_before(&entries[child], &last))
            break;
        entries[at] = entries[child];
        at = child;
    }
    entries[at] = last;
    return first;
}
