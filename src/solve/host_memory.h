/* How much memory there is for the process: what solvers may take of it follows. */
#ifndef CRN_HOST_MEMORY_H
#define CRN_HOST_MEMORY_H

#include <stdint.h>

/** The machine's memory, or less, where a control group of the process or `ulimit -v` says so. Reads some small files. */
int64_t crn_memory_there_is(void);
/** The least limit of the control groups that the process lies in; INT64_MAX where there is none. root: "", or a test's. */
int64_t crn_memory_of_groups(const char *root);

#endif
