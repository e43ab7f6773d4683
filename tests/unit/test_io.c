/* Files: what is read, what is written, what is refused and where, running out of memory. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <cairn/io.h>

#include "support/faulty_allocator.h"
#include "support/op_text.h"
#include "support/random_problem.h"

/* The examples of docs/reference/formats/chain.md and graph.md; their hashes are part of the format. */
static const char chain_text[] =
    "{\"format\": \"cairn-chain\", \"version\": 1, \"name\": \"gpt2 b4 s256\",\n"
    " \"provenance\": {\"model\": \"gpt2\", \"device\": \"cpu\", \"torch\": \"2.13.0\"},\n"
    " \"fixed_bytes\": 0,\n"
    " \"input_bytes\": 4096, \"input_grad_bytes\": 4096,\n"
    " \"stages\": [\n"
    "   {\"name\": \"h.0\", \"output_bytes\": 4096, \"grad_bytes\": 4096, \"weight_grad_bytes\": 8192, "
    "\"no_recompute\": false,\n"
    "    \"forward_only_ns\": 950, \"forward_only_workspace_bytes\": 32768,\n"
    "    \"saved_bytes\": 65536, \"forward_ns\": 1000, \"backward_ns\": 2000,\n"
    "    \"forward_workspace_bytes\": 0, \"backward_workspace_bytes\": 0},\n"
    "   {\"name\": \"h.1\", \"output_bytes\": 4096,\n"
    "    \"options\": [\n"
    "      {\"name\": \"keep\",      \"saved_bytes\": 65536, \"forward_ns\": 1000, \"backward_ns\": 2000},\n"
    "      {\"name\": \"selective\", \"saved_bytes\": 20480, \"forward_ns\": 1000, \"backward_ns\": 2600, "
    "\"backward_workspace_bytes\": 45056}]}],\n"
    " \"machine\": {\"host_bytes\": 1073741824, \"to_host_bytes_per_s\": 12000000000, \"to_device_bytes_per_s\": "
    "12000000000,\n"
    "             \"shared_link\": false, \"latency_ns\": 10000}}\n";
static const char chain_hash[] = "sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2";

static const char graph_text[] =
    "{\"format\": \"cairn-graph\", \"version\": 1, \"name\": \"resnet50 b184\", \"provenance\": {}, \"fixed_bytes\": "
    "0,\n"
    " \"nodes\": [\n"
    "   {\"name\": \"conv1\", \"cost_ns\": 1000, \"bytes\": 65536, \"workspace_bytes\": 0, \"deps\": [],\n"
    "    \"alias_of\": null, \"keep\": false, \"no_recompute\": false},\n"
    "   {\"name\": \"relu1\", \"cost_ns\": 100, \"bytes\": 65536, \"deps\": [0]}],\n"
    " \"backward_begins_at\": 1}\n";
static const char graph_hash[] = "sha256:173b6aa0575166c951a0ae7fee59ab5781050e7be4cb324f98c551c8e77194f2";

static cairn_problem *read_problem(const char *text)
{
    cairn_problem *problem;
    cairn_error error;
    if (cairn_problem_read(NULL, text, strlen(text), &problem, &error) != CAIRN_OK)
        fail_msg("%lld:%lld: %s: %s", (long long)error.line, (long long)error.column, error.path, error.message);
    return problem;
}

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

/* ---- refusals ---- */

typedef struct refusal {
    const char *text;
    cairn_status status;
    int64_t line, column;
    const char *path;
} refusal;

#define STAGE "{\"output_bytes\":1,\"saved_bytes\":1,\"forward_ns\":1,\"backward_ns\":1}"
#define CHAIN(more) "{\"format\":\"cairn-chain\",\"version\":1,\"input_bytes\":1,\n" more "}"
#define STAGES(stages) CHAIN("\"stages\":[" stages "]")
#define GRAPH(more) "{\"format\":\"cairn-graph\",\"version\":1,\n" more "}"
#define NODES(nodes) GRAPH("\"nodes\":[" nodes "]")
#define NODE "{\"cost_ns\":1,\"bytes\":1,\"deps\":[]}"

