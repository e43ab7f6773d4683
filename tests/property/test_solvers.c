/*
 * What every solver must satisfy, for every solver of the registry that takes the problem: a new solver is tested by
 * being there. Problems are random, tiny where exhaustive search is the judge. test_graph_solvers.c and the files of
 * single solvers hold what is true of those only.
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
#include "support/check.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"
#include "support/slow_replay.h"

/* ---- asking ---- */

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

static cairn_options *options_for(const question *q)
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

static reply ask(const question *q)
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

static void done(reply *r)
{
    cairn_schedule_free(r->schedule);
    cairn_info_clear(&r->info);
}

static cairn_limits limits_of(const question *q)
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
static void for_each_solver(question q, void (*body)(const question *q, void *context), void *context)
{
    for (int i = 0; cairn_solver_at(i); i++) {
        q.solver = cairn_solver_at(i)->name;
        if (cairn_solver_accepts(q.solver, q.problem, NULL, NULL) == CAIRN_OK)
            body(&q, context);
    }
}

/* The same for a chain or a graph of these shapes, halfway between the memory that any schedule takes and store-all's. */
static void for_each_solver_halfway(question q, const test_chain_shape *chain, const test_graph_shape *graph,
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

static const cairn_solver_info *info_of(const char *solver)
{
    for (int i = 0; cairn_solver_at(i); i++)
        if (strcmp(cairn_solver_at(i)->name, solver) == 0)
            return cairn_solver_at(i);
    return NULL;
}

/* Whether a solver claims to be the best in a class that has storing everything in it: it never recomputes without need. */
static bool aims_high(const char *solver)
{
    const char *class = info_of(solver)->optimal_in;
    return (class[0] != '\0' && strcmp(class, "persistent-outputs") != 0) || strcmp(solver, "auto") == 0 ||
           strcmp(solver, "store-all") == 0;
}

/* ---- problems ---- */

static cairn_problem *tiny_chain(uint64_t seed)
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

static cairn_problem *tiny_graph(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = test_graph_of_everything(6);
    shape.training = seed % 2 == 0;
    return test_random_graph(&random, &shape);
}

static cairn_problem *tiny_problem(uint64_t seed)
{
    return seed % 4 == 3 ? tiny_graph(seed) : tiny_chain(seed);
}

static const char *brute_of(const cairn_problem *problem)
{
    return cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN ? "brute-chain" : "brute-graph";
}

static bool has_options(const cairn_problem *problem)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    for (int32_t i = 0; chain && i < chain->stage_count; i++)
        if (chain->stages[i].option_count > 1)
            return true;
    return false;
}

/* ---- an answer by itself ---- */

static void check_replay(const question *q, const reply *r)
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
static bool may_be_unknown(const question *q, const cairn_info *info)
{
    bool takes_too_long = info->store_all_ns > INT64_MAX / 64 && info->budget_bytes >= info->least_bytes;
    return takes_too_long || cairn_solver_has_option(q->solver, "iterations");
}

static void check_answer(const question *q, const reply *r)
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

/* Just below the least, and here and there down to what is proved. */
static void check_below(question q, const cairn_limits *limits)
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

static void check_least(const question *given, void *context)
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

/* ---- scaling ---- */

static void *must_allocate(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    assert_non_null(memory);
    return memory;
}

static cairn_problem *scaled_chain(const cairn_problem *problem, int64_t bytes, int64_t ns)
{
    cairn_chain chain = *cairn_problem_chain(problem);
    cairn_problem_info info = *cairn_problem_info_of(problem);
    cairn_stage *stages = must_allocate((size_t)chain.stage_count, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)chain.stage_count * CAIRN_STAGE_OPTIONS_MAX, sizeof(*options));
    cairn_problem *made;
    for (int32_t i = 0; i < chain.stage_count; i++) {
        cairn_stage *stage = &stages[i];
        cairn_stage_option *own = options + (ptrdiff_t)i * CAIRN_STAGE_OPTIONS_MAX;
        *stage = chain.stages[i];
        stage->output_bytes *= bytes;
        stage->grad_bytes *= bytes;
        stage->weight_grad_bytes *= bytes;
        stage->forward_only_ns *= ns;
        stage->forward_only_workspace_bytes *= bytes;
        for (int32_t k = 0; k < stage->option_count; k++) {
            own[k] = stage->options[k];
            own[k].saved_bytes *= bytes;
            own[k].forward_ns *= ns;
            own[k].backward_ns *= ns;
            own[k].forward_workspace_bytes *= bytes;
            own[k].backward_workspace_bytes *= bytes;
        }
        stage->options = own;
    }
    chain.input_bytes *= bytes;
    chain.input_grad_bytes *= bytes;
    info.fixed_bytes *= bytes;
    chain.stages = stages;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &made, NULL), CAIRN_OK);
    free(options);
    free(stages);
    return made;
}

