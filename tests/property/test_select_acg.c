/*
 * Checkpoint selection on graphs: the reported objective is that of the reported set, by definition; no set is better
 * than the best of all, which it is on chains and nearly always on small graphs; on a chain the answer is select-cubic's;
 * the schedule's peak is the least budget.
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

#include "solve/session.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"

enum { FORWARD_MAX = 200, DEPS_MAX = 3 };

/* A forward of count nodes, each with up to DEPS_MAX inputs among those before it. */
typedef struct network {
    int32_t count;
    int64_t bytes[FORWARD_MAX];
    int32_t deps[FORWARD_MAX][DEPS_MAX];
    int32_t dep_count[FORWARD_MAX];
} network;

/* With a backward node for each forward one, in reverse order, which reads what the forward node reads and itself. */
static cairn_problem *training_graph(const network *net)
{
    static cairn_node nodes[2 * FORWARD_MAX];
    static int32_t deps[FORWARD_MAX][DEPS_MAX + 2];
    memset(nodes, 0, sizeof(nodes));
    for (int32_t v = 0; v < net->count; v++)
        nodes[v] = (cairn_node){.name = "",
                                .cost_ns = 1,
                                .bytes = net->bytes[v],
                                .deps = net->deps[v],
                                .alias_of = -1,
                                .dep_count = net->dep_count[v]};
    for (int32_t i = 0; i < net->count; i++) {
        int32_t v = net->count - 1 - i, count = net->dep_count[v];
        memcpy(deps[i], net->deps[v], sizeof(net->deps[v]));
        deps[i][count++] = v;
        if (i > 0)
            deps[i][count++] = net->count + i - 1;
        nodes[net->count + i] = (cairn_node){
            .name = "", .cost_ns = 2, .bytes = net->bytes[v], .deps = deps[i], .alias_of = -1, .dep_count = count};
    }
    const cairn_graph graph = {2 * net->count, nodes, net->count};
    cairn_problem *problem;
    cairn_error error;
    if (cairn_problem_new_graph(NULL, &graph, NULL, &problem, &error) != CAIRN_OK)
        fail_msg("%s", error.message);
    return problem;
}

static void add_dep(network *net, int32_t v, int32_t dep)
{
    for (int32_t i = 0; i < net->dep_count[v]; i++)
        if (net->deps[v][i] == dep)
            return;
    net->deps[v][net->dep_count[v]++] = dep;
}

static network random_network(test_random *random, int32_t count, bool is_chain)
{
    static const int64_t scales[] = {1, 5, 100, 1000003};
    int64_t scale = scales[test_random_between(random, 0, 3)];
    int32_t back = (int32_t)test_random_between(random, 1, 4);
    network net = {.count = count};
    for (int32_t v = 0; v < count; v++) {
        net.bytes[v] = test_random_between(random, 0, scale);
        if (v > 0 && (is_chain || test_random_chance(random, 70)))
            add_dep(&net, v, v - 1);
        int32_t more = v > 0 && !is_chain ? (int32_t)test_random_between(random, 0, 2) : 0;
        for (int32_t i = 0; i < more; i++)
            add_dep(&net, v, v - 1 - (int32_t)test_random_between(random, 0, back < v ? back - 1 : v - 1));
    }
    return net;
}

/* ---- the objective by definition ---- */

static int64_t flood(const network *net, const bool *kept, bool *seen, int32_t v)
{
    int64_t bytes = net->bytes[v];
    seen[v] = true;
    for (int32_t u = 0; u < net->count; u++)
        for (int32_t i = 0; i < DEPS_MAX; i++) {
            bool beside =
                (i < net->dep_count[u] && net->deps[u][i] == v) || (i < net->dep_count[v] && net->deps[v][i] == u);
            if (beside && !kept[u] && !seen[u])
                bytes += flood(net, kept, seen, u);
        }
    return bytes;
}

static int64_t objective_of(const network *net, const bool *kept)
{
    bool seen[FORWARD_MAX] = {false};
    int64_t sum = 0, largest = 0;
    for (int32_t v = 0; v < net->count; v++) {
        if (kept[v]) {
            sum += net->bytes[v];
        } else if (!seen[v]) {
            int64_t bytes = flood(net, kept, seen, v);
            largest = bytes > largest ? bytes : largest;
        }
    }
    return sum + largest;
}

