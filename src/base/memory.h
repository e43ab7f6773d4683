/*
 * Memory through the caller's allocator: arrays, arenas, and a meter that counts and limits.
 *
 * An arena hands out memory that is freed all at once: the way to build an object out of many parts without a ladder
 * of frees. A meter is an allocator around another one that knows how much is and was in use; cairn_solve gives every
 * solver a metered allocator, so that no solver can pass its memory limit.
 */
#ifndef CRN_MEMORY_H
#define CRN_MEMORY_H

#include <cairn/base.h>
#include <stdatomic.h>

/** The allocator of an environment; malloc's when env is NULL or gives none. */
cairn_allocator crn_allocator(const cairn_env *env);

/** count elements of size bytes; NULL on overflow or failure. count 0 gives a valid pointer. */
void *crn_alloc(const cairn_allocator *allocator, size_t count, size_t size);
/** The same, zeroed. */
void *crn_alloc_zero(const cairn_allocator *allocator, size_t count, size_t size);
/** Grows or shrinks; NULL on failure, and then the block is untouched. */
void *crn_realloc(const cairn_allocator *allocator, void *block, size_t old_count, size_t new_count, size_t size);
/**
 * Room for count elements, more than *capacity, in an array that grows: with half as many to spare, so that growing one by
 * one costs little. NULL on failure, and then nothing has changed.
 */
void *crn_grow(const cairn_allocator *allocator, void *block, size_t *capacity, size_t count, size_t size);
/** Frees a block of count elements; NULL is allowed. */
void crn_free(const cairn_allocator *allocator, void *block, size_t count, size_t size);

typedef struct crn_arena_block crn_arena_block;

typedef struct crn_arena {
    cairn_allocator allocator;
    crn_arena_block *blocks;
    size_t used, capacity; /* of the block that is being filled */
    size_t total;          /* of all blocks */
} crn_arena;

void crn_arena_init(crn_arena *arena, cairn_allocator allocator);
/** Uninitialised memory, aligned for any type; NULL on overflow or failure. */
void *crn_arena_alloc(crn_arena *arena, size_t count, size_t size);
void *crn_arena_alloc_zero(crn_arena *arena, size_t count, size_t size);
/** A copy of a zero-terminated text; NULL on failure. */
char *crn_arena_text(crn_arena *arena, const char *text);
/**
 * Resizes an array that is all there is in its arena (old_count 0: makes it), without a second copy where the allocator
 * can. NULL on failure, and then nothing has changed.
 */
void *crn_arena_resize(crn_arena *arena, size_t old_count, size_t new_count, size_t size);
/** Takes over all memory of another arena of the same allocator, which is empty then. */
void crn_arena_join(crn_arena *arena, crn_arena *other);
/** Frees everything; the arena is empty and usable again, unless it lies in its own memory, which it may. */
void crn_arena_clear(crn_arena *arena);

typedef struct crn_meter {
    cairn_allocator inner;
    int64_t limit_bytes; /* CAIRN_NONE = none */
    atomic_llong used_bytes, peak_bytes;
    atomic_bool refused; /* an allocation failed because of the limit, not of the inner allocator */
} crn_meter;

void crn_meter_init(crn_meter *meter, cairn_allocator inner, int64_t limit_bytes);
/** The metered allocator; the meter must outlive it. */
cairn_allocator crn_meter_allocator(crn_meter *meter);

#endif
