/* What the other tests stand on: generated problems are varied and repeatable, and allocations do fail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/faulty_allocator.h"
#include "support/random_problem.h"

static void numbers_repeat_and_stay_in_range(void **state)
{
    (void)state;
    test_random a = test_random_seeded(7), b = test_random_seeded(7), c = test_random_seeded(8);
    int differences = 0;
    for (int i = 0; i < 1000; i++) {
        int64_t x = test_random_between(&a, -5, i);
        assert_true(x >= -5 && x <= (i < -5 ? -5 : i));
        assert_int_equal(x, test_random_between(&b, -5, i));
        differences += x != test_random_between(&c, -5, i);
    }
    assert_true(differences > 500);
    assert_int_equal(test_random_between(&a, 3, 3), 3);
    assert_int_equal(test_random_between(&a, 3, 2), 3);
    (void)test_random_between(&a, INT64_MIN, INT64_MAX);
}

static void bytes_steer_the_draws_and_run_out(void **state)
{
    (void)state;
    const uint8_t bytes[] = {0, 1, 2, 255, 1, 0};
    test_random random = test_random_from_bytes(bytes, sizeof(bytes));
    assert_int_equal(test_random_between(&random, 10, 265), 10);
    assert_int_equal(test_random_between(&random, 10, 12), 11);
    assert_int_equal(test_random_between(&random, 0, 9), 2);
    assert_true(test_random_chance(&random, 1));
    assert_int_equal(test_random_between(&random, 0, 256), 256);
    assert_int_equal(random.left, 0);
    assert_int_equal(test_random_between(&random, -4, 9), -4);
    assert_false(test_random_chance(&random, 99));
    assert_int_equal(test_random_bits(&random), 0);
    random = test_random_from_bytes(NULL, 0);
    assert_int_equal(test_random_between(&random, -4, 9), -4);
}

typedef struct seen {
    int options, negative_workspace, weight_grads, no_recompute, fixed, zero, forward_only, keep, alias, deps;
} seen;

static void look_at_chain(const cairn_problem *problem, seen *s)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    s->fixed += cairn_problem_info_of(problem)->fixed_bytes > 0;
    s->zero += chain->input_bytes == 0;
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        s->options += stage->option_count > 1;
        s->negative_workspace += stage->options[0].backward_workspace_bytes < 0;
        s->weight_grads += stage->weight_grad_bytes > 0;
        s->no_recompute += stage->no_recompute;
        s->forward_only += stage->forward_only_ns != stage->options[0].forward_ns;
    }
}

static void chains_have_all_that_their_shape_allows_and_no_more(void **state)
{
    (void)state;
    const test_chain_shape everything = test_chain_of_everything(6);
    const test_chain_shape simple = {.stages_max = 6, .positive = true, .equal_forwards = true};
    seen s = {0}, none = {0};
    for (uint64_t seed = 0; seed < 300; seed++) {
        test_random random = test_random_seeded(seed), again = random;
        cairn_problem *problem = test_random_chain(&random, &everything);
        cairn_problem *same = test_random_chain(&again, &everything);
        assert_string_equal(cairn_problem_hash(problem), cairn_problem_hash(same));
        look_at_chain(problem, &s);
        cairn_problem_free(problem);
        cairn_problem_free(same);
        problem = test_random_chain(&random, &simple);
        look_at_chain(problem, &none);
        cairn_problem_free(problem);
    }
    assert_true(s.options > 20 && s.negative_workspace > 20 && s.weight_grads > 20 && s.no_recompute > 20);
    assert_true(s.fixed > 20 && s.zero > 5 && s.forward_only > 20);
    const seen zero = {0};
    assert_memory_equal(&none, &zero, sizeof(zero));
}

static void look_at_graph(const cairn_problem *problem, seen *s)
{
    const cairn_graph *graph = cairn_problem_graph(problem);
    s->fixed += cairn_problem_info_of(problem)->fixed_bytes > 0;
    for (int32_t v = 0; v < graph->node_count; v++) {
        const cairn_node *node = &graph->nodes[v];
        s->negative_workspace += node->workspace_bytes < 0;
        s->no_recompute += node->no_recompute;
        s->keep += node->keep;
        s->alias += node->alias_of >= 0;
        s->deps += node->dep_count > 1;
        s->zero += node->alias_of < 0 && node->bytes == 0;
    }
}

static void graphs_have_all_that_their_shape_allows_and_no_more(void **state)
{
    (void)state;
    const test_graph_shape everything = test_graph_of_everything(9);
    const test_graph_shape training = {.nodes_max = 9, .positive = true, .training = true, .machine = true};
    seen s = {0}, none = {0};
    for (uint64_t seed = 0; seed < 300; seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_graph(&random, &everything);
        look_at_graph(problem, &s);
        cairn_problem_free(problem);
        problem = test_random_graph(&random, &training);
        look_at_graph(problem, &none);
        const cairn_graph *graph = cairn_problem_graph(problem);
        assert_int_equal(graph->backward_begins_at * 2, graph->node_count);
        assert_non_null(cairn_problem_info_of(problem)->machine);
        cairn_problem_free(problem);
    }
    assert_true(s.negative_workspace > 20 && s.no_recompute > 20 && s.keep > 300 && s.alias > 20 && s.deps > 20);
    assert_true(s.fixed > 20 && s.zero > 20 && none.deps > 20);
    none.deps = 0;
    const seen zero = {0};
    assert_memory_equal(&none, &zero, sizeof(zero));
}

static cairn_status copy_chain(const cairn_env *env, void *context)
{
    const cairn_problem *model = context;
    cairn_problem *problem;
    cairn_status status =
        cairn_problem_new_chain(env, cairn_problem_chain(model), cairn_problem_info_of(model), &problem, NULL);
    assert_true((problem != NULL) == (status == CAIRN_OK));
    cairn_problem_free(problem);
    return status;
}

static cairn_status copy_graph(const cairn_env *env, void *context)
{
    const cairn_problem *model = context;
    cairn_problem *problem;
    cairn_status status =
        cairn_problem_new_graph(env, cairn_problem_graph(model), cairn_problem_info_of(model), &problem, NULL);
    assert_true((problem != NULL) == (status == CAIRN_OK));
    cairn_problem_free(problem);
    return status;
}

static void problems_survive_every_failing_allocation(void **state)
{
    (void)state;
    /* Large enough for several blocks of the arena. */
    const test_chain_shape chain = {.stages_min = 300, .stages_max = 300, .options_max = 3, .machine = true};
    const test_graph_shape graph = {.nodes_min = 300, .nodes_max = 300, .aliases = true};
    test_random random = test_random_seeded(1);
    cairn_problem *model = test_random_chain(&random, &chain);
    assert_true(test_every_allocation_fails(copy_chain, model) > 2);
    cairn_problem_free(model);
    model = test_random_graph(&random, &graph);
    assert_true(test_every_allocation_fails(copy_graph, model) > 3);
    cairn_problem_free(model);
}

