/*
 * What schedules mean: little ones worked by hand, at least one for each rule of docs/reference/formats/schedule.md and
 * for each violation. test_simulator.c compares many more with a second simulator.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/op_text.h"

enum { NONE = CAIRN_NONE };

static cairn_replay replay_of(const cairn_problem *problem, const char *text, int64_t budget_bytes)
{
    cairn_schedule *schedule = test_schedule(problem, text);
    cairn_replay replay;
    assert_int_equal(cairn_simulate(NULL, problem, schedule, budget_bytes, NULL, &replay, NULL), CAIRN_OK);
    cairn_schedule_free(schedule);
    return replay;
}

static void expect(const cairn_problem *problem, const char *text, int64_t budget_bytes, int64_t makespan_ns,
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

static void expect_violation(const cairn_problem *problem, const char *text, int64_t budget_bytes,
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
static cairn_problem *small_chain(const cairn_machine *machine)
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

static cairn_problem *chain_of(const cairn_stage *stages, int32_t count, int64_t input_bytes,
                               const cairn_problem_info *info)
{
    const cairn_chain chain = {input_bytes, input_bytes, count, stages};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, info, &problem, NULL), CAIRN_OK);
    return problem;
}

static cairn_problem *graph_of(const cairn_node *nodes, int32_t count, const cairn_machine *machine)
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
static cairn_problem *aliased_graph(const cairn_machine *machine)
{
    static const int32_t two = 2;
    static const cairn_node nodes[] = {{"0", 5, 10, 0, NULL, 0, -1, false, false},
                                       {"1", 5, 0, 0, NULL, 0, 0, false, false},
                                       {"2", 5, 0, 0, NULL, 0, 1, false, false},
                                       {"3", 5, 1, 0, &two, 1, -1, false, false}};
    return graph_of(nodes, 4, machine);
}

/* ---- the table of chain operations ---- */

static void everything_stored(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL);
    /* The third backward runs with 5 + 60 resident and adds d[2]. */
    expect(chain, "S1 S2 S3 B3 B2 B1", 68, 660, 68, 0);
    expect(chain, "S1 S2 S3 B3 B2 B1", NONE, 660, 68, 0);
    expect_violation(chain, "S1 S2 S3 B3 B2 B1", 67, CAIRN_VIOLATION_OVER_BUDGET, 3);
    cairn_problem_free(chain);
}

static void everything_recomputed(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL);
    const char *text = "K1 N2 S3 B3 K1 S2 B2 S1 B1";
    /* 5 at the start, a[2] in place of a[1], A[3], and d[2] while the third backward runs. */
    expect(chain, text, 41, 664, 41, 0);
    assert_int_equal(replay_of(chain, text, NONE).recompute_ns, 1 + 20 + 10);
    assert_int_equal(replay_of(chain, text, NONE).compute_ns, 664);
    cairn_problem_free(chain);
}

static void the_option_decides_size_and_times(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL);
    expect(chain, "S1:1 S2 S3 B3 B2 B1", 63, 15 + 50 + 650, 63, 0);
    cairn_problem_free(chain);
}

static void a_saved_set_and_an_output_are_two_storages(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL);
    expect(chain, "S1 K1 S2 S3 B3 B2 B1", 70, 661, 70, 0);
    /* The second backward removes a[1], which it reads, and leaves A[1]; the last one leaves a[0]. */
    expect(chain, "S1 K1 S2 S3 B3 B2 K1 B1", 70, 662, 70, 0);
    expect_violation(chain, "S1 K1 S2 S3 B3 B2 -a1", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 6);
    expect(chain, "S1 K1 S2 S3 B3 B2 B1 K1", NONE, 662, 70, 0);
    cairn_problem_free(chain);
}

