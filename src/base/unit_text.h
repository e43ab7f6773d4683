/* Bytes and nanoseconds for people; each writes into out and returns it. size is enough from 32 on, or as said. */
#ifndef CRN_UNIT_TEXT_H
#define CRN_UNIT_TEXT_H

#include <stddef.h>
#include <stdint.h>

/** "1.50 GiB", "12.3 ms"; "-" below 0. */
const char *crn_format_bytes(int64_t bytes, char *out, size_t size);
const char *crn_format_ns(int64_t ns, char *out, size_t size);
/** As crn_format_bytes but rounded up: what is read again from it is no less. */
const char *crn_format_budget(int64_t bytes, char *out, size_t size);

enum { CRN_EXACT_BYTES_MAX = 64 };

/** "1.08 GiB (1153066592 bytes)", rounded up; "512 bytes" where no unit is needed. size is enough from CRN_EXACT_BYTES_MAX on. */
const char *crn_format_bytes_exactly(int64_t bytes, char *out, size_t size);

#endif
