/* What the three formats have in common: an object with format, version and a machine, and one long array. */
#ifndef CRN_JSON_FILE_H
#define CRN_JSON_FILE_H

#include <cairn/problem.h>

#include "io/json_cursor.h"
#include "io/json_fields.h"

/** A file being read: what its fields are, and who takes them. */
typedef struct crn_file {
    crn_cursor cursor;
    const crn_field *fields;
    size_t field_count;
    crn_target target;
    void *context; /* of the callbacks */
    /** Reads the value of a CRN_FIELD_STREAM row from the cursor. */
    cairn_status (*stream)(void *context, size_t row);
    /** Looks at a row that was just read; so a file of another format is refused before its fields are. */
    cairn_status (*look)(void *context, size_t row);
} crn_file;

/** Reads the whole text: one object, each member once, nothing after it. */
cairn_status crn_file_read(crn_file *file, const char *text, size_t length, cairn_error *error);
/**
 * Reads the elements of an array one by one. element takes the parsed value, which is freed after it, and its index;
 * path: of the element.
 */
cairn_status crn_file_elements(crn_file *file, const char *array,
                               cairn_status (*element)(void *context, json_t *value, int64_t index,
                                                       const crn_path *path, cairn_error *error));
/** Reads a machine, or null: then *present is false. */
cairn_status crn_file_machine(crn_file *file, cairn_machine *machine, bool *present);
/** Refuses a version other than 1. */
cairn_status crn_file_version(const crn_file *file, int64_t version);

#endif
