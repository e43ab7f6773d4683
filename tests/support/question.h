/*
 * Questions to solvers, their answers, and what holds of every answer.
 */
#ifndef TEST_QUESTION_H
#define TEST_QUESTION_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/check.h"
#include "support/random_problem.h"
#include "support/slow_replay.h"

/* A question, and where it was asked: what a failure names. */
typedef struct question {
    const cairn_problem *problem;
    const char *solver;
    uint64_t seed;
    int64_t budget;
    int64_t slots;
    const char *threads;
} question;

typedef struct reply {
    cairn_info info;
    cairn_schedule *schedule;
} reply;

static inline cairn_options *options_for(const question *q)
{
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "solver", q->solver, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "iterations", "20", NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "threads", q->threads ? q->threads : "1", NULL), CAIRN_OK);
    if (q->slots > 0 && cairn_problem_chain(q->problem) && cairn_solver_has_option(q->solver, "slots"))
        assert_int_equal(cairn_options_set_int(options, "slots", q->slots, NULL), CAIRN_OK);
    if (q->budget >= 0)
        assert_int_equal(cairn_options_set_int(options, "budget", q->budget, NULL), CAIRN_OK);
    else
        assert_int_equal(cairn_options_set(options, "budget", "none", NULL), CAIRN_OK);
    return options;
}

static inline reply ask(const question *q)
{
    reply r;
    cairn_error error;
    cairn_options *options = options_for(q);
    cairn_status status = cairn_solve(NULL, q->problem, options, &r.schedule, &r.info, &error);
    if (status != CAIRN_OK)
        fail_msg("%s, seed %llu, budget %lld: %s", q->solver, (unsigned long long)q->seed, (long long)q->budget,
                 error.message);
    cairn_options_free(options);
    return r;
}

static inline void done(reply *r)
{
    cairn_schedule_free(r->schedule);
    cairn_info_clear(&r->info);
}

static inline cairn_limits limits_of(const question *q)
{
    cairn_limits limits;
    cairn_error error;
    cairn_options *options = options_for(q);
    if (cairn_limits_of(NULL, q->problem, options, &limits, &error) != CAIRN_OK)
        fail_msg("%s, seed %llu: %s", q->solver, (unsigned long long)q->seed, error.message);
    cairn_options_free(options);
    return limits;
}

/* Runs body for every solver that takes the problem. */
static inline void for_each_solver(question q, void (*body)(const question *q, void *context), void *context)
{
    for (int i = 0; cairn_solver_at(i); i++) {
        q.solver = cairn_solver_at(i)->name;
        if (cairn_solver_accepts(q.solver, q.problem, NULL, NULL) == CAIRN_OK)
            body(&q, context);
    }
}

/* The same for a chain or, where the seed is odd, a graph, halfway from what any schedule takes to what store-all does. */
static inline void for_each_solver_halfway(question q, const test_chain_shape *chain, const test_graph_shape *graph,
                                           void (*body)(const question *q, void *context))
{
    test_random random = test_random_seeded(q.seed);
    cairn_problem *problem = q.seed % 2 ? test_random_graph(&random, graph) : test_random_chain(&random, chain);
    q.problem = problem;
    q.solver = "store-all";
    q.budget = -1;
    cairn_limits limits = limits_of(&q);
    q.budget = (limits.least_lower_bytes + limits.store_all_bytes) / 2;
    for_each_solver(q, body, NULL);
    cairn_problem_free(problem);
}

static inline bool same_ops(const cairn_schedule *a, const cairn_schedule *b)
{
    if (!a || !b)
        return a == b;
    int64_t count = cairn_schedule_count(a);
    return count == cairn_schedule_count(b) &&
           memcmp(cairn_schedule_ops(a), cairn_schedule_ops(b), (size_t)count * sizeof(cairn_op)) == 0;
}

static inline const cairn_solver_info *info_of(const char *solver)
{
    for (int i = 0; cairn_solver_at(i); i++)
        if (strcmp(cairn_solver_at(i)->name, solver) == 0)
            return cairn_solver_at(i);
    return NULL;
}

/* Whether a solver claims to be the best in a class that has storing everything in it: it never recomputes without need. */
static inline bool aims_high(const char *solver)
{
    const char *class = info_of(solver)->optimal_in;
    return (class[0] != '\0' && strcmp(class, "persistent-outputs") != 0) || strcmp(solver, "auto") == 0 ||
           strcmp(solver, "store-all") == 0;
}

static inline cairn_problem *tiny_chain(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    test_chain_shape shapes[] = {
        {.stages_max = 5},
        {.stages_max = 5, .equal_forwards = true, .plain_grads = true},
        {.stages_max = 4, .options_max = 3, .plain_grads = true},
        {.stages_max = 5, .signed_workspaces = true, .weight_grads = true, .fixed = true},
        test_chain_of_everything(4),
        {.stages_max = 5, .homogeneous = true, .positive = true},
        {.stages_max = 4, .machine = true},
    };
    return test_random_chain(&random, &shapes[seed % (sizeof(shapes) / sizeof(shapes[0]))]);
}

