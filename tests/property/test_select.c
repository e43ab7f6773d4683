/*
 * Checkpoint selection on random chains: the linear, the quadratic and the exhaustive solver agree on eq. 9, the cubic
 * and the exhaustive one on eq. 6; the objectives are those of the sets that are reported, by their definitions; the
 * least budget is the simulator's peak; scaling changes nothing else.
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
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { LAYERS_MAX = 2048 };

static cairn_options *options_for(const char *solver, const char *objective)
{
    cairn_options *options = test_options(solver, -1, "minimize=memory");
    if (objective)
        assert_int_equal(cairn_options_set(options, "objective", objective, NULL), CAIRN_OK);
    return options;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, const char *objective,
                        cairn_schedule **schedule)
{
    return test_solve(problem, options_for(solver, objective), schedule);
}

/* A chain of outputs size[0..n] where everything else follows from them, as the papers have it. */
static cairn_problem *chain_of_sizes(const int64_t *size, int32_t n)
{
    static cairn_stage stages[LAYERS_MAX];
    static cairn_stage_option options[LAYERS_MAX];
    assert_true(n <= LAYERS_MAX);
    for (int32_t l = 1; l <= n; l++) {
        options[l - 1] = (cairn_stage_option){"keep", size[l], 1, 2, 0, 0};
        stages[l - 1] = (cairn_stage){"", size[l], size[l], 0, 1, 0, false, 1, &options[l - 1]};
    }
    cairn_chain chain = {size[0], size[0], n, stages};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

/* ---- the objectives by definition ---- */

static int64_t largest_of(const int64_t *size, int32_t from, int32_t to)
{
    int64_t largest = 0;
    for (int32_t k = from; k <= to; k++)
        largest = size[k] > largest ? size[k] : largest;
    return largest;
}

static int64_t sum_of(const int64_t *size, int32_t from, int32_t to)
{
    int64_t sum = 0;
    for (int32_t k = from; k <= to; k++)
        sum += size[k];
    return sum;
}

static int64_t eq9(const int64_t *size, const int32_t *checkpoints, int32_t count)
{
    int64_t peak = 0, kept = size[0];
    int32_t h = 0;
    for (int32_t c = 0; c < count; c++) {
        int32_t i = checkpoints[c];
        kept += size[i];
        int64_t here = kept + sum_of(size, h + 1, i - 1) + largest_of(size, h, i - 1);
        peak = here > peak ? here : peak;
        h = i;
    }
    return peak;
}

static int64_t eq6(const int64_t *size, const int32_t *checkpoints, int32_t count)
{
    int64_t largest = 0, kept = size[0];
    int32_t h = 0;
    for (int32_t c = 0; c < count; c++) {
        int64_t segment = sum_of(size, h + 1, checkpoints[c] - 1);
        largest = segment > largest ? segment : largest;
        kept += size[checkpoints[c]];
        h = checkpoints[c];
    }
    return kept + largest;
}

static void check_set(const cairn_info *info, const int64_t *size, int32_t n, bool by_eq6)
{
    assert_true(info->checkpoint_count >= 1);
    for (int32_t c = 0; c < info->checkpoint_count; c++)
        assert_true(info->checkpoints[c] > (c > 0 ? info->checkpoints[c - 1] : 0));
    assert_int_equal(info->checkpoints[info->checkpoint_count - 1], n);
    assert_int_equal(info->objective_bytes, by_eq6 ? eq6(size, info->checkpoints, info->checkpoint_count)
                                                   : eq9(size, info->checkpoints, info->checkpoint_count));
}

/* The objective of a solver's answer, whose set was checked. */
static int64_t objective(const cairn_problem *problem, const int64_t *size, int32_t n, const char *solver, bool by_eq6)
{
    cairn_info info = solve(problem, solver, strcmp(solver, "brute-select") != 0 ? NULL : by_eq6 ? "eq6" : "eq9", NULL);
    check_set(&info, size, n, by_eq6);
    int64_t bytes = info.objective_bytes;
    assert_true(info.peak_bytes > 0 || sum_of(size, 0, n) == 0);
    assert_int_equal(info.least_bytes, info.peak_bytes);
    cairn_info_clear(&info);
    return bytes;
}

/* Sizes of several kinds: many ties and zeros, hardly any, falling, rising, one giant. */
static void draw_sizes(test_random *random, int64_t *size, int32_t n)
{
    static const int64_t scales[] = {1, 3, 12, 1000, 1000000007};
    int64_t scale = scales[test_random_between(random, 0, 4)];
    int zeros = (int)test_random_between(random, 0, 2) * 30;
    int64_t slope = test_random_between(random, -1, 1);
    for (int32_t i = 0; i <= n; i++) {
        int64_t ramp = slope < 0 ? n - i + 1 : slope > 0 ? i + 1 : 1;
        size[i] = test_random_chance(random, zeros) ? 0 : test_random_between(random, 0, scale) * ramp;
    }
    if (test_random_chance(random, 20))
        size[test_random_between(random, 0, n)] *= 20;
}

/* The least objective of all 2^(n-1) sets, enumerated here, by the definitions above. */
static int64_t least_of_all_sets(const int64_t *size, int32_t n, bool by_eq6)
{
    int64_t least = INT64_MAX;
    for (int32_t set = 0; set < 1 << (n - 1); set++) {
        int32_t checkpoints[17], count = 0;
        for (int32_t i = 1; i < n; i++)
            if (set >> (i - 1) & 1)
                checkpoints[count++] = i;
        checkpoints[count++] = n;
        int64_t bytes = by_eq6 ? eq6(size, checkpoints, count) : eq9(size, checkpoints, count);
        least = bytes < least ? bytes : least;
    }
    return least;
}

static void small_chains_agree_with_all_sets(void **state)
{
    (void)state;
    int64_t size[17];
    for (uint64_t seed = 0; seed < TEST_ROUNDS(6000); seed++) {
        test_random random = test_random_seeded(seed);
        int32_t n = (int32_t)test_random_between(&random, 1, seed % 20 == 0 ? 12 : 9);
        draw_sizes(&random, size, n);
        cairn_problem *problem = chain_of_sizes(size, n);
        int64_t best_eq9 = least_of_all_sets(size, n, false), best_eq6 = least_of_all_sets(size, n, true);
        assert_int_equal(objective(problem, size, n, "brute-select", false), best_eq9);
        assert_int_equal(objective(problem, size, n, "select-quadratic", false), best_eq9);
        assert_int_equal(objective(problem, size, n, "select-linear", false), best_eq9);
        assert_int_equal(objective(problem, size, n, "brute-select", true), best_eq6);
        assert_int_equal(objective(problem, size, n, "select-cubic", true), best_eq6);
        cairn_problem_free(problem);
    }
}

static void linear_and_quadratic_choose_alike(void **state)
{
    (void)state;
    static int64_t size[LAYERS_MAX + 1];
    for (uint64_t seed = 0; seed < TEST_ROUNDS(3000); seed++) {
        test_random random = test_random_seeded(seed);
        int32_t n = (int32_t)test_random_between(&random, 1, seed % 100 == 0 ? LAYERS_MAX : 120);
        draw_sizes(&random, size, n);
        cairn_problem *problem = chain_of_sizes(size, n);
        cairn_info linear = solve(problem, "select-linear", NULL, NULL);
        cairn_info quadratic = solve(problem, "select-quadratic", NULL, NULL);
        check_set(&linear, size, n, false);
        assert_int_equal(linear.objective_bytes, quadratic.objective_bytes);
        assert_int_equal(linear.checkpoint_count, quadratic.checkpoint_count);
        assert_memory_equal(linear.checkpoints, quadratic.checkpoints,
                            (size_t)linear.checkpoint_count * sizeof(*linear.checkpoints));
        cairn_info_clear(&linear);
        cairn_info_clear(&quadratic);
        cairn_problem_free(problem);
    }
}

/* Algorithm 3 as it stands: every sum of neighbouring sizes as the bound, no shortcut. */
static int64_t plain_algorithm_3(const int64_t *size, int32_t n)
{
    int64_t best = INT64_MAX, least[65];
    for (int32_t from = 1; from <= n; from++)
        for (int32_t to = from - 1; to < n; to++) {
            int64_t bound = sum_of(size, from, to);
            least[0] = size[0];
            for (int32_t i = 1; i <= n; i++) {
                least[i] = INT64_MAX;
                for (int32_t h = i - 1; h >= 0 && sum_of(size, h + 1, i - 1) <= bound; h--)
                    least[i] = least[h] + size[i] < least[i] ? least[h] + size[i] : least[i];
            }
            best = bound + least[n] < best ? bound + least[n] : best;
        }
    return best;
}

static void cubic_is_algorithm_3(void **state)
{
    (void)state;
    int64_t size[65];
    for (uint64_t seed = 0; seed < TEST_ROUNDS(300); seed++) {
        test_random random = test_random_seeded(seed);
        int32_t n = (int32_t)test_random_between(&random, 10, 30);
        draw_sizes(&random, size, n);
        cairn_problem *problem = chain_of_sizes(size, n);
        assert_int_equal(objective(problem, size, n, "select-cubic", true), plain_algorithm_3(size, n));
        cairn_problem_free(problem);
    }
}

/* ---- schedules ---- */

static const char *const names[] = {"select-cubic", "select-quadratic", "select-linear", "brute-select", "auto"};
enum { NAMES = sizeof(names) / sizeof(names[0]) };

static void check_schedule(const cairn_problem *problem, const char *solver)
{
    cairn_schedule *schedule;
    cairn_replay replay;
    cairn_limits limits;
    cairn_info info = solve(problem, solver, NULL, &schedule);
    cairn_options *options = options_for(solver, NULL);
    assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
    assert_int_equal(cairn_verify(NULL, problem, schedule, info.peak_bytes, NULL, &replay, NULL), CAIRN_OK);
    assert_true(replay.valid);
    assert_int_equal(replay.peak_bytes, info.peak_bytes);
    assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_OK);
    assert_int_equal(limits.least_bytes, info.peak_bytes);
    assert_true(limits.least_lower_bytes <= info.peak_bytes);
    int64_t budgets[] = {info.peak_bytes, info.peak_bytes - 1};
    cairn_info infos[2];
    if (info.peak_bytes > 0) {
        assert_int_equal(cairn_solve_many(NULL, problem, options, budgets, 2, NULL, infos, NULL), CAIRN_OK);
        assert_int_equal(infos[0].peak_bytes, info.peak_bytes);
        assert_int_equal(infos[1].outcome, CAIRN_OUTCOME_INFEASIBLE);
        cairn_info_clear(&infos[0]);
        cairn_info_clear(&infos[1]);
    }
    cairn_options_free(options);
    cairn_info_clear(&info);
    cairn_schedule_free(schedule);
}

