/* Problems: what is refused and where, what views show, hashes, transfer times, running out of memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/failure.h"
#include "base/memory.h"
#include "problem/problem.h"

static const cairn_stage_option plain[] = {{"keep", 65536, 1000, 2000, 0, 0}};
static const cairn_stage_option two[] = {{"keep", 65536, 1000, 2000, 0, 0}, {"selective", 20480, 1000, 2600, 0, 45056}};
static const cairn_machine link12 = {1073741824, 12000000000, 12000000000, 10000, false};

/* The chain of docs/reference/formats/chain.md, as a description that a test may change. */
typedef struct sample {
    cairn_stage stages[2];
    cairn_stage_option options[2];
    cairn_chain chain;
    cairn_problem_info info;
} sample;

static void sample_init(sample *s)
{
    memcpy(s->options, two, sizeof(two));
    s->stages[0] = (cairn_stage){"h.0", 4096, 4096, 8192, 950, 32768, false, 1, plain};
    s->stages[1] = (cairn_stage){"h.1", 4096, 4096, 0, 1000, 0, false, 2, s->options};
    s->chain = (cairn_chain){4096, 4096, 2, s->stages};
    s->info = (cairn_problem_info){"gpt2 b4 s256", "{\"model\": \"gpt2\"}", 0, &link12};
}

static cairn_status make(const sample *s, cairn_problem **problem, cairn_error *error)
{
    return cairn_problem_new_chain(NULL, &s->chain, &s->info, problem, error);
}

static void expect_refusal(const sample *s, cairn_status status, const char *path, int64_t index)
{
    cairn_problem *problem = (cairn_problem *)s;
    cairn_error error;
    assert_int_equal(make(s, &problem, &error), status);
    assert_null(problem);
    assert_string_equal(error.path, path);
    assert_int_equal(error.index, index);
    assert_true(strlen(error.message) > 10);
}

static void a_chain_is_copied_and_shown(void **state)
{
    (void)state;
    sample s;
    cairn_problem *problem;
    sample_init(&s);
    assert_int_equal(make(&s, &problem, NULL), CAIRN_OK);
    memset(&s, 0xff, sizeof(s));
    const cairn_chain *chain = cairn_problem_chain(problem);
    assert_null(cairn_problem_graph(problem));
    assert_int_equal(cairn_problem_kind_of(problem), CAIRN_KIND_CHAIN);
    assert_int_equal(chain->stage_count, 2);
    assert_string_equal(chain->stages[1].name, "h.1");
    assert_string_equal(chain->stages[1].options[1].name, "selective");
    assert_int_equal(chain->stages[1].options[1].backward_workspace_bytes, 45056);
    assert_string_equal(cairn_problem_info_of(problem)->provenance, "{\"model\": \"gpt2\"}");
    assert_int_equal(cairn_problem_info_of(problem)->machine->latency_ns, 10000);
    cairn_problem_free(problem);
    cairn_problem_free(NULL);
}

static void hashes_are_those_of_the_format(void **state)
{
    (void)state;
    sample s;
    cairn_problem *problem;
    sample_init(&s);
    assert_int_equal(make(&s, &problem, NULL), CAIRN_OK);
    assert_string_equal(cairn_problem_hash(problem),
                        "sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2");
    cairn_problem_free(problem);

    int32_t zero = 0;
    cairn_node nodes[] = {{"conv1", 1000, 65536, 0, NULL, 0, -1, false, false},
                          {"relu1", 100, 65536, 0, &zero, 1, -1, false, false}};
    cairn_graph graph = {2, nodes, 1};
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    assert_string_equal(cairn_problem_hash(problem),
                        "sha256:173b6aa0575166c951a0ae7fee59ab5781050e7be4cb324f98c551c8e77194f2");
    cairn_problem_free(problem);
}

static void names_do_not_change_the_hash_and_numbers_do(void **state)
{
    (void)state;
    sample s;
    cairn_problem *first, *second;
    sample_init(&s);
    assert_int_equal(make(&s, &first, NULL), CAIRN_OK);
    s.stages[0].name = "other";
    s.info.name = NULL;
    s.info.provenance = NULL;
    assert_int_equal(make(&s, &second, NULL), CAIRN_OK);
    assert_string_equal(cairn_problem_hash(first), cairn_problem_hash(second));
    assert_string_equal(cairn_problem_info_of(second)->provenance, "{}");
    cairn_problem_free(second);
    s.options[1].backward_ns++;
    assert_int_equal(make(&s, &second, NULL), CAIRN_OK);
    assert_string_not_equal(cairn_problem_hash(first), cairn_problem_hash(second));
    cairn_problem_free(second);
    cairn_problem_free(first);
}

