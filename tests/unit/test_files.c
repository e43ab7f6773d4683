/* Files are replaced whole; memory that runs out while reading and writing leaves nothing. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <cairn/io.h>

#include "io/json_plain.h"
#include "support/faulty_allocator.h"
#include "support/io_texts.h"

/* ---- memory ---- */

static cairn_status read_and_write_problem(const cairn_env *env, void *context)
{
    cairn_problem *problem;
    cairn_error error;
    char *text = NULL;
    size_t length = 0;
    cairn_status status = cairn_problem_read(env, context, strlen(context), &problem, &error);
    if (status == CAIRN_OK)
        status = cairn_problem_write(env, problem, &text, &length, &error);
    cairn_text_free(env, text, length);
    cairn_problem_free(problem);
    return status;
}

static void running_out_of_memory_with_problems(void **state)
{
    (void)state;
    assert_true(test_every_allocation_fails(read_and_write_problem, (void *)(uintptr_t)chain_text) > 3);
    assert_true(test_every_allocation_fails(read_and_write_problem, (void *)(uintptr_t)graph_text) > 3);
}

typedef struct schedule_text {
    const cairn_problem *problem;
    const char *text;
} schedule_text;

static cairn_status read_and_write_schedule(const cairn_env *env, void *context)
{
    const schedule_text *source = context;
    cairn_schedule *schedule;
    char *text = NULL;
    size_t length = 0;
    cairn_status status =
        cairn_schedule_read(env, source->problem, source->text, strlen(source->text), &schedule, NULL);
    if (status == CAIRN_OK)
        status = cairn_schedule_write(env, schedule, &text, &length, NULL);
    cairn_text_free(env, text, length);
    cairn_schedule_free(schedule);
    return status;
}

static void running_out_of_memory_with_schedules(void **state)
{
    (void)state;
    cairn_problem *problem = read_problem(chain_text);
    schedule_text source = {problem, OPS("[\"forward_save\",1],[\"forward_save\",2,1],[\"drop\",\"output\",1]")};
    assert_true(test_every_allocation_fails(read_and_write_schedule, &source) > 3);
    cairn_problem_free(problem);
}

static cairn_status read_file(const cairn_env *env, void *context)
{
    char *text;
    size_t length;
    cairn_status status = cairn_file_read(env, context, &text, &length, NULL);
    cairn_text_free(env, text, length);
    return status;
}

static void running_out_of_memory_with_files(void **state)
{
    (void)state;
    assert_true(test_every_allocation_fails(read_file, (void *)(uintptr_t)(CAIRN_TEST_DATA "/chains/gpt2.json")) > 0);
}

enum { LONG_NAME = 20000, OBJECTS = 3 }; /* longer than a block of an arena, so that each name is a request */

/* Objects in plain form, one after the other. The caller's to free. */
static char *plain_objects(void)
{
    char *text = malloc(OBJECTS * (LONG_NAME + 40)), *at = text;
    assert_non_null(text);
    for (int i = 0; i < OBJECTS; i++) {
        at += sprintf(at, "{\"bytes\": %d, \"name\": \"", i);
        memset(at, 'x', LONG_NAME);
        at += LONG_NAME;
        at += sprintf(at, "\"}");
    }
    return text;
}

/* The reader of plain elements by itself: behind it stands another one, which would read the element again. */
static cairn_status read_plain_objects(const cairn_env *env, void *context)
{
    typedef struct named {
        const char *name;
        int64_t bytes;
    } named;
    static const crn_field fields[] = {{"name", CRN_FIELD_TEXT, CRN_REQUIRED, offsetof(named, name)},
                                       {"bytes", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(named, bytes)}};
    crn_plain in = {context, (const char *)context + strlen(context)};
    crn_plain_result result = CRN_PLAIN_TAKEN;
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(env));
    for (int i = 0; i < OBJECTS && result == CRN_PLAIN_TAKEN; i++) {
        named made;
        crn_target target = {.structure = &made, .arena = &arena};
        result = crn_plain_fields(&in, fields, 2, &target, NULL, NULL);
        if (result == CRN_PLAIN_TAKEN)
            assert_true(made.bytes == i && strlen(made.name) == LONG_NAME);
    }
    crn_arena_clear(&arena);
    assert_int_not_equal(result, CRN_PLAIN_ODD);
    return result == CRN_PLAIN_TAKEN ? CAIRN_OK : CAIRN_NO_MEMORY;
}

