/*
 * Transfers placed by crn_transfer_schedule: the list that comes out is valid, what was found of its makespan is what the
 * simulator says, and a set of waits without which everything fits can be scheduled. Problems, lists and sets are random.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/transfer.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"
#include "support/slow_replay.h"

typedef struct subject {
    uint64_t seed;
    cairn_problem *problem;
    crn_settings settings;
    cairn_env env;
    crn_task task;
    cairn_schedule *base; /* without transfers; may be over the budget */
    crn_transfer *transfer;
    bool *offloaded;
    int64_t *levels;
} subject;

#define check(s, condition)                                                           \
    do {                                                                              \
        if (!(condition))                                                             \
            fail_msg("seed %llu: not %s", (unsigned long long)(s)->seed, #condition); \
    } while (0)

static cairn_problem *problem_of(test_random *random, uint64_t seed)
{
    test_chain_shape chain = test_chain_of_everything((int32_t)(4 + seed % 9));
    test_graph_shape graph = test_graph_of_everything((int32_t)(6 + seed % 20));
    chain.machine = graph.machine = true;
    graph.training = seed % 4 == 1;
    return seed % 2 == 0 ? test_random_chain(random, &chain) : test_random_graph(random, &graph);
}

/* A recompute-only schedule within a random budget: what transfers are added to. */
static void make_base(subject *s, test_random *random)
{
    cairn_options *options;
    cairn_info info;
    cairn_limits limits;
    bool is_chain = cairn_problem_kind_of(s->problem) == CAIRN_KIND_CHAIN;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    cairn_options_set(options, "solver", is_chain ? "chain-dp" : "graph-search", NULL);
    cairn_options_set(options, "iterations", "10", NULL);
    assert_int_equal(cairn_limits_of(NULL, s->problem, options, &limits, NULL), CAIRN_OK);
    if (test_random_chance(random, 30) || limits.least_bytes < 0)
        cairn_options_set(options, "solver", "store-all", NULL), cairn_options_set(options, "budget", "none", NULL);
    else
        cairn_options_set_int(options, "budget",
                              test_random_between(random, limits.least_bytes, limits.store_all_bytes), NULL);
    assert_int_equal(cairn_solve(NULL, s->problem, options, &s->base, &info, NULL), CAIRN_OK);
    cairn_info_clear(&info);
    cairn_options_free(options);
}

static void *must_allocate(size_t count, size_t size)
{
    void *block = calloc(count + 1, size);
    assert_non_null(block);
    return block;
}

static bool begin(subject *s, test_random *random, uint64_t seed)
{
    *s = (subject){.seed = seed, .problem = problem_of(random, seed)};
    make_base(s, random);
    if (!s->base)
        return false;
    s->task = (crn_task){.env = &s->env,
                         .problem = s->problem,
                         .machine = cairn_problem_info_of(s->problem)->machine,
                         .settings = &s->settings,
                         .budget_max_bytes = CAIRN_NONE,
                         .deadline_ns = CAIRN_NONE};
    cairn_status status =
        crn_transfer_new(&s->task, cairn_schedule_ops(s->base), cairn_schedule_count(s->base), &s->transfer, NULL);
    check(s, status == CAIRN_OK || status == CAIRN_UNSUPPORTED);
    if (status != CAIRN_OK)
        return false;
    s->offloaded = must_allocate((size_t)s->transfer->wait_count, sizeof(*s->offloaded));
    s->levels = must_allocate((size_t)s->transfer->event_count, sizeof(*s->levels));
    return true;
}

static void end(subject *s)
{
    free(s->levels);
    free(s->offloaded);
    crn_transfer_free(s->transfer);
    cairn_schedule_free(s->base);
    cairn_problem_free(s->problem);
}

static int64_t highest(const subject *s)
{
    int64_t most = s->transfer->start_bytes;
    crn_transfer_levels(s->transfer, s->offloaded, s->levels);
    for (int32_t e = 0; e < s->transfer->event_count; e++)
        most = crn_max(most, s->levels[e]);
    return most;
}

/* Schedules, and holds what was found against the simulators. */
static int64_t schedule(subject *s, int64_t budget, bool patient)
{
    cairn_builder *builder;
    cairn_replay replay;
    int64_t makespan, again;
    assert_int_equal(cairn_builder_new(NULL, s->problem, &builder, NULL), CAIRN_OK);
    check(s, crn_transfer_schedule(s->transfer, s->offloaded, budget, patient, builder, &makespan, NULL) == CAIRN_OK);
    check(s, crn_transfer_schedule(s->transfer, s->offloaded, budget, patient, NULL, &again, NULL) == CAIRN_OK);
    check(s, makespan == again);
    const cairn_op *ops = cairn_builder_ops(builder);
    int64_t count = cairn_builder_count(builder);
    if (makespan < INT64_MAX) {
        check(s,
              crn_replay(&s->task, ops, count, budget == INT64_MAX ? CAIRN_NONE : budget, &replay, NULL) == CAIRN_OK);
        if (!replay.valid)
            fail_msg("seed %llu: %s", (unsigned long long)s->seed, replay.violation.message);
        check(s, replay.makespan_ns == makespan);
        check(s, replay.host_peak_bytes <= s->task.machine->host_bytes);
        if (count <= 80) {
            cairn_replay slow =
                test_slow_replay(s->problem, s->task.machine, ops, count, budget == INT64_MAX ? CAIRN_NONE : budget);
            check(s, slow.valid && slow.makespan_ns == makespan && slow.peak_bytes == replay.peak_bytes);
        }
    }
    cairn_builder_free(builder);
    return makespan;
}

static int64_t host_needed(const subject *s)
{
    int64_t bytes = 0;
    for (int32_t w = 0; w < s->transfer->wait_count; w++)
        bytes += s->offloaded[w] ? s->transfer->copies[s->transfer->waits[w].copy].bytes : 0;
    return bytes;
}

static void try_sets(subject *s, test_random *random)
{
    for (int percent = 0; percent <= 100; percent += 20) {
        for (int32_t w = 0; w < s->transfer->wait_count; w++)
            s->offloaded[w] = test_random_chance(random, percent);
        int64_t needed = highest(s);
        for (int patient = 0; patient < 2; patient++) {
            schedule(s, INT64_MAX, patient);
            schedule(s, needed + test_random_between(random, 0, 10), patient);
            int64_t exact = schedule(s, needed, patient);
            check(s, exact < INT64_MAX || host_needed(s) > s->task.machine->host_bytes);
            check(s, schedule(s, needed - 1, patient) == INT64_MAX);
        }
    }
}

static void lists_are_valid_and_last_as_long_as_found(void **state)
{
    int64_t tried = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(3000); seed++) {
        test_random random = test_random_seeded(seed);
        subject s;
        if (begin(&s, &random, seed)) {
            try_sets(&s, &random);
            tried++;
        }
        end(&s);
    }
    assert_true(tried > TEST_ROUNDS(2500));
}

