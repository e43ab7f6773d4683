/*
 * Running schedules through callbacks: a little machine checks that every value that an operation reads is there, that
 * nothing is freed twice, and that the memory in use is what the simulator says. And the online mode: its guarantee.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/random_problem.h"
#include "support/rounds.h"

enum { STAGES_MAX = 16 };

typedef struct device {
    const cairn_chain *chain;
    int64_t used_bytes, peak_bytes; /* of values, workspaces not counted */
    bool there[2][STAGES_MAX + 1], on_host[2][STAGES_MAX + 1];
    uint16_t option[STAGES_MAX + 1];
    int32_t gradient, calls, fail_at;
} device;

static int64_t size_of(const device *d, int32_t l, int value)
{
    if (l == 0)
        return d->chain->input_bytes;
    const cairn_stage *stage = &d->chain->stages[l - 1];
    return value == CAIRN_VALUE_OUTPUT ? stage->output_bytes : stage->options[d->option[l]].saved_bytes;
}

static void put(device *d, int32_t l, int value)
{
    assert_false(d->there[value][l]);
    d->there[value][l] = true;
    d->used_bytes += size_of(d, l, value);
    d->peak_bytes = d->used_bytes > d->peak_bytes ? d->used_bytes : d->peak_bytes;
}

static void take(device *d, int32_t l, int value)
{
    assert_true(d->there[value][l]);
    d->there[value][l] = false;
    d->used_bytes -= size_of(d, l, value);
}

static bool has_input(const device *d, int32_t l)
{
    return d->there[CAIRN_VALUE_OUTPUT][l - 1] || (l > 1 && d->there[CAIRN_VALUE_SAVED][l - 1]);
}

static int counted(device *d)
{
    return ++d->calls == d->fail_at ? 7 : 0;
}

static int on_forward(void *context, int32_t l, int32_t option, bool save, bool drop_input)
{
    device *d = context;
    assert_true(has_input(d, l));
    if (save)
        d->option[l] = (uint16_t)option;
    put(d, l, save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT);
    if (drop_input)
        take(d, l - 1, CAIRN_VALUE_OUTPUT);
    return counted(d);
}

static int on_backward(void *context, int32_t l, int32_t option, bool free_input)
{
    device *d = context;
    assert_int_equal(d->gradient, l);
    assert_int_equal(d->option[l], option);
    assert_true(has_input(d, l));
    take(d, l, CAIRN_VALUE_SAVED);
    assert_int_equal(free_input, l > 1 && d->there[CAIRN_VALUE_OUTPUT][l - 1]);
    if (free_input)
        take(d, l - 1, CAIRN_VALUE_OUTPUT);
    d->gradient = l - 1;
    return counted(d);
}

static int on_drop(void *context, int32_t l, cairn_value value)
{
    take(context, l, (int)value);
    return counted(context);
}

static const cairn_exec_callbacks without_transfers = {NULL, on_forward, on_backward, on_drop, NULL, NULL, NULL, NULL};

static cairn_verified *solve(const cairn_problem *problem, const char *solver, const char *budget,
                             cairn_schedule **schedule)
{
    cairn_options *options;
    cairn_verified *verified = NULL;
    cairn_replay replay;
    cairn_info info;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "budget", budget, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "solver", solver, NULL), CAIRN_OK);
    assert_int_equal(cairn_solve(NULL, problem, options, schedule, &info, NULL), CAIRN_OK);
    if (*schedule)
        assert_int_equal(cairn_verify(NULL, problem, *schedule, CAIRN_RECORDED, &verified, &replay, NULL), CAIRN_OK);
    cairn_options_free(options);
    return verified;
}

