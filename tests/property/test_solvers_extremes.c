/* Sizes and times near the end of the range, and zero. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/random_problem.h"
#include "support/rounds.h"
#include "support/question.h"

static void check_answers_at_extremes(const question *given, void *context)
{
    question q = *given;
    const cairn_limits *limits = context;
    const int64_t budgets[] = {-1, 0, 1, limits->least_lower_bytes, limits->store_all_bytes, INT64_MAX};
    for (size_t i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        q.budget = budgets[i];
        reply r = ask(&q);
        check_answer(&q, &r);
        done(&r);
    }
}

static void check_extremes(const question *q, void *context)
{
    check_answers_at_extremes(q, context);
    check_least(q, NULL);
}

static void check_all_extremes(const cairn_problem *problem, uint64_t seed)
{
    question q = {problem, "store-all", seed, -1, 500, NULL};
    cairn_limits limits = limits_of(&q);
    for_each_solver(q, check_extremes, &limits);
}

static void sizes_near_the_end_of_the_range(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        test_random random = test_random_seeded(seed);
        int64_t n = 1 + (int64_t)(seed % 4);
        test_chain_shape shape = {.stages_min = (int32_t)n,
                                  .stages_max = (int32_t)n,
                                  .bytes_max = ((int64_t)1 << 62) / (4 * n),
                                  .ns_max = seed % 2 == 0 ? ((int64_t)1 << 62) / (3 * n) : 10,
                                  .workspaces = seed % 3 == 0,
                                  .positive = true};
        cairn_problem *problem = test_random_chain(&random, &shape);
        check_all_extremes(problem, seed);
        cairn_problem_free(problem);
    }
}

/* The same problem with sizes and times about as large as the sum of all sizes, or of all times, allows. */
static cairn_problem *grown_to_the_end(cairn_problem *problem)
{
    cairn_problem *grown;
    int64_t factor = INT64_MAX;
    while (cairn_problem_scale(NULL, problem, factor, 1, &grown, NULL) == CAIRN_OVERFLOW)
        factor -= factor / 64;
    assert_non_null(grown);
    cairn_problem_free(problem);
    return grown;
}

/* What is computed twice, or offloaded, may take more than 2^63 - 1 ns: then it is no answer, and others are. */
static void sums_near_the_end_of_the_range(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(120); seed++) {
        test_random random = test_random_seeded(seed + 70000);
        test_chain_shape chain = test_chain_of_everything(5);
        test_graph_shape graph = test_graph_of_everything(seed % 5 == 4 ? 14 : 7);
        chain.machine = graph.machine = seed % 3 == 0;
        chain.bytes_max = graph.bytes_max = seed % 4 < 2 ? 3 : 12;
        chain.ns_max = graph.ns_max = seed % 4 < 2 ? 12 : 3;
        graph.training = seed % 7 > 2;
        cairn_problem *problem =
            grown_to_the_end(seed % 2 == 0 ? test_random_graph(&random, &graph) : test_random_chain(&random, &chain));
        question q = {problem, "store-all", seed, -1, 500, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_answers_at_extremes, &limits);
        cairn_problem_free(problem);
    }
}

static void sizes_and_times_of_zero(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 5; n++) {
        cairn_stage_option option = {"keep", 0, 0, 0, 0, 0};
        cairn_stage stages[5];
        cairn_node nodes[5];
        cairn_chain chain = {0, 0, n, stages};
        cairn_graph graph = {n, nodes, -1};
        cairn_problem *problem;
        for (int32_t i = 0; i < n; i++) {
            stages[i] = (cairn_stage){.option_count = 1, .options = &option};
            nodes[i] = (cairn_node){.alias_of = -1};
        }
        assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
        check_all_extremes(problem, (uint64_t)n);
        cairn_problem_free(problem);
        assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
        check_all_extremes(problem, (uint64_t)n);
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_near_the_end_of_the_range),
        cmocka_unit_test(sums_near_the_end_of_the_range),
        cmocka_unit_test(sizes_and_times_of_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
