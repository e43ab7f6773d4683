/*
 * Chains in which values stay, are recomputed or offloaded: against exhaustive search on tiny ones, against every other
 * solver on small and measured ones, and where the link or the host is of no use.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/check.h"
#include "support/exhaustive_joint.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

typedef struct question {
    const cairn_problem *problem;
    const char *solver;
    int64_t budget;
    uint64_t seed;
    const char *host; /* NULL = the problem's machine */
    const char *rate;
    const char *iterations; /* NULL = the solver's own */
} question;

static cairn_options *options_of(const question *q)
{
    cairn_options *options = test_options(q->solver, q->budget, "threads=1");
    if (q->iterations)
        assert_int_equal(cairn_options_set(options, "iterations", q->iterations, NULL), CAIRN_OK);
    if (q->host) {
        assert_int_equal(cairn_options_set(options, "host-budget", q->host, NULL), CAIRN_OK);
        assert_int_equal(cairn_options_set(options, "to-host", q->rate, NULL), CAIRN_OK);
        assert_int_equal(cairn_options_set(options, "to-device", q->rate, NULL), CAIRN_OK);
    }
    return options;
}

static cairn_info ask(const question *q)
{
    cairn_options *options = options_of(q);
    cairn_schedule *schedule;
    cairn_info info;
    cairn_error error;
    if (cairn_solve(NULL, q->problem, options, &schedule, &info, &error) != CAIRN_OK)
        fail_msg("%s, seed %llu: %s", q->solver, (unsigned long long)q->seed, error.message);
    cairn_schedule_free(schedule);
    cairn_options_free(options);
    return info;
}

static int64_t budget_between(const cairn_info *ends, int64_t step, int64_t steps)
{
    return ends->least_bytes + (ends->store_all_bytes - ends->least_bytes) * step / steps;
}

/* ---- exhaustive search ---- */

/* The oracle itself: without transfers it is brute-chain, without recomputation offload-exact. */
static void the_oracle_agrees_with_the_exact_solvers(void **state)
{
    int known = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(240); seed++) {
        cairn_problem *problem = test_random_chain_with_link(seed + 500, 4);
        const cairn_machine *machine = cairn_problem_info_of(problem)->machine;
        test_joint_limits limits = {.no_recompute = true, .incumbent_ns = INT64_MAX};
        question q = {.problem = problem, .solver = "offload-exact", .budget = 1 << 20, .seed = seed};
        cairn_info ends = ask(&q);
        for (int step = 0; step < 3; step++) {
            q.budget = budget_between(&ends, step, 3);
            int64_t exact = test_exhaustive_joint(problem, machine, q.budget, limits);
            check(&q, exact < 0 || ask(&q).makespan_ns == exact);
            known += exact >= 0;
        }
        q.budget = ends.least_bytes - 1;
        check(&q, test_exhaustive_joint(problem, machine, q.budget, limits) == INT64_MAX);
        q.solver = "brute-chain";
        q.budget = 1 << 20;
        ends = ask(&q);
        q.budget = budget_between(&ends, (int64_t)(seed % 3), 3);
        limits = (test_joint_limits){.no_transfers = true, .incumbent_ns = INT64_MAX};
        int64_t exact = test_exhaustive_joint(problem, machine, q.budget, limits);
        check(&q, exact < 0 || ask(&q).makespan_ns == exact);
        known += exact >= 0;
        cairn_problem_free(problem);
    }
    assert_true(known > TEST_ROUNDS(240) * 4 * 9 / 10); /* of four questions each, it gives up few */
}

typedef struct tally {
    int64_t count, optimal, gave_up;
    double sum, worst;
    uint64_t worst_seed;
} tally;

static void compare_with_oracle(const question *q, tally *t)
{
    cairn_info info = ask(q);
    int64_t makespan = info.makespan_ns < 0 ? INT64_MAX : info.makespan_ns;
    test_joint_limits limits = {.incumbent_ns = makespan};
    int64_t best = test_exhaustive_joint(q->problem, cairn_problem_info_of(q->problem)->machine, q->budget, limits);
    t->gave_up += best < 0;
    if (best < 0 || best == INT64_MAX)
        return;
    check(q, info.lower_bound_ns <= best);
    check(q, makespan < INT64_MAX);
    double above = best > 0 ? (double)makespan / (double)best - 1 : 0;
    t->count++;
    t->optimal += makespan == best;
    t->sum += above;
    if (above > t->worst) {
        t->worst = above;
        t->worst_seed = q->seed;
    }
}

