/*
 * The lower bound of chains: never above the optimum of exhaustive search, over all schedules and with everything that
 * the format allows; no less than what stages cost at least; falling with more budget; met where everything fits; never above
 * the best known answer on chains too long for exhaustive search; and not so weak as to say nothing.
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */ // NOLINT(bugprone-reserved-identifier)
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/solver.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static cairn_options *options_for(const char *solver, int64_t budget_bytes)
{
    return test_options(solver, budget_bytes, "threads=1");
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, options_for(solver, budget_bytes), NULL);
}

static int64_t bound(const cairn_problem *problem, int64_t budget_bytes)
{
    cairn_bound found;
    cairn_options *options = options_for("auto", budget_bytes);
    assert_int_equal(cairn_bound_of(NULL, problem, options, &found, NULL), CAIRN_OK);
    cairn_options_free(options);
    return found.lower_bound_ns;
}

static int64_t work_of(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    int64_t sum = 0;
    for (int32_t i = 0; i < chain->stage_count; i++) {
        int64_t least = INT64_MAX;
        for (int32_t k = 0; k < chain->stages[i].option_count; k++) {
            int64_t ns = chain->stages[i].options[k].forward_ns + chain->stages[i].options[k].backward_ns;
            least = ns < least ? ns : least;
        }
        sum += least;
    }
    return sum;
}

/* How often the bound is met, and how often it says more than the work does, where more is true. */
typedef struct tally {
    int asked, met, slowed, raised;
} tally;

static void check_budget(const cairn_problem *problem, int round, int64_t budget_bytes, tally *t)
{
    cairn_info best = solve(problem, "brute-chain", budget_bytes);
    int64_t bound_ns = bound(problem, budget_bytes), work_ns = work_of(problem);
    if (best.makespan_ns >= 0 && bound_ns > best.makespan_ns)
        fail_msg("round %d, budget %lld: bound %lld, optimum %lld", round, (long long)budget_bytes, (long long)bound_ns,
                 (long long)best.makespan_ns);
    assert_true(bound_ns >= work_ns);
    if (best.makespan_ns < 0)
        return;
    t->asked++;
    t->met += bound_ns == best.makespan_ns;
    t->slowed += best.makespan_ns > work_ns;
    t->raised += bound_ns > work_ns;
}

static test_chain_shape shape_of(int round)
{
    test_chain_shape shape = test_chain_of_everything(round % 2 ? 4 : 5);
    if (round % 5 == 0)
        shape = (test_chain_shape){.stages_min = 3, .stages_max = 6, .equal_forwards = true, .plain_grads = true};
    if (round % 5 == 1)
        shape = (test_chain_shape){.stages_max = 6, .weight_grads = true, .signed_workspaces = true, .bytes_max = 40};
    if (round % 5 == 2)
        shape = (test_chain_shape){.stages_max = 5, .options_max = 2, .no_recompute = true, .fixed = true};
    if (round % 25 == 3)
        shape = (test_chain_shape){.stages_max = 6, .homogeneous = true, .positive = true};
    shape.machine = false;
    return shape;
}

static void never_passes_the_optimum(void **state)
{
    test_random random = test_random_seeded(71);
    tally t = {0, 0, 0, 0};
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(1500); round++) {
        test_chain_shape shape = shape_of(round);
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "brute-chain", INT64_MAX);
        int64_t least = all.least_bytes, span = all.store_all_bytes - least;
        check_budget(problem, round, least, &t);
        check_budget(problem, round, least - 1, &t);
        for (int i = 0; i < 2 && span > 0; i++)
            check_budget(problem, round, least + test_random_between(&random, 0, span), &t);
        cairn_problem_free(problem);
    }
    print_message("%d budgets, met at %d; %d slow a schedule down, of which %d are seen\n", t.asked, t.met, t.slowed,
                  t.raised);
    assert_true(t.raised * 2 > t.slowed);
}

/* Up to 12 stages the search over states ends: what chain-weak finds is proved, or nearly always. */
static void short_chains_are_bounded_by_their_optimum(void **state)
{
    test_random random = test_random_seeded(74);
    int asked = 0, met = 0;
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(60); round++) {
        test_chain_shape shape = {.stages_min = 7, .stages_max = 12, .positive = true, .bytes_max = 100, .ns_max = 100};
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "chain-weak", INT64_MAX);
        for (int i = 0; i < 4; i++, asked++) {
            int64_t budget = all.least_bytes + (all.store_all_bytes - all.least_bytes) * i / 4;
            met += solve(problem, "chain-weak", budget).gap == 0;
        }
        cairn_problem_free(problem);
    }
    print_message("%d of %d answers proved optimal\n", met, asked);
    assert_true(met * 100 >= asked * 95);
}

