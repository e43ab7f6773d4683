#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "support/ask.h"

enum { SETTINGS_MAX = 200 };

static void set(cairn_options *options, const char *name, const char *value)
{
    cairn_error error;
    if (cairn_options_set(options, name, value, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
}

static void set_all(cairn_options *options, const char *settings)
{
    char text[SETTINGS_MAX];
    size_t length = strlen(settings);
    assert_true(length < sizeof(text));
    memcpy(text, settings, length + 1);
    for (char *name = strtok(text, " "); name; name = strtok(NULL, " ")) {
        char *equals = strchr(name, '=');
        assert_non_null(equals);
        *equals = '\0';
        set(options, name, equals + 1);
    }
}

cairn_options *test_options(const char *solver, int64_t budget_bytes, const char *settings)
{
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    set_all(options, settings);
    set(options, "solver", solver);
    if (budget_bytes >= 0)
        assert_int_equal(cairn_options_set_int(options, "budget", budget_bytes, NULL), CAIRN_OK);
    return options;
}

cairn_info test_solve(const cairn_problem *problem, cairn_options *options, cairn_schedule **schedule)
{
    cairn_info info;
    cairn_error error;
    if (cairn_solve(NULL, problem, options, schedule, &info, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
    cairn_options_free(options);
    return info;
}

cairn_status test_solve_status(const cairn_env *env, const cairn_problem *problem, cairn_options *options)
{
    cairn_schedule *schedule;
    cairn_info info;
    cairn_status status = cairn_solve(env, problem, options, &schedule, &info, NULL);
    cairn_schedule_free(schedule);
    cairn_info_clear(&info);
    cairn_options_free(options);
    return status;
}

cairn_limits test_limits(const cairn_problem *problem, cairn_options *options)
{
    cairn_limits found;
    cairn_error error;
    if (cairn_limits_of(NULL, problem, options, &found, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
    cairn_options_free(options);
    return found;
}

int test_stop_after(void *polls, const cairn_progress *progress)
{
    int *left = polls;
    assert_non_null(progress->phase);
    return (*left)-- <= 0;
}

void test_stops_at_any_poll(const cairn_problem *problem, const cairn_options *options)
{
    for (int polls = 0; polls < 2000; polls = 3 * polls + 1) {
        int left = polls;
        cairn_env env = {.poll = test_stop_after, .poll_context = &left};
        cairn_info info;
        assert_int_equal(cairn_solve(&env, problem, options, NULL, &info, NULL), CAIRN_OK);
        assert_true(info.makespan_ns >= 0 && info.makespan_ns >= info.lower_bound_ns);
        assert_true(left < 0 || !info.stopped_early);
    }
}
