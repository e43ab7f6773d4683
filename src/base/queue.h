/* A priority queue: a binary heap in which no two entries are equal, so that a search takes the same way everywhere. */
#ifndef CRN_QUEUE_H
#define CRN_QUEUE_H

#include "base/memory.h"

/** By bound, then rank, then item; the least comes first. */
typedef struct crn_queue_entry {
    int64_t bound;
    int32_t rank, item;
} crn_queue_entry;

typedef struct crn_queue {
    cairn_allocator allocator;
    crn_queue_entry *entries;
    int32_t count, capacity;
} crn_queue;

void crn_queue_init(crn_queue *queue, cairn_allocator allocator);
/** Frees its memory; it is empty and usable again. */
void crn_queue_clear(crn_queue *queue);
/** Room for so many entries in all; false when memory fails, and then nothing has changed. */
bool crn_queue_reserve(crn_queue *queue, int32_t capacity);
/** Room for one more entry; false when memory fails, and then nothing has changed. */
bool crn_queue_make_room(crn_queue *queue);
/** Adds an entry, for which room has been made. */
void crn_queue_push(crn_queue *queue, crn_queue_entry entry);
/** Takes the least entry out of a queue that is not empty. */
crn_queue_entry crn_queue_pop(crn_queue *queue);

#endif
