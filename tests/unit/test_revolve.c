/* revolve and revolve-hetero: the binomial counts, and the two against each other where both apply. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "solve/chain/revolve.h"
#include "solve/solver.h"
#include "support/ask.h"
#include "support/random_problem.h"
#include "support/rounds.h"

static void binomial_coefficients(void **state)
{
    (void)state;
    for (int64_t c = 1; c <= 30; c++)
        for (int64_t r = 1; r <= 30; r++)
            assert_true(crn_revolve_beta(c, r) == crn_revolve_beta(c - 1, r) + crn_revolve_beta(c, r - 1));
    assert_true(crn_revolve_beta(3, 2) == 10 && crn_revolve_beta(7, 0) == 1 && crn_revolve_beta(0, 7) == 1);
    assert_true(crn_revolve_beta(2, -1) == 0 && crn_revolve_beta(30, 30) == 118264581564861424);
    assert_true(crn_revolve_beta(100, 100) == INT64_MAX);
}

/* The least number of forwards by trying all splits: what the closed form must equal. */
static void the_closed_form_is_the_optimum(void **state)
{
    (void)state;
    enum { STEPS = 80, OUTPUTS = 12 };
    static int64_t best[STEPS + 1][OUTPUTS + 1];
    for (int64_t c = 1; c <= OUTPUTS; c++)
        for (int64_t n = 1; n <= STEPS; n++) {
            best[n][c] = n == 1 ? 0 : INT64_MAX;
            for (int64_t d = 1; d < n; d++) {
                int64_t rest = n - d == 1 ? 0 : c > 1 ? best[n - d][c - 1] : INT64_MAX;
                if (rest < INT64_MAX && d + rest + best[d][c] < best[n][c])
                    best[n][c] = d + rest + best[d][c];
            }
            assert_int_equal(crn_revolve_forwards(n, c), best[n][c]);
        }
}

/* For all c, r up to 30, at beta(c, r) steps and beside them, splitting keeps to the count. */
static void splits_keep_to_the_count(void **state)
{
    (void)state;
    for (int64_t c = 1; c <= 30; c++)
        for (int64_t r = 1; r <= 30; r++) {
            int64_t full = crn_revolve_beta(c, r), begin = crn_revolve_beta(c, r - 1) + 1;
            const int64_t steps[] = {full, begin, begin + (full - begin) / 3, full - 1};
            for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
                int64_t n = steps[i];
                if (n < 2)
                    continue;
                int64_t d = crn_revolve_split(n, c);
                assert_true(d >= 1 && d < n);
                int64_t rest = n - d == 1 ? 0 : crn_revolve_forwards(n - d, c - 1);
                assert_true(crn_revolve_forwards(n, c) == d + rest + crn_revolve_forwards(d, c));
            }
            assert_true(crn_revolve_forwards(full, c) == r * full - crn_revolve_beta(c + 1, r - 1));
        }
}

/* ---- schedules ---- */

static cairn_problem *alike(int32_t n, int64_t saved_bytes)
{
    cairn_stage_option option = {"keep", saved_bytes, 1, 1, 0, 0};
    cairn_stage *stages = calloc((size_t)n, sizeof(*stages));
    cairn_problem *problem;
    assert_non_null(stages);
    for (int32_t i = 0; i < n; i++)
        stages[i] = (cairn_stage){"", 1, 0, 0, 1, 0, false, 1, &option};
    cairn_chain chain = {1, 0, n, stages};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    free(stages);
    return problem;
}

static cairn_info solve(const cairn_problem *problem, const char *solver, int64_t budget, cairn_schedule **schedule)
{
    cairn_options *options = test_options(solver, budget, "");
    /* A slot for every byte; where that is refused, as many as usual. */
    if (cairn_solver_has_option(solver, "slots"))
        cairn_options_set_int(options, "slots", budget > 1 ? budget - 1 : 1, NULL);
    return test_solve(problem, options, schedule);
}

static int64_t count_forwards(const cairn_schedule *schedule, bool saving)
{
    int64_t count = 0;
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++) {
        uint8_t code = cairn_schedule_ops(schedule)[i].code;
        count +=
            saving ? code == CAIRN_OP_FORWARD_SAVE : code == CAIRN_OP_FORWARD_KEEP || code == CAIRN_OP_FORWARD_DROP;
    }
    return count;
}

