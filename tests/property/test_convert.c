/*
 * A chain and its graph: every chain schedule, operation by operation, is a schedule of the graph that takes the same
 * time and no more memory; exhaustive search agrees where the models do, and finds no more time in graphs elsewhere.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { STAGES_MAX = 12, NONE = -1 };

static cairn_problem *graph_of(const cairn_problem *chain)
{
    cairn_problem *graph;
    cairn_error error;
    if (cairn_chain_to_graph(NULL, chain, &graph, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
    return graph;
}

/*
 * A random chain in which a mere forward takes what a saving one takes: there the graph allows all that the chain does.
 * The generator leaves the forward-only fields to chance; they are set here.
 */
static cairn_problem *random_chain(uint64_t seed, test_chain_shape shape, bool empty_outputs)
{
    test_random random = test_random_seeded(seed);
    cairn_problem *drawn = test_random_chain(&random, &shape), *made;
    cairn_chain chain = *cairn_problem_chain(drawn);
    cairn_stage stages[STAGES_MAX];
    for (int32_t i = 0; i < chain.stage_count; i++) {
        cairn_stage *stage = &stages[i];
        *stage = chain.stages[i];
        if (empty_outputs)
            stage->output_bytes = 0;
        stage->forward_only_ns = stage->options[0].forward_ns;
        stage->forward_only_workspace_bytes =
            stage->options[0].saved_bytes - stage->output_bytes + stage->options[0].forward_workspace_bytes;
    }
    chain.stages = stages;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, cairn_problem_info_of(drawn), &made, NULL), CAIRN_OK);
    cairn_problem_free(drawn);
    return made;
}

/* The same chain with saved sets that are nothing but the output. */
static cairn_problem *saving_outputs_only(const cairn_problem *drawn)
{
    cairn_problem *made;
    cairn_chain chain = *cairn_problem_chain(drawn);
    cairn_stage stages[STAGES_MAX];
    cairn_stage_option options[STAGES_MAX];
    for (int32_t i = 0; i < chain.stage_count; i++) {
        stages[i] = chain.stages[i];
        options[i] = stages[i].options[0];
        options[i].saved_bytes = stages[i].output_bytes;
        stages[i].forward_only_workspace_bytes = options[i].forward_workspace_bytes;
        stages[i].options = &options[i];
    }
    chain.stages = stages;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, cairn_problem_info_of(drawn), &made, NULL), CAIRN_OK);
    return made;
}

/* Nodes of a stage, as chain_graph.c lays them out. */
typedef struct places {
    int32_t gradient[STAGES_MAX + 1]; /* d[l] */
    int32_t extra[STAGES_MAX + 1], output[STAGES_MAX + 1], weights[STAGES_MAX + 1];
} places;

static void find_places(const cairn_chain *chain, places *at)
{
    int32_t count = 0, n = chain->stage_count;
    at->gradient[n] = chain->stages[n - 1].grad_bytes > 0 ? count++ : NONE;
    for (int32_t l = 1; l <= n; l++) {
        const cairn_stage *stage = &chain->stages[l - 1];
        at->extra[l] = stage->options[0].saved_bytes > stage->output_bytes ? count++ : NONE;
        at->output[l] = count++;
    }
    for (int32_t l = n; l >= 1; l--) {
        at->weights[l] = chain->stages[l - 1].weight_grad_bytes > 0 ? count++ : NONE;
        at->gradient[l - 1] = count++;
    }
}

/* The chain's values on the device, and the graph operations that keep the graph's in step with them. */
typedef struct translation {
    cairn_builder *builder;
    places at;
    bool output[STAGES_MAX + 1], saved[STAGES_MAX + 1];
} translation;

static void put(translation *t, cairn_op_code code, int32_t node)
{
    if (node != NONE)
        assert_int_equal(cairn_builder_add(t->builder, (cairn_op){.code = (uint8_t)code, .index = node}, NULL),
                         CAIRN_OK);
}

/* Drops of the graph what the chain holds neither in a[l] nor in A[l]. */
static void let_go(translation *t, int32_t l, bool had_output, bool had_saved)
{
    if (l == 0)
        return;
    if (had_saved && !t->saved[l])
        put(t, CAIRN_OP_DROP, t->at.extra[l]);
    if ((had_saved || had_output) && !t->saved[l] && !t->output[l])
        put(t, CAIRN_OP_DROP, t->at.output[l]);
}

static void lose(translation *t, int32_t l, bool output, bool saved)
{
    bool had_output = t->output[l], had_saved = t->saved[l];
    t->output[l] = had_output && !output;
    t->saved[l] = had_saved && !saved;
    let_go(t, l, had_output, had_saved);
}

static void run_forward(translation *t, int32_t l, bool saves)
{
    if (t->output[l] || t->saved[l]) /* else the output would be had for less */
        put(t, CAIRN_OP_DROP, t->at.output[l]);
    if (!t->saved[l])
        put(t, CAIRN_OP_COMPUTE, t->at.extra[l]);
    put(t, CAIRN_OP_COMPUTE, t->at.output[l]);
    if (!saves)
        put(t, CAIRN_OP_DROP, t->at.extra[l]);
    *(saves ? &t->saved[l] : &t->output[l]) = true;
}