static int64_t best_of_all(const network *net)
{
    int64_t best = INT64_MAX;
    for (uint32_t set = 0; set < (uint32_t)1 << (net->count - 1); set++) {
        bool kept[FORWARD_MAX] = {false};
        for (int32_t v = 0; v < net->count; v++)
            kept[v] = v == net->count - 1 || (set >> v & 1) != 0;
        int64_t bytes = objective_of(net, kept);
        best = bytes < best ? bytes : best;
    }
    return best;
}

/* ---- solving ---- */

static cairn_options *options_for(const char *solver)
{
    return test_options(solver, -1, "minimize=memory");
}

static cairn_info solve(const cairn_problem *problem, const char *solver)
{
    return test_solve(problem, options_for(solver), NULL);
}

/* The objective, after the set was checked. */
static int64_t checked_objective(const network *net)
{
    bool kept[FORWARD_MAX] = {false};
    cairn_problem *problem = training_graph(net);
    cairn_info info = solve(problem, "select-acg");
    for (int32_t c = 0; c < info.checkpoint_count; c++) {
        assert_true(info.checkpoints[c] > (c > 0 ? info.checkpoints[c - 1] : -1));
        kept[info.checkpoints[c]] = true;
    }
    assert_true(kept[net->count - 1]);
    int64_t objective = info.objective_bytes;
    assert_int_equal(objective, objective_of(net, kept));
    assert_int_equal(info.least_bytes, info.peak_bytes);
    cairn_info_clear(&info);
    cairn_problem_free(problem);
    return objective;
}

static void no_set_is_better_than_the_best(void **state)
{
    (void)state;
    int best = 0, total = 2000;
    double excess = 0;
    for (int seed = 0; seed < total; seed++) {
        test_random random = test_random_seeded((uint64_t)seed);
        network net = random_network(&random, (int32_t)test_random_between(&random, 1, 9), false);
        int64_t objective = checked_objective(&net), least = best_of_all(&net);
        assert_true(objective >= least);
        best += objective == least;
        if (objective > least)
            excess = (double)objective / (double)least - 1 > excess ? (double)objective / (double)least - 1 : excess;
    }
    print_message("the best of all sets in %d of %d, at worst %.0f %% above it\n", best, total, 100 * excess);
    assert_true(best > total * 9 / 10);
}

static cairn_problem *chain_of(const network *net)
{
    static cairn_stage stages[FORWARD_MAX];
    static cairn_stage_option options[FORWARD_MAX];
    for (int32_t l = 0; l < net->count; l++) {
        options[l] = (cairn_stage_option){"keep", net->bytes[l], 1, 2, 0, 0};
        stages[l] = (cairn_stage){"", net->bytes[l], net->bytes[l], 0, 1, 0, false, 1, &options[l]};
    }
    const cairn_chain chain = {0, 0, net->count, stages};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

static void a_chain_is_a_chain(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 1000; seed++) {
        test_random random = test_random_seeded(seed);
        network net = random_network(&random, (int32_t)test_random_between(&random, 1, seed % 50 ? 30 : 200), true);
        cairn_problem *chain = chain_of(&net);
        cairn_info cubic = solve(chain, "select-cubic");
        assert_int_equal(checked_objective(&net), cubic.objective_bytes);
        cairn_info_clear(&cubic);
        cairn_problem_free(chain);
    }
}

/* Two branches between 0 and 9, each of four heavy values: the light one in the middle of each is the place to cut. */
static void branches_are_cut_each_by_itself(void **state)
{
    (void)state;
    network net = {.count = 11, .bytes = {1, 50, 50, 2, 50, 50, 3, 50, 50, 1, 1}};
    for (int32_t v = 1; v < 11; v++)
        add_dep(&net, v, v == 5 ? 0 : v - 1);
    add_dep(&net, 9, 4);
    net.bytes[4] = 50;
    net.bytes[3] = 2;
    assert_int_equal(checked_objective(&net), best_of_all(&net));
}

