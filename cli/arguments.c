/*
 * From words to a call. Flags are the command line's own, below, and the library's options, one each. Flags may stand
 * anywhere, "--" ends them, a value follows as "--flag value" or "--flag=value", and names are not abbreviated, so
 * that what works today means the same tomorrow. (That, and flags that come from a table made elsewhere, is why this is
 * not getopt_long.)
 */
#include <stdio.h>
#include <string.h>

#include "cli.h"

typedef struct flag {
    const char *name;  /* without dashes */
    const char *value; /* what its value is called; NULL = it has none */
    unsigned group;    /* cli_flags */
    const char *help;
    const cairn_option_info *option; /* of the library, or NULL for the command line's own */
} flag;

static const flag own_flags[] = {
    {"json", NULL, CLI_JSON, "print JSON for programs instead of a table for people", NULL},
    {"trace", "FILE", CLI_TRACE, "write a timeline, for ui.perfetto.dev or chrome://tracing", NULL},
    {"budgets", "N|A,B,C", CLI_BUDGETS, "N budgets from the least to store-all, or these sizes (default 10)", NULL},
    {"batch", "N", CLI_BATCH, "the batch at which the problem was measured (required)", NULL},
    {"csv", NULL, CLI_BUDGETS, "print comma-separated values instead of a table", NULL},
};

enum { OWN_COUNT = sizeof(own_flags) / sizeof(own_flags[0]) };

static const char output_help[] = "where the result goes; - is standard output, and then nothing else is printed there";

/* ---- the library's options as flags ---- */

static unsigned option_group(const char *name)
{
    static const struct {
        const char *name;
        unsigned group;
    } groups[] = {
        {"budget", CLI_BUDGET},     {"solver", CLI_SOLVER},       {"minimize", CLI_GOAL},
        {"objective", CLI_GOAL},    {"host-budget", CLI_MACHINE}, {"to-host", CLI_MACHINE},
        {"to-device", CLI_MACHINE}, {"shared-link", CLI_MACHINE}, {"latency", CLI_MACHINE},
        {"slots", CLI_METHOD},      {"segments", CLI_METHOD},     {"iterations", CLI_SEARCH},
        {"seed", CLI_SEARCH},
    };
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++)
        if (strcmp(groups[i].name, name) == 0)
            return groups[i].group;
    return CLI_LIMITS;
}

static const char *value_name(const cairn_option_info *option)
{
    static const char *const names[] = {
        [CAIRN_OPTION_SIZE] = "SIZE", [CAIRN_OPTION_RATE] = "RATE", [CAIRN_OPTION_DURATION] = "DURATION",
        [CAIRN_OPTION_COUNT] = "N",   [CAIRN_OPTION_TEXT] = "NAME", [CAIRN_OPTION_FLAG] = NULL,
    };
    return option->type == CAIRN_OPTION_CHOICE ? option->choices : names[option->type];
}

/* All flags, the command line's own first; false past the end. */
static bool flag_at(int index, flag *out)
{
    if (index < OWN_COUNT) {
        *out = own_flags[index];
        return true;
    }
    const cairn_option_info *option = cairn_option_at(index - OWN_COUNT);
    if (option)
        *out = (flag){option->name, value_name(option), option_group(option->name), option->help, option};
    return option != NULL;
}

static bool find_flag(const char *name, size_t length, flag *out)
{
    for (int i = 0; flag_at(i, out); i++)
        if (strlen(out->name) == length && memcmp(out->name, name, length) == 0)
            return true;
    return false;
}

static const char *flag_name_at(const void *context, int index)
{
    flag found;
    (void)context;
    return flag_at(index, &found) ? found.name : NULL;
}

/* Of the flags that a command takes. */
static const char *own_flag_name_at(const void *command, int index)
{
    flag found;
    for (int i = 0; flag_at(i, &found); i++)
        if ((((const cli_command *)command)->flags & found.group) && index-- == 0)
            return found.name;
    return NULL;
}

static const char *solver_name_at(const void *context, int index)
{
    (void)context;
    const cairn_solver_info *solver = cairn_solver_at(index);
    return solver ? solver->name : NULL;
}

