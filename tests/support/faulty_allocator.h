/*
 * An allocator that fails on request, counts what is in use and checks the sizes that it is told.
 *
 *     static cairn_status make_and_free(const cairn_env *env, void *context)
 *     {
 *         cairn_problem *problem;
 *         cairn_status status = cairn_problem_new_chain(env, context, NULL, &problem, NULL);
 *         cairn_problem_free(problem);
 *         return status;
 *     }
 *     ...
 *     test_every_allocation_fails(make_and_free, &chain);
 *
 * Include it after cmocka.h: its checks are cmocka assertions.
 */
#ifndef TEST_FAULTY_ALLOCATOR_H
#define TEST_FAULTY_ALLOCATOR_H

#include <cairn/base.h>
#include <stdatomic.h>

typedef struct test_faulty {
    long long fail_at;     /* number of the request that fails, from 0; -1 = none */
    bool fail_after;       /* so do all requests after it */
    atomic_llong requests; /* allocations and growths so far, the failed ones included */
    atomic_llong failures;
    atomic_llong live_blocks, live_bytes;
    atomic_bool wrong_size; /* a block came back with another size than it was made with */
} test_faulty;

void test_faulty_init(test_faulty *faulty, long long fail_at, bool fail_after);
/** An environment with this allocator and nothing else; faulty must outlive it. */
cairn_env test_faulty_env(test_faulty *faulty);

/**
 * Runs body with request 0 failing, then with request 1, ... until a run makes fewer requests than that; then once
 * more with all requests from the k-th on failing. Where rounds.h looks at fewer instances, some of what comes after the
 * first hundreds is left out. body makes something through env, frees it, and returns the status.
 *
 * Asserts that a run without failures succeeds, that one with a failure returns NO_MEMORY, or OK where the library
 * can do without (a thread less, a block not shrunk), that nothing stays allocated, and that sizes are told truly.
 * Returns the number of requests that a run without failures makes. Cost: its square; keep the problem small.
 */
long long test_every_allocation_fails(cairn_status (*body)(const cairn_env *env, void *context), void *context);

#endif