static const refusal refusals[] = {
    /* text that is not JSON */
    {"", CAIRN_PARSE, 1, 1, ""},
    {" \n ", CAIRN_PARSE, 2, 2, ""},
    {"nonsense", CAIRN_PARSE, 1, 1, ""},
    {"[]", CAIRN_PARSE, 1, 1, ""},
    {"\xef\xbb\xbf{}", CAIRN_PARSE, 1, 1, ""},
    {"{\"format\":\"cairn-chain\",\n  \"version\" 1}", CAIRN_PARSE, 2, 13, ""},
    {"{\"format\":\"cairn-chain\"\n  \"version\": 1}", CAIRN_PARSE, 2, 3, ""},
    {"{\"format\":\"cairn-chain\",}", CAIRN_PARSE, 1, 25, ""},
    {"{,\"format\":\"cairn-chain\"}", CAIRN_PARSE, 1, 2, ""},
    {"{\"format\":\"cairn-chain", CAIRN_PARSE, 1, 23, ""},
    {"{\"format\":\"cairn-chain\"", CAIRN_PARSE, 1, 24, ""},
    {"{\"format\":", CAIRN_PARSE, 1, 11, ""},
    {"{\"format\":'cairn-chain'}", CAIRN_PARSE, 1, 11, ""},
    {"{format:1}", CAIRN_PARSE, 1, 2, ""},
    {"{\"name\":\"\\u0000\"}", CAIRN_PARSE, 1, 16, ""},
    {"{\"name\":\"\\ud800\"}", CAIRN_PARSE, 1, 16, ""},
    {"{\"name\":\"\xff\"}", CAIRN_PARSE, 1, 10, ""},
    {"{\"name\":\"a\nb\"}", CAIRN_PARSE, 1, 10, ""},
    {"{\"version\":01}", CAIRN_PARSE, 1, 12, ""},
    {"{\"version\":+1}", CAIRN_PARSE, 1, 12, ""},
    {"{\"fixed_bytes\":9223372036854775808}", CAIRN_OVERFLOW, 1, 16, ""},
    {"{\"fixed_bytes\":-9223372036854775809}", CAIRN_OVERFLOW, 1, 16, ""},
    {"{\"fixed_bytes\":NaN}", CAIRN_PARSE, 1, 18, ""},
    {STAGES(STAGE) " x", CAIRN_PARSE, 2, 79, ""},
    {STAGES(STAGE) "{}", CAIRN_PARSE, 2, 78, ""},
    {STAGES(STAGE ","), CAIRN_PARSE, 2, 77, ""},
    {STAGES(STAGE " " STAGE), CAIRN_PARSE, 2, 77, ""},
    {STAGES("{\"output_bytes\":1,\n\"output_bytes\":1}"), CAIRN_PARSE, 3, 14, ""},
    {STAGES("{\"output_bytes\":1"), CAIRN_PARSE, 2, 28, ""},
    /* JSON that is no problem */
    {"{}", CAIRN_BAD_INPUT, 1, 1, ""},
    {"{\"format\":\"cairn-chain\"}", CAIRN_BAD_INPUT, 1, 1, ""},
    {"{\"format\":1}", CAIRN_BAD_INPUT, 1, 11, "format"},
    {"{\"format\":\"cairn-tree\"}", CAIRN_BAD_INPUT, 1, 11, "format"},
    {"{\"format\":\"cairn-schedule\"}", CAIRN_BAD_INPUT, 1, 11, "format"},
    {"{\"version\":2}", CAIRN_BAD_INPUT, 1, 12, "version"},
    {"{\"version\":1.0}", CAIRN_BAD_INPUT, 1, 12, "version"},
    {"{\"version\":true}", CAIRN_BAD_INPUT, 1, 12, "version"},
    {"{\"version\":1,\"version\":1}", CAIRN_BAD_INPUT, 1, 24, "version"},
    {"{\"name\":null}", CAIRN_BAD_INPUT, 1, 9, "name"},
    {"{\"fixed_bytes\":1e3}", CAIRN_BAD_INPUT, 1, 16, "fixed_bytes"},
    {"{\"fixed_bytes\":-1}", CAIRN_BAD_INPUT, 1, 16, "fixed_bytes"},
    {"{\"fixed_bytes\":\"1\"}", CAIRN_BAD_INPUT, 1, 16, "fixed_bytes"},
    {"{\"fixed_bytes\":null}", CAIRN_BAD_INPUT, 1, 16, "fixed_bytes"},
    {"{\"provenance\":[]}", CAIRN_BAD_INPUT, 1, 15, "provenance"},
    /* provenance that is no JSON */
    {"{\"provenance\":{\"a\":01}}", CAIRN_PARSE, 1, 21, ""},
    {"{\"provenance\":{\"a\":1.}}", CAIRN_PARSE, 1, 22, ""},
    {"{\"provenance\":{\"a\":1e}}", CAIRN_PARSE, 1, 22, ""},
    {"{\"provenance\":{\"a\":-}}", CAIRN_PARSE, 1, 21, ""},
    {"{\"provenance\":{\"a\":nul}}", CAIRN_PARSE, 1, 23, ""},
    {"{\"provenance\":{\"a\":NaN}}", CAIRN_PARSE, 1, 20, ""},
    {"{\"provenance\":{\"a\":[1,]}}", CAIRN_PARSE, 1, 23, ""},
    {"{\"provenance\":{\"a\":1,}}", CAIRN_PARSE, 1, 22, ""},
    {"{\"provenance\":{\"a\" 1}}", CAIRN_PARSE, 1, 20, ""},
    {"{\"provenance\":{a:1}}", CAIRN_PARSE, 1, 16, ""},
    {"{\"provenance\":{\"a\":[1}}", CAIRN_PARSE, 1, 22, ""},
    {"{\"provenance\":{\"a\":\"\\x\"}}", CAIRN_PARSE, 1, 22, ""},
    {"{\"provenance\":{\"a\":\"\\u12g4\"}}", CAIRN_PARSE, 1, 25, ""},
    {"{\"provenance\":{\"a\":\"\n\"}}", CAIRN_PARSE, 1, 21, ""},
    {"{\"provenance\":{\"a\":\"\xc3\"}}", CAIRN_PARSE, 1, 21, ""},
    {"{\"provenance\":{\"a\":\"\xed\xa0\x80\"}}", CAIRN_PARSE, 1, 21, ""},
    {"{\"fixed_byte\":0}", CAIRN_BAD_INPUT, 1, 15, "fixed_byte"},
    {"{\"ops\":[]}", CAIRN_BAD_INPUT, 1, 8, "ops"},
    {CHAIN("\"name\":\"\""), CAIRN_BAD_INPUT, 1, 1, ""},
    {CHAIN("\"stages\":{}"), CAIRN_BAD_INPUT, 2, 10, "stages"},
    {CHAIN("\"nodes\":[" NODE "]"), CAIRN_BAD_INPUT, 2, 9, "nodes"},
    {CHAIN("\"backward_begins_at\":0"), CAIRN_BAD_INPUT, 2, 22, "backward_begins_at"},
    {STAGES(""), CAIRN_BAD_INPUT, 2, 10, "stages"},
    {STAGES("1"), CAIRN_BAD_INPUT, 2, 11, "stages[0]"},
    {STAGES(STAGE ",{}"), CAIRN_BAD_INPUT, 2, 77, "stages[1]"},
    {STAGES("{\"output_bytes\":1,\"saved_bytes\":1,\"forward_ns\":1}"), CAIRN_BAD_INPUT, 2, 11, "stages[0]"},
    {STAGES(STAGE ",\n{\"speed\": 1}"), CAIRN_BAD_INPUT, 3, 11, "stages[1].speed"},
    {STAGES("{\"output_bytes\":false}"), CAIRN_BAD_INPUT, 2, 27, "stages[0].output_bytes"},
    {STAGES("{\"no_recompute\":0}"), CAIRN_BAD_INPUT, 2, 27, "stages[0].no_recompute"},
    {STAGES("{\"output_bytes\":2,\"saved_bytes\":1,\"forward_ns\":1,\"backward_ns\":1}"), CAIRN_BAD_INPUT, 2, 43,
     "stages[0].saved_bytes"},
    {STAGES("{\"output_bytes\":1,\"options\":[]}"), CAIRN_BAD_INPUT, 2, 39, "stages[0].options"},
    {STAGES("{\"output_bytes\":1,\"options\":[{\"saved_bytes\":1}]}"), CAIRN_BAD_INPUT, 2, 40, "stages[0].options[0]"},
    {STAGES("{\"output_bytes\":2,\"options\":[{\"saved_bytes\":1,\"forward_ns\":1,\"backward_ns\":1}]}"),
     CAIRN_BAD_INPUT, 2, 55, "stages[0].options[0].saved_bytes"},
    {STAGES("{\"output_bytes\":1,\"saved_bytes\":1,\"options\":[" STAGE "]}"), CAIRN_BAD_INPUT, 2, 43,
     "stages[0].saved_bytes"},
    {STAGES("{\"output_bytes\":9223372036854775807,\"saved_bytes\":9223372036854775807,\"forward_ns\":1,"
            "\"backward_ns\":1}"),
     CAIRN_OVERFLOW, 2, 11, "stages[0]"},
    {CHAIN("\"machine\":{\"host_bytes\":1}"), CAIRN_BAD_INPUT, 2, 11, "machine"},
    {CHAIN("\"machine\":{\"host_bytes\":1,\"to_host_bytes_per_s\":0,\"to_device_bytes_per_s\":1}"), CAIRN_BAD_INPUT, 2,
     49, "machine.to_host_bytes_per_s"},
    {GRAPH("\"input_bytes\":1"), CAIRN_BAD_INPUT, 2, 15, "input_bytes"},
    {GRAPH("\"nodes\":[" NODE "],\"backward_begins_at\":2"), CAIRN_BAD_INPUT, 2, 66, "backward_begins_at"},
    {GRAPH("\"nodes\":[" NODE "],\"backward_begins_at\":-1"), CAIRN_BAD_INPUT, 2, 66, "backward_begins_at"},
    {GRAPH("\"nodes\":[" NODE "],\"backward_begins_at\":null"), CAIRN_BAD_INPUT, 2, 66, "backward_begins_at"},
    {NODES(""), CAIRN_BAD_INPUT, 2, 9, "nodes"},
    {NODES("{\"cost_ns\":1,\"bytes\":1}"), CAIRN_BAD_INPUT, 2, 10, "nodes[0]"},
    {NODES("{\"cost_ns\":1,\"bytes\":1,\"deps\":[0]}"), CAIRN_BAD_INPUT, 2, 41, "nodes[0].deps[0]"},
    {NODES(NODE ",{\"cost_ns\":1,\"bytes\":1,\"deps\":[-1]}"), CAIRN_BAD_INPUT, 2, 75, "nodes[1].deps[0]"},
    {NODES(NODE ",{\"cost_ns\":1,\"bytes\":1,\"deps\":[4294967296]}"), CAIRN_BAD_INPUT, 2, 75, "nodes[1].deps[0]"},
    {NODES(NODE ",{\"cost_ns\":1,\"bytes\":1,\"deps\":[0,0]}"), CAIRN_BAD_INPUT, 2, 74, "nodes[1].deps"},
    {NODES("{\"cost_ns\":1,\"bytes\":0,\"deps\":[],\"alias_of\":-1}"), CAIRN_BAD_INPUT, 2, 54, "nodes[0].alias_of"},
    {NODES("{\"cost_ns\":1,\"bytes\":0,\"deps\":[],\"alias_of\":0}"), CAIRN_BAD_INPUT, 2, 54, "nodes[0].alias_of"},
    {NODES(NODE ",{\"cost_ns\":1,\"bytes\":1,\"deps\":[],\"alias_of\":0}"), CAIRN_BAD_INPUT, 2, 65, "nodes[1].bytes"},
};

