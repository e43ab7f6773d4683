/*
 * Small problems, and what the simulator is expected to say of lists of operations on them.
 */
#ifndef TEST_SIMULATED_H
#define TEST_SIMULATED_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/op_text.h"

enum { NONE = CAIRN_NONE };

static inline cairn_replay replay_of(const cairn_problem *problem, const char *text, int64_t budget_bytes)
{
    cairn_schedule *schedule = test_schedule(problem, text);
    cairn_replay replay;
    assert_int_equal(cairn_simulate(NULL, problem, schedule, budget_bytes, NULL, &replay, NULL), CAIRN_OK);
    cairn_schedule_free(schedule);
    return replay;
}

static inline void expect(const cairn_problem *problem, const char *text, int64_t budget_bytes, int64_t makespan_ns,
                          int64_t peak_bytes, int64_t host_peak_bytes)
{
    cairn_replay replay = replay_of(problem, text, budget_bytes);
    if (!replay.valid)
        fail_msg("%s", replay.violation.message);
    assert_int_equal(replay.violation.code, CAIRN_VIOLATION_NONE);
    assert_int_equal(replay.makespan_ns, makespan_ns);
    assert_int_equal(replay.peak_bytes, peak_bytes);
    assert_int_equal(replay.host_peak_bytes, host_peak_bytes);
    assert_int_equal(replay.stall_ns, makespan_ns - replay.compute_ns);
}

static inline void expect_violation(const cairn_problem *problem, const char *text, int64_t budget_bytes,
                                    cairn_violation_code code, int64_t op)
{
    cairn_replay replay = replay_of(problem, text, budget_bytes);
    assert_false(replay.valid);
    assert_string_equal(cairn_violation_name(replay.violation.code), cairn_violation_name(code));
    assert_int_equal(replay.violation.op, op);
    assert_true(strlen(replay.violation.message) > 10);
    assert_int_equal(replay.makespan_ns, CAIRN_NONE);
    assert_int_equal(replay.peak_bytes, CAIRN_NONE);
    assert_int_equal(replay.host_peak_bytes, CAIRN_NONE);
    assert_int_equal(replay.recompute_ns, CAIRN_NONE);
    assert_int_equal(replay.stall_ns, CAIRN_NONE);
    assert_int_equal(replay.compute_ns, CAIRN_NONE);
}

/*
 * a = 1 2 3 4, d = a, A = 10 20 30 (option 1 of stage 1: 5), saving forwards 10 20 30, others 1 2 3, backwards
 * 100 200 300 (option 1 of stage 1: 150), no workspaces. At the start a[0] and d[3] are resident: 5 bytes.
 */
static inline cairn_problem *small_chain(const cairn_machine *machine)
{
    static const cairn_stage_option options[][2] = {{{"keep", 10, 10, 100, 0, 0}, {"part", 5, 15, 150, 0, 0}},
                                                    {{"keep", 20, 20, 200, 0, 0}},
                                                    {{"keep", 30, 30, 300, 0, 0}}};
    static const cairn_stage stages[] = {{"one", 2, 2, 0, 1, 0, false, 2, options[0]},
                                         {"two", 3, 3, 0, 2, 0, false, 1, options[1]},
                                         {"three", 4, 4, 0, 3, 0, false, 1, options[2]}};
    const cairn_chain chain = {1, 1, 3, stages};
    const cairn_problem_info info = {NULL, NULL, 0, machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static inline cairn_problem *chain_of(const cairn_stage *stages, int32_t count, int64_t input_bytes,
                                      const cairn_problem_info *info)
{
    const cairn_chain chain = {input_bytes, input_bytes, count, stages};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, info, &problem, NULL), CAIRN_OK);
    return problem;
}

static inline cairn_problem *graph_of(const cairn_node *nodes, int32_t count, const cairn_machine *machine)
{
    const cairn_graph graph = {count, nodes, -1};
    const cairn_problem_info info = {NULL, NULL, 0, machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

/* A byte takes 1 ns to the host and 2 ns back, each transfer 3 ns more. */
static const cairn_machine link = {1000, 1000000000, 500000000, 3, false};
static const cairn_machine shared_link = {1000, 1000000000, 500000000, 3, true};
static const cairn_machine small_host = {10, 1000000000, 500000000, 3, false};

/* Nodes of 10 bytes that take 5 ns and depend on nothing. */
static const cairn_node loose[] = {{"0", 5, 10, 0, NULL, 0, -1, false, false},
                                   {"1", 5, 10, 0, NULL, 0, -1, false, false},
                                   {"2", 5, 10, 0, NULL, 0, -1, false, false}};

/* Node 0 (10 bytes), its alias 1, the alias 2 of that, node 3 (1 byte) that reads 2; 5 ns each. */
static inline cairn_problem *aliased_graph(const cairn_machine *machine)
{
    static const int32_t two = 2;
    static const cairn_node nodes[] = {{"0", 5, 10, 0, NULL, 0, -1, false, false},
                                       {"1", 5, 0, 0, NULL, 0, 0, false, false},
                                       {"2", 5, 0, 0, NULL, 0, 1, false, false},
                                       {"3", 5, 1, 0, &two, 1, -1, false, false}};
    return graph_of(nodes, 4, machine);
}

#endif