static cairn_problem *scaled_graph(const cairn_problem *problem, int64_t bytes, int64_t ns)
{
    cairn_graph graph = *cairn_problem_graph(problem);
    cairn_problem_info info = *cairn_problem_info_of(problem);
    cairn_node *nodes = must_allocate((size_t)graph.node_count, sizeof(*nodes));
    cairn_problem *made;
    for (int32_t v = 0; v < graph.node_count; v++) {
        nodes[v] = graph.nodes[v];
        nodes[v].bytes *= bytes;
        nodes[v].workspace_bytes *= bytes;
        nodes[v].cost_ns *= ns;
    }
    info.fixed_bytes *= bytes;
    graph.nodes = nodes;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, &info, &made, NULL), CAIRN_OK);
    free(nodes);
    return made;
}

static cairn_problem *scaled(const cairn_problem *problem, int64_t bytes, int64_t ns)
{
    bool is_chain = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN;
    return is_chain ? scaled_chain(problem, bytes, ns) : scaled_graph(problem, bytes, ns);
}

static bool same_ops(const cairn_schedule *a, const cairn_schedule *b)
{
    if (!a || !b)
        return a == b;
    int64_t count = cairn_schedule_count(a);
    return count == cairn_schedule_count(b) &&
           memcmp(cairn_schedule_ops(a), cairn_schedule_ops(b), (size_t)count * sizeof(cairn_op)) == 0;
}

/* The scaled problem, and by what. */
typedef struct scaling {
    const cairn_problem *problem;
    int64_t bytes, ns;
} scaling;

static void check_scaling(const question *q, void *context)
{
    const scaling *s = context;
    question larger = *q;
    larger.problem = s->problem;
    larger.budget = q->budget * s->bytes;
    reply r = ask(q), scaled_reply = ask(&larger);
    check(q, same_ops(r.schedule, scaled_reply.schedule));
    check(q, r.info.outcome == scaled_reply.info.outcome);
    check(q, r.info.makespan_ns < 0 || r.info.makespan_ns * s->ns == scaled_reply.info.makespan_ns);
    check(q, r.info.least_bytes < 0 || r.info.least_bytes * s->bytes == scaled_reply.info.least_bytes);
    done(&r);
    done(&scaled_reply);
}

/* Asks one solver, or all (NULL), about a problem and about what is so many times as large. */
static void check_scaled(const cairn_problem *problem, const char *solver, uint64_t seed)
{
    static const int64_t factors[][2] = {{3, 1}, {1, 7}, {1, 40000003}, {1000003, 1}, {1, 999999937}, {4096, 60}};
    const int64_t *factor = factors[seed % 6];
    cairn_problem *larger = scaled(problem, factor[0], factor[1]);
    scaling s = {larger, factor[0], factor[1]};
    question q = {problem, "store-all", seed, -1, 13, NULL};
    cairn_limits limits = limits_of(&q);
    q.budget = limits.least_lower_bytes + (limits.store_all_bytes - limits.least_lower_bytes) * (int64_t)(seed % 7) / 7;
    q.solver = solver;
    if (solver)
        check_scaling(&q, &s);
    else
        for_each_solver(q, check_scaling, &s);
    cairn_problem_free(larger);
}

static void scaling_sizes_or_times_changes_nothing_else(void **state)
{
    static const test_chain_shape long_chain = {.stages_min = 24, .stages_max = 48, .weight_grads = true};
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(300); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = tiny_problem(seed + 20000), *chain = test_random_chain(&random, &long_chain);
        if (!cairn_problem_info_of(problem)->machine)
            check_scaled(problem, NULL, seed);
        check_scaled(chain, "keep-greedy", seed); /* which on tiny chains has nothing to put in order */
        cairn_problem_free(chain);
        cairn_problem_free(problem);
    }
}

/* ---- larger problems: no oracle, all else ---- */

enum { STRIDE = TEST_ROUNDS(4) == 4 ? 1 : 2 };