/* Whether a refusal is the expected one; prints it when not. */
static bool is_as_expected(const refusal *r, cairn_status status, const cairn_error *error)
{
    if (status == r->status && error->status == status && error->line == r->line && error->column == r->column &&
        strcmp(error->path, r->path) == 0 && strlen(error->message) > 5)
        return true;
    print_error("%s\ngives %s at %lld:%lld \"%s\" (%s)\n", r->text, cairn_status_name(status), (long long)error->line,
                (long long)error->column, error->path, error->message);
    return false;
}

static void refusals_say_where(void **state)
{
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const refusal *r = &refusals[i];
        cairn_error error;
        cairn_problem *problem = (cairn_problem *)&error;
        wrong += !is_as_expected(r, cairn_problem_read(NULL, r->text, strlen(r->text), &problem, &error), &error);
        assert_null(problem);
        assert_int_equal(cairn_problem_read(NULL, r->text, strlen(r->text), &problem, NULL), error.status);
    }
    assert_int_equal(wrong, 0);
}

/* A text that is cut anywhere is refused, and so is one with a byte too many at its end; nothing is read past the end. */
static void truncated_texts_are_refused(void **state)
{
    (void)state;
    cairn_problem *problem;
    cairn_error error;
    for (size_t length = 0; length + 2 < sizeof(chain_text); length++) {
        char *copy = malloc(length ? length : 1); /* of exactly this size, for the address sanitizer */
        assert_non_null(copy);
        memcpy(copy, chain_text, length);
        assert_int_equal(cairn_problem_read(NULL, copy, length, &problem, &error), CAIRN_PARSE);
        assert_true(error.offset <= (int64_t)length);
        assert_null(problem);
        free(copy);
    }
}

