/* Reading a schedule with a choice of the reader. */
#ifndef CRN_READ_SCHEDULE_H
#define CRN_READ_SCHEDULE_H

#include <cairn/schedule.h>

#include "io/json_file.h"

/** As cairn_schedule_read; by_tree: by jansson's trees alone, slower. For tests that compare the two. */
cairn_status crn_schedule_read(const cairn_env *env, const cairn_problem *problem, const char *text, size_t length,
                               bool by_tree, cairn_schedule **schedule, cairn_error *error);

#endif
