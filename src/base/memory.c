#ifdef __linux__
#define _DEFAULT_SOURCE /* madvise */ // NOLINT(bugprone-reserved-identifier)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

/* Large tables are touched once from end to end: in small pages, most of the time would go into page faults. */
enum { HUGE_PAGE_BYTES = 2 << 20, HUGE_BLOCK_BYTES = 2 * HUGE_PAGE_BYTES };

/*
 * For all pages of the block, its first and last ones too: the kernel moves a block that grows only if all its pages have
 * the same advice. Otherwise realloc copies it, and for that time it is there twice.
 */
static void ask_for_huge_pages(void *block, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)block % page;
    (void)madvise((char *)block - before, before + bytes, MADV_HUGEPAGE); /* a wish, no more; its end is rounded up */
#else
    (void)block;
    (void)bytes;
#endif
}

static void *libc_resize(void *context, void *block, size_t old_size, size_t new_size)
{
    (void)context;
    (void)old_size;
    if (new_size == 0) {
        free(block);
        return NULL;
    }
    block = realloc(block, new_size);
    if (block && new_size >= HUGE_BLOCK_BYTES)
        ask_for_huge_pages(block, new_size);
    return block;
}

cairn_allocator crn_allocator(const cairn_env *env)
{
    if (env && env->allocator.resize)
        return env->allocator;
    return (cairn_allocator){NULL, libc_resize};
}

/* Sizes of zero would mean "free" to the allocator: they are rounded up to one byte, alike in alloc, realloc, free. */
static bool block_size(size_t count, size_t size, size_t *bytes)
{
    if (!crn_mul_size(count, size, bytes) || *bytes > PTRDIFF_MAX)
        return false;
    if (*bytes == 0)
        *bytes = 1;
    return true;
}

void *crn_alloc(const cairn_allocator *allocator, size_t count, size_t size)
{
    size_t bytes;
    if (!block_size(count, size, &bytes))
        return NULL;
    return allocator->resize(allocator->context, NULL, 0, bytes);
}

void *crn_alloc_zero(const cairn_allocator *allocator, size_t count, size_t size)
{
    void *block = crn_alloc(allocator, count, size);
    if (block)
        memset(block, 0, count * size);
    return block;
}

void *crn_realloc(const cairn_allocator *allocator, void *block, size_t old_count, size_t new_count, size_t size)
{
    size_t old_bytes, new_bytes;
    if (!block)
        return crn_alloc(allocator, new_count, size);
    if (!block_size(old_count, size, &old_bytes) || !block_size(new_count, size, &new_bytes))
        return NULL;
    return allocator->resize(allocator->context, block, old_bytes, new_bytes);
}

void *crn_grow(const cairn_allocator *allocator, void *block, size_t *capacity, size_t count, size_t size)
{
    size_t larger = count + count / 2 + 64;
    void *grown = crn_realloc(allocator, block, *capacity, larger, size);
    if (grown)
        *capacity = larger;
    return grown;
}

void crn_free(const cairn_allocator *allocator, void *block, size_t count, size_t size)
{
    size_t bytes;
    if (block && block_size(count, size, &bytes))
        allocator->resize(allocator->context, block, bytes, 0);
}

/* ---- arena ---- */

struct crn_arena_block {
    crn_arena_block *next;
    size_t bytes; /* of the whole block, this header included */
};

/* Blocks grow with the arena, so that they are few and at most one in ARENA_SLACK bytes lies idle. */
enum { ARENA_BLOCK_MIN = 4096, ARENA_BLOCK_MAX = 32 << 20, ARENA_SLACK = 16, ARENA_ALIGN = alignof(max_align_t) };

