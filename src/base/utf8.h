/* Texts that come from files and go into messages and tables: whether they are UTF-8, and copies fit for a terminal. */
#ifndef CRN_UTF8_H
#define CRN_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/** Length of the UTF-8 sequence that begins here, of `left` bytes at most; 0 when there is none. */
size_t crn_utf8_sequence(const char *text, size_t left);
/** Whether a text is UTF-8. */
bool crn_is_utf8(const char *text);
/**
 * A copy of text without control characters (which could command a terminal) and broken UTF-8: each byte of those
 * becomes '?'. What does not fit ends in "...". size: of out, at least 8. Returns out.
 */
const char *crn_printable(const char *text, char *out, size_t size);

#endif
