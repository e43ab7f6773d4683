/* Solvers by name, and which options are which solver's own. */
#include <stdio.h>
#include <string.h>

#include "cli.h"

const cairn_solver_info *cli_solver_find(const char *name)
{
    const cairn_solver_info *solver;
    for (int i = 0; (solver = cairn_solver_at(i)); i++)
        if (strcmp(solver->name, name) == 0)
            return solver;
    return NULL;
}

const char *cli_optimal_text(const cairn_solver_info *solver, char *out, size_t size)
{
    const char *in = solver->optimal_in;
    if (strcmp(in, "all") == 0)
        snprintf(out, size, "among all schedules");
    else if (strncmp(in, "eq", 2) == 0)
        snprintf(out, size, "by its objective, eq. %s", in + 2);
    else
        snprintf(out, size, *in ? "among %s schedules" : "%s", in);
    return out;
}

const char *cli_why_absent(const cairn_solver_info *solver, char *out, size_t size)
{
    static const cairn_node node = {.name = "", .cost_ns = 1, .alias_of = -1};
    static const cairn_stage_option option = {.name = "", .forward_ns = 1, .backward_ns = 1};
    static const cairn_stage stage = {.name = "", .option_count = 1, .options = &option};
    const cairn_chain chain = {.stage_count = 1, .stages = &stage};
    const cairn_graph graph = {.node_count = 1, .nodes = &node, .backward_begins_at = -1};
    cairn_problem *problem = NULL;
    cairn_options *options = NULL;
    cairn_error error;
    cairn_status status = solver->takes_chains ? cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error)
                                               : cairn_problem_new_graph(NULL, &graph, NULL, &problem, &error);
    if (status == CAIRN_OK)
        status = cairn_options_new(NULL, &options, &error);
    if (status == CAIRN_OK)
        status = cairn_solver_accepts(solver->name, problem, options, &error);
    snprintf(out, size, "%s", status == CAIRN_UNAVAILABLE ? error.message : "not built in");
    cairn_options_free(options);
    cairn_problem_free(problem);
    return out;
}

void cli_print_options(const char *heading, const char *solver)
{
    const cairn_option_info *option;
    bool any = false;
    for (int i = 0; (option = cairn_option_at(i)); i++)
        if (cairn_solver_has_option(solver, option->name)) {
            printf("%s --%s", any ? "" : heading, option->name);
            any = true;
        }
    if (any)
        printf("\n");
}

/* All that have got an option, on one line; false where it is nobody's own. */
static bool name_owners(const char *option, char *names, size_t size)
{
    const cairn_solver_info *solver;
    size_t length = 0;
    for (int i = 0; (solver = cairn_solver_at(i)); i++)
        if (cairn_solver_has_option(solver->name, option) && length < size)
            length += (size_t)snprintf(names + length, size - length, "%s%s", length > 0 ? ", " : "", solver->name);
    return length > 0;
}

void cli_tell_unused(const cli_call *call)
{
    char owners[400];
    const cairn_option_info *option;
    for (int i = 0; call->solver && (option = cairn_option_at(i)); i++)
        if (call->given >> i & 1 && option->type != CAIRN_OPTION_CHOICE && /* refused, or the solver's */
            !cairn_solver_has_option(call->solver, option->name) && name_owners(option->name, owners, sizeof(owners)))
            cli_note("%s has no use for --%s; these have: %s", call->solver, option->name, owners);
}