static void workspaces_count_on_top_of_the_result(void **state)
{
    (void)state;
    /* d[0] = a[0] = 4, d[1] = a[1] = 6, A[1] = 10: 10 bytes at the start, 20 between. */
    static const struct {
        int64_t forward, backward, peak, op_at_peak;
    } cases[] = {
        {0, 0, 24, 1},  {5, 0, 25, 0},  {-7, 0, 24, 1},   {0, 9, 33, 1},
        {0, -3, 21, 1}, {0, -4, 20, 0}, {0, -100, 20, 0}, {-100, -100, 20, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        cairn_stage_option option = {"keep", 10, 1, 1, cases[i].forward, cases[i].backward};
        cairn_stage stage = {"one", 6, 6, 0, 1, 50, false, 1, &option};
        cairn_problem *chain = chain_of(&stage, 1, 4, NULL);
        expect(chain, "S1 B1", cases[i].peak, 2, cases[i].peak, 0);
        expect_violation(chain, "S1 B1", cases[i].peak - 1, CAIRN_VIOLATION_OVER_BUDGET, cases[i].op_at_peak);
        expect(chain, "K1 S1 B1", NONE, 3, 66, 0); /* the workspace of a forward that saves nothing is its own */
        cairn_problem_free(chain);
    }
}

static void a_backward_gives_nothing_back_before_it_ends(void **state)
{
    (void)state;
    /* A[1] leaves for the host from 1 to 14, the backward runs from 14 to 114, and only then A[1] fits again. */
    cairn_stage_option option = {"keep", 10, 1, 100, 0, -100};
    cairn_stage stage = {"one", 6, 6, 0, 1, 0, false, 1, &option};
    const cairn_problem_info info = {NULL, NULL, 0, &link};
    cairn_problem *chain = chain_of(&stage, 1, 4, &info);
    expect(chain, "S1 >A1 B1 <A1", 20, 137, 20, 10);
    expect(chain, "S1 >A1 B1 <A1", NONE, 114, 30, 10);
    cairn_problem_free(chain);
}

static void what_is_removed_pays_for_a_negative_workspace(void **state)
{
    (void)state;
    /* a[1] = 6 goes while a[2] = 8 comes: with the workspace of -5 the forward needs 3, not 8. */
    cairn_stage_option option = {"keep", 8, 1, 1, 0, 0};
    cairn_stage stages[] = {{"one", 6, 0, 0, 1, 0, false, 1, &option}, {"two", 8, 0, 0, 1, -5, false, 1, &option}};
    cairn_problem *chain = chain_of(stages, 2, 0, NULL);
    expect(chain, "K1 N2 -a2 S1 S2 B2 B1", NONE, 6, 16, 0);
    expect_violation(chain, "K1 N2", 8, CAIRN_VIOLATION_OVER_BUDGET, 1);
    expect_violation(chain, "K1 N2", 9, CAIRN_VIOLATION_INCOMPLETE, NONE);
    cairn_problem_free(chain);
}

static void weight_gradients_appear_and_stay(void **state)
{
    (void)state;
    cairn_stage_option option = {"keep", 10, 1, 1, 0, 0};
    cairn_stage stages[] = {{"one", 0, 0, 7, 1, 0, false, 1, &option}, {"two", 0, 0, 100, 1, 0, false, 1, &option}};
    const cairn_problem_info info = {NULL, NULL, 1000, NULL};
    cairn_problem *chain = chain_of(stages, 2, 0, &info);
    /* 1000 fixed, 20 saved, 100 from the second backward on, then 7 more while A[1] is still there. */
    expect(chain, "S1 S2 B2 B1", 1120, 4, 1120, 0);
    expect(chain, "S1 S2 B2 B1 S1", 1120, 5, 1120, 0);
    expect(chain, "S1 S2 B2 B1 S1 S2", NONE, 6, 1127, 0);
    cairn_problem_free(chain);
}

/* ---- memory and time: details 1 to 6 ---- */

static void ends_come_before_a_start_and_releases_after_it(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, NULL);
    expect(graph, "C0 -0 C1 -1 C2", 10, 15, 10, 0); /* each goes as the next comes */
    expect(graph, "C0 C1 -0 C2", 20, 15, 20, 0);    /* node 0 goes as node 1 has started */
    expect_violation(graph, "C0 C1 -0 C2", 19, CAIRN_VIOLATION_OVER_BUDGET, 1);
    cairn_problem_free(graph);
}

static void computations_of_no_length_reserve_like_others(void **state)
{
    (void)state;
    static const cairn_node quick[] = {{"0", 0, 10, 7, NULL, 0, -1, false, false},
                                       {"1", 0, 10, 9, NULL, 0, -1, false, false}};
    cairn_problem *graph = graph_of(quick, 2, NULL);
    expect(graph, "C0 -0 C1", 19, 0, 19, 0);
    expect(graph, "C0 C1", 29, 0, 29, 0);
    expect_violation(graph, "C0 C1", 28, CAIRN_VIOLATION_OVER_BUDGET, 1);
    cairn_problem_free(graph);
}

static void a_drop_waits_for_the_last_reader(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, &link);
    /* Node 0 ends at 5 and is on its way to the host from 5 to 18. */
    expect(graph, "C0 >0 -0 C1 C2", NONE, 18, 30, 10);
    expect(graph, "C0 >0 -0 C1 C2", 20, 23, 20, 10);
    expect(graph, "C0 >0 -0 C1 -1 C2", 19, 28, 10, 10);
    expect(graph, "C0 >0 -0 C1 -1 C2", 10, 28, 10, 10);
    cairn_problem_free(graph);
}