static void the_least_budget_is_the_peak(void **state)
{
    (void)state;
    test_chain_shape shape = test_chain_of_everything(9);
    shape.no_recompute = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1500); seed++) {
        test_random random = test_random_seeded(seed);
        shape.machine = seed % 4 == 0;
        shape.options_max = 1 + (int32_t)(seed % 3);
        cairn_problem *problem = test_random_chain(&random, &shape);
        for (int i = 0; i < NAMES; i++)
            check_schedule(problem, names[i]);
        cairn_problem_free(problem);
    }
}

static void auto_takes_the_least_peak(void **state)
{
    (void)state;
    test_chain_shape shape = test_chain_of_everything(12);
    shape.no_recompute = false;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(500); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info best = solve(problem, "auto", NULL, NULL);
        for (int i = 0; i < 3; i++) {
            cairn_info info = solve(problem, names[i], NULL, NULL);
            assert_true(best.peak_bytes <= info.peak_bytes);
            cairn_info_clear(&info);
        }
        cairn_info_clear(&best);
        cairn_problem_free(problem);
    }
}

static void scaling_changes_nothing_else(void **state)
{
    (void)state;
    int64_t size[33], scaled[33];
    for (uint64_t seed = 0; seed < TEST_ROUNDS(300); seed++) {
        test_random random = test_random_seeded(seed);
        int32_t n = (int32_t)test_random_between(&random, 1, 32);
        draw_sizes(&random, size, n);
        for (int32_t i = 0; i <= n; i++)
            scaled[i] = 977 * size[i];
        cairn_problem *problem = chain_of_sizes(size, n), *larger = chain_of_sizes(scaled, n);
        for (int i = 0; i < 3; i++) {
            cairn_info info = solve(problem, names[i], NULL, NULL), other = solve(larger, names[i], NULL, NULL);
            assert_int_equal(977 * info.objective_bytes, other.objective_bytes);
            assert_int_equal(977 * info.peak_bytes, other.peak_bytes);
            assert_int_equal(info.makespan_ns, other.makespan_ns);
            assert_int_equal(info.checkpoint_count, other.checkpoint_count);
            assert_memory_equal(info.checkpoints, other.checkpoints,
                                (size_t)info.checkpoint_count * sizeof(*info.checkpoints));
            cairn_info_clear(&info);
            cairn_info_clear(&other);
        }
        cairn_problem_free(problem);
        cairn_problem_free(larger);
    }
}