static void deep_nesting_is_refused(void **state)
{
    (void)state;
    enum { DEPTH = 1000000 };
    static const char before[] = "{\"provenance\": {\"a\": ", array[] = "{\"nodes\": [";
    char *text = malloc(DEPTH + 64);
    assert_non_null(text);
    cairn_problem *problem;
    cairn_error error;
    for (int i = 0; i < 2; i++) {
        strcpy(text, i ? before : array);
        size_t length = strlen(text);
        memset(text + length, '[', DEPTH);
        assert_int_equal(cairn_problem_read(NULL, text, length + DEPTH, &problem, &error), CAIRN_PARSE);
        assert_int_equal(error.line, 1);
        assert_non_null(strstr(error.message, "nested"));
    }
    free(text);
}

static void too_many_options_are_refused(void **state)
{
    (void)state;
    static const char option[] = "{\"saved_bytes\":1,\"forward_ns\":1,\"backward_ns\":1}";
    char text[8192] =
        "{\"format\":\"cairn-chain\",\"version\":1,\"input_bytes\":1,\"stages\":[{\"output_bytes\":1,\"options\":[";
    for (int i = 0; i < CAIRN_STAGE_OPTIONS_MAX + 1; i++) {
        strcat(text, i ? "," : "");
        strcat(text, option);
    }
    strcat(text, "]}]}");
    cairn_problem *problem;
    cairn_error error;
    assert_int_equal(cairn_problem_read(NULL, text, strlen(text), &problem, &error), CAIRN_TOO_LARGE);
    assert_string_equal(error.path, "stages[0].options");
    /* One fewer is fine. */
    size_t cut = strlen(text) - strlen("]}]}") - strlen(option) - 1;
    strcpy(text + cut, "]}]}");
    cairn_problem_free(read_problem(text));
}