static void a_drop_issued_after_a_start_is_not_earlier(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, &link);
    /* Node 1 runs from 5 to 10, the transfer of it from 10; only then node 0 goes, though nobody used it since 5. */
    expect(graph, "C0 C1 >1 -0 C2", 20, 23, 20, 10);
    expect(graph, "C0 C1 -0 >1 C2", 20, 23, 20, 10);
    expect_violation(graph, "C0 C1 >1 C2 -0", 20, CAIRN_VIOLATION_OVER_BUDGET, 3);
    cairn_problem_free(graph);
}

static void a_value_on_its_way_may_be_dropped_and_comes_again(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 2, &link);
    /* To the host 5 to 18; back 18 to 41, dropped at once, so gone at 41; back again 41 to 64. */
    expect(graph, "C0 >0 -0 <0 -0 <0 C1", 20, 64, 20, 10);
    expect(graph, "C0 >0 -0 <0 -0 C1", 10, 46, 10, 10);
    expect(graph, "C0 >0 -0 <0 -0 C1", NONE, 41, 20, 10);
    cairn_problem_free(graph);
}

static void two_returns_at_one_instant_both_come_before_the_start(void **state)
{
    (void)state;
    /*
     * Node 1 leaves for the host while node 2 runs, both from 23 to 33. Node 0 comes back then: it fits when the
     * workspace of node 2 is free, but node 1 has gone by then, too.
     */
    static const cairn_machine prompt = {100, 1000000000, 1000000000, 0, false};
    static const cairn_node nodes[] = {{"0", 3, 20, 0, NULL, 0, -1, false, false},
                                       {"1", 20, 10, 0, NULL, 0, -1, false, false},
                                       {"2", 10, 10, 5, NULL, 0, -1, false, false}};
    cairn_problem *graph = graph_of(nodes, 3, &prompt);
    expect(graph, "C0 >0 -0 C1 >1 -1 C2 <0", 40, 53, 30, 30);
    expect(graph, "C0 >0 -0 C1 >1 -1 C2 <0", NONE, 43, 45, 30);
    cairn_problem_free(graph);
}

static void lanes_run_side_by_side_in_the_order_of_the_list(void **state)
{
    (void)state;
    cairn_problem *two_way = graph_of(loose, 3, &link), *one_way = graph_of(loose, 3, &shared_link);
    /* To the host: node 0 from 5 to 18, node 1 from 18 to 31; back: node 0 from 18 to 41, or, shared, from 31 to 54. */
    expect(two_way, "C0 >0 -0 C1 >1 <0 C2", NONE, 41, 30, 20);
    expect(one_way, "C0 >0 -0 C1 >1 <0 C2", NONE, 54, 30, 20);
    /* The prefetch is earlier in the list and starts at 18; so does what follows it, and nothing before that. */
    expect(two_way, "C0 >0 -0 <0 C1 C2", NONE, 41, 30, 10);
    expect(two_way, "C0 >0 -0 <0 C1 >1 C2", NONE, 41, 30, 20);
    assert_int_equal(replay_of(two_way, "C0 >0 -0 <0 C1 C2", NONE).stall_ns, 41 - 15);
    cairn_problem_free(two_way);
    cairn_problem_free(one_way);
}

static void a_transfer_is_rounded_up_and_takes_the_latency(void **state)
{
    (void)state;
    static const cairn_machine odd = {100, 3000000000, 1, 7, false};
    static const cairn_node nodes[] = {{"0", 0, 10, 0, NULL, 0, -1, false, false},
                                       {"1", 0, 0, 0, NULL, 0, -1, false, false}};
    cairn_problem *graph = graph_of(nodes, 2, &odd);
    expect(graph, "C0 C1 >0", NONE, 7 + 4, 10, 10);
    expect(graph, "C0 C1 >1", NONE, 7, 10, 0);
    expect(graph, "C0 C1 >1 -1 <1", NONE, 14, 10, 0);
    expect(graph, "C0 C1 >0 -0 <0", NONE, 11 + 7 + 10000000000, 10, 10);
    cairn_problem_free(graph);
}

static void a_computation_waits_for_what_it_reads(void **state)
{
    (void)state;
    static const int32_t zero = 0;
    static const cairn_node nodes[] = {{"0", 5, 10, 0, NULL, 0, -1, false, false},
                                       {"1", 5, 10, 0, &zero, 1, -1, false, false}};
    cairn_problem *graph = graph_of(nodes, 2, &link);
    expect(graph, "C0 >0 -0 <0 C1", NONE, 46, 20, 10);
    cairn_problem_free(graph);
    /* An alias reads its base. */
    graph = aliased_graph(&link);
    expect(graph, "C0 >0 -0 <0 C1 C2 C3", NONE, 56, 11, 10);
    cairn_problem_free(graph);
    /* A backward reads its stage's input: a[1] comes from 61 to 1064, while A[1] is there. */
    static const cairn_machine slow = {1000, 1000000000, 2000000, 3, false};
    cairn_problem *chain = small_chain(&slow);
    expect(chain, "S1 K1 >a1 -a1 S2 S3 B3 <a1 B2 B1", NONE, 1064 + 300, 70, 2);
    cairn_problem_free(chain);
}