static void a_chain_that_is_not_valid_is_refused_where(void **state)
{
    (void)state;
    sample s;
#define REFUSED(change, status, path, index)     \
    do {                                         \
        sample_init(&s);                         \
        change;                                  \
        expect_refusal(&s, status, path, index); \
    } while (0)
    REFUSED(s.chain.stage_count = 0, CAIRN_BAD_INPUT, "stages", CAIRN_NONE);
    REFUSED(s.chain.stage_count = (1 << 24) + 1, CAIRN_TOO_LARGE, "stages", CAIRN_NONE);
    REFUSED(s.chain.input_bytes = -1, CAIRN_BAD_INPUT, "input_bytes", CAIRN_NONE);
    REFUSED(s.chain.input_grad_bytes = -1, CAIRN_BAD_INPUT, "input_grad_bytes", CAIRN_NONE);
    REFUSED(s.info.fixed_bytes = -1, CAIRN_BAD_INPUT, "fixed_bytes", CAIRN_NONE);
    REFUSED(s.stages[1].output_bytes = -1, CAIRN_BAD_INPUT, "stages[1].output_bytes", 2);
    REFUSED(s.stages[0].grad_bytes = -5, CAIRN_BAD_INPUT, "stages[0].grad_bytes", 1);
    REFUSED(s.stages[0].weight_grad_bytes = -5, CAIRN_BAD_INPUT, "stages[0].weight_grad_bytes", 1);
    REFUSED(s.stages[0].forward_only_ns = -5, CAIRN_BAD_INPUT, "stages[0].forward_only_ns", 1);
    REFUSED(s.stages[0].option_count = 0, CAIRN_BAD_INPUT, "stages[0].options", 1);
    REFUSED(s.stages[0].option_count = 65, CAIRN_TOO_LARGE, "stages[0].options", 1);
    REFUSED(s.options[1].saved_bytes = -1, CAIRN_BAD_INPUT, "stages[1].options[1].saved_bytes", 2);
    REFUSED(s.options[1].saved_bytes = 4095, CAIRN_BAD_INPUT, "stages[1].options[1].saved_bytes", 2);
    REFUSED(s.options[1].forward_ns = -1, CAIRN_BAD_INPUT, "stages[1].options[1].forward_ns", 2);
    REFUSED(s.options[1].backward_ns = -1, CAIRN_BAD_INPUT, "stages[1].options[1].backward_ns", 2);
    REFUSED(s.options[1].saved_bytes = INT64_MAX, CAIRN_OVERFLOW, "", 2);
    REFUSED(s.options[1].forward_ns = INT64_MAX, CAIRN_OVERFLOW, "", 2);
    REFUSED(s.options[1].forward_workspace_bytes = INT64_MIN, CAIRN_OVERFLOW, "", 2);
#undef REFUSED
}

static void negative_workspaces_are_fine(void **state)
{
    (void)state;
    sample s;
    cairn_problem *problem;
    sample_init(&s);
    s.options[1].backward_workspace_bytes = -20480;
    s.stages[0].forward_only_workspace_bytes = -1;
    assert_int_equal(make(&s, &problem, NULL), CAIRN_OK);
    cairn_problem_free(problem);
}

