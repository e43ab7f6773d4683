/*
 * Timelines in Chrome's trace-event format: an object with a list of events, times in microseconds. "M" names a lane,
 * "X" is something that lasts, "C" a value from then on. The simulator's observer makes them as it goes; they leave
 * through the sink in pieces, so that the timeline of a million operations does not stand in memory.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/failure.h"
#include "base/memory.h"
#include "base/utf8.h"
#include "report/report_text.h"

enum { PIECE_BYTES = 1 << 16 };

typedef struct tracer {
    const cairn_problem *problem;
    crn_textbuf out;
    cairn_sink sink;
    int64_t device_bytes, host_bytes; /* as last written */
    bool *computed;                   /* per stage (from 1) or node: it was computed before */
    cairn_status status;
    cairn_error *error;
} tracer;

static void flush(tracer *t, size_t at_least)
{
    if (t->status == CAIRN_OK && (t->out.failed || t->out.length >= at_least))
        t->status = crn_report_flush(&t->out, &t->sink, t->error);
}

static void put_time(crn_textbuf *out, const char *key, int64_t ns)
{
    crn_textbuf_print(out, ", \"%s\": %" PRId64 ".%03" PRId64, key, ns / 1000, ns % 1000);
}

static void put_metadata(crn_textbuf *out, const char *what, int lane, const char *name)
{
    crn_textbuf_print(out, "{\"ph\": \"M\", \"pid\": 1, \"tid\": %d, \"name\": \"%s\", \"args\": {\"name\": ", lane,
                      what);
    crn_textbuf_json(out, name);
    crn_textbuf_print(out, "}},\n");
}

static bool is_forward(cairn_op op)
{
    return op.code == CAIRN_OP_FORWARD_SAVE || op.code == CAIRN_OP_FORWARD_KEEP || op.code == CAIRN_OP_FORWARD_DROP ||
           op.code == CAIRN_OP_COMPUTE;
}

/* "forward h.3", "recompute h.3", "backward h.3", "offload h.3". */
static void event_name(const tracer *t, cairn_op op, bool again, char *out, size_t size)
{
    char name[CRN_NAME_MAX];
    const char *verb = cairn_op_name((cairn_op_code)op.code);
    if (is_forward(op))
        verb = again ? "recompute" : op.code == CAIRN_OP_COMPUTE ? "compute" : "forward";
    snprintf(out, size, "%s %s", verb, crn_report_name(t->problem, op.index, name));
}

static void on_op(void *context, int64_t position, cairn_op op, cairn_lane lane, int64_t start_ns, int64_t end_ns)
{
    tracer *t = context;
    char name[CRN_NAME_MAX + 16];
    bool again = is_forward(op) && t->computed[op.index];
    if (is_forward(op))
        t->computed[op.index] = true;
    event_name(t, op, again, name, sizeof(name));
    crn_textbuf_print(&t->out, "{\"ph\": \"X\", \"pid\": 1, \"tid\": %d", (int)lane + 1);
    put_time(&t->out, "ts", start_ns);
    put_time(&t->out, "dur", end_ns - start_ns);
    crn_textbuf_print(&t->out, ", \"name\": ");
    crn_textbuf_json(&t->out, name);
    crn_textbuf_print(&t->out, ", \"cat\": \"%s\"",
                      lane != CAIRN_LANE_COMPUTE ? "transfer"
                      : again                    ? "recompute"
                                                 : "compute");
    crn_textbuf_print(&t->out, ", \"args\": {\"position\": %" PRId64 ", \"op\": \"%s\", \"index\": %" PRId32, position,
                      cairn_op_name((cairn_op_code)op.code), op.index);
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        crn_textbuf_print(&t->out, ", \"option\": %d", op.option);
    crn_textbuf_print(&t->out, "}},\n");
    flush(t, PIECE_BYTES);
}

static void put_counter(crn_textbuf *out, const char *name, int64_t time_ns, int64_t bytes)
{
    crn_textbuf_print(out, "{\"ph\": \"C\", \"pid\": 1, \"name\": \"%s\"", name);
    put_time(out, "ts", time_ns);
    crn_textbuf_print(out, ", \"args\": {\"bytes\": %" PRId64 "}},\n", bytes);
}

static void on_memory(void *context, int64_t time_ns, int64_t device_bytes, int64_t host_bytes)
{
    tracer *t = context;
    if (device_bytes != t->device_bytes)
        put_counter(&t->out, "device memory", time_ns, device_bytes);
    if (host_bytes != t->host_bytes)
        put_counter(&t->out, "host memory", time_ns, host_bytes);
    t->device_bytes = device_bytes;
    t->host_bytes = host_bytes;
    flush(t, PIECE_BYTES);
}

static void begin(tracer *t)
{
    char name[CRN_NAME_MAX];
    crn_printable(cairn_problem_info_of(t->problem)->name, name, sizeof(name));
    crn_textbuf_print(&t->out, "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n");
    put_metadata(&t->out, "process_name", 0, *name ? name : "cairn");
    put_metadata(&t->out, "thread_name", CAIRN_LANE_COMPUTE + 1, "compute");
    put_metadata(&t->out, "thread_name", CAIRN_LANE_TO_HOST + 1, "to host");
    put_metadata(&t->out, "thread_name", CAIRN_LANE_TO_DEVICE + 1, "to device");
}

/* Every event ends in a comma; the last one is this. */
static void end(tracer *t, const cairn_replay *replay)
{
    crn_textbuf_print(&t->out, "{\"ph\": \"i\", \"pid\": 1, \"tid\": %d, \"s\": \"p\", \"name\": \"end\"",
                      CAIRN_LANE_COMPUTE + 1);
    put_time(&t->out, "ts", replay->makespan_ns);
    crn_textbuf_print(&t->out, ", \"args\": {\"peak_bytes\": %" PRId64 ", \"host_peak_bytes\": %" PRId64 "}}\n]}\n",
                      replay->peak_bytes, replay->host_peak_bytes);
    flush(t, 1);
}

static cairn_status run(const cairn_env *env, tracer *t, const cairn_schedule *schedule, int64_t budget_bytes)
{
    const cairn_observer observer = {t, on_op, on_memory};
    cairn_replay replay;
    begin(t);
    CRN_TRY(cairn_simulate(env, t->problem, schedule, budget_bytes, &observer, &replay, t->error));
    CRN_TRY(t->status);
    if (!replay.valid)
        return crn_fail_at(t->error, CAIRN_BAD_INPUT, replay.violation.op, NULL, "the schedule is not valid: %s",
                           replay.violation.message);
    end(t, &replay);
    return t->status;
}

cairn_status cairn_report_trace(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                                int64_t budget_bytes, cairn_sink sink, cairn_error *error)
{
    tracer t = {.problem = problem,
                .sink = sink,
                .device_bytes = CAIRN_NONE,
                .host_bytes = CAIRN_NONE,
                .status = CAIRN_OK,
                .error = error};
    cairn_allocator allocator = crn_allocator(env);
    size_t count = (size_t)crn_report_size(problem) + 1;
    t.computed = crn_alloc_zero(&allocator, count, sizeof(*t.computed));
    if (!t.computed)
        return crn_no_memory(error);
    crn_textbuf_init(&t.out, allocator);
    cairn_status status = run(env, &t, schedule, budget_bytes);
    crn_textbuf_free(&t.out);
    crn_free(&allocator, t.computed, count, sizeof(*t.computed));
    return status;
}
