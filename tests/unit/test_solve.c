/* The call around the solvers: options, outcomes, records, cancelling, limits. Solvers themselves: test_solvers.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "solve/session.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

/* Two stages: storing everything takes 10 + 20 + 30 bytes at the turn, and 1 + 2 + 3 + 4 ns. */
static cairn_problem *two_stages(const cairn_machine *machine)
{
    static const cairn_stage_option first = {"keep", 20, 1, 4, 0, 0}, second = {"keep", 30, 2, 3, 0, 0};
    static const cairn_stage stages[] = {
        {"one", 10, 0, 0, 1, 0, false, 1, &first},
        {"two", 10, 0, 0, 2, 0, false, 1, &second},
    };
    cairn_chain chain = {10, 0, 2, stages};
    cairn_problem_info info = {.name = "two", .machine = machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static cairn_options *options_of(const char *solver, const char *budget)
{
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    if (solver)
        assert_int_equal(cairn_options_set(options, "solver", solver, NULL), CAIRN_OK);
    if (budget)
        assert_int_equal(cairn_options_set(options, "budget", budget, NULL), CAIRN_OK);
    return options;
}

static void an_answer_is_complete(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("store-all", "60");
    cairn_schedule *schedule;
    cairn_info info;
    cairn_error error;
    assert_int_equal(cairn_solve(NULL, problem, options, &schedule, &info, &error), CAIRN_OK);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_OPTIMAL);
    assert_string_equal(info.solver, "store-all");
    assert_true(info.budget_bytes == 60 && info.makespan_ns == 10 && info.peak_bytes == 60);
    assert_true(info.lower_bound_ns == 10 && info.gap >= 0 && info.gap <= 0);
    assert_true(info.store_all_bytes == 60 && info.store_all_ns == 10 && info.least_bytes == 60);
    assert_true(info.recompute_ns == 0 && info.stall_ns == 0 && info.host_peak_bytes == CAIRN_NONE);
    assert_true(info.objective_bytes == CAIRN_NONE && info.checkpoint_count == -1 && !info.checkpoints);
    assert_true(info.solve_ns >= 0 && info.solver_peak_bytes > 0 && !info.stopped_early);
    assert_string_equal(info.optimal_in, "");

    const cairn_schedule_info *recorded = cairn_schedule_info_of(schedule);
    assert_string_equal(recorded->solver, "store-all");
    assert_true(recorded->budget_bytes == 60 && recorded->makespan_ns == 10 && recorded->peak_bytes == 60);
    assert_true(recorded->lower_bound_ns == 10 && !recorded->machine);
    cairn_replay replay;
    assert_int_equal(cairn_verify(NULL, problem, schedule, CAIRN_RECORDED, NULL, &replay, &error), CAIRN_OK);
    assert_true(replay.valid);
    cairn_schedule_free(schedule);
    cairn_info_clear(&info);
    cairn_info_clear(&info);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void infeasible_is_an_outcome(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("store-all", "59");
    cairn_schedule *schedule = (cairn_schedule *)&options;
    cairn_info info;
    assert_int_equal(cairn_solve(NULL, problem, options, &schedule, &info, NULL), CAIRN_OK);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_INFEASIBLE);
    assert_null(schedule);
    assert_true(info.makespan_ns == CAIRN_NONE && info.peak_bytes == CAIRN_NONE && info.gap < 0);
    assert_int_equal(info.least_bytes, 60);
    assert_non_null(strstr(info.reason, "60"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* With 14 bytes all four stages fit, but only if forwards of 3e18 ns and more are run four times: past 2^63. */
static void what_takes_too_long_to_count_is_not_infeasible(void **state)
{
    (void)state;
    static const cairn_stage_option slow = {"keep", 10, 3000000000000000000, 1, 0, 0}, quick = {"keep", 10, 1, 1, 0, 0},
                                    second = {"keep", 10, 1000000000000000000, 1, 0, 0};
    static const cairn_stage stages[] = {
        {"a", 1, 1, 0, 3000000000000000000, 0, false, 1, &slow},
        {"b", 1, 1, 0, 1, 0, false, 1, &quick},
        {"c", 1, 1, 0, 1000000000000000000, 0, false, 1, &second},
        {"d", 1, 1, 0, 1, 0, false, 1, &quick},
    };
    static const char *const solvers[] = {"chain-exact", "chain-dp", "chain-weak", "brute-chain", "auto"};
    cairn_chain chain = {1, 1, 4, stages};
    cairn_problem_info nothing = {.name = ""};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &nothing, &problem, NULL), CAIRN_OK);
    for (size_t i = 0; i < sizeof(solvers) / sizeof(*solvers); i++) {
        cairn_options *options = options_of(solvers[i], "14");
        cairn_info info;
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
        assert_true(info.least_bytes == 14 && info.outcome == CAIRN_OUTCOME_UNKNOWN);
        assert_non_null(strstr(info.reason, "takes longer"));
        cairn_options_free(options);
    }
    cairn_problem_free(problem);
}

enum { LONG_STAGES = 8 };

/* Stages of which each takes so long, but for a little less from one to the next; outputs of 2 bytes, 4 saved. */
static cairn_problem *long_stages(int64_t forward_ns, int64_t backward_ns, int64_t less_ns)
{
    cairn_stage_option options[LONG_STAGES];
    cairn_stage stages[LONG_STAGES];
    cairn_chain chain = {0, 0, LONG_STAGES, stages};
    cairn_problem *problem;
    for (int64_t i = 0; i < LONG_STAGES; i++) {
        options[i] = (cairn_stage_option){"keep", 4, forward_ns - i * less_ns, backward_ns - i * less_ns, 0, 0};
        stages[i] = (cairn_stage){"long", 2, 2, 0, options[i].forward_ns, 0, false, 1, &options[i]};
    }
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

/* Recomputing passes 2^63 - 1 ns for all of them, or for those that stop counting before; it never is a defect. */
static void long_times_are_no_defect(void **state)
{
    static const int64_t cases[][3] = {
        {50000000000000000, 1000000000000000000, 1}, {(INT64_C(1) << 59) - 1, 0, 0},
        {169547280089242200, 45212608023797920, 0},  {100000000000000000, 900000000000000000, 3},
        {INT64_C(1) << 57, INT64_C(1) << 58, 5},
    };
    (void)state;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        cairn_problem *problem = long_stages(cases[c][0], cases[c][1], cases[c][2]);
        for (int64_t budget = 8; budget < 44; budget += 2) {
            int64_t best_ns = INT64_MAX;
            const cairn_solver_info *solver;
            for (int i = 0; (solver = cairn_solver_at(i)); i++) {
                cairn_info info;
                cairn_options *options = test_options(solver->name, budget, "");
                cairn_status status = cairn_solve(NULL, problem, options, NULL, &info, NULL);
                cairn_options_free(options);
                assert_int_not_equal(status, CAIRN_INTERNAL);
                if (status == CAIRN_OK && info.makespan_ns != CAIRN_NONE && strcmp(solver->name, "auto") != 0)
                    best_ns = info.makespan_ns < best_ns ? info.makespan_ns : best_ns;
            }
            cairn_info info = test_solve(problem, test_options("auto", budget, ""), NULL);
            assert_int_equal(info.makespan_ns, best_ns == INT64_MAX ? CAIRN_NONE : best_ns);
            cairn_info_clear(&info);
        }
        cairn_problem_free(problem);
    }
}

/* Without a budget sizes do not matter, however large they are. */
static void no_budget_is_no_large_one(void **state)
{
    static const int64_t large = INT64_C(2305843009213693950);
    static const int32_t first[] = {0}, second[] = {1}, third[] = {2};
    static const cairn_node nodes[] = {
        {.cost_ns = 10, .bytes = large, .alias_of = -1},
        {.cost_ns = 10, .bytes = large, .deps = first, .dep_count = 1, .alias_of = -1, .keep = true},
        {.cost_ns = 10, .deps = second, .dep_count = 1, .alias_of = -1},
        {.bytes = large,
         .workspace_bytes = -large,
         .deps = third,
         .dep_count = 1,
         .alias_of = -1,
         .no_recompute = true},
        {.cost_ns = 10, .deps = first, .dep_count = 1, .alias_of = -1, .no_recompute = true},
    };
    static const char *const solvers[] = {"auto", "graph-exact", "graph-search", "graph-online", "store-all"};
    cairn_graph graph = {5, nodes, 0};
    cairn_problem *problem;
    (void)state;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    for (size_t i = 0; i < sizeof(solvers) / sizeof(solvers[0]); i++) {
        cairn_info info = test_solve(problem, test_options(solvers[i], -1, "budget=none"), NULL);
        assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL && info.makespan_ns == 40 && info.lower_bound_ns == 40);
        cairn_info_clear(&info);
    }
    cairn_problem_free(problem);
}

static void one_stage_is_a_segment(void **state)
{
    static const cairn_stage_option option = {"keep", 4, 10, 10, 0, 0};
    static const cairn_stage stage = {"one", 0, 0, 0, 10, 0, false, 1, &option};
    static const char *const solvers[] = {"periodic", "chen-sqrt", "chen-greedy", "keep-greedy"};
    cairn_chain chain = {8, 0, 1, &stage};
    cairn_problem *problem;
    (void)state;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    for (size_t i = 0; i < sizeof(solvers) / sizeof(solvers[0]); i++) {
        cairn_info info = test_solve(problem, test_options(solvers[i], -1, "budget=none"), NULL);
        assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL && info.makespan_ns == 20);
        cairn_info_clear(&info);
    }
    cairn_problem_free(problem);
}

