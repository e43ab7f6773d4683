#include "base/sha256.h"

#include <stdio.h>
#include <string.h>

const uint32_t crn_sha256_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void expand(const uint8_t block[64], uint32_t w[64])
{
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
}

/* One round. The eight words change places from round to round; they stay where they are, and their names move. */
static inline void take_round(uint32_t a, uint32_t b, uint32_t c, uint32_t *d, uint32_t e, uint32_t f, uint32_t g,
                              uint32_t *h, uint32_t word)
{
    uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25), choice = (e & f) ^ (~e & g);
    uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22), majority = (a & b) ^ (a & c) ^ (b & c);
    uint32_t t1 = *h + s1 + choice + word;
    *d += t1;
    *h = t1 + s0 + majority;
}

static void compress(uint32_t state[8], const uint8_t block[64])
{
    uint32_t w[64];
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6],
             h = state[7];
    expand(block, w);
    for (int i = 0; i < 64; i++)
        w[i] += crn_sha256_constants[i];
    for (int i = 0; i < 64; i += 8) {
        take_round(a, b, c, &d, e, f, g, &h, w[i]);
        take_round(h, a, b, &c, d, e, f, &g, w[i + 1]);
        take_round(g, h, a, &b, c, d, e, &f, w[i + 2]);
        take_round(f, g, h, &a, b, c, d, &e, w[i + 3]);
        take_round(e, f, g, &h, a, b, c, &d, w[i + 4]);
        take_round(d, e, f, &g, h, a, b, &c, w[i + 5]);
        take_round(c, d, e, &f, g, h, a, &b, w[i + 6]);
        take_round(b, c, d, &e, f, g, h, &a, w[i + 7]);
    }
    const uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++)
        state[i] += added[i];
}

void crn_sha256_portable(uint32_t state[8], const uint8_t *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        compress(state, data + 64 * i);
}

void crn_sha256_init(crn_sha256 *hash)
{
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    crn_sha256_blocks *native = crn_sha256_native();
    hash->blocks = native ? native : crn_sha256_portable;
    memcpy(hash->state, initial, sizeof(initial));
    hash->length = 0;
}

void crn_sha256_add(crn_sha256 *hash, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    while (length > 0) {
        size_t filled = hash->length % CRN_SHA256_BUFFER, room = CRN_SHA256_BUFFER - filled;
        size_t taken = length < room ? length : room;
        memcpy(hash->buffer + filled, bytes, taken);
        hash->length += taken;
        if (taken == room)
            hash->blocks(hash->state, hash->buffer, CRN_SHA256_BUFFER / 64);
        bytes += taken;
        length -= taken;
    }
}

void crn_sha256_text(crn_sha256 *hash, char text[CRN_HASH_TEXT_MAX])
{
    uint64_t bits = hash->length * 8;
    uint8_t length[8], one = 0x80, zero = 0;
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    crn_sha256_add(hash, &one, 1);
    while (hash->length % 64 != 56)
        crn_sha256_add(hash, &zero, 1);
    crn_sha256_add(hash, length, 8);
    hash->blocks(hash->state, hash->buffer, (size_t)(hash->length % CRN_SHA256_BUFFER / 64));
    memcpy(text, "sha256:", 7);
    for (int i = 0; i < 8; i++)
        snprintf(text + 7 + 8 * i, 9, "%08x", (unsigned)hash->state[i]);
}
