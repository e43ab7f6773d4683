/*
 * The memory of the machine is not all that a process may use: containers and batch systems limit control groups of
 * processes, and the kernel ends a process whose group passes its limit.
 */
#define _GNU_SOURCE /* _SC_PHYS_PAGES */
#include "solve/host_memory.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/checked.h"

enum { PATH_BYTES_MAX = 4096, LINE_BYTES_MAX = 4096 };

/* ---- control groups ---- */

/* Where a version of control groups keeps the memory limit of a group. */
typedef struct group_files {
    const char *controllers; /* in /proc/self/cgroup */
    const char *folder, *file;
} group_files;

static const group_files versions[] = {
    {"", "/sys/fs/cgroup", "memory.max"},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
};

/* The number that a file begins with; INT64_MAX where there is no file, or no number ("max"). */
static int64_t number_in(const char *path)
{
    char text[32] = "";
    FILE *file = fopen(path, "r");
    if (!file)
        return INT64_MAX;
    bool has_line = fgets(text, sizeof(text), file) != NULL;
    (void)fclose(file);
    return has_line && isdigit((unsigned char)text[0]) ? strtoll(text, NULL, 10) : INT64_MAX;
}

/* The least limit of a group and of those around it, up to the root: the only one that a container sees. Cuts group. */
static int64_t limit_from(const char *root, const group_files *files, char *group)
{
    char path[PATH_BYTES_MAX], *end;
    int64_t least = INT64_MAX;
    do {
        snprintf(path, sizeof(path), "%s%s%s/%s", root, files->folder, group, files->file);
        least = crn_min(least, number_in(path));
        end = strrchr(group, '/');
        if (end)
            *end = '\0';
    } while (end);
    return least;
}

/* Of a line "0::/group" (version 2) or "4:memory:/group" (version 1). Cuts the line. */
static int64_t limit_of_line(const char *root, char *line)
{
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    int64_t least = INT64_MAX;
    if (!group)
        return least;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]); i++)
        if (strcmp(controllers + 1, versions[i].controllers) == 0)
            least = limit_from(root, &versions[i], group);
    return least;
}

int64_t crn_memory_of_groups(const char *root)
{
    char path[PATH_BYTES_MAX], line[LINE_BYTES_MAX];
    int64_t least = INT64_MAX;
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        least = crn_min(least, limit_of_line(root, line));
    if (file)
        (void)fclose(file);
    return least;
}

/* ---- all of it ---- */

static int64_t memory_of_machine(void)
{
    int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE), bytes;
    bool is_known = pages > 0 && page_bytes > 0 && crn_mul(pages, page_bytes, &bytes);
    return is_known ? bytes : (int64_t)1 << 31;
}

static int64_t memory_of_process(void)
{
    struct rlimit space;
    bool is_limited = getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY;
    return is_limited && space.rlim_cur < INT64_MAX ? (int64_t)space.rlim_cur : INT64_MAX;
}

int64_t crn_memory_there_is(void)
{
    return crn_min(memory_of_machine(), crn_min(memory_of_process(), crn_memory_of_groups("")));
}
