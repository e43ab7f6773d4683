/* Solvers that are stopped, limited in work, or whose allocations fail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/check.h"
#include "support/faulty_allocator.h"
#include "support/question.h"
#include "support/random_problem.h"
#include "support/rounds.h"

typedef struct patience {
    int polls, most;
} patience;

static int lose_patience(void *context, const cairn_progress *progress)
{
    patience *p = context;
    assert_non_null(progress);
    return p->polls++ >= p->most;
}

/* An answer that is not said to be stopped early is the one that the solver gives when it is let go on. */
static void check_stopping(const question *q, void *context)
{
    (void)context;
    reply whole = ask(q);
    for (int most = 0; most < 60; most = 2 * most + 1) {
        patience p = {0, most};
        cairn_env env = {.poll = lose_patience, .poll_context = &p};
        cairn_options *options = options_for(q);
        reply r;
        cairn_status status = cairn_solve(&env, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || status == CAIRN_CANCELLED);
        check(q, status == CAIRN_OK || (!r.schedule && r.info.makespan_ns == CAIRN_NONE));
        check(q, status == CAIRN_OK || p.polls > most);
        check(q, p.polls <= most + 1); /* asked no more once it has said stop */
        if (status == CAIRN_OK && r.schedule)
            check_replay(q, &r);
        if (status == CAIRN_OK && !r.info.stopped_early) {
            check(q, r.info.outcome == whole.info.outcome);
            check(q, r.info.makespan_ns == whole.info.makespan_ns);
        }
        done(&r);
        cairn_options_free(options);
    }
    done(&whole);
}

static void stopping_leaves_an_answer_or_nothing(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 24, .stages_max = 24, .options_max = 2};
    const test_graph_shape graph = {.nodes_min = 24, .nodes_max = 24, .training = true};
    for (uint64_t seed = 0; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 50}, &chain, &graph, check_stopping);
}

/* What a limit ended: nothing is called infeasible that the same solver finds when it is let go on. */
typedef struct end_of_work {
    const char *option;
    int64_t value;
} end_of_work;

static void check_limited(const question *q, const end_of_work *end, const reply *whole)
{
    cairn_options *options = options_for(q);
    reply r;
    assert_int_equal(cairn_options_set_int(options, end->option, end->value, NULL), CAIRN_OK);
    cairn_status status = cairn_solve(NULL, q->problem, options, &r.schedule, &r.info, NULL);
    check(q, status == CAIRN_OK || status == CAIRN_MEMORY_LIMIT);
    bool infeasible = status == CAIRN_OK && r.info.outcome == CAIRN_OUTCOME_INFEASIBLE;
    if (infeasible && whole->schedule)
        fail_msg("%s, seed %llu, budget %lld: infeasible with %s %lld", q->solver, (unsigned long long)q->seed,
                 (long long)q->budget, end->option, (long long)end->value);
    check(q, status != CAIRN_OK || r.schedule || r.info.reason[0] != '\0');
    done(&r);
    cairn_options_free(options);
}

static void check_limits(const question *given, void *context)
{
    static const end_of_work limits[] = {
        {"iterations", 0},        {"iterations", 1},         {"time-limit", 0},         {"time-limit", 20000},
        {"time-limit", 1000000},  {"time-limit", 5000000},   {"memory-limit", 20000},   {"memory-limit", 100000},
        {"memory-limit", 300000}, {"memory-limit", 1000000}, {"memory-limit", 3000000}, {"memory-limit", 10000000},
    };
    question q = *given;
    const cairn_limits *all = context;
    for (int step = 0; step < 4; step++) {
        q.budget = all->least_lower_bytes + (all->store_all_bytes - all->least_lower_bytes) * step * step / 12;
        reply whole = ask(&q);
        for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++)
            check_limited(&q, &limits[i], &whole);
        done(&whole);
    }
}

static void what_a_limit_ends_is_not_infeasible(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(40); seed++) {
        test_random random = test_random_seeded(seed + 80000);
        test_chain_shape chain = test_chain_of_everything(9);
        test_graph_shape graph = test_graph_of_everything(16);
        chain.machine = graph.machine = seed % 4 == 0;
        graph.nodes_min = 12; /* more than exhaustive search takes */
        graph.training = seed % 3 > 0;
        cairn_problem *problem =
            seed % 8 == 4 ? test_random_chain(&random, &chain) : test_random_graph(&random, &graph);
        question q = {problem, "auto", seed, -1, 50, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_limits, &limits);
        cairn_problem_free(problem);
    }
}

/* As many iterations as can be asked for, which the clock or the caller ends. */
static void check_without_end(const question *q, void *context)
{
    (void)context;
    for (int by_clock = 0; by_clock < 2; by_clock++) {
        patience p = {0, 30};
        cairn_env env = {.poll = by_clock ? NULL : lose_patience, .poll_context = &p};
        cairn_options *options = options_for(q);
        reply r;
        assert_int_equal(cairn_options_set_int(options, "iterations", INT64_MAX, NULL), CAIRN_OK);
        if (by_clock)
            assert_int_equal(cairn_options_set_int(options, "time-limit", 3000000, NULL), CAIRN_OK);
        cairn_status status = cairn_solve(&env, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || (status == CAIRN_CANCELLED && !by_clock));
        if (status == CAIRN_OK && r.schedule)
            check_replay(q, &r);
        done(&r);
        cairn_options_free(options);
    }
}

static void iterations_without_end_are_ended(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 12, .stages_max = 12, .options_max = 2, .machine = true};
    const test_graph_shape graph = {.nodes_min = 16, .nodes_max = 16, .training = true};
    const test_graph_shape linked = {.nodes_min = 16, .nodes_max = 16, .training = true, .machine = true};
    for (uint64_t seed = 0; seed < 8; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 50}, &chain, seed % 4 == 1 ? &graph : &linked,
                                check_without_end);
}

static cairn_status solve_once(const cairn_env *env, void *context)
{
    const question *q = context;
    return test_solve_status(env, q->problem, options_for(q));
}

static void check_allocations(const question *q, void *context)
{
    question copy = *q;
    (void)context;
    assert_true(test_every_allocation_fails(solve_once, &copy) > 3);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 4, .stages_max = 4, .options_max = 2};
    const test_graph_shape graph = {.nodes_min = 6, .nodes_max = 6, .training = true};
    for (uint64_t seed = 2; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 20}, &chain, &graph, check_allocations);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stopping_leaves_an_answer_or_nothing),
        cmocka_unit_test(what_a_limit_ends_is_not_infeasible),
        cmocka_unit_test(iterations_without_end_are_ended),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