static void run(const cairn_problem *problem, const cairn_verified *verified)
{
    device d = {.chain = cairn_problem_chain(problem)};
    cairn_exec_callbacks callbacks = without_transfers;
    cairn_error error;
    callbacks.context = &d;
    d.gradient = d.chain->stage_count;
    put(&d, 0, CAIRN_VALUE_OUTPUT);
    assert_int_equal(cairn_exec_run(NULL, verified, &callbacks, &error), CAIRN_OK);
    assert_int_equal(d.gradient, 0);
    assert_true(d.peak_bytes <= cairn_verified_replay(verified)->peak_bytes);

    int32_t calls = d.calls;
    for (int32_t at = 1; at <= calls; at++) { /* a failure at any call ends the run there */
        d = (device){.chain = d.chain, .gradient = d.chain->stage_count, .fail_at = at};
        put(&d, 0, CAIRN_VALUE_OUTPUT);
        assert_int_equal(cairn_exec_run(NULL, verified, &callbacks, &error), CAIRN_CALLBACK);
        assert_int_equal(d.calls, at);
        assert_int_equal(error.index, at - 1);
    }
}

static void schedules_run_through_callbacks(void **state)
{
    (void)state;
    static const char *const solvers[] = {"store-all", "auto"};
    test_chain_shape shape = test_chain_of_everything(STAGES_MAX);
    shape.machine = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(100); seed++)
        for (int i = 0; i < 2; i++) {
            test_random random = test_random_seeded(seed);
            cairn_problem *problem = test_random_chain(&random, &shape);
            cairn_schedule *schedule = NULL;
            cairn_verified *verified = solve(problem, solvers[i], "none", &schedule);
            assert_non_null(verified);
            run(problem, verified);
            cairn_verified_free(verified);
            cairn_schedule_free(schedule);
            cairn_problem_free(problem);
        }
}

/*
 * A machine of three lanes, each of which does what it is called for in order, as streams do. What is waited for holds up
 * what is called next. Values that are read must have arrived, those that are freed must not be on their way, and at no
 * time may more be there, or all last longer, than in the simulation.
 */
typedef struct lanes {
    device d;
    cairn_machine machine;
    int64_t end_ns[CAIRN_LANE_COUNT], start_ns,
        waited_ns; /* of each lane; of the last operation; what it may not precede */
    int64_t made_ns[2][STAGES_MAX + 1], arrival_ns[2][STAGES_MAX + 1]; /* CAIRN_NONE: nothing is on its way */
    bool to_device[2][STAGES_MAX + 1];
} lanes;

static int64_t start(lanes *m, cairn_lane lane, int64_t ns)
{
    m->start_ns = m->start_ns > m->end_ns[lane] ? m->start_ns : m->end_ns[lane];
    m->start_ns = m->start_ns > m->waited_ns ? m->start_ns : m->waited_ns;
    m->end_ns[lane] = m->start_ns + ns;
    return m->end_ns[lane];
}

static void assert_readable(const lanes *m, int32_t l)
{
    int from = m->d.there[CAIRN_VALUE_OUTPUT][l - 1] ? CAIRN_VALUE_OUTPUT : CAIRN_VALUE_SAVED;
    assert_true(m->d.there[from][l - 1]);
    assert_false(m->arrival_ns[from][l - 1] != CAIRN_NONE && m->to_device[from][l - 1]);
}

static int lanes_forward(void *context, int32_t l, int32_t option, bool save, bool drop_input)
{
    lanes *m = context;
    const cairn_stage *stage = &m->d.chain->stages[l - 1];
    assert_readable(m, l);
    assert_true(!drop_input || m->arrival_ns[CAIRN_VALUE_OUTPUT][l - 1] == CAIRN_NONE);
    m->made_ns[save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT][l] =
        start(m, CAIRN_LANE_COMPUTE, save ? stage->options[option].forward_ns : stage->forward_only_ns);
    return on_forward(&m->d, l, option, save, drop_input);
}

static int lanes_backward(void *context, int32_t l, int32_t option, bool free_input)
{
    lanes *m = context;
    assert_readable(m, l);
    assert_true(m->arrival_ns[CAIRN_VALUE_SAVED][l] == CAIRN_NONE);
    assert_true(!free_input || m->arrival_ns[CAIRN_VALUE_OUTPUT][l - 1] == CAIRN_NONE);
    start(m, CAIRN_LANE_COMPUTE, m->d.chain->stages[l - 1].options[option].backward_ns);
    return on_backward(&m->d, l, option, free_input);
}

