/* cairn convert: a chain as a graph. */
#include <stdio.h>

#include "cli.h"

/* A graph has one way to run a stage, so what the others offered is lost: said, never silent. */
static void name_what_is_left_out(const cairn_chain *chain)
{
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        if (stage->option_count > 1)
            cli_note("stage %d%s%s has %d options; the graph has the first, \"%s\"", i + 1, stage->name[0] ? ", " : "",
                     stage->name, stage->option_count, stage->options[0].name);
    }
}

/* The same graph with the machine that the flags ask for. */
static cairn_status put_on_machine(const cli_call *call, cairn_problem **graph, cairn_error *error)
{
    cairn_machine machine;
    bool present;
    cairn_problem *moved;
    cairn_problem_info info = *cairn_problem_info_of(*graph);
    cairn_status status = cairn_options_machine(call->options, *graph, &machine, &present, error);
    info.machine = present ? &machine : NULL;
    if (status == CAIRN_OK)
        status = cairn_problem_new_graph(NULL, cairn_problem_graph(*graph), &info, &moved, error);
    if (status != CAIRN_OK)
        return status;
    cairn_problem_free(*graph);
    *graph = moved;
    return CAIRN_OK;
}

static void print_summary(const cairn_graph *graph)
{
    char value[32], note[64];
    snprintf(value, sizeof(value), "%d", graph->node_count);
    snprintf(note, sizeof(note), "%d before the backward", graph->backward_begins_at);
    cli_row("nodes", value, note);
}

static cli_exit hand_out(const cli_call *call, const cairn_problem *graph)
{
    cairn_error error;
    char *text = NULL;
    size_t length = 0;
    bool prints = call->json || !call->output;
    const cairn_sink out = cli_stdout_sink();
    cairn_status status = cairn_problem_write(NULL, graph, &text, &length, &error);
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    if (call->output)
        status = cli_write_file(call->output, text, length, &error);
    if (status == CAIRN_OK && prints)
        (void)out.write(out.context, text, length); /* what fails to be written is told by cli_close_stdout */
    cairn_text_free(NULL, text, length);
    if (status != CAIRN_OK)
        return cli_fail_to_write(call, call->output, &error);
    if (!prints && !cli_stdout_is_taken(call))
        print_summary(cairn_problem_graph(graph));
    return CLI_FOUND;
}

static cli_exit run(cli_call *call)
{
    cairn_error error;
    cairn_problem *graph;
    cli_exit result = cli_check_outputs(call);
    if (result == CLI_FOUND)
        result = cli_load_problem(call);
    if (result != CLI_FOUND)
        return result;
    cairn_status status = cairn_chain_to_graph(NULL, call->problem, &graph, &error);
    if (status == CAIRN_OK && call->has_machine_flag)
        status = put_on_machine(call, &graph, &error);
    if (status == CAIRN_OK) {
        name_what_is_left_out(cairn_problem_chain(call->problem));
        result = hand_out(call, graph);
    } else {
        result = cli_fail(call, call->operands[0], &error);
    }
    cairn_problem_free(graph);
    return result;
}

const cli_command cli_convert = {
    .name = "convert",
    .operands = "CHAIN",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_MACHINE | CLI_OUTPUT,
    .summary = "a chain as a graph, for the graph solvers",
    .details = "Prints the graph, or writes it where -o says. A stage with several options runs by its first, which is "
               "said on\n"
               "standard error. docs/explanation/solvers/convert.md says where both problems have the same answers.",
    .run = run,
};
