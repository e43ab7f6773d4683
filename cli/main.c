/* The cairn command: which command is meant, and the exit code. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

extern const cli_command cli_solve, cli_verify, cli_simulate, cli_limits, cli_bound, cli_compare, cli_max_batch,
    cli_convert, cli_solvers, cli_help;

const cli_command *const cli_commands[] = {
    &cli_solve,     &cli_verify,  &cli_simulate, &cli_limits, &cli_bound, &cli_compare,
    &cli_max_batch, &cli_convert, &cli_solvers,  &cli_help,   NULL,
};

const cli_command *cli_command_find(const char *name)
{
    for (int i = 0; cli_commands[i]; i++)
        if (strcmp(cli_commands[i]->name, name) == 0)
            return cli_commands[i];
    return NULL;
}

static const char *command_name_at(const void *context, int index)
{
    (void)context;
    return cli_commands[index] ? cli_commands[index]->name : NULL;
}

static const char *flag_at(const void *context, int index)
{
    static const char *const flags[] = {"--version", "--help", NULL};
    (void)context;
    return flags[index];
}

static cli_exit unknown_command(const cli_call *call, const char *word)
{
    const char *near = cli_nearest(word, word[0] == '-' ? flag_at : command_name_at, NULL);
    if (near)
        return cli_misuse(call, "there is no command \"%s\"; did you mean \"%s\"?", word, near);
    if (word[0] == '-')
        return cli_misuse(
            call, "\"%s\" stands where a command is expected: flags come after one; `cairn help` lists them", word);
    return cli_misuse(call, "there is no command \"%s\"; `cairn help` lists them", word);
}

/* Errors are printed as JSON wherever --json stands, also when they come before it. */
static bool asks_for_json(int count, char **words)
{
    for (int i = 0; i < count && strcmp(words[i], "--") != 0; i++)
        if (strcmp(words[i], "--json") == 0)
            return true;
    return false;
}

static cli_exit run_help(const char *topic)
{
    cli_call call = {.command = &cli_help, .operands = {topic}, .operand_count = topic ? 1 : 0};
    return cli_help.run(&call);
}

static cli_exit run_command(cli_call *call, int count, char **words)
{
    cairn_error error;
    if (cairn_options_new(NULL, &call->options, &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    cli_exit result = cli_parse(call, count, words);
    if (result == CLI_FOUND)
        result = call->wants_help ? run_help(call->command->name) : call->command->run(call);
    cairn_schedule_free(call->schedule);
    cairn_problem_free(call->problem);
    cairn_options_free(call->options);
    return result;
}

static cli_exit dispatch(int count, char **words)
{
    cli_call call = {.json = asks_for_json(count, words)};
    if (count == 0)
        return cli_misuse(&call, "no command is given; `cairn help` lists them");
    if (strcmp(words[0], "--version") == 0) {
        if (count > 1)
            return cli_misuse(&call, "\"%s\" is one word too many; usage: cairn --version", words[1]);
        printf("cairn %s\n", cairn_version());
        return CLI_FOUND;
    }
    bool wants_help = strcmp(words[0], "--help") == 0 || strcmp(words[0], "-h") == 0;
    call.command = wants_help ? &cli_help : cli_command_find(words[0]);
    if (!call.command)
        return unknown_command(&call, words[0]);
    return run_command(&call, count - 1, words + 1);
}

int main(int argc, char **argv)
{
    /* A pipe that closes and a file that may not grow are errors of the write, not the end of the process. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    return (int)cli_close_stdout(dispatch(argc > 0 ? argc - 1 : 0, argv + 1));
}
