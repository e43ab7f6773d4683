/* Filling in a cairn_error, which may be NULL. Every function returns the status it was given, for "return crn_fail(...)". */
#ifndef CRN_FAILURE_H
#define CRN_FAILURE_H

#include <cairn/base.h>

#if defined(__GNUC__)
#define CRN_PRINTF(position, first) __attribute__((__format__(__printf__, position, first)))
#else
#define CRN_PRINTF(position, first)
#endif

/** A failure without a position. */
cairn_status crn_fail(cairn_error *error, cairn_status status, const char *format, ...) CRN_PRINTF(3, 4);
/** A failure at a stage, node or operation, in the field that path names (NULL = none). */
cairn_status crn_fail_at(cairn_error *error, cairn_status status, int64_t index, const char *path, const char *format,
                         ...) CRN_PRINTF(5, 6);
/** "out of memory". */
cairn_status crn_no_memory(cairn_error *error);
/** Resets an error to "no failure, no position". */
void crn_error_reset(cairn_error *error);

/** Returns from the enclosing function when an expression is not CAIRN_OK. */
#define CRN_TRY(expression)                         \
    do {                                            \
        cairn_status crn_try_status = (expression); \
        if (crn_try_status != CAIRN_OK)             \
            return crn_try_status;                  \
    } while (0)

#endif
