/*
 * Numbers of which only matters whether they are zero, as bits.
 *
 * Packing makes a byte of eight numbers. Unpacking takes half a byte at a time, which picks one of sixteen rows of four
 * numbers; they are written as they stand. Cost: one pass over the numbers, a few instructions for four of them.
 */
#include <cairn/base.h>

#include <string.h>

enum { WIDTH_MAX = 8, ROWS = 16, ROW_NUMBERS = 4 };

/* ---- packing ---- */

/* Of numbers of two bytes and more, the highest bit is a sign, which is shifted out. */
#define PACK(name, number, sign_bits)                                               \
    static unsigned char name##_eight(const number *eight)                          \
    {                                                                               \
        unsigned byte = 0;                                                          \
        for (int j = 0; j < 8; j++)                                                 \
            byte |= (unsigned)((number)(eight[j] << (sign_bits)) != 0) << j;        \
        return (unsigned char)byte;                                                 \
    }                                                                               \
    static void name(const unsigned char *from, int64_t count, unsigned char *bits) \
    {                                                                               \
        number eight[8];                                                            \
        for (; count >= 8; count -= 8, from += sizeof(eight)) {                     \
            memcpy(eight, from, sizeof(eight));                                     \
            *bits++ = name##_eight(eight);                                          \
        }                                                                           \
        if (count > 0) {                                                            \
            memset(eight, 0, sizeof(eight));                                        \
            memcpy(eight, from, (size_t)count * sizeof(number));                    \
            *bits = name##_eight(eight);                                            \
        }                                                                           \
    }

PACK(pack_1, uint8_t, 0)
PACK(pack_2, uint16_t, 1)
PACK(pack_4, uint32_t, 1)
PACK(pack_8, uint64_t, 1)

void cairn_bits_pack(const void *numbers, int32_t width, int64_t count, void *bits)
{
    switch (width) {
    case 1:
        pack_1(numbers, count, bits);
        break;
    case 2:
        pack_2(numbers, count, bits);
        break;
    case 4:
        pack_4(numbers, count, bits);
        break;
    default:
        pack_8(numbers, count, bits);
    }
}

/* ---- unpacking ---- */

typedef unsigned char row[ROW_NUMBERS * WIDTH_MAX];

/* Row r has pair[1] where a bit of r is set. */
static void fill_rows(const unsigned char *pair, size_t width, row *rows)
{
    for (unsigned r = 0; r < ROWS; r++)
        for (unsigned j = 0; j < ROW_NUMBERS; j++)
            memcpy(rows[r] + j * width, pair + ((r >> j) & 1) * width, width);
}

/* Inline, so that the width is a constant where rows are written. */
static inline void unpack(const unsigned char *bits, int64_t count, const row *rows, size_t width, unsigned char *to)
{
    for (; count >= 8; count -= 8, bits++, to += 8 * width) {
        memcpy(to, rows[*bits % ROWS], ROW_NUMBERS * width);
        memcpy(to + ROW_NUMBERS * width, rows[*bits / ROWS], ROW_NUMBERS * width);
    }
    for (int64_t j = 0; j < count; j++, to += width)
        memcpy(to, rows[(*bits >> j) & 1], width);
}

void cairn_bits_unpack(const void *bits, int64_t count, const void *pair, int32_t width, void *numbers)
{
    row rows[ROWS];
    fill_rows(pair, (size_t)width, rows);
    switch (width) {
    case 1:
        unpack(bits, count, (const row *)rows, 1, numbers);
        break;
    case 2:
        unpack(bits, count, (const row *)rows, 2, numbers);
        break;
    case 4:
        unpack(bits, count, (const row *)rows, 4, numbers);
        break;
    default:
        unpack(bits, count, (const row *)rows, 8, numbers);
    }
}
