/* Reports: units, tables, comma-separated values, timelines, sinks that fail, running out of memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/report.h>
#include <cairn/solve.h>

#include "base/utf8.h"
#include "support/faulty_allocator.h"
#include "support/op_text.h"

/* ---- texts ---- */

static void units_have_three_digits(void **state)
{
    (void)state;
    static const struct {
        int64_t value;
        const char *bytes, *ns;
    } cases[] = {
        {CAIRN_NONE, "-", "-"},
        {0, "0 B", "0 ns"},
        {999, "999 B", "999 ns"},
        {1000, "1000 B", "1.00 us"},
        {1024, "1.00 KiB", "1.02 us"},
        {10234, "9.99 KiB", "10.2 us"},
        {10239, "10.0 KiB", "10.2 us"},
        {999499, "976 KiB", "999 us"},
        {999500, "976 KiB", "1.00 ms"},
        {1048063, "1023 KiB", "1.05 ms"},
        {1048064, "1.00 MiB", "1.05 ms"},
        {1048576, "1.00 MiB", "1.05 ms"},
        {123456789, "118 MiB", "123 ms"},
        {1610612736, "1.50 GiB", "1.61 s"},
        {INT64_MAX, "8388608 TiB", "9223372037 s"},
    };
    char out[32];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_string_equal(cairn_format_bytes(cases[i].value, out, sizeof(out)), cases[i].bytes);
        assert_string_equal(cairn_format_ns(cases[i].value, out, sizeof(out)), cases[i].ns);
    }
}

/* Budgets that are read again from what is shown are enough, and at most a hundredth more. */
static void budgets_are_rounded_up(void **state)
{
    (void)state;
    static const struct {
        int64_t value;
        const char *shown;
    } cases[] = {{CAIRN_NONE, "-"},         {0, "0 B"},
                 {1023, "1023 B"},          {1024, "1.00 KiB"},
                 {1025, "1.01 KiB"},        {41943040, "40.0 MiB"},
                 {41943041, "40.1 MiB"},    {156630000, "150 MiB"},
                 {1048063, "1.00 MiB"},     {1047552, "1.00 MiB"},
                 {1047551, "1023 KiB"},     {1610612737, "1.51 GiB"},
                 {INT64_MAX, "8388608 TiB"}};
    char out[32];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(cairn_format_budget(cases[i].value, out, sizeof(out)), cases[i].shown);
    for (int64_t value = 1024; value < INT64_MAX / 8 * 7; value += value / 7 + 1) {
        int64_t read;
        cairn_format_budget(value, out, sizeof(out));
        char *space = strchr(out, ' ');
        memmove(space, space + 1, strlen(space));
        if (cairn_parse_size(out, &read, NULL) != CAIRN_OK)
            fail_msg("%s of %lld cannot be read", out, (long long)value);
        assert_true(read >= value && read - value <= value / 99 + 11);
    }
}

static void texts_are_made_fit_to_show(void **state)
{
    (void)state;
    static const struct {
        const char *text, *shown;
        bool utf8;
    } cases[] = {
        {"", "", true},
        {"plain", "plain", true},
        {"caf\xc3\xa9 \xe2\x82\xac", "caf\xc3\xa9 \xe2\x82\xac", true},
        {"\x1b[31m\n\x7f", "?[31m??", true},
        {"\xc2\x9b", "?", true},
        {"caf\xe9", "caf?", false},
        {"\xc0\xaf\xe0\x80\x80", "?????", false}, /* overlong */
        {"\xed\xa0\x80", "???", false},           /* a surrogate */
        {"\xf4\x90\x80\x80", "????", false},      /* past U+10FFFF */
        {"\xe2\x82", "??", false},                /* cut */
        {"0123456789abcde", "0123456789abcde", true},
        {"0123456789abcdef", "0123456789ab...", true},
        {"0123456789ab\xe2\x82\xac", "0123456789ab\xe2\x82\xac", true},
        {"0123456789abc\xe2\x82\xac", "0123456789ab...", true},
    };
    char out[16];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_string_equal(crn_printable(cases[i].text, out, sizeof(out)), cases[i].shown);
        assert_int_equal(crn_is_utf8(cases[i].text), cases[i].utf8);
    }
}