/* Of one byte each: c outputs that are kept, the input of the stage that is run, and its saved set. */
static void schedules_have_the_binomial_counts(void **state)
{
    (void)state;
    for (int64_t c = 1; c <= 30; c++)
        for (int64_t r = 1; r <= 30 && crn_revolve_beta(c, r) <= 2000; r++) {
            int32_t n = (int32_t)crn_revolve_beta(c, r);
            cairn_problem *problem = alike(n, 1);
            cairn_schedule *schedule;
            cairn_info info = solve(problem, "revolve", c + 2, &schedule);
            assert_non_null(schedule);
            assert_int_equal(info.peak_bytes, c + 2);
            assert_int_equal(count_forwards(schedule, false), r * n - crn_revolve_beta(c + 1, r - 1));
            assert_int_equal(count_forwards(schedule, true), n);
            cairn_schedule_free(schedule);
            cairn_problem_free(problem);
        }
}

static void both_agree_on_stages_that_are_alike(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 40; n += 3) {
        cairn_problem *problem = alike(n, 1);
        for (int64_t budget = 1; budget <= 12; budget++) {
            cairn_info binomial = solve(problem, "revolve", budget, NULL);
            cairn_info program = solve(problem, "revolve-hetero", budget, NULL);
            assert_int_equal(binomial.outcome == CAIRN_OUTCOME_INFEASIBLE, program.outcome == CAIRN_OUTCOME_INFEASIBLE);
            assert_int_equal(binomial.makespan_ns, program.makespan_ns);
            assert_int_equal(binomial.least_bytes, program.least_bytes);
        }
        cairn_problem_free(problem);
    }
}

static void a_long_chain_with_few_outputs(void **state)
{
    (void)state;
    cairn_problem *problem = alike(100000, 3);
    cairn_info info = solve(problem, "revolve", 30, NULL);
    assert_true(info.makespan_ns > 0 && info.peak_bytes <= 30);
    assert_true(info.makespan_ns == 200000 + crn_revolve_forwards(100000, 26));
    cairn_problem_free(problem);
}

/*
 * The peak that the choice of c goes by is the schedule's, byte for byte: a budget of the peak gives the same answer, one
 * byte less a slower one or none.
 */
static void check_peak_at(const cairn_problem *problem, int64_t budget)
{
    cairn_info info = solve(problem, "revolve", budget, NULL);
    assert_true(budget >= info.least_bytes && info.makespan_ns >= 0);
    cairn_info same = solve(problem, "revolve", info.peak_bytes, NULL);
    assert_int_equal(same.makespan_ns, info.makespan_ns);
    cairn_info less = solve(problem, "revolve", info.peak_bytes - 1, NULL);
    assert_true(less.makespan_ns < 0 ? info.peak_bytes == info.least_bytes : less.makespan_ns > info.makespan_ns);
}

static void peaks_are_foreseen_to_the_byte(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(60); seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = {.stages_min = 2,
                                  .stages_max = 40,
                                  .homogeneous = true,
                                  .positive = true,
                                  .signed_workspaces = seed % 4 > 1,
                                  .weight_grads = seed % 2 == 1,
                                  .fixed = true};
        cairn_problem *problem = test_random_chain(&random, &shape);
        cairn_info all = solve(problem, "revolve", INT64_MAX / 4, NULL);
        for (int64_t step = 0; step <= 12; step++)
            check_peak_at(problem, all.least_bytes + (all.store_all_bytes - all.least_bytes) * step / 10);
        cairn_problem_free(problem);
    }
}

static cairn_problem *alike_with_weights(int32_t n, int64_t weight_grad_bytes)
{
    cairn_stage_option option = {"keep", 24, 3, 5, 0, 0};
    cairn_stage *stages = calloc((size_t)n, sizeof(*stages));
    cairn_problem *problem;
    assert_non_null(stages);
    for (int32_t i = 0; i < n; i++)
        stages[i] = (cairn_stage){"", 8, 8, weight_grad_bytes, 3, 0, false, 1, &option};
    cairn_chain chain = {8, 8, n, stages};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    free(stages);
    return problem;
}

