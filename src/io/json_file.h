/* What the three formats have in common: an object with format, version and a machine, and one long array. */
#ifndef CRN_JSON_FILE_H
#define CRN_JSON_FILE_H

#include <cairn/problem.h>

#include "io/json_cursor.h"
#include "io/json_fields.h"
#include "io/json_plain.h"

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
    bool by_tree; /* read no element in its plain form: for tests that compare the two */
} crn_file;

/** How the elements of an array are read. */
typedef struct crn_element {
    /** One in its plain form, taken whole or left; index: its own. */
    crn_plain_result (*plain)(void *context, crn_plain *in, int64_t index);
    /** Any other: the parsed value, which is freed after it. path: of the element. */
    cairn_status (*parsed)(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error);
} crn_element;

/** Reads the whole text: one object, each member once, nothing after it. */
cairn_status crn_file_read(crn_file *file, const char *text, size_t length, cairn_error *error);
/** Reads the elements of an array one by one. */
cairn_status crn_file_elements(crn_file *file, const char *array, const crn_element *element);
/** Reads a machine, or null: then *present is false. */
cairn_status crn_file_machine(crn_file *file, cairn_machine *machine, bool *present);
/** Refuses a version other than 1. */
cairn_status crn_file_version(const crn_file *file, int64_t version);

#endif
