/*
 * How many random instances a test looks at: all of them, but an eighth under the address sanitizer and a 60th under the
 * thread sanitizer, where each costs so much more and shows the same kinds of defects; and a quarter where a build says
 * CAIRN_TEST_BRIEFLY, as those of further compilers and settings do.
 */
#ifndef TEST_ROUNDS_H
#define TEST_ROUNDS_H

#if defined(__SANITIZE_THREAD__)
#define TEST_ROUNDS(count) (((count) + 59) / 60)
#elif defined(__SANITIZE_ADDRESS__)
#define TEST_ROUNDS(count) (((count) + 7) / 8)
#elif defined(CAIRN_TEST_BRIEFLY)
#define TEST_ROUNDS(count) (((count) + 3) / 4)
#else
#define TEST_ROUNDS(count) (count)
#endif

#endif