/* Beyond the lengths at which all numbers of outputs are tried. */
static void more_budget_never_costs_time_in_long_chains(void **state)
{
    (void)state;
    cairn_problem *problem = alike_with_weights(3000, 3);
    cairn_info all = solve(problem, "revolve", INT64_MAX / 4, NULL);
    int64_t before = INT64_MAX;
    assert_int_equal(all.makespan_ns, 3000 * 8 + 2999 * 3); /* every output is kept */
    assert_true(solve(problem, "revolve", all.least_bytes - 1, NULL).makespan_ns < 0);
    for (int64_t step = 0; step <= 20; step++) {
        int64_t budget = all.least_bytes + (all.peak_bytes - all.least_bytes) * step / 20;
        cairn_info info = solve(problem, "revolve", budget, NULL);
        assert_true(info.makespan_ns >= 0 && info.makespan_ns <= before);
        before = info.makespan_ns;
    }
    assert_int_equal(before, all.makespan_ns);
    cairn_problem_free(problem);
}

static void the_field_that_differs_is_named(void **state)
{
    (void)state;
    static const char *const names[] = {"output_bytes",
                                        "saved_bytes",
                                        "forward_ns",
                                        "backward_ns",
                                        "grad_bytes",
                                        "weight_grad_bytes",
                                        "forward_only_ns",
                                        "forward_workspace_bytes",
                                        "backward_workspace_bytes",
                                        "forward_only_workspace_bytes"};
    for (int field = 0; field < 10; field++) {
        cairn_stage_option options[] = {{"keep", 9, 1, 1, 0, 0}, {"keep", 9, 1, 1, 0, 0}};
        cairn_stage stages[] = {{"", 1, 0, 0, 1, 0, false, 1, &options[0]}, {"", 1, 0, 0, 1, 0, false, 1, &options[1]}};
        int64_t *const fields[] = {&stages[1].output_bytes,
                                   &options[1].saved_bytes,
                                   &options[1].forward_ns,
                                   &options[1].backward_ns,
                                   &stages[1].grad_bytes,
                                   &stages[1].weight_grad_bytes,
                                   &stages[1].forward_only_ns,
                                   &options[1].forward_workspace_bytes,
                                   &options[1].backward_workspace_bytes,
                                   &stages[1].forward_only_workspace_bytes};
        cairn_problem *problem;
        cairn_error error;
        char expected[64];
        *fields[field] += 1;
        cairn_chain chain = {1, 0, 2, stages};
        assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
        assert_int_equal(cairn_solver_accepts("revolve", problem, NULL, &error), CAIRN_UNSUPPORTED);
        snprintf(expected, sizeof(expected), "stage 2 differs from stage 1 in %s ", names[field]);
        assert_int_equal(error.index, 2);
        assert_non_null(strstr(error.message, expected));
        cairn_problem_free(problem);
    }
}

/* ---- revolve-hetero against plain recursion and exhaustive search ---- */

enum { FAR = 1 << 28, STAGES = 6 };

static int64_t max_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* A chain as arrays; base[l] = d[l] and the weight gradients of the stages after l. */
typedef struct plain {
    const cairn_chain *chain;
    int32_t n;
    int64_t always, output[STAGES + 1], grad[STAGES + 1], base[STAGES + 1];
} plain;

static plain plain_of(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    int64_t weights = 0;
    plain p = {.chain = chain, .n = chain->stage_count};
    p.always = cairn_problem_info_of(problem)->fixed_bytes + chain->input_bytes;
    for (int32_t l = p.n; l >= 0; l--) {
        p.output[l] = l > 0 ? chain->stages[l - 1].output_bytes : 0;
        p.grad[l] = l > 0 ? chain->stages[l - 1].grad_bytes : chain->input_grad_bytes;
        p.base[l] = p.grad[l] + weights;
        weights += l > 0 ? chain->stages[l - 1].weight_grad_bytes : 0;
    }
    return p;
}

