/* Scaling sizes or times changes nothing else in an answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/check.h"
#include "support/question.h"
#include "support/random_problem.h"
#include "support/rounds.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scaling_sizes_or_times_changes_nothing_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
