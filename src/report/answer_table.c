/* The table that a person sees of one answer. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/failure.h"
#include "base/memory.h"
#include "base/utf8.h"
#include "report/report_text.h"

enum { VALUE_MAX = 32, RANGES_SHOWN = 8 };

static void row(crn_textbuf *out, const char *label, const char *value, const char *note)
{
    crn_textbuf_print(out, note && *note ? "%-13s %-12s %s\n" : "%-13s %s\n", label, value, note);
}

static void bytes_row(crn_textbuf *out, const char *label, int64_t bytes, const char *note)
{
    char value[VALUE_MAX];
    if (bytes != CAIRN_NONE)
        row(out, label, cairn_format_bytes(bytes, value, sizeof(value)), note);
}

/* Of a budget that is enough. */
static void budget_row(crn_textbuf *out, const char *label, int64_t bytes, const char *note)
{
    char value[VALUE_MAX];
    if (bytes != CAIRN_NONE)
        row(out, label, cairn_format_budget(bytes, value, sizeof(value)), note);
}

static void ns_row(crn_textbuf *out, const char *label, int64_t ns, const char *note)
{
    char value[VALUE_MAX];
    if (ns != CAIRN_NONE)
        row(out, label, cairn_format_ns(ns, value, sizeof(value)), note);
}

/* ---- what is found ---- */

static void title(crn_textbuf *out, const cairn_problem *problem)
{
    char name[CRN_NAME_MAX];
    bool is_chain = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN;
    int size = crn_report_size(problem);
    crn_printable(cairn_problem_info_of(problem)->name, name, sizeof(name));
    crn_textbuf_print(out, "%s%s%s, %d %s%s\n", is_chain ? "chain" : "graph", *name ? " " : "", name, size,
                      is_chain ? "stage" : "node", size == 1 ? "" : "s");
}

static void outcome_row(crn_textbuf *out, const cairn_info *info)
{
    char note[128];
    snprintf(note, sizeof(note), "%s%s%s%s", info->solver,
             info->optimal_in[0] ? ", optimal among schedules of class " : "", info->optimal_in,
             info->stopped_early ? ", stopped early" : "");
    row(out, "outcome", cairn_outcome_name(info->outcome), note);
}

static void memory_rows(crn_textbuf *out, const cairn_info *info)
{
    char note[CRN_PERCENT_MAX] = "";
    if (info->budget_bytes != CAIRN_NONE)
        bytes_row(out, "budget", info->budget_bytes, NULL);
    else if (info->objective_bytes == CAIRN_NONE)
        row(out, "budget", "none", NULL);
    if (info->peak_bytes != CAIRN_NONE && info->budget_bytes > 0)
        snprintf(note, sizeof(note), "%.1f %% of the budget",
                 100 * (double)info->peak_bytes / (double)info->budget_bytes);
    bytes_row(out, "peak", info->peak_bytes, note);
    bytes_row(out, "host peak", info->host_peak_bytes, NULL);
    bytes_row(out, "objective", info->objective_bytes, NULL);
}

static void time_rows(crn_textbuf *out, const cairn_info *info)
{
    char percent[CRN_PERCENT_MAX], note[64] = "";
    if (info->makespan_ns == CAIRN_NONE)
        return;
    crn_report_percent(info->makespan_ns - info->store_all_ns, info->store_all_ns, percent);
    if (info->store_all_ns != CAIRN_NONE && *percent)
        snprintf(note, sizeof(note), "%s against store-all", percent);
    ns_row(out, "time", info->makespan_ns, note);
    ns_row(out, "  recomputing", info->recompute_ns, NULL);
    if (info->stall_ns > 0)
        ns_row(out, "  waiting", info->stall_ns, "for transfers and for memory");
    note[0] = '\0';
    if (info->gap >= 0)
        snprintf(note, sizeof(note), info->gap > 0 ? "so %.1f %% could be saved at most" : "reached", 100 * info->gap);
    ns_row(out, "lower bound", info->lower_bound_ns, note);
}

static void least_rows(crn_textbuf *out, const cairn_info *info)
{
    char lower[VALUE_MAX], note[96] = "", ns[VALUE_MAX];
    if (info->least_is_exact)
        snprintf(note, sizeof(note), "no schedule needs less");
    else if (info->least_lower_bytes != CAIRN_NONE)
        snprintf(note, sizeof(note), "of this solver; every schedule needs %s",
                 cairn_format_bytes(info->least_lower_bytes, lower, sizeof(lower)));
    budget_row(out, "least memory", info->least_bytes, note);
    if (info->store_all_ns != CAIRN_NONE)
        snprintf(note, sizeof(note), "in %s", cairn_format_ns(info->store_all_ns, ns, sizeof(ns)));
    budget_row(out, "store-all", info->store_all_bytes, info->store_all_ns != CAIRN_NONE ? note : NULL);
}

