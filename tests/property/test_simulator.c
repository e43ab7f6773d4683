/*
 * The simulator against a second one (support/slow_replay.h) on random lists of operations.
 *
 * Lists grow by random walks: each step tries a random operation, and both simulators judge the list with it, valid or
 * not; if it breaks a rule it is taken back, now and then it stays and the walk ends there. Then the walk is steered to
 * completion, and complete lists are judged again under budgets from the least up, where operations wait for memory.
 * Sizes and times are small, so that ties, zeros and exact fits are common.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "support/op_text.h"
#include "support/random_problem.h"
#include "support/rounds.h"
#include "support/slow_replay.h"

enum { WALKS = TEST_ROUNDS(4000), WALK_OPS = 36, LIST_OPS = 72 };

typedef struct walk {
    test_random random;
    cairn_problem *problem;
    const cairn_machine *machine; /* the one that holds */
    cairn_machine own_machine;    /* of the schedule, where it has one */
    bool has_own_machine;
    cairn_op ops[LIST_OPS + 1];
    int64_t count;
} walk;

/* How often each thing was seen, so that a test that has stopped testing shows. */
static long seen[CAIRN_VIOLATION_COUNT], seen_waiting, seen_idle_host;

static cairn_schedule *schedule_of(const walk *w)
{
    cairn_schedule_info info = CAIRN_SCHEDULE_INFO_INIT;
    cairn_builder *builder;
    cairn_schedule *schedule;
    info.machine = w->has_own_machine ? &w->own_machine : NULL;
    assert_int_equal(cairn_builder_new(NULL, w->problem, &builder, NULL), CAIRN_OK);
    for (int64_t i = 0; i < w->count; i++)
        assert_int_equal(cairn_builder_add(builder, w->ops[i], NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_finish(builder, &info, &schedule, NULL), CAIRN_OK);
    cairn_builder_free(builder);
    return schedule;
}

static bool same_replay(const cairn_replay *a, const cairn_replay *b)
{
    return a->valid == b->valid && a->violation.code == b->violation.code && a->violation.op == b->violation.op &&
           a->violation.needed_bytes == b->violation.needed_bytes &&
           a->violation.free_bytes == b->violation.free_bytes && a->makespan_ns == b->makespan_ns &&
           a->peak_bytes == b->peak_bytes && a->host_peak_bytes == b->host_peak_bytes &&
           a->compute_ns == b->compute_ns && a->recompute_ns == b->recompute_ns && a->stall_ns == b->stall_ns;
}

static void print_replay(const char *who, const cairn_replay *r)
{
    const char *code = cairn_violation_name(r->violation.code);
    print_message("%s: %s at %lld (needs %lld of %lld) makespan %lld peak %lld host %lld recompute %lld stall %lld\n",
                  who, code ? code : "valid", (long long)r->violation.op, (long long)r->violation.needed_bytes,
                  (long long)r->violation.free_bytes, (long long)r->makespan_ns, (long long)r->peak_bytes,
                  (long long)r->host_peak_bytes, (long long)r->recompute_ns, (long long)r->stall_ns);
}

/* Both simulators on the list so far; the library's also being watched, which makes it keep all lanes of time. */
static cairn_replay judge(const walk *w, int64_t budget_bytes)
{
    static const cairn_observer watching = {NULL, NULL, NULL};
    cairn_schedule *schedule = schedule_of(w);
    cairn_replay fast, watched, slow = test_slow_replay(w->problem, w->machine, w->ops, w->count, budget_bytes);
    assert_int_equal(cairn_simulate(NULL, w->problem, schedule, budget_bytes, NULL, &fast, NULL), CAIRN_OK);
    assert_int_equal(cairn_simulate(NULL, w->problem, schedule, budget_bytes, &watching, &watched, NULL), CAIRN_OK);
    cairn_schedule_free(schedule);
    if (!same_replay(&fast, &slow) || !same_replay(&watched, &slow)) {
        print_replay("library", &fast);
        print_replay("watched", &watched);
        print_replay("slow", &slow);
        test_print_ops(stderr, cairn_problem_kind_of(w->problem), w->ops, w->count);
        fail_msg("the simulators differ under the budget %lld", (long long)budget_bytes);
    }
    seen[fast.violation.code]++;
    return fast;
}

static bool breaks_a_rule(const cairn_replay *replay)
{
    return !replay->valid && replay->violation.code != CAIRN_VIOLATION_INCOMPLETE;
}

/* Appends an operation; takes it back when it breaks a rule, and says whether it stayed. */
static bool try_op(walk *w, cairn_op op, int64_t budget_bytes)
{
    if (w->count == LIST_OPS)
        return false;
    w->ops[w->count++] = op;
    cairn_replay replay = judge(w, budget_bytes);
    if (!breaks_a_rule(&replay))
        return true;
    w->count--;
    return false;
}

static cairn_op op_of(cairn_op_code code, int value, int32_t index)
{
    return (cairn_op){(uint8_t)code, (uint8_t)value, 0, index};
}

/* A drop, transfer or discard of something that the list already speaks of. */
static cairn_op related_op(walk *w)
{
    cairn_op op = w->ops[test_random_between(&w->random, 0, w->count - 1)];
    if (op.code < CAIRN_OP_DROP)
        op.value = op.code == CAIRN_OP_FORWARD_SAVE;
    op.code = (uint8_t)test_random_between(&w->random, CAIRN_OP_DROP, CAIRN_OP_DISCARD);
    op.option = 0;
    return op;
}

static cairn_op random_op(walk *w)
{
    const cairn_chain *chain = cairn_problem_chain(w->problem);
    const cairn_graph *graph = cairn_problem_graph(w->problem);
    cairn_op op = {0, 0, 0, 0};
    if (w->count > 0 && test_random_chance(&w->random, 50))
        return related_op(w);
    if (graph) {
        op.code = (uint8_t)test_random_between(&w->random, CAIRN_OP_COMPUTE, CAIRN_OP_DISCARD);
        op.index = (int32_t)test_random_between(&w->random, 0, graph->node_count - 1);
        return op;
    }
    do
        op.code = (uint8_t)test_random_between(&w->random, 0, CAIRN_OP_DISCARD);
    while (op.code == CAIRN_OP_COMPUTE);
    if (op.code >= CAIRN_OP_DROP)
        op.value = (uint8_t)test_random_between(&w->random, 0, 1);
    bool input = op.code >= CAIRN_OP_DROP && op.value == CAIRN_VALUE_OUTPUT;
    op.index = (int32_t)test_random_between(&w->random, input ? 0 : 1, chain->stage_count);
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        op.option = (uint16_t)test_random_between(&w->random, 0, chain->stages[op.index - 1].option_count - 1);
    return op;
}

static bool advance_chain(walk *w, int64_t budget_bytes)
{
    int32_t l = cairn_problem_chain(w->problem)->stage_count;
    for (int64_t i = 0; i < w->count; i++)
        l -= w->ops[i].code == CAIRN_OP_BACKWARD;
    if (l == 0)
        return false;
    if (try_op(w, op_of(CAIRN_OP_BACKWARD, 0, l), budget_bytes) ||
        try_op(w, op_of(CAIRN_OP_PREFETCH, CAIRN_VALUE_SAVED, l), budget_bytes) ||
        try_op(w, op_of(CAIRN_OP_FORWARD_SAVE, 0, l), budget_bytes))
        return true;
    for (int32_t m = l - 1; m > 0; m--)
        if (try_op(w, op_of(CAIRN_OP_PREFETCH, CAIRN_VALUE_OUTPUT, m), budget_bytes) ||
            try_op(w, op_of(CAIRN_OP_FORWARD_KEEP, 0, m), budget_bytes) ||
            try_op(w, op_of(CAIRN_OP_FORWARD_SAVE, 0, m), budget_bytes))
            return true;
    return false;
}

static bool advance_graph(walk *w, int64_t budget_bytes)
{
    int32_t v = 0;
    for (int64_t i = 0; i < w->count; i++)
        v += w->ops[i].code == CAIRN_OP_COMPUTE && w->ops[i].index == v;
    if (v == cairn_problem_graph(w->problem)->node_count)
        return false;
    for (int32_t u = v; u >= 0; u--)
        if (try_op(w, op_of(CAIRN_OP_COMPUTE, 0, u), budget_bytes) ||
            try_op(w, op_of(CAIRN_OP_PREFETCH, 0, u), budget_bytes))
            return true;
    return false;
}

static bool advance(walk *w, int64_t budget_bytes)
{
    return cairn_problem_chain(w->problem) ? advance_chain(w, budget_bytes) : advance_graph(w, budget_bytes);
}

static void judge_under_budgets(walk *w)
{
    cairn_replay free_of_limits = judge(w, CAIRN_NONE);
    if (!free_of_limits.valid)
        return;
    int64_t peak = free_of_limits.peak_bytes;
    seen_idle_host += free_of_limits.host_peak_bytes > 0;
    judge(w, peak);
    judge(w, 0);
    for (int64_t budget = peak - 1; budget >= 0; budget -= test_random_between(&w->random, 1, 1 + peak / 16)) {
        cairn_replay replay = judge(w, budget);
        if (!replay.valid)
            break;
        assert_true(replay.makespan_ns >= free_of_limits.makespan_ns);
        assert_true(replay.peak_bytes <= budget);
        seen_waiting += replay.makespan_ns > free_of_limits.makespan_ns;
    }
}

static void insert_op(walk *w, int64_t at, cairn_op op)
{
    memmove(&w->ops[at + 1], &w->ops[at], (size_t)(w->count - at) * sizeof(*w->ops));
    w->ops[at] = op;
    w->count++;
}

/*
 * A list of a chain that was complete, in which something that a forward made goes too early and is made again: where a
 * rule is broken, all that follows may be right.
 */
static void judge_with_a_gap(walk *w)
{
    const walk before = *w;
    if (!cairn_problem_chain(w->problem) || w->count + 2 > LIST_OPS)
        return;
    for (int64_t i = 0; i < before.count; i++) {
        cairn_op made = before.ops[i];
        if (made.code > CAIRN_OP_FORWARD_DROP)
            continue;
        cairn_op drop = op_of(CAIRN_OP_DROP, made.code == CAIRN_OP_FORWARD_SAVE, made.index);
        bool replaced = drop.value == 0 && made.index < cairn_problem_chain(w->problem)->stage_count;
        if (replaced && test_random_chance(&w->random, 50))
            drop = op_of(CAIRN_OP_FORWARD_DROP, 0, made.index + 1);
        made.code = made.code == CAIRN_OP_FORWARD_SAVE ? CAIRN_OP_FORWARD_SAVE : CAIRN_OP_FORWARD_KEEP;
        int64_t gap = test_random_between(&w->random, i + 1, before.count);
        insert_op(w, test_random_between(&w->random, gap, before.count), made);
        insert_op(w, gap, drop);
        judge(w, CAIRN_NONE);
        memcpy(w->ops, before.ops, sizeof(w->ops));
        w->count = before.count;
    }
}

static void run_walk(walk *w)
{
    int64_t budget = test_random_chance(&w->random, 60) ? CAIRN_NONE : test_random_between(&w->random, 0, 120);
    int64_t length = test_random_between(&w->random, 0, WALK_OPS);
    judge(w, budget);
    for (int tries = 0; tries < 4 * WALK_OPS && w->count < length; tries++) {
        if (test_random_chance(&w->random, 30))
            advance(w, budget);
        else
            try_op(w, random_op(w), budget);
    }
    while (advance(w, budget))
        ;
    judge_under_budgets(w);
    judge_with_a_gap(w);
    if (test_random_chance(&w->random, 10)) { /* whatever comes after the first violation does not matter */
        while (w->count < LIST_OPS) {
            cairn_op op = random_op(w);
            w->ops[w->count++] = op;
        }
        judge(w, budget);
    }
}

/* Numbers as large as a problem of two stages or four nodes may have; lists then pass 2^63 - 1. */
static const int64_t huge_bytes = INT64_MAX / 20, huge_ns = INT64_MAX / 6;

static bool is_huge(uint64_t seed)
{
    return seed % 16 == 5;
}

static void choose_machine(walk *w)
{
    w->machine = cairn_problem_info_of(w->problem)->machine;
    w->has_own_machine = test_random_chance(&w->random, 20);
    if (!w->has_own_machine)
        return;
    w->own_machine = test_random_machine(&w->random, 12, 12);
    w->machine = &w->own_machine;
}

static void chains_replay_alike(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < WALKS; seed++) {
        walk w = {.random = test_random_seeded(seed)};
        test_chain_shape shape = test_chain_of_everything(1 + (int32_t)(seed % 5));
        shape.machine = seed % 8 != 0;
        if (is_huge(seed)) {
            shape.stages_max = 2;
            shape.options_max = 1;
            shape.bytes_max = huge_bytes;
            shape.ns_max = huge_ns;
            shape.machine = false; /* its transfers are made for small numbers */
        }
        w.problem = test_random_chain(&w.random, &shape);
        choose_machine(&w);
        run_walk(&w);
        cairn_problem_free(w.problem);
    }
}