static void describe(const cli_command *command, const flag *found, char *name, size_t name_size, char *help,
                     size_t help_size)
{
    snprintf(name, name_size, "--%s%s%s", found->name, found->value ? " " : "", found->value ? found->value : "");
    if (!found->option || found->option->type == CAIRN_OPTION_FLAG)
        snprintf(help, help_size, "%s", found->help);
    else if (found->group == CLI_BUDGET && !command->budget)
        snprintf(help, help_size, "%s (required)", found->help);
    else
        snprintf(help, help_size, "%s (default: %s)", found->help,
                 found->group == CLI_BUDGET ? command->budget : found->option->fallback);
}

void cli_list_flags(const cli_command *command, void (*show)(const char *flag, const char *help))
{
    char name[64], help[200];
    flag found;
    if (command->flags & CLI_OUTPUT)
        show("-o FILE", output_help);
    for (int i = 0; flag_at(i, &found); i++)
        if (command->flags & found.group) {
            describe(command, &found, name, sizeof(name), help, sizeof(help));
            show(name, help);
        }
}

/* ---- parsing ---- */

static cli_exit unknown_flag(const cli_call *call, const char *word)
{
    char name[64];
    const char *begin = word + strspn(word, "-");
    size_t length = strcspn(begin, "=");
    snprintf(name, sizeof(name), "%.*s", length < sizeof(name) ? (int)length : (int)sizeof(name) - 1, begin);
    const char *near = cli_nearest(name, own_flag_name_at, call->command);
    near = near ? near : cli_nearest(name, flag_name_at, NULL);
    if (strcmp(name, "output") == 0)
        return cli_misuse(call, "there is no flag %s; did you mean -o FILE?", word);
    if (near)
        return cli_misuse(call, "there is no flag %s; did you mean --%s?", word, near);
    return cli_misuse(call, "there is no flag %s; `cairn help %s` lists those that there are", word,
                      call->command->name);
}

static cli_exit flag_not_taken(const cli_call *call, const char *name)
{
    const char *near = cli_nearest(name, own_flag_name_at, call->command);
    if (near)
        return cli_misuse(call, "`cairn %s` takes no flag --%s; did you mean --%s?", call->command->name, name, near);
    return cli_misuse(call, "`cairn %s` takes no flag --%s; `cairn help %s` lists those that it takes",
                      call->command->name, name, call->command->name);
}

static cli_exit set_solver(cli_call *call, const char *name)
{
    cairn_error error;
    call->solver = name;
    if (cairn_options_set(call->options, "solver", name, &error) == CAIRN_OK)
        return CLI_FOUND;
    const char *near = cli_nearest(name, solver_name_at, NULL);
    if (near)
        return cli_misuse(call, "there is no solver \"%s\"; did you mean \"%s\"? `cairn solvers` lists them", name,
                          near);
    return cli_misuse(call, "there is no solver \"%s\"; `cairn solvers` lists them", name);
}

static int index_of(const cairn_option_info *option)
{
    int i = 0;
    while (cairn_option_at(i) != option)
        i++;
    return i;
}

/* What the library calls an option is a flag here. */
static cli_exit fail_by_flag(const cli_call *call, cairn_error *error)
{
    static const char library[] = "option ", shown[] = "--";
    size_t begins = sizeof(library) - 1, shorter = sizeof(shown) - 1;
    char *rest = error->message + begins;
    if (strncmp(error->message, library, begins) == 0) {
        memmove(error->message + shorter, rest, strlen(rest) + 1);
        memcpy(error->message, shown, shorter);
    }
    return cli_fail(call, NULL, error);
}

static cli_exit set_option(cli_call *call, const flag *found, const char *value)
{
    cairn_error error;
    if (found->group == CLI_SOLVER)
        return set_solver(call, value);
    if (found->group == CLI_BUDGET)
        call->budget = value;
    if (strcmp(found->name, "time-limit") == 0)
        call->time_limit = value;
    call->given |= 1u << index_of(found->option);
    call->has_machine_flag |= found->group == CLI_MACHINE;
    if (strcmp(found->name, "minimize") == 0)
        call->minimizes_memory = strcmp(value, "memory") == 0;
    if (cairn_options_set(call->options, found->name, value ? value : "true", &error) != CAIRN_OK)
        return fail_by_flag(call, &error);
    return CLI_FOUND;
}

static cli_exit set_flag(cli_call *call, const flag *found, const char *value)
{
    if (found->option)
        return set_option(call, found, value);
    if (strcmp(found->name, "json") == 0)
        call->json = true;
    else if (strcmp(found->name, "csv") == 0)
        call->csv = true;
    else if (strcmp(found->name, "trace") == 0)
        call->trace = value;
    else if (strcmp(found->name, "batch") == 0)
        call->batch = value;
    else
        call->budgets = value;
    return CLI_FOUND;
}

