/*
 * The bound of chains over several moments. The least priced cost equals that of all states, one after the other, where no
 * demand is forgotten. The bound is never above the optimum of exhaustive search, with everything that the format allows;
 * says more about long chains than the other bounds; does not depend on the units of sizes and times; goes on where the clock
 * stopped it; and is silent without a time limit.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/chain/chain_moments.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

extern const crn_bound_method crn_chain_moments_method, crn_chain_knapsack_method, crn_chain_bound_method;

static const cairn_env plain = {.log = NULL};
static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE, .time_limit_ns = 1};

/* An hour is enough for all of these. */
static crn_task task_for(const cairn_env *env, const cairn_problem *problem)
{
    return (crn_task){.env = env,
                      .problem = problem,
                      .settings = &settings,
                      .deadline_ns = crn_clock_ns() + (int64_t)3600 * 1000000000};
}

static cairn_status ask(const crn_bound_method *method, const crn_task *task, int64_t budget_bytes, int64_t *bound_ns)
{
    void *kept = NULL;
    *bound_ns = 0;
    cairn_status status = method->raise_makespan(task, &kept, budget_bytes, bound_ns, NULL);
    if (kept)
        method->forget(task, kept);
    return status;
}

static int64_t bound(const crn_bound_method *method, const cairn_problem *problem, int64_t budget_bytes)
{
    const crn_task task = task_for(&plain, problem);
    int64_t found_ns;
    assert_int_equal(ask(method, &task, budget_bytes, &found_ns), CAIRN_OK);
    return found_ns;
}

/* The method leaves chains of few stages to others. */
static int64_t bound_of_few(const cairn_problem *problem, int64_t budget_bytes)
{
    const crn_task task = task_for(&plain, problem);
    crn_ascent at = {.budget_bytes = budget_bytes};
    assert_int_equal(crn_moments_ascend(&task, &at, NULL), CAIRN_OK);
    return at.bound_ns;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget_bytes)
{
    return test_solve(problem, test_options(solver, budget_bytes, "threads=1"), NULL);
}

/* ---- the least cost, by trying all states ---- */

enum { STAGES_MAX = 7, MOMENTS_MAX = 4, NEVER_LOG2 = 60, UNIT_LOG2 = CRN_MOMENTS_PRICE_SHIFT };

/* A choice of states: state[j][l] of stage l at moment j, and whether l runs in interval j. */
typedef struct choice {
    const crn_moments *moments;
    int32_t state[MOMENTS_MAX][STAGES_MAX];
    bool runs[MOMENTS_MAX][STAGES_MAX];
    int64_t least;
} choice;

static int64_t time_units(const crn_moments *m, int64_t ns)
{
    return (int64_t)(((crn_wide)ns << CRN_MOMENTS_TIME_LOG2) / (crn_wide)m->forward_ns);
}

static int64_t forward_units(const crn_moments *m, int32_t l)
{
    const cairn_stage *stage = crn_stage(m->model, l);
    return stage->no_recompute ? (int64_t)1 << NEVER_LOG2 : time_units(m, crn_least_forward_ns(stage));
}

static int64_t beyond_units(const crn_moments *m, int32_t l, int32_t k)
{
    const cairn_stage *stage = crn_stage(m->model, l);
    return time_units(m, crn_option_ns(&stage->options[k]) - crn_option_ns(&stage->options[crn_fastest_option(stage)]));
}

static int64_t held_units(const crn_moments *m, int32_t l, int32_t state)
{
    const cairn_stage *stage = crn_stage(m->model, l);
    return state == 0 ? 0
                      : crn_moments_units(m, state == 1 ? stage->output_bytes : stage->options[state - 2].saved_bytes);
}

/* The latest moment before backward l, or the one that it opens less one. */
static int32_t last_moment(const crn_moments *m, int32_t l)
{
    int32_t j = 0;
    while (j + 1 < m->count && m->list[j + 1].stage > l)
        j++;
    return j;
}

static bool is_saved(const choice *c, int32_t j, int32_t l)
{
    return l == c->moments->list[j].stage || c->state[j][l] >= 2;
}