static void what_removes_waits_for_transfers(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link);
    /*
     * a[1] leaves for the host from 1 to 6; the forward that removes it waits, the one that keeps it does not. It comes
     * back while the third backward runs.
     */
    expect(chain, "K1 >a1 K2 -a1 S3 B3 <a1 S2 B2 S1 B1", NONE, 663, 43, 2);
    expect(chain, "K1 >a1 N2 S3 B3 <a1 S2 B2 S1 B1", NONE, 668, 43, 2);
    /* A[3] leaves from 60 to 93; the backward waits for it. Without the transfer it starts at 60. */
    expect(chain, "S1 S2 S3 >A3 B3 B2 B1", NONE, 93 + 600, 68, 30);
    cairn_problem_free(chain);
}

static void host_memory_waits_and_has_its_own_limit(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, &small_host);
    expect_violation(graph, "C0 C1 C2 >0 >1", NONE, CAIRN_VIOLATION_OVER_HOST_BUDGET, 4);
    /* To the host 10 to 23; back 23 to 46, and only then the host copy is gone: the next goes from 46 to 59. */
    expect(graph, "C0 C1 C2 >0 -0 <0 x0 >1", NONE, 59, 30, 10);
    expect(graph, "C0 C1 C2 >0 x0 >1", NONE, 36, 30, 10);
    cairn_replay replay = replay_of(graph, "C0 C1 C2 >0 >1", NONE);
    assert_int_equal(replay.violation.needed_bytes, 10);
    assert_int_equal(replay.violation.free_bytes, 0);
    cairn_problem_free(graph);
}

static void over_budget_says_what_is_needed_and_free(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, NULL), *chain = small_chain(NULL);
    cairn_replay replay = replay_of(graph, "C0 C1 -0 C2", 15);
    assert_int_equal(replay.violation.op, 1);
    assert_int_equal(replay.violation.needed_bytes, 10);
    assert_int_equal(replay.violation.free_bytes, 5);
    /* What is there from the start counts at operation 0, whatever that is. */
    expect_violation(chain, "S1 S2 S3 B3 B2 B1", 4, CAIRN_VIOLATION_OVER_BUDGET, 0);
    expect_violation(chain, "", 4, CAIRN_VIOLATION_OVER_BUDGET, 0);
    expect_violation(chain, "-a0", 4, CAIRN_VIOLATION_PINNED, 0);
    expect_violation(chain, "", 5, CAIRN_VIOLATION_INCOMPLETE, NONE);
    replay = replay_of(chain, "S1", 4);
    assert_int_equal(replay.violation.needed_bytes, 5);
    assert_int_equal(replay.violation.free_bytes, 4);
    cairn_problem_free(graph);
    cairn_problem_free(chain);
}

static void times_and_sizes_do_not_wrap(void **state)
{
    (void)state;
    const int64_t half = INT64_MAX / 2;
    const cairn_node slow = {"0", half, 1, 0, NULL, 0, -1, false, false};
    const cairn_node nodes[] = {{"0", 0, half, 0, NULL, 0, -1, false, false}, {"1", 0, 0, 0, NULL, 0, 0, false, false}};
    cairn_machine crawl = {INT64_MAX, 1, 1, 0, false};
    cairn_problem *graph = graph_of(&slow, 1, NULL);
    expect(graph, "C0 -0 C0", NONE, INT64_MAX - 1, 1, 0);
    expect_violation(graph, "C0 -0 C0 -0 C0", NONE, CAIRN_VIOLATION_OVERFLOW, 4);
    cairn_problem_free(graph);
    /* Each alias holds another storage of node 0. */
    graph = graph_of(nodes, 2, &crawl);
    expect(graph, "C0 C1 -0 C0", NONE, 0, INT64_MAX - 1, 0);
    expect_violation(graph, "C0 C1 -0 C0 >0", NONE, CAIRN_VIOLATION_OVERFLOW, 4);
    expect_violation(graph, "C0 C1 -0 C0", INT64_MAX - 2, CAIRN_VIOLATION_OVER_BUDGET, 3);
    cairn_problem_free(graph);
    const cairn_node three[] = {{"0", 0, half, 0, NULL, 0, -1, false, false},
                                {"1", 0, 0, 0, NULL, 0, 0, false, false},
                                {"2", 0, 0, 0, NULL, 0, 0, false, false}};
    graph = graph_of(three, 3, NULL);
    expect(graph, "C0 C1 -0 C0 C2", NONE, 0, INT64_MAX - 1, 0);
    expect_violation(graph, "C0 C1 -0 C0 C2 -0 C0", NONE, CAIRN_VIOLATION_OVERFLOW, 6);
    expect_violation(graph, "C0 C1 -0 C0 C2 -0 C0", INT64_MAX, CAIRN_VIOLATION_OVER_BUDGET, 6);
    cairn_problem_free(graph);
}

