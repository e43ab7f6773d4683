/*
 * The golden table: what every deterministic solver answers on the problems of tests/data, at five budgets from the least
 * that any solver needs to what storing everything takes. answers.txt beside this file is the table as it was reviewed; a
 * change of any number in it is a change of behaviour, to be looked at and committed on purpose:
 *
 *     build/release/tests/test_golden --write tests/golden/answers.txt && git diff tests/golden
 *
 * Solvers that have no line in the table yet are named, and do not fail the test. Left out are exhaustive search, auto (the
 * best of the others) and graph-milp and graph-lp-round, whose answers depend on the version of a library.
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
#include <cairn/io.h>

#include "support/rounds.h"

#define TABLE CAIRN_TEST_DATA "/../golden/answers.txt"

enum { BUDGETS = 5, LINE_MAX_BYTES = 160, LINES_MAX = 4096 };

static const char *const instances[] = {"chains/gpt2",  "chains/mlp",      "chains/resnet50", "chains/vgg",
                                        "graphs/gpt_4", "graphs/resnet_8", "graphs/unet_4"};

static const char heading[] =
    "# What solvers answer: see test_golden.c. \"-\" = none; offload solvers with a link of 4 GB/s "
    "both ways and 1 GiB on the host.\n"
    "# instance        budget_bytes solver           makespan_ns   peak_bytes  least_bytes "
    "objective_bytes\n";

typedef struct table {
    char lines[LINES_MAX][LINE_MAX_BYTES];
    int count;
} table;

static table made, golden;

/* All instances; under sanitizers, which make it slow and need no more, one chain and one graph. */
static bool is_looked_at(const char *instance)
{
    return TEST_ROUNDS(8) >= 2 || strcmp(instance, "chains/gpt2") == 0 || strcmp(instance, "graphs/gpt_4") == 0;
}

/* ---- making it ---- */

static bool is_left_out(const cairn_solver_info *info)
{
    return info->exhaustive || !info->available || strcmp(info->name, "auto") == 0 ||
           strcmp(info->name, "graph-milp") == 0 || strcmp(info->name, "graph-lp-round") == 0;
}

static cairn_options *options_for(const cairn_solver_info *info)
{
    static const char *const link[][2] = {{"host-budget", "1GiB"}, {"to-host", "4GB/s"}, {"to-device", "4GB/s"}};
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "solver", info->name, NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "iterations", "1000", NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set(options, "threads", "1", NULL), CAIRN_OK);
    if (info->minimizes_memory)
        assert_int_equal(cairn_options_set(options, "minimize", "memory", NULL), CAIRN_OK);
    for (size_t i = 0; info->needs_machine && i < sizeof(link) / sizeof(link[0]); i++)
        assert_int_equal(cairn_options_set(options, link[i][0], link[i][1], NULL), CAIRN_OK);
    return options;
}

static const char *text_of(char buffer[24], int64_t number)
{
    if (number == CAIRN_NONE)
        return "-";
    snprintf(buffer, 24, "%lld", (long long)number);
    return buffer;
}

static void add_line(const char *instance, const char *solver, const cairn_info *info)
{
    char text[5][24];
    assert_true(made.count < LINES_MAX);
    snprintf(made.lines[made.count++], LINE_MAX_BYTES, "%-15s %14s %-16s %12s %12s %12s %12s\n", instance,
             text_of(text[0], info->budget_bytes), solver, text_of(text[1], info->makespan_ns),
             text_of(text[2], info->peak_bytes), text_of(text[3], info->least_bytes),
             text_of(text[4], info->objective_bytes));
}

static void ask(const char *instance, const cairn_problem *problem, const cairn_solver_info *info,
                const int64_t *budgets)
{
    static const int64_t none = CAIRN_NONE;
    cairn_info infos[BUDGETS];
    cairn_error error;
    cairn_options *options = options_for(info);
    int count = info->minimizes_memory ? 1 : BUDGETS;
    if (cairn_solver_accepts(info->name, problem, options, NULL) == CAIRN_OK) {
        if (cairn_solve_many(NULL, problem, options, count == 1 ? &none : budgets, count, NULL, infos, &error) !=
            CAIRN_OK)
            fail_msg("%s, %s: %s", instance, info->name, error.message);
        for (int i = 0; i < count; i++) {
            add_line(instance, info->name, &infos[i]);
            cairn_info_clear(&infos[i]);
        }
    }
    cairn_options_free(options);
}

