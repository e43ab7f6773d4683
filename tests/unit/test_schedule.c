/* Builder, schedules and their hashes. What schedules mean is in test_simulate.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/faulty_allocator.h"
#include "support/op_text.h"
#include "support/random_problem.h"

static const cairn_stage_option two_options[] = {{"keep", 5, 3, 7, 0, 0}, {"part", 3, 4, 9, 0, 0}};
static const cairn_stage two_stages[] = {{"one", 2, 2, 0, 3, 0, false, 2, two_options},
                                         {"two", 2, 2, 0, 3, 0, false, 1, two_options}};
static const cairn_machine some_machine = {100, 1000000000, 1000000000, 0, false};

static cairn_problem *two_stage_chain(const cairn_machine *machine)
{
    const cairn_chain chain = {2, 2, 2, two_stages};
    const cairn_problem_info info = {NULL, NULL, 0, machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static cairn_problem *two_node_graph(void)
{
    static const int32_t zero = 0;
    const cairn_node nodes[] = {{"a", 1, 4, 0, NULL, 0, -1, false, false}, {"b", 1, 4, 0, &zero, 1, -1, false, false}};
    const cairn_graph graph = {2, nodes, -1};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

static void names_are_those_of_the_format(void **state)
{
    (void)state;
    assert_string_equal(cairn_op_name(CAIRN_OP_FORWARD_SAVE), "forward_save");
    assert_string_equal(cairn_op_name(CAIRN_OP_DISCARD), "discard");
    assert_null(cairn_op_name(CAIRN_OP_COUNT));
    assert_null(cairn_op_name((cairn_op_code)-1));
    assert_string_equal(cairn_violation_name(CAIRN_VIOLATION_PINNED), "pinned");
    assert_string_equal(cairn_violation_name(CAIRN_VIOLATION_RECORDED_PEAK), "recorded_peak");
    assert_null(cairn_violation_name(CAIRN_VIOLATION_NONE));
    assert_null(cairn_violation_name(CAIRN_VIOLATION_COUNT));
}

static void expect_refused(cairn_builder *builder, cairn_op op)
{
    cairn_error error;
    int64_t count = cairn_builder_count(builder);
    assert_int_equal(cairn_builder_add(builder, op, &error), CAIRN_BAD_INPUT);
    assert_int_equal(error.index, count);
    assert_int_equal(cairn_builder_count(builder), count);
    assert_true(strlen(error.message) > 10);
}

static void a_builder_refuses_what_a_chain_has_not(void **state)
{
    (void)state;
    cairn_problem *problem = two_stage_chain(NULL);
    cairn_builder *builder;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    const cairn_op fine[] = {{CAIRN_OP_FORWARD_SAVE, 0, 1, 1},
                             {CAIRN_OP_DROP, CAIRN_VALUE_OUTPUT, 0, 0},
                             {CAIRN_OP_DISCARD, CAIRN_VALUE_SAVED, 0, 2},
                             {CAIRN_OP_BACKWARD, 0, 0, 2}};
    for (size_t i = 0; i < sizeof(fine) / sizeof(*fine); i++)
        assert_int_equal(cairn_builder_add(builder, fine[i], NULL), CAIRN_OK);
    expect_refused(builder, (cairn_op){CAIRN_OP_COUNT, 0, 0, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_KEEP, 0, 0, 0});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_KEEP, 0, 0, 3});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_KEEP, 0, 0, -1});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_KEEP, 0, 1, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_KEEP, 1, 0, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_SAVE, 0, 2, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_FORWARD_SAVE, 0, 1, 2});
    expect_refused(builder, (cairn_op){CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 0});
    expect_refused(builder, (cairn_op){CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 3});
    expect_refused(builder, (cairn_op){CAIRN_OP_DROP, 2, 0, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 1, 1});
    assert_memory_equal(cairn_builder_ops(builder), fine, sizeof(fine));
    cairn_builder_free(builder);
    cairn_problem_free(problem);
}

static void a_builder_refuses_what_a_graph_has_not(void **state)
{
    (void)state;
    cairn_problem *problem = two_node_graph();
    cairn_builder *builder;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_add(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, 0}, NULL), CAIRN_OK);
    expect_refused(builder, (cairn_op){CAIRN_OP_BACKWARD, 0, 0, 1});
    expect_refused(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, 2});
    expect_refused(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, -1});
    expect_refused(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 1, 0});
    expect_refused(builder, (cairn_op){CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 0});
    cairn_builder_free(builder);
    cairn_problem_free(problem);
}

static void a_builder_grows_truncates_and_empties(void **state)
{
    (void)state;
    cairn_problem *problem = two_stage_chain(NULL);
    cairn_builder *builder;
    cairn_schedule *schedule;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(cairn_builder_add(builder, (cairn_op){CAIRN_OP_BACKWARD, 0, 0, 1 + i % 2}, NULL), CAIRN_OK);
    cairn_builder_truncate(builder, 2000);
    assert_int_equal(cairn_builder_count(builder), 1000);
    cairn_builder_truncate(builder, 999);
    assert_int_equal(cairn_builder_finish(builder, NULL, &schedule, NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_count(builder), 0);
    assert_int_equal(cairn_schedule_count(schedule), 999);
    for (int i = 0; i < 999; i++)
        assert_int_equal(cairn_schedule_ops(schedule)[i].index, 1 + i % 2);
    assert_int_equal(cairn_schedule_kind(schedule), CAIRN_KIND_CHAIN);
    assert_string_equal(cairn_schedule_problem_hash(schedule), cairn_problem_hash(problem));
    assert_int_equal(cairn_schedule_info_of(schedule)->budget_bytes, CAIRN_NONE);
    assert_null(cairn_schedule_info_of(schedule)->solver);
    cairn_builder_free(builder);
    cairn_problem_free(problem);
    cairn_schedule_free(schedule);
    cairn_schedule_free(NULL);
    cairn_builder_free(NULL);
}

static void what_is_recorded_is_copied_and_checked(void **state)
{
    (void)state;
    cairn_problem *problem = two_stage_chain(&some_machine);
    cairn_machine machine = {7, 8, 9, 10, true}, bad = {7, 0, 9, 10, true}, same = some_machine;
    char solver[] = "chain-dp";
    cairn_schedule_info info = {solver, 100, 20, 30, 10, &machine};
    cairn_schedule *schedule = test_schedule_with(problem, "S1", &info);
    memset(solver, 'x', sizeof(solver) - 1);
    machine.host_bytes = 0;
    const cairn_schedule_info *copy = cairn_schedule_info_of(schedule);
    assert_string_equal(copy->solver, "chain-dp");
    assert_int_equal(copy->budget_bytes, 100);
    assert_int_equal(copy->makespan_ns, 20);
    assert_int_equal(copy->peak_bytes, 30);
    assert_int_equal(copy->lower_bound_ns, 10);
    assert_int_equal(copy->machine->host_bytes, 7);
    cairn_schedule_free(schedule);

    info.machine = &same; /* the problem's own is not repeated */
    schedule = test_schedule_with(problem, "S1", &info);
    assert_null(cairn_schedule_info_of(schedule)->machine);
    cairn_schedule_free(schedule);

    cairn_builder *builder;
    cairn_error error;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    info.machine = &bad;
    schedule = (cairn_schedule *)solver;
    assert_int_equal(cairn_builder_finish(builder, &info, &schedule, &error), CAIRN_BAD_INPUT);
    assert_null(schedule);
    assert_string_equal(error.path, "machine.to_host_bytes_per_s");
    info.machine = NULL;
    info.peak_bytes = -7;
    assert_int_equal(cairn_builder_finish(builder, &info, &schedule, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "peak_bytes");
    cairn_builder_free(builder);
    cairn_problem_free(problem);
}