static void translate(translation *t, const cairn_op *op)
{
    int32_t l = op->index;
    switch (op->code) {
    case CAIRN_OP_FORWARD_SAVE:
        run_forward(t, l, true);
        break;
    case CAIRN_OP_FORWARD_KEEP:
        run_forward(t, l, false);
        break;
    case CAIRN_OP_FORWARD_DROP:
        run_forward(t, l, false);
        lose(t, l - 1, true, false);
        break;
    case CAIRN_OP_BACKWARD:
        put(t, CAIRN_OP_COMPUTE, t->at.weights[l]);
        put(t, CAIRN_OP_COMPUTE, t->at.gradient[l - 1]);
        put(t, CAIRN_OP_DROP, t->at.gradient[l]);
        lose(t, l, false, true);
        lose(t, l - 1, true, false);
        break;
    default:
        assert_int_equal(op->code, CAIRN_OP_DROP);
        lose(t, l, op->value == CAIRN_VALUE_OUTPUT, op->value == CAIRN_VALUE_SAVED);
    }
}

static cairn_replay replay_on_graph(const cairn_problem *chain, const cairn_problem *graph,
                                    const cairn_schedule *schedule)
{
    translation t = {.builder = NULL};
    cairn_schedule *moved;
    cairn_replay replay;
    find_places(cairn_problem_chain(chain), &t.at);
    assert_int_equal(cairn_builder_new(NULL, graph, &t.builder, NULL), CAIRN_OK);
    put(&t, CAIRN_OP_COMPUTE, t.at.gradient[cairn_problem_chain(chain)->stage_count]);
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++)
        translate(&t, &cairn_schedule_ops(schedule)[i]);
    assert_int_equal(cairn_builder_finish(t.builder, NULL, &moved, NULL), CAIRN_OK);
    cairn_builder_free(t.builder);
    assert_int_equal(cairn_simulate(NULL, graph, moved, CAIRN_NONE, NULL, &replay, NULL), CAIRN_OK);
    if (!replay.valid)
        fail_msg("%s", replay.violation.message);
    cairn_schedule_free(moved);
    return replay;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes,
                        cairn_schedule **schedule)
{
    return test_solve(problem, test_options(solver, budget_bytes, "threads=1"), schedule);
}

static cairn_limits limits(const cairn_problem *problem, const char *solver)
{
    return test_limits(problem, test_options(solver, -1, ""));
}

static void chain_schedules_are_graph_schedules(void **state)
{
    static const char *const solvers[] = {"store-all", "periodic", "chen-sqrt", "chen-greedy", "chain-exact"};
    const test_chain_shape shape = {
        .stages_max = STAGES_MAX, .workspaces = true, .weight_grads = true, .no_recompute = true, .fixed = true};
    int translated = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(150); seed++) {
        cairn_problem *chain = random_chain(seed, shape, false), *graph = graph_of(chain);
        cairn_limits of_chain = limits(chain, "chain-exact"), of_graph = limits(graph, "store-all");
        assert_int_equal(of_chain.store_all_bytes, of_graph.store_all_bytes);
        assert_int_equal(of_chain.store_all_ns, of_graph.store_all_ns);
        for (int i = 0; i < 15; i++) {
            cairn_schedule *schedule;
            int64_t span = of_chain.store_all_bytes - of_chain.least_bytes;
            cairn_info info = solve(chain, solvers[i / 3], of_chain.least_bytes + span * (i % 3) / 2, &schedule);
            if (!schedule)
                continue;
            cairn_replay replay = replay_on_graph(chain, graph, schedule);
            assert_int_equal(replay.makespan_ns, info.makespan_ns);
            assert_true(replay.peak_bytes <= info.peak_bytes);
            translated++;
            cairn_schedule_free(schedule);
        }
        cairn_problem_free(graph);
        cairn_problem_free(chain);
    }
    print_message("%d schedules translated\n", translated);
    assert_true(translated > TEST_ROUNDS(1000));
}

/* All budgets from the least of the graph on. equal: both models allow the same. */
static void compare_exhaustively(const cairn_problem *chain, bool equal)
{
    cairn_problem *graph = graph_of(chain);
    cairn_limits of_chain = limits(chain, "brute-chain"), of_graph = limits(graph, "brute-graph");
    assert_true(of_graph.least_bytes <= of_chain.least_bytes);
    if (equal)
        assert_int_equal(of_graph.least_bytes, of_chain.least_bytes);
    for (int64_t budget = of_chain.least_bytes; budget <= of_chain.store_all_bytes; budget++) {
        cairn_info here = solve(chain, "brute-chain", budget, NULL), there = solve(graph, "brute-graph", budget, NULL);
        assert_true(there.makespan_ns <= here.makespan_ns);
        if (equal || budget == of_chain.store_all_bytes)
            assert_int_equal(there.makespan_ns, here.makespan_ns);
    }
    cairn_problem_free(graph);
}