static int lanes_drop(void *context, int32_t l, cairn_value value)
{
    lanes *m = context;
    assert_true(m->arrival_ns[value][l] == CAIRN_NONE);
    return on_drop(&m->d, l, value);
}

static void move(lanes *m, int32_t l, cairn_value value, bool to_device)
{
    int64_t rate = to_device ? m->machine.to_device_bytes_per_s : m->machine.to_host_bytes_per_s;
    int64_t ns = cairn_transfer_ns(size_of(&m->d, l, (int)value), rate, m->machine.latency_ns);
    cairn_lane lane = to_device && !m->machine.shared_link ? CAIRN_LANE_TO_DEVICE : CAIRN_LANE_TO_HOST;
    assert_true(m->arrival_ns[value][l] == CAIRN_NONE);
    if (!to_device && m->made_ns[value][l] > m->end_ns[lane])
        m->end_ns[lane] = m->made_ns[value][l];
    m->arrival_ns[value][l] = start(m, lane, ns);
    m->to_device[value][l] = to_device;
}

static int lanes_offload(void *context, int32_t l, cairn_value value)
{
    lanes *m = context;
    assert_true(m->d.there[value][l] && !m->d.on_host[value][l]);
    m->d.on_host[value][l] = true;
    move(m, l, value, false);
    return counted(&m->d);
}

static int lanes_prefetch(void *context, int32_t l, cairn_value value)
{
    lanes *m = context;
    assert_true(m->d.on_host[value][l]);
    put(&m->d, l, (int)value);
    move(m, l, value, true);
    return counted(&m->d);
}

static int lanes_discard(void *context, int32_t l, cairn_value value)
{
    lanes *m = context;
    assert_true(m->d.on_host[value][l] && m->arrival_ns[value][l] == CAIRN_NONE);
    m->d.on_host[value][l] = false;
    return counted(&m->d);
}

static int lanes_wait(void *context, int32_t l, cairn_value value)
{
    lanes *m = context;
    assert_true(m->arrival_ns[value][l] != CAIRN_NONE);
    m->waited_ns = m->waited_ns > m->arrival_ns[value][l] ? m->waited_ns : m->arrival_ns[value][l];
    m->arrival_ns[value][l] = CAIRN_NONE;
    return counted(&m->d);
}

static const cairn_exec_callbacks on_lanes = {NULL,          lanes_forward,  lanes_backward, lanes_drop,
                                              lanes_offload, lanes_prefetch, lanes_discard,  lanes_wait};

static void run_on_lanes(const cairn_problem *problem, const cairn_verified *verified)
{
    const cairn_replay *replay = cairn_verified_replay(verified);
    lanes m = {.d.chain = cairn_problem_chain(problem), .machine = *cairn_problem_info_of(problem)->machine};
    cairn_exec_callbacks callbacks = on_lanes;
    int64_t end_ns = 0;
    callbacks.context = &m;
    m.d.gradient = m.d.chain->stage_count;
    memset(m.arrival_ns, 0xff, sizeof(m.arrival_ns)); /* CAIRN_NONE */
    put(&m.d, 0, CAIRN_VALUE_OUTPUT);
    assert_int_equal(cairn_exec_run(NULL, verified, &callbacks, NULL), CAIRN_OK);
    assert_int_equal(m.d.gradient, 0);
    for (int lane = 0; lane < CAIRN_LANE_COUNT; lane++)
        end_ns = m.end_ns[lane] > end_ns ? m.end_ns[lane] : end_ns;
    assert_true(end_ns <= replay->makespan_ns);
    assert_true(m.d.peak_bytes <= replay->peak_bytes);
}

/* A budget so many quarters of the way from the least to the one that stores everything. */
static void budget_between(const cairn_problem *problem, int quarters, char text[32])
{
    cairn_options *options;
    cairn_limits limits;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_OK);
    int64_t span = limits.store_all_bytes - limits.least_bytes;
    snprintf(text, 32, "%lld", (long long)(limits.least_bytes + span * quarters / 4));
    cairn_options_free(options);
}

