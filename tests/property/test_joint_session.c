/*
 * One session of a joint solver for several budgets: a schedule that is known for one of them says nothing of the others,
 * nor of the least. By iterations and without a clock, so that equal questions have equal answers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/joint/joint_session.h"
#include "solve/session.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

typedef struct fixture {
    cairn_problem *problem;
    crn_session session; /* for its task: the solver that is looked at has a session of its own */
    const crn_solver *joint, *alone;
    int64_t least_bytes, store_all_bytes; /* without transfers */
} fixture;

static cairn_problem *problem_of(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    const test_chain_shape chain = {
        .stages_min = 10, .stages_max = 14, .options_max = 2, .machine = true, .positive = true};
    const test_graph_shape graph = {
        .nodes_min = 24, .nodes_max = 32, .training = true, .machine = true, .positive = true};
    return seed % 2 == 0 ? test_random_chain(&random, &chain) : test_random_graph(&random, &graph);
}

static void begin(fixture *f, uint64_t seed)
{
    f->problem = problem_of(seed);
    f->joint = crn_solver_find(seed % 2 == 0 ? "joint-chain" : "joint-graph");
    f->alone = crn_solver_find(seed % 2 == 0 ? "chain-dp" : "graph-search");
    cairn_options *options = test_options(f->joint->info.name, -1, "threads=1 iterations=30");
    cairn_limits limits = test_limits(f->problem, test_options(f->alone->info.name, -1, "threads=1"));
    f->least_bytes = limits.least_bytes;
    f->store_all_bytes = limits.store_all_bytes;
    assert_int_equal(crn_session_begin(&f->session, NULL, f->problem, options, CAIRN_NONE, NULL), CAIRN_OK);
    cairn_options_free(options);
}

static void end(fixture *f)
{
    crn_session_end(&f->session);
    cairn_problem_free(f->problem);
}

/* A schedule without transfers. */
static crn_answer known_at(const fixture *f, int64_t budget_bytes)
{
    const crn_task task = crn_task_without_machine(&f->session.task);
    crn_answer answer;
    void *state;
    assert_int_equal(crn_answer_init(&answer, &task, NULL), CAIRN_OK);
    assert_int_equal(crn_solver_open(f->alone, &task, &state, NULL), CAIRN_OK);
    assert_int_equal(f->alone->solve(&task, state, budget_bytes, &answer, NULL), CAIRN_OK);
    assert_true(answer.found);
    crn_solver_close(f->alone, &task, state);
    return answer;
}

/* Asks an open session; returns the makespan. */
static int64_t ask(const fixture *f, void *state, int64_t budget_bytes)
{
    crn_answer known = known_at(f, budget_bytes), answer;
    crn_task task = f->session.task;
    cairn_replay replay;
    task.known = known.builder;
    assert_int_equal(crn_answer_init(&answer, &task, NULL), CAIRN_OK);
    assert_int_equal(f->joint->solve(&task, state, budget_bytes, &answer, NULL), CAIRN_OK);
    assert_true(answer.found);
    assert_int_equal(crn_replay(&task, cairn_builder_ops(answer.builder), cairn_builder_count(answer.builder),
                                budget_bytes, &replay, NULL),
                     CAIRN_OK);
    assert_true(replay.valid);
    crn_answer_clear(&answer, &task);
    crn_answer_clear(&known, &task);
    return replay.makespan_ns;
}

/* Opens a session as auto does for a budget for which it has a schedule. */
static void *open_at(const fixture *f, int64_t budget_bytes)
{
    crn_answer known = known_at(f, budget_bytes);
    crn_task task = f->session.task;
    void *state;
    task.known = known.builder;
    assert_int_equal(crn_solver_open(f->joint, &task, &state, NULL), CAIRN_OK);
    crn_answer_clear(&known, &task);
    return state;
}

static crn_least least_of(const fixture *f, void *state)
{
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    assert_int_equal(f->joint->least(&f->session.task, state, &least, NULL), CAIRN_OK);
    return least;
}

