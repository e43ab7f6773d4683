/*
 * From the members of a JSON object to the fields of a structure, by a table: one row per field, with its type, where
 * it goes and whether it must be there. What the table does not name is refused.
 */
#ifndef CRN_JSON_FIELDS_H
#define CRN_JSON_FIELDS_H

#include <cairn/base.h>
#include <jansson.h>

#include "base/memory.h"
#include "io/json_path.h"

typedef enum crn_field_type {
    CRN_FIELD_COUNT,  /* int64_t, at least 0 */
    CRN_FIELD_SIGNED, /* int64_t */
    CRN_FIELD_BOOL,   /* bool */
    CRN_FIELD_TEXT,   /* const char *, a copy in the arena */
    CRN_FIELD_LIST,   /* json_t *, borrowed from the object */
    CRN_FIELD_STREAM  /* read by its owner, from the cursor */
} crn_field_type;

enum { CRN_REQUIRED = 1, CRN_NULLABLE = 2 };

typedef struct crn_field {
    const char *name;
    crn_field_type type;
    int rules;     /* CRN_REQUIRED, CRN_NULLABLE (null = absent) */
    size_t offset; /* in the structure */
} crn_field;

/** Where fields go: the structure, with defaults filled in, an arena for texts, and which rows were there. */
typedef struct crn_target {
    void *structure;
    crn_arena *arena;
    uint64_t seen; /* bit i: row i had a value */
} crn_target;

/** Reads all members of an object. path: of the object. */
cairn_status crn_fields_read(json_t *object, const crn_field *fields, size_t count, crn_target *target,
                             const crn_path *path, cairn_error *error);
/** Reads one value into the field of row i. path: of the value. */
cairn_status crn_field_read(const json_t *value, const crn_field *fields, size_t i, crn_target *target,
                            const crn_path *path, cairn_error *error);
/** Refuses when a required field was not there. path: of the object. */
cairn_status crn_fields_check(const crn_field *fields, size_t count, uint64_t seen, const crn_path *path,
                              cairn_error *error);
/** Refuses a member that no row names, and says which was probably meant. path: of the member. */
cairn_status crn_field_unknown(const crn_field *fields, size_t count, const crn_path *path, cairn_error *error);
/** The row of a name; count when there is none. */
size_t crn_field_find(const crn_field *fields, size_t count, const char *name);

/** An integer; path: of the value. The message says what was found instead. */
cairn_status crn_integer_read(const json_t *value, int64_t *integer, const crn_path *path, cairn_error *error);
/** An int32_t that is an index, at least 0. */
cairn_status crn_index_read(const json_t *value, int32_t *index, const crn_path *path, cairn_error *error);
/** Refuses a value as being of the wrong type. */
cairn_status crn_type_fail(const json_t *value, const char *wanted, const crn_path *path, cairn_error *error);

#endif
