/*
 * Cuts of random chains into segments: what they are judged to be is what the simulator says of their schedule, with
 * everything that the format allows, and where times are nearly too long to be counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "solve/chain/cuts.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { CHAINS = TEST_ROUNDS(4000), STAGES = 12 };

/* Ends at random, some of the segments stored. */
static void cut(test_random *random, crn_cuts *cuts)
{
    int32_t n = cuts->model->n;
    cuts->count = 0;
    for (int32_t l = 1; l <= n; l++) {
        if (l < n && test_random_between(random, 0, 2) > 0)
            continue;
        cuts->kept[cuts->count] = test_random_between(random, 0, 2) == 0;
        cuts->ends[cuts->count++] = l;
    }
}

static void check(const crn_task *task, const crn_cuts *cuts)
{
    cairn_builder *builder;
    cairn_replay replay;
    int64_t peak_bytes, makespan_ns;
    assert_int_equal(cairn_builder_new(NULL, task->problem, &builder, NULL), CAIRN_OK);
    assert_int_equal(crn_cuts_emit(cuts, builder, NULL), CAIRN_OK);
    assert_int_equal(
        crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, NULL),
        CAIRN_OK);
    crn_cuts_judge(cuts, &peak_bytes, &makespan_ns);
    assert_true(replay.valid);
    assert_int_equal(peak_bytes, replay.peak_bytes);
    assert_int_equal(makespan_ns, replay.makespan_ns);
    cairn_builder_free(builder);
}

static void check_chain(test_random *random, cairn_problem *problem)
{
    int32_t ends[STAGES];
    bool kept[STAGES];
    crn_chain_model model;
    const crn_task task = {.problem = problem, .machine = cairn_problem_info_of(problem)->machine};
    assert_int_equal(crn_chain_model_init(&model, &task, NULL), CAIRN_OK);
    crn_cuts cuts = {.model = &model, .ends = ends, .kept = kept};
    for (int i = 0; i < 4; i++) {
        cut(random, &cuts);
        check(&task, &cuts);
    }
    crn_chain_model_clear(&model);
    cairn_problem_free(problem);
}

static void are_judged_as_by_the_simulator(void **state)
{
    const test_chain_shape shape = test_chain_of_everything(STAGES);
    (void)state;
    for (int i = 0; i < CHAINS; i++) {
        test_random random = test_random_seeded(7100 + (uint64_t)i);
        check_chain(&random, test_random_chain(&random, &shape));
    }
}

static void may_take_as_long_as_can_be_counted(void **state)
{
    const test_chain_shape shape = {.stages_min = 2, .stages_max = STAGES, .ns_max = INT64_MAX / (3 * STAGES)};
    (void)state;
    for (int i = 0; i < CHAINS / 4; i++) {
        test_random random = test_random_seeded(7200 + (uint64_t)i);
        check_chain(&random, test_random_chain(&random, &shape));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(are_judged_as_by_the_simulator),
        cmocka_unit_test(may_take_as_long_as_can_be_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
