/* Several answers side by side: a table for people, and comma-separated values for spreadsheets and plots. */
#include <inttypes.h>
#include <stdio.h>

#include "report/report_text.h"

enum { CELL_MAX = 32 };

static void table_row(crn_textbuf *out, const cairn_info *info)
{
    char budget[CELL_MAX], peak[CELL_MAX], time[CELL_MAX], least[CELL_MAX], took[CELL_MAX], gap[CELL_MAX] = "-";
    char over[CRN_PERCENT_MAX] = "";
    if (info->makespan_ns != CAIRN_NONE)
        crn_report_percent(info->makespan_ns - info->store_all_ns, info->store_all_ns, over);
    if (info->gap >= 0)
        crn_report_gap(info->gap, gap);
    crn_textbuf_print(
        out, "%-22s %-10s %10s %10s %10s %10s %8s %10s %10s\n", info->solver, cairn_outcome_name(info->outcome),
        info->budget_bytes == CAIRN_NONE ? "none" : cairn_format_bytes(info->budget_bytes, budget, CELL_MAX),
        cairn_format_bytes(info->peak_bytes, peak, CELL_MAX), cairn_format_ns(info->makespan_ns, time, CELL_MAX),
        *over ? over : "-", gap, cairn_format_budget(info->least_bytes, least, CELL_MAX),
        cairn_format_ns(info->solve_ns, took, CELL_MAX));
}

cairn_status cairn_report_comparison(const cairn_env *env, const cairn_info *infos, int count, cairn_sink sink,
                                     cairn_error *error)
{
    crn_textbuf out;
    crn_textbuf_init(&out, crn_allocator(env));
    crn_textbuf_print(&out, "%-22s %-10s %10s %10s %10s %10s %8s %10s %10s\n", "solver", "outcome", "budget", "peak",
                      "time", "overhead", "gap <=", "least", "solved in");
    for (int i = 0; i < count; i++)
        table_row(&out, &infos[i]);
    return crn_report_flush(&out, &sink, error);
}

static void cell(crn_textbuf *out, int64_t value)
{
    if (value == CAIRN_NONE)
        crn_textbuf_add(out, ",", 1);
    else
        crn_textbuf_print(out, ",%" PRId64, value);
}

cairn_status cairn_report_csv(const cairn_env *env, const cairn_info *infos, int count, cairn_sink sink,
                              cairn_error *error)
{
    crn_textbuf out;
    crn_textbuf_init(&out, crn_allocator(env));
    crn_textbuf_print(&out, "solver,outcome,budget_bytes,makespan_ns,peak_bytes,host_peak_bytes,lower_bound_ns,"
                            "least_bytes,least_lower_bytes,store_all_bytes,store_all_ns,recompute_ns,stall_ns,solve_ns,"
                            "solver_peak_bytes\n");
    for (int i = 0; i < count; i++) {
        const cairn_info *info = &infos[i];
        const int64_t cells[] = {info->budget_bytes,      info->makespan_ns,     info->peak_bytes,
                                 info->host_peak_bytes,   info->lower_bound_ns,  info->least_bytes,
                                 info->least_lower_bytes, info->store_all_bytes, info->store_all_ns,
                                 info->recompute_ns,      info->stall_ns,        info->solve_ns,
                                 info->solver_peak_bytes};
        crn_textbuf_print(&out, "%s,%s", info->solver, cairn_outcome_name(info->outcome));
        for (size_t k = 0; k < sizeof(cells) / sizeof(cells[0]); k++)
            cell(&out, cells[k]);
        crn_textbuf_add(&out, "\n", 1);
    }
    return crn_report_flush(&out, &sink, error);
}
