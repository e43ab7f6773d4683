/* Solvers that are stopped, polled, or short of memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "solve/session.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"
#include "support/two_stages.h"

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

static crn_least least_within(const cairn_problem *problem, const char *solver, const char *time_limit)
{
    cairn_options *options = options_of(solver, "none");
    crn_session session;
    assert_int_equal(cairn_options_set(options, "time-limit", time_limit, NULL), CAIRN_OK);
    assert_int_equal(crn_session_begin(&session, NULL, problem, options, CAIRN_NONE, NULL), CAIRN_OK);
    assert_int_equal(crn_session_least(&session, NULL), CAIRN_OK);
    crn_least least = session.least;
    crn_session_end(&session);
    cairn_options_free(options);
    return least;
}

/* A least for which there was no time is a rough one, unless it is proved. */
static void a_least_that_was_cut_short_says_so(void **state)
{
    static const char *const solvers[] = {"graph-search", "graph-online", "linear-greedy", "griewank-log", "auto"};
    int rough = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed++) {
        test_random random = test_random_seeded(seed);
        test_graph_shape shape = {.nodes_min = 60, .nodes_max = 60, .training = true};
        cairn_problem *problem = test_random_graph(&random, &shape);
        for (size_t i = 0; i < sizeof(solvers) / sizeof(solvers[0]); i++) {
            crn_least cut = least_within(problem, solvers[i], "0ns"),
                      whole = least_within(problem, solvers[i], "1000s");
            assert_true(cut.is_rough || cut.bytes == whole.bytes);
            assert_false(cut.is_rough && cut.is_exact);
            assert_false(whole.is_rough);
            rough += cut.is_rough;
        }
        cairn_problem_free(problem);
    }
    assert_true(rough > 0);
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
        cmocka_unit_test(cancelling_before_anything_is_found),
        cmocka_unit_test(no_time_at_all_does_to_store_everything),
        cmocka_unit_test(sessions_keep_no_task),
        cmocka_unit_test(a_least_that_was_cut_short_says_so),
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
