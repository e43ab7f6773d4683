/* SHA-256 (FIPS 180-4), fed piece by piece. */
#ifndef CRN_SHA256_H
#define CRN_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct crn_sha256 {
    uint32_t state[8];
    uint64_t length; /* bytes so far */
    uint8_t block[64];
} crn_sha256;

/** "sha256:", 64 hexadecimal digits, and the terminating zero. */
#define CRN_HASH_TEXT_MAX (7 + 64 + 1)

void crn_sha256_init(crn_sha256 *hash);
void crn_sha256_add(crn_sha256 *hash, const void *data, size_t length);
/** Ends the hash and writes "sha256:..." with the terminating zero. */
void crn_sha256_text(crn_sha256 *hash, char text[CRN_HASH_TEXT_MAX]);

#endif
