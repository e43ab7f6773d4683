/* cairn solvers: what there is. */
#include <stdio.h>
#include <string.h>

#include "cli.h"

static json_t *options_json(const cairn_solver_info *solver)
{
    const cairn_option_info *option;
    json_t *list = json_array();
    bool failed = !list;
    for (int i = 0; (option = cairn_option_at(i)); i++)
        if (cairn_solver_has_option(solver->name, option->name))
            failed |= json_array_append_new(list, json_string(option->name)) != 0;
    if (!failed)
        return list;
    json_decref(list);
    return NULL;
}

static json_t *solver_json(const cairn_solver_info *solver)
{
    cli_object out = cli_object_new();
    cli_add_text(&out, "name", solver->name);
    cli_add_bool(&out, "available", solver->available);
    cli_add_bool(&out, "takes_chains", solver->takes_chains);
    cli_add_bool(&out, "takes_graphs", solver->takes_graphs);
    cli_add_bool(&out, "needs_machine", solver->needs_machine);
    cli_add_bool(&out, "minimizes_memory", solver->minimizes_memory);
    cli_add_bool(&out, "exhaustive", solver->exhaustive);
    cli_add_text(&out, "optimal_in", solver->optimal_in);
    cli_add_text(&out, "summary", solver->summary);
    cli_add_text(&out, "source", solver->source);
    cli_add_text(&out, "cost", solver->cost);
    cli_add(&out, "options", options_json(solver));
    return cli_object_take(&out);
}

static json_t *solvers_json(void)
{
    const cairn_solver_info *solver;
    cli_object out = cli_object_new();
    json_t *list = json_array();
    for (int i = 0; (solver = cairn_solver_at(i)); i++)
        out.failed |= json_array_append_new(list, solver_json(solver)) != 0;
    cli_add(&out, "solvers", list);
    return cli_object_take(&out);
}

const char cli_symbols[] = "n          the stages of a chain; in sqrt(n) for graphs, the values that may be kept\n"
                           "T, E       the nodes and the edges of a graph\n"
                           "S          the memory slots (--slots), unless the line says otherwise\n"
                           "eq. 6, 9   the memory of outputs that checkpoint selections minimize, by Hong et al.\n";

static void print_solver(const cairn_solver_info *solver)
{
    char text[CAIRN_ERROR_MESSAGE_MAX];
    printf("%-16s %s%s%s%s%s%s\n", solver->name, solver->takes_chains ? "chains" : "",
           solver->takes_chains && solver->takes_graphs ? ", " : "", solver->takes_graphs ? "graphs" : "",
           solver->needs_machine ? ", with a machine" : "", solver->exhaustive ? ", tiny ones" : "",
           solver->available ? "" : "; not available here");
    printf("%-16s %s\n", "", solver->summary);
    if (solver->minimizes_memory)
        printf("%-16s for --minimize memory\n", "");
    if (solver->optimal_in[0])
        printf("%-16s optimal: %s\n", "", cli_optimal_text(solver, text, sizeof(text)));
    if (solver->source[0])
        printf("%-16s source: %s\n", "", solver->source);
    if (solver->cost[0])
        printf("%-16s cost: %s\n", "", solver->cost);
    cli_print_options("                 options:", solver->name);
    if (!solver->available)
        printf("%-16s not available: %s\n", "", cli_why_absent(solver, text, sizeof(text)));
}

static cli_exit run(cli_call *call)
{
    const cairn_solver_info *solver;
    if (call->json)
        return cli_print_json(call, solvers_json());
    for (int i = 0; (solver = cairn_solver_at(i)); i++)
        print_solver(solver);
    printf("\n%s", cli_symbols);
    return CLI_FOUND;
}

const cli_command cli_solvers = {
    .name = "solvers",
    .operands = "",
    .flags = CLI_JSON,
    .summary = "the solvers, what they take and what they promise",
    .details =
        "Lists every solver: what problems it takes, among which schedules its answer is optimal, where it comes\n"
        "from, and what it costs.",
    .run = run,
};