/* ---- the paper's example, and the ends ---- */

/* VGG-19, 224 x 224, batch 128, fp32: 16 convolutions with ReLU, 5 poolings, 3 fully connected layers. */
static cairn_problem *vgg19(int64_t size[25])
{
    static const struct {
        int64_t convolutions, channels, pixels;
    } blocks[] = {{2, 64, 224}, {2, 128, 112}, {4, 256, 56}, {4, 512, 28}, {4, 512, 14}};
    int32_t l = 0;
    size[l++] = (int64_t)3 * 224 * 224 * 128 * 4;
    for (int b = 0; b < 5; b++) {
        int64_t bytes = blocks[b].channels * blocks[b].pixels * blocks[b].pixels * 128 * 4;
        for (int64_t c = 0; c < blocks[b].convolutions; c++)
            size[l++] = bytes;
        size[l++] = bytes / 4;
    }
    size[l++] = (int64_t)4096 * 128 * 4;
    size[l++] = (int64_t)4096 * 128 * 4;
    size[l++] = (int64_t)1000 * 128 * 4;
    assert_int_equal(l, 25);
    return chain_of_sizes(size, 24);
}

static void vgg19_gives_the_published_sets(void **state)
{
    (void)state;
    int64_t size[25];
    const int32_t by_eq6[] = {3, 6, 24}, by_eq9[] = {2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24};
    const int32_t by_sqrt[] = {5, 10, 15, 20, 24};
    cairn_problem *problem = vgg19(size);
    cairn_info cubic = solve(problem, "select-cubic", NULL, NULL);
    assert_int_equal(cubic.checkpoint_count, 3);
    assert_memory_equal(cubic.checkpoints, by_eq6, sizeof(by_eq6));
    assert_int_equal(eq9(size, by_eq6, 3), (int64_t)10339 << 19);  /* 5,169.5 MiB */
    assert_int_equal(eq9(size, by_sqrt, 5), (int64_t)13475 << 19); /* 6,737.5 MiB */
    assert_int_equal(eq9(size, by_eq9, 11), (int64_t)9555 << 19);  /* 4,777.5 MiB */
    assert_int_equal(objective(problem, size, 24, "select-linear", false), eq9(size, by_eq9, 11));
    assert_int_equal(objective(problem, size, 24, "select-quadratic", false), eq9(size, by_eq9, 11));
    assert_int_equal(cubic.objective_bytes, eq6(size, by_eq6, 3));
    cairn_info_clear(&cubic);
    cairn_problem_free(problem);
}