static void lower_budgets_are_answered_as_in_a_session_of_their_own(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(24); seed++) {
        fixture f;
        begin(&f, seed);
        int64_t span = f.store_all_bytes - f.least_bytes;
        void *shared = NULL;
        for (int part = 4; part >= 0; part--) {
            int64_t budget_bytes = f.least_bytes + span * part / 5;
            void *own = open_at(&f, budget_bytes);
            shared = part == 4 ? open_at(&f, budget_bytes) : shared;
            assert_int_equal(ask(&f, shared, budget_bytes), ask(&f, own, budget_bytes));
            crn_solver_close(f.joint, &f.session.task, own);
        }
        crn_solver_close(f.joint, &f.session.task, shared);
        end(&f);
    }
}

static void the_least_is_that_of_the_solver(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(24); seed++) {
        fixture f;
        void *fresh;
        begin(&f, seed);
        int64_t budget_bytes = (f.least_bytes + f.store_all_bytes) / 2;
        assert_int_equal(crn_solver_open(f.joint, &f.session.task, &fresh, NULL), CAIRN_OK);
        void *shared = open_at(&f, budget_bytes);
        ask(&f, shared, budget_bytes);
        crn_least expected = least_of(&f, fresh), least = least_of(&f, shared);
        assert_int_equal(least.bytes, expected.bytes);
        assert_int_equal(least.is_rough, expected.is_rough);
        assert_true(least.bytes <= f.least_bytes);
        crn_solver_close(f.joint, &f.session.task, fresh);
        crn_solver_close(f.joint, &f.session.task, shared);
        end(&f);
    }
}

/* Says nothing the first time, for want of memory, and then what is enough. */
static cairn_status lower_at_second_call(const crn_task *task, crn_joint *s, cairn_error *error)
{
    static int calls;
    (void)task;
    s->least_bytes = 77;
    return calls++ == 0 ? crn_no_memory(error) : CAIRN_OK;
}

static void a_search_for_the_least_that_failed_is_made_again(void **state)
{
    (void)state;
    fixture f;
    void *joint;
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    begin(&f, 0);
    crn_answer known = known_at(&f, f.least_bytes);
    crn_task task = f.session.task;
    task.known = known.builder;
    assert_int_equal(crn_joint_open(&task, lower_at_second_call, &joint, NULL), CAIRN_OK);
    assert_int_equal(crn_joint_least(&f.session.task, joint, &least, NULL), CAIRN_NO_MEMORY);
    assert_int_equal(crn_joint_least(&f.session.task, joint, &least, NULL), CAIRN_OK);
    assert_int_equal(least.bytes, 77);
    assert_false(least.is_rough);
    crn_joint_close(&task, joint);
    crn_answer_clear(&known, &task);
    end(&f);
}

static int count_polls(void *polls, const cairn_progress *progress)
{
    (void)progress;
    ++*(int *)polls;
    return 0;
}

/* A few replays of a long list are as much as many of a short one: whoever wants it to stop is asked in between. */
static void polishing_a_long_schedule_polls(void **state)
{
    (void)state;
    enum { STAGES = 3000, ROUNDS = 8 };
    test_random random = test_random_seeded(1);
    const test_chain_shape shape = {.stages_min = STAGES, .stages_max = STAGES, .machine = true, .positive = true};
    cairn_problem *problem = test_random_chain(&random, &shape);
    int polls = 0;
    const cairn_env env = {.poll = count_polls, .poll_context = &polls};
    int64_t least_bytes = test_limits(problem, test_options("periodic", -1, "threads=1")).least_bytes;
    cairn_options *options = test_options("joint-chain", least_bytes, "threads=1");
    fixture f = {.problem = problem, .alone = crn_solver_find("periodic")};
    crn_joint_search search;
    assert_int_equal(crn_session_begin(&f.session, &env, problem, options, CAIRN_NONE, NULL), CAIRN_OK);
    crn_answer known = known_at(&f, least_bytes), unused = {0};
    assert_int_equal(crn_joint_begin(&search, &f.session.task, least_bytes, NULL), CAIRN_OK);
    assert_int_equal(crn_joint_offer(&search, known.builder, "periodic", NULL), CAIRN_OK);
    assert_true(search.best_ns > search.bound_ns);
    polls = 0;
    assert_int_equal(crn_joint_improve(&search, ROUNDS, &unused, NULL), CAIRN_OK);
    assert_true(polls >= ROUNDS / 2);
    crn_joint_end(&search);
    crn_answer_clear(&known, &f.session.task);
    cairn_options_free(options);
    end(&f);
}

