/* SHA-256 (FIPS 180-4), fed piece by piece. Where the processor has instructions for it, they do the work. */
#ifndef CRN_SHA256_H
#define CRN_SHA256_H

#include <stddef.h>
#include <stdint.h>

/** Takes so many blocks of 64 bytes into the state. */
typedef void crn_sha256_blocks(uint32_t state[8], const uint8_t *data, size_t count);

crn_sha256_blocks crn_sha256_portable;
/** NULL where the processor has no instructions for it. */
crn_sha256_blocks *crn_sha256_native(void);

extern const uint32_t crn_sha256_constants[64];

enum { CRN_SHA256_BUFFER = 64 * 64 }; /* many blocks at a time: what is hashed comes in small pieces */

typedef struct crn_sha256 {
    crn_sha256_blocks *blocks;
    uint32_t state[8];
    uint64_t length; /* bytes so far */
    uint8_t buffer[CRN_SHA256_BUFFER];
} crn_sha256;

/** "sha256:", 64 hexadecimal digits, and the terminating zero. */
#define CRN_HASH_TEXT_MAX (7 + 64 + 1)

void crn_sha256_init(crn_sha256 *hash);
void crn_sha256_add(crn_sha256 *hash, const void *data, size_t length);
/** Ends the hash and writes "sha256:..." with the terminating zero. */
void crn_sha256_text(crn_sha256 *hash, char text[CRN_HASH_TEXT_MAX]);

#endif