static void a_list_must_be_complete_and_may_go_on(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL), *graph = graph_of(loose, 3, NULL);
    expect_violation(chain, "S1 S2 S3 B3 B2", NONE, CAIRN_VIOLATION_INCOMPLETE, NONE);
    expect(chain, "S1 S2 S3 B3 B2 B1 S1 K2 -A1", NONE, 672, 68, 0);
    expect_violation(chain, "S1 S2 S3 B3 B2 B1 S1 B1", NONE, CAIRN_VIOLATION_WRONG_ORDER, 7);
    expect_violation(graph, "C0 C1", NONE, CAIRN_VIOLATION_INCOMPLETE, NONE);
    expect(graph, "C0 C1 C2 -0 C0", NONE, 20, 30, 0);
    assert_int_equal(replay_of(graph, "C0 C1 C2 -0 C0", NONE).recompute_ns, 5);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

/* ---- chains: details 7 to 11 ---- */

static void a_stage_reads_the_output_on_its_way_before_the_saved_set(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link);
    /* a[1] is computed by 1, on the host by 6, back by 13; A[1] is computed from 1 to 11. */
    expect_violation(chain, "K1 >a1 -a1 S1 <a1 K2", NONE, CAIRN_VIOLATION_INCOMPLETE, NONE);
    expect(chain, "K1 >a1 -a1 S1 <a1 S2 S3 B3 B2 B1", NONE, 13 + 50 + 600, 70, 2);
    expect(chain, "K1 >a1 -a1 S1 S2 S3 B3 B2 B1", NONE, 661, 68, 2);
    cairn_problem_free(chain);
}

static void a_backward_takes_the_current_gradient(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link);
    expect_violation(chain, "S1 S2 S3 B2", NONE, CAIRN_VIOLATION_WRONG_ORDER, 3);
    expect_violation(chain, "S1 S2 S3 B3 B3", NONE, CAIRN_VIOLATION_WRONG_ORDER, 4);
    expect_violation(chain, "B1", NONE, CAIRN_VIOLATION_WRONG_ORDER, 0);
    expect_violation(chain, "S1 S2 B3", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 2);
    expect_violation(chain, "S1 S2 K2 S3 -A2 >a2 -a2 B3", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 7);
    /* A host copy is not removed with the backward; A[2] may stay without its input once its backward is issued. */
    expect(chain, "S1 S2 S3 >A2 B3 B2 -A1 S1 B1 xA2", NONE, 670, 68, 20);
    cairn_problem_free(chain);
}

static void the_input_is_pinned(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL);
    expect_violation(chain, "-a0", NONE, CAIRN_VIOLATION_PINNED, 0);
    expect_violation(chain, ">a0", NONE, CAIRN_VIOLATION_PINNED, 0);
    expect_violation(chain, "<a0", NONE, CAIRN_VIOLATION_PINNED, 0);
    expect_violation(chain, "N1", NONE, CAIRN_VIOLATION_PINNED, 0);
    expect_violation(chain, "xa0", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 0);
    cairn_problem_free(chain);
}

static void a_saved_set_keeps_its_input(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link);
    expect_violation(chain, "K1 S2 -a1", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 2);
    expect_violation(chain, "S1 S2 -A1", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 2);
    expect_violation(chain, "K1 S2 N2", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 2);
    expect_violation(chain, "K1 S2 >A2 -A2 -a1", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 4);
    expect_violation(chain, "K1 S2 >a1 -a1 xa1", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 4);
    expect_violation(chain, "K1 S2 S1 -a1 -A1", NONE, CAIRN_VIOLATION_INPUT_NEEDED, 4);
    expect_violation(chain, "K1 S2 >A2 -A2 xA2 -a1", NONE, CAIRN_VIOLATION_INCOMPLETE, NONE);
    expect_violation(chain, "K1 S2 >a1 N2 xA1", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 4);
    expect_violation(chain, "S1 K1 S2 N2 -a2", NONE, CAIRN_VIOLATION_INCOMPLETE, NONE);
    cairn_problem_free(chain);
}