/* Many stages with neither bytes nor time: they have no ratio of time to bytes by which to sort them. */
static void stages_of_no_size_do_no_harm(void **state)
{
    test_random random = test_random_seeded(75);
    tally t = {0, 0, 0, 0};
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(1500); round++) {
        test_chain_shape shape = {.stages_min = 5, .stages_max = 6, .bytes_max = 3, .ns_max = 3, .no_recompute = true};
        cairn_problem *problem = test_random_chain(&random, &shape);
        check_budget(problem, round, solve(problem, "brute-chain", INT64_MAX).least_bytes, &t);
        cairn_problem_free(problem);
    }
    assert_true(t.raised > 0);
}

static void falls_with_the_budget_and_ends_at_the_work(void **state)
{
    test_random random = test_random_seeded(72);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(100); round++) {
        test_chain_shape shape = {.stages_min = 2, .stages_max = 60, .bytes_max = 1000, .ns_max = 1000};
        shape.options_max = 1 + round % 3;
        shape.weight_grads = round % 2;
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info best = solve(problem, "chain-dp", INT64_MAX);
        int64_t before = INT64_MAX, steps = 12;
        for (int64_t i = 0; i <= steps; i++) {
            int64_t budget = best.least_bytes + (best.store_all_bytes - best.least_bytes) * i / steps;
            cairn_info info = solve(problem, "chain-dp", budget);
            assert_true(info.lower_bound_ns <= before && info.lower_bound_ns <= info.makespan_ns);
            assert_int_equal(info.lower_bound_ns, bound(problem, budget));
            before = info.lower_bound_ns;
        }
        assert_int_equal(best.lower_bound_ns, work_of(problem));
        assert_int_equal(best.gap == 0, best.makespan_ns == work_of(problem));
        cairn_problem_free(problem);
    }
}

/* Times near 2^62 saturate; sizes near 2^62 are measured in units of what everything takes. */
static void large_numbers_do_no_harm(void **state)
{
    enum { N = 4 };
    static const int64_t huge = INT64_MAX / 20;
    cairn_stage_option options[N];
    cairn_stage stages[N];
    cairn_problem *problem;
    (void)state;
    for (int with_huge_times = 0; with_huge_times < 2; with_huge_times++) {
        int64_t ns = with_huge_times ? huge : 7;
        for (int l = 0; l < N; l++) {
            options[l] = (cairn_stage_option){"keep", huge / 2, ns, ns, 0, 0};
            stages[l] = (cairn_stage){"", huge / 4, huge / 8, 1, ns, 0, false, 1, &options[l]};
        }
        cairn_chain chain = {1, 1, N, stages};
        assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
        cairn_info best = solve(problem, "brute-chain", INT64_MAX);
        for (int64_t budget = best.least_bytes; budget <= best.store_all_bytes; budget += huge / 16) {
            cairn_info info = solve(problem, "brute-chain", budget);
            int64_t bound_ns = bound(problem, budget);
            assert_true(bound_ns >= 2 * N * ns && bound_ns <= info.makespan_ns);
        }
        cairn_problem_free(problem);
    }
}

typedef struct question {
    const cairn_problem *problem;
    const cairn_options *options;
} question;

static cairn_status ask_bound(const cairn_env *env, void *context)
{
    const question *q = context;
    cairn_bound found;
    return cairn_bound_of(env, q->problem, q->options, &found, NULL);
}

static void failing_allocations_are_reported(void **state)
{
    test_random random = test_random_seeded(73);
    test_chain_shape shape = {.stages_min = 9, .stages_max = 9, .positive = true, .options_max = 2};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_options *options = options_for("auto", solve(problem, "store-all", INT64_MAX).store_all_bytes - 1);
    (void)state;
    test_every_allocation_fails(ask_bound, &(question){problem, options});
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* ---- the clock ---- */

extern const crn_bound_method crn_chain_bound_method, crn_chain_states_method;

/* A search that the clock stopped is made anew where there is time, and what it gave stays where there is none. */
static void a_stopped_search_is_made_anew(void **state)
{
    static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE, .time_limit_ns = 1};
    test_random random = test_random_seeded(76);
    test_chain_shape shape = {.stages_min = 8, .stages_max = 8, .positive = true, .bytes_max = 100, .ns_max = 100};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_info info = solve(problem, "chain-weak", INT64_MAX);
    const cairn_env env = {.log = NULL};
    crn_task past = {.env = &env, .problem = problem, .settings = &settings, .deadline_ns = crn_clock_ns() - 1},
             whole = past;
    int64_t budget = info.least_bytes, stopped_ns = 0, bound_ns = 0, once_ns = 0;
    void *kept = NULL, *other = NULL;
    (void)state;
    whole.deadline_ns = CAIRN_NONE;
    assert_int_equal(crn_chain_states_method.raise_makespan(&past, &kept, budget, &stopped_ns, NULL), CAIRN_OK);
    assert_int_equal(crn_chain_states_method.raise_makespan(&whole, &kept, budget, &bound_ns, NULL), CAIRN_OK);
    assert_int_equal(crn_chain_states_method.raise_makespan(&whole, &other, budget, &once_ns, NULL), CAIRN_OK);
    assert_true(stopped_ns < bound_ns && bound_ns == once_ns);
    stopped_ns = 0;
    assert_int_equal(crn_chain_states_method.raise_makespan(&past, &kept, budget, &stopped_ns, NULL), CAIRN_OK);
    assert_int_equal(stopped_ns, bound_ns);
    crn_chain_states_method.forget(&whole, kept);
    crn_chain_states_method.forget(&whole, other);
    cairn_problem_free(problem);
}