/* The least time to save stage l and run it backward at once, with m bytes beside its input. */
static int64_t reverse(const plain *p, int32_t l, int64_t m)
{
    const cairn_stage *stage = &p->chain->stages[l - 1];
    int64_t best = FAR;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *o = &stage->options[k];
        int64_t held = p->base[l] + o->saved_bytes;
        int64_t made = p->grad[l - 1] + stage->weight_grad_bytes + o->backward_workspace_bytes;
        int64_t peak = held + max_of(0, max_of(o->forward_workspace_bytes, made));
        peak = l == 1 ? max_of(peak, p->base[0]) : peak;
        if (peak <= m && o->forward_ns + o->backward_ns < best)
            best = o->forward_ns + o->backward_ns;
    }
    return best;
}

/* What forward_drop l needs beside X. */
static int64_t dropping(const plain *p, int32_t l)
{
    int64_t before = p->output[l - 1], made = p->output[l];
    return max_of(max_of(before, made), before + made + p->chain->stages[l - 1].forward_only_workspace_bytes);
}

static int64_t recursion(const plain *p, int32_t s, int32_t t, int64_t m)
{
    if (s == t)
        return reverse(p, s, m);
    const cairn_stage *stages = p->chain->stages;
    int64_t best = FAR, ns = stages[s - 1].forward_only_ns;
    int64_t peak = p->output[s] + max_of(0, stages[s - 1].forward_only_workspace_bytes);
    for (int32_t split = s + 1; split <= t && p->base[t] + peak <= m; split++) {
        int64_t rest = recursion(p, split, t, m - p->output[split - 1]);
        int64_t sum = rest < FAR ? ns + rest + recursion(p, s, split - 1, m) : FAR;
        best = sum < best ? sum : best;
        peak = max_of(peak, dropping(p, split));
        ns += stages[split - 1].forward_only_ns;
    }
    return best;
}

enum { SETS = 1 << (STAGES + 1), STATES = SETS * (STAGES + 1) };

/* Shortest paths over (l of the current gradient, set of outputs that are there), a[0] always among them. */
typedef struct search {
    plain p;
    int64_t budget, ns[STATES];
    bool done[STATES];
} search;

static void reach(search *w, int32_t l, int32_t set, int64_t ns)
{
    int64_t *known = &w->ns[l * SETS + set];
    *known = ns < *known ? ns : *known;
}

static int64_t bytes_of(const plain *p, int32_t set)
{
    int64_t bytes = p->always;
    for (int32_t l = 1; l <= p->n; l++)
        bytes += (set >> l & 1) ? p->output[l] : 0;
    return bytes;
}

static void go_forward(search *w, int32_t l, int32_t set, int32_t i, int64_t ns)
{
    const plain *p = &w->p;
    int64_t room = w->budget - p->base[l] - bytes_of(p, set);
    int64_t workspace = p->chain->stages[i - 1].forward_only_workspace_bytes;
    ns += p->chain->stages[i - 1].forward_only_ns;
    if (p->output[i] + max_of(0, workspace) <= room)
        reach(w, l, set | 1 << i, ns);
    if (i > 1 && dropping(p, i) - p->output[i - 1] <= room)
        reach(w, l, (set | 1 << i) & ~(1 << (i - 1)), ns);
}

static void expand(search *w, int32_t l, int32_t set, int64_t ns)
{
    const plain *p = &w->p;
    for (int32_t i = 1; i <= p->n; i++) {
        if (set >> i & 1)
            reach(w, l, set & ~(1 << i), ns);
        else if (set >> (i - 1) & 1)
            go_forward(w, l, set, i, ns);
    }
    if (set >> (l - 1) & 1) {
        int64_t last_ns = reverse(p, l, w->budget - bytes_of(p, set));
        if (last_ns < FAR)
            reach(w, l - 1, l > 1 ? set & ~(1 << (l - 1)) : set, ns + last_ns);
    }
}

static int64_t exhaustive(search *w, const plain *p, int64_t budget)
{
    w->p = *p;
    w->budget = budget;
    for (int32_t i = 0; i < STATES; i++) {
        w->ns[i] = FAR;
        w->done[i] = false;
    }
    reach(w, p->n, 1, p->always + p->base[p->n] <= budget ? 0 : FAR);
    for (;;) {
        int32_t next = -1;
        for (int32_t i = 0; i < STATES; i++)
            if (!w->done[i] && w->ns[i] < FAR && (next < 0 || w->ns[i] < w->ns[next]))
                next = i;
        if (next < 0)
            return FAR;
        if (next / SETS == 0)
            return w->ns[next];
        w->done[next] = true;
        expand(w, next / SETS, next % SETS, w->ns[next]);
    }
}

