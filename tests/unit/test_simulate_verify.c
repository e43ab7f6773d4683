/* Recorded numbers, machines, observers and misuse of the simulator. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/op_text.h"
#include "support/simulated.h"

static void expect_verified(const cairn_problem *problem, const char *text, const cairn_schedule_info *info,
                            int64_t budget_bytes, cairn_violation_code code)
{
    cairn_schedule *schedule = test_schedule_with(problem, text, info);
    cairn_verified *verified;
    cairn_replay replay;
    assert_int_equal(cairn_verify(NULL, problem, schedule, budget_bytes, &verified, &replay, NULL), CAIRN_OK);
    assert_int_equal(replay.violation.code, code);
    assert_int_equal(replay.valid, code == CAIRN_VIOLATION_NONE);
    assert_int_equal(verified != NULL, replay.valid);
    if (verified) {
        assert_ptr_equal(cairn_verified_problem(verified), problem);
        assert_ptr_equal(cairn_verified_schedule(verified), schedule);
        assert_memory_equal(cairn_verified_replay(verified), &replay, sizeof(replay));
    } else {
        assert_int_equal(replay.makespan_ns, NONE);
    }
    cairn_verified_free(verified);
    assert_int_equal(cairn_verify(NULL, problem, schedule, budget_bytes, NULL, &replay, NULL), CAIRN_OK);
    assert_int_equal(replay.violation.code, code);
    cairn_schedule_free(schedule);
}

static void recorded_numbers_hold_under_the_recorded_budget(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, &link);
    const char *text = "C0 >0 -0 C1 C2"; /* 18 ns and 30 bytes without a budget, 23 ns and 20 bytes within 20 */
    cairn_schedule_info info = CAIRN_SCHEDULE_INFO_INIT;
    expect_verified(graph, text, &info, CAIRN_RECORDED, CAIRN_VIOLATION_NONE);
    info = (cairn_schedule_info){NULL, 20, 23, 20, NONE, NULL};
    expect_verified(graph, text, &info, CAIRN_RECORDED, CAIRN_VIOLATION_NONE);
    expect_verified(graph, text, &info, NONE, CAIRN_VIOLATION_NONE);
    expect_verified(graph, text, &info, 25, CAIRN_VIOLATION_NONE);
    expect_verified(graph, text, &info, 19, CAIRN_VIOLATION_OVER_BUDGET);
    info.makespan_ns = 18;
    expect_verified(graph, text, &info, NONE, CAIRN_VIOLATION_RECORDED_MAKESPAN);
    info.peak_bytes = 30;
    expect_verified(graph, text, &info, NONE, CAIRN_VIOLATION_RECORDED_MAKESPAN);
    info.makespan_ns = NONE;
    expect_verified(graph, text, &info, NONE, CAIRN_VIOLATION_RECORDED_PEAK);
    expect_verified(graph, text, &info, 10, CAIRN_VIOLATION_OVER_BUDGET);
    info.budget_bytes = NONE;
    expect_verified(graph, text, &info, 20, CAIRN_VIOLATION_NONE);
    /* The operations do not fit the recorded budget, so nothing that is recorded can be right. */
    info = (cairn_schedule_info){NULL, 10, NONE, 20, NONE, NULL};
    expect_verified(graph, text, &info, 20, CAIRN_VIOLATION_RECORDED_PEAK);
    expect_verified(graph, text, &info, CAIRN_RECORDED, CAIRN_VIOLATION_OVER_BUDGET);
    cairn_problem_free(graph);
}

