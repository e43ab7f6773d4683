/*
 * Reports: what a person or another program wants to see of an answer. Text goes to a caller's sink.
 */
#ifndef CAIRN_REPORT_H
#define CAIRN_REPORT_H

#include <cairn/solve.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Receives text piece by piece; a non-zero return stops the report with CAIRN_CALLBACK. */
typedef struct cairn_sink {
    void *context;
    int (*write)(void *context, const char *text, size_t length);
} cairn_sink;

/**
 * A timeline in Chrome's trace-event JSON (opens in Perfetto): one lane for computations and one for each direction of
 * the link, and the curves of device and host memory. budget_bytes: as cairn_simulate.
 * Errors: as cairn_simulate, BAD_INPUT when the schedule is not valid (error->index: the operation; the sink may have
 * received a part), CALLBACK.
 */
CAIRN_API cairn_status cairn_report_trace(const cairn_env *env, const cairn_problem *problem,
                                          const cairn_schedule *schedule, int64_t budget_bytes, cairn_sink sink,
                                          cairn_error *error);

/**
 * A table for people: budget, peak, time, overhead against store-all, what is recomputed, least feasible memory.
 * schedule may be NULL, where nothing was found. Errors: CALLBACK, NO_MEMORY.
 */
CAIRN_API cairn_status cairn_report_answer(const cairn_env *env, const cairn_problem *problem,
                                           const cairn_schedule *schedule, const cairn_info *info, cairn_sink sink,
                                           cairn_error *error);

/** A table for people with one line per answer; overheads are against store-all. Errors: CALLBACK, NO_MEMORY. */
CAIRN_API cairn_status cairn_report_comparison(const cairn_env *env, const cairn_info *infos, int count,
                                               cairn_sink sink, cairn_error *error);
/** The same as comma-separated values: a header, then integers; what does not apply is empty. */
CAIRN_API cairn_status cairn_report_csv(const cairn_env *env, const cairn_info *infos, int count, cairn_sink sink,
                                        cairn_error *error);

/** Writes "1.50 GiB", "12.3 ms" ("-" for CAIRN_NONE) into out; returns out. size is enough from 32 on. */
CAIRN_API const char *cairn_format_bytes(int64_t bytes, char *out, size_t size);
CAIRN_API const char *cairn_format_ns(int64_t ns, char *out, size_t size);
/** A budget that is enough, as cairn_format_bytes but rounded up: what is read again from it is enough, too. */
CAIRN_API const char *cairn_format_budget(int64_t bytes, char *out, size_t size);

#ifdef __cplusplus
}
#endif

#endif