static cairn_info solve_unrounded(const plain *p, const cairn_problem *problem, int64_t budget)
{
    cairn_options *options;
    cairn_info info;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    cairn_options_set(options, "solver", "revolve-hetero", NULL);
    cairn_options_set_int(options, "slots", budget > p->always ? budget - p->always : 1, NULL);
    cairn_options_set_int(options, "budget", budget, NULL);
    assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
    cairn_options_free(options);
    return info;
}

/*
 * The program gives what the recursion gives, in bytes; a search over all schedules that keep only outputs is never
 * slower, needs no less memory, and is seldom faster: persistence is a restriction where sizes differ.
 */
static void the_program_is_the_recursion(void **state)
{
    static search w;
    int questions = 0, beaten = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(240); seed++) {
        test_random random = test_random_seeded(seed);
        test_chain_shape shapes[] = {
            {.stages_min = 2, .stages_max = STAGES},
            {.stages_min = 3, .stages_max = STAGES, .plain_grads = true, .equal_forwards = true},
            {.stages_min = 3, .stages_max = STAGES, .signed_workspaces = true, .weight_grads = true, .fixed = true},
            {.stages_min = 3, .stages_max = 5, .options_max = 3}};
        cairn_problem *problem = test_random_chain(&random, &shapes[seed % 4]);
        plain p = plain_of(problem);
        int64_t least = solve_unrounded(&p, problem, 0).least_bytes;
        assert_int_equal(exhaustive(&w, &p, least - 1), FAR);
        for (int64_t budget = least; budget < least + 16; budget += 2) {
            cairn_info info = solve_unrounded(&p, problem, budget);
            int64_t best = exhaustive(&w, &p, budget);
            assert_int_equal(info.makespan_ns, recursion(&p, 1, p.n, budget - p.always));
            assert_true(best <= info.makespan_ns);
            questions++;
            beaten += best < info.makespan_ns;
        }
        cairn_problem_free(problem);
    }
    assert_true(beaten > 0 && beaten * 20 < questions);
}

static void other_chains_are_refused_with_the_stage(void **state)
{
    (void)state;
    cairn_stage_option options[] = {{"keep", 1, 1, 1, 0, 0}, {"less", 1, 1, 2, 0, 0}};
    for (int what = 0; what < 3; what++) {
        cairn_stage stages[3];
        cairn_problem *problem;
        cairn_error error;
        for (int i = 0; i < 3; i++)
            stages[i] = (cairn_stage){"", 1, 0, 0, 1, 0, what == 0, what == 1 && i == 1 ? 2 : 1, options};
        if (what == 2)
            stages[1].grad_bytes = 7;
        cairn_chain chain = {1, 0, 3, stages};
        assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
        assert_int_equal(cairn_solver_accepts("revolve", problem, NULL, &error), CAIRN_UNSUPPORTED);
        assert_int_equal(error.index, what == 0 ? 1 : 2);
        assert_int_equal(cairn_solver_accepts("revolve-hetero", problem, NULL, &error),
                         what == 0 ? CAIRN_UNSUPPORTED : CAIRN_OK);
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(binomial_coefficients),
        cmocka_unit_test(the_closed_form_is_the_optimum),
        cmocka_unit_test(splits_keep_to_the_count),
        cmocka_unit_test(schedules_have_the_binomial_counts),
        cmocka_unit_test(both_agree_on_stages_that_are_alike),
        cmocka_unit_test(a_long_chain_with_few_outputs),
        cmocka_unit_test(peaks_are_foreseen_to_the_byte),
        cmocka_unit_test(more_budget_never_costs_time_in_long_chains),
        cmocka_unit_test(the_field_that_differs_is_named),
        cmocka_unit_test(the_program_is_the_recursion),
        cmocka_unit_test(other_chains_are_refused_with_the_stage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
