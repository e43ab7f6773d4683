/* cairn bound: what no schedule within a budget can beat. */
#include <stdio.h>

#include "cli.h"

static json_t *bound_json(const cairn_bound *bound)
{
    cli_object out = cli_object_new();
    cli_add_int(&out, "lower_bound_ns", bound->lower_bound_ns);
    cli_add_text(&out, "method", bound->method);
    cli_add_int(&out, "least_lower_bytes", bound->least_lower_bytes);
    return cli_object_take(&out);
}

/* A bound on the time of what does not exist holds, and says nothing: what is missing is memory. */
static void tell_least(const cli_call *call, const cairn_bound *bound, int64_t budget_bytes)
{
    char value[32];
    if (budget_bytes == CAIRN_NONE || bound->least_lower_bytes <= budget_bytes)
        return;
    cairn_format_bytes(bound->least_lower_bytes, value, sizeof(value));
    if (call->json)
        cli_note("no schedule fits the budget: every schedule needs at least %lld bytes",
                 (long long)bound->least_lower_bytes);
    else
        cli_row("least memory", value, "no schedule fits the budget: every schedule needs at least this");
}

static void print_bound(const cairn_bound *bound)
{
    char value[32], note[48];
    snprintf(note, sizeof(note), "by the method \"%s\"", bound->method);
    cli_row("lower bound", cairn_format_ns(bound->lower_bound_ns, value, sizeof(value)), note);
}

static cli_exit run(cli_call *call)
{
    int64_t budget_bytes;
    cairn_bound bound;
    cairn_error error;
    if (!call->budget)
        return cli_misuse(call, "`cairn bound` needs --budget SIZE, or --budget none");
    cli_exit result = cli_budget(call, CAIRN_NONE, &budget_bytes);
    if (result == CLI_FOUND)
        result = cli_load_problem(call);
    if (result != CLI_FOUND)
        return result;
    const cairn_env *env = cli_watch_begin("bounding");
    cairn_status status = cairn_bound_of(env, call->problem, call->options, &bound, &error);
    cli_watch_end();
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    if (call->json)
        result = cli_print_json(call, bound_json(&bound));
    else
        print_bound(&bound);
    tell_least(call, &bound, budget_bytes);
    return result == CLI_FOUND ? cli_end_of_answer(CLI_FOUND) : result;
}

const cli_command cli_bound = {
    .name = "bound",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE | CLI_LIMITS,
    .summary = "a proved lower bound on the time within a budget",
    .details =
        "Prints a time that no schedule of the problem within --budget can beat. Where it is proved that no schedule\n"
        "fits, it prints the least memory that any needs, too, and the exit code is 0 all the same: the bound holds.",
    .run = run,
};
