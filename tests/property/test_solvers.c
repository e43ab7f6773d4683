/*
 * What every solver must satisfy, for every solver of the registry that takes the problem: a new solver is tested by
 * being there. Problems are random, tiny where exhaustive search is the judge. test_graph_solvers.c and the files of
 * single solvers hold what is true of those only.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/check.h"
#include "support/question.h"
#include "support/rounds.h"

/* ---- problems ---- */

static const char *brute_of(const cairn_problem *problem)
{
    return cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN ? "brute-chain" : "brute-graph";
}

/* ---- against exhaustive search ---- */

typedef struct judge {
    cairn_info best;       /* of brute force, at the question's budget */
    int64_t persistent_ns; /* of the first solver that says it is optimal among persistent schedules */
    bool same_class;       /* transfers aside, brute force searches what the others do */
} judge;

static void compare(const question *q, void *context)
{
    judge *j = context;
    reply r = ask(q);
    check_answer(q, &r);
    check(q, r.info.least_lower_bytes <= j->best.least_bytes);
    if (j->same_class) {
        check(q, r.info.makespan_ns < 0 || j->best.makespan_ns >= 0);
        check(q, r.info.makespan_ns < 0 || r.info.makespan_ns >= j->best.makespan_ns);
        check(q, r.info.least_bytes < 0 || r.info.least_bytes >= j->best.least_bytes);
        check(q, !r.info.least_is_exact || r.info.least_bytes == j->best.least_bytes);
    }
    check(q, j->best.makespan_ns < 0 || r.info.lower_bound_ns <= j->best.makespan_ns);
    if (strcmp(r.info.optimal_in, "persistent") == 0) {
        if (j->persistent_ns < 0)
            j->persistent_ns = r.info.makespan_ns;
        check(q, r.info.makespan_ns == j->persistent_ns);
    }
    done(&r);
}

static void compare_at(const cairn_problem *problem, uint64_t seed, int64_t budget)
{
    question q = {problem, brute_of(problem), seed, budget, 0, NULL};
    judge j = {.persistent_ns = -1, .same_class = !cairn_problem_info_of(problem)->machine};
    reply best = ask(&q);
    j.best = best.info;
    const cairn_chain *chain = cairn_problem_chain(problem);
    if (chain) /* now and then slots without rounding, so that the slotted programs claim to be optimal */
        q.slots = seed % 2 == 0 ? budget - cairn_problem_info_of(problem)->fixed_bytes - chain->input_bytes : 7;
    for_each_solver(q, compare, &j);
    done(&best);
}

static void nothing_beats_exhaustive_search(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(2400); seed++) {
        cairn_problem *problem = tiny_problem(seed);
        question q = {problem, brute_of(problem), seed, -1, 0, NULL};
        cairn_limits limits = limits_of(&q);
        int64_t span = limits.store_all_bytes - limits.least_bytes;
        for (int step = 0; step < 3; step++)
            compare_at(problem, seed, limits.least_bytes + span * ((int64_t)(seed % 3) + 3 * step) / 8);
        compare_at(problem, seed, limits.least_bytes > 0 ? limits.least_bytes - 1 : 0);
        cairn_problem_free(problem);
    }
}

/* ---- the least budget ---- */

static void solvers_succeed_from_their_least_budget_on(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1200); seed++) {
        cairn_problem *problem = tiny_problem(seed + 5000);
        question q = {problem, brute_of(problem), seed, -1, 9, NULL};
        cairn_limits best = limits_of(&q);
        for_each_solver(q, check_least, cairn_problem_info_of(problem)->machine ? NULL : &best);
        cairn_problem_free(problem);
    }
}

/* ---- more budget ---- */

static void check_monotonic(const question *given, void *context)
{
    const cairn_limits *limits = context;
    question q = *given;
    int64_t before = INT64_MAX;
    if (info_of(q.solver)->optimal_in[0] == '\0')
        return;
    for (int step = 0; step <= 8; step++) {
        q.budget = limits->least_bytes + (limits->store_all_bytes - limits->least_bytes) * step / 8;
        reply r = ask(&q);
        check(&q, before == INT64_MAX || (r.info.makespan_ns >= 0 && r.info.makespan_ns <= before));
        if (r.info.makespan_ns >= 0)
            before = r.info.makespan_ns;
        done(&r);
    }
}

static void more_budget_never_costs_time(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        cairn_problem *problem = tiny_problem(seed + 9000);
        question q = {problem, brute_of(problem), seed, -1, (int64_t)(seed % 40) + 1, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_monotonic, &limits);
        cairn_problem_free(problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_beats_exhaustive_search),
        cmocka_unit_test(solvers_succeed_from_their_least_budget_on),
        cmocka_unit_test(more_budget_never_costs_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
