/*
 * Walking a JSON text from value to value.
 *
 * A file of ours is an object whose bulk is one long array: of stages, nodes or operations. The cursor steps through
 * those two outer levels itself, which takes no more than the punctuation, and has jansson parse every value that it
 * comes to. So a file of 2^24 operations never stands in memory as a tree, every number and string is judged by
 * jansson all the same, and every position in the text is known.
 *
 * jansson allocates with malloc. Its allocation functions can only be replaced for the whole process, which a library
 * must not do, so the values of one element (a stage, a node, an operation) do not come from the env's allocator. They
 * are freed before the next element is read; everything that stays is copied into memory of the env.
 */
#ifndef CRN_JSON_CURSOR_H
#define CRN_JSON_CURSOR_H

#include <cairn/base.h>
#include <jansson.h>

typedef struct crn_cursor {
    const char *text;
    size_t length, offset;
    cairn_error *error;
} crn_cursor;

void crn_cursor_init(crn_cursor *cursor, const char *text, size_t length, cairn_error *error);
/** Skips white space and gives the byte that follows; -1 at the end of the text. */
int crn_cursor_peek(crn_cursor *cursor);
/** Parses one value with jansson's decoding flags; free it with json_decref. */
cairn_status crn_cursor_value(crn_cursor *cursor, size_t flags, json_t **value);
/** Goes past one value that only has to be JSON (json_scan.h). */
cairn_status crn_cursor_skip(crn_cursor *cursor);
/** Takes the bracket that opens an object or array. what: as in "a file is an object". */
cairn_status crn_cursor_open(crn_cursor *cursor, char bracket, const char *what);
/**
 * Steps to the next member of an object or array that close ends; *more is false when that was it, and the bracket is
 * taken. *first is true before the first step.
 */
cairn_status crn_cursor_step(crn_cursor *cursor, char close, bool *first, bool *more);
/** The key of a member, and the colon; free it with json_decref. */
cairn_status crn_cursor_key(crn_cursor *cursor, json_t **key);
/** Nothing may follow but white space. */
cairn_status crn_cursor_end(crn_cursor *cursor);

/** Fills in offset, line and column of an error. */
void crn_error_place(cairn_error *error, const char *text, size_t offset);

#endif
