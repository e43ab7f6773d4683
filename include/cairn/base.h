/*
 * Cairn: base types shared by every part of the library.
 *
 * Status and located errors, the allocator, the environment of a call.
 *
 * Conventions of the whole library:
 *   - Sizes are int64_t bytes, times int64_t nanoseconds; names end in the unit.
 *   - A function that can fail returns a cairn_status and takes a cairn_error * last, which may be NULL.
 *   - Other pointers must not be NULL unless the function says so; NULL with a count of 0 is an empty list.
 *   - Constructors are all-or-nothing: on failure their outputs are NULL.
 *   - A NULL environment means the defaults: malloc, no polling, no log.
 *   - The library prints nothing, never exits, and has no global state: calls on different problems may run on
 *     different threads at once, and immutable objects (problems, schedules) may be shared between threads.
 */
#ifndef CAIRN_BASE_H
#define CAIRN_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(CAIRN_STATIC)
#define CAIRN_API
#elif defined(__GNUC__)
#define CAIRN_API __attribute__((visibility("default")))
#else
#define CAIRN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define CAIRN_VERSION_MAJOR 0
#define CAIRN_VERSION_MINOR 1
#define CAIRN_VERSION_PATCH 0
#define CAIRN_VERSION_TEXT "0.1.0"

/** A size or time that does not apply, or "no budget". */
#define CAIRN_NONE (INT64_C(-1))

/** Stated limits, checked before anything is allocated. */
#define CAIRN_STAGES_MAX (INT64_C(1) << 24)
#define CAIRN_NODES_MAX (INT64_C(1) << 24)
#define CAIRN_OPS_MAX (INT64_C(1) << 24)
#define CAIRN_EDGES_MAX (INT64_C(1) << 26)
#define CAIRN_STAGE_OPTIONS_MAX 64
#define CAIRN_FILE_BYTES_MAX (INT64_C(1) << 30)

/*
 * Did the call work? What was found (optimal, infeasible, ...) is a cairn_outcome, in solve.h.
 * X(constant, name, what it means)
 */
#define CAIRN_STATUS_MAP(X)                                                              \
    X(OK, "ok", "the call did what it was asked")                                        \
    X(NO_MEMORY, "no_memory", "an allocation failed")                                    \
    X(BAD_ARGUMENT, "bad_argument", "an argument breaks the function's contract")        \
    X(BAD_INPUT, "bad_input", "a problem, schedule or option value is not valid")        \
    X(PARSE, "parse", "text is not well-formed")                                         \
    X(OVERFLOW, "overflow", "a sum of sizes or times could pass 2^63 - 1")               \
    X(TOO_LARGE, "too_large", "a stated limit is exceeded")                              \
    X(MISMATCH, "mismatch", "a schedule does not belong to this problem")                \
    X(UNSUPPORTED, "unsupported", "the solver cannot handle this problem")               \
    X(UNAVAILABLE, "unavailable", "a part that was not built in or not found")           \
    X(MEMORY_LIMIT, "memory_limit", "the solver would need more memory than it may use") \
    X(CANCELLED, "cancelled", "the environment's poll callback asked to stop")           \
    X(IO, "io", "a file could not be read or written")                                   \
    X(CALLBACK, "callback", "a callback of the caller reported failure")                 \
    X(INTERNAL, "internal", "a defect in Cairn; please report it")

#define CAIRN_X(constant, name, text) CAIRN_##constant,
typedef enum cairn_status { CAIRN_STATUS_MAP(CAIRN_X) CAIRN_STATUS_COUNT } cairn_status;
#undef CAIRN_X

/** Short name of a status ("bad_input"); "unknown" for a value that is none. Static storage. */
CAIRN_API const char *cairn_status_name(cairn_status status);
/** One sentence on a status. Static storage. */
CAIRN_API const char *cairn_status_text(cairn_status status);
/** Version of the library that is running, "major.minor.patch". Static storage. */
CAIRN_API const char *cairn_version(void);

