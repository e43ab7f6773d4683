/*
 * A check that names the question that was asked: q points to what has a solver (text), a seed and a budget.
 * Include it after cmocka.h.
 */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#define check(q, condition)                                                                            \
    do {                                                                                               \
        if (!(condition))                                                                              \
            fail_msg("%s, seed %llu, budget %lld: not %s", (q)->solver, (unsigned long long)(q)->seed, \
                     (long long)(q)->budget, #condition);                                              \
    } while (0)

#endif