static inline cairn_problem *tiny_graph(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = test_graph_of_everything(6);
    shape.training = seed % 2 == 0;
    return test_random_graph(&random, &shape);
}

static inline cairn_problem *tiny_problem(uint64_t seed)
{
    return seed % 4 == 3 ? tiny_graph(seed) : tiny_chain(seed);
}

static inline bool has_options(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    for (int32_t i = 0; chain && i < chain->stage_count; i++)
        if (chain->stages[i].option_count > 1)
            return true;
    return false;
}

static inline void check_replay(const question *q, const reply *r)
{
    const cairn_problem_info *info = cairn_problem_info_of(q->problem);
    int64_t count = cairn_schedule_count(r->schedule);
    cairn_replay replay;
    check(q, cairn_verify(NULL, q->problem, r->schedule, CAIRN_RECORDED, NULL, &replay, NULL) == CAIRN_OK);
    check(q, replay.valid);
    if (count <= TEST_SLOW_OPS_MAX)
        replay = test_slow_replay(q->problem, info->machine, cairn_schedule_ops(r->schedule), count, q->budget);
    check(q, replay.valid);
    check(q, replay.makespan_ns == r->info.makespan_ns && replay.peak_bytes == r->info.peak_bytes);
    check(q, replay.recompute_ns == r->info.recompute_ns && replay.stall_ns == r->info.stall_ns);
    check(q, q->budget < 0 || (replay.peak_bytes <= q->budget && r->info.least_bytes <= q->budget));
}

/* Searches were given 20 iterations; and what takes more than 2^61 ns is not always looked for. */
static inline bool may_be_unknown(const question *q, const cairn_info *info)
{
    bool takes_too_long = info->store_all_ns > INT64_MAX / 64 && info->budget_bytes >= info->least_bytes;
    return takes_too_long || cairn_solver_has_option(q->solver, "iterations");
}

static inline void check_answer(const question *q, const reply *r)
{
    const cairn_info *info = &r->info;
    bool found = info->outcome == CAIRN_OUTCOME_OPTIMAL || info->outcome == CAIRN_OUTCOME_FEASIBLE;
    check(q, found == (r->schedule != NULL));
    check(q, found == (info->makespan_ns >= 0));
    check(q, info->outcome != CAIRN_OUTCOME_UNKNOWN || may_be_unknown(q, info));
    check(q, info->outcome != CAIRN_OUTCOME_INFEASIBLE || info->least_bytes == CAIRN_NONE ||
                 info->budget_bytes < info->least_bytes);
    check(q, info->lower_bound_ns >= 0 && info->least_lower_bytes >= 0);
    check(q, info->least_bytes == CAIRN_NONE || info->least_bytes >= info->least_lower_bytes);
    check(q, !info->least_is_exact || info->least_bytes == info->least_lower_bytes);
    if (!found) {
        check(q, info->reason[0] != '\0');
        return;
    }
    check_replay(q, r);
    check(q, info->lower_bound_ns <= info->makespan_ns);
    check(q, (info->outcome == CAIRN_OUTCOME_OPTIMAL) == (info->lower_bound_ns == info->makespan_ns));
    check(q, info->gap >= 0 && info->gap <= 1);
    if (strcmp(q->solver, "store-all") == 0)
        check(q, info->peak_bytes == info->store_all_bytes && info->makespan_ns == info->store_all_ns);
    if (q->budget >= info->store_all_bytes && !has_options(q->problem) && aims_high(q->solver))
        check(q, info->recompute_ns == 0);
}

/* Just below the least, and here and there down to what is proved. */
static inline void check_below(question q, const cairn_limits *limits)
{
    int64_t stride = (limits->least_bytes - limits->least_lower_bytes) / 8 + 1;
    for (q.budget = limits->least_bytes - 1; q.budget >= 0; q.budget -= stride) {
        reply r = ask(&q);
        check(&q, r.info.outcome == CAIRN_OUTCOME_INFEASIBLE && r.info.makespan_ns < 0);
        done(&r);
        if (q.budget < limits->least_lower_bytes)
            return;
    }
}

static inline void check_least(const question *given, void *context)
{
    question q = *given;
    cairn_limits limits = limits_of(&q), *best = context;
    if (limits.least_bytes == CAIRN_NONE)
        return;
    q.budget = limits.least_bytes;
    reply r = ask(&q);
    check_answer(&q, &r);
    check(&q, r.info.makespan_ns >= 0);
    check(&q, r.info.least_bytes == limits.least_bytes && r.info.least_is_exact == limits.least_is_exact);
    done(&r);
    check(&q, !best || !limits.least_is_exact || q.budget <= best->least_bytes);
    check_below(q, &limits);
}

#endif