enum { WORKERS = 2, FEW = 50, WAIT_NS = 20000000, WAITS_MAX = 250, LIMIT_NS = 300000000 };

/*
 * Who asks for memory waits: the others until time is over, and from then on the caller's thread until the others ask no
 * more, or have asked too often.
 */
typedef struct holding {
    cairn_allocator inner;
    pthread_t caller;
    atomic_int others; /* requests of the others */
    int64_t deadline_ns;
} holding;

static void wait_for_others(holding *h)
{
    const struct timespec wait = {0, WAIT_NS};
    int before;
    for (int i = 0; i < WAITS_MAX; i++) {
        before = atomic_load(&h->others);
        if (before > FEW)
            return;
        nanosleep(&wait, NULL);
        if (atomic_load(&h->others) == before)
            return;
    }
}

static void wait_for_the_end(holding *h)
{
    const struct timespec wait = {0, WAIT_NS};
    atomic_fetch_add(&h->others, 1);
    while (crn_clock_ns() < h->deadline_ns)
        nanosleep(&wait, NULL);
}

static void *hold(void *context, void *block, size_t old_size, size_t new_size)
{
    holding *h = context;
    const struct timespec moment = {0, WAIT_NS / 20};
    bool is_over = crn_clock_ns() >= h->deadline_ns, is_callers = pthread_equal(h->caller, pthread_self());
    if (new_size > old_size && is_callers && is_over)
        wait_for_others(h);
    else if (new_size > old_size && is_callers && atomic_load(&h->others) == 0)
        nanosleep(&moment, NULL); /* so that the others begin before it is done */
    else if (new_size > old_size && !is_callers)
        wait_for_the_end(h);
    return h->inner.resize(h->inner.context, block, old_size, new_size);
}

/* No thread begins a cut in vain: a cut of this chain takes hundreds of requests to the end. */
static void every_thread_looks_at_the_clock(void **state)
{
    static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE, .time_limit_ns = 1};
    test_random random = test_random_seeded(7);
    test_chain_shape shape = {.stages_min = 300, .stages_max = 300, .positive = true};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_info info = solve(problem, "store-all", INT64_MAX);
    holding h = {.inner = crn_allocator(NULL), .caller = pthread_self(), .deadline_ns = crn_clock_ns() + LIMIT_NS};
    cairn_env env = {.allocator = {&h, hold}};
    crn_task task = {.env = &env, .problem = problem, .settings = &settings, .deadline_ns = h.deadline_ns};
    int64_t budget = (info.least_lower_bytes + info.store_all_bytes) / 2, bound_ns = 0;
    void *kept = NULL;
    (void)state;
    task.team = crn_team_new(&h.inner, WORKERS);
    assert_non_null(task.team);
    assert_int_equal(crn_chain_bound_method.raise_makespan(&task, &kept, budget, &bound_ns, NULL), CAIRN_OK);
    assert_null(kept);
    assert_int_equal(bound_ns, 0);
    assert_true(atomic_load(&h.others) > 0 && atomic_load(&h.others) <= FEW);
    crn_team_free(task.team);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(never_passes_the_optimum),      cmocka_unit_test(short_chains_are_bounded_by_their_optimum),
        cmocka_unit_test(stages_of_no_size_do_no_harm),  cmocka_unit_test(falls_with_the_budget_and_ends_at_the_work),
        cmocka_unit_test(large_numbers_do_no_harm),      cmocka_unit_test(failing_allocations_are_reported),
        cmocka_unit_test(a_stopped_search_is_made_anew), cmocka_unit_test(every_thread_looks_at_the_clock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
