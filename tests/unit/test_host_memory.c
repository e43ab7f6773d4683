/* How much memory there is for the process: of the machine, of its control groups, of its own limit. */
#define _DEFAULT_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "solve/host_memory.h"
#include "solve/options.h"

/* The files of control groups, below a folder that stands for the root. */
static const char *const folders[] = {"proc",
                                      "proc/self",
                                      "sys",
                                      "sys/fs",
                                      "sys/fs/cgroup",
                                      "sys/fs/cgroup/jobs",
                                      "sys/fs/cgroup/jobs/7",
                                      "sys/fs/cgroup/memory",
                                      "sys/fs/cgroup/memory/box"};
static const char *const files[] = {"proc/self/cgroup",
                                    "sys/fs/cgroup/memory.max",
                                    "sys/fs/cgroup/jobs/memory.max",
                                    "sys/fs/cgroup/jobs/7/memory.max",
                                    "sys/fs/cgroup/memory/memory.limit_in_bytes",
                                    "sys/fs/cgroup/memory/box/memory.limit_in_bytes"};

enum { FOLDERS = sizeof(folders) / sizeof(folders[0]), FILES = sizeof(files) / sizeof(files[0]) };

static void write_text(const char *root, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* The limit where files have these texts; NULL: there is no such file. */
static int64_t limit_with(const char *const texts[FILES])
{
    char root[] = "/tmp/cairn-groups-XXXXXX", path[256];
    assert_non_null(mkdtemp(root));
    for (int i = 0; i < FOLDERS; i++) {
        snprintf(path, sizeof(path), "%s/%s", root, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    for (int i = 0; i < FILES; i++)
        if (texts[i])
            write_text(root, files[i], texts[i]);
    int64_t limit = crn_memory_of_groups(root);
    for (int i = 0; i < FILES; i++) {
        snprintf(path, sizeof(path), "%s/%s", root, files[i]);
        assert_int_equal(unlink(path) != 0, texts[i] == NULL);
    }
    for (int i = FOLDERS - 1; i >= 0; i--) {
        snprintf(path, sizeof(path), "%s/%s", root, folders[i]);
        assert_int_equal(rmdir(path), 0);
    }
    assert_int_equal(rmdir(root), 0);
    return limit;
}

static void the_least_limit_of_groups_holds(void **state)
{
    (void)state;
    static const struct {
        const char *texts[FILES];
        int64_t limit;
    } cases[] = {
        {{NULL}, INT64_MAX},
        {{""}, INT64_MAX},
        {{"0::/jobs/7\n", NULL, "max\n", "8000\n"}, 8000},        /* a batch job */
        {{"0::/jobs/7\n", NULL, "7000\n", "8000\n"}, 7000},       /* the job's parent has less */
        {{"0::/\n", "6000\n"}, 6000},                             /* a container with its own root */
        {{"0::/jobs/7\n", "max\n", "max\n", "max\n"}, INT64_MAX}, /* no limit */
        {{"0::/elsewhere/9\n", "5000\n"}, 5000},                  /* a group that is not to be seen */
        {{"9:cpu:/box\n4:memory:/box\n0::/\n", NULL, NULL, NULL, "9223372036854771712\n", "4000\n"}, 4000},
        {{"4:memory:/docker/1\n", NULL, NULL, NULL, "3000\n"}, 3000},
        {{"nonsense\n0:\n0::\n", "2000\n"}, 2000},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(limit_with(cases[i].texts), cases[i].limit);
}

/* Sanitizers need more address space than any limit leaves. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { HAS_SANITIZER = 1 };
#else
enum { HAS_SANITIZER = 0 };
#endif

static void the_limit_of_the_process_holds(void **state)
{
    (void)state;
    if (HAS_SANITIZER)
        skip();
    enum { GIB = 1 << 30 };
    struct rlimit before, less;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    less = (struct rlimit){GIB, before.rlim_max};
    int64_t all = crn_memory_there_is();
    assert_true(all > GIB);
    assert_int_equal(setrlimit(RLIMIT_AS, &less), 0);
    int64_t left = crn_memory_there_is();
    const crn_settings nothing = {.memory_limit_bytes = CAIRN_NONE},
                       known = {.memory_limit_bytes = CAIRN_NONE, .memory_bytes = 10};
    int64_t limit = crn_memory_limit(&nothing);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_int_equal(left, GIB);
    assert_int_equal(limit, GIB / 2);
    assert_int_equal(crn_memory_limit(&known), 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_limit_of_groups_holds),
        cmocka_unit_test(the_limit_of_the_process_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