static void a_faulty_allocator_counts_and_notices(void **state)
{
    (void)state;
    test_faulty faulty;
    test_faulty_init(&faulty, 1, false);
    cairn_env env = test_faulty_env(&faulty);
    void *context = env.allocator.context;
    char *block = env.allocator.resize(context, NULL, 0, 3);
    assert_non_null(block);
    memcpy(block, "abc", 3);
    assert_null(env.allocator.resize(context, block, 3, 5));
    block = env.allocator.resize(context, block, 3, 5);
    assert_memory_equal(block, "abc", 3);
    assert_int_equal(atomic_load(&faulty.live_bytes), 5);
    assert_int_equal(atomic_load(&faulty.live_blocks), 1);
    assert_int_equal(atomic_load(&faulty.failures), 1);
    assert_false(atomic_load(&faulty.wrong_size));
    assert_null(env.allocator.resize(context, block, 4, 0));
    assert_true(atomic_load(&faulty.wrong_size));
    assert_int_equal(atomic_load(&faulty.live_bytes), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_repeat_and_stay_in_range),
        cmocka_unit_test(bytes_steer_the_draws_and_run_out),
        cmocka_unit_test(chains_have_all_that_their_shape_allows_and_no_more),
        cmocka_unit_test(graphs_have_all_that_their_shape_allows_and_no_more),
        cmocka_unit_test(problems_survive_every_failing_allocation),
        cmocka_unit_test(a_faulty_allocator_counts_and_notices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