/* ---- a sink ---- */

typedef struct pad {
    char text[1 << 16];
    size_t length;
    int pieces_left; /* then it fails; -1 = never */
} pad;

static int write_pad(void *context, const char *text, size_t length)
{
    pad *out = context;
    if (out->pieces_left == 0 || length >= sizeof(out->text) - out->length)
        return 1;
    out->pieces_left -= out->pieces_left > 0;
    memcpy(out->text + out->length, text, length);
    out->length += length;
    out->text[out->length] = '\0';
    return 0;
}

static cairn_sink sink_of(pad *out)
{
    out->length = 0;
    out->text[0] = '\0';
    out->pieces_left = -1;
    return (cairn_sink){out, write_pad};
}

static pad page;

/* ---- a chain of four stages, and answers to it ---- */

static cairn_problem *chain_of_four(void)
{
    static const cairn_stage_option option = {"keep", 20, 1000, 2000, 0, 0};
    static const cairn_stage stages[] = {{"a", 10, 10, 0, 1000, 0, false, 1, &option},
                                         {"b", 10, 10, 0, 1000, 0, false, 1, &option},
                                         {"", 10, 10, 0, 1000, 0, false, 1, &option},
                                         {"d\x1b", 10, 10, 0, 1000, 0, false, 1, &option}};
    static const cairn_machine machine = {1000, 10000000000, 10000000000, 0, false};
    const cairn_chain chain = {10, 10, 4, stages};
    const cairn_problem_info info = {"four", NULL, 5, &machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static const char twice[] = "K1 K2 -a1 K3 S4 B4 K1 S2 S3 B3 B2 S1 B1";

static cairn_info answer(void)
{
    return (cairn_info){.outcome = CAIRN_OUTCOME_FEASIBLE,
                        .solver = "some-solver",
                        .budget_bytes = 2048,
                        .makespan_ns = 15000,
                        .peak_bytes = 1024,
                        .host_peak_bytes = CAIRN_NONE,
                        .recompute_ns = 3000,
                        .stall_ns = 0,
                        .lower_bound_ns = 12000,
                        .gap = 0.2,
                        .least_bytes = 512,
                        .least_lower_bytes = 256,
                        .store_all_bytes = 4096,
                        .store_all_ns = 12000,
                        .solve_ns = 1500,
                        .solver_peak_bytes = 100,
                        .objective_bytes = CAIRN_NONE,
                        .checkpoint_count = -1};
}

static void an_answer_is_told(void **state)
{
    (void)state;
    cairn_problem *problem = chain_of_four();
    cairn_schedule *schedule = test_schedule(problem, twice);
    cairn_info info = answer();
    assert_int_equal(cairn_report_answer(NULL, problem, schedule, &info, sink_of(&page), NULL), CAIRN_OK);
    assert_string_equal(page.text, "chain four, 4 stages\n"
                                   "outcome       feasible     some-solver\n"
                                   "budget        2.00 KiB\n"
                                   "peak          1.00 KiB     50.0 % of the budget\n"
                                   "time          15.0 us      +25.0 % against store-all\n"
                                   "  recomputing 3.00 us\n"
                                   "lower bound   12.0 us      so 20.0 % could be saved at most\n"
                                   "least memory  512 B        of this solver; every schedule needs 256 B\n"
                                   "store-all     4.00 KiB     in 12.0 us\n"
                                   "recomputed    a (2 times)\n"
                                   "              b to stage 3\n"
                                   "solved in     1.50 us      with 100 B of memory\n");
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

/* What could be saved at most is never less than that. */
static void gaps_are_rounded_up(void **state)
{
    (void)state;
    static const struct {
        double gap;
        const char *shown, *row;
    } cases[] = {{0, " 0.0 %", "reached\n"},
                 {1e-12, " 0.1 %", "so 0.1 % could be saved at most\n"}, /* 1 ns of a quarter of an hour */
                 {0.00001, " 0.1 %", "so 0.1 % could be saved at most\n"},
                 {0.113, " 11.3 %", "so 11.3 % could be saved at most\n"},
                 {0.11301, " 11.4 %", "so 11.4 % could be saved at most\n"}};
    cairn_problem *problem = chain_of_four();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cairn_info info = answer();
        info.gap = cases[i].gap;
        assert_int_equal(cairn_report_answer(NULL, problem, NULL, &info, sink_of(&page), NULL), CAIRN_OK);
        assert_non_null(strstr(page.text, cases[i].row));
        assert_int_equal(cairn_report_comparison(NULL, &info, 1, sink_of(&page), NULL), CAIRN_OK);
        assert_non_null(strstr(page.text, cases[i].shown));
    }
    cairn_problem_free(problem);
}

static void no_answer_is_told(void **state)
{
    (void)state;
    cairn_problem *problem = chain_of_four();
    int32_t checkpoints[] = {1, 4};
    cairn_info info = {.outcome = CAIRN_OUTCOME_INFEASIBLE,
                       .solver = "some-solver",
                       .budget_bytes = CAIRN_NONE,
                       .makespan_ns = CAIRN_NONE,
                       .peak_bytes = CAIRN_NONE,
                       .host_peak_bytes = CAIRN_NONE,
                       .lower_bound_ns = CAIRN_NONE,
                       .gap = -1,
                       .least_bytes = 7,
                       .least_is_exact = true,
                       .least_lower_bytes = 7,
                       .store_all_bytes = CAIRN_NONE,
                       .store_all_ns = CAIRN_NONE,
                       .solve_ns = CAIRN_NONE,
                       .solver_peak_bytes = CAIRN_NONE,
                       .objective_bytes = 60,
                       .checkpoint_count = 2,
                       .checkpoints = checkpoints,
                       .stopped_early = true,
                       .optimal_in = "persistent",
                       .reason = "too little\n"};
    assert_int_equal(cairn_report_answer(NULL, problem, NULL, &info, sink_of(&page), NULL), CAIRN_OK);
    assert_string_equal(
        page.text,
        "chain four, 4 stages\n"
        "outcome       infeasible   some-solver, optimal among schedules of class persistent, stopped early\n"
        "objective     60 B         what the solver minimizes: memory of outputs alone\n"
        "least memory  7 B          no schedule needs less\n"
        "checkpoints   1 4\n"
        "reason        too little?\n");
    cairn_problem_free(problem);
}

/* Recomputation inside a stage is that of an option that takes longer; equal options in a row share a line. */
static void options_are_told(void **state)
{
    (void)state;
    static const cairn_stage_option options[] = {
        {"keep", 20, 1000, 2000, 0, 0}, {"selective", 15, 1000, 2500, 0, 0}, {"", 12, 1000, 2600, 0, 0}};
    static const cairn_stage_option unnamed[] = {
        {"", 20, 1000, 2000, 0, 0}, {"", 15, 1000, 2500, 0, 0}, {"", 12, 1000, 2600, 0, 0}};
    static const cairn_stage stages[] = {{"a", 10, 10, 0, 1000, 0, false, 3, options},
                                         {"b", 10, 10, 0, 1000, 0, false, 3, options},
                                         {"c", 10, 10, 0, 1000, 0, false, 3, unnamed},
                                         {"d", 10, 10, 0, 1000, 0, false, 3, options}};
    static const struct {
        const char *ops, *rows;
    } cases[] = {
        {"S1:1 S2:1 S3:0 S4:2 B4 B3 B2 B1",
         "options       a to b: selective\n              d: option 2\nrecomputed    no whole stage\n"},
        {"S1 S2:1 S3:1 S4:1 B4 B3 B2 B1",
         "options       b: selective\n              c: option 1\n              d: selective\n"},
        {"K1 S2 S3 S4:1 B4 B3 B2 S1 B1", "options       d: selective\nrecomputed    a\n"},
    };
    const cairn_chain chain = {10, 10, 4, stages};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, NULL, &problem, NULL), CAIRN_OK);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cairn_schedule *schedule = test_schedule(problem, cases[i].ops);
        cairn_info info = answer();
        assert_int_equal(cairn_report_answer(NULL, problem, schedule, &info, sink_of(&page), NULL), CAIRN_OK);
        assert_non_null(strstr(page.text, cases[i].rows));
        assert_non_null(strstr(page.text, "of whole stages; slower options come on top"));
        cairn_schedule_free(schedule);
    }
    cairn_problem_free(problem);
}

