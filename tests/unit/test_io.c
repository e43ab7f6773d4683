/* Files: what is read, what is written, what is refused and where, running out of memory. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/io.h>

#include "base/memory.h"
#include "base/textbuf.h"
#include "support/op_text.h"
#include "support/random_problem.h"
#include "support/io_texts.h"

static char *write_problem(const cairn_problem *problem, size_t *length)
{
    char *text;
    assert_int_equal(cairn_problem_write(NULL, problem, &text, length, NULL), CAIRN_OK);
    assert_int_equal(strlen(text), *length);
    assert_int_equal(text[*length - 1], '\n');
    return text;
}

static void the_examples_hash_as_the_format_says(void **state)
{
    (void)state;
    cairn_problem *chain = read_problem(chain_text), *graph = read_problem(graph_text);
    assert_string_equal(cairn_problem_hash(chain), chain_hash);
    assert_string_equal(cairn_problem_hash(graph), graph_hash);
    assert_string_equal(cairn_problem_info_of(chain)->provenance,
                        "{\"model\": \"gpt2\", \"device\": \"cpu\", \"torch\": \"2.13.0\"}");
    assert_int_equal(cairn_problem_graph(graph)->backward_begins_at, 1);
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

static void absent_fields_have_defaults(void **state)
{
    (void)state;
    cairn_problem *problem =
        read_problem("{\"stages\":[{\"output_bytes\":3,\"saved_bytes\":5,\"forward_ns\":7,\"backward_ns\":9,"
                     "\"forward_workspace_bytes\":-2}],\"input_bytes\":4,\"machine\":null,\"version\":1,\"format\":"
                     "\"cairn-chain\"}");
    const cairn_chain *chain = cairn_problem_chain(problem);
    const cairn_stage *stage = &chain->stages[0];
    assert_int_equal(chain->input_grad_bytes, 4);
    assert_int_equal(stage->grad_bytes, 3);
    assert_int_equal(stage->weight_grad_bytes, 0);
    assert_int_equal(stage->forward_only_ns, 7);
    assert_int_equal(stage->forward_only_workspace_bytes, -2);
    assert_int_equal(stage->option_count, 1);
    assert_string_equal(stage->options[0].name, "keep");
    assert_string_equal(stage->name, "");
    assert_null(cairn_problem_info_of(problem)->machine);
    assert_string_equal(cairn_problem_info_of(problem)->provenance, "{}");
    cairn_problem_free(problem);

    problem =
        read_problem("{\"format\":\"cairn-graph\",\"version\":1,\"nodes\":[{\"cost_ns\":1,\"bytes\":2,\"deps\":[]}]}");
    const cairn_node *node = &cairn_problem_graph(problem)->nodes[0];
    assert_int_equal(node->alias_of, -1);
    assert_false(node->keep || node->no_recompute);
    assert_int_equal(cairn_problem_graph(problem)->backward_begins_at, -1);
    cairn_problem_free(problem);
}

/* Provenance is anything: fractions, numbers of any length, duplicates, NUL, nesting. It is kept byte for byte. */
static void provenance_is_kept_as_it_is(void **state)
{
    (void)state;
    static const char provenance[] =
        "{\"a\": 1.50e3,\n  \"a\": [123456789012345678901234567890, \"\\u0000 \xc3\xa9\"], \"b\": {\"b\": null},"
        " \"\\u0000\": [1e400, -0.0E-999, 1e+7, [], {}], \"\\ud800\\n\\/\" :[true , false,\"\\\"\"] }";
    char text[512];
    snprintf(text, sizeof(text),
             "{\"format\":\"cairn-graph\",\"provenance\" : %s "
             ",\"version\":1,\"nodes\":[{\"cost_ns\":1,\"bytes\":2,\"deps\":[]}]}",
             provenance);
    cairn_problem *problem = read_problem(text);
    assert_string_equal(cairn_problem_info_of(problem)->provenance, provenance);
    size_t length;
    char *written = write_problem(problem, &length);
    cairn_problem *again = read_problem(written);
    assert_string_equal(cairn_problem_info_of(again)->provenance, provenance);
    cairn_text_free(NULL, written, length);
    cairn_problem_free(problem);
    cairn_problem_free(again);
}

/* Writing and reading again gives the same hash, the same names and the same text. */
static void check_round_trip(const cairn_problem *problem)
{
    size_t length, again_length;
    char *text = write_problem(problem, &length);
    cairn_problem *again = read_problem(text);
    char *again_text = write_problem(again, &again_length);
    assert_string_equal(cairn_problem_hash(again), cairn_problem_hash(problem));
    assert_string_equal(again_text, text);
    cairn_text_free(NULL, text, length);
    cairn_text_free(NULL, again_text, again_length);
    cairn_problem_free(again);
}

static void problems_survive_writing_and_reading(void **state)
{
    (void)state;
    test_random random = test_random_seeded(1);
    test_chain_shape chain_shape = test_chain_of_everything(8);
    test_graph_shape graph_shape = test_graph_of_everything(12);
    for (int round = 0; round < 300; round++) {
        cairn_problem *problem =
            round % 2 ? test_random_chain(&random, &chain_shape) : test_random_graph(&random, &graph_shape);
        check_round_trip(problem);
        cairn_problem_free(problem);
    }
}

