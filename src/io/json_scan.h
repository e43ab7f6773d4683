/*
 * Whether a text is JSON (RFC 8259), without making anything of it: for what is kept as it is, byte for byte.
 *
 * Numbers of any size, escaped NULs, lone surrogates and duplicate keys are JSON. It takes no memory but a bit for each
 * level of nesting, whatever the size of the text.
 */
#ifndef CRN_JSON_SCAN_H
#define CRN_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>

enum { CRN_JSON_DEPTH_MAX = 2048 }; /* jansson has the same limit */

/** The fault of deeper nesting. */
extern const char crn_json_too_deep[];

typedef struct crn_scan {
    const char *text;
    size_t length;
    size_t offset;     /* where to begin; then the end of the value, or the fault */
    const char *fault; /* what is wrong there; NULL: nothing */
} crn_scan;

/** Goes past one value; white space may stand before it. False: scan->fault says why not. */
bool crn_json_scan(crn_scan *scan);

#endif
