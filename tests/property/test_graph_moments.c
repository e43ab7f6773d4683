/*
 * Bounds by programs over several moments: what prices prove of random small programs is never above the least cost
 * that enumeration finds, however soon the search for prices ends; and whatever the moments, no bound is above what
 * exhaustive search finds on thousands of tiny graphs with aliases, outputs, nodes that run once and workspaces.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "solve/graph/graph_bound.h"
#include "solve/graph/moment_program.h"
#include "support/ask.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { COLUMNS = 9, ROWS = 12, GRAPH_NODES = 7, SUBSETS = 6, BUDGETS = 3 };

static const crn_settings settings = {.memory_limit_bytes = CAIRN_NONE, .time_limit_ns = CAIRN_NONE};
static const cairn_env env = {.poll = NULL};

static crn_task task_of(const cairn_problem *problem)
{
    return (crn_task){.env = &env,
                      .problem = problem,
                      .settings = &settings,
                      .budget_max_bytes = CAIRN_NONE,
                      .deadline_ns = CAIRN_NONE};
}

static crn_box_limit limit_for(test_random *random, const crn_task *task)
{
    static const int iterations[] = {0, 1, 64, 300, 2000};
    return (crn_box_limit){.task = task,
                           .iterations = iterations[test_random_between(random, 0, 4)],
                           .rounds = (int)test_random_between(random, 0, 6),
                           .work = test_random_chance(random, 20) ? 1000 : INT64_C(1000000000)};
}

/* ---- programs ---- */

typedef struct small_program {
    int columns, rows;
    int64_t cost[COLUMNS], bytes[COLUMNS];
    int sign[ROWS][COLUMNS]; /* 0 = not in it */
    int64_t right[ROWS];
    bool is_sizes[ROWS];
} small_program;

static small_program draw_program(test_random *random)
{
    small_program p = {.columns = (int)test_random_between(random, 1, COLUMNS),
                       .rows = (int)test_random_between(random, 1, ROWS)};
    for (int j = 0; j < p.columns; j++) {
        p.cost[j] = test_random_between(random, 0, 30);
        p.bytes[j] = test_random_between(random, 1, 12);
    }
    for (int r = 0; r < p.rows; r++) {
        p.is_sizes[r] = test_random_chance(random, 30);
        p.right[r] = p.is_sizes[r] ? test_random_between(random, 0, 30) : test_random_between(random, -2, 1);
        for (int j = 0; j < p.columns; j++)
            p.sign[r][j] = !test_random_chance(random, 45)                   ? 0
                           : p.is_sizes[r] || test_random_chance(random, 25) ? 1
                                                                             : -1;
    }
    return p;
}

static bool holds(const small_program *p, unsigned chosen)
{
    for (int r = 0; r < p->rows; r++) {
        int64_t sum = 0;
        for (int j = 0; j < p->columns; j++)
            sum += chosen >> j & 1 ? p->sign[r][j] * (p->is_sizes[r] ? p->bytes[j] : 1) : 0;
        if (sum > p->right[r])
            return false;
    }
    return true;
}

/* -1 = nothing keeps to the rows. */
static int64_t least_cost(const small_program *p)
{
    int64_t least = -1;
    for (unsigned chosen = 0; chosen < 1U << p->columns; chosen++) {
        int64_t cost = 0;
        for (int j = 0; j < p->columns; j++)
            cost += chosen >> j & 1 ? p->cost[j] : 0;
        if (holds(p, chosen) && (least < 0 || cost < least))
            least = cost;
    }
    return least;
}

static void fill(crn_box_program *box, const small_program *p)
{
    crn_box_begin(box);
    for (int j = 0; j < p->columns; j++)
        assert_int_equal(crn_box_column(box, p->cost[j], p->bytes[j]), j);
    for (int r = 0; r < p->rows; r++) {
        for (int j = 0; j < p->columns; j++)
            if (p->sign[r][j] != 0)
                crn_box_entry(box, j, p->sign[r][j]);
        if (p->is_sizes[r])
            crn_box_sizes(box, p->right[r]);
        else
            crn_box_row(box, (int32_t)p->right[r]);
    }
}

static void prices_prove_no_more_than_there_is(void **state)
{
    const crn_task task = task_of(NULL);
    crn_arena arena;
    crn_box_program box;
    int met = 0, feasible = 0;
    (void)state;
    crn_arena_init(&arena, crn_allocator(&env));
    for (int scale = 0; scale < 3; scale++) {
        const int64_t unit = scale == 0   ? 1
                             : scale == 1 ? 1000003
                                          : INT64_C(1) << 48; /* up to costs that are rounded */
        assert_true(crn_box_program_new(&arena, 4096, unit * 30 * COLUMNS, &box));
        for (uint64_t seed = 0; seed < TEST_ROUNDS(4000); seed++) {
            test_random random = test_random_seeded(seed);
            small_program p = draw_program(&random);
            int64_t least = least_cost(&p);
            crn_box_limit limit = limit_for(&random, &task);
            if (least < 0)
                continue;
            for (int j = 0; j < p.columns; j++)
                p.cost[j] *= unit;
            fill(&box, &p);
            assert_false(box.is_full);
            int64_t bound = crn_box_bound(&box, &limit);
            assert_true(bound >= 0 && bound <= least * unit);
            feasible++;
            met += bound == least * unit && least > 0;
        }
    }
    crn_arena_clear(&arena);
    print_message("of %d programs the bound is the least cost, which is not 0, of %d\n", feasible, met);
    assert_true(met > feasible / 10);
}

