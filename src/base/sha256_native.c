/* SHA-256 with the instructions of x86 processors (SHA extensions), two rounds at a time. */
#include "base/sha256.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>

#define NATIVE __attribute__((target("sha,sse4.1,ssse3")))

/* The four words after the sixteen in m, of which m[i % 4] has the first. */
NATIVE static inline __m128i next_words(const __m128i m[4], int i)
{
    __m128i sum = _mm_sha256msg1_epu32(m[i % 4], m[(i + 1) % 4]);
    sum = _mm_add_epi32(sum, _mm_alignr_epi8(m[(i + 3) % 4], m[(i + 2) % 4], 4));
    return _mm_sha256msg2_epu32(sum, m[(i + 3) % 4]);
}

/* abef and cdgh hold the words of the state by their usual letters, the first in the highest lane. */
NATIVE static inline void compress(__m128i *abef, __m128i *cdgh, const uint8_t block[64])
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i m[4], x = *abef, y = *cdgh;
    for (int i = 0; i < 4; i++)
        m[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)block + i), big_endian);
    for (int i = 0; i < 16; i++) {
        if (i >= 4)
            m[i % 4] = next_words(m, i);
        __m128i words = _mm_add_epi32(m[i % 4], _mm_loadu_si128((const __m128i *)crn_sha256_constants + i));
        y = _mm_sha256rnds2_epu32(y, x, words);
        x = _mm_sha256rnds2_epu32(x, y, _mm_shuffle_epi32(words, 0x0e));
    }
    *abef = _mm_add_epi32(*abef, x);
    *cdgh = _mm_add_epi32(*cdgh, y);
}

NATIVE static void native_blocks(uint32_t state[8], const uint8_t *data, size_t count)
{
    __m128i *words = (__m128i *)(void *)state;
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (size_t i = 0; i < count; i++)
        compress(&abef, &cdgh, data + 64 * i);
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

static int has_instructions(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

/* Asking takes a microsecond, and tens of them in a virtual machine: once is enough. */
crn_sha256_blocks *crn_sha256_native(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int known = UNKNOWN;
    if (atomic_load(&known) == UNKNOWN)
        atomic_store(&known, has_instructions() ? YES : NO);
    return atomic_load(&known) == YES ? native_blocks : NULL;
}

#else

crn_sha256_blocks *crn_sha256_native(void)
{
    return NULL;
}

#endif