/* The next word is a value only if it is no flag; one that begins like a flag can be given as --name=value. */
static bool is_value(const char *word)
{
    return word && strncmp(word, "--", 2) != 0;
}

/* "--name", "--name=value", "--name value"; *used counts the words taken. */
static cli_exit parse_long(cli_call *call, const char *word, const char *next, int *used)
{
    flag found;
    const char *name = word + 2, *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    if (strcmp(word, "--help") == 0) {
        call->wants_help = true;
        return CLI_FOUND;
    }
    if (!find_flag(name, length, &found))
        return unknown_flag(call, word);
    if (!(call->command->flags & found.group))
        return flag_not_taken(call, found.name);
    if (!found.value && value && !found.option)
        return cli_misuse(call, "--%s takes no value", found.name);
    if (found.value && !value) {
        if (!is_value(next))
            return cli_misuse(call, "--%s needs a value: --%s %s", found.name, found.name, found.value);
        value = next;
        *used = 2;
    }
    return set_flag(call, &found, value);
}

/* "-oFILE", "-o=FILE", "-o FILE"; *used counts the words taken. */
static cli_exit parse_short(cli_call *call, const char *word, const char *next, int *used)
{
    const char *value = word + 2 + (word[2] == '=');
    if (strcmp(word, "-h") == 0) {
        call->wants_help = true;
        return CLI_FOUND;
    }
    if (word[1] != 'o')
        return unknown_flag(call, word);
    if (!(call->command->flags & CLI_OUTPUT))
        return cli_misuse(call, "`cairn %s` takes no flag -o", call->command->name);
    if (word[2] == '\0' && !is_value(next))
        return cli_misuse(call, "-o needs a value: -o FILE");
    call->output = word[2] ? value : next;
    *used = word[2] ? 1 : 2;
    return CLI_FOUND;
}

static cli_exit add_operand(cli_call *call, const char *word)
{
    if (call->operand_count == call->command->operands_max && cli_solver_find(word))
        return cli_misuse(call, "\"%s\" is one operand too many; `cairn help %s` describes that solver", word, word);
    if (call->operand_count == call->command->operands_max)
        return cli_misuse(call, "\"%s\" is one operand too many; usage: cairn %s%s%s%s", word, call->command->name,
                          *call->command->operands ? " " : "", call->command->operands,
                          call->command->flags ? " [flags]" : "");
    call->operands[call->operand_count++] = word;
    return CLI_FOUND;
}

static cli_exit check_operands(const cli_call *call)
{
    if (call->wants_help)
        return CLI_FOUND;
    if (call->operand_count < call->command->operands_min)
        return cli_misuse(call, "%s missing; usage: cairn %s %s [flags]",
                          call->command->operands_min == 1 ? "an operand is" : "operands are", call->command->name,
                          call->command->operands);
    if (call->operand_count == 2 && strcmp(call->operands[0], "-") == 0 && strcmp(call->operands[1], "-") == 0)
        return cli_misuse(call, "only one of the operands can be standard input");
    return CLI_FOUND;
}

cli_exit cli_parse(cli_call *call, int count, char **words)
{
    bool flags = true;
    for (int i = 0, used; i < count; i += used) {
        const char *word = words[i], *next = i + 1 < count ? words[i + 1] : NULL;
        cli_exit result = CLI_FOUND;
        used = 1;
        if (flags && strcmp(word, "--") == 0)
            flags = false;
        else if (flags && word[0] == '-' && word[1] == '-')
            result = parse_long(call, word, next, &used);
        else if (flags && word[0] == '-' && word[1] != '\0')
            result = parse_short(call, word, next, &used);
        else
            result = add_operand(call, word);
        if (result != CLI_FOUND)
            return result;
    }
    return check_operands(call);
}

cli_exit cli_budget(cli_call *call, int64_t fallback, int64_t *budget_bytes)
{
    cairn_error error;
    *budget_bytes = fallback;
    if (!call->budget)
        return CLI_FOUND;
    *budget_bytes = CAIRN_NONE;
    if (strcmp(call->budget, "none") != 0 && cairn_parse_size(call->budget, budget_bytes, &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    return CLI_FOUND;
}
