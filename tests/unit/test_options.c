/* Sizes, rates, durations; the table of options; what options mean for a problem. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "solve/options.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"

typedef cairn_status parser(const char *text, int64_t *value, cairn_error *error);

static void expect(parser *parse, const char *text, int64_t value)
{
    cairn_error error;
    int64_t found = -7;
    if (parse(text, &found, &error) != CAIRN_OK)
        fail_msg("\"%s\" refused: %s", text, error.message);
    if (found != value)
        fail_msg("\"%s\" is %lld, not %lld", text, (long long)found, (long long)value);
}

static void refuse(parser *parse, const char *text)
{
    cairn_error error;
    int64_t found = -7;
    if (parse(text, &found, &error) != CAIRN_BAD_INPUT)
        fail_msg("\"%s\" accepted as %lld", text, (long long)found);
    assert_int_equal(found, -7);
    assert_true(strlen(error.message) > 0);
}

static void sizes_are_parsed_exactly(void **state)
{
    (void)state;
    expect(cairn_parse_size, "0", 0);
    expect(cairn_parse_size, "12000", 12000);
    expect(cairn_parse_size, "007", 7);
    expect(cairn_parse_size, "8GiB", 8589934592);
    expect(cairn_parse_size, "8GB", 8000000000);
    expect(cairn_parse_size, "120B", 120);
    expect(cairn_parse_size, "1KB", 1000);
    expect(cairn_parse_size, "1KiB", 1024);
    expect(cairn_parse_size, "3MB", 3000000);
    expect(cairn_parse_size, "3MiB", 3145728);
    expect(cairn_parse_size, "2TB", 2000000000000);
    expect(cairn_parse_size, "2TiB", 2199023255552);
    expect(cairn_parse_size, "1.5GiB", 1610612736);
    expect(cairn_parse_size, "0.1KiB", 102);
    expect(cairn_parse_size, "0.0009KB", 0);
    expect(cairn_parse_size, "0.9999KB", 999);
    expect(cairn_parse_size, "1.999999999999999999999999999999999KB", 1999);
    expect(cairn_parse_size, "0.999999999999999999999999999999999999TiB", 1099511627775);
    /* The nearest double of 4503599.627370497 times 10^9 is 4503599627370497.5: rounding down must not see it. */
    expect(cairn_parse_size, "4503599.627370497GB", 4503599627370497);
    expect(cairn_parse_size, "9223372036854775807", INT64_MAX);
    expect(cairn_parse_size, "8388607.99999TiB", 9223372036843780691);
}

static void bad_sizes_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        " ",
        "-1",
        "+1",
        "none",
        "1.5",
        "1.",
        "1.GB",
        ".5GB",
        "1 GB",
        "1gb",
        "1Gb",
        "1GIB",
        "1kB",
        "1K",
        "1b",
        "1 B",
        "1BB",
        "80%",
        "1GB ",
        " 1GB",
        "1e3",
        "0x10",
        "1.5.2GB",
        "1,5GB",
        "GB",
        "1GB/s",
        "1PiB",
        "1GiBB",
        "1\n",
        "inf",
        "nan",
        "9223372036854775808",
        "99999999999999999999999",
        "8388608TiB",
        "9223372036854775807KB",
        "1ns",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        refuse(cairn_parse_size, bad[i]);
    refuse(cairn_parse_size, NULL);
}

