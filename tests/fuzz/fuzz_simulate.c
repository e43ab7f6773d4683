/*
 * A small problem and a list of operations from the same bytes. The simulator's answer is repeatable and consistent:
 * with itself, with what an observer sees, and between budgets.
 */
#include <cairn/schedule.h>
#include <string.h>

#include "fuzz_check.h"
#include "support/random_problem.h"

enum { OPS_MAX = 60 };

static cairn_problem *problem_of(test_random *random)
{
    if (test_random_chance(random, 50)) {
        test_graph_shape shape = test_graph_of_everything(8);
        shape.machine = test_random_chance(random, 50);
        return test_random_graph(random, &shape);
    }
    test_chain_shape shape = test_chain_of_everything(5);
    shape.machine = test_random_chance(random, 50);
    return test_random_chain(random, &shape);
}

static cairn_op random_op(test_random *random, const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    cairn_op op = {0};
    if (!chain) {
        op.index = (int32_t)test_random_between(random, 0, cairn_problem_graph(problem)->node_count - 1);
        op.code = (uint8_t)test_random_between(random, CAIRN_OP_COMPUTE, CAIRN_OP_COUNT - 1);
        return op;
    }
    op.index = (int32_t)test_random_between(random, 0, chain->stage_count);
    op.code = (uint8_t)test_random_between(random, 0, CAIRN_OP_COUNT - 1);
    op.value = op.code > CAIRN_OP_COMPUTE ? (uint8_t)test_random_between(random, 0, 1) : 0;
    op.option = op.code == CAIRN_OP_FORWARD_SAVE ? (uint16_t)test_random_between(random, 0, 2) : 0;
    return op;
}

/* The sensible list that runs everything once, so that changes to it reach deep: forwards, then backwards. */
static void add_store_all(cairn_builder *builder, const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    if (chain) {
        for (int32_t l = 1; l <= chain->stage_count; l++)
            (void)cairn_builder_add(builder, (cairn_op){CAIRN_OP_FORWARD_SAVE, 0, 0, l}, NULL);
        for (int32_t l = chain->stage_count; l >= 1; l--)
            (void)cairn_builder_add(builder, (cairn_op){CAIRN_OP_BACKWARD, 0, 0, l}, NULL);
    } else {
        for (int32_t v = 0; v < cairn_problem_graph(problem)->node_count; v++)
            (void)cairn_builder_add(builder, (cairn_op){CAIRN_OP_COMPUTE, 0, 0, v}, NULL);
    }
}

/* Operations that the builder refuses (of the other kind, out of range) are part of the game. */
static cairn_schedule *schedule_of(test_random *random, const cairn_problem *problem)
{
    cairn_builder *plain, *builder;
    cairn_schedule *schedule;
    FUZZ_CHECK(cairn_builder_new(NULL, problem, &plain, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_builder_new(NULL, problem, &builder, NULL) == CAIRN_OK);
    add_store_all(plain, problem);
    for (int64_t i = 0; i < cairn_builder_count(plain); i++) {
        while (test_random_chance(random, 30) && cairn_builder_count(builder) < OPS_MAX)
            (void)cairn_builder_add(builder, random_op(random, problem), NULL);
        if (!test_random_chance(random, 10))
            FUZZ_CHECK(cairn_builder_add(builder, cairn_builder_ops(plain)[i], NULL) == CAIRN_OK);
    }
    FUZZ_CHECK(cairn_builder_finish(builder, NULL, &schedule, NULL) == CAIRN_OK);
    cairn_builder_free(builder);
    cairn_builder_free(plain);
    return schedule;
}

typedef struct watch {
    int64_t peak_bytes, host_peak_bytes, end_ns, last_start_ns, last_time_ns;
} watch;

static void watch_op(void *context, int64_t position, cairn_op op, cairn_lane lane, int64_t start_ns, int64_t end_ns)
{
    watch *w = context;
    (void)position;
    (void)op;
    (void)lane;
    FUZZ_CHECK(start_ns >= w->last_start_ns && end_ns >= start_ns);
    w->last_start_ns = start_ns;
    w->end_ns = end_ns > w->end_ns ? end_ns : w->end_ns;
}

static void watch_memory(void *context, int64_t time_ns, int64_t device_bytes, int64_t host_bytes)
{
    watch *w = context;
    FUZZ_CHECK(time_ns >= w->last_time_ns && device_bytes >= 0 && host_bytes >= 0);
    w->last_time_ns = time_ns;
    w->peak_bytes = device_bytes > w->peak_bytes ? device_bytes : w->peak_bytes;
    w->host_peak_bytes = host_bytes > w->host_peak_bytes ? host_bytes : w->host_peak_bytes;
}

static cairn_replay judge(const cairn_problem *problem, const cairn_schedule *schedule, int64_t budget_bytes)
{
    watch w = {0};
    const cairn_observer observer = {&w, watch_op, watch_memory};
    cairn_replay replay, again;
    FUZZ_CHECK(cairn_simulate(NULL, problem, schedule, budget_bytes, &observer, &replay, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_simulate(NULL, problem, schedule, budget_bytes, NULL, &again, NULL) == CAIRN_OK);
    FUZZ_CHECK(replay.valid == again.valid && replay.violation.code == again.violation.code &&
               replay.violation.op == again.violation.op && replay.makespan_ns == again.makespan_ns);
    FUZZ_CHECK(replay.valid == (replay.violation.code == CAIRN_VIOLATION_NONE));
    if (replay.valid) {
        FUZZ_CHECK(replay.makespan_ns == w.end_ns && replay.peak_bytes == w.peak_bytes);
        FUZZ_CHECK(replay.host_peak_bytes == w.host_peak_bytes);
        FUZZ_CHECK(replay.stall_ns == replay.makespan_ns - replay.compute_ns && replay.stall_ns >= 0);
        FUZZ_CHECK(replay.recompute_ns >= 0 && replay.recompute_ns <= replay.compute_ns);
        FUZZ_CHECK(budget_bytes == CAIRN_NONE || replay.peak_bytes <= budget_bytes);
    } else {
        FUZZ_CHECK(replay.makespan_ns == CAIRN_NONE && replay.peak_bytes == CAIRN_NONE);
        FUZZ_CHECK(replay.violation.message[0] != '\0');
    }
    return replay;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    test_random random = test_random_from_bytes(data, size);
    cairn_problem *problem = problem_of(&random);
    cairn_schedule *schedule = schedule_of(&random, problem);
    cairn_replay free_run = judge(problem, schedule, CAIRN_NONE);
    if (free_run.valid) {
        /* Its own peak is enough, and then nothing waits; a byte less either waits or fails. */
        cairn_replay exact = judge(problem, schedule, free_run.peak_bytes);
        FUZZ_CHECK(exact.valid && exact.makespan_ns == free_run.makespan_ns);
        cairn_replay tight = judge(problem, schedule, free_run.peak_bytes - 1);
        FUZZ_CHECK(!tight.valid || tight.makespan_ns >= free_run.makespan_ns);
        FUZZ_CHECK(tight.valid || tight.violation.code == CAIRN_VIOLATION_OVER_BUDGET ||
                   tight.violation.code == CAIRN_VIOLATION_OVER_HOST_BUDGET);
    }
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
    return 0;
}