static void measured_problems_are_read(void **state)
{
    (void)state;
    static const char *const paths[] = {"chains/gpt2.json",     "chains/mlp.json",   "chains/resnet50.json",
                                        "chains/vgg.json",      "graphs/gpt_4.json", "graphs/resnet_8.json",
                                        "graphs/skips_49.json", "graphs/unet_4.json"};
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        char path[512], *text;
        size_t length;
        snprintf(path, sizeof(path), CAIRN_TEST_DATA "/%s", paths[i]);
        assert_int_equal(cairn_file_read(NULL, path, &text, &length, NULL), CAIRN_OK);
        cairn_problem *problem = read_problem(text);
        check_round_trip(problem);
        cairn_problem_free(problem);
        cairn_text_free(NULL, text, length);
    }
}

/* Names of constructors are not looked at until they are written. */
static void what_would_not_be_json_is_not_written(void **state)
{
    (void)state;
    const cairn_stage_option option = {"keep", 1, 1, 1, 0, 0};
    const cairn_stage stage = {"caf\xe9", 1, 1, 0, 1, 0, false, 1, &option};
    const cairn_chain chain = {1, 1, 1, &stage};
    const cairn_node node = {"quote \" back \\ bell \a", 1, 1, 0, NULL, 0, -1, false, false};
    const cairn_graph graph = {1, &node, -1};
    const cairn_problem_info info = {"name", "[1]", 0, NULL};
    cairn_problem *problem;
    cairn_error error;
    char *text;
    size_t length;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    assert_int_equal(cairn_problem_write(NULL, problem, &text, &length, &error), CAIRN_BAD_INPUT);
    assert_null(text);
    assert_int_equal(error.index, 1);
    cairn_problem_free(problem);
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, &info, &problem, NULL), CAIRN_OK);
    assert_int_equal(cairn_problem_write(NULL, problem, &text, &length, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "provenance");
    cairn_problem_free(problem);
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    check_round_trip(problem);
    cairn_problem_free(problem);
}

/* Reading takes it once beside the text, and so does the problem; writing takes half of the text more while it grows. */
static void provenance_is_held_once(void **state)
{
    (void)state;
    enum { MEMBERS = 100000 };
    crn_meter meter;
    crn_meter_init(&meter, crn_allocator(NULL), CAIRN_NONE);
    const cairn_env env = {.allocator = crn_meter_allocator(&meter)};
    crn_textbuf provenance;
    crn_textbuf_init(&provenance, crn_allocator(NULL));
    for (int i = 0; i < MEMBERS; i++)
        crn_textbuf_print(&provenance, "%s\"key %d\": \"value\"", i > 0 ? ", " : "{", i);
    crn_textbuf_add(&provenance, "}", 1);
    const cairn_node node = {.name = "node", .cost_ns = 1, .alias_of = -1};
    const cairn_graph graph = {1, &node, -1};
    const cairn_problem_info info = {.provenance = provenance.text};
    cairn_problem *problem, *again;
    char *text;
    size_t length;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, &info, &problem, NULL), CAIRN_OK);
    assert_int_equal(cairn_problem_write(&env, problem, &text, &length, NULL), CAIRN_OK);
    assert_in_range(atomic_load(&meter.peak_bytes), length, length + length / 2 + length / 16);
    cairn_text_free(&env, text, length);
    assert_int_equal(cairn_problem_write(NULL, problem, &text, &length, NULL), CAIRN_OK);
    crn_meter_init(&meter, crn_allocator(NULL), CAIRN_NONE);
    assert_int_equal(cairn_problem_read(&env, text, length, &again, NULL), CAIRN_OK);
    assert_in_range(atomic_load(&meter.peak_bytes), provenance.length, provenance.length + provenance.length / 16);
    assert_string_equal(cairn_problem_info_of(again)->provenance, provenance.text);
    cairn_problem_free(again);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
    cairn_text_free(NULL, text, length);
    cairn_problem_free(problem);
    crn_textbuf_free(&provenance);
}

/* ---- schedules ---- */

static cairn_problem *problem_with_ops(const char **ops)
{
    *ops = "S1 K2 S2:1 >A1 -a2 B2";
    return read_problem(chain_text);
}

static void schedules_survive_writing_and_reading(void **state)
{
    (void)state;
    const char *ops;
    cairn_problem *problem = problem_with_ops(&ops);
    const cairn_machine machine = {7, 8, 9, 10, true};
    const cairn_schedule_info info = {"a \"solver\"", 1, 2, 0, CAIRN_NONE, &machine};
    cairn_schedule *schedule = test_schedule_with(problem, ops, &info), *again;
    char *text;
    size_t length;
    assert_int_equal(cairn_schedule_write(NULL, schedule, &text, &length, NULL), CAIRN_OK);
    assert_int_equal(cairn_schedule_read(NULL, problem, text, length, &again, NULL), CAIRN_OK);
    assert_string_equal(cairn_schedule_hash(again), cairn_schedule_hash(schedule));
    const cairn_schedule_info *kept = cairn_schedule_info_of(again);
    assert_string_equal(kept->solver, info.solver);
    assert_int_equal(kept->budget_bytes, 1);
    assert_int_equal(kept->makespan_ns, 2);
    assert_int_equal(kept->peak_bytes, 0);
    assert_int_equal(kept->lower_bound_ns, CAIRN_NONE);
    assert_int_equal(kept->machine->host_bytes, 7);
    assert_true(kept->machine->shared_link);
    cairn_text_free(NULL, text, length);
    cairn_schedule_free(again);
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_examples_hash_as_the_format_says),
        cmocka_unit_test(absent_fields_have_defaults),
        cmocka_unit_test(provenance_is_kept_as_it_is),
        cmocka_unit_test(provenance_is_held_once),
        cmocka_unit_test(problems_survive_writing_and_reading),
        cmocka_unit_test(measured_problems_are_read),
        cmocka_unit_test(what_would_not_be_json_is_not_written),
        cmocka_unit_test(schedules_survive_writing_and_reading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
