/*
 * The solvers that offload saved sets and recompute nothing: against the exact one and its bound, and at the ends
 * of what a link and a host can be.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/check.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static const char *const solvers[] = {"offload-exact", "offload-greedy", "offload-dp", "offload-vdnn"};

enum { SOLVERS = sizeof(solvers) / sizeof(solvers[0]) };

/* A question, and where it was asked. */
typedef struct question {
    const cairn_problem *problem;
    const char *solver;
    int64_t budget;
    uint64_t seed;
    const cairn_machine *machine; /* NULL = the problem's */
} question;

static void set_machine(cairn_options *options, const cairn_machine *machine)
{
    if (!machine)
        return;
    assert_int_equal(cairn_options_set_int(options, "host-budget", machine->host_bytes, NULL), CAIRN_OK);
    char rate[32];
    snprintf(rate, sizeof(rate), "%lld/s", (long long)machine->to_host_bytes_per_s);
    assert_int_equal(cairn_options_set(options, "to-host", rate, NULL), CAIRN_OK);
    snprintf(rate, sizeof(rate), "%lld/s", (long long)machine->to_device_bytes_per_s);
    assert_int_equal(cairn_options_set(options, "to-device", rate, NULL), CAIRN_OK);
}

static cairn_info ask(const question *q, cairn_schedule **schedule)
{
    cairn_options *options;
    cairn_info info;
    cairn_error error;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "solver", q->solver, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "threads", "1", NULL), CAIRN_OK);
    set_machine(options, q->machine);
    if (q->budget >= 0)
        assert_int_equal(cairn_options_set_int(options, "budget", q->budget, NULL), CAIRN_OK);
    else
        assert_int_equal(cairn_options_set(options, "budget", "none", NULL), CAIRN_OK);
    if (cairn_solve(NULL, q->problem, options, schedule, &info, &error) != CAIRN_OK)
        fail_msg("%s, seed %llu: %s", q->solver, (unsigned long long)q->seed, error.message);
    cairn_options_free(options);
    return info;
}

static cairn_info ask_alone(const question *q)
{
    cairn_schedule *schedule;
    cairn_info info = ask(q, &schedule);
    cairn_schedule_free(schedule);
    return info;
}

/* The number in the sentence of the reason: the bound without recomputation. */
static int64_t bound_in(const cairn_info *info)
{
    const char *digits = strpbrk(info->reason, "0123456789");
    assert_non_null(digits);
    return strtoll(digits, NULL, 10);
}

static void compare(const question *given, const cairn_info *exact)
{
    question q = *given;
    for (int i = 1; i < SOLVERS; i++) {
        q.solver = solvers[i];
        cairn_info info = ask_alone(&q);
        check(&q, info.least_bytes >= exact->least_bytes);
        if (info.makespan_ns < 0)
            continue;
        check(&q, exact->makespan_ns >= 0 && info.makespan_ns >= exact->makespan_ns);
        check(&q, info.recompute_ns == 0);
        check(&q, bound_in(&info) <= exact->makespan_ns);
    }
}

static void nothing_beats_the_exact_one(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1200); seed++) {
        cairn_problem *problem = test_random_chain_with_link(seed, 5);
        question q = {problem, "offload-exact", -1, seed, NULL};
        cairn_info ends = ask_alone(&q);
        check(&q, strcmp(ends.optimal_in, "offload") == 0 || ends.outcome == CAIRN_OUTCOME_OPTIMAL);
        int64_t before = INT64_MAX;
        for (int step = 0; step <= 4; step++) {
            q.budget = ends.least_bytes + (ends.store_all_bytes - ends.least_bytes) * step / 4;
            cairn_info exact = ask_alone(&q);
            check(&q, exact.makespan_ns >= 0 && exact.makespan_ns <= before && exact.recompute_ns == 0);
            check(&q, exact.makespan_ns >= bound_in(&exact));
            before = exact.makespan_ns;
            compare(&q, &exact);
        }
        cairn_problem_free(problem);
    }
}

