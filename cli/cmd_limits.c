/* cairn limits: how little memory would do, and what storing everything takes. */
#include <stdio.h>

#include "cli.h"

static json_t *limits_json(const cairn_limits *limits)
{
    cli_object out = cli_object_new();
    cli_add_int(&out, "least_bytes", limits->least_bytes);
    cli_add_bool(&out, "least_is_exact", limits->least_is_exact);
    cli_add_int(&out, "least_lower_bytes", limits->least_lower_bytes);
    cli_add_int(&out, "store_all_bytes", limits->store_all_bytes);
    cli_add_int(&out, "store_all_ns", limits->store_all_ns);
    return cli_object_take(&out);
}

static void print_limits(const cairn_limits *limits)
{
    char value[32], lower[32], note[96] = "not exact";
    if (limits->least_is_exact)
        snprintf(note, sizeof(note), "exact: no schedule needs less");
    else if (limits->least_lower_bytes != CAIRN_NONE)
        snprintf(note, sizeof(note), "not exact: every schedule needs %s",
                 cairn_format_bytes(limits->least_lower_bytes, lower, sizeof(lower)));
    cli_row("least memory", cairn_format_budget(limits->least_bytes, value, sizeof(value)), note);
    snprintf(note, sizeof(note), "in %s", cairn_format_ns(limits->store_all_ns, lower, sizeof(lower)));
    cli_row("store-all", cairn_format_budget(limits->store_all_bytes, value, sizeof(value)), note);
}

static cli_exit run(cli_call *call)
{
    cairn_limits limits;
    cairn_error error;
    cli_exit result = cli_load_problem(call);
    if (result != CLI_FOUND)
        return result;
    const cairn_env *env = cli_watch_begin("finding the least memory");
    cairn_status status = cairn_limits_of(env, call->problem, call->options, &limits, &error);
    cli_watch_end();
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    cli_tell_unused(call);
    if (call->json)
        result = cli_print_json(call, limits_json(&limits));
    else
        print_limits(&limits);
    return result == CLI_FOUND ? cli_end_of_answer(CLI_FOUND) : result;
}

const cli_command cli_limits = {
    .name = "limits",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_MACHINE | CLI_SOLVER | CLI_METHOD | CLI_SEARCH | CLI_LIMITS | CLI_GOAL,
    .summary = "the least feasible memory, and what store-all takes",
    .details =
        "Says at which budget the solver begins to succeed, and whether it is proved that no schedule needs less.",
    .run = run,
};