/* Without transfers, the levels are the peak, and the time is that of the list as it was. */
static void nothing_is_offloaded(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(500); seed++) {
        test_random random = test_random_seeded(seed + 90000);
        subject s;
        cairn_replay replay;
        if (begin(&s, &random, seed)) {
            check(&s, cairn_simulate(NULL, s.problem, s.base, CAIRN_NONE, NULL, &replay, NULL) == CAIRN_OK);
            check(&s, highest(&s) <= replay.peak_bytes);
            check(&s, cairn_problem_graph(s.problem) || highest(&s) == replay.peak_bytes);
            check(&s, schedule(&s, highest(&s), false) == replay.makespan_ns);
        }
        end(&s);
    }
}

static cairn_status make_once(const cairn_env *env, void *context)
{
    subject s = *(subject *)context;
    crn_transfer *transfer;
    s.task.env = env;
    cairn_status status =
        crn_transfer_new(&s.task, cairn_schedule_ops(s.base), cairn_schedule_count(s.base), &transfer, NULL);
    crn_transfer_free(transfer);
    return status;
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed++) {
        test_random random = test_random_seeded(seed);
        subject s;
        if (begin(&s, &random, seed))
            test_every_allocation_fails(make_once, &s);
        end(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_are_valid_and_last_as_long_as_found),
        cmocka_unit_test(nothing_is_offloaded),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