static void the_objective_of_a_selection_is_told(void **state)
{
    (void)state;
    cairn_problem *problem = chain_of_four();
    cairn_info info = answer();
    info.objective_bytes = 60;
    snprintf(info.optimal_in, sizeof(info.optimal_in), "eq9");
    assert_int_equal(cairn_report_answer(NULL, problem, NULL, &info, sink_of(&page), NULL), CAIRN_OK);
    assert_non_null(strstr(page.text, " some-solver, optimal by its objective, eq. 9\n"));
    assert_non_null(strstr(page.text, "outputs alone, by eq. 9 of Hong et al.\n"));
    cairn_problem_free(problem);
}

static void many_ranges_are_cut(void **state)
{
    (void)state;
    enum { NODES = 40 };
    cairn_node nodes[NODES];
    char ops[NODES * 16] = "";
    for (int v = 0; v < NODES; v++) {
        nodes[v] = (cairn_node){"", 1, 0, 0, NULL, 0, -1, false, false};
        snprintf(ops + strlen(ops), sizeof(ops) - strlen(ops), v % 2 ? "C%d " : "C%d -%d C%d ", v, v, v);
    }
    const cairn_graph graph = {NODES, nodes, -1};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_graph(NULL, &graph, NULL, &problem, NULL), CAIRN_OK);
    cairn_schedule *schedule = test_schedule(problem, ops);
    cairn_info info = answer();
    assert_int_equal(cairn_report_answer(NULL, problem, schedule, &info, sink_of(&page), NULL), CAIRN_OK);
    assert_non_null(strstr(page.text, "graph, 40 nodes\n"));
    assert_non_null(strstr(page.text, "recomputed    node 0\n              node 2\n"));
    assert_non_null(strstr(page.text, "node 14\n              and 12 ranges more; 20 of 40 in all\n"));
    assert_null(strstr(page.text, "node 16\n"));
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

