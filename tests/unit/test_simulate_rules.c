/* The simulator refuses what the format's details 7 to 13 forbid, and names the earliest violation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/simulated.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