/* What moment j asks of stage l: a value, or that it runs where it has none. `first` is the first of the window. */
static bool meets_demands(const choice *c, int32_t j, int32_t l, int32_t first, bool *must)
{
    bool all = true;
    for (int32_t i = 0; i < first; i++)
        all &= is_saved(c, i, l + 1);
    bool above_saved = j >= first ? is_saved(c, j, l + 1) : all, has_none = c->state[j][l] == 0;
    *must = j >= first && has_none && l + 1 < c->moments->list[j].stage && c->runs[j][l + 1];
    return !(above_saved && has_none);
}

static int64_t cost_at(choice *c, int32_t j, int32_t l)
{
    const crn_moments *m = c->moments;
    int32_t last = last_moment(m, l), first = (int32_t)crn_max(0, last - m->window + 1), state = c->state[j][l];
    int64_t bytes = held_units(m, l, state), forward = forward_units(m, l);
    bool must;
    if (bytes > m->list[j].room || !meets_demands(c, j, l, first, &must))
        return (int64_t)1 << NEVER_LOG2;
    int32_t next = j < last ? c->state[j + 1][l] : 0;
    bool gains = next != state && !(next < 2 && next < state);
    bool runs = c->runs[j][l] = must || (j < last ? gains : state < 2);
    int64_t beyond = j == last && state >= 2 ? crn_min(forward, beyond_units(m, l, state - 2)) : 0;
    return (runs ? forward : beyond) + (m->list[j].price * bytes >> UNIT_LOG2);
}

static void take_cost(choice *c)
{
    const int64_t never = (int64_t)1 << NEVER_LOG2;
    int64_t cost = 0;
    for (int32_t l = c->moments->list[0].stage - 1; l > 0; l--)
        for (int32_t j = 0; j <= last_moment(c->moments, l); j++)
            cost = crn_min(never, cost + cost_at(c, j, l));
    c->least = crn_min(c->least, cost);
}

static void try_states(choice *c, int32_t j, int32_t l)
{
    if (j == c->moments->count) {
        take_cost(c);
        return;
    }
    if (l == 0) {
        try_states(c, j + 1, j + 1 < c->moments->count ? c->moments->list[j + 1].stage - 1 : 0);
        return;
    }
    for (int32_t state = 0; state < 2 + crn_stage(c->moments->model, l)->option_count; state++) {
        c->state[j][l] = state;
        try_states(c, j, l - 1);
    }
}

/* Random moments, rooms and prices; no more stages at all of them together than `cells`. */
static void fill_moments(test_random *random, crn_moments *m, int32_t cells, int64_t *of_room)
{
    *of_room = m->count = 0;
    for (int32_t c = m->model->n; c > 1 && m->count < MOMENTS_MAX; c--) {
        bool skipped = c < m->model->n && test_random_between(random, 0, 2) == 0;
        if (skipped || cells < c - 1)
            continue;
        cells -= c - 1;
        int64_t room = test_random_between(random, 0, (int64_t)1 << CRN_MOMENTS_BYTES_LOG2);
        int64_t price = test_random_between(random, 0, (int64_t)4 << test_random_between(random, 12, 20));
        m->list[m->count++] = (crn_moment){.stage = c, .room = room, .price = price};
        *of_room += (int64_t)((crn_wide)price * (crn_wide)room >> UNIT_LOG2) + 1;
    }
}

static crn_moments moments_of(const crn_task *task, crn_chain_model *model, int32_t window)
{
    crn_moments m = {.task = task, .model = model, .full_bytes = crn_chain_full_bytes(model), .window = window};
    for (int32_t l = 1; l <= model->n; l++)
        m.forward_ns += crn_least_forward_ns(crn_stage(model, l));
    if (m.forward_ns > 0 && m.full_bytes > 0)
        assert_true(crn_moments_init(&m, &model->arena));
    return m;
}