/* How far from the optimum; measured: greedy 0.6 %, the program 0.13 %, vdnn 0.7 %. */
static void the_program_is_near_the_optimum(void **state)
{
    double sum[SOLVERS] = {0};
    int count = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 600; seed++) {
        test_random random = test_random_seeded(seed + 7000);
        test_chain_shape shape = {.stages_min = 4,
                                  .stages_max = 6,
                                  .machine = true,
                                  .positive = true,
                                  .plain_grads = true,
                                  .bytes_max = 100,
                                  .ns_max = 100};
        cairn_problem *problem = test_random_chain(&random, &shape);
        question q = {problem, "offload-exact", -1, seed, NULL};
        cairn_info ends = ask_alone(&q);
        q.budget = ends.least_bytes + (ends.store_all_bytes - ends.least_bytes) * (int64_t)(seed % 8) / 8;
        double makespan[SOLVERS];
        bool all = true;
        for (int i = 0; i < SOLVERS; i++) {
            q.solver = solvers[i];
            cairn_info info = ask_alone(&q);
            all &= info.makespan_ns > 0;
            makespan[i] = (double)info.makespan_ns;
        }
        for (int i = 0; all && i < SOLVERS; i++)
            sum[i] += makespan[i] / makespan[0] - 1;
        count += all;
        cairn_problem_free(problem);
    }
    for (int i = 1; i < SOLVERS; i++)
        printf("%s: %.2f %% above the optimum on %d chains\n", solvers[i], 100 * sum[i] / count, count);
    assert_true(count > 300);
    assert_true(sum[2] / count < 0.02);
}

/* ---- the ends ---- */

static cairn_problem *seven_stages(void)
{
    cairn_stage_option option = {"keep", 10, 4, 4, 0, 0};
    cairn_stage stages[7];
    cairn_chain chain = {10, 10, 7, stages};
    cairn_machine machine = {1000, 1000000000, 1000000000, 0, false};
    cairn_problem_info info = {.machine = &machine};
    cairn_problem *problem;
    for (int i = 0; i < 7; i++)
        stages[i] = (cairn_stage){
            .output_bytes = 10, .grad_bytes = 10, .forward_only_ns = 4, .option_count = 1, .options = &option};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

/* a[0], d[7] and two saved sets, of ten bytes each, are the least; storing everything takes a gradient beside ten. */
static void hosts_of_every_size(void **state)
{
    (void)state;
    cairn_problem *problem = seven_stages();
    for (int i = 1; i < 3; i++) { /* vdnn sends equal stages all or none */
        cairn_machine machine = {0, 1000000000, 1000000000, 0, false};
        question q = {problem, solvers[i], 100, 0, &machine};
        check(&q, ask_alone(&q).makespan_ns == 56); /* everything fits: nothing is offloaded */
        q.budget = 99;
        check(&q, ask_alone(&q).outcome == CAIRN_OUTCOME_INFEASIBLE);
        check(&q, ask_alone(&q).least_bytes == 100);
        machine.host_bytes = 9;
        check(&q, ask_alone(&q).outcome == CAIRN_OUTCOME_INFEASIBLE);
        machine.host_bytes = 10;
        check(&q, ask_alone(&q).makespan_ns >= 56 && ask_alone(&q).host_peak_bytes == 10);
        machine.host_bytes = 50; /* A[1..5] */
        q.budget = 50;
        check(&q, ask_alone(&q).makespan_ns > 56 && ask_alone(&q).host_peak_bytes == 50);
        machine.host_bytes = 49;
        check(&q, ask_alone(&q).outcome == CAIRN_OUTCOME_INFEASIBLE);
        machine.host_bytes = 1000;
        q.budget = 49;
        check(&q, ask_alone(&q).outcome == CAIRN_OUTCOME_INFEASIBLE && ask_alone(&q).least_bytes == 50);
    }
    cairn_problem_free(problem);
}

static void links_of_every_speed(void **state)
{
    (void)state;
    cairn_problem *problem = seven_stages();
    for (int i = 1; i < SOLVERS; i++) {
        cairn_machine machine = {1000, INT64_MAX, INT64_MAX, 0, false};
        question q = {problem, solvers[i], 60, 0, &machine};
        cairn_info fast = ask_alone(&q);
        check(&q, fast.makespan_ns <= 56 + 10); /* a transfer lasts a nanosecond */
        machine.to_host_bytes_per_s = machine.to_device_bytes_per_s = 1;
        cairn_info slow = ask_alone(&q);
        check(&q, slow.makespan_ns >= INT64_C(80000000000)); /* forty bytes out and back, a second each */
        check(&q, slow.stall_ns == slow.makespan_ns - 56);
    }
    cairn_problem_free(problem);
}

/* One link for both directions is never better than two, for the exact solver. */
static void a_shared_link_is_no_better(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(300); seed++) {
        cairn_problem *problem = test_random_chain_with_link(4 * seed + 1, 5);
        cairn_problem_info info = *cairn_problem_info_of(problem);
        cairn_machine machine = *info.machine;
        cairn_problem *other;
        machine.shared_link = !machine.shared_link;
        info.machine = &machine;
        assert_int_equal(cairn_problem_new_chain(NULL, cairn_problem_chain(problem), &info, &other, NULL), CAIRN_OK);
        question q = {machine.shared_link ? problem : other, "offload-exact", -1, seed, NULL};
        cairn_info ends = ask_alone(&q);
        q.budget = (ends.least_bytes + ends.store_all_bytes) / 2;
        int64_t two = ask_alone(&q).makespan_ns;
        q.problem = machine.shared_link ? other : problem;
        check(&q, ask_alone(&q).makespan_ns >= two);
        cairn_problem_free(other);
        cairn_problem_free(problem);
    }
}

