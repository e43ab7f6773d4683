/*
 * What schedules mean: little ones worked by hand, at least one for each rule of docs/reference/formats/schedule.md and
 * for each violation. test_simulator.c compares many more with a second simulator.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/simulated.h"

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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