static void what_is_asked_must_make_sense(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of(NULL, NULL);
    cairn_info info;
    cairn_error error;
    cairn_bound bound;
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "budget");
    assert_int_equal(cairn_solve(NULL, problem, NULL, NULL, &info, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, &error), CAIRN_BAD_INPUT);
    cairn_options_set(options, "minimize", "memory", NULL);
    cairn_options_set(options, "budget", "60", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_BAD_INPUT);
    int64_t negative = -7;
    assert_int_equal(cairn_solve_many(NULL, problem, NULL, &negative, 1, NULL, &info, &error), CAIRN_BAD_INPUT);
    cairn_options_free(options);

    options = options_of("store-all", "none");
    cairn_options_set(options, "latency", "1us", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_BAD_INPUT);
    assert_non_null(strstr(error.message, "to-host"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void an_overridden_machine_is_recorded(void **state)
{
    (void)state;
    cairn_machine own = {1000, 1, 1, 0, false};
    cairn_problem *problem = two_stages(&own);
    cairn_options *options = options_of("store-all", "none");
    cairn_schedule *schedule;
    cairn_info info;
    assert_int_equal(cairn_solve(NULL, problem, options, &schedule, &info, NULL), CAIRN_OK);
    assert_null(cairn_schedule_info_of(schedule)->machine);
    assert_int_equal(cairn_schedule_info_of(schedule)->budget_bytes, CAIRN_NONE);
    assert_int_equal(info.host_peak_bytes, 0);
    cairn_schedule_free(schedule);
    cairn_options_set(options, "host-budget", "77", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, &schedule, &info, NULL), CAIRN_OK);
    assert_int_equal(cairn_schedule_info_of(schedule)->machine->host_bytes, 77);
    cairn_schedule_free(schedule);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void a_curve_equals_its_points(void **state)
{
    (void)state;
    test_random random = test_random_seeded(11);
    test_chain_shape shape = test_chain_of_everything(6);
    int64_t budgets[] = {CAIRN_NONE, 0, 40, 60, 80, 100};
    enum { COUNT = sizeof(budgets) / sizeof(budgets[0]) };
    for (int round = 0; round < 50; round++) {
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_options *options = options_of("auto", NULL);
        cairn_schedule *schedules[COUNT];
        cairn_info infos[COUNT];
        assert_int_equal(cairn_solve_many(NULL, problem, options, budgets, COUNT, schedules, infos, NULL), CAIRN_OK);
        for (int i = 0; i < COUNT; i++) {
            cairn_info one;
            cairn_schedule *schedule;
            if (budgets[i] == CAIRN_NONE)
                cairn_options_set(options, "budget", "none", NULL);
            else
                cairn_options_set_int(options, "budget", budgets[i], NULL);
            assert_int_equal(cairn_solve(NULL, problem, options, &schedule, &one, NULL), CAIRN_OK);
            assert_true(one.outcome == infos[i].outcome && one.makespan_ns == infos[i].makespan_ns);
            assert_true(!schedule == !schedules[i]);
            if (schedule)
                assert_string_equal(cairn_schedule_hash(schedule), cairn_schedule_hash(schedules[i]));
            cairn_schedule_free(schedule);
            cairn_schedule_free(schedules[i]);
        }
        cairn_options_free(options);
        cairn_problem_free(problem);
    }
}

static void limits_and_bounds(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("store-all", "1");
    cairn_limits limits;
    cairn_bound bound;
    assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_OK);
    assert_true(limits.least_bytes == 60 && limits.store_all_bytes == 60 && limits.store_all_ns == 10);
    assert_true(limits.least_lower_bytes > 0 && limits.least_lower_bytes <= 60);
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, NULL), CAIRN_OK);
    assert_true(bound.lower_bound_ns >= 10 && strlen(bound.method) > 0);
    assert_int_equal(bound.least_lower_bytes, limits.least_lower_bytes);
    assert_int_equal(cairn_limits_of(NULL, problem, NULL, &limits, NULL), CAIRN_OK);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void solvers_say_what_they_take(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_error error;
    assert_int_equal(cairn_solver_accepts("store-all", problem, NULL, &error), CAIRN_OK);
    assert_int_equal(cairn_solver_accepts("no-such", problem, NULL, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_solver_accepts(NULL, problem, NULL, &error), CAIRN_BAD_INPUT);
    for (int i = 0; cairn_solver_at(i); i++) {
        const cairn_solver_info *info = cairn_solver_at(i);
        assert_true(info->takes_chains || info->takes_graphs);
        assert_true(strlen(info->name) > 0 && strlen(info->summary) > 5 && strlen(info->cost) > 0);
        const crn_solver *solver = crn_solver_find(info->name);
        assert_string_equal(solver->info.name, info->name);
        assert_int_equal(info->available, !solver->available || solver->available(&error) == CAIRN_OK);
        assert_true(info->available || (error.status == CAIRN_UNAVAILABLE && strlen(error.message) > 20));
        if (!info->takes_chains)
            assert_int_equal(cairn_solver_accepts(info->name, problem, NULL, &error), CAIRN_UNSUPPORTED);
    }
    assert_null(cairn_solver_at(-1));
    assert_null(cairn_solver_at(1000));
    for (int outcome = 0; outcome <= CAIRN_OUTCOME_UNKNOWN; outcome++)
        assert_true(strlen(cairn_outcome_name((cairn_outcome)outcome)) > 3);
    cairn_problem_free(problem);
}

static int stop_at_once(void *context, const cairn_progress *progress)
{
    assert_non_null(progress);
    ++*(int *)context;
    return 1;
}

static void cancelling_before_anything_is_found(void **state)
{
    (void)state;
    int polls = 0;
    cairn_env env = {.poll = stop_at_once, .poll_context = &polls};
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("auto", "60");
    cairn_info info;
    cairn_schedule *schedule;
    assert_int_equal(cairn_solve(&env, problem, options, &schedule, &info, NULL), CAIRN_CANCELLED);
    assert_int_equal(polls, 1); /* asked once, and remembered */
    assert_null(schedule);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void no_time_at_all_does_to_store_everything(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("auto", "60");
    cairn_info info;
    cairn_options_set(options, "time-limit", "0ns", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_OPTIMAL);
    assert_string_equal(info.solver, "store-all");
    int64_t less = info.store_all_bytes - 1;
    assert_int_equal(cairn_solve_many(NULL, problem, options, &less, 1, NULL, &info, NULL), CAIRN_OK);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_UNKNOWN);
    assert_true(info.stopped_early && strlen(info.reason) > 0);
    assert_int_equal(cairn_solve_many(NULL, problem, options, &less, -1, NULL, &info, NULL), CAIRN_BAD_ARGUMENT);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* What is not said to be stopped early is what the solver answers when it is let alone. */
static void check_stops(const cairn_problem *problem, const char *solver, const char *budget, int stops)
{
    cairn_options *options = options_of(solver, budget);
    cairn_info whole, info;
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &whole, NULL), CAIRN_OK);
    for (int stop = 0; stop < stops; stop++) {
        int left = stop;
        cairn_env env = {.poll = test_stop_after, .poll_context = &left};
        cairn_status status = cairn_solve(&env, problem, options, NULL, &info, NULL);
        if (status != CAIRN_CANCELLED)
            assert_int_equal(status, CAIRN_OK);
        if (status == CAIRN_OK && !info.stopped_early) {
            assert_int_equal(info.outcome, whole.outcome);
            assert_int_equal(info.makespan_ns, whole.makespan_ns);
        }
        if (info.least_bytes != CAIRN_NONE)
            assert_int_equal(info.least_bytes, whole.least_bytes);
        cairn_info_clear(&info);
    }
    cairn_info_clear(&whole);
    cairn_options_free(options);
}

