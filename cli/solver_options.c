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
