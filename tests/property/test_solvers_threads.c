/* Solvers that run in threads: problems large enough for threads to be used, and no oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/check.h"
#include "support/question.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { STRIDE = TEST_ROUNDS(4) == 4 ? 1 : 2 };

static void check_larger(const question *given, void *context)
{
    question q = *given;
    const cairn_limits *limits = context;
    for (int step = 0; step <= 4; step += STRIDE) {
        q.budget = limits->least_lower_bytes + (limits->store_all_bytes - limits->least_lower_bytes) * step / 4;
        q.threads = "1";
        reply alone = ask(&q);
        check_answer(&q, &alone);
        q.threads = "3";
        reply together = ask(&q);
        check(&q, same_ops(alone.schedule, together.schedule));
        check(&q, alone.info.lower_bound_ns == together.info.lower_bound_ns);
        check(&q, alone.info.least_bytes == together.info.least_bytes);
        done(&alone);
        done(&together);
    }
}

static cairn_bound bound_of(const cairn_problem *problem, int64_t budget_bytes, const char *settings)
{
    cairn_options *options = test_options("auto", budget_bytes, settings);
    cairn_bound bound;
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, NULL), CAIRN_OK);
    cairn_options_free(options);
    return bound;
}

static void check_bound(const cairn_problem *problem, int64_t budget_bytes)
{
    cairn_bound alone = bound_of(problem, budget_bytes, "threads=1");
    cairn_bound together = bound_of(problem, budget_bytes, "threads=3");
    assert_int_equal(alone.lower_bound_ns, together.lower_bound_ns);
    assert_int_equal(alone.least_lower_bytes, together.least_lower_bytes);
}

static void threads_change_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6 / STRIDE; seed += STRIDE) { /* every third one is a graph */
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = test_chain_of_everything(80);
        shape.stages_min = 66; /* enough for threads to be used */
        shape.no_recompute = seed % 2 == 0;
        test_graph_shape graph_shape = test_graph_of_everything(80);
        graph_shape.nodes_min = 66;
        cairn_problem *problem =
            seed % 3 == 2 ? test_random_graph(&random, &graph_shape) : test_random_chain(&random, &shape);
        question q = {problem, "store-all", seed, -1, 40, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_larger, &limits);
        check_bound(problem, (limits.least_lower_bytes + limits.store_all_bytes) / 2);
        cairn_problem_free(problem);
    }
}

static void check_memory_limit(const question *q, void *context)
{
    (void)context;
    for (int64_t limit = 0; limit < 4000000; limit = 3 * limit + 100) {
        cairn_options *options = options_for(q);
        reply r;
        assert_int_equal(cairn_options_set_int(options, "memory-limit", limit, NULL), CAIRN_OK);
        cairn_status status = cairn_solve(NULL, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || status == CAIRN_MEMORY_LIMIT);
        check(q, status != CAIRN_OK || r.info.solver_peak_bytes <= limit);
        done(&r);
        cairn_options_free(options);
    }
}

static void memory_limits_hold(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 70, .stages_max = 70};
    const test_graph_shape graph = {.nodes_min = 70, .nodes_max = 70, .training = true};
    for (uint64_t seed = 0; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 100, .threads = "2"}, &chain, &graph,
                                check_memory_limit);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(memory_limits_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