static void check_larger(const question *given, void *context)
{
    question q = *given;
    const cairn_limits *limits = context;
    for (int step = 0; step <= 4; step += STRIDE) {
        q.budget = limits->least_lower_bytes + (limits->store_all_bytes - limits->least_lower_bytes) * step / 4;
        q.threads = "1";
        reply alone = ask(&q);
        check_answer(&q, &alone);
        q.threads = "3";
        reply together = ask(&q);
        check(&q, same_ops(alone.schedule, together.schedule));
        check(&q, alone.info.lower_bound_ns == together.info.lower_bound_ns);
        check(&q, alone.info.least_bytes == together.info.least_bytes);
        done(&alone);
        done(&together);
    }
}

static void threads_change_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed += STRIDE) { /* every third one is a graph */
        test_random random = test_random_seeded(seed);
        test_chain_shape shape = test_chain_of_everything(80);
        shape.stages_min = 66; /* enough for threads to be used */
        shape.no_recompute = seed % 2 == 0;
        test_graph_shape graph_shape = test_graph_of_everything(80);
        graph_shape.nodes_min = 66;
        cairn_problem *problem =
            seed % 3 == 2 ? test_random_graph(&random, &graph_shape) : test_random_chain(&random, &shape);
        question q = {problem, "store-all", seed, -1, 40, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_larger, &limits);
        cairn_problem_free(problem);
    }
}

/* ---- the ends of the range ---- */

static void check_answers_at_extremes(const question *given, void *context)
{
    question q = *given;
    const cairn_limits *limits = context;
    const int64_t budgets[] = {-1, 0, 1, limits->least_lower_bytes, limits->store_all_bytes, INT64_MAX};
    for (size_t i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        q.budget = budgets[i];
        reply r = ask(&q);
        check_answer(&q, &r);
        done(&r);
    }
}

static void check_extremes(const question *q, void *context)
{
    check_answers_at_extremes(q, context);
    check_least(q, NULL);
}

static void check_all_extremes(const cairn_problem *problem, uint64_t seed)
{
    question q = {problem, "store-all", seed, -1, 500, NULL};
    cairn_limits limits = limits_of(&q);
    for_each_solver(q, check_extremes, &limits);
}

static void sizes_near_the_end_of_the_range(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        test_random random = test_random_seeded(seed);
        int64_t n = 1 + (int64_t)(seed % 4);
        test_chain_shape shape = {.stages_min = (int32_t)n,
                                  .stages_max = (int32_t)n,
                                  .bytes_max = ((int64_t)1 << 62) / (4 * n),
                                  .ns_max = seed % 2 == 0 ? ((int64_t)1 << 62) / (3 * n) : 10,
                                  .workspaces = seed % 3 == 0,
                                  .positive = true};
        cairn_problem *problem = test_random_chain(&random, &shape);
        check_all_extremes(problem, seed);
        cairn_problem_free(problem);
    }
}

/* The same problem with sizes and times about as large as the sum of all sizes, or of all times, allows. */
static cairn_problem *grown_to_the_end(cairn_problem *problem)
{
    cairn_problem *grown;
    int64_t factor = INT64_MAX;
    while (cairn_problem_scale(NULL, problem, factor, 1, &grown, NULL) == CAIRN_OVERFLOW)
        factor -= factor / 64;
    assert_non_null(grown);
    cairn_problem_free(problem);
    return grown;
}

/* What is computed twice, or travels, may take more than 2^63 - 1 ns: then it is no answer, and others are. */
static void sums_near_the_end_of_the_range(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(120); seed++) {
        test_random random = test_random_seeded(seed + 70000);
        test_chain_shape chain = test_chain_of_everything(5);
        test_graph_shape graph = test_graph_of_everything(seed % 5 == 4 ? 14 : 7);
        chain.machine = graph.machine = seed % 3 == 0;
        chain.bytes_max = graph.bytes_max = seed % 4 < 2 ? 3 : 12;
        chain.ns_max = graph.ns_max = seed % 4 < 2 ? 12 : 3;
        graph.training = seed % 7 > 2;
        cairn_problem *problem =
            grown_to_the_end(seed % 2 == 0 ? test_random_graph(&random, &graph) : test_random_chain(&random, &chain));
        question q = {problem, "store-all", seed, -1, 500, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_answers_at_extremes, &limits);
        cairn_problem_free(problem);
    }
}