static void one_layer_has_one_answer(void **state)
{
    (void)state;
    const int64_t size[] = {7, 5};
    cairn_problem *problem = chain_of_sizes(size, 1);
    for (int i = 0; i < NAMES; i++) {
        cairn_info info = solve(problem, names[i], NULL, NULL);
        assert_int_equal(info.checkpoint_count, 1);
        assert_int_equal(info.checkpoints[0], 1);
        assert_int_equal(info.recompute_ns, 0);
        assert_int_equal(info.peak_bytes, 7 + 5 + 5 + 7);
        cairn_info_clear(&info);
    }
    cairn_problem_free(problem);
}

static cairn_status status_of(const cairn_problem *problem, const char *solver, cairn_error *error)
{
    cairn_info info;
    cairn_options *options = options_for(solver, NULL);
    cairn_status status = cairn_solve(NULL, problem, options, NULL, &info, error);
    cairn_info_clear(&info);
    cairn_options_free(options);
    return status;
}

static void a_stage_that_runs_once_is_refused(void **state)
{
    (void)state;
    static const cairn_stage_option option = {"keep", 4, 1, 2, 0, 0};
    const cairn_stage stages[] = {{"", 4, 4, 0, 1, 0, false, 1, &option}, {"", 4, 4, 0, 1, 0, true, 1, &option}};
    const cairn_chain chain = {4, 4, 2, stages};
    cairn_problem *problem;
    cairn_error error;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    for (int i = 0; i < NAMES; i++)
        assert_int_equal(status_of(problem, names[i], &error), CAIRN_UNSUPPORTED);
    assert_int_equal(status_of(problem, "select-linear", &error), CAIRN_UNSUPPORTED);
    assert_non_null(strstr(error.message, "stage 2"));
    cairn_problem_free(problem);
}