static void nothing_is_made_where_it_is(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link), *graph = graph_of(loose, 3, &link);
    expect_violation(chain, "S1 S1:1", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 1);
    expect_violation(chain, "K1 K1", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 1);
    expect_violation(chain, "K1 K2 N2", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 2);
    expect_violation(chain, "K1 >a1 <a1", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 2);
    expect_violation(chain, "K1 >a1 >a1", NONE, CAIRN_VIOLATION_ALREADY_ON_HOST, 2);
    expect_violation(chain, "K1 >a1 -a1 >a1", NONE, CAIRN_VIOLATION_ALREADY_ON_HOST, 3);
    expect_violation(graph, "C0 C0", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 1);
    expect_violation(graph, "C0 <0", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 1);
    expect_violation(graph, "C0 >0 >0", NONE, CAIRN_VIOLATION_ALREADY_ON_HOST, 2);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

static void nothing_is_used_where_it_is_not(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link), *graph = graph_of(loose, 3, &link);
    expect_violation(chain, "K2", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 0);
    expect_violation(chain, "S1 N2", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 1); /* it reads a[1], not A[1] */
    expect_violation(chain, "S1 -a1", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 1);
    expect_violation(chain, "S1 >a1", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 1);
    expect_violation(chain, "S1 <a1", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 1);
    expect_violation(chain, "S1 xA1", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 1);
    expect_violation(graph, "-0", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 0);
    expect_violation(graph, "C0 -0 >0", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 2);
    expect_violation(graph, "C0 -0 <0", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 2);
    expect_violation(graph, "C0 x0", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 1);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

static void each_copy_keeps_its_own_option(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(&link);
    /* Option 1 (5 bytes) goes to the host from 15 to 23, while the stage is run again with option 0. */
    expect(chain, "S1:1 >A1 -A1 S1 S2 S3 B3 B2 B1", NONE, 15 + 60 + 600, 68, 5);
    /* The other way round: option 0 waits on the host, option 1 is dropped, and the backward is that of option 0. */
    expect(chain, "S1 >A1 S2 S3 B3 B2 -A1 S1:1 -A1 <A1 xA1 B1", NONE, 560 + 23 + 100, 68, 10);
    expect(chain, "S1:1 >A1 S2 S3 B3 B2 -A1 <A1 xA1 B1", NONE, 565 + 150, 63, 5);
    cairn_problem_free(chain);
}