static void graphs_replay_alike(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < WALKS; seed++) {
        walk w = {.random = test_random_seeded(seed)};
        test_graph_shape shape = test_graph_of_everything(1 + (int32_t)(seed % 8));
        shape.machine = seed % 8 != 0;
        if (is_huge(seed)) {
            shape.nodes_max = 4;
            shape.bytes_max = huge_bytes;
            shape.ns_max = huge_ns;
            shape.machine = false;
        }
        w.problem = test_random_graph(&w.random, &shape);
        choose_machine(&w);
        run_walk(&w);
        cairn_problem_free(w.problem);
    }
}

static void everything_was_met(void **state)
{
    (void)state;
    for (int code = 0; code < CAIRN_VIOLATION_COUNT; code++) {
        const char *name = cairn_violation_name((cairn_violation_code)code);
        bool elsewhere = code >= CAIRN_VIOLATION_RECORDED_MAKESPAN;
        print_message("%10ld %s\n", seen[code], name ? name : "valid");
        assert_true(elsewhere || seen[code] > TEST_ROUNDS(100));
    }
    print_message("%10ld waited for memory\n%10ld used the host\n", seen_waiting, seen_idle_host);
    assert_true(seen_waiting > TEST_ROUNDS(1000) && seen_idle_host > TEST_ROUNDS(1000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chains_replay_alike),
        cmocka_unit_test(graphs_replay_alike),
        cmocka_unit_test(everything_was_met),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