/* The exact search asks whether to stop after some thousand states: what it started from is an answer by then. */
static void a_stopped_search_keeps_its_start(void **state)
{
    int stopped = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 60; seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = {.stages_min = 6,
                                  .stages_max = 6,
                                  .machine = true,
                                  .positive = true,
                                  .plain_grads = true,
                                  .options_max = 2,
                                  .bytes_max = 100,
                                  .ns_max = 100};
        cairn_problem *problem = test_random_chain(&random, &shape);
        question q = {problem, "offload-exact", -1, seed, NULL};
        cairn_info ends = ask_alone(&q);
        q.budget = ends.least_bytes;
        cairn_info exact = ask_alone(&q);
        int polls = 0;
        const cairn_env env = {.poll = test_stop_after, .poll_context = &polls};
        cairn_options *options = test_options("offload-exact", q.budget, "threads=1");
        cairn_info cut;
        check(&q, cairn_solve(&env, problem, options, NULL, &cut, NULL) == CAIRN_OK);
        check(&q, cut.makespan_ns >= exact.makespan_ns && exact.makespan_ns > 0);
        check(&q, cut.stopped_early || cut.makespan_ns == exact.makespan_ns);
        check(&q, !cut.stopped_early || cut.optimal_in[0] == '\0');
        stopped += cut.stopped_early;
        cairn_options_free(options);
        cairn_problem_free(problem);
    }
    assert_true(stopped > 0);
}

/* A thousand stages: within seconds, and the states of the program do not round. */
static void long_chains(void **state)
{
    (void)state;
    test_random random = test_random_seeded(1);
    test_chain_shape shape = {.stages_min = 1000,
                              .stages_max = 1000,
                              .machine = true,
                              .positive = true,
                              .plain_grads = true,
                              .bytes_max = 1000000,
                              .ns_max = 1000000};
    cairn_problem *problem = test_random_chain(&random, &shape);
    question q = {problem, "offload-dp", -1, 0, NULL};
    cairn_info ends = ask_alone(&q);
    q.budget = ends.least_bytes + (ends.store_all_bytes - ends.least_bytes) / 3;
    cairn_info dp = ask_alone(&q);
    check(&q, dp.makespan_ns >= 0);
    printf("n = 1000: %.2f s, %.3f of the bound\n", (double)dp.solve_ns / 1e9,
           (double)dp.makespan_ns / (double)bound_in(&dp));
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_beats_the_exact_one),
        cmocka_unit_test(the_program_is_near_the_optimum),
        cmocka_unit_test(hosts_of_every_size),
        cmocka_unit_test(links_of_every_speed),
        cmocka_unit_test(a_shared_link_is_no_better),
        cmocka_unit_test(a_stopped_search_keeps_its_start),
        cmocka_unit_test(long_chains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