/* With windows of one and two moments, others are earlier ones. */
static void the_least_cost_is_that_of_all_states(void **state)
{
    static const int32_t windows[] = {1, 2, CRN_MOMENTS_WINDOW};
    test_random random = test_random_seeded(81);
    int compared = 0, rounds = TEST_ROUNDS(400);
    (void)state;
    for (int round = 0; round < rounds; round++) {
        test_chain_shape shape = {.stages_min = 4, .stages_max = 6, .no_recompute = round % 5 == 0};
        shape.options_max = 1 + (round % 4 == 0);
        cairn_problem *problem = test_random_chain(&random, &shape);
        const crn_task task = task_for(&plain, problem);
        crn_chain_model model;
        int64_t units, of_room;
        assert_int_equal(crn_chain_model_init(&model, &task, NULL), CAIRN_OK);
        crn_moments m = moments_of(&task, &model, windows[round % 3]);
        if (m.forward_ns > 0 && m.full_bytes > 0) {
            fill_moments(&random, &m, shape.options_max > 1 ? 7 : 9, &of_room);
            choice c = {.moments = &m, .least = (int64_t)1 << NEVER_LOG2};
            if (m.count > 0 && m.list[0].stage == model.n) {
                try_states(&c, 0, model.n - 1);
                assert_true(crn_moments_evaluate(&m, &units));
                assert_int_equal(units, c.least >> NEVER_LOG2 ? 0 : c.least - of_room);
                compared += c.least >> NEVER_LOG2 == 0;
            }
        }
        crn_chain_model_clear(&model);
        cairn_problem_free(problem);
    }
    print_message("%d of %d costs compared\n", compared, rounds);
    assert_true(compared * 3 > rounds);
}

/* What is used at a price is a subgradient: it bounds what any other prices give. */
static void what_is_used_is_a_subgradient(void **state)
{
    enum { PRICES = 4 };
    test_random random = test_random_seeded(90);
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(60); round++) {
        int32_t n = (int32_t)test_random_between(&random, 8, 60);
        test_chain_shape shape = {.stages_min = n, .stages_max = n, .positive = true, .no_recompute = round % 3 == 0};
        shape.options_max = 1 + round % 3;
        cairn_problem *problem = test_random_chain(&random, &shape);
        const crn_task task = task_for(&plain, problem);
        crn_chain_model model;
        int64_t units[PRICES];
        crn_moment lists[PRICES][CRN_MOMENTS_MAX];
        assert_int_equal(crn_chain_model_init(&model, &task, NULL), CAIRN_OK);
        crn_moments m = moments_of(&task, &model, CRN_MOMENTS_WINDOW);
        int64_t room = ((int64_t)1 << CRN_MOMENTS_BYTES_LOG2) / test_random_between(&random, 1, 12);
        for (int32_t c = n; c > 1; c -= (int32_t)test_random_between(&random, 1, 3))
            m.list[m.count++] = (crn_moment){.stage = c, .room = room};
        for (int e = 0; e < PRICES; e++) {
            for (int32_t j = 0; j < m.count; j++)
                m.list[j].price = test_random_between(&random, 0, (int64_t)1 << (12 + 3 * e));
            assert_true(crn_moments_evaluate(&m, &units[e]));
            memcpy(lists[e], m.list, sizeof(m.list));
        }
        for (int e = 0; e < PRICES * PRICES; e++) {
            const crn_moment *at = lists[e / PRICES], *other = lists[e % PRICES];
            double most = (double)units[e / PRICES] + (double)(n + 2) * m.count;
            for (int32_t j = 0; j < m.count; j++)
                most += (double)(other[j].price - at[j].price) * (double)(at[j].used - room) / (1 << UNIT_LOG2);
            if (units[e / PRICES] != 0 && units[e % PRICES] != 0)
                assert_true((double)units[e % PRICES] <= most + 1e-9 * fabs(most));
        }
        crn_chain_model_clear(&model);
        cairn_problem_free(problem);
    }
}

/* ---- the bound ---- */

