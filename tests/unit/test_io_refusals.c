/* Texts that are no problem or no schedule are refused, and the error says where. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/io.h>

#include "support/io_texts.h"

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
        assert_non_null(strstr(error.message, "nested more than 2048 levels deep"));
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_say_where),      cmocka_unit_test(truncated_texts_are_refused),
        cmocka_unit_test(deep_nesting_is_refused), cmocka_unit_test(too_many_options_are_refused),
        cmocka_unit_test(messages_are_printable),  cmocka_unit_test(schedule_refusals_say_where),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
