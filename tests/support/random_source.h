/*
 * Numbers for generated tests: a seeded generator that gives the same sequence everywhere, or the bytes of a fuzzer.
 *
 * Generators draw from a test_random and do not know which of the two it is; so a fuzzer steers the same generators
 * that the property tests use. When the bytes run out every draw gives its least value.
 */
#ifndef TEST_RANDOM_SOURCE_H
#define TEST_RANDOM_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct test_random {
    uint64_t state;
    const uint8_t *bytes; /* NULL = seeded */
    size_t left;
} test_random;

test_random test_random_seeded(uint64_t seed);
test_random test_random_from_bytes(const uint8_t *bytes, size_t length);

/** 64 random bits (8 of the bytes). */
uint64_t test_random_bits(test_random *random);
/** A value in [low, high], both included; low when high <= low. Takes as few bytes as the range needs. */
int64_t test_random_between(test_random *random, int64_t low, int64_t high);
/** True in percent of 100 cases; takes one byte. Never true once the bytes have run out. */
bool test_random_chance(test_random *random, int percent);

#endif
