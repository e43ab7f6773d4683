#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support/faulty_allocator.h"
#include "support/rounds.h"

/* Beyond so many requests every seventh fails in builds that look at fewer instances: such many are made in loops. */
enum { EACH_UP_TO = 200, STRIDE = TEST_ROUNDS(7) == 7 ? 1 : 7 };

/* Every block is preceded by its size, in a header that keeps the alignment. */
typedef union header {
    size_t size;
    max_align_t align;
} header;

void test_faulty_init(test_faulty *faulty, long long fail_at, bool fail_after)
{
    faulty->fail_at = fail_at;
    faulty->fail_after = fail_after;
    atomic_init(&faulty->requests, 0);
    atomic_init(&faulty->failures, 0);
    atomic_init(&faulty->live_blocks, 0);
    atomic_init(&faulty->live_bytes, 0);
    atomic_init(&faulty->wrong_size, false);
}

static bool fails_now(test_faulty *faulty)
{
    long long request = atomic_fetch_add(&faulty->requests, 1);
    bool fails =
        faulty->fail_at >= 0 && (request == faulty->fail_at || (faulty->fail_after && request > faulty->fail_at));
    if (fails)
        atomic_fetch_add(&faulty->failures, 1);
    return fails;
}

static void *faulty_resize(void *context, void *block, size_t old_size, size_t new_size)
{
    test_faulty *faulty = context;
    header *old = block ? (header *)block - 1 : NULL;
    if ((old ? old->size : 0) != old_size)
        atomic_store(&faulty->wrong_size, true);
    if (new_size == 0) {
        if (old) {
            atomic_fetch_sub(&faulty->live_blocks, 1);
            atomic_fetch_sub(&faulty->live_bytes, (long long)old->size);
        }
        free(old);
        return NULL;
    }
    if (fails_now(faulty))
        return NULL;
    /* Always moves, so that a pointer kept across a resize is found by the address sanitizer. */
    header *made = malloc(sizeof(header) + new_size);
    if (!made)
        return NULL;
    made->size = new_size;
    for (size_t i = 0; i < new_size; i++)
        ((unsigned char *)(made + 1))[i] = old && i < old->size ? ((unsigned char *)(old + 1))[i] : 0xa5;
    atomic_fetch_add(&faulty->live_blocks, old ? 0 : 1);
    atomic_fetch_add(&faulty->live_bytes, (long long)new_size - (long long)(old ? old->size : 0));
    free(old);
    return made + 1;
}

cairn_env test_faulty_env(test_faulty *faulty)
{
    return (cairn_env){.allocator = {faulty, faulty_resize}};
}

/* One run; true when a request was made to fail. */
static bool run_once(cairn_status (*body)(const cairn_env *env, void *context), void *context, test_faulty *faulty)
{
    cairn_env env = test_faulty_env(faulty);
    cairn_status status = body(&env, context);
    bool failed = atomic_load(&faulty->failures) > 0;
    if (status != CAIRN_OK && !(failed && status == CAIRN_NO_MEMORY))
        fail_msg("request %lld of %lld failing%s: status %s", faulty->fail_at,
                 (long long)atomic_load(&faulty->requests), faulty->fail_after ? " and all after it" : "",
                 cairn_status_name(status));
    if (atomic_load(&faulty->live_blocks) != 0 || atomic_load(&faulty->live_bytes) != 0)
        fail_msg("request %lld failing%s: %lld bytes in %lld blocks are still in use", faulty->fail_at,
                 faulty->fail_after ? " and all after it" : "", (long long)atomic_load(&faulty->live_bytes),
                 (long long)atomic_load(&faulty->live_blocks));
    assert_false(atomic_load(&faulty->wrong_size));
    return failed;
}

long long test_every_allocation_fails(cairn_status (*body)(const cairn_env *env, void *context), void *context)
{
    test_faulty faulty;
    test_faulty_init(&faulty, -1, false);
    run_once(body, context, &faulty);
    long long requests = atomic_load(&faulty.requests);
    for (int mode = 0; mode < 2; mode++) {
        bool failed = true;
        for (long long k = 0; failed; k += k < EACH_UP_TO ? 1 : STRIDE) {
            test_faulty_init(&faulty, k, mode == 1);
            failed = run_once(body, context, &faulty);
        }
    }
    return requests;
}
