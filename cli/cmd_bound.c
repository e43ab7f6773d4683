/* cairn bound: what no schedule within a budget can beat. */
#include "cli.h"

static json_t *bound_json(const cairn_bound *bound)
{
    cli_object out = cli_object_new();
    cli_add_int(&out, "lower_bound_ns", bound->lower_bound_ns);
    cli_add_text(&out, "method", bound->method);
    return cli_object_take(&out);
}

static cli_exit run(cli_call *call)
{
    char value[32];
    cairn_bound bound;
    cairn_error error;
    if (!call->budget)
        return cli_misuse(call, "`cairn bound` needs --budget SIZE, or --budget none");
    cli_exit result = cli_load_problem(call);
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
        cli_row("lower bound", cairn_format_ns(bound.lower_bound_ns, value, sizeof(value)), bound.method);
    return result == CLI_FOUND && cli_was_interrupted() ? CLI_INTERRUPTED : result;
}

const cli_command cli_bound = {
    .name = "bound",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE | CLI_SEARCH,
    .summary = "a proved lower bound on the time within a budget",
    .details = "No schedule of the problem within --budget is faster.",
    .run = run,
};