static void expect_hashes(const cairn_problem *problem, const char *text, const cairn_schedule_info *info, bool same)
{
    cairn_schedule *plain = test_schedule(problem, "S1 K2 -a2"), *other = test_schedule_with(problem, text, info);
    bool equal = strcmp(cairn_schedule_hash(plain), cairn_schedule_hash(other)) == 0;
    assert_int_equal(equal, same);
    cairn_schedule_free(plain);
    cairn_schedule_free(other);
}

static void the_hash_is_that_of_problem_machine_and_operations(void **state)
{
    (void)state;
    cairn_problem *problem = two_stage_chain(&some_machine);
    cairn_schedule_info info = CAIRN_SCHEDULE_INFO_INIT;
    info.solver = "any";
    info.makespan_ns = 5;
    expect_hashes(problem, "S1 K2 -a2", &info, true);
    expect_hashes(problem, "S1:1 K2 -a2", NULL, false);
    expect_hashes(problem, "S1 K2 -A2", NULL, false);
    expect_hashes(problem, "S1 K2 -a1", NULL, false);
    expect_hashes(problem, "S1 K2", NULL, false);
    cairn_machine machine = {1, 2, 3, 4, false};
    info.machine = &machine;
    expect_hashes(problem, "S1 K2 -a2", &info, false);
    cairn_schedule *schedule = test_schedule(problem, "S1 K2 -a2");
    assert_string_equal(cairn_schedule_hash(schedule),
                        "sha256:aa4402d9b3a9c0d3d28ddc6bb7dc9427fb51aab74999cd7c14bd3725ea2e54c9");
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

static cairn_status build_and_judge(const cairn_env *env, void *context)
{
    const cairn_problem *problem = context;
    const cairn_schedule_info info = {"name", 100, CAIRN_NONE, 4, CAIRN_NONE, &some_machine};
    const cairn_observer watching = {NULL, NULL, NULL}; /* for the part of the simulator that knows of lanes */
    cairn_builder *builder = NULL;
    cairn_schedule *schedule = NULL;
    cairn_verified *verified = NULL;
    cairn_replay replay = {.valid = false};
    cairn_status status = cairn_builder_new(env, problem, &builder, NULL);
    for (int i = 0; status == CAIRN_OK && i < 100; i++) {
        status = cairn_builder_add(builder, (cairn_op){CAIRN_OP_FORWARD_SAVE, 0, 0, 1}, NULL);
        if (status == CAIRN_OK)
            status = cairn_builder_add(builder, (cairn_op){CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 1}, NULL);
    }
    const cairn_op last[] = {{CAIRN_OP_FORWARD_SAVE, 0, 0, 1},
                             {CAIRN_OP_FORWARD_SAVE, 0, 0, 2},
                             {CAIRN_OP_BACKWARD, 0, 0, 2},
                             {CAIRN_OP_BACKWARD, 0, 0, 1}};
    for (size_t i = 0; status == CAIRN_OK && i < sizeof(last) / sizeof(*last); i++)
        status = cairn_builder_add(builder, last[i], NULL);
    if (status == CAIRN_OK)
        status = cairn_builder_finish(builder, &info, &schedule, NULL);
    assert_true(status == CAIRN_OK || schedule == NULL);
    if (status == CAIRN_OK)
        status = cairn_verify(env, problem, schedule, CAIRN_NONE, &verified, &replay, NULL);
    if (status == CAIRN_OK)
        assert_int_equal(replay.violation.code, CAIRN_VIOLATION_RECORDED_PEAK);
    if (status == CAIRN_OK)
        status = cairn_simulate(env, problem, schedule, CAIRN_NONE, &watching, &replay, NULL);
    assert_true(status == CAIRN_OK || !replay.valid);
    assert_null(verified);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
    cairn_builder_free(builder);
    return status;
}

static cairn_status verify_graph(const cairn_env *env, void *context)
{
    cairn_schedule *schedule = test_schedule(context, "C0 C1");
    cairn_verified *verified;
    cairn_replay replay;
    cairn_status status = cairn_verify(env, context, schedule, 8, &verified, &replay, NULL);
    assert_int_equal(verified != NULL, status == CAIRN_OK);
    assert_int_equal(replay.valid, status == CAIRN_OK);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
    return status;
}

static void everything_survives_every_failing_allocation(void **state)
{
    (void)state;
    cairn_problem *chain = two_stage_chain(NULL), *graph = two_node_graph();
    assert_true(test_every_allocation_fails(build_and_judge, chain) > 10);
    assert_true(test_every_allocation_fails(verify_graph, graph) > 4);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_those_of_the_format),
        cmocka_unit_test(a_builder_refuses_what_a_chain_has_not),
        cmocka_unit_test(a_builder_refuses_what_a_graph_has_not),
        cmocka_unit_test(a_builder_grows_truncates_and_empties),
        cmocka_unit_test(what_is_recorded_is_copied_and_checked),
        cmocka_unit_test(the_hash_is_that_of_problem_machine_and_operations),
        cmocka_unit_test(everything_survives_every_failing_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
