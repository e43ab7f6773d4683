/* cairn simulate: what a schedule takes, and a timeline of it. */
#include "cli.h"

static cli_exit run(cli_call *call)
{
    cairn_replay replay;
    cairn_error error;
    int64_t budget_bytes;
    cli_exit result = cli_check_outputs(call);
    if (result == CLI_FOUND)
        result = cli_budget(call, CAIRN_RECORDED, &budget_bytes);
    if (result == CLI_FOUND)
        result = cli_load_schedule(call);
    if (result != CLI_FOUND)
        return result;
    if (cairn_simulate(NULL, call->problem, call->schedule, budget_bytes, NULL, &replay, &error) != CAIRN_OK)
        return cli_fail(call, call->operands[1], &error);
    if (replay.valid)
        result = cli_write_trace(call, call->schedule, budget_bytes);
    return result == CLI_FOUND ? cli_print_replay(call, &replay, budget_bytes) : result;
}

const cli_command cli_simulate = {
    .name = "simulate",
    .operands = "PROBLEM SCHEDULE",
    .operands_min = 2,
    .operands_max = 2,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE | CLI_TRACE,
    .budget = "the recorded one",
    .summary = "replay a schedule: time, memory, a timeline",
    .details = "Replays the schedule under --budget, else under the budget that it records (\"none\" for no limit).\n"
               "--trace writes the lanes and the memory curves for ui.perfetto.dev; of a schedule that is not valid,\n"
               "nothing is written. Exit code 1: it is not valid.",
    .run = run,
};
