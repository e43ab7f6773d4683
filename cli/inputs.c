/* Problems and schedules from files. */
#include <string.h>

#include "cli.h"

typedef struct input {
    char *text;
    size_t length;
} input;

static cli_exit load_text(const cli_call *call, const char *path, input *in)
{
    cairn_error error;
    if (!*path)
        return cli_misuse(call, "the name of a file to read is empty");
    if (cairn_file_read(NULL, path, &in->text, &in->length, &error) != CAIRN_OK)
        return cli_fail(call, path, &error);
    return CLI_FOUND;
}

/* A machine that does not make sense with the problem is found here, in every command that takes no schedule. */
static cli_exit check_machine(const cli_call *call)
{
    cairn_machine machine;
    bool present;
    cairn_error error;
    if (call->has_machine_flag &&
        cairn_options_machine(call->options, call->problem, &machine, &present, &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    return CLI_FOUND;
}

static cli_exit load_problem(cli_call *call)
{
    input in;
    cairn_error error;
    cli_exit result = load_text(call, call->operands[0], &in);
    if (result != CLI_FOUND)
        return result;
    if (cairn_problem_read(NULL, in.text, in.length, &call->problem, &error) != CAIRN_OK)
        result = cli_fail(call, call->operands[0], &error);
    cairn_text_free(NULL, in.text, in.length);
    return result;
}

cli_exit cli_load_problem(cli_call *call)
{
    cli_exit result = load_problem(call);
    return result == CLI_FOUND ? check_machine(call) : result;
}

static cairn_status copy_ops(cairn_builder *builder, const cairn_schedule *from, const cairn_schedule_info *info,
                             cairn_schedule **schedule, cairn_error *error)
{
    const cairn_op *ops = cairn_schedule_ops(from);
    cairn_status status = CAIRN_OK;
    for (int64_t i = 0; status == CAIRN_OK && i < cairn_schedule_count(from); i++)
        status = cairn_builder_add(builder, ops[i], error);
    return status == CAIRN_OK ? cairn_builder_finish(builder, info, schedule, error) : status;
}

/* The same schedule on another machine. */
static cli_exit put_on_machine(cli_call *call, const cairn_machine *machine)
{
    cairn_schedule_info info = *cairn_schedule_info_of(call->schedule);
    cairn_schedule *moved = NULL;
    cairn_builder *builder;
    cairn_error error;
    info.machine = machine;
    cairn_status status = cairn_builder_new(NULL, call->problem, &builder, &error);
    if (status == CAIRN_OK)
        status = copy_ops(builder, call->schedule, &info, &moved, &error);
    cairn_builder_free(builder);
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    cairn_schedule_free(call->schedule);
    call->schedule = moved;
    return CLI_FOUND;
}

static cli_exit apply_machine(cli_call *call)
{
    cairn_machine machine;
    bool present;
    cairn_error error;
    if (!call->has_machine_flag)
        return CLI_FOUND;
    if (cairn_schedule_info_of(call->schedule)->machine) {
        cli_note("the schedule brings a machine of its own, so the flags on the machine do not matter");
        return CLI_FOUND;
    }
    if (cairn_options_machine(call->options, call->problem, &machine, &present, &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    return present ? put_on_machine(call, &machine) : CLI_FOUND;
}

cli_exit cli_load_schedule(cli_call *call)
{
    input in;
    cairn_error error;
    cli_exit result = load_problem(call);
    if (result == CLI_FOUND)
        result = load_text(call, call->operands[1], &in);
    if (result != CLI_FOUND)
        return result;
    if (cairn_schedule_read(NULL, call->problem, in.text, in.length, &call->schedule, &error) != CAIRN_OK)
        result = cli_fail(call, call->operands[1], &error);
    cairn_text_free(NULL, in.text, in.length);
    return result == CLI_FOUND ? apply_machine(call) : result;
}