static void answers_are_compared(void **state)
{
    (void)state;
    cairn_info infos[] = {answer(), answer()};
    infos[1].outcome = CAIRN_OUTCOME_UNKNOWN;
    infos[1].makespan_ns = infos[1].peak_bytes = infos[1].budget_bytes = CAIRN_NONE;
    infos[1].gap = -1;
    assert_int_equal(cairn_report_comparison(NULL, infos, 2, sink_of(&page), NULL), CAIRN_OK);
    assert_non_null(strstr(page.text, "2.00 KiB   1.00 KiB    15.0 us    +25.0 %   20.0 %      512 B    1.50 us\n"));
    assert_non_null(strstr(page.text, "unknown          none          -          -          -        -      512 B"));
    assert_int_equal(cairn_report_csv(NULL, infos, 2, sink_of(&page), NULL), CAIRN_OK);
    assert_non_null(
        strstr(page.text, "\nsome-solver,feasible,2048,15000,1024,,12000,512,256,4096,12000,3000,0,1500,100\n"));
    assert_non_null(strstr(page.text, "\nsome-solver,unknown,,,,,12000,512,256,4096,12000,3000,0,1500,100\n"));
}

/* ---- timelines ---- */

static void a_timeline_has_lanes_and_curves(void **state)
{
    (void)state;
    cairn_problem *problem = chain_of_four();
    cairn_schedule *schedule = test_schedule(problem, "S1 >a1 K1 S2 S3 S4 B4 B3 B2 B1");
    cairn_replay replay;
    cairn_error error;
    assert_int_equal(cairn_simulate(NULL, problem, schedule, CAIRN_NONE, NULL, &replay, NULL), CAIRN_OK);
    assert_false(replay.valid); /* a1 is not there to be sent */
    assert_int_equal(cairn_report_trace(NULL, problem, schedule, CAIRN_NONE, sink_of(&page), &error), CAIRN_BAD_INPUT);
    assert_int_equal(error.index, 1);
    cairn_schedule_free(schedule);

    schedule = test_schedule(problem, "S1 >A1 K1 S2 S3 S4 B4 B3 B2 B1 xA1");
    assert_int_equal(cairn_report_trace(NULL, problem, schedule, CAIRN_NONE, sink_of(&page), &error), CAIRN_OK);
    assert_non_null(strstr(page.text,
                           "\"tid\": 1, \"ts\": 0.000, \"dur\": 1.000, \"name\": \"forward a\", \"cat\": \"compute\", "
                           "\"args\": {\"position\": 0, \"op\": \"forward_save\", \"index\": 1, \"option\": 0}"));
    assert_non_null(
        strstr(page.text, "\"tid\": 2, \"ts\": 1.000, \"dur\": 0.002, \"name\": \"offload a\", \"cat\": \"transfer\""));
    assert_non_null(strstr(page.text, "\"name\": \"recompute a\", \"cat\": \"recompute\""));
    assert_non_null(strstr(page.text, "\"name\": \"forward stage 3\""));
    assert_non_null(strstr(page.text, "\"name\": \"forward d?\""));
    assert_non_null(strstr(page.text, "\"name\": \"host memory\", \"ts\": 1.000, \"args\": {\"bytes\": 20}"));
    assert_string_equal(page.text + page.length - 4, "\n]}\n");
    page.pieces_left = 0;
    assert_int_equal(cairn_report_trace(NULL, problem, schedule, CAIRN_NONE, (cairn_sink){&page, write_pad}, &error),
                     CAIRN_CALLBACK);
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

static cairn_status report_everything(const cairn_env *env, void *context)
{
    const cairn_problem *problem = context;
    cairn_schedule *schedule = test_schedule(problem, twice);
    cairn_info info = answer();
    cairn_status status = cairn_report_answer(env, problem, schedule, &info, sink_of(&page), NULL);
    if (status == CAIRN_OK)
        status = cairn_report_comparison(env, &info, 1, sink_of(&page), NULL);
    if (status == CAIRN_OK)
        status = cairn_report_csv(env, &info, 1, sink_of(&page), NULL);
    if (status == CAIRN_OK)
        status = cairn_report_trace(env, problem, schedule, CAIRN_NONE, sink_of(&page), NULL);
    cairn_schedule_free(schedule);
    return status;
}

static void running_out_of_memory(void **state)
{
    (void)state;
    cairn_problem *problem = chain_of_four();
    assert_true(test_every_allocation_fails(report_everything, problem) > 5);
    cairn_problem_free(problem);
}

static void a_sink_that_fails_is_told(void **state)
{
    (void)state;
    cairn_info info = answer();
    cairn_error error;
    cairn_sink sink = sink_of(&page);
    page.pieces_left = 0;
    assert_int_equal(cairn_report_csv(NULL, &info, 1, sink, &error), CAIRN_CALLBACK);
    assert_int_equal(error.status, CAIRN_CALLBACK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(units_have_three_digits),
        cmocka_unit_test(budgets_are_rounded_up),
        cmocka_unit_test(texts_are_made_fit_to_show),
        cmocka_unit_test(an_answer_is_told),
        cmocka_unit_test(gaps_are_rounded_up),
        cmocka_unit_test(no_answer_is_told),
        cmocka_unit_test(many_ranges_are_cut),
        cmocka_unit_test(answers_are_compared),
        cmocka_unit_test(a_timeline_has_lanes_and_curves),
        cmocka_unit_test(running_out_of_memory),
        cmocka_unit_test(a_sink_that_fails_is_told),
        cmocka_unit_test(options_are_told),
        cmocka_unit_test(the_objective_of_a_selection_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