static void real_graphs_have_answers(void **state)
{
    (void)state;
    test_graph_shape shape = test_graph_of_everything(60);
    for (uint64_t seed = 0; seed < 400; seed++) {
        test_random random = test_random_seeded(seed);
        shape.training = seed % 3 != 0;
        cairn_problem *problem = test_random_graph(&random, &shape);
        cairn_info info = solve(problem, "select-acg"), other = solve(problem, "auto");
        assert_int_equal(info.outcome, CAIRN_OUTCOME_FEASIBLE);
        assert_int_equal(info.least_bytes, info.peak_bytes);
        assert_true(info.least_lower_bytes <= info.peak_bytes);
        assert_true(other.peak_bytes <= info.peak_bytes);
        cairn_info_clear(&info);
        cairn_info_clear(&other);
        cairn_problem_free(problem);
    }
}

/* Stopped while the graph is divided, everything is a checkpoint; stopped after that, the best set so far counts. */
static void a_stopped_division_has_an_answer(void **state)
{
    (void)state;
    test_random random = test_random_seeded(1);
    test_graph_shape shape = {.nodes_min = 1600, .nodes_max = 1600, .training = true};
    cairn_problem *problem = test_random_graph(&random, &shape);
    bool is_divided = false;
    int undivided = 0;
    for (int polls = 0; !is_divided; polls = 3 * polls / 2 + 1) {
        int left = polls;
        const cairn_env env = {.poll = test_stop_after, .poll_context = &left};
        cairn_options *options = options_for("select-acg");
        cairn_info info;
        assert_int_equal(cairn_solve(&env, problem, options, NULL, &info, NULL), CAIRN_OK);
        assert_true(info.stopped_early && info.peak_bytes <= info.store_all_bytes);
        is_divided = info.peak_bytes < info.store_all_bytes;
        undivided += !is_divided;
        cairn_info_clear(&info);
        cairn_options_free(options);
    }
    assert_true(undivided > 1);
    cairn_problem_free(problem);
}

static cairn_status solve_and_free(const cairn_env *env, void *context)
{
    return test_solve_status(env, context, options_for("select-acg"));
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    test_random random = test_random_seeded(7);
    network net = random_network(&random, 9, false);
    cairn_problem *problem = training_graph(&net);
    assert_true(test_every_allocation_fails(solve_and_free, problem) > 0);
    cairn_problem_free(problem);
}

static int count_polls(void *polls, const cairn_progress *progress)
{
    (void)progress;
    ++*(int *)polls;
    return 0;
}

/* One poll for each bound on the segments that is tried: of hundreds of sizes, few are near the best. */
static void few_bounds_are_tried(void **state)
{
    (void)state;
    static network net;
    test_random random = test_random_seeded(5);
    int polls = 0;
    const cairn_env env = {.poll = count_polls, .poll_context = &polls};
    crn_session session;
    net.count = FORWARD_MAX;
    for (int32_t v = 0; v < FORWARD_MAX; v++) {
        net.bytes[v] = test_random_between(&random, 1000000, 2000000);
        net.dep_count[v] = v > 0;
        net.deps[v][0] = v - 1;
        if (v % 5 == 4)
            net.deps[v][net.dep_count[v]++] = (int32_t)test_random_between(&random, 0, v - 2);
    }
    cairn_problem *problem = training_graph(&net);
    cairn_options *options = test_options("select-acg", -1, "minimize=memory threads=1");
    assert_int_equal(crn_session_begin(&session, &env, problem, options, CAIRN_NONE, NULL), CAIRN_OK);
    polls = 0;
    assert_int_equal(crn_session_open(&session, &session.task, NULL), CAIRN_OK);
    assert_in_range(polls, 1, 100);
    crn_session_end(&session);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_set_is_better_than_the_best),
        cmocka_unit_test(a_chain_is_a_chain),
        cmocka_unit_test(branches_are_cut_each_by_itself),
        cmocka_unit_test(real_graphs_have_answers),
        cmocka_unit_test(a_stopped_division_has_an_answer),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(few_bounds_are_tried),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