/* The best has one operation. Then a schedule of some hundreds is offered again and again; each time another request fails. */
static void what_cannot_be_copied_leaves_the_best_as_it_is(void **state)
{
    (void)state;
    enum { STAGES = 100, ONCE_NS = INT32_MAX };
    const cairn_op only = {.code = CAIRN_OP_BACKWARD, .index = 1};
    test_random random = test_random_seeded(1);
    const test_chain_shape shape = {.stages_min = STAGES, .stages_max = STAGES, .machine = true, .positive = true};
    test_faulty faulty;
    test_faulty_init(&faulty, -1, false);
    const cairn_env env = test_faulty_env(&faulty);
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_options *options = test_options("joint-chain", -1, "threads=1");
    fixture f = {.problem = problem, .alone = crn_solver_find("periodic")};
    crn_joint_search search;
    cairn_status status = CAIRN_NO_MEMORY;
    int64_t failures = 0;
    assert_int_equal(crn_session_begin(&f.session, &env, problem, options, CAIRN_NONE, NULL), CAIRN_OK);
    crn_answer known = known_at(&f, CAIRN_NONE);
    assert_int_equal(crn_joint_begin(&search, &f.session.task, CAIRN_NONE, NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_add(search.best, only, NULL), CAIRN_OK);
    search.best_ns = ONCE_NS;
    for (; status == CAIRN_NO_MEMORY; failures++) {
        assert_int_equal(cairn_builder_count(search.best), 1);
        assert_int_equal(search.best_ns, ONCE_NS);
        faulty.fail_at = atomic_load(&faulty.requests) + failures;
        status = crn_joint_offer(&search, known.builder, "periodic", NULL);
    }
    assert_int_equal(status, CAIRN_OK);
    assert_true(failures > 1);
    assert_int_equal(cairn_builder_count(search.best), cairn_builder_count(known.builder));
    faulty.fail_at = -1;
    crn_joint_end(&search);
    crn_answer_clear(&known, &f.session.task);
    cairn_options_free(options);
    end(&f);
}

/* By name with a time limit, it has auto share the time among all; the answer is its own all the same. */
static void with_a_time_limit_the_others_are_asked_first(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        cairn_problem *problem = problem_of(seed);
        const char *name = seed % 2 == 0 ? "joint-chain" : "joint-graph";
        cairn_limits limits = test_limits(problem, test_options("store-all", -1, "threads=1"));
        int64_t budget_bytes = (limits.least_lower_bytes + limits.store_all_bytes) / 2;
        cairn_info info = test_solve(problem, test_options(name, budget_bytes, "threads=1 time-limit=200ms"), NULL);
        assert_string_equal(info.solver, name);
        assert_true(info.outcome == CAIRN_OUTCOME_OPTIMAL || info.outcome == CAIRN_OUTCOME_FEASIBLE);
        assert_non_null(strstr(info.reason, "asked: store-all, "));
        cairn_info_clear(&info);
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lower_budgets_are_answered_as_in_a_session_of_their_own),
        cmocka_unit_test(the_least_is_that_of_the_solver),
        cmocka_unit_test(a_search_for_the_least_that_failed_is_made_again),
        cmocka_unit_test(what_cannot_be_copied_leaves_the_best_as_it_is),
        cmocka_unit_test(polishing_a_long_schedule_polls),
        cmocka_unit_test(with_a_time_limit_the_others_are_asked_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
