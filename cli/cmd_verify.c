/* cairn verify: is a schedule valid within the budget, and does it take what it says? */
#include "cli.h"

static cli_exit run(cli_call *call)
{
    cairn_replay replay;
    cairn_error error;
    int64_t budget_bytes;
    cli_exit result = cli_budget(call, CAIRN_RECORDED, &budget_bytes);
    if (result == CLI_FOUND)
        result = cli_load_schedule(call);
    if (result != CLI_FOUND)
        return result;
    if (cairn_verify(NULL, call->problem, call->schedule, budget_bytes, NULL, &replay, &error) != CAIRN_OK)
        return cli_fail(call, call->operands[1], &error);
    return cli_print_replay(call, &replay, budget_bytes);
}

const cli_command cli_verify = {
    .name = "verify",
    .operands = "PROBLEM SCHEDULE",
    .operands_min = 2,
    .operands_max = 2,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE,
    .budget = "the recorded one",
    .summary = "check a schedule against its problem",
    .details = "Replays the schedule under --budget, else under the budget that it records, and compares the makespan "
               "and the\n"
               "peak that it records. Exit code 1: it is not valid; the first operation at fault is named.",
    .run = run,
};
