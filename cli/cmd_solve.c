/* cairn solve: a schedule of a problem within a budget. */
#include "cli.h"

static cli_exit write_schedule(const cli_call *call)
{
    cairn_error error;
    char *text;
    size_t length;
    if (!call->output || !call->schedule)
        return CLI_FOUND;
    cairn_status status = cairn_schedule_write(NULL, call->schedule, &text, &length, &error);
    if (status == CAIRN_OK)
        status = cli_write_file(call->output, text, length, &error);
    cairn_text_free(NULL, text, length);
    return status == CAIRN_OK ? CLI_FOUND : cli_fail_to_write(call, call->output, &error);
}

static cli_exit print_answer(const cli_call *call, const cairn_info *info)
{
    cairn_error error;
    if (call->json)
        return cli_print_json(call, cli_info_json(info));
    if (cli_stdout_is_taken(call)) {
        if (!call->schedule)
            cli_note("%s%s%s", cairn_outcome_name(info->outcome), info->reason[0] ? ": " : "", info->reason);
        return CLI_FOUND;
    }
    if (cairn_report_answer(NULL, call->problem, call->schedule, info, cli_stdout_sink(), &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    return CLI_FOUND;
}

static cli_exit hand_out(const cli_call *call, const cairn_info *info)
{
    cli_exit result = write_schedule(call);
    if (result == CLI_FOUND && call->schedule)
        result = cli_write_trace(call, call->schedule, CAIRN_RECORDED);
    if (result == CLI_FOUND)
        result = print_answer(call, info);
    if (result != CLI_FOUND)
        return result;
    bool found = info->outcome == CAIRN_OUTCOME_OPTIMAL || info->outcome == CAIRN_OUTCOME_FEASIBLE;
    return cli_end_of_answer(found ? CLI_FOUND : CLI_NOT_FOUND);
}

static cli_exit run(cli_call *call)
{
    cairn_info info = {.checkpoints = NULL};
    cairn_error error;
    if (!call->budget && !call->minimizes_memory)
        return cli_misuse(call, "`cairn solve` needs --budget SIZE (--budget none for no limit), or --minimize memory");
    cli_exit result = cli_check_outputs(call);
    if (result == CLI_FOUND)
        result = cli_load_problem(call);
    if (result != CLI_FOUND)
        return result;
    const cairn_env *env = cli_watch_begin("solving");
    cairn_status status = cairn_solve(env, call->problem, call->options, &call->schedule, &info, &error);
    cli_watch_end();
    if (status == CAIRN_OK)
        cli_tell_unused(call);
    result = status == CAIRN_OK ? hand_out(call, &info) : cli_fail(call, NULL, &error);
    cairn_info_clear(&info);
    return result;
}

const cli_command cli_solve = {
    .name = "solve",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE | CLI_SOLVER | CLI_METHOD | CLI_SEARCH | CLI_LIMITS | CLI_GOAL |
             CLI_OUTPUT | CLI_TRACE,
    .summary = "find a schedule within a memory budget",
    .details =
        "Finds the fastest schedule whose memory stays within --budget, says how far from optimal it can be and how\n"
        "little memory would do, and writes it where -o says. --minimize memory asks the checkpoint selections for\n"
        "their least peak instead; the least of all schedules is what `cairn limits` tells.\n"
        "Exit code 1: there is no schedule within the budget, or none was found in time.",
    .run = run,
};