static void tiny_chains_are_near_the_optimum(void **state)
{
    tally t = {0};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(320); seed++) {
        cairn_problem *problem = test_random_chain_with_link(seed, seed % 4 == 2 ? 3 : 4);
        question q = {.problem = problem, .solver = "joint-chain", .budget = 1 << 20, .seed = seed};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, (int64_t)(seed / 4 % 4), 5);
        compare_with_oracle(&q, &t);
        cairn_problem_free(problem);
    }
    printf("joint-chain: %.2f %% above the optimum, %lld of %lld optimal, worst %.1f %% (seed %llu), %lld given up\n",
           100 * t.sum / (double)t.count, (long long)t.optimal, (long long)t.count, 100 * t.worst,
           (unsigned long long)t.worst_seed, (long long)t.gave_up);
    assert_true(t.count > TEST_ROUNDS(280));
    if (t.count > 280) /* an average needs all of them */
        assert_true(t.sum / (double)t.count < 0.01);
}

/* ---- never worse: than any but those that need a library that may not be there ---- */

static void check_against_all(const question *given)
{
    question q = *given;
    const char *own = q.solver;
    cairn_info joint = ask(&q);
    for (int i = 0; cairn_solver_at(i); i++) {
        const cairn_solver_info *other = cairn_solver_at(i);
        if (other->minimizes_memory || strcmp(other->name, own) == 0 || strcmp(other->name, "graph-milp") == 0 ||
            strcmp(other->name, "graph-lp-round") == 0 ||
            cairn_solver_accepts(other->name, q.problem, NULL, NULL) != CAIRN_OK)
            continue;
        q.solver = other->name;
        cairn_info info = ask(&q);
        check(&q, info.makespan_ns < 0 || (joint.makespan_ns >= 0 && joint.makespan_ns <= info.makespan_ns));
        check(&q, info.least_bytes < 0 || joint.least_bytes <= info.least_bytes);
        check(&q, strcmp(other->name, "auto") != 0 || info.makespan_ns == joint.makespan_ns);
    }
}

static void no_other_solver_is_better(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(140); seed++) {
        cairn_problem *problem = test_random_chain_with_link(seed + 3000, (int32_t)(3 + seed % 8));
        question q = {.problem = problem, .solver = "joint-chain", .budget = 1 << 20, .seed = seed};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, (int64_t)(seed % 7), 7);
        check_against_all(&q);
        cairn_problem_free(problem);
    }
}

static void no_other_solver_is_better_on_graphs(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(140); seed++) {
        test_random random = test_random_seeded(seed);
        test_graph_shape shape = test_graph_of_everything((int32_t)(4 + seed % 20));
        shape.machine = true;
        shape.training = seed % 2 == 0;
        shape.signed_workspaces = seed % 3 == 0;
        cairn_problem *problem = test_random_graph(&random, &shape);
        question q = {.problem = problem, .solver = "joint-graph", .budget = 1 << 20, .seed = seed, .iterations = "40"};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, (int64_t)(seed % 7), 7);
        check_against_all(&q);
        q.budget = ends.least_bytes - 1;
        check(&q, q.budget < 0 || ask(&q).outcome == CAIRN_OUTCOME_INFEASIBLE);
        cairn_problem_free(problem);
    }
}

/* ---- a link or a host that are of no use ---- */

static void without_use_it_is_recomputation(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++) {
        test_random random = test_random_seeded(seed + 100);
        test_chain_shape shape = {.stages_min = 3, .stages_max = 6, .positive = true};
        cairn_problem *problem = test_random_chain(&random, &shape);
        question q = {.problem = problem, .solver = "brute-chain", .budget = 1 << 20, .seed = seed};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, (int64_t)(seed % 4), 4);
        cairn_info alone = ask(&q);
        q.solver = "joint-chain";
        q.host = "0";
        q.rate = "1TB/s";
        check(&q, ask(&q).makespan_ns == alone.makespan_ns && ask(&q).host_peak_bytes == 0);
        check(&q, ask(&q).least_bytes == ends.least_bytes);
        q.host = "1000"; /* a byte a second: nothing of some nanoseconds pays */
        q.rate = "1/s";
        check(&q, ask(&q).makespan_ns == alone.makespan_ns);
        q.rate = "9223372036854775807/s"; /* everything there and back at once */
        check(&q, ask(&q).makespan_ns <= alone.makespan_ns);
        cairn_problem_free(problem);
    }
}