static cairn_problem *read_instance(const char *instance)
{
    char path[512], *text;
    size_t length;
    cairn_problem *problem;
    snprintf(path, sizeof(path), "%s/%s.json", CAIRN_TEST_DATA, instance);
    assert_int_equal(cairn_file_read(NULL, path, &text, &length, NULL), CAIRN_OK);
    assert_int_equal(cairn_problem_read(NULL, text, length, &problem, NULL), CAIRN_OK);
    cairn_text_free(NULL, text, length);
    return problem;
}

static void make_table(void)
{
    made.count = 0;
    for (size_t i = 0; i < sizeof(instances) / sizeof(instances[0]); i++) {
        if (!is_looked_at(instances[i]))
            continue;
        cairn_problem *problem = read_instance(instances[i]);
        cairn_limits limits;
        int64_t budgets[BUDGETS];
        assert_int_equal(cairn_limits_of(NULL, problem, NULL, &limits, NULL), CAIRN_OK);
        for (int b = 0; b < BUDGETS; b++)
            budgets[b] = limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) * b / (BUDGETS - 1);
        for (int s = 0; cairn_solver_at(s); s++)
            if (!is_left_out(cairn_solver_at(s)))
                ask(instances[i], problem, cairn_solver_at(s), budgets);
        cairn_problem_free(problem);
    }
}

/* ---- comparing ---- */

static void read_table(const char *path)
{
    FILE *file = fopen(path, "r");
    char line[LINE_MAX_BYTES];
    if (!file)
        fail_msg("no %s", path);
    golden.count = 0;
    while (file && fgets(line, sizeof(line), file))
        if (line[0] != '#') {
            assert_true(golden.count < LINES_MAX);
            memcpy(golden.lines[golden.count++], line, sizeof(line));
        }
    if (file)
        assert_int_equal(fclose(file), 0);
}

static void solver_of(const char *line, char solver[64])
{
    assert_int_equal(sscanf(line, "%*s %*s %63s", solver), 1);
}

static bool is_in(const table *t, const char *line, bool whole)
{
    char wanted[64], own[64];
    solver_of(line, wanted);
    for (int i = 0; i < t->count; i++) {
        solver_of(t->lines[i], own);
        if (whole ? strcmp(t->lines[i], line) == 0 : strcmp(own, wanted) == 0)
            return true;
    }
    return false;
}

/* Whether it is of an instance that is looked at and a solver that is built in. */
static bool is_expected(const char *line)
{
    char instance[64], solver[64];
    assert_int_equal(sscanf(line, "%63s", instance), 1);
    if (!is_looked_at(instance))
        return false;
    solver_of(line, solver);
    for (int s = 0; cairn_solver_at(s); s++)
        if (strcmp(cairn_solver_at(s)->name, solver) == 0)
            return cairn_solver_at(s)->available;
    return false;
}

static void answers_are_those_of_the_table(void **state)
{
    int differences = 0, missing = 0;
    (void)state;
    read_table(TABLE);
    make_table();
    assert_true(golden.count > 0);
    for (int i = 0; i < golden.count; i++)
        if (is_expected(golden.lines[i]) && !is_in(&made, golden.lines[i], true)) {
            print_error("table:  %s", golden.lines[i]);
            differences++;
        }
    for (int i = 0; i < made.count; i++) {
        bool known = is_in(&golden, made.lines[i], false);
        missing += !known;
        if (known && !is_in(&golden, made.lines[i], true)) {
            print_error("answer: %s", made.lines[i]);
            differences++;
        }
    }
    if (missing > 0)
        print_message("%d answers are of solvers that have no line in the table: see the top of test_golden.c\n",
                      missing);
    assert_int_equal(differences, 0);
}

static int write_table(const char *path)
{
    make_table();
    FILE *file = fopen(path, "w");
    if (!file)
        return 1;
    bool failed = fputs(heading, file) < 0;
    for (int i = 0; i < made.count; i++)
        failed |= fputs(made.lines[i], file) < 0;
    return fclose(file) != 0 || failed;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(answers_are_those_of_the_table)};
    if (argc == 3 && strcmp(argv[1], "--write") == 0)
        return write_table(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
