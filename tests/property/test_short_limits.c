/*
 * Short time limits on long problems: whoever is cut off has a schedule all the same, no worse than the quickest baseline's,
 * and auto's is no worse either.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

#include "support/ask.h"
#include "support/random_source.h"
#include "support/rounds.h"

/* Under sanitizers a limit is over sooner. */
enum { STAGES = 600, SOME_STAGES = 300, NODES = TEST_ROUNDS(16000) };

static cairn_problem *chain_of_different_stages(int32_t count)
{
    test_random random = test_random_seeded(3);
    cairn_stage_option options[STAGES];
    cairn_stage stages[STAGES];
    cairn_problem *problem;
    for (int32_t l = 0; l < count; l++) {
        int64_t bytes = test_random_between(&random, 1000, 100000), ns = test_random_between(&random, 1000, 20000);
        options[l] = (cairn_stage_option){
            .saved_bytes = bytes + test_random_between(&random, 0, 100000), .forward_ns = ns, .backward_ns = 2 * ns};
        stages[l] = (cairn_stage){.output_bytes = bytes,
                                  .grad_bytes = bytes,
                                  .forward_only_ns = ns,
                                  .options = &options[l],
                                  .option_count = 1};
    }
    const cairn_chain chain = {.stage_count = count, .stages = stages, .input_bytes = 1000, .input_grad_bytes = 1000};
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    return problem;
}

/* Forward and backward, each backward node reads the gradient and the value below its own. */
static cairn_problem *long_graph(void)
{
    test_random random = test_random_seeded(4);
    int32_t *deps = malloc(2 * (size_t)NODES * sizeof(*deps));
    cairn_node *nodes = calloc(NODES, sizeof(*nodes));
    cairn_problem *problem;
    assert_true(deps && nodes);
    for (int32_t v = 0; v < NODES; v++) {
        int32_t mirror = NODES - 1 - v, *own = deps + 2 * (ptrdiff_t)v, n = 0;
        if (v > 0)
            own[n++] = v - 1;
        if (v > NODES / 2 && mirror > 0)
            own[n++] = mirror - 1;
        nodes[v] = (cairn_node){.cost_ns = test_random_between(&random, 1000, 100000),
                                .bytes = test_random_between(&random, 10000, 1000000),
                                .deps = own,
                                .dep_count = n,
                                .alias_of = -1};
    }
    const cairn_graph graph = {.node_count = NODES, .nodes = nodes, .backward_begins_at = NODES / 2};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    free(nodes);
    free(deps);
    return problem;
}

/* A quarter of the way from what all need to what storing everything takes. */
static int64_t quarter_of_the_way(const cairn_problem *problem)
{
    cairn_limits limits = test_limits(problem, test_options("store-all", -1, ""));
    return limits.least_lower_bytes + (limits.store_all_bytes - limits.least_lower_bytes) / 4;
}

/* Each of the solvers, after a time in which most cannot be done, against the one named first without a limit. */
static void check(cairn_problem *problem, const char *const *solvers, const char *limit)
{
    int64_t budget_bytes = quarter_of_the_way(problem);
    cairn_info quick = test_solve(problem, test_options(solvers[0], budget_bytes, ""), NULL);
    for (int i = 1; solvers[i]; i++) {
        cairn_info info = test_solve(problem, test_options(solvers[i], budget_bytes, limit), NULL);
        bool is_cut_off =
            info.stopped_early || strcmp(solvers[i], "auto") == 0; /* on a fast machine some end in time */
        if (info.makespan_ns == CAIRN_NONE || (is_cut_off && info.makespan_ns > quick.makespan_ns))
            fail_msg("%s has %lld ns, %s %lld ns", solvers[i], (long long)info.makespan_ns, solvers[0],
                     (long long)quick.makespan_ns);
        assert_true(info.peak_bytes <= budget_bytes && info.makespan_ns >= info.lower_bound_ns);
        cairn_info_clear(&info);
    }
    cairn_info_clear(&quick);
    cairn_problem_free(problem);
}

static void who_is_cut_off_has_a_baselines_schedule(void **state)
{
    static const char *const of_chains[] = {"chen-sqrt",        "chain-dp", "revolve-hetero",
                                            "chain-lagrangian", "auto",     NULL};
    static const char *const of_graphs[] = {"linear-sqrt", "graph-search", "griewank-log", "auto", NULL};
    (void)state;
    check(chain_of_different_stages(STAGES), of_chains, "time-limit=150ms threads=1");
    check(long_graph(), of_graphs, "time-limit=100ms threads=1");
}

/* The schedule of another is not passed off as one's own. */
static void the_reason_names_the_baseline(void **state)
{
    cairn_problem *problem = chain_of_different_stages(STAGES);
    (void)state;
    cairn_options *options = test_options("chain-dp", quarter_of_the_way(problem), "time-limit=100ms threads=1");
    cairn_info info = test_solve(problem, options, NULL);
    assert_true(info.stopped_early);
    assert_string_equal(info.solver, "chain-dp");
    assert_non_null(strstr(info.reason, "whose schedule this is"));
    cairn_info_clear(&info);
    cairn_problem_free(problem);
}

/* Nor are tables that take longer than the limit made again for the least, which needs none. */
static void the_least_needs_no_tables(void **state)
{
    cairn_problem *problem = chain_of_different_stages(SOME_STAGES);
    (void)state;
    int64_t budget_bytes = quarter_of_the_way(problem);
    cairn_limits limits = test_limits(problem, test_options("chain-exact", -1, ""));
    cairn_info info =
        test_solve(problem, test_options("chain-exact", budget_bytes, "time-limit=200ms threads=1"), NULL);
    assert_true(info.stopped_early);
    assert_int_equal(info.least_bytes, limits.least_bytes);
    cairn_info_clear(&info);
    cairn_problem_free(problem);
}

static int count_and_go_on(void *context, const cairn_progress *progress)
{
    (void)progress;
    ++*(int *)context;
    return 0;
}

/* Those who know the least of all are asked first: no baseline goes through its schedules, and polls at each. */
static void the_least_of_a_long_chain_takes_no_schedules(void **state)
{
    int polls = 0;
    const cairn_env env = {.poll = count_and_go_on, .poll_context = &polls};
    cairn_problem *problem = chain_of_different_stages(STAGES);
    cairn_options *options = test_options("auto", -1, "");
    cairn_limits limits;
    (void)state;
    assert_int_equal(cairn_limits_of(&env, problem, options, &limits, NULL), CAIRN_OK);
    assert_true(limits.least_is_exact);
    assert_true(polls < 100);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_is_cut_off_has_a_baselines_schedule),
        cmocka_unit_test(the_reason_names_the_baseline),
        cmocka_unit_test(the_least_needs_no_tables),
        cmocka_unit_test(the_least_of_a_long_chain_takes_no_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