static void never_passes_the_optimum(void **state)
{
    test_random random = test_random_seeded(82);
    int slowed = 0, raised = 0;
    (void)state;
    for (int round = 0; round < TEST_ROUNDS(600); round++) {
        test_chain_shape shape = test_chain_of_everything(round % 2 ? 5 : 6);
        shape.stages_min = 2;
        shape.machine = false;
        shape.options_max = 1 + round % 3;
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "brute-chain", INT64_MAX);
        for (int i = 0; i < 4; i++) {
            int64_t budget = all.least_bytes + (all.store_all_bytes - all.least_bytes) * i / 4;
            cairn_info best = solve(problem, "brute-chain", budget);
            int64_t bound_ns = bound_of_few(problem, budget);
            if (best.makespan_ns >= 0 && bound_ns > best.makespan_ns)
                fail_msg("round %d, budget %lld: bound %lld, optimum %lld", round, (long long)budget,
                         (long long)bound_ns, (long long)best.makespan_ns);
            slowed += best.makespan_ns > all.makespan_ns;
            raised += best.makespan_ns > all.makespan_ns && bound_ns > all.makespan_ns;
        }
        cairn_problem_free(problem);
    }
    print_message("%d budgets slow a schedule down, %d of which are seen\n", slowed, raised);
    assert_true(raised * 3 > slowed);
}

static cairn_problem *long_chain(int32_t stages, uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    test_chain_shape shape = {.stages_min = stages,
                              .stages_max = stages,
                              .positive = true,
                              .plain_grads = true,
                              .equal_forwards = true,
                              .bytes_max = 1000000,
                              .ns_max = 100000};
    return test_random_chain(&random, &shape);
}

/* At a twentieth of the way, where a chain is recomputed in many parts. */
static int64_t tight_budget(const cairn_problem *problem)
{
    cairn_info info = solve(problem, "chain-lagrangian", INT64_MAX);
    return info.least_bytes + (info.store_all_bytes - info.least_bytes) / 20;
}

static void long_chains_are_bounded_closer(void **state)
{
    (void)state;
    for (uint64_t seed = 83; seed < 85; seed++) {
        cairn_problem *problem = long_chain(200, seed);
        int64_t budget = tight_budget(problem), others = bound(&crn_chain_knapsack_method, problem, budget);
        others = crn_max(others, bound(&crn_chain_bound_method, problem, budget));
        int64_t found_ns = bound(&crn_chain_moments_method, problem, budget);
        int64_t best_ns = solve(problem, "chain-lagrangian", budget).makespan_ns;
        print_message("of %lld ns between the other bounds and the answer, %lld are proved\n",
                      (long long)(best_ns - others), (long long)(found_ns - others));
        assert_true(found_ns <= best_ns);
        assert_true((found_ns - others) * 5 > best_ns - others);
        cairn_problem_free(problem);
    }
}

static void units_make_no_difference(void **state)
{
    cairn_problem *problem = long_chain(60, 87), *scaled;
    int64_t budget = tight_budget(problem), once = bound(&crn_chain_moments_method, problem, budget);
    const cairn_chain *chain = cairn_problem_chain(problem);
    static cairn_stage stages[60];
    static cairn_stage_option options[60];
    enum { BYTES = 512, NS = 1000 };
    (void)state;
    for (int32_t l = 0; l < chain->stage_count; l++) {
        stages[l] = chain->stages[l];
        options[l] = stages[l].options[0];
        stages[l].options = &options[l];
        stages[l].output_bytes *= BYTES;
        stages[l].grad_bytes *= BYTES;
        stages[l].forward_only_ns *= NS;
        options[l].saved_bytes *= BYTES;
        options[l].forward_ns *= NS;
        options[l].backward_ns *= NS;
    }
    cairn_chain other = {chain->input_bytes * BYTES, chain->input_grad_bytes * BYTES, chain->stage_count, stages};
    assert_int_equal(cairn_problem_new_chain(NULL, &other, NULL, &scaled, NULL), CAIRN_OK);
    int64_t many = bound(&crn_chain_moments_method, scaled, budget * BYTES);
    assert_true(once > crn_work_ns(problem));
    assert_int_equal((many + NS - 1) / NS, once);
    cairn_problem_free(scaled);
    cairn_problem_free(problem);
}