static void solvers_of_segments_say_when_they_are_stopped(void **state)
{
    static const char *const solvers[] = {"periodic", "chen-greedy", "keep-greedy"};
    test_random random = test_random_seeded(1);
    test_chain_shape shape = {.stages_min = 40, .stages_max = 40};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_limits limits;
    (void)state;
    assert_int_equal(cairn_limits_of(NULL, problem, NULL, &limits, NULL), CAIRN_OK);
    for (int quarters = 0; quarters < 4; quarters++) {
        char budget[32];
        snprintf(budget, sizeof(budget), "%lld",
                 (long long)(limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) / 4 * quarters));
        for (size_t i = 0; i < sizeof(solvers) / sizeof(solvers[0]); i++)
            check_stops(problem, solvers[i], budget, TEST_ROUNDS(60));
    }
    cairn_problem_free(problem);
}

static int count_and_go_on(void *context, const cairn_progress *progress)
{
    (void)progress;
    ++*(int *)context;
    return 0;
}

static int polls_of(int64_t interval_ns)
{
    int polls = 0;
    cairn_env env = {.poll = count_and_go_on, .poll_context = &polls, .poll_interval_ns = interval_ns};
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("chain-dp", "60");
    cairn_info info;
    assert_int_equal(cairn_solve(&env, problem, options, NULL, &info, NULL), CAIRN_OK);
    cairn_info_clear(&info);
    cairn_options_free(options);
    cairn_problem_free(problem);
    return polls;
}

