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

/* "eq. 9" where the class is an objective of the selection solvers; NULL: a class of schedules, or none. */
static const char *equation(const cairn_info *info)
{
    return strcmp(info->optimal_in, "eq6") == 0 ? "eq. 6" : strcmp(info->optimal_in, "eq9") == 0 ? "eq. 9" : NULL;
}

static void outcome_row(crn_textbuf *out, const cairn_info *info)
{
    char note[128];
    const char *objective = equation(info), *among = "";
    if (info->optimal_in[0])
        among = objective ? ", optimal by its objective, " : ", optimal among schedules of class ";
    snprintf(note, sizeof(note), "%s%s%s%s", info->solver, among, objective ? objective : info->optimal_in,
             info->stopped_early ? ", stopped early" : "");
    row(out, "outcome", cairn_outcome_name(info->outcome), note);
}

static void objective_row(crn_textbuf *out, const cairn_info *info)
{
    char note[96];
    const char *objective = equation(info);
    snprintf(note, sizeof(note), "what the solver minimizes: memory of outputs alone%s%s%s", objective ? ", by " : "",
             objective ? objective : "", objective ? " of Hong et al." : "");
    bytes_row(out, "objective", info->objective_bytes, note);
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
    objective_row(out, info);
}

static void time_rows(crn_textbuf *out, const cairn_info *info, bool has_options)
{
    char percent[CRN_PERCENT_MAX], gap[CRN_PERCENT_MAX], note[64] = "";
    if (info->makespan_ns == CAIRN_NONE)
        return;
    crn_report_percent(info->makespan_ns - info->store_all_ns, info->store_all_ns, percent);
    if (info->store_all_ns != CAIRN_NONE && *percent)
        snprintf(note, sizeof(note), "%s against store-all", percent);
    ns_row(out, "time", info->makespan_ns, note);
    ns_row(out, "  recomputing", info->recompute_ns,
           has_options ? "of whole stages; slower options come on top" : NULL);
    if (info->stall_ns > 0)
        ns_row(out, "  waiting", info->stall_ns, "for transfers and for memory");
    note[0] = '\0';
    if (info->gap > 0)
        snprintf(note, sizeof(note), "so %s could be saved at most", crn_report_gap(info->gap, gap));
    else if (info->gap == 0)
        snprintf(note, sizeof(note), "reached");
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

/* A value of each stage (from index 1) or node. A value of 0 is not printed. */
typedef struct item_values {
    const cairn_problem *problem;
    int32_t begin, end, *values;
    size_t count;    /* of values */
    bool is_options; /* the values are options, from 1 */
} item_values;

/* Stages or nodes in a row with the same value. */
typedef struct range {
    int32_t first, last, value;
} range;

/* What stands behind the names of a range. */
typedef void range_note(const item_values *of, const range *r, char *note, size_t size);

static void print_range(crn_textbuf *out, const char *label, const item_values *of, const range *r, range_note *note)
{
    char from[CRN_NAME_MAX], to[CRN_NAME_MAX], behind[CRN_NAME_MAX + 8];
    note(of, r, behind, sizeof(behind));
    crn_textbuf_print(out, "%-13s %s%s%s%s\n", label, crn_report_name(of->problem, r->first, from),
                      r->first < r->last ? " to " : "",
                      r->first < r->last ? crn_report_name(of->problem, r->last, to) : "", behind);
}

/* Of the option that is the value of a stage; "" where it has none. */
static const char *option_name(const item_values *of, int32_t l)
{
    const char *own = cairn_problem_chain(of->problem)->stages[l - 1].options[of->values[l] - 1].name;
    return own ? own : "";
}

static bool are_alike(const item_values *of, int32_t i, int32_t j)
{
    if (of->values[i] != of->values[j])
        return false;
    return !of->is_options || of->values[i] == 0 || strcmp(option_name(of, i), option_name(of, j)) == 0;
}

/* Returns how many ranges there are. */
static int print_ranges(crn_textbuf *out, const char *label, const item_values *of, range_note *note)
{
    int ranges = 0, named = 0;
    for (int32_t i = of->begin; i < of->end;) {
        range r = {i, i, of->values[i]};
        while (r.last + 1 < of->end && are_alike(of, i, r.last + 1))
            r.last++;
        i = r.last + 1;
        if (r.value < 1)
            continue;
        named += r.last - r.first + 1;
        if (ranges++ < RANGES_SHOWN)
            print_range(out, ranges == 1 ? label : "", of, &r, note);
    }
    if (ranges > RANGES_SHOWN)
        crn_textbuf_print(out, "%-13s and %d ranges more; %d of %d in all\n", "", ranges - RANGES_SHOWN, named,
                          of->end - of->begin);
    return ranges;
}

static cairn_status item_values_new(const crn_textbuf *out, const cairn_problem *problem, item_values *of,
                                    cairn_error *error)
{
    int32_t begin = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN ? 1 : 0;
    *of = (item_values){.problem = problem, .begin = begin, .end = begin + crn_report_size(problem)};
    of->count = (size_t)of->end;
    of->values = crn_alloc_zero(&out->allocator, of->count, sizeof(*of->values));
    return of->values ? CAIRN_OK : crn_no_memory(error);
}

static void item_values_clear(const crn_textbuf *out, item_values *of)
{
    if (of->values)
        crn_free(&out->allocator, of->values, of->count, sizeof(*of->values));
}

static bool runs_forward(cairn_op op)
{
    return op.code == CAIRN_OP_FORWARD_SAVE || op.code == CAIRN_OP_FORWARD_KEEP || op.code == CAIRN_OP_FORWARD_DROP ||
           op.code == CAIRN_OP_COMPUTE;
}

/* Fills in how often each stage or node is computed again. Aliases are views and cost nothing worth printing. */
static void count_again(const cairn_schedule *schedule, item_values *of)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++)
        if (runs_forward(ops[i]))
            of->values[ops[i].index]++;
    for (int32_t i = of->begin; i < of->end; i++)
        of->values[i]--;
}

