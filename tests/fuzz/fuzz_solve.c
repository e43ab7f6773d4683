/*
 * A small problem, a budget and a solver from the same bytes. What a solver answers holds together: its schedule
 * verifies within the budget, its bounds are bounds, and a second call answers the same. Exhaustive search on the same
 * problem, where it applies, finds nothing better than what is called optimal and nothing below a bound.
 */
#include <cairn/solve.h>
#include <string.h>

#include "fuzz_check.h"
#include "support/random_problem.h"

typedef struct answer {
    cairn_status status;
    cairn_schedule *schedule;
    cairn_info info;
} answer;

static cairn_problem *problem_of(test_random *random)
{
    bool machine = test_random_chance(random, 30);
    if (test_random_chance(random, 25)) {
        test_graph_shape shape = test_graph_of_everything(6);
        shape.machine = machine;
        return test_random_graph(random, &shape);
    }
    test_chain_shape shape = test_chain_of_everything(4);
    shape.options_max = 2;
    shape.machine = machine;
    shape.no_recompute = test_random_chance(random, 30);
    shape.positive = test_random_chance(random, 30);
    shape.equal_forwards = test_random_chance(random, 30);
    return test_random_chain(random, &shape);
}

static const cairn_solver_info *solver_of(test_random *random)
{
    int count = 0;
    while (cairn_solver_at(count))
        count++;
    return cairn_solver_at((int)test_random_between(random, 0, count - 1));
}

