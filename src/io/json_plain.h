/*
 * Elements of the long arrays in their plain form, read without a tree.
 *
 * A stage, node or operation as a program writes it is a flat run of known keys, integers, texts without escapes,
 * booleans and short lists. Such a run goes from the text into the structure in one pass, an order of magnitude
 * faster than by way of jansson's tree. What is anything else - an escape, an exponent, an unknown or doubled key, a
 * value out of range, a slip - is "odd": nothing of it is kept, and jansson reads the same element from its beginning.
 * So there is one place that judges and words errors, and this one only has to be right about what it takes.
 */
#ifndef CRN_JSON_PLAIN_H
#define CRN_JSON_PLAIN_H

#include "io/json_fields.h"

typedef enum crn_plain_result { CRN_PLAIN_TAKEN, CRN_PLAIN_ODD, CRN_PLAIN_NO_MEMORY } crn_plain_result;

/** A text being read; after ODD the place means nothing. */
typedef struct crn_plain {
    const char *at, *end;
} crn_plain;

/** Skips white space and takes this byte. */
bool crn_plain_take(crn_plain *in, char byte);
/**
 * Steps to the next element of a list or member of an object that close ends. *first is true before the first step;
 * *more is false when close was taken. False: odd.
 */
bool crn_plain_step(crn_plain *in, char close, bool *first, bool *more);
/** An integer of up to 18 digits. */
bool crn_plain_integer(crn_plain *in, int64_t *value);
/** A text without escapes: where it stands. */
bool crn_plain_text(crn_plain *in, const char **begin, size_t *length);
/** How many elements a list of integers has; the place stays before its first. */
size_t crn_plain_count(crn_plain in);

/** Reads the value of a CRN_FIELD_LIST into the structure. */
typedef crn_plain_result (*crn_plain_list)(void *context, crn_plain *in);
/** Reads an object by a table, as crn_fields_read does; required fields are checked too. */
crn_plain_result crn_plain_fields(crn_plain *in, const crn_field *fields, size_t count, crn_target *target,
                                  crn_plain_list list, void *context);

#endif
