/* What the writers of the three formats share. They print into a textbuf and look for failure once, at the end. */
#ifndef CRN_WRITE_PARTS_H
#define CRN_WRITE_PARTS_H

#include <cairn/problem.h>

#include "base/textbuf.h"

void crn_put(crn_textbuf *out, const char *text);
/** ", "key": value". */
void crn_put_int(crn_textbuf *out, const char *key, int64_t value);
/** The same for a size, time or index that may not apply: CAIRN_NONE becomes null. */
void crn_put_optional(crn_textbuf *out, const char *key, int64_t value);
/** ""machine": {...}", or null. */
void crn_put_machine(crn_textbuf *out, const cairn_machine *machine);

/**
 * Texts given to constructors were not looked at: what would not be JSON is refused before it is written. what: as in
 * "the name of a stage"; index: the stage or node.
 */
cairn_status crn_check_text(const char *text, const char *what, int64_t index, cairn_error *error);
/** Hands the finished text over, or says that memory failed on the way. */
cairn_status crn_take_text(crn_textbuf *out, char **text, size_t *length, cairn_error *error);

#endif