/* slots: 0 = as many as usual. */
static cairn_options *options_of(const char *solver, int64_t budget_bytes, int64_t slots)
{
    cairn_options *options;
    FUZZ_CHECK(cairn_options_new(NULL, &options, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_options_set(options, "solver", solver, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_options_set_int(options, "budget", budget_bytes, NULL) == CAIRN_OK);
    if (slots > 0)
        FUZZ_CHECK(cairn_options_set_int(options, "slots", slots, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_options_set_int(options, "threads", 1, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_options_set_int(options, "iterations", 20, NULL) == CAIRN_OK); /* searches: a glance */
    return options;
}

static answer solve(const cairn_problem *problem, const cairn_options *options)
{
    answer a;
    cairn_error error;
    memset(&a, 0, sizeof(a));
    a.status = cairn_solve(NULL, problem, options, &a.schedule, &a.info, &error);
    if (a.status != CAIRN_OK) {
        FUZZ_CHECK(!a.schedule && error.message[0] != '\0');
        FUZZ_CHECK(a.status == CAIRN_UNSUPPORTED || a.status == CAIRN_UNAVAILABLE || a.status == CAIRN_BAD_INPUT);
    }
    return a;
}

static void clear(answer *a)
{
    cairn_schedule_free(a->schedule);
    cairn_info_clear(&a->info);
}

static void check_schedule(const cairn_problem *problem, const answer *a, int64_t budget_bytes)
{
    cairn_replay replay;
    FUZZ_CHECK(cairn_verify(NULL, problem, a->schedule, budget_bytes, NULL, &replay, NULL) == CAIRN_OK);
    FUZZ_CHECK(replay.valid && replay.peak_bytes <= budget_bytes);
    FUZZ_CHECK(replay.makespan_ns == a->info.makespan_ns && replay.peak_bytes == a->info.peak_bytes);
    FUZZ_CHECK(replay.recompute_ns == a->info.recompute_ns && replay.stall_ns == a->info.stall_ns);
    FUZZ_CHECK(a->info.lower_bound_ns <= a->info.makespan_ns);
    FUZZ_CHECK(a->info.least_bytes != CAIRN_NONE && a->info.least_bytes <= budget_bytes);
    if (a->info.outcome == CAIRN_OUTCOME_OPTIMAL)
        FUZZ_CHECK(a->info.lower_bound_ns == a->info.makespan_ns && a->info.gap <= 0.0);
}

static void check_answer(const cairn_problem *problem, const answer *a, int64_t budget_bytes)
{
    bool found = a->info.outcome == CAIRN_OUTCOME_OPTIMAL || a->info.outcome == CAIRN_OUTCOME_FEASIBLE;
    FUZZ_CHECK(found == (a->schedule != NULL));
    FUZZ_CHECK(a->info.least_bytes == CAIRN_NONE || a->info.least_lower_bytes <= a->info.least_bytes);
    FUZZ_CHECK(!a->info.least_is_exact || a->info.least_lower_bytes == a->info.least_bytes);
    if (found) {
        check_schedule(problem, a, budget_bytes);
    } else if (a->info.outcome == CAIRN_OUTCOME_INFEASIBLE) {
        FUZZ_CHECK(a->info.makespan_ns == CAIRN_NONE && a->info.reason[0] != '\0');
        FUZZ_CHECK(a->info.least_bytes == CAIRN_NONE || a->info.least_bytes > budget_bytes);
    }
}

static void check_same(const answer *a, const answer *b)
{
    FUZZ_CHECK(a->status == b->status && a->info.outcome == b->info.outcome);
    FUZZ_CHECK((a->schedule == NULL) == (b->schedule == NULL));
    if (a->schedule)
        FUZZ_CHECK(strcmp(cairn_schedule_hash(a->schedule), cairn_schedule_hash(b->schedule)) == 0);
}

static const cairn_solver_info *exhaustive_solver(const cairn_problem *problem)
{
    bool chain = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN;
    const cairn_solver_info *solver;
    for (int i = 0; (solver = cairn_solver_at(i)); i++)
        if (solver->exhaustive && !solver->minimizes_memory && (chain ? solver->takes_chains : solver->takes_graphs))
            return solver;
    return NULL;
}

/* What exhaustive search proved holds against every other answer. */
static void check_against_exhaustive(const cairn_problem *problem, const answer *a, int64_t budget_bytes)
{
    const cairn_solver_info *solver = exhaustive_solver(problem);
    if (!solver)
        return;
    cairn_options *options = options_of(solver->name, budget_bytes, 0);
    answer best = solve(problem, options);
    if (best.status == CAIRN_OK && best.info.outcome == CAIRN_OUTCOME_OPTIMAL) {
        FUZZ_CHECK(!a->schedule || a->info.makespan_ns >= best.info.makespan_ns);
        FUZZ_CHECK(a->info.lower_bound_ns <= best.info.makespan_ns);
        FUZZ_CHECK(a->info.least_lower_bytes <= budget_bytes);
    }
    clear(&best);
    cairn_options_free(options);
}

/* Solving for several budgets at once answers each as one call does. */
static void check_many(const cairn_problem *problem, const cairn_options *options, int64_t budget_bytes,
                       const answer *alone)
{
    const int64_t budgets[] = {CAIRN_NONE, budget_bytes, budget_bytes + 1};
    answer among = {.status = CAIRN_OK};
    cairn_schedule *schedules[3];
    cairn_info infos[3];
    FUZZ_CHECK(cairn_solve_many(NULL, problem, options, budgets, 3, schedules, infos, NULL) == CAIRN_OK);
    among.schedule = schedules[1];
    among.info = infos[1];
    check_same(alone, &among);
    FUZZ_CHECK(!schedules[1] || schedules[2]);
    for (int i = 0; i < 3; i++) {
        cairn_schedule_free(schedules[i]);
        cairn_info_clear(&infos[i]);
    }
}

static int64_t budget_for(test_random *random, const cairn_problem *problem)
{
    cairn_limits limits;
    cairn_options *options = options_of("store-all", 0, 0);
    FUZZ_CHECK(cairn_limits_of(NULL, problem, options, &limits, NULL) == CAIRN_OK);
    cairn_options_free(options);
    return test_random_between(random, 0, limits.store_all_bytes + 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    test_random random = test_random_from_bytes(data, size);
    cairn_problem *problem = problem_of(&random);
    const cairn_solver_info *solver = solver_of(&random);
    int64_t budget_bytes = budget_for(&random, problem);
    bool own_slots = test_random_chance(&random, 30), has_slots = cairn_solver_has_option(solver->name, "slots");
    cairn_options *options = options_of(solver->name, budget_bytes, own_slots && has_slots ? 1 + budget_bytes / 2 : 0);
    bool accepted = cairn_solver_accepts(solver->name, problem, options, NULL) == CAIRN_OK;
    answer a = solve(problem, options), again = solve(problem, options);
    FUZZ_CHECK(accepted == (a.status == CAIRN_OK));
    check_same(&a, &again);
    if (a.status == CAIRN_OK) {
        check_answer(problem, &a, budget_bytes);
        check_against_exhaustive(problem, &a, budget_bytes);
        check_many(problem, options, budget_bytes, &a);
    }
    clear(&a);
    clear(&again);
    cairn_options_free(options);
    cairn_problem_free(problem);
    return 0;
}