/* Every call of a session has a task of its own: solvers ask solvers with tasks that end with the call. */
static void check_that_no_task_is_kept(const crn_solver *solver, const crn_session *session, const int64_t budgets[2])
{
    crn_task opening = session->task, asking = session->task;
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    void *state;
    if (crn_solver_accepts(solver, &opening, NULL) != CAIRN_OK)
        return;
    assert_int_equal(crn_solver_open(solver, &opening, &state, NULL), CAIRN_OK);
    memset(&opening, 0x5a, sizeof(opening));
    for (int i = 0; i < 2; i++) {
        crn_answer answer = {.lower_bound_ns = CAIRN_NONE, .objective_bytes = CAIRN_NONE, .checkpoint_count = -1};
        asking = session->task;
        assert_int_equal(cairn_builder_new(asking.env, asking.problem, &answer.builder, NULL), CAIRN_OK);
        assert_int_equal(solver->solve(&asking, state, budgets[i], &answer, NULL), CAIRN_OK);
        cairn_builder_free(answer.builder);
        if (answer.checkpoints) {
            cairn_allocator allocator = crn_allocator(asking.env);
            crn_free(&allocator, answer.checkpoints, (size_t)answer.checkpoint_count, sizeof(*answer.checkpoints));
        }
        memset(&asking, 0x5a, sizeof(asking));
    }
    asking = session->task;
    if (solver->least)
        assert_int_equal(solver->least(&asking, state, &least, NULL), CAIRN_OK);
    crn_solver_close(solver, &asking, state);
}