/**
 * How many slips of typing make `word` of `other`: letters too many, missing, wrong or swapped, capitals aside; 0 also
 * where `word`, of three letters at least, is how `other` begins. -1 where it takes more of them than are likely in a word
 * of that length. For messages that say what was probably meant.
 */
CAIRN_API int32_t cairn_slips(const char *word, const char *other);

/**
 * Packs into bits which of `count` numbers are not zero: eight to a byte, the first in the lowest bit, what is left of the
 * last byte zero. A number has `width` bytes: 1 (a truth value), or 2, 4 or 8, of which the highest bit is a sign, so that
 * a floating-point minus zero is zero. `bits` has room for (count + 7) / 8 bytes and does not overlap `numbers`.
 */
CAIRN_API void cairn_bits_pack(const void *numbers, int32_t width, int64_t count, void *bits);
/** The reverse: of the two numbers of `pair`, the first where a bit is 0, the second where it is 1. */
CAIRN_API void cairn_bits_unpack(const void *bits, int64_t count, const void *pair, int32_t width, void *numbers);

/**
 * Whether each of `count` places in memory holds the word at its index. Places are read in their order, none behind the
 * first that differs, so a place may lie in what an earlier one shows to be still there.
 */
CAIRN_API bool cairn_words_hold(const uint64_t *const *places, const uint64_t *words, int64_t count);

#define CAIRN_ERROR_MESSAGE_MAX 400
#define CAIRN_ERROR_PATH_MAX 160

/**
 * Where and why a call failed. Plain data, owned by the caller; overwritten by every failing call.
 * Positions that do not apply are CAIRN_NONE, texts that do not apply are empty.
 */
typedef struct cairn_error {
    cairn_status status;
    int64_t line;                    /**< 1-based line in the text that was read */
    int64_t column;                  /**< 1-based column, in bytes */
    int64_t offset;                  /**< 0-based byte offset */
    int64_t index;                   /**< stage (1-based), node or operation (0-based) that is at fault */
    char path[CAIRN_ERROR_PATH_MAX]; /**< JSON path of the field at fault, e.g. "stages[3].options[0].saved_bytes" */
    char message[CAIRN_ERROR_MESSAGE_MAX];
} cairn_error;

/**
 * Memory as a value: one function that allocates, grows, shrinks and frees.
 * resize(context, NULL, 0, n) allocates, resize(context, p, n, 0) frees and returns NULL; NULL on failure, and then
 * the old block is untouched. Blocks are aligned for any type. Must be thread-safe when a call uses several threads.
 */
typedef struct cairn_allocator {
    void *context;
    void *(*resize)(void *context, void *block, size_t old_size, size_t new_size);
} cairn_allocator;

/** What a long call reports while it runs. Values that are not known are CAIRN_NONE. */
typedef struct cairn_progress {
    const char *phase;      /**< what is being done, static text */
    int64_t done, total;    /**< work units of the phase */
    int64_t best_ns;        /**< makespan of the best answer so far */
    int64_t lower_bound_ns; /**< proven bound so far */
} cairn_progress;

/**
 * The environment of a call. All members are optional: a zero-initialised env is the default one.
 * poll is called now and then, by one thread at a time, from the thread that made the call; a non-zero return asks the
 * call to stop, and it then returns its best answer so far, or CAIRN_CANCELLED where there is none. A poll that costs
 * much (it takes a lock, or draws) sets poll_interval_ns: at least that long passes between two.
 * log receives one "key=value ..." line per message, without a newline.
 */
typedef struct cairn_env {
    cairn_allocator allocator;
    int (*poll)(void *context, const cairn_progress *progress);
    void *poll_context;
    int64_t poll_interval_ns; /**< 0: poll as often as the call likes */
    void (*log)(void *context, const char *line);
    void *log_context;
} cairn_env;

#ifdef __cplusplus
}
#endif

#endif