static void what_does_not_fit_proves_nothing(void **state)
{
    const crn_task task = task_of(NULL);
    crn_box_limit limit = {.task = &task, .iterations = 300, .work = 1000000};
    crn_arena arena;
    crn_box_program box;
    (void)state;
    crn_arena_init(&arena, crn_allocator(&env));
    for (int entries = 1; entries <= 10; entries++) {
        assert_true(crn_box_program_new(&arena, entries, 100, &box));
        crn_box_begin(&box);
        for (int i = 0; i < 5; i++) {
            crn_box_entry(&box, crn_box_column(&box, 10, 1), -1);
            crn_box_row(&box, -1);
        }
        assert_int_equal(box.is_full, entries < 10); /* room for half as many rows as entries */
        assert_true(!box.is_full || crn_box_bound(&box, &limit) == 0);
    }
    crn_arena_clear(&arena);
}

/* ---- graphs ---- */

typedef struct tally {
    int programs, positive, raised, met;
} tally;

/* What was proved is proved again at once, from what is remembered of it. */
static void check_memory(crn_moment_program *program, const int32_t *moments, int count, crn_box_limit limit,
                         int64_t proved)
{
    limit.iterations = 0;
    limit.work = 1;
    assert_true(crn_moment_bound(program, moments, count, &limit) >= proved);
}

/* Programs over random moments, within one budget. */
static void check_budget(test_random *random, const crn_task *task, const crn_graph_model *model, int64_t budget_bytes,
                         tally *count)
{
    crn_graph_bounder *bounder;
    crn_moment_program program;
    crn_arena arena;
    cairn_info info = test_solve(task->problem, test_options("brute-graph", budget_bytes, "threads=1"), NULL);
    if (info.makespan_ns < 0)
        return;
    assert_int_equal(crn_graph_bounder_new(task, model, &bounder, NULL), CAIRN_OK);
    int64_t by_windows = crn_graph_bound_makespan(bounder, budget_bytes), best = 0;
    crn_arena_init(&arena, crn_allocator(&env));
    assert_true(crn_moment_program_new(&arena, model, budget_bytes, 20000, &program));
    for (int k = 0; k < SUBSETS; k++) {
        int32_t moments[CRN_MOMENTS_MAX];
        int moment_count = 0;
        crn_box_limit limit = limit_for(random, task);
        for (int32_t t = 1; t < model->node_count; t++)
            if (k == 0 || test_random_chance(random, 50))
                moments[moment_count++] = t;
        if (moment_count == 0)
            continue;
        limit.remembers = test_random_chance(random, 70); /* so that others start from it, and with its rows */
        int64_t again = crn_moment_bound(&program, moments, moment_count, &limit), bound = model->total_cost + again;
        if (limit.remembers && again > 0)
            check_memory(&program, moments, moment_count, limit, again);
        assert_false(program.box.is_full);
        if (bound > info.makespan_ns)
            fail_msg("within %lld: bound %lld, makespan %lld", (long long)budget_bytes, (long long)bound,
                     (long long)info.makespan_ns);
        best = bound > best ? bound : best;
        count->programs++;
    }
    count->positive += best > model->total_cost;
    count->raised += best > by_windows;
    count->met += best == info.makespan_ns && best > model->total_cost;
    crn_arena_clear(&arena);
    crn_graph_bounder_free(bounder);
}

static void check_graph(uint64_t seed, const test_graph_shape *shape, tally *count)
{
    test_random random = test_random_seeded(seed);
    cairn_problem *problem = test_random_graph(&random, shape);
    cairn_limits limits = test_limits(problem, test_options("brute-graph", -1, "threads=1"));
    const crn_task task = task_of(problem);
    crn_graph_model *model;
    assert_int_equal(crn_graph_model_new(&task, &model, NULL), CAIRN_OK);
    for (int i = 0; i < BUDGETS && limits.least_bytes >= 0 && limits.least_bytes < limits.store_all_bytes; i++)
        check_budget(&random, &task, model,
                     limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) * i / BUDGETS, count);
    crn_graph_model_free(model);
    cairn_problem_free(problem);
}

static void programs_are_below_every_schedule(void **state)
{
    test_graph_shape everything = test_graph_of_everything(GRAPH_NODES),
                     plain = {.nodes_min = 6, .nodes_max = GRAPH_NODES, .positive = true, .training = true};
    tally count = {0};
    (void)state;
    everything.machine = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(4000); seed++) {
        everything.training = seed % 2 == 1;
        check_graph(seed, &everything, &count);
    }
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1500); seed++)
        check_graph(seed, &plain, &count);
    print_message("%d programs; budgets with a bound above all costs %d, above that of windows %d, the optimum %d\n",
                  count.programs, count.positive, count.raised, count.met);
    assert_true(count.positive > 0 && count.raised > 0);
    assert_true(count.met * 2 > count.positive);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(prices_prove_no_more_than_there_is),
                                       cmocka_unit_test(what_does_not_fit_proves_nothing),
                                       cmocka_unit_test(programs_are_below_every_schedule)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
