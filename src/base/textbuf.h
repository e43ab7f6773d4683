/* A growing text, zero-terminated at all times. An append that fails is remembered: check once, at the end. */
#ifndef CRN_TEXTBUF_H
#define CRN_TEXTBUF_H

#include "base/failure.h"
#include "base/memory.h"

typedef struct crn_textbuf {
    cairn_allocator allocator;
    char *text; /* NULL until the first append */
    size_t length, capacity;
    bool failed;
} crn_textbuf;

void crn_textbuf_init(crn_textbuf *buffer, cairn_allocator allocator);
void crn_textbuf_add(crn_textbuf *buffer, const char *text, size_t length);
void crn_textbuf_print(crn_textbuf *buffer, const char *format, ...) CRN_PRINTF(2, 3);
void crn_textbuf_int(crn_textbuf *buffer, int64_t value);
/** Appends a JSON string, quotes and escapes included. */
void crn_textbuf_json(crn_textbuf *buffer, const char *text);
void crn_textbuf_free(crn_textbuf *buffer);
/** Hands the text over as a block of exactly *length + 1 bytes; NULL when an append failed. Empties the buffer. */
char *crn_textbuf_take(crn_textbuf *buffer, size_t *length);

#endif
