/* cairn help: what there is to type. */
#include <stdio.h>
#include <string.h>

#include "cli.h"

static const char conventions[] =
    "SIZE      bytes, or a number with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024): 8GiB\n"
    "RATE      a SIZE followed by /s: 12GB/s\n"
    "DURATION  a number with ns, us, ms, s or m: 500ms\n"
    "-         as an operand: standard input\n"
    "\n"
    "Exit codes: 0 found or valid, 1 infeasible, unknown or not valid, 2 usage or bad input, 3 internal,\n"
    "130 interrupted (after the best answer so far).\n";

static void show_flag(const char *flag, const char *help)
{
    printf("  %-26s %s\n", flag, help);
}

static void print_overview(void)
{
    printf("Cairn %s: which activations to keep, recompute or offload to host memory within a byte budget.\n\n",
           cairn_version());
    printf("usage: cairn COMMAND PROBLEM [SCHEDULE] [flags]\n\n");
    for (int i = 0; cli_commands[i]; i++)
        printf("  %-9s %-17s %s\n", cli_commands[i]->name, cli_commands[i]->operands, cli_commands[i]->summary);
    printf("  %-9s %-17s %s\n\n", "--version", "", "the version");
    printf("%s\n", conventions);
    printf("`cairn help COMMAND` lists the flags of a command, `cairn help SOLVER` describes a solver.\n");
}

static void print_command(const cli_command *command)
{
    printf("usage: cairn %s%s%s%s\n\n%s\n", command->name, *command->operands ? " " : "", command->operands,
           command->flags ? " [flags]" : "", command->details);
    if (command->flags) {
        printf("\n");
        cli_list_flags(command, show_flag);
        printf("\n%s", conventions);
    }
}

static void print_solver(const cairn_solver_info *solver)
{
    char text[CAIRN_ERROR_MESSAGE_MAX];
    printf("%s: %s\n", solver->name, solver->summary);
    if (solver->optimal_in[0])
        printf("  optimal        %s\n", cli_optimal_text(solver, text, sizeof(text)));
    if (solver->source[0])
        printf("  source         %s\n", solver->source);
    if (solver->cost[0])
        printf("  cost           %s\n", solver->cost);
    cli_print_options("  options       ", solver->name);
    if (!solver->available)
        printf("  not available  %s\n", cli_why_absent(solver, text, sizeof(text)));
    printf("\n%s", cli_symbols);
}

/* Commands first, then solvers. */
static const char *topic_at(const void *context, int index)
{
    (void)context;
    int i = 0;
    for (; cli_commands[i]; i++)
        if (i == index)
            return cli_commands[i]->name;
    const cairn_solver_info *solver = cairn_solver_at(index - i);
    return solver ? solver->name : NULL;
}

static cli_exit run(cli_call *call)
{
    const char *topic = call->operand_count > 0 ? call->operands[0] : NULL;
    if (!topic) {
        print_overview();
        return CLI_FOUND;
    }
    if (cli_command_find(topic)) {
        print_command(cli_command_find(topic));
        return CLI_FOUND;
    }
    if (cli_solver_find(topic)) {
        print_solver(cli_solver_find(topic));
        return CLI_FOUND;
    }
    const char *near = cli_nearest(topic, topic_at, NULL);
    if (near)
        return cli_misuse(call, "there is no command or solver \"%s\"; did you mean \"%s\"?", topic, near);
    return cli_misuse(call, "there is no command or solver \"%s\"; `cairn help` lists the commands", topic);
}

const cli_command cli_help = {
    .name = "help",
    .operands = "[COMMAND]",
    .operands_max = 1,
    .summary = "this text, or the flags of a command",
    .details = "Lists the commands, or describes a command and its flags, or a solver.",
    .run = run,
};
