#include "report/report_text.h"

#include <math.h>
#include <stdio.h>

#include "base/failure.h"
#include "base/unit_text.h"
#include "base/utf8.h"

cairn_status crn_report_flush(crn_textbuf *text, const cairn_sink *sink, cairn_error *error)
{
    cairn_status status = CAIRN_OK;
    if (text->failed)
        status = crn_no_memory(error);
    else if (text->length > 0 && sink->write(sink->context, text->text, text->length) != 0)
        status = crn_fail(error, CAIRN_CALLBACK, "the report could not be written");
    crn_textbuf_free(text);
    return status;
}

int32_t crn_report_size(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    return chain ? chain->stage_count : cairn_problem_graph(problem)->node_count;
}

const char *crn_report_name(const cairn_problem *problem, int32_t index, char name[CRN_NAME_MAX])
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    const char *own = !chain      ? cairn_problem_graph(problem)->nodes[index].name
                      : index > 0 ? chain->stages[index - 1].name
                                  : "the input";
    if (*own)
        return crn_printable(own, name, CRN_NAME_MAX);
    snprintf(name, CRN_NAME_MAX, "%s %d", chain ? "stage" : "node", (int)index);
    return name;
}

const char *crn_report_percent(int64_t part, int64_t whole, char out[CRN_PERCENT_MAX])
{
    out[0] = '\0';
    if (part == 0 || whole > 0)
        snprintf(out, CRN_PERCENT_MAX, "%+.1f %%", part == 0 ? 0 : 100 * (double)part / (double)whole);
    return out;
}

const char *crn_report_gap(double gap, char out[CRN_PERCENT_MAX])
{
    static const double noise = 1e-6; /* of a gap that is a whole number of tenths */
    snprintf(out, CRN_PERCENT_MAX, "%.1f %%", gap > 0 ? fmax(1, ceil(1000 * gap - noise)) / 10 : 0);
    return out;
}

/* ---- units ---- */

const char *cairn_format_bytes(int64_t bytes, char *out, size_t size)
{
    return crn_format_bytes(bytes, out, size);
}

const char *cairn_format_budget(int64_t bytes, char *out, size_t size)
{
    return crn_format_budget(bytes, out, size);
}

const char *cairn_format_ns(int64_t ns, char *out, size_t size)
{
    return crn_format_ns(ns, out, size);
}