static void the_machine_of_the_schedule_replaces_that_of_the_problem(void **state)
{
    (void)state;
    cairn_problem *with = graph_of(loose, 1, &link), *without = graph_of(loose, 1, NULL);
    cairn_schedule_info info = CAIRN_SCHEDULE_INFO_INIT;
    const cairn_machine other = {10, 10000000000, 1, 4, false};
    info.machine = &other;
    info.makespan_ns = 5 + 4 + 1;
    expect_verified(with, "C0 >0", &info, CAIRN_RECORDED, CAIRN_VIOLATION_NONE);
    expect_verified(without, "C0 >0", &info, CAIRN_RECORDED, CAIRN_VIOLATION_NONE);
    info.machine = NULL;
    info.makespan_ns = 5 + 3 + 10;
    expect_verified(with, "C0 >0", &info, CAIRN_RECORDED, CAIRN_VIOLATION_NONE);
    expect_verified(without, "C0 >0", &info, CAIRN_RECORDED, CAIRN_VIOLATION_NO_MACHINE);
    cairn_problem_free(with);
    cairn_problem_free(without);
}

typedef struct watch {
    char text[1000];
    int64_t last_ns;
} watch;

static void note(watch *w, const char *format, ...)
{
    size_t length = strlen(w->text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->text + length, sizeof(w->text) - length, format, arguments);
    va_end(arguments);
}

static void watch_op(void *context, int64_t position, cairn_op op, cairn_lane lane, int64_t start_ns, int64_t end_ns)
{
    note(context, "%d:%s@%d[%d,%d] ", (int)position, cairn_op_name((cairn_op_code)op.code), (int)lane, (int)start_ns,
         (int)end_ns);
}

static void watch_memory(void *context, int64_t time_ns, int64_t device_bytes, int64_t host_bytes)
{
    watch *w = context;
    assert_true(time_ns >= w->last_ns);
    w->last_ns = time_ns;
    note(w, "%d=%d/%d ", (int)time_ns, (int)device_bytes, (int)host_bytes);
}

static void an_observer_sees_operations_and_memory(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 2, &shared_link);
    cairn_schedule *schedule = test_schedule(graph, "C0 >0 -0 C1 <0 x0");
    watch w = {"", 0};
    cairn_observer observer = {&w, watch_op, watch_memory};
    cairn_replay replay;
    assert_int_equal(cairn_simulate(NULL, graph, schedule, 10, &observer, &replay, NULL), CAIRN_OK);
    assert_int_equal(replay.violation.code, CAIRN_VIOLATION_OVER_BUDGET);
    w = (watch){"", 0};
    assert_int_equal(cairn_simulate(NULL, graph, schedule, 20, &observer, &replay, NULL), CAIRN_OK);
    assert_true(replay.valid);
    assert_string_equal(w.text, "0=0/0 0=10/0 0:compute@0[0,5] 5=10/10 1:offload@1[5,18] 5=20/10 3:compute@0[5,10] "
                                "18=10/10 18=20/10 4:prefetch@2[18,41] 41=20/0 ");
    observer = (cairn_observer){&w, NULL, NULL};
    assert_int_equal(cairn_simulate(NULL, graph, schedule, 20, &observer, &replay, NULL), CAIRN_OK);
    cairn_schedule_free(schedule);
    cairn_problem_free(graph);
}

static void misuse_is_refused(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL), *other = small_chain(&link);
    cairn_schedule *schedule = test_schedule(chain, "S1");
    cairn_verified *verified = (cairn_verified *)&schedule;
    cairn_replay replay = {.valid = true};
    cairn_error error;
    assert_int_equal(cairn_simulate(NULL, other, schedule, NONE, NULL, &replay, &error), CAIRN_MISMATCH);
    assert_false(replay.valid);
    assert_int_equal(cairn_verify(NULL, other, schedule, NONE, &verified, &replay, &error), CAIRN_MISMATCH);
    assert_null(verified);
    assert_int_equal(cairn_simulate(NULL, chain, schedule, -3, NULL, &replay, &error), CAIRN_BAD_ARGUMENT);
    cairn_verified_free(NULL);
    cairn_schedule_free(schedule);
    cairn_problem_free(chain);
    cairn_problem_free(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_numbers_hold_under_the_recorded_budget),
        cmocka_unit_test(the_machine_of_the_schedule_replaces_that_of_the_problem),
        cmocka_unit_test(an_observer_sees_operations_and_memory),
        cmocka_unit_test(misuse_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