static void sizes_and_times_of_zero(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 5; n++) {
        cairn_stage_option option = {"keep", 0, 0, 0, 0, 0};
        cairn_stage stages[5];
        cairn_node nodes[5];
        cairn_chain chain = {0, 0, n, stages};
        cairn_graph graph = {n, nodes, -1};
        cairn_problem *problem;
        for (int32_t i = 0; i < n; i++) {
            stages[i] = (cairn_stage){.option_count = 1, .options = &option};
            nodes[i] = (cairn_node){.alias_of = -1};
        }
        assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
        check_all_extremes(problem, (uint64_t)n);
        cairn_problem_free(problem);
        assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
        check_all_extremes(problem, (uint64_t)n);
        cairn_problem_free(problem);
    }
}

/* ---- stopping, memory ---- */

typedef struct patience {
    int polls, most;
} patience;

static int lose_patience(void *context, const cairn_progress *progress)
{
    patience *p = context;
    assert_non_null(progress);
    return p->polls++ >= p->most;
}

/* An answer that is not said to be stopped early is the one that the solver gives when it is let go on. */
static void check_stopping(const question *q, void *context)
{
    (void)context;
    reply whole = ask(q);
    for (int most = 0; most < 60; most = 2 * most + 1) {
        patience p = {0, most};
        cairn_env env = {.poll = lose_patience, .poll_context = &p};
        cairn_options *options = options_for(q);
        reply r;
        cairn_status status = cairn_solve(&env, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || status == CAIRN_CANCELLED);
        check(q, status == CAIRN_OK || (!r.schedule && r.info.makespan_ns == CAIRN_NONE));
        check(q, status == CAIRN_OK || p.polls > most);
        check(q, p.polls <= most + 1); /* asked no more once it has said stop */
        if (status == CAIRN_OK && r.schedule)
            check_replay(q, &r);
        if (status == CAIRN_OK && !r.info.stopped_early) {
            check(q, r.info.outcome == whole.info.outcome);
            check(q, r.info.makespan_ns == whole.info.makespan_ns);
        }
        done(&r);
        cairn_options_free(options);
    }
    done(&whole);
}

static void stopping_leaves_an_answer_or_nothing(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 24, .stages_max = 24, .options_max = 2};
    const test_graph_shape graph = {.nodes_min = 24, .nodes_max = 24, .training = true};
    for (uint64_t seed = 0; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 50}, &chain, &graph, check_stopping);
}

/* What a limit ended: nothing is called infeasible that the same solver finds when it is let go on. */
typedef struct end_of_work {
    const char *option;
    int64_t value;
} end_of_work;

static void check_limited(const question *q, const end_of_work *end, const reply *whole)
{
    cairn_options *options = options_for(q);
    reply r;
    assert_int_equal(cairn_options_set_int(options, end->option, end->value, NULL), CAIRN_OK);
    cairn_status status = cairn_solve(NULL, q->problem, options, &r.schedule, &r.info, NULL);
    check(q, status == CAIRN_OK || status == CAIRN_MEMORY_LIMIT);
    bool infeasible = status == CAIRN_OK && r.info.outcome == CAIRN_OUTCOME_INFEASIBLE;
    if (infeasible && whole->schedule)
        fail_msg("%s, seed %llu, budget %lld: infeasible with %s %lld", q->solver, (unsigned long long)q->seed,
                 (long long)q->budget, end->option, (long long)end->value);
    check(q, status != CAIRN_OK || r.schedule || r.info.reason[0] != '\0');
    done(&r);
    cairn_options_free(options);
}

static void check_limits(const question *given, void *context)
{
    static const end_of_work limits[] = {
        {"iterations", 0},        {"iterations", 1},         {"time-limit", 0},         {"time-limit", 20000},
        {"time-limit", 1000000},  {"time-limit", 5000000},   {"memory-limit", 20000},   {"memory-limit", 100000},
        {"memory-limit", 300000}, {"memory-limit", 1000000}, {"memory-limit", 3000000}, {"memory-limit", 10000000},
    };
    question q = *given;
    const cairn_limits *all = context;
    for (int step = 0; step < 4; step++) {
        q.budget = all->least_lower_bytes + (all->store_all_bytes - all->least_lower_bytes) * step * step / 12;
        reply whole = ask(&q);
        for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++)
            check_limited(&q, &limits[i], &whole);
        done(&whole);
    }
}