/* ---- the clock and memory ---- */

/* An option larger than 2^31 times what storing everything takes. */
static void a_huge_option_does_no_harm(void **state)
{
    enum { N = 14 };
    cairn_stage_option options[N][2];
    cairn_stage stages[N];
    cairn_problem *problem;
    (void)state;
    for (int l = 0; l < N; l++) {
        options[l][0] = (cairn_stage_option){"keep", 10, 20, 30, 0, 0};
        options[l][1] = (cairn_stage_option){"more", INT64_MAX / 4, 20, 31, 0, 0};
        stages[l] = (cairn_stage){"", 5, 5, 0, 20, 0, false, l == N / 2 ? 2 : 1, options[l]};
    }
    cairn_chain chain = {5, 5, N, stages};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    cairn_info all = solve(problem, "chain-exact", INT64_MAX);
    int64_t budget = (all.least_bytes + all.store_all_bytes) / 2;
    int64_t bound_ns = bound(&crn_chain_moments_method, problem, budget);
    assert_true(bound_ns > all.makespan_ns && bound_ns <= solve(problem, "chain-exact", budget).makespan_ns);
    cairn_problem_free(problem);
}

static int stop_later(void *context, const cairn_progress *progress)
{
    (void)progress;
    return ++*(int *)context > 40;
}

static void goes_on_where_it_was_stopped(void **state)
{
    cairn_problem *problem = long_chain(60, 88);
    int calls = 0;
    const cairn_env env = {.poll = stop_later, .poll_context = &calls};
    const crn_task stopped = task_for(&env, problem), whole = task_for(&plain, problem);
    crn_task unlimited = whole, past = whole;
    int64_t budget = tight_budget(problem), first_ns = 0, second_ns = 0, third_ns = 0, none_ns = 0;
    void *kept = NULL;
    (void)state;
    unlimited.deadline_ns = CAIRN_NONE;
    past.deadline_ns = crn_clock_ns() - 1;
    assert_int_equal(ask(&crn_chain_moments_method, &unlimited, budget, &none_ns), CAIRN_OK);
    assert_int_equal(none_ns, 0);
    assert_int_equal(ask(&crn_chain_moments_method, &past, budget, &none_ns), CAIRN_OK);
    assert_int_equal(none_ns, 0);
    assert_int_equal(crn_chain_moments_method.raise_makespan(&stopped, &kept, budget, &first_ns, NULL), CAIRN_OK);
    assert_int_equal(crn_chain_moments_method.raise_makespan(&whole, &kept, budget, &second_ns, NULL), CAIRN_OK);
    assert_int_equal(crn_chain_moments_method.raise_makespan(&past, &kept, budget, &third_ns, NULL), CAIRN_OK);
    assert_true(first_ns > 0 && first_ns < second_ns && second_ns == third_ns);
    crn_chain_moments_method.forget(&whole, kept);
    cairn_problem_free(problem);
}

typedef struct question {
    const cairn_problem *problem;
    int64_t budget_bytes;
} question;

static cairn_status ask_bound(const cairn_env *env, void *context)
{
    const question *q = context;
    const crn_task task = task_for(env, q->problem);
    int64_t found_ns;
    return ask(&crn_chain_moments_method, &task, q->budget_bytes, &found_ns);
}

static void failing_allocations_are_reported(void **state)
{
    cairn_problem *problem = long_chain(20, 89);
    (void)state;
    test_every_allocation_fails(ask_bound, &(question){problem, tight_budget(problem)});
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_cost_is_that_of_all_states),
        cmocka_unit_test(what_is_used_is_a_subgradient),
        cmocka_unit_test(never_passes_the_optimum),
        cmocka_unit_test(a_huge_option_does_no_harm),
        cmocka_unit_test(long_chains_are_bounded_closer),
        cmocka_unit_test(units_make_no_difference),
        cmocka_unit_test(goes_on_where_it_was_stopped),
        cmocka_unit_test(failing_allocations_are_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