static void sessions_keep_no_task(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape chain = {.stages_min = 5, .stages_max = 5, .machine = seed % 2 == 0};
        test_graph_shape graph = {.nodes_min = 10, .nodes_max = 10, .training = true, .machine = seed % 2 == 0};
        cairn_problem *problem =
            seed % 3 == 2 ? test_random_graph(&random, &graph) : test_random_chain(&random, &chain);
        cairn_options *options = options_of("auto", "none");
        crn_session session;
        assert_int_equal(cairn_options_set(options, "iterations", "20", NULL), CAIRN_OK);
        assert_int_equal(crn_session_begin(&session, NULL, problem, options, CAIRN_NONE, NULL), CAIRN_OK);
        const int64_t budgets[2] = {session.store_all_bytes - 1,
                                    (session.least.lower_bytes + session.store_all_bytes) / 2};
        for (const crn_solver *const *solver = crn_solvers; *solver; solver++)
            check_that_no_task_is_kept(*solver, &session, budgets);
        crn_session_end(&session);
        cairn_options_free(options);
        cairn_problem_free(problem);
    }
}

static void polling_waits_for_its_interval(void **state)
{
    (void)state;
    assert_true(polls_of(0) > 1);
    assert_int_equal(polls_of(INT64_MAX), 1);
}