static void what_a_limit_ends_is_not_infeasible(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(40); seed++) {
        test_random random = test_random_seeded(seed + 80000);
        test_chain_shape chain = test_chain_of_everything(9);
        test_graph_shape graph = test_graph_of_everything(16);
        chain.machine = graph.machine = seed % 4 == 0;
        graph.nodes_min = 12; /* more than exhaustive search takes */
        graph.training = seed % 3 > 0;
        cairn_problem *problem =
            seed % 8 == 4 ? test_random_chain(&random, &chain) : test_random_graph(&random, &graph);
        question q = {problem, "auto", seed, -1, 50, NULL};
        cairn_limits limits = limits_of(&q);
        for_each_solver(q, check_limits, &limits);
        cairn_problem_free(problem);
    }
}

/* As many iterations as can be asked for, which the clock or the caller ends. */
static void check_without_end(const question *q, void *context)
{
    (void)context;
    for (int by_clock = 0; by_clock < 2; by_clock++) {
        patience p = {0, 30};
        cairn_env env = {.poll = by_clock ? NULL : lose_patience, .poll_context = &p};
        cairn_options *options = options_for(q);
        reply r;
        assert_int_equal(cairn_options_set_int(options, "iterations", INT64_MAX, NULL), CAIRN_OK);
        if (by_clock)
            assert_int_equal(cairn_options_set_int(options, "time-limit", 3000000, NULL), CAIRN_OK);
        cairn_status status = cairn_solve(&env, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || (status == CAIRN_CANCELLED && !by_clock));
        if (status == CAIRN_OK && r.schedule)
            check_replay(q, &r);
        done(&r);
        cairn_options_free(options);
    }
}

static void iterations_without_end_are_ended(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 12, .stages_max = 12, .options_max = 2, .machine = true};
    const test_graph_shape graph = {.nodes_min = 16, .nodes_max = 16, .training = true};
    const test_graph_shape linked = {.nodes_min = 16, .nodes_max = 16, .training = true, .machine = true};
    for (uint64_t seed = 0; seed < 8; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 50}, &chain, seed % 4 == 1 ? &graph : &linked,
                                check_without_end);
}

static void check_memory_limit(const question *q, void *context)
{
    (void)context;
    for (int64_t limit = 0; limit < 4000000; limit = 3 * limit + 100) {
        cairn_options *options = options_for(q);
        reply r;
        assert_int_equal(cairn_options_set_int(options, "memory-limit", limit, NULL), CAIRN_OK);
        cairn_status status = cairn_solve(NULL, q->problem, options, &r.schedule, &r.info, NULL);
        check(q, status == CAIRN_OK || status == CAIRN_MEMORY_LIMIT);
        check(q, status != CAIRN_OK || r.info.solver_peak_bytes <= limit);
        done(&r);
        cairn_options_free(options);
    }
}

static void memory_limits_hold(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 70, .stages_max = 70};
    const test_graph_shape graph = {.nodes_min = 70, .nodes_max = 70, .training = true};
    for (uint64_t seed = 0; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 100, .threads = "2"}, &chain, &graph,
                                check_memory_limit);
}

static cairn_status solve_once(const cairn_env *env, void *context)
{
    const question *q = context;
    return test_solve_status(env, q->problem, options_for(q));
}

static void check_allocations(const question *q, void *context)
{
    question copy = *q;
    (void)context;
    assert_true(test_every_allocation_fails(solve_once, &copy) > 3);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    const test_chain_shape chain = {.stages_min = 4, .stages_max = 4, .options_max = 2};
    const test_graph_shape graph = {.nodes_min = 6, .nodes_max = 6, .training = true};
    for (uint64_t seed = 2; seed < 4; seed++)
        for_each_solver_halfway((question){.seed = seed, .slots = 20}, &chain, &graph, check_allocations);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_beats_exhaustive_search),
        cmocka_unit_test(solvers_succeed_from_their_least_budget_on),
        cmocka_unit_test(more_budget_never_costs_time),
        cmocka_unit_test(scaling_sizes_or_times_changes_nothing_else),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(sizes_near_the_end_of_the_range),
        cmocka_unit_test(sums_near_the_end_of_the_range),
        cmocka_unit_test(sizes_and_times_of_zero),
        cmocka_unit_test(stopping_leaves_an_answer_or_nothing),
        cmocka_unit_test(what_a_limit_ends_is_not_infeasible),
        cmocka_unit_test(iterations_without_end_are_ended),
        cmocka_unit_test(memory_limits_hold),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