static void note_times(const item_values *of, const range *r, char *note, size_t size)
{
    (void)of;
    note[0] = '\0';
    if (r->value > 1)
        snprintf(note, size, r->first < r->last ? " (%d times each)" : " (%d times)", r->value);
}

/* ---- in which options ---- */

static int64_t option_ns(const cairn_stage_option *option)
{
    return option->forward_ns + option->backward_ns;
}

/* Of option k, or 0 where no option of the stage takes less time: then it costs memory and nothing else. */
static int32_t slower_option(const cairn_stage *stage, int32_t k)
{
    for (int32_t other = 0; other < stage->option_count; other++)
        if (option_ns(&stage->options[other]) < option_ns(&stage->options[k]))
            return k + 1;
    return 0;
}

/* Fills in the option, from 1, in which each stage is saved last: that of its backward. */
static bool find_options(const cairn_chain *chain, const cairn_schedule *schedule, item_values *of)
{
    const cairn_op *ops = cairn_schedule_ops(schedule);
    bool any = false;
    of->is_options = true;
    for (int64_t i = 0; chain && i < cairn_schedule_count(schedule); i++)
        if (ops[i].code == CAIRN_OP_FORWARD_SAVE)
            of->values[ops[i].index] = slower_option(&chain->stages[ops[i].index - 1], ops[i].option);
    for (int32_t i = of->begin; i < of->end; i++)
        any |= of->values[i] > 0;
    return any;
}

static void note_option(const item_values *of, const range *r, char *note, size_t size)
{
    char name[CRN_NAME_MAX];
    const char *own = option_name(of, r->first);
    if (*own)
        snprintf(note, size, ": %s", crn_printable(own, name, sizeof(name)));
    else
        snprintf(note, size, ": option %d", r->value - 1);
}

/* ---- the table ---- */

static void recomputed_rows(crn_textbuf *out, const item_values *again, const item_values *options)
{
    int ranges = options ? print_ranges(out, "options", options, note_option) : 0;
    if (print_ranges(out, "recomputed", again, note_times) == 0)
        row(out, "recomputed", ranges > 0 ? "no whole stage" : "nothing", NULL);
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

static void first_rows(crn_textbuf *out, const cairn_problem *problem, const cairn_info *info, bool has_options)
{
    title(out, problem);
    outcome_row(out, info);
    memory_rows(out, info);
    time_rows(out, info, has_options);
    least_rows(out, info);
}

cairn_status cairn_report_answer(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                                 const cairn_info *info, cairn_sink sink, cairn_error *error)
{
    crn_textbuf out;
    crn_textbuf_init(&out, crn_allocator(env));
    item_values again = {.problem = problem}, options = {.problem = problem};
    cairn_status status = schedule ? item_values_new(&out, problem, &again, error) : CAIRN_OK;
    if (status == CAIRN_OK && schedule)
        status = item_values_new(&out, problem, &options, error);
    if (status == CAIRN_OK) {
        bool has_options = schedule && find_options(cairn_problem_chain(problem), schedule, &options);
        first_rows(&out, problem, info, has_options);
        if (schedule) {
            count_again(schedule, &again);
            recomputed_rows(&out, &again, has_options ? &options : NULL);
        }
        checkpoint_row(&out, info);
        solve_rows(&out, info);
        status = crn_report_flush(&out, &sink, error);
    }
    item_values_clear(&out, &again);
    item_values_clear(&out, &options);
    crn_textbuf_free(&out);
    return status;
}