/* What comes out of a file does not command the terminal that a message is shown on. */
static void messages_are_printable(void **state)
{
    (void)state;
    static const char text[] = "{\"\\u001b[31m\\u009b\\u007f\": 1}";
    cairn_problem *problem;
    cairn_error error;
    assert_int_equal(cairn_problem_read(NULL, text, strlen(text), &problem, &error), CAIRN_BAD_INPUT);
    assert_string_equal(error.path, "?[31m??");
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

#define SCHEDULE(hash, ops)                                                                                 \
    "{\"format\":\"cairn-schedule\",\"version\":1,\"problem\":{\"format\":\"cairn-chain\",\"hash\":\"" hash \
    "\"},\n\"ops\":[" ops "]}"
#define OPS(ops) SCHEDULE("sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2", ops)

static const refusal schedule_refusals[] = {
    {SCHEDULE("sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b3", ""), CAIRN_MISMATCH, 1, 81,
     "problem.hash"},
    {SCHEDULE("3fc2", ""), CAIRN_BAD_INPUT, 1, 81, "problem.hash"},
    {"{\"problem\":{\"format\":\"cairn-chain\"}}", CAIRN_BAD_INPUT, 1, 12, "problem"},
    {"{\"problem\":null}", CAIRN_BAD_INPUT, 1, 12, "problem"},
    {"{\"problem\":{\"format\":\"cairn-schedule\",\"hash\":\"\"}}", CAIRN_BAD_INPUT, 1, 22, "problem.format"},
    {"{\"format\":\"cairn-chain\"}", CAIRN_BAD_INPUT, 1, 11, "format"},
    {"{\"format\":\"cairn-schedule\",\"version\":1,\"ops\":[]}", CAIRN_BAD_INPUT, 1, 1, ""},
    {"{\"name\":\"\"}", CAIRN_BAD_INPUT, 1, 9, "name"},
    {"{\"peak_bytes\":-1}", CAIRN_BAD_INPUT, 1, 15, "peak_bytes"},
    {"{\"makespan_ns\":1.5}", CAIRN_BAD_INPUT, 1, 16, "makespan_ns"},
    {"{\"solver\":1}", CAIRN_BAD_INPUT, 1, 11, "solver"},
    {"{\"machine\":{}}", CAIRN_BAD_INPUT, 1, 12, "machine"},
    {"{\"ops\":null}", CAIRN_BAD_INPUT, 1, 8, "ops"},
    {OPS("[]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("\"backward\""), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[1,2]"), CAIRN_BAD_INPUT, 2, 9, "ops[0][0]"},
    {OPS("[\"forward\",1]"), CAIRN_BAD_INPUT, 2, 9, "ops[0][0]"},
    {OPS("[\"compute\",1]"), CAIRN_BAD_INPUT, 2, 9, "ops[0][0]"},
    {OPS("[\"backward\"]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"backward\",1,0]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"backward\",1.0]"), CAIRN_BAD_INPUT, 2, 20, "ops[0][1]"},
    {OPS("[\"backward\",-1]"), CAIRN_BAD_INPUT, 2, 20, "ops[0][1]"},
    {OPS("[\"backward\",4294967297]"), CAIRN_BAD_INPUT, 2, 20, "ops[0][1]"},
    {OPS("[\"backward\",2],[\"backward\",3]"), CAIRN_BAD_INPUT, 2, 23, "ops[1]"},
    {OPS("[\"backward\",0]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"forward_save\",1,1]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"forward_save\",1,65536]"), CAIRN_BAD_INPUT, 2, 26, "ops[0][2]"},
    {OPS("[\"forward_save\",1,null]"), CAIRN_BAD_INPUT, 2, 26, "ops[0][2]"},
    {OPS("[\"drop\",1]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"drop\",\"input\",1]"), CAIRN_BAD_INPUT, 2, 16, "ops[0][1]"},
    {OPS("[\"drop\",\"saved\",0]"), CAIRN_BAD_INPUT, 2, 8, "ops[0]"},
    {OPS("[\"drop\",\"saved\",1]]"), CAIRN_PARSE, 2, 27, ""},
};

static void schedule_refusals_say_where(void **state)
{
    (void)state;
    cairn_problem *problem = read_problem(chain_text);
    int wrong = 0;
    for (size_t i = 0; i < sizeof(schedule_refusals) / sizeof(schedule_refusals[0]); i++) {
        const refusal *r = &schedule_refusals[i];
        cairn_error error;
        cairn_schedule *schedule = (cairn_schedule *)&error;
        cairn_status status = cairn_schedule_read(NULL, problem, r->text, strlen(r->text), &schedule, &error);
        wrong += !is_as_expected(r, status, &error);
        assert_null(schedule);
    }
    assert_int_equal(wrong, 0);
    cairn_problem_free(problem);
}

/* ---- memory ---- */

static cairn_status read_and_write_problem(const cairn_env *env, void *context)
{
    cairn_problem *problem;
    cairn_error error;
    char *text = NULL;
    size_t length = 0;
    cairn_status status = cairn_problem_read(env, context, strlen(context), &problem, &error);
    if (status == CAIRN_OK)
        status = cairn_problem_write(env, problem, &text, &length, &error);
    cairn_text_free(env, text, length);
    cairn_problem_free(problem);
    return status;
}

static void running_out_of_memory_with_problems(void **state)
{
    (void)state;
    assert_true(test_every_allocation_fails(read_and_write_problem, (void *)(uintptr_t)chain_text) > 3);
    assert_true(test_every_allocation_fails(read_and_write_problem, (void *)(uintptr_t)graph_text) > 3);
}

typedef struct schedule_text {
    const cairn_problem *problem;
    const char *text;
} schedule_text;

static cairn_status read_and_write_schedule(const cairn_env *env, void *context)
{
    const schedule_text *source = context;
    cairn_schedule *schedule;
    char *text = NULL;
    size_t length = 0;
    cairn_status status =
        cairn_schedule_read(env, source->problem, source->text, strlen(source->text), &schedule, NULL);
    if (status == CAIRN_OK)
        status = cairn_schedule_write(env, schedule, &text, &length, NULL);
    cairn_text_free(env, text, length);
    cairn_schedule_free(schedule);
    return status;
}

static void running_out_of_memory_with_schedules(void **state)
{
    (void)state;
    cairn_problem *problem = read_problem(chain_text);
    schedule_text source = {problem, OPS("[\"forward_save\",1],[\"forward_save\",2,1],[\"drop\",\"output\",1]")};
    assert_true(test_every_allocation_fails(read_and_write_schedule, &source) > 3);
    cairn_problem_free(problem);
}

static cairn_status read_file(const cairn_env *env, void *context)
{
    char *text;
    size_t length;
    cairn_status status = cairn_file_read(env, context, &text, &length, NULL);
    cairn_text_free(env, text, length);
    return status;
}

static void running_out_of_memory_with_files(void **state)
{
    (void)state;
    assert_true(test_every_allocation_fails(read_file, (void *)(uintptr_t)(CAIRN_TEST_DATA "/chains/gpt2.json")) > 0);
}

/* ---- files ---- */

static void expect_content(const char *path, const char *expected)
{
    char *text;
    size_t length;
    assert_int_equal(cairn_file_read(NULL, path, &text, &length, NULL), CAIRN_OK);
    assert_string_equal(text, expected);
    cairn_text_free(NULL, text, length);
}

static int count_entries(const char *folder)
{
    DIR *directory = opendir(folder);
    int count = 0;
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory));)
        count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
}

