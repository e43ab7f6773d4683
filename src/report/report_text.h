/* What the reports share: handing finished text to a sink, names of stages and nodes, percentages. */
#ifndef CRN_REPORT_TEXT_H
#define CRN_REPORT_TEXT_H

#include <cairn/report.h>

#include "base/textbuf.h"

enum { CRN_NAME_MAX = 64, CRN_PERCENT_MAX = 32 };

/** Hands the text over and empties the buffer, or says that memory failed on the way. */
cairn_status crn_report_flush(crn_textbuf *text, const cairn_sink *sink, cairn_error *error);
/** The name of stage l (from 1) or node v (from 0), fit to be shown; "stage 3" or "node 3" where it has none. */
const char *crn_report_name(const cairn_problem *problem, int32_t index, char name[CRN_NAME_MAX]);
/** Stages of a chain, nodes of a graph. */
int32_t crn_report_size(const cairn_problem *problem);
/** "+12.3 %" of part over whole; "" for something over nothing. */
const char *crn_report_percent(int64_t part, int64_t whole, char out[CRN_PERCENT_MAX]);
/** "12.3 %", rounded up, as what is at most. */
const char *crn_report_gap(double gap, char out[CRN_PERCENT_MAX]);

#endif