static void running_out_of_memory_with_plain_elements(void **state)
{
    (void)state;
    char *text = plain_objects();
    assert_true(test_every_allocation_fails(read_plain_objects, text) >= OBJECTS);
    free(text);
}

/* ---- files ---- */

static void expect_content(const char *path, const char *expected)
{
    char *text;
    size_t length;
    assert_int_equal(cairn_file_read(NULL, path, &text, &length, NULL), CAIRN_OK);
    assert_string_equal(text, expected);
    cairn_text_free(NULL, text, length);
}

static int count_entries(const char *folder)
{
    DIR *directory = opendir(folder);
    int count = 0;
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory));)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(directory);
    return count;
}

static void files_are_replaced_whole(void **state)
{
    (void)state;
    char folder[] = "/tmp/cairn-io-XXXXXX", path[64], link[64];
    cairn_error error;
    struct stat info;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/a.json", folder);
    snprintf(link, sizeof(link), "%s/link.json", folder);
    assert_int_equal(cairn_file_write(path, "first\n", 6, NULL), CAIRN_OK);
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(symlink("a.json", link), 0);
    assert_int_equal(cairn_file_write(link, "second\n", 7, NULL), CAIRN_OK);
    expect_content(path, "second\n");
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0640);
    unlink(path);
    assert_int_equal(cairn_file_write(link, "third\n", 6, NULL), CAIRN_OK);
    expect_content(path, "third\n");
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    unlink(link);
    assert_int_equal(symlink("/nonexistent/a.json", link), 0);
    assert_int_equal(cairn_file_write(link, "fourth\n", 7, &error), CAIRN_IO);
    expect_content(path, "third\n");
    assert_int_equal(cairn_file_write(folder, "x", 1, &error), CAIRN_IO);
    assert_true(strlen(error.message) > 5);
    assert_int_equal(cairn_file_write("/dev/null", "x", 1, NULL), CAIRN_OK);
    assert_int_equal(cairn_file_write("/dev/full", "x", 1, &error), CAIRN_IO);
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    assert_int_equal(count_entries(folder), 2);
    unlink(link);
    unlink(path);
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(cairn_file_write(path, "x", 1, &error), CAIRN_IO);
}

/* As anybody but root, who may write everything. */
static void read_only_files_are_kept(void **state)
{
    (void)state;
    enum { NOBODY = 65534 };
    char folder[] = "/tmp/cairn-io-XXXXXX", path[64];
    cairn_error error;
    bool is_root = geteuid() == 0;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/a.json", folder);
    assert_int_equal(cairn_file_write(path, "first\n", 6, NULL), CAIRN_OK);
    assert_int_equal(chmod(folder, 0777), 0);
    assert_int_equal(chmod(path, 0444), 0);
    assert_true(!is_root || seteuid(NOBODY) == 0);
    cairn_status status = cairn_file_write(path, "second\n", 7, &error);
    assert_true(!is_root || seteuid(0) == 0);
    assert_int_equal(status, CAIRN_IO);
    assert_string_equal(error.message, "cannot be opened for writing: Permission denied");
    expect_content(path, "first\n");
    assert_int_equal(count_entries(folder), 1);
    unlink(path);
    assert_int_equal(rmdir(folder), 0);
}

static void unreadable_files_are_refused(void **state)
{
    (void)state;
    char *text = (char *)state;
    size_t length = 1;
    cairn_error error;
    assert_int_equal(cairn_file_read(NULL, "/nonexistent/a.json", &text, &length, &error), CAIRN_IO);
    assert_null(text);
    assert_int_equal(length, 0);
    assert_non_null(strstr(error.message, "No such file"));
    assert_int_equal(cairn_file_read(NULL, "/tmp", &text, &length, &error), CAIRN_IO);
    assert_non_null(strstr(error.message, "directory"));
    assert_int_equal(cairn_file_read(NULL, "/dev/null", &text, &length, &error), CAIRN_OK);
    assert_int_equal(length, 0);
    cairn_text_free(NULL, text, length);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(running_out_of_memory_with_problems),
        cmocka_unit_test(running_out_of_memory_with_schedules),
        cmocka_unit_test(running_out_of_memory_with_files),
        cmocka_unit_test(running_out_of_memory_with_plain_elements),
        cmocka_unit_test(files_are_replaced_whole),
        cmocka_unit_test(read_only_files_are_kept),
        cmocka_unit_test(unreadable_files_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