static void transfers_overlap_as_simulated(void **state)
{
    (void)state;
    static const char *const solvers[] = {"offload-greedy", "joint-chain"};
    int offloaded = 0;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++)
        for (int i = 0; i < 2; i++) {
            cairn_problem *problem = test_random_chain_with_link(seed, STAGES_MAX);
            cairn_schedule *schedule = NULL;
            char budget[32];
            budget_between(problem, (int)(seed % 5), budget);
            cairn_verified *verified = solve(problem, solvers[i], budget, &schedule);
            if (verified)
                run_on_lanes(problem, verified);
            offloaded += verified && cairn_verified_replay(verified)->host_peak_bytes > 0;
            cairn_verified_free(verified);
            cairn_schedule_free(schedule);
            cairn_problem_free(problem);
        }
    assert_true(offloaded > TEST_ROUNDS(60) / 3);
}

/* What transfers move is waited for before it is read or freed and at the end, and only then. */
static char spoken[256];

static int say(const char *word, int32_t l, cairn_value value)
{
    size_t length = strlen(spoken);
    snprintf(spoken + length, sizeof(spoken) - length, "%s%c%d ", word, value == CAIRN_VALUE_SAVED ? 'A' : 'a', l);
    return 0;
}

static int say_forward(void *context, int32_t l, int32_t option, bool save, bool drop_input)
{
    (void)context, (void)option, (void)drop_input;
    return say("f", l, save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT);
}

/* With a prime where it is the second option. */
static int say_backward(void *context, int32_t l, int32_t option, bool free_input)
{
    (void)context, (void)free_input;
    return say(option == 0 ? "b" : "b'", l, CAIRN_VALUE_SAVED);
}

static int say_drop(void *context, int32_t l, cairn_value value)
{
    (void)context;
    return say("drop ", l, value);
}

static int say_offload(void *context, int32_t l, cairn_value value)
{
    (void)context;
    return say("off ", l, value);
}

static int say_prefetch(void *context, int32_t l, cairn_value value)
{
    (void)context;
    return say("back ", l, value);
}

static int say_discard(void *context, int32_t l, cairn_value value)
{
    (void)context;
    return say("discard ", l, value);
}

static int say_wait(void *context, int32_t l, cairn_value value)
{
    (void)context;
    return say("wait ", l, value);
}

static const cairn_exec_callbacks speaking = {NULL,        say_forward,  say_backward, say_drop,
                                              say_offload, say_prefetch, say_discard,  say_wait};