static void keep_line(void *context, const char *line)
{
    snprintf(context, 200, "%s", line);
}

static void an_answer_is_logged(void **state)
{
    (void)state;
    char line[200] = "";
    cairn_env env = {.log = keep_line, .log_context = line};
    cairn_problem *problem = two_stages(NULL);
    cairn_options *options = options_of("store-all", "60");
    cairn_info info;
    assert_int_equal(cairn_solve(&env, problem, options, NULL, &info, NULL), CAIRN_OK);
    assert_non_null(strstr(line, "solver=store-all outcome=optimal budget_bytes=60 makespan_ns=10"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void memory_limits_are_kept(void **state)
{
    (void)state;
    test_random random = test_random_seeded(5);
    test_chain_shape shape = {.stages_min = 300, .stages_max = 300};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_options *options = options_of("store-all", "none");
    cairn_info info;
    cairn_error error;
    cairn_options_set(options, "memory-limit", "1KiB", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_MEMORY_LIMIT);
    assert_non_null(strstr(error.message, "memory-limit"));
    cairn_options_set(options, "solver", "chain-exact", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_MEMORY_LIMIT);
    assert_non_null(strstr(error.message, "bytes of memory and may use 1024 (option memory-limit)"));
    cairn_options_set(options, "solver", "store-all", NULL);
    cairn_options_set(options, "memory-limit", "1MiB", NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_OK);
    assert_true(info.solver_peak_bytes <= 1048576);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static cairn_status solve_and_free(const cairn_env *env, void *context)
{
    return test_solve_status(env, context, options_of("auto", "60"));
}

static cairn_bound bound_within(const cairn_problem *problem, int64_t budget_bytes, int64_t limit_bytes)
{
    cairn_options *options = options_of(NULL, "none");
    cairn_bound bound;
    assert_int_equal(cairn_options_set_int(options, "budget", budget_bytes, NULL), CAIRN_OK);
    if (limit_bytes != CAIRN_NONE)
        assert_int_equal(cairn_options_set_int(options, "memory-limit", limit_bytes, NULL), CAIRN_OK);
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, NULL), CAIRN_OK);
    cairn_options_free(options);
    return bound;
}

/* What one budget was told has no part in another's bound. */
static void check_bounds_in_turn(const cairn_problem *problem, int64_t budget_bytes, int64_t limit_bytes)
{
    cairn_options *options = options_of("store-all", "none");
    int64_t budgets[] = {budget_bytes, budget_bytes - budget_bytes / 16, budget_bytes};
    cairn_info infos[3];
    assert_int_equal(cairn_options_set_int(options, "memory-limit", limit_bytes, NULL), CAIRN_OK);
    if (cairn_solve_many(NULL, problem, options, budgets, 3, NULL, infos, NULL) == CAIRN_OK)
        assert_int_equal(infos[0].lower_bound_ns, infos[2].lower_bound_ns);
    cairn_options_free(options);
}

/* A bound for which there is no memory is a weaker one, and no failure of whoever is asked. */
static void bounds_do_with_the_memory_that_there_is(void **state)
{
    (void)state;
    test_random random = test_random_seeded(3);
    test_graph_shape shape = {.nodes_min = 60, .nodes_max = 60, .training = true};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_options *options = options_of("store-all", "none");
    cairn_info info;
    int64_t weakest_ns = INT64_MAX;
    assert_int_equal(cairn_options_set_int(options, "memory-limit", 20000, NULL), CAIRN_OK);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
    assert_true(info.solver_peak_bytes <= 20000);
    int64_t budget_bytes = (info.least_lower_bytes + info.store_all_bytes) / 2;
    cairn_bound best = bound_within(problem, budget_bytes, CAIRN_NONE);
    assert_true(info.least_lower_bytes <= best.least_lower_bytes);
    for (int64_t limit = 1000; limit < 2000000; limit *= 2) {
        cairn_bound bound = bound_within(problem, budget_bytes, limit);
        assert_true(bound.lower_bound_ns >= info.store_all_ns && bound.lower_bound_ns <= best.lower_bound_ns);
        assert_true(bound.least_lower_bytes <= best.least_lower_bytes);
        weakest_ns = bound.lower_bound_ns < weakest_ns ? bound.lower_bound_ns : weakest_ns;
        check_bounds_in_turn(problem, budget_bytes, limit);
    }
    assert_true(weakest_ns < best.lower_bound_ns);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* What every bound takes; told as a solve tells it: not as a want of memory, which would be the machine's. */
static void bounds_and_batches_tell_the_memory_limit(void **state)
{
    (void)state;
    test_random random = test_random_seeded(1);
    test_graph_shape shape = {.nodes_min = 24, .nodes_max = 24, .training = true};
    cairn_problem *problem = test_random_graph(&random, &shape);
    cairn_options *options = options_of(NULL, "100");
    cairn_bound bound;
    cairn_max_batch batch;
    cairn_error error;
    assert_int_equal(cairn_options_set_int(options, "memory-limit", 100, NULL), CAIRN_OK);
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, &error), CAIRN_MEMORY_LIMIT);
    assert_string_equal(error.message, "the bound needs more than 100 bytes of memory (option memory-limit)");
    assert_int_equal(cairn_max_batch_of(NULL, problem, options, 1, &batch, &error), CAIRN_MEMORY_LIMIT);
    assert_int_equal(batch.batch, CAIRN_NONE);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void failing_allocations_leave_nothing(void **state)
{
    (void)state;
    cairn_problem *problem = two_stages(NULL);
    assert_true(test_every_allocation_fails(solve_and_free, problem) > 3);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_is_complete),
        cmocka_unit_test(infeasible_is_an_outcome),
        cmocka_unit_test(what_takes_too_long_to_count_is_not_infeasible),
        cmocka_unit_test(long_times_are_no_defect),
        cmocka_unit_test(no_budget_is_no_large_one),
        cmocka_unit_test(one_stage_is_a_segment),
        cmocka_unit_test(what_is_asked_must_make_sense),
        cmocka_unit_test(an_overridden_machine_is_recorded),
        cmocka_unit_test(a_curve_equals_its_points),
        cmocka_unit_test(limits_and_bounds),
        cmocka_unit_test(solvers_say_what_they_take),
        cmocka_unit_test(cancelling_before_anything_is_found),
        cmocka_unit_test(no_time_at_all_does_to_store_everything),
        cmocka_unit_test(sessions_keep_no_task),
        cmocka_unit_test(polling_waits_for_its_interval),
        cmocka_unit_test(solvers_of_segments_say_when_they_are_stopped),
        cmocka_unit_test(an_answer_is_logged),
        cmocka_unit_test(memory_limits_are_kept),
        cmocka_unit_test(bounds_do_with_the_memory_that_there_is),
        cmocka_unit_test(bounds_and_batches_tell_the_memory_limit),
        cmocka_unit_test(failing_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