static bool is_tiny(const cairn_problem *chain)
{
    cairn_problem *graph = graph_of(chain);
    int32_t count = cairn_problem_graph(graph)->node_count;
    cairn_problem_free(graph);
    return count <= 7;
}

/* Two stages that save nothing but their outputs: there is nothing to compute between a saved output and its backward. */
static void exhaustive_searches_agree_on_two_stages(void **state)
{
    const test_chain_shape shape = {
        .stages_max = 2, .bytes_max = 8, .workspaces = true, .weight_grads = true, .no_recompute = true};
    int compared = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        cairn_problem *drawn = random_chain(seed, shape, false), *chain = saving_outputs_only(drawn);
        if (is_tiny(chain)) {
            compare_exhaustively(chain, true);
            compared++;
        }
        cairn_problem_free(chain);
        cairn_problem_free(drawn);
    }
    assert_true(compared > TEST_ROUNDS(200));
}

/* Outputs without bytes: keeping an input costs nothing, so it does not matter whether it must be kept. */
static void exhaustive_searches_agree_where_outputs_are_empty(void **state)
{
    const test_chain_shape shape = {.stages_max = 2, .bytes_max = 8, .workspaces = true, .weight_grads = true};
    int compared = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(300); seed++) {
        cairn_problem *chain = random_chain(seed, shape, true);
        if (is_tiny(chain)) {
            compare_exhaustively(chain, true);
            compared++;
        }
        cairn_problem_free(chain);
    }
    assert_true(compared > TEST_ROUNDS(100));
}

/* Two stages that save more; three that do not: a graph may lose the input of what is saved, a chain may not. */
static void graphs_allow_no_less_than_chains(void **state)
{
    const test_chain_shape two = {.stages_max = 2, .bytes_max = 8, .workspaces = true, .no_recompute = true};
    const test_chain_shape three = {.stages_min = 3, .stages_max = 3, .bytes_max = 6, .workspaces = true};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(200); seed++) {
        cairn_problem *saving = random_chain(seed, two, false), *drawn = random_chain(seed, three, false);
        cairn_problem *plain = saving_outputs_only(drawn);
        compare_exhaustively(saving, false);
        compare_exhaustively(plain, false);
        cairn_problem_free(plain);
        cairn_problem_free(drawn);
        cairn_problem_free(saving);
    }
}

static void what_stays_and_what_is_refused(void **state)
{
    test_random random = test_random_seeded(7);
    test_chain_shape shape = test_chain_of_everything(6);
    cairn_error error;
    (void)state;
    shape.machine = true;
    for (int i = 0; i < 200; i++) { /* options, signed workspaces: converted all the same */
        cairn_problem *chain = test_random_chain(&random, &shape), *graph = graph_of(chain), *again;
        const cairn_problem_info *before = cairn_problem_info_of(chain), *after = cairn_problem_info_of(graph);
        assert_int_equal(after->fixed_bytes, before->fixed_bytes + cairn_problem_chain(chain)->input_bytes);
        assert_memory_equal(after->machine, before->machine, sizeof(cairn_machine));
        assert_int_equal(limits(graph, "store-all").store_all_ns, limits(chain, "store-all").store_all_ns);
        assert_int_equal(cairn_chain_to_graph(NULL, graph, &again, &error), CAIRN_UNSUPPORTED);
        assert_null(again);
        cairn_problem_free(graph);
        cairn_problem_free(chain);
    }
}

/* Sizes whose sum is just below the limit: the graph's sum is no larger. */
static void the_largest_chain_is_converted(void **state)
{
    const int64_t huge = INT64_MAX / 16;
    const cairn_stage_option option = {"keep", huge, huge, huge, huge, -huge};
    const cairn_stage stage = {"", huge / 2, huge, huge, huge, huge, false, 1, &option};
    const cairn_chain chain = {huge, huge, 1, &stage};
    cairn_problem *problem, *graph;
    (void)state;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    graph = graph_of(problem);
    assert_string_equal(cairn_problem_graph(graph)->nodes[1].name, "stage 1.saved");
    cairn_problem_free(graph);
    cairn_problem_free(problem);
}

static cairn_status convert_and_free(const cairn_env *env, void *context)
{
    cairn_problem *graph;
    cairn_status status = cairn_chain_to_graph(env, context, &graph, NULL);
    cairn_problem_free(graph);
    return status;
}

static void every_allocation_may_fail(void **state)
{
    cairn_problem *chain =
        random_chain(3, (test_chain_shape){.stages_min = 4, .stages_max = 4, .weight_grads = true}, false);
    (void)state;
    assert_true(test_every_allocation_fails(convert_and_free, chain) > 1);
    cairn_problem_free(chain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chain_schedules_are_graph_schedules),
        cmocka_unit_test(exhaustive_searches_agree_on_two_stages),
        cmocka_unit_test(exhaustive_searches_agree_where_outputs_are_empty),
        cmocka_unit_test(graphs_allow_no_less_than_chains),
        cmocka_unit_test(what_stays_and_what_is_refused),
        cmocka_unit_test(the_largest_chain_is_converted),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