static void what_was_meant_is_named(void **state)
{
    (void)state;
    static const struct {
        parser *parse;
        const char *text, *meant;
    } cases[] = {
        {cairn_parse_size, "5gb", "did you mean 5GB?"},
        {cairn_parse_size, "5 GiB", "did you mean 5GiB?"},
        {cairn_parse_size, "5G", "did you mean 5GB or 5GiB?"},
        {cairn_parse_size, "5Gb", "Gb are bits"},
        {cairn_parse_rate, "12GB", "did you mean 12GB/s?"},
        {cairn_parse_rate, "12 gb", "did you mean 12GB/s?"},
        {cairn_parse_rate, "12gb/s", "did you mean 12GB/s?"},
        {cairn_parse_rate, "12G", "did you mean 12GB/s or 12GiB/s?"},
        {cairn_parse_rate, "12G/s", "did you mean 12GB/s or 12GiB/s?"},
        {cairn_parse_rate, "12Gb", "Gb are bits"},
        {cairn_parse_rate, "12000", "did you mean 12000/s?"},
        {cairn_parse_duration, "5", "did you mean 5s?"},
        {cairn_parse_duration, "5min", "did you mean 5m?"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cairn_error error;
        int64_t value;
        assert_int_equal(cases[i].parse(cases[i].text, &value, &error), CAIRN_BAD_INPUT);
        if (!strstr(error.message, cases[i].meant))
            fail_msg("\"%s\": \"%s\" is not in: %s", cases[i].text, cases[i].meant, error.message);
    }
    cairn_error error;
    int64_t value;
    assert_int_equal(cairn_parse_rate("1.5", &value, &error), CAIRN_BAD_INPUT);
    assert_null(strstr(error.message, "did you mean"));
}

static void rates_and_durations(void **state)
{
    (void)state;
    expect(cairn_parse_rate, "12GB/s", 12000000000);
    expect(cairn_parse_rate, "1.5GiB/s", 1610612736);
    expect(cairn_parse_rate, "17/s", 17);
    expect(cairn_parse_rate, "17B/s", 17);
    refuse(cairn_parse_rate, "12GB");
    refuse(cairn_parse_rate, "12GB/m");
    refuse(cairn_parse_rate, "/s");
    refuse(cairn_parse_rate, "1.5/s");
    expect(cairn_parse_duration, "500ms", 500000000);
    expect(cairn_parse_duration, "1ns", 1);
    expect(cairn_parse_duration, "1.9ns", 1);
    expect(cairn_parse_duration, "2.5us", 2500);
    expect(cairn_parse_duration, "0.25s", 250000000);
    expect(cairn_parse_duration, "1.5m", 90000000000);
    refuse(cairn_parse_duration, "5");
    refuse(cairn_parse_duration, "5h");
    refuse(cairn_parse_duration, "-5s");
    refuse(cairn_parse_duration, "9223372037s");
}

static cairn_problem *some_chain(bool machine)
{
    test_random random = test_random_seeded(1);
    test_chain_shape shape = {.machine = machine};
    return test_random_chain(&random, &shape);
}

static cairn_options *new_options(void)
{
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    return options;
}

static void the_table_is_complete(void **state)
{
    (void)state;
    static const char *const names[] = {
        "budget",   "solver",     "host-budget", "to-host", "to-device", "shared-link",  "latency",  "slots",
        "segments", "time-limit", "iterations",  "seed",    "threads",   "memory-limit", "minimize", "objective",
    };
    size_t count = sizeof(names) / sizeof(names[0]);
    for (size_t i = 0; i < count; i++) {
        const cairn_option_info *info = cairn_option_at((int)i);
        assert_non_null(info);
        assert_string_equal(info->name, names[i]);
        assert_true(strlen(info->help) > 5 && strlen(info->fallback) > 0);
        assert_true((info->type == CAIRN_OPTION_CHOICE) == (info->choices != NULL));
    }
    assert_null(cairn_option_at((int)count));
    assert_null(cairn_option_at(-1));
}

static void defaults_are_those_of_the_page(void **state)
{
    (void)state;
    crn_settings settings;
    cairn_problem *problem = some_chain(false);
    assert_int_equal(crn_options_resolve(NULL, problem, &settings, NULL), CAIRN_OK);
    assert_false(settings.has_budget);
    assert_string_equal(settings.solver, "auto");
    assert_int_equal(settings.slots, 500);
    assert_int_equal(settings.segments, CAIRN_NONE);
    assert_int_equal(settings.time_limit_ns, CAIRN_NONE);
    assert_int_equal(settings.iterations, CAIRN_NONE);
    assert_int_equal(settings.seed, 0);
    assert_int_equal(settings.threads, CAIRN_NONE);
    assert_int_equal(settings.memory_limit_bytes, CAIRN_NONE);
    assert_false(settings.minimize_memory || settings.objective_eq6 || settings.has_machine);
    cairn_problem_free(problem);
}

static void options_are_set_from_texts_and_numbers(void **state)
{
    (void)state;
    crn_settings settings;
    cairn_problem *problem = some_chain(false);
    cairn_options *options = new_options();
    static const char *const pairs[][2] = {
        {"budget", "1.5KiB"},     {"solver", "store-all"}, {"slots", "77"},      {"segments", "3"},
        {"time-limit", "2s"},     {"iterations", "100"},   {"seed", "9"},        {"threads", "2"},
        {"memory-limit", "1GiB"}, {"minimize", "memory"},  {"objective", "eq6"},
    };
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        assert_int_equal(cairn_options_set(options, pairs[i][0], pairs[i][1], NULL), CAIRN_OK);
    assert_int_equal(crn_options_resolve(options, problem, &settings, NULL), CAIRN_OK);
    assert_true(settings.has_budget && settings.budget_bytes == 1536);
    assert_string_equal(settings.solver, "store-all");
    assert_true(settings.slots == 77 && settings.segments == 3 && settings.time_limit_ns == 2000000000);
    assert_true(settings.iterations == 100 && settings.seed == 9 && settings.threads == 2);
    assert_true(settings.memory_limit_bytes == 1073741824 && settings.minimize_memory && settings.objective_eq6);
    assert_int_equal(cairn_options_set(options, "budget", "none", NULL), CAIRN_OK);
    assert_int_equal(cairn_options_set_int(options, "slots", 12, NULL), CAIRN_OK);
    assert_int_equal(crn_options_resolve(options, problem, &settings, NULL), CAIRN_OK);
    assert_true(settings.has_budget && settings.budget_bytes == CAIRN_NONE && settings.slots == 12);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void bad_options_are_named(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"budget", "1.5"},
        {"budget", "-1"},
        {"solver", "no-such"},
        {"slots", "0"},
        {"slots", "1000001"},
        {"slots", "many"},
        {"segments", "0"},
        {"threads", "0"},
        {"threads", "257"},
        {"seed", "-1"},
        {"seed", "9223372036854775808"},
        {"minimize", "both"},
        {"minimize", "time|memory"},
        {"minimize", ""},
        {"objective", "eq"},
        {"shared-link", "yes"},
        {"to-host", "0/s"},
        {"to-host", "1GB"},
        {"latency", "1"},
        {"solver", "a-name-that-is-far-too-long-for-a-solver"},
    };
    cairn_options *options = new_options();
    cairn_error error;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (cairn_options_set(options, bad[i][0], bad[i][1], &error) != CAIRN_BAD_INPUT)
            fail_msg("%s=%s accepted", bad[i][0], bad[i][1]);
        assert_string_equal(error.path, bad[i][0]);
        assert_non_null(strstr(error.message, bad[i][0]));
    }
    assert_int_equal(cairn_options_set(options, "buget", "1", &error), CAIRN_BAD_INPUT);
    assert_non_null(strstr(error.message, "buget"));
    assert_int_equal(cairn_options_set(options, NULL, "1", &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_options_set(options, "budget", NULL, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_options_set_int(options, "minimize", 1, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_options_set_int(options, "budget", -1, &error), CAIRN_BAD_INPUT);
    assert_int_equal(cairn_options_set_int(options, "to-host", 0, &error), CAIRN_BAD_INPUT);
    cairn_options_free(options);
    cairn_options_free(NULL);
}

static void machine_options_complete_or_override(void **state)
{
    (void)state;
    crn_settings settings;
    cairn_error error;
    cairn_problem *without = some_chain(false), *with = some_chain(true);
    cairn_options *options = new_options();
    cairn_options_set(options, "latency", "3us", NULL);
    assert_int_equal(crn_options_resolve(options, without, &settings, &error), CAIRN_BAD_INPUT);
    assert_non_null(strstr(error.message, "to-device"));
    assert_int_equal(crn_options_resolve(options, with, &settings, &error), CAIRN_OK);
    const cairn_machine *own = cairn_problem_info_of(with)->machine;
    assert_true(settings.has_machine && settings.machine.latency_ns == 3000);
    assert_int_equal(settings.machine.host_bytes, own->host_bytes);
    assert_int_equal(settings.machine.shared_link, own->shared_link);
    cairn_options_set(options, "host-budget", "1MiB", NULL);
    cairn_options_set(options, "to-host", "1GB/s", NULL);
    cairn_options_set(options, "to-device", "2GB/s", NULL);
    cairn_options_set(options, "shared-link", "true", NULL);
    assert_int_equal(crn_options_resolve(options, without, &settings, &error), CAIRN_OK);
    assert_true(settings.has_machine && settings.machine.host_bytes == 1048576 && settings.machine.shared_link);
    assert_int_equal(settings.machine.to_host_bytes_per_s, 1000000000);
    assert_int_equal(settings.machine.to_device_bytes_per_s, 2000000000);
    cairn_options_free(options);
    cairn_problem_free(without);
    cairn_problem_free(with);
}

static void an_option_of_another_solver_is_refused(void **state)
{
    (void)state;
    static const char *const cases[][4] = {
        /* solver, option, value, who takes it */
        {"chain-exact", "slots", "500", "chain-dp"},
        {"store-all", "segments", "2", "periodic"},
        {"chain-dp", "objective", "eq9", "brute-select"},
        {"chain-weak", "segments", "2", "joint-chain"},
        {"chen-greedy", "segments", "2", "these do: periodic"},
        {"auto", "objective", "eq6", "brute-select"},
    };
    cairn_problem *problem = some_chain(false);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cairn_error error;
        cairn_info info;
        cairn_limits limits;
        cairn_options *own, *options = test_options(cases[i][0], 1 << 20, "iterations=3 seed=1");
        assert_int_equal(cairn_options_set(options, cases[i][1], cases[i][2], NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_UNSUPPORTED);
        assert_string_equal(error.path, cases[i][1]);
        assert_non_null(strstr(error.message, cases[i][3]));
        assert_int_equal(cairn_limits_of(NULL, problem, options, &limits, NULL), CAIRN_UNSUPPORTED);
        assert_int_equal(cairn_solver_accepts(cases[i][0], problem, options, NULL), CAIRN_UNSUPPORTED);
        assert_int_equal(cairn_options_for(NULL, options, "store-all", &own, NULL), CAIRN_OK);
        assert_int_equal(cairn_limits_of(NULL, problem, own, &limits, NULL), CAIRN_OK);
        cairn_options_free(own);
        cairn_options_free(options);
    }
    cairn_problem_free(problem);
}

static void the_objective_that_a_solver_has_can_be_given(void **state)
{
    (void)state;
    static const char *const cases[][4] = {
        /* solver, its objective, another one, who takes that */
        {"select-linear", "eq9", "eq6", "no option objective=eq6; these do: select-cubic, brute-select"},
        {"select-quadratic", "eq9", "eq6", "select-cubic"},
        {"select-cubic", "eq6", "eq9", "select-linear"},
    };
    cairn_problem *problem = some_chain(false);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cairn_error error;
        cairn_info info;
        cairn_options *own, *options = test_options(cases[i][0], -1, "minimize=memory");
        assert_int_equal(cairn_options_set(options, "objective", cases[i][1], NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, NULL), CAIRN_OK);
        cairn_info_clear(&info);
        assert_int_equal(cairn_options_set(options, "objective", cases[i][2], NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, options, NULL, &info, &error), CAIRN_UNSUPPORTED);
        assert_non_null(strstr(error.message, cases[i][3]));
        assert_int_equal(cairn_options_for(NULL, options, cases[i][0], &own, NULL), CAIRN_OK);
        assert_int_equal(cairn_solve(NULL, problem, own, NULL, &info, NULL), CAIRN_OK);
        cairn_info_clear(&info);
        cairn_options_free(own);
        cairn_options_free(options);
    }
    cairn_problem_free(problem);
}

static void a_bound_takes_no_option_of_a_solver(void **state)
{
    (void)state;
    cairn_bound bound;
    cairn_error error;
    cairn_problem *problem = some_chain(false);
    cairn_options *options = test_options("auto", 1 << 20, "slots=5 iterations=3");
    assert_int_equal(cairn_bound_of(NULL, problem, options, &bound, &error), CAIRN_UNSUPPORTED);
    assert_non_null(strstr(error.message, "a bound takes no option slots"));
    cairn_options_free(options);
    cairn_problem_free(problem);
}

static void auto_takes_what_one_of_those_takes_that_it_asks(void **state)
{
    (void)state;
    test_random random = test_random_seeded(2);
    test_graph_shape shape = test_graph_of_everything(5);
    cairn_problem *chain = some_chain(false), *graph = test_random_graph(&random, &shape);
    static const char *const settings[] = {"slots=20", "segments=1", "iterations=3 seed=1"};
    for (int i = 0; i < 3; i++) {
        cairn_options *options = test_options("auto", 1 << 20, settings[i]);
        assert_int_equal(cairn_solver_accepts("auto", chain, options, NULL), CAIRN_OK);
        assert_int_equal(cairn_solver_accepts("auto", graph, options, NULL), i < 2 ? CAIRN_UNSUPPORTED : CAIRN_OK);
        cairn_options_free(options);
    }
    cairn_problem_free(chain);
    cairn_problem_free(graph);
}

static void options_are_made_for_another_solver(void **state)
{
    (void)state;
    crn_settings settings;
    cairn_problem *problem = some_chain(false);
    cairn_options *own, *options = test_options("auto", 77, "slots=20 segments=2 iterations=3 threads=1");
    assert_int_equal(cairn_options_for(NULL, options, "periodic", &own, NULL), CAIRN_OK);
    assert_int_equal(crn_options_resolve(own, problem, &settings, NULL), CAIRN_OK);
    assert_string_equal(settings.solver, "periodic");
    assert_true(settings.budget_bytes == 77 && settings.slots == 500 && settings.segments == 2);
    assert_true(settings.iterations == 3 && settings.threads == 1);
    cairn_options_free(own);
    assert_int_equal(cairn_options_for(NULL, options, "periodical", &own, NULL), CAIRN_BAD_INPUT);
    assert_null(own);
    cairn_options_free(options);
    cairn_problem_free(problem);
}

/* An option that is somebody's own is in the table; auto has those of all. */
static void own_options_are_known(void **state)
{
    (void)state;
    assert_true(cairn_solver_has_option("chain-dp", "slots") && cairn_solver_has_option("joint-chain", "seed"));
    assert_false(cairn_solver_has_option("chain-dp", "slot") || cairn_solver_has_option("chain-dp", "slotss"));
    assert_false(cairn_solver_has_option("no-such", "slots") || cairn_solver_has_option(NULL, "slots"));
    assert_false(cairn_solver_has_option("chain-dp", NULL) || cairn_solver_has_option("chain-dp", "time-limit"));
    for (int i = 0; cairn_solver_at(i); i++) {
        const char *solver = cairn_solver_at(i)->name;
        for (int k = 0; cairn_option_at(k); k++)
            assert_true(cairn_solver_has_option("auto", cairn_option_at(k)->name) ||
                        !cairn_solver_has_option(solver, cairn_option_at(k)->name));
    }
}

static cairn_status make_options(const cairn_env *env, void *context)
{
    cairn_options *options;
    (void)context;
    cairn_options *other = NULL;
    cairn_status status = cairn_options_new(env, &options, NULL);
    if (status == CAIRN_OK)
        status = cairn_options_for(env, options, "store-all", &other, NULL);
    cairn_options_free(other);
    cairn_options_free(options);
    return status;
}

static void failing_allocations_leave_nothing(void **state)
{
    (void)state;
    assert_true(test_every_allocation_fails(make_options, NULL) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_parsed_exactly),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(what_was_meant_is_named),
        cmocka_unit_test(rates_and_durations),
        cmocka_unit_test(the_table_is_complete),
        cmocka_unit_test(defaults_are_those_of_the_page),
        cmocka_unit_test(options_are_set_from_texts_and_numbers),
        cmocka_unit_test(bad_options_are_named),
        cmocka_unit_test(machine_options_complete_or_override),
        cmocka_unit_test(an_option_of_another_solver_is_refused),
        cmocka_unit_test(the_objective_that_a_solver_has_can_be_given),
        cmocka_unit_test(a_bound_takes_no_option_of_a_solver),
        cmocka_unit_test(auto_takes_what_one_of_those_takes_that_it_asks),
        cmocka_unit_test(options_are_made_for_another_solver),
        cmocka_unit_test(own_options_are_known),
        cmocka_unit_test(failing_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
