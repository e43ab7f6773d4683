/* Where in a file a value stands: "stages[3].options[0].saved_bytes", and the position in the text that belongs to it. */
#ifndef CRN_JSON_PATH_H
#define CRN_JSON_PATH_H

#include <cairn/base.h>

#include "base/failure.h"

/** One step of a path, as a list from the inside out that lives on the stack of the readers. */
typedef struct crn_path {
    const struct crn_path *parent; /* NULL = the whole file */
    const char *field;             /* NULL = an element of an array: index */
    int64_t index;
} crn_path;

/** A failure at a path; error->index becomes that of the stage, node or operation in it. */
cairn_status crn_path_fail(cairn_error *error, cairn_status status, const crn_path *path, const char *format, ...)
    CRN_PRINTF(4, 5);

/**
 * Fills in the position of an error that has none, by its path (none: the object that is the file), walking
 * the text again: refusals are rare, so
 * readers keep no positions. Where the path names something that is not there, the position is that of the innermost
 * thing that is. A stage may hold its only option's fields itself: then "options[0]" is taken out of the path.
 */
void crn_error_locate(cairn_error *error, const char *text, size_t length);

#endif