static void a_machine_that_is_not_valid_is_refused(void **state)
{
    (void)state;
    cairn_machine machine = link12;
    cairn_error error;
    assert_int_equal(cairn_machine_check(&machine, &error), CAIRN_OK);
    machine.to_device_bytes_per_s = 0;
    assert_int_equal(cairn_machine_check(&machine, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "machine.to_device_bytes_per_s");
    machine = link12;
    machine.host_bytes = -1;
    assert_int_equal(cairn_machine_check(&machine, &error), CAIRN_BAD_INPUT);
    machine = link12;
    machine.latency_ns = -1;
    assert_int_equal(cairn_machine_check(&machine, &error), CAIRN_BAD_INPUT);
    machine = link12;
    machine.to_host_bytes_per_s = -7;
    assert_int_equal(cairn_machine_check(&machine, &error), CAIRN_BAD_INPUT);
}

static cairn_status make_graph(cairn_node *nodes, int32_t count, cairn_problem **problem, cairn_error *error)
{
    cairn_graph graph = {count, nodes, -1};
    return cairn_problem_new_graph(NULL, &graph, NULL, problem, error);
}

static void a_graph_sorts_its_dependencies_and_finds_roots(void **state)
{
    (void)state;
    int32_t deps[] = {2, 0, 1};
    cairn_node nodes[] = {{"a", 1, 8, 0, NULL, 0, -1, false, false},
                          {"view", 1, 0, 0, NULL, 0, 0, false, false},
                          {"view of a view", 1, 0, 0, NULL, 0, 1, false, false},
                          {"sum", 1, 8, 0, deps, 3, -1, true, true}};
    cairn_problem *problem;
    assert_int_equal(make_graph(nodes, 4, &problem, NULL), CAIRN_OK);
    const cairn_graph *graph = cairn_problem_graph(problem);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(graph->nodes[3].deps[i], i);
    assert_int_equal(crn_graph_root(graph, 2), 0);
    assert_int_equal(crn_graph_root(graph, 3), 3);
    cairn_problem_free(problem);
}

static void a_graph_that_is_not_valid_is_refused_where(void **state)
{
    (void)state;
    cairn_problem *problem;
    cairn_error error;
    int32_t self = 1, twice[] = {0, 0}, negative = -1;
#define REFUSED(node, field)                                                       \
    do {                                                                           \
        cairn_node nodes[] = {{"a", 1, 8, 0, NULL, 0, -1, false, false}, node};    \
        assert_int_equal(make_graph(nodes, 2, &problem, &error), CAIRN_BAD_INPUT); \
        assert_null(problem);                                                      \
        assert_string_equal(error.path, "nodes[1]." field);                        \
        assert_int_equal(error.index, 1);                                          \
    } while (0)
#define NODE(...) ((cairn_node){"b", __VA_ARGS__})
    REFUSED(NODE(-1, 8, 0, NULL, 0, -1, false, false), "cost_ns");
    REFUSED(NODE(1, -8, 0, NULL, 0, -1, false, false), "bytes");
    REFUSED(NODE(1, 8, 0, NULL, 0, 0, false, false), "bytes");
    REFUSED(NODE(1, 0, 0, NULL, 0, 1, false, false), "alias_of");
    REFUSED(NODE(1, 0, 0, NULL, 0, -2, false, false), "alias_of");
    REFUSED(NODE(1, 8, 0, &self, 1, -1, false, false), "deps");
    REFUSED(NODE(1, 8, 0, &negative, 1, -1, false, false), "deps");
    REFUSED(NODE(1, 8, 0, twice, 2, -1, false, false), "deps");
    REFUSED(NODE(1, 8, 0, &self, -1, -1, false, false), "dep_count");
#undef NODE
#undef REFUSED
    cairn_node big[] = {{"a", 1, INT64_MAX, 0, NULL, 0, -1, false, false}, {"b", 1, 1, 0, NULL, 0, -1, false, false}};
    assert_int_equal(make_graph(big, 2, &problem, &error), CAIRN_OVERFLOW);
    assert_int_equal(error.index, 1);
    assert_int_equal(make_graph(big, 0, &problem, &error), CAIRN_BAD_INPUT);
    cairn_graph turn = {1, big, 2};
    assert_int_equal(cairn_problem_new_graph(NULL, &turn, NULL, &problem, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "backward_begins_at");
}

static void transfers_take_latency_and_rounded_up_time(void **state)
{
    (void)state;
    assert_int_equal(cairn_transfer_ns(0, 1, 10), 10);
    assert_int_equal(cairn_transfer_ns(1, 3, 0), 333333334);
    assert_int_equal(cairn_transfer_ns(12, 12000000000, 0), 1);
    assert_int_equal(cairn_transfer_ns(13, 12000000000, 5), 7);
    assert_int_equal(cairn_transfer_ns(INT64_MAX, INT64_MAX, 0), 1000000000);
    assert_int_equal(cairn_transfer_ns(1, 0, 0), CAIRN_NONE);
    assert_int_equal(cairn_transfer_ns(-1, 1, 0), CAIRN_NONE);
    assert_int_equal(cairn_transfer_ns(INT64_MAX, 1, 0), CAIRN_NONE);
    assert_int_equal(cairn_transfer_ns(1, 1000000000, INT64_MAX), CAIRN_NONE);
}

static void running_out_of_memory_leaves_nothing_behind(void **state)
{
    (void)state;
    sample s;
    sample_init(&s);
    for (int64_t limit = 0;; limit += 512) {
        crn_meter meter;
        cairn_problem *problem;
        cairn_error error;
        crn_meter_init(&meter, crn_allocator(NULL), limit);
        cairn_env env = {.allocator = crn_meter_allocator(&meter)};
        cairn_status status = cairn_problem_new_chain(&env, &s.chain, &s.info, &problem, &error);
        if (status == CAIRN_OK) {
            cairn_problem_free(problem);
            assert_int_equal(atomic_load(&meter.used_bytes), 0);
            assert_true(limit > 0);
            return;
        }
        assert_int_equal(status, CAIRN_NO_MEMORY);
        assert_null(problem);
        assert_int_equal(atomic_load(&meter.used_bytes), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_is_copied_and_shown),
        cmocka_unit_test(hashes_are_those_of_the_format),
        cmocka_unit_test(names_do_not_change_the_hash_and_numbers_do),
        cmocka_unit_test(a_chain_that_is_not_valid_is_refused_where),
        cmocka_unit_test(negative_workspaces_are_fine),
        cmocka_unit_test(a_machine_that_is_not_valid_is_refused),
        cmocka_unit_test(a_graph_sorts_its_dependencies_and_finds_roots),
        cmocka_unit_test(a_graph_that_is_not_valid_is_refused_where),
        cmocka_unit_test(transfers_take_latency_and_rounded_up_time),
        cmocka_unit_test(running_out_of_memory_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
