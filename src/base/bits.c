/*
 * Truth values as bits.
 *
 * A byte each is how programs hold them, a bit each is how they are kept for later. Eight bytes are taken as one word,
 * the first in its lowest byte, and turned into one byte by a product, and back by another:
 *   - Packing. With b_j in bit 8j of the word, the factor of ones at 7, 14, ..., 56 moves b_j to bit 56 + j, among others.
 *     8j + 7k is another number for every j < 8 and 1 <= k <= 8, so nothing is ever carried.
 *   - Unpacking. The byte is repeated in every byte of a word, of which byte j keeps bit j alone. Adding 127 to each
 *     byte then sets its highest bit where that was not zero, again without a carry.
 * Cost: a few instructions for eight values.
 */
#include <cairn/base.h>

#define ONES UINT64_C(0x0101010101010101)

/* Compilers make one load of this where the machine has one. */
static uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word = 0;
    for (int j = 0; j < 8; j++)
        word |= (uint64_t)bytes[j] << (8 * j);
    return word;
}

void cairn_bits_pack(const void *bytes, int64_t count, void *bits)
{
    const unsigned char *from = bytes;
    unsigned char *to = bits;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t word = word_at(from + i);
        word |= word >> 4;
        word |= word >> 2;
        word |= word >> 1; /* the lowest bit of a byte: whether one of its bits is set */
        to[i / 8] = (unsigned char)(((word & ONES) * UINT64_C(0x0102040810204080)) >> 56);
    }
    if (i < count) {
        unsigned last = 0;
        for (int64_t j = i; j < count; j++)
            last |= (unsigned)(from[j] != 0) << (j - i);
        to[i / 8] = (unsigned char)last;
    }
}

void cairn_bits_unpack(const void *bits, int64_t count, void *bytes)
{
    const unsigned char *from = bits;
    unsigned char *to = bytes;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t word = (from[i / 8] * ONES) & UINT64_C(0x8040201008040201);
        word = ((word + 127 * ONES) >> 7) & ONES;
        for (int j = 0; j < 8; j++)
            to[i + j] = (unsigned char)(word >> (8 * j));
    }
    for (int64_t j = i; j < count; j++)
        to[j] = (from[j / 8] >> (j % 8)) & 1;
}