/* Two stages on a machine, the first with two options. */
static cairn_problem *stages_to_move(void)
{
    cairn_stage_option options[2] = {{"keep", 8, 5, 5, 0, 0}, {"less", 6, 5, 5, 0, 0}};
    cairn_stage stages[2] = {{"one", 4, 4, 0, 5, 0, false, 2, options}, {"two", 4, 4, 0, 5, 0, false, 1, options}};
    cairn_chain chain = {4, 4, 2, stages};
    cairn_machine machine = {100, 1000000000, 1000000000, 0, false};
    cairn_problem_info info = {.machine = &machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static cairn_verified *verified_list(const cairn_problem *problem, const cairn_op *ops, size_t count,
                                     cairn_schedule **schedule)
{
    cairn_builder *builder;
    cairn_verified *verified;
    cairn_replay replay;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(cairn_builder_add(builder, ops[i], NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_finish(builder, NULL, schedule, NULL), CAIRN_OK);
    assert_int_equal(cairn_verify(NULL, problem, *schedule, CAIRN_NONE, &verified, &replay, NULL), CAIRN_OK);
    assert_true(replay.valid);
    cairn_builder_free(builder);
    return verified;
}

static void expect_calls(const cairn_op *ops, size_t count, const char *calls)
{
    cairn_problem *problem = stages_to_move();
    cairn_schedule *schedule;
    cairn_verified *verified = verified_list(problem, ops, count, &schedule);
    spoken[0] = '\0';
    assert_int_equal(cairn_exec_run(NULL, verified, &speaking, NULL), CAIRN_OK);
    assert_string_equal(spoken, calls);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

#define EXPECT_CALLS(ops, calls) expect_calls(ops, sizeof(ops) / sizeof((ops)[0]), calls)

static const cairn_op moving[] = {{CAIRN_OP_FORWARD_SAVE, 0, 0, 1},
                                  {CAIRN_OP_OFFLOAD, CAIRN_VALUE_SAVED, 0, 1},
                                  {CAIRN_OP_FORWARD_SAVE, 0, 0, 2},
                                  {CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 1},
                                  {CAIRN_OP_PREFETCH, CAIRN_VALUE_SAVED, 0, 1},
                                  {CAIRN_OP_BACKWARD, 0, 0, 2},
                                  {CAIRN_OP_DISCARD, CAIRN_VALUE_SAVED, 0, 1},
                                  {CAIRN_OP_BACKWARD, 0, 0, 1}};

static void transfers_are_waited_for_where_needed(void **state)
{
    (void)state;
    EXPECT_CALLS(moving, "fA1 off A1 fA2 wait A1 drop A1 back A1 wait A1 bA2 discard A1 bA1 ");
}

static void a_run_without_its_callbacks_is_refused(void **state)
{
    (void)state;
    cairn_problem *problem = stages_to_move();
    cairn_schedule *schedule;
    cairn_verified *verified = verified_list(problem, moving, sizeof(moving) / sizeof(moving[0]), &schedule);
    cairn_exec_callbacks callbacks = speaking;
    cairn_error error;
    assert_int_equal(cairn_exec_run(NULL, NULL, &callbacks, &error), CAIRN_BAD_ARGUMENT);
    callbacks.wait = NULL;
    assert_int_equal(cairn_exec_run(NULL, verified, &callbacks, &error), CAIRN_BAD_ARGUMENT);
    assert_int_equal(error.index, 1);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

/* A saved set comes back from the host in the option in which it went there, whatever was saved meanwhile. */
static void each_copy_has_its_own_option(void **state)
{
    (void)state;
    static const cairn_op ops[] = {{CAIRN_OP_FORWARD_SAVE, 0, 1, 1},
                                   {CAIRN_OP_OFFLOAD, CAIRN_VALUE_SAVED, 0, 1},
                                   {CAIRN_OP_FORWARD_SAVE, 0, 0, 2},
                                   {CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 1},
                                   {CAIRN_OP_FORWARD_SAVE, 0, 0, 1},
                                   {CAIRN_OP_DROP, CAIRN_VALUE_SAVED, 0, 1},
                                   {CAIRN_OP_PREFETCH, CAIRN_VALUE_SAVED, 0, 1},
                                   {CAIRN_OP_BACKWARD, 0, 0, 2},
                                   {CAIRN_OP_BACKWARD, 0, 0, 1}};
    EXPECT_CALLS(ops, "fA1 off A1 fA2 wait A1 drop A1 fA1 drop A1 back A1 wait A1 bA2 b'A1 ");
}

static void the_last_transfers_are_waited_for(void **state)
{
    (void)state;
    static const cairn_op ops[] = {{CAIRN_OP_FORWARD_KEEP, 0, 0, 1}, {CAIRN_OP_FORWARD_SAVE, 0, 0, 1},
                                   {CAIRN_OP_FORWARD_SAVE, 0, 0, 2}, {CAIRN_OP_BACKWARD, 0, 0, 2},
                                   {CAIRN_OP_BACKWARD, 0, 0, 1},     {CAIRN_OP_FORWARD_KEEP, 0, 0, 1},
                                   {CAIRN_OP_OFFLOAD, 0, 0, 1}};
    EXPECT_CALLS(ops, "fa1 fA1 fA2 bA2 bA1 fa1 off a1 wait a1 ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_run_through_callbacks),
        cmocka_unit_test(transfers_overlap_as_simulated),
        cmocka_unit_test(transfers_are_waited_for_where_needed),
        cmocka_unit_test(a_run_without_its_callbacks_is_refused),
        cmocka_unit_test(each_copy_has_its_own_option),
        cmocka_unit_test(the_last_transfers_are_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
