/*
 * Files: problems and schedules as versioned JSON (docs/reference/formats/). Absent from a library built with
 * CAIRN_IO=OFF.
 */
#ifndef CAIRN_IO_H
#define CAIRN_IO_H

#include <cairn/schedule.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Reads a cairn-chain or cairn-graph from text of length bytes (no terminator needed).
 * Errors: PARSE (line, column, offset), BAD_INPUT (path, and line and column where known), OVERFLOW, TOO_LARGE, NO_MEMORY.
 */
CAIRN_API cairn_status cairn_problem_read(const cairn_env *env, const char *text, size_t length,
                                          cairn_problem **problem, cairn_error *error);
/** Reads a cairn-schedule for a problem. Errors: as above, and MISMATCH when it names another problem's hash. */
CAIRN_API cairn_status cairn_schedule_read(const cairn_env *env, const cairn_problem *problem, const char *text,
                                           size_t length, cairn_schedule **schedule, cairn_error *error);
/**
 * Writes JSON text, ending in a newline, into a new zero-terminated block of *length + 1 bytes from the env's
 * allocator; free it with cairn_text_free. The same object gives the same bytes. Errors: BAD_INPUT (a name that is not
 * UTF-8, provenance that is no JSON object: constructors take both as they are), NO_MEMORY.
 */
CAIRN_API cairn_status cairn_problem_write(const cairn_env *env, const cairn_problem *problem, char **text,
                                           size_t *length, cairn_error *error);
CAIRN_API cairn_status cairn_schedule_write(const cairn_env *env, const cairn_schedule *schedule, char **text,
                                            size_t *length, cairn_error *error);
CAIRN_API void cairn_text_free(const cairn_env *env, char *text, size_t length);

/** Reads a whole file ("-": standard input) of at most CAIRN_FILE_BYTES_MAX. Errors: IO, TOO_LARGE, NO_MEMORY. */
CAIRN_API cairn_status cairn_file_read(const cairn_env *env, const char *path, char **text, size_t *length,
                                       cairn_error *error);
/** Writes a whole file through a temporary file in the same folder and a rename. Errors: IO (also a read-only file). */
CAIRN_API cairn_status cairn_file_write(const char *path, const char *text, size_t length, cairn_error *error);

#ifdef __cplusplus
}
#endif

#endif