static void files_are_replaced_whole(void **state)
{
    (void)state;
    char folder[] = "/tmp/cairn-io-XXXXXX", path[64], link[64];
    cairn_error error;
    struct stat info;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/a.json", folder);
    snprintf(link, sizeof(link), "%s/link.json", folder);
    assert_int_equal(cairn_file_write(path, "first\n", 6, NULL), CAIRN_OK);
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(symlink("a.json", link), 0);
    assert_int_equal(cairn_file_write(link, "second\n", 7, NULL), CAIRN_OK);
    expect_content(path, "second\n");
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0640);
    unlink(path);
    assert_int_equal(cairn_file_write(link, "third\n", 6, NULL), CAIRN_OK);
    expect_content(path, "third\n");
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    unlink(link);
    assert_int_equal(symlink("/nonexistent/a.json", link), 0);
    assert_int_equal(cairn_file_write(link, "fourth\n", 7, &error), CAIRN_IO);
    expect_content(path, "third\n");
    assert_int_equal(cairn_file_write(folder, "x", 1, &error), CAIRN_IO);
    assert_true(strlen(error.message) > 5);
    assert_int_equal(cairn_file_write("/dev/null", "x", 1, NULL), CAIRN_OK);
    assert_int_equal(cairn_file_write("/dev/full", "x", 1, &error), CAIRN_IO);
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    assert_int_equal(count_entries(folder), 2);
    unlink(link);
    unlink(path);
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(cairn_file_write(path, "x", 1, &error), CAIRN_IO);
}