static void what_must_not_run_twice_runs_once(void **state)
{
    (void)state;
    cairn_stage_option option = {"keep", 1, 1, 1, 0, 0};
    cairn_stage stages[] = {{"one", 1, 1, 0, 1, 0, false, 1, &option}, {"two", 1, 1, 0, 1, 0, true, 1, &option}};
    cairn_problem *chain = chain_of(stages, 2, 1, NULL);
    cairn_node once = loose[0];
    once.no_recompute = true;
    cairn_problem *graph = graph_of(&once, 1, NULL);
    expect(chain, "S1 S2 B2 B1", NONE, 4, 5, 0);
    expect_violation(chain, "K1 K2", NONE, CAIRN_VIOLATION_RECOMPUTED, 1);
    expect_violation(chain, "K1 N2", NONE, CAIRN_VIOLATION_RECOMPUTED, 1);
    expect_violation(chain, "S1 S2 -A2 S2", NONE, CAIRN_VIOLATION_RECOMPUTED, 3);
    expect_violation(graph, "C0 -0 C0", NONE, CAIRN_VIOLATION_RECOMPUTED, 2);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

/* ---- graphs: details 12 and 13 ---- */

static void storage_comes_back_with_the_last_alias(void **state)
{
    (void)state;
    cairn_problem *graph = aliased_graph(&link);
    expect(graph, "C0 C1 C2 C3", NONE, 20, 11, 0);
    expect(graph, "C0 C1 C2 -0 -1 C3 -2 C0", 11, 25, 11, 0);
    expect_violation(graph, "C0 C1 C2 -1 -2 C0", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 5);
    expect_violation(graph, "C0 C1 C2 -0 -1 C3 C0", 11, CAIRN_VIOLATION_OVER_BUDGET, 6);
    expect(graph, "C0 C1 C2 -0 -1 C3 C0", NONE, 25, 21, 0); /* a storage of its own beside the old one */
    /* Alias 2 of alias 1 is made from the old storage, and holds it. */
    expect(graph, "C0 C1 -0 C0 C2 -1 C3", NONE, 25, 21, 0);
    expect(graph, "C0 C1 -0 C0 C2 -1 -0 C3 C0", NONE, 30, 21, 0);
    expect_violation(graph, "C0 C1 C2 -1 C3 -2 C2", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 6);
    expect_violation(graph, "C0 C1 -0 -1 C1", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 4);
    cairn_problem_free(graph);
}

static void a_shared_storage_waits_for_readers_of_all_its_holders(void **state)
{
    (void)state;
    cairn_problem *graph = aliased_graph(&link);
    /* The base is on its way to the host from 5 to 18 when it is dropped, and then its aliases. */
    expect(graph, "C0 >0 C1 -0 C2 -1 C3 -2 C0", 11, 25, 11, 10);
    expect(graph, "C0 >0 C1 C2 C3 -0 -1 -2 C0", 11, 25, 11, 10);
    static const cairn_machine slow = {1000, 100000000, 100000000, 0, false};
    cairn_problem *slow_graph = aliased_graph(&slow); /* from 5 to 105 */
    expect(slow_graph, "C0 >0 C1 -0 C2 -1 C3 -2 C0", 11, 110, 11, 10);
    cairn_problem_free(graph);
    cairn_problem_free(slow_graph);
}

static void aliases_are_not_moved(void **state)
{
    (void)state;
    cairn_problem *graph = aliased_graph(&link), *still = aliased_graph(NULL);
    expect_violation(graph, "C0 C1 >1", NONE, CAIRN_VIOLATION_ALIAS_MOVED, 2);
    expect_violation(graph, "C0 C1 <1", NONE, CAIRN_VIOLATION_ALIAS_MOVED, 2);
    expect_violation(still, "C0 C1 >1", NONE, CAIRN_VIOLATION_ALIAS_MOVED, 2);
    expect_violation(still, "C0 C1 >0", NONE, CAIRN_VIOLATION_NO_MACHINE, 2);
    expect_violation(still, "C0 C1 <0", NONE, CAIRN_VIOLATION_NO_MACHINE, 2);
    expect_violation(still, "C0 C1 x0", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 2);
    expect_violation(graph, "C0 C1 x1", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 2);
    /* The base comes back to a storage of its own while an alias holds the old one. */
    expect(graph, "C0 C1 C2 C3 >0 -0 <0", NONE, 15 + 13 + 23, 21, 10);
    cairn_problem_free(graph);
    cairn_problem_free(still);
}

static void of_a_kept_node_one_copy_exists(void **state)
{
    (void)state;
    static const cairn_node nodes[] = {{"0", 5, 10, 0, NULL, 0, -1, true, false},
                                       {"1", 5, 0, 0, NULL, 0, 0, true, false}};
    cairn_problem *graph = graph_of(nodes, 2, &link);
    expect_violation(graph, "C0 C1 -0", NONE, CAIRN_VIOLATION_KEEP_DROPPED, 2);
    expect_violation(graph, "C0 C1 -1", NONE, CAIRN_VIOLATION_KEEP_DROPPED, 2);
    expect_violation(graph, "C0 C1 >0 -0 x0", NONE, CAIRN_VIOLATION_KEEP_DROPPED, 4);
    expect_violation(graph, "C0 C1 >0 -0 -1", NONE, CAIRN_VIOLATION_KEEP_DROPPED, 4);
    expect_violation(graph, "C0 C1 >0 -0 -0", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 4);
    expect_violation(graph, "-0", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 0);
    expect(graph, "C0 C1 >0 -0", NONE, 18, 10, 10);
    expect(graph, "C0 C1 >0 -0 C0 x0", NONE, 18, 20, 10); /* the kept alias pins the old storage */
    cairn_problem_free(graph);
}

static void first_computations_do_not_overtake(void **state)
{
    (void)state;
    cairn_problem *graph = graph_of(loose, 3, NULL);
    expect_violation(graph, "C1", NONE, CAIRN_VIOLATION_WRONG_ORDER, 0);
    expect_violation(graph, "C0 C2", NONE, CAIRN_VIOLATION_WRONG_ORDER, 1);
    expect(graph, "C0 C1 -0 C0 C2", NONE, 20, 30, 0);
    cairn_problem_free(graph);
}

static void a_negative_workspace_of_a_node_acts_as_none(void **state)
{
    (void)state;
    cairn_node node = loose[0];
    node.workspace_bytes = -4;
    cairn_problem *graph = graph_of(&node, 1, NULL);
    expect(graph, "C0", 10, 5, 10, 0);
    cairn_problem_free(graph);
}

/* ---- precedence ---- */

static void of_several_violations_the_earliest_is_named(void **state)
{
    (void)state;
    cairn_problem *chain = small_chain(NULL), *linked = small_chain(&link);
    expect_violation(chain, ">a0", NONE, CAIRN_VIOLATION_PINNED, 0);     /* no machine either */
    expect_violation(chain, ">a1", NONE, CAIRN_VIOLATION_NO_MACHINE, 0); /* nor resident */
    expect_violation(linked, "K1 >a1 <a2", NONE, CAIRN_VIOLATION_NOT_ON_HOST, 2);
    expect_violation(linked, "K1 >a1 <a1", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 2);
    expect_violation(linked, "K1 >a1 -a1 >a1", NONE, CAIRN_VIOLATION_ALREADY_ON_HOST, 3); /* nor resident */
    expect_violation(linked, "B2", 4, CAIRN_VIOLATION_WRONG_ORDER, 0);                   /* nor resident, over budget */
    expect_violation(linked, "K1 K2 -a1 N2", NONE, CAIRN_VIOLATION_ALREADY_RESIDENT, 3); /* input gone as well */
    expect_violation(linked, "S1 S2 >A1 -A1 N2", NONE, CAIRN_VIOLATION_NOT_RESIDENT, 4);
    expect_violation(linked, "K1 S2 -a1", 27, CAIRN_VIOLATION_INPUT_NEEDED, 2);
    expect_violation(linked, "K1 S2 -a1", 26, CAIRN_VIOLATION_OVER_BUDGET, 1); /* the first operation at fault */
    static const cairn_node kept[] = {{"0", 5, 10, 0, NULL, 0, -1, true, true},
                                      {"1", 5, 10, 0, NULL, 0, -1, false, false}};
    cairn_problem *graph = graph_of(kept, 2, NULL);
    expect_violation(graph, "C0 C0", NONE, CAIRN_VIOLATION_RECOMPUTED, 1); /* and resident */
    cairn_problem_free(graph);
    cairn_problem_free(chain);
    cairn_problem_free(linked);
}

/* ---- recorded numbers, machines, observers, misuse ---- */

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
        cmocka_unit_test(everything_stored),
        cmocka_unit_test(everything_recomputed),
        cmocka_unit_test(the_option_decides_size_and_times),
        cmocka_unit_test(a_saved_set_and_an_output_are_two_storages),
        cmocka_unit_test(workspaces_count_on_top_of_the_result),
        cmocka_unit_test(a_backward_gives_nothing_back_before_it_ends),
        cmocka_unit_test(what_is_removed_pays_for_a_negative_workspace),
        cmocka_unit_test(weight_gradients_appear_and_stay),
        cmocka_unit_test(ends_come_before_a_start_and_releases_after_it),
        cmocka_unit_test(computations_of_no_length_reserve_like_others),
        cmocka_unit_test(a_drop_waits_for_the_last_reader),
        cmocka_unit_test(a_drop_issued_after_a_start_is_not_earlier),
        cmocka_unit_test(a_value_on_its_way_may_be_dropped_and_comes_again),
        cmocka_unit_test(two_returns_at_one_instant_both_come_before_the_start),
        cmocka_unit_test(lanes_run_side_by_side_in_the_order_of_the_list),
        cmocka_unit_test(a_transfer_is_rounded_up_and_takes_the_latency),
        cmocka_unit_test(a_computation_waits_for_what_it_reads),
        cmocka_unit_test(what_removes_waits_for_transfers),
        cmocka_unit_test(host_memory_waits_and_has_its_own_limit),
        cmocka_unit_test(over_budget_says_what_is_needed_and_free),
        cmocka_unit_test(times_and_sizes_do_not_wrap),
        cmocka_unit_test(a_list_must_be_complete_and_may_go_on),
        cmocka_unit_test(a_stage_reads_the_output_on_its_way_before_the_saved_set),
        cmocka_unit_test(a_backward_takes_the_current_gradient),
        cmocka_unit_test(the_input_is_pinned),
        cmocka_unit_test(a_saved_set_keeps_its_input),
        cmocka_unit_test(nothing_is_made_where_it_is),
        cmocka_unit_test(nothing_is_used_where_it_is_not),
        cmocka_unit_test(each_copy_keeps_its_own_option),
        cmocka_unit_test(what_must_not_run_twice_runs_once),
        cmocka_unit_test(storage_comes_back_with_the_last_alias),
        cmocka_unit_test(a_shared_storage_waits_for_readers_of_all_its_holders),
        cmocka_unit_test(aliases_are_not_moved),
        cmocka_unit_test(of_a_kept_node_one_copy_exists),
        cmocka_unit_test(first_computations_do_not_overtake),
        cmocka_unit_test(a_negative_workspace_of_a_node_acts_as_none),
        cmocka_unit_test(of_several_violations_the_earliest_is_named),
        cmocka_unit_test(recorded_numbers_hold_under_the_recorded_budget),
        cmocka_unit_test(the_machine_of_the_schedule_replaces_that_of_the_problem),
        cmocka_unit_test(an_observer_sees_operations_and_memory),
        cmocka_unit_test(misuse_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