static size_t aligned(size_t bytes)
{
    return (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
}

void crn_arena_init(crn_arena *arena, cairn_allocator allocator)
{
    *arena = (crn_arena){.allocator = allocator};
}

static crn_arena_block *new_block(crn_arena *arena, size_t bytes)
{
    crn_arena_block *block = crn_alloc(&arena->allocator, 1, bytes);
    if (!block)
        return NULL;
    *block = (crn_arena_block){NULL, bytes};
    arena->total += bytes;
    return block;
}

static bool start_block(crn_arena *arena, size_t bytes)
{
    crn_arena_block *block = new_block(arena, bytes);
    if (!block)
        return false;
    block->next = arena->blocks;
    arena->blocks = block;
    arena->used = aligned(sizeof(*block));
    arena->capacity = bytes;
    return true;
}

/* A block for this alone, behind the one that is being filled. */
static void *alloc_alone(crn_arena *arena, size_t bytes)
{
    size_t header = aligned(sizeof(crn_arena_block));
    crn_arena_block *block = new_block(arena, header + bytes);
    if (!block)
        return NULL;
    crn_arena_block **link = arena->blocks ? &arena->blocks->next : &arena->blocks;
    block->next = *link;
    *link = block;
    if (arena->blocks == block)
        arena->used = arena->capacity = block->bytes;
    return (char *)block + header;
}

void *crn_arena_alloc(crn_arena *arena, size_t count, size_t size)
{
    size_t bytes, fresh = arena->total / ARENA_SLACK;
    fresh = fresh < ARENA_BLOCK_MIN ? ARENA_BLOCK_MIN : fresh > ARENA_BLOCK_MAX ? ARENA_BLOCK_MAX : fresh;
    if (!block_size(count, size, &bytes) || bytes > PTRDIFF_MAX - ARENA_BLOCK_MIN)
        return NULL;
    bytes = aligned(bytes);
    if (arena->capacity - arena->used < bytes) {
        if (bytes > fresh / 4)
            return alloc_alone(arena, bytes);
        if (!start_block(arena, fresh))
            return NULL;
    }
    void *memory = (char *)arena->blocks + arena->used;
    arena->used += bytes;
    return memory;
}

void *crn_arena_alloc_zero(crn_arena *arena, size_t count, size_t size)
{
    void *memory = crn_arena_alloc(arena, count, size);
    if (memory)
        memset(memory, 0, count * size);
    return memory;
}

char *crn_arena_text(crn_arena *arena, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = crn_arena_alloc(arena, bytes, 1);
    if (copy)
        memcpy(copy, text, bytes);
    return copy;
}

void *crn_arena_resize(crn_arena *arena, size_t old_count, size_t new_count, size_t size)
{
    size_t header = aligned(sizeof(crn_arena_block)), bytes;
    if (!block_size(new_count, size, &bytes) || bytes > PTRDIFF_MAX - ARENA_BLOCK_MIN)
        return NULL;
    crn_arena_block *block =
        crn_realloc(&arena->allocator, arena->blocks, header + old_count * size, header + bytes, 1);
    if (!block)
        return NULL;
    *block = (crn_arena_block){NULL, header + bytes};
    arena->blocks = block;
    arena->total = arena->used = arena->capacity = block->bytes;
    return (char *)block + header;
}

void crn_arena_join(crn_arena *arena, crn_arena *other)
{
    crn_arena_block **last = &arena->blocks;
    while (*last)
        last = &(*last)->next;
    *last = other->blocks;
    if (!arena->capacity) { /* nothing was there: what other was filling goes on */
        arena->used = other->used;
        arena->capacity = other->capacity;
    }
    arena->total += other->total;
    crn_arena_init(other, other->allocator);
}

void crn_arena_clear(crn_arena *arena)
{
    crn_arena all = *arena;
    crn_arena_init(arena, all.allocator); /* first, for it may lie in one of the blocks */
    while (all.blocks) {
        crn_arena_block *block = all.blocks;
        all.blocks = block->next;
        crn_free(&all.allocator, block, 1, block->bytes);
    }
}

/* ---- meter ---- */

void crn_meter_init(crn_meter *meter, cairn_allocator inner, int64_t limit_bytes)
{
    meter->inner = inner;
    meter->limit_bytes = limit_bytes;
    atomic_init(&meter->used_bytes, 0);
    atomic_init(&meter->peak_bytes, 0);
    atomic_init(&meter->refused, false);
}

static void raise_peak(crn_meter *meter, long long used)
{
    long long peak = atomic_load(&meter->peak_bytes);
    while (used > peak && !atomic_compare_exchange_weak(&meter->peak_bytes, &peak, used))
        ;
}

/* Counts bytes as used where they keep to the limit; what is refused is at no time counted, for other threads read it. */
static bool take_bytes(crn_meter *meter, long long bytes, long long *used)
{
    long long before = atomic_load(&meter->used_bytes);
    do {
        if (meter->limit_bytes != CAIRN_NONE && bytes > meter->limit_bytes - before)
            return false;
        *used = before + bytes;
    } while (!atomic_compare_exchange_weak(&meter->used_bytes, &before, *used));
    return true;
}

static void *meter_resize(void *context, void *block, size_t old_size, size_t new_size)
{
    crn_meter *meter = context;
    long long change = (long long)new_size - (long long)old_size, used = 0;
    if (change > 0 && !take_bytes(meter, change, &used)) {
        atomic_store(&meter->refused, true);
        return NULL;
    }
    void *moved = meter->inner.resize(meter->inner.context, block, old_size, new_size);
    bool failed = !moved && new_size > 0;
    if (failed && change > 0)
        atomic_fetch_sub(&meter->used_bytes, change);
    else if (!failed && change > 0)
        raise_peak(meter, used);
    else if (!failed)
        atomic_fetch_add(&meter->used_bytes, change);
    return moved;
}

cairn_allocator crn_meter_allocator(crn_meter *meter)
{
    return (cairn_allocator){meter, meter_resize};
}