/* ---- stopping and memory ---- */

static cairn_status solve_with(const cairn_env *env, void *context)
{
    const question *q = context;
    return test_solve_status(env, q->problem, options_of(q));
}

static cairn_problem *with_machine(uint64_t seed, int32_t size)
{
    test_random random = test_random_seeded(seed);
    test_chain_shape chain = {
        .stages_min = size, .stages_max = size, .options_max = 2, .machine = true, .positive = true};
    test_graph_shape graph = {.nodes_min = 2 * size,
                              .nodes_max = 2 * size,
                              .training = true,
                              .machine = true,
                              .aliases = true,
                              .positive = true};
    return seed % 2 == 0 ? test_random_chain(&random, &chain) : test_random_graph(&random, &graph);
}

static void stopping_leaves_an_answer_or_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 2; seed++) {
        cairn_problem *problem = with_machine(seed, 20);
        question q = {.problem = problem,
                      .solver = seed == 0 ? "joint-chain" : "joint-graph",
                      .budget = 1 << 20,
                      .seed = seed,
                      .iterations = "50"};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, 1, 4);
        int answers = 0;
        for (int most = 0; most < 200; most = 2 * most + 1) {
            int left = most;
            cairn_env env = {.poll = test_stop_after, .poll_context = &left};
            cairn_status status = solve_with(&env, &q);
            check(&q, status == CAIRN_OK || status == CAIRN_CANCELLED);
            answers += status == CAIRN_OK;
        }
        assert_true(answers > 0);
        cairn_problem_free(problem);
    }
}

/* Lists of this length take seconds to be made to fit; that is not what a short time goes into. */
static void a_short_time_is_for_an_answer(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 2; seed++) {
        cairn_problem *problem = with_machine(seed, 480);
        const char *solver = seed == 0 ? "joint-chain" : "joint-graph";
        cairn_limits ends = test_limits(problem, test_options("store-all", -1, ""));
        int64_t budget = (2 * ends.least_lower_bytes + ends.store_all_bytes) / 3;
        clock_t begun = clock();
        cairn_info info = test_solve(problem, test_options(solver, budget, "time-limit=3s threads=1"), NULL);
        assert_true(clock() - begun < CLOCKS_PER_SEC * 4);
        assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
        cairn_problem_free(problem);
    }
}

/* A time limit is work without end; that is no reason to leave out those who use it. Whether a second leaves them any
   time depends on what else the machine does. */
static void auto_gives_a_time_limit_to_it(void **state)
{
    static const char *const limits[] = {"time-limit=1s threads=1", "time-limit=4s threads=1",
                                         "time-limit=16s threads=1"};
    (void)state;
    for (uint64_t seed = 0; seed < 2; seed++) {
        cairn_problem *problem = with_machine(seed, 40);
        cairn_limits ends = test_limits(problem, test_options("store-all", -1, ""));
        int64_t budget = (ends.least_lower_bytes + ends.store_all_bytes) / 2;
        bool is_asked = false;
        for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]) && !is_asked; i++) {
            cairn_info info = test_solve(problem, test_options("auto", budget, limits[i]), NULL);
            assert_true(info.outcome <= CAIRN_OUTCOME_FEASIBLE);
            assert_null(strstr(info.reason, "too costly"));
            is_asked = strstr(info.reason, seed == 0 ? "joint-chain" : "joint-graph") != NULL;
        }
        assert_true(is_asked);
        cairn_problem_free(problem);
    }
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 2; seed++) {
        cairn_problem *problem = with_machine(seed + 4, 2);
        question q = {.problem = problem,
                      .solver = seed == 0 ? "joint-chain" : "joint-graph",
                      .budget = 1 << 20,
                      .seed = seed,
                      .iterations = "1"};
        cairn_info ends = ask(&q);
        q.budget = budget_between(&ends, 1, 3);
        printf("%s: %lld allocations\n", q.solver, test_every_allocation_fails(solve_with, &q));
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracle_agrees_with_the_exact_solvers),
        cmocka_unit_test(tiny_chains_are_near_the_optimum),
        cmocka_unit_test(no_other_solver_is_better),
        cmocka_unit_test(no_other_solver_is_better_on_graphs),
        cmocka_unit_test(without_use_it_is_recomputation),
        cmocka_unit_test(stopping_leaves_an_answer_or_nothing),
        cmocka_unit_test(a_short_time_is_for_an_answer),
        cmocka_unit_test(auto_gives_a_time_limit_to_it),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
