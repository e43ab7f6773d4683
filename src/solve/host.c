/* What solving asks of the operating system: a clock and how much memory there is. */
#define _GNU_SOURCE /* _SC_PHYS_PAGES */
#include <time.h>
#include <unistd.h>

#include "solve/solver.h"

int64_t crn_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t crn_memory_limit(const crn_settings *settings)
{
    if (settings->memory_limit_bytes != CAIRN_NONE)
        return settings->memory_limit_bytes;
    int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE), bytes;
    if (pages <= 0 || page_bytes <= 0 || !crn_mul(pages, page_bytes, &bytes))
        return (int64_t)1 << 30;
    return bytes / 2;
}
