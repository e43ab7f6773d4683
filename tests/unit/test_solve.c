/* The call around the solvers: options, outcomes, records, cancelling, limits. Solvers themselves: test_solvers.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "solve/session.h"
#include "support/ask.h"
#include "support/random_problem.h"
#include "support/two_stages.h"

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
    assert_non_null(strstr(error.message, "budgets[0] is -7 bytes"));
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

/* Memory of which there is so much: a size_t that it counts down. */
static void *resize_what_is_left(void *left, void *block, size_t old_size, size_t new_size)
{
    size_t *left_bytes = left;
    if (new_size > old_size + *left_bytes)
        return NULL;
    void *moved = new_size > 0 ? realloc(block, new_size) : NULL;
    if (new_size == 0)
        free(block);
    if (moved || new_size == 0)
        *left_bytes += old_size - new_size;
    return moved;
}

static void solvers_that_lack_memory_are_too_costly(void **state)
{
    (void)state;
    enum { STAGES = 100 };
    cairn_stage_option options[STAGES];
    cairn_stage stages[STAGES];
    for (int i = 0; i < STAGES; i++) {
        options[i] = (cairn_stage_option){"", 3000 + 37 * i, 100 + i * i, 200 + i, 0, 0};
        stages[i] = (cairn_stage){"", 1000 + 11 * i, 1000, 0, 100 + i * i, 0, false, 1, &options[i]};
    }
    cairn_chain chain = {1000, 1000, STAGES, stages};
    cairn_problem *problem;
    cairn_options *asked = options_of("auto", "100000");
    cairn_info info;
    size_t left_bytes = 16 << 20;
    cairn_env env = {.allocator = {&left_bytes, resize_what_is_left}};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(asked, "threads", "1", NULL), CAIRN_OK);
    assert_int_equal(cairn_solve(&env, problem, asked, NULL, &info, NULL), CAIRN_OK);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    char *costly = strstr(info.reason, "; too costly: ");
    assert_non_null(costly);
    assert_non_null(strstr(costly, "chain-exact"));
    *costly = '\0';
    assert_non_null(strstr(info.reason, "store-all"));
    assert_null(strstr(info.reason, "chain-exact"));
    cairn_info_clear(&info);
    cairn_options_free(asked);
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
        cmocka_unit_test(solvers_that_lack_memory_are_too_costly),
        cmocka_unit_test(solvers_say_what_they_take),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