static void solve_rows(crn_textbuf *out, const cairn_info *info)
{
    char bytes[VALUE_MAX], count[VALUE_MAX], note[64] = "", reason[CAIRN_REASON_MAX + 8];
    if (info->solver_peak_bytes != CAIRN_NONE)
        snprintf(note, sizeof(note), "with %s of memory",
                 cairn_format_bytes(info->solver_peak_bytes, bytes, sizeof(bytes)));
    ns_row(out, "solved in", info->solve_ns, note);
    snprintf(count, sizeof(count), "%" PRId64, info->iterations);
    if (info->iterations > 0)
        row(out, "iterations", count, "at most; --iterations sets another limit");
    if (info->reason[0])
        row(out, "reason", crn_printable(info->reason, reason, sizeof(reason)), NULL);
}

/* ---- what is recomputed ---- */

/* Stages or nodes in a row that are computed again equally often. Aliases are views and cost nothing worth telling. */
typedef struct range {
    int32_t first, last, times;
} range;

static bool runs_forward(cairn_op op)
{
    return op.code == CAIRN_OP_FORWARD_SAVE || op.code == CAIRN_OP_FORWARD_KEEP || op.code == CAIRN_OP_FORWARD_DROP ||
           op.code == CAIRN_OP_COMPUTE;
}

/* Fills in how often each stage (from index 1) or node is computed. */
static void count_runs(const cairn_schedule *schedule, int32_t *runs)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++)
        if (runs_forward(ops[i]))
            runs[ops[i].index]++;
}

static void print_range(crn_textbuf *out, const cairn_problem *problem, const range *r, bool first)
{
    char from[CRN_NAME_MAX], to[CRN_NAME_MAX], times[32] = "";
    if (r->times > 1)
        snprintf(times, sizeof(times), " (%d times each)", r->times);
    if (r->first == r->last && r->times > 1)
        snprintf(times, sizeof(times), " (%d times)", r->times);
    crn_textbuf_print(out, "%-13s %s%s%s%s\n", first ? "recomputed" : "", crn_report_name(problem, r->first, from),
                      r->first < r->last ? " to " : "", r->first < r->last ? crn_report_name(problem, r->last, to) : "",
                      times);
}

static void print_ranges(crn_textbuf *out, const cairn_problem *problem, const int32_t *runs, int32_t begin,
                         int32_t end)
{
    int ranges = 0, again = 0;
    for (int32_t i = begin; i < end;) {
        range r = {i, i, runs[i] - 1};
        while (r.last + 1 < end && runs[r.last + 1] - 1 == r.times)
            r.last++;
        i = r.last + 1;
        if (r.times < 1)
            continue;
        again += r.last - r.first + 1;
        if (ranges++ < RANGES_SHOWN)
            print_range(out, problem, &r, ranges == 1);
    }
    if (ranges > RANGES_SHOWN)
        crn_textbuf_print(out, "%-13s and %d ranges more; %d of %d in all\n", "", ranges - RANGES_SHOWN, again,
                          end - begin);
    if (ranges == 0)
        row(out, "recomputed", "nothing", NULL);
}

static cairn_status recomputed_rows(crn_textbuf *out, const cairn_problem *problem, const cairn_schedule *schedule,
                                    cairn_error *error)
{
    int32_t begin = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN ? 1 : 0, end = begin + crn_report_size(problem);
    int32_t *runs = crn_alloc_zero(&out->allocator, (size_t)end, sizeof(*runs));
    if (!runs)
        return crn_no_memory(error);
    count_runs(schedule, runs);
    print_ranges(out, problem, runs, begin, end);
    crn_free(&out->allocator, runs, (size_t)end, sizeof(*runs));
    return CAIRN_OK;
}

static void checkpoint_row(crn_textbuf *out, const cairn_info *info)
{
    if (info->checkpoint_count < 0)
        return;
    crn_textbuf_print(out, "%-13s", "checkpoints");
    for (int32_t i = 0; i < info->checkpoint_count; i++)
        crn_textbuf_print(out, " %" PRId32, info->checkpoints[i]);
    crn_textbuf_print(out, "\n");
}

cairn_status cairn_report_answer(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                                 const cairn_info *info, cairn_sink sink, cairn_error *error)
{
    crn_textbuf out;
    crn_textbuf_init(&out, crn_allocator(env));
    title(&out, problem);
    outcome_row(&out, info);
    memory_rows(&out, info);
    time_rows(&out, info);
    least_rows(&out, info);
    cairn_status status = schedule ? recomputed_rows(&out, problem, schedule, error) : CAIRN_OK;
    if (status != CAIRN_OK) {
        crn_textbuf_free(&out);
        return status;
    }
    checkpoint_row(&out, info);
    solve_rows(&out, info);
    return crn_report_flush(&out, &sink, error);
}