static void unreadable_files_are_refused(void **state)
{
    (void)state;
    char *text = (char *)state;
    size_t length = 1;
    cairn_error error;
    assert_int_equal(cairn_file_read(NULL, "/nonexistent/a.json", &text, &length, &error), CAIRN_IO);
    assert_null(text);
    assert_int_equal(length, 0);
    assert_non_null(strstr(error.message, "No such file"));
    assert_int_equal(cairn_file_read(NULL, "/tmp", &text, &length, &error), CAIRN_IO);
    assert_non_null(strstr(error.message, "directory"));
    assert_int_equal(cairn_file_read(NULL, "/dev/null", &text, &length, &error), CAIRN_OK);
    assert_int_equal(length, 0);
    cairn_text_free(NULL, text, length);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_examples_hash_as_the_format_says),
        cmocka_unit_test(absent_fields_have_defaults),
        cmocka_unit_test(provenance_is_kept_as_it_is),
        cmocka_unit_test(problems_survive_writing_and_reading),
        cmocka_unit_test(measured_problems_are_read),
        cmocka_unit_test(what_would_not_be_json_is_not_written),
        cmocka_unit_test(refusals_say_where),
        cmocka_unit_test(truncated_texts_are_refused),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(too_many_options_are_refused),
        cmocka_unit_test(messages_are_printable),
        cmocka_unit_test(schedules_survive_writing_and_reading),
        cmocka_unit_test(schedule_refusals_say_where),
        cmocka_unit_test(running_out_of_memory_with_problems),
        cmocka_unit_test(running_out_of_memory_with_schedules),
        cmocka_unit_test(running_out_of_memory_with_files),
        cmocka_unit_test(files_are_replaced_whole),
        cmocka_unit_test(unreadable_files_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
