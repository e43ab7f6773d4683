#include "support/random_source.h"

test_random test_random_seeded(uint64_t seed)
{
    return (test_random){.state = seed};
}

test_random test_random_from_bytes(const uint8_t *bytes, size_t length)
{
    static const uint8_t none[1];
    return (test_random){.bytes = bytes ? bytes : none, .left = bytes ? length : 0};
}

/* SplitMix64 (Steele, Lea, Flood 2014): every seed is a good one. */
static uint64_t splitmix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* byte_count bytes of the fuzzer's, zeros past the end. */
static uint64_t take_bytes(test_random *random, int byte_count)
{
    uint64_t value = 0;
    for (int i = 0; i < byte_count; i++) {
        value <<= 8;
        if (random->left > 0) {
            value |= *random->bytes++;
            random->left--;
        }
    }
    return value;
}

uint64_t test_random_bits(test_random *random)
{
    return random->bytes ? take_bytes(random, 8) : splitmix(&random->state);
}

int64_t test_random_between(test_random *random, int64_t low, int64_t high)
{
    if (high <= low)
        return low;
    uint64_t span = (uint64_t)high - (uint64_t)low, bits;
    int byte_count = 1;
    while (byte_count < 8 && span >> (8 * byte_count) != 0)
        byte_count++;
    bits = random->bytes ? take_bytes(random, byte_count) : splitmix(&random->state);
    if (span != UINT64_MAX)
        bits %= span + 1;
    return (int64_t)((uint64_t)low + bits);
}

bool test_random_chance(test_random *random, int percent)
{
    if (random->bytes)
        return take_bytes(random, 1) * 100 > 255u * (uint64_t)(100 - percent);
    return (int)(splitmix(&random->state) % 100) < percent;
}