/* Every size is counted once when a problem is made; eq. 9 counts the largest twice. */
static void sums_that_would_wrap_are_refused(void **state)
{
    (void)state;
    static const cairn_stage_option option = {"keep", 0, 1, 2, 0, 0};
    const cairn_stage stage = {"", 0, 0, 0, 1, 0, false, 1, &option};
    const cairn_chain chain = {(int64_t)3 << 61, 0, 1, &stage};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    for (int i = 0; i < NAMES; i++)
        assert_int_equal(status_of(problem, names[i], NULL), CAIRN_OVERFLOW);
    cairn_problem_free(problem);
}

static void brute_force_has_a_limit(void **state)
{
    (void)state;
    int64_t size[18] = {0};
    for (int32_t i = 0; i < 18; i++)
        size[i] = i + 1;
    cairn_problem *problem = chain_of_sizes(size, 17);
    assert_int_equal(status_of(problem, "brute-select", NULL), CAIRN_UNSUPPORTED);
    cairn_problem_free(problem);
    problem = chain_of_sizes(size, 16);
    assert_int_equal(objective(problem, size, 16, "brute-select", false),
                     objective(problem, size, 16, "select-linear", false));
    cairn_problem_free(problem);
}

typedef struct attempt {
    const cairn_problem *problem;
    const char *solver;
} attempt;

static cairn_status solve_and_free(const cairn_env *env, void *context)
{
    const attempt *a = context;
    return test_solve_status(env, a->problem, options_for(a->solver, NULL));
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    const int64_t size[] = {3, 1, 4, 1, 5, 9, 2, 6};
    cairn_problem *problem = chain_of_sizes(size, 7);
    for (int i = 0; i < NAMES; i++) {
        attempt a = {problem, names[i]};
        assert_true(test_every_allocation_fails(solve_and_free, &a) > 0);
    }
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_chains_agree_with_all_sets),
        cmocka_unit_test(linear_and_quadratic_choose_alike),
        cmocka_unit_test(cubic_is_algorithm_3),
        cmocka_unit_test(the_least_budget_is_the_peak),
        cmocka_unit_test(auto_takes_the_least_peak),
        cmocka_unit_test(scaling_changes_nothing_else),
        cmocka_unit_test(vgg19_gives_the_published_sets),
        cmocka_unit_test(one_layer_has_one_answer),
        cmocka_unit_test(a_stage_that_runs_once_is_refused),
        cmocka_unit_test(sums_that_would_wrap_are_refused),
        cmocka_unit_test(brute_force_has_a_limit),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
