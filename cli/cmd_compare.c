/* cairn compare: every solver at several budgets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { BUDGETS_DEFAULT = 10, BUDGETS_MAX = 1000 };

typedef struct budgets {
    int64_t bytes[BUDGETS_MAX];
    int count;
} budgets;

/* ---- which budgets ---- */

static bool is_count(const char *text)
{
    return *text && text[strspn(text, "0123456789")] == '\0';
}

/* Evenly spaced from the least to store-all, both included. */
static cli_exit space_evenly(cli_call *call, budgets *out)
{
    cairn_limits limits;
    cairn_error error;
    const cairn_env *env = cli_watch_begin("finding the least memory");
    cairn_status status = cairn_limits_of(env, call->problem, call->options, &limits, &error);
    cli_watch_end();
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    int64_t low = limits.least_bytes == CAIRN_NONE ? limits.store_all_bytes : limits.least_bytes;
    int64_t span = limits.store_all_bytes > low ? limits.store_all_bytes - low : 0;
    for (int i = 0; i < out->count; i++)
        out->bytes[i] =
            out->count == 1 ? low : low + span / (out->count - 1) * i + span % (out->count - 1) * i / (out->count - 1);
    return CLI_FOUND;
}

static cli_exit take_size(const cli_call *call, const char *text, size_t length, budgets *out)
{
    char size[64];
    cairn_error error;
    if (length >= sizeof(size))
        return cli_misuse(call, "--budgets: \"%.20s...\" is too long for a size", text);
    snprintf(size, sizeof(size), "%.*s", (int)length, text);
    if (out->count == BUDGETS_MAX)
        return cli_misuse(call, "--budgets: more than %d", BUDGETS_MAX);
    int64_t *bytes = &out->bytes[out->count++];
    *bytes = CAIRN_NONE;
    if (strcmp(size, "none") != 0 && cairn_parse_size(size, bytes, &error) != CAIRN_OK)
        return cli_misuse(call, "--budgets: %s", error.message);
    return CLI_FOUND;
}

static cli_exit take_list(const cli_call *call, budgets *out)
{
    const char *text = call->budgets;
    cli_exit result;
    do {
        size_t length = strcspn(text, ",");
        result = take_size(call, text, length, out);
        text += length + (text[length] == ',');
    } while (result == CLI_FOUND && *text);
    return result;
}

static cli_exit choose_budgets(cli_call *call, budgets *out)
{
    out->count = 0;
    if (call->budgets && !is_count(call->budgets))
        return take_list(call, out);
    long long count = call->budgets ? strtoll(call->budgets, NULL, 10) : BUDGETS_DEFAULT;
    if (count < 1 || count > BUDGETS_MAX)
        return cli_misuse(call,
                          "--budgets %s: a number of budgets is from 1 to %d; for a single budget of %s bytes write "
                          "\"%s,\"",
                          call->budgets, BUDGETS_MAX, call->budgets, call->budgets);
    out->count = (int)count;
    return space_evenly(call, out);
}

/* ---- solving ---- */

typedef struct results {
    cairn_info *infos; /* of the solvers that answered, one after the other */
    int count;
} results;

static int solver_count(void)
{
    int count = 0;
    while (cairn_solver_at(count))
        count++;
    return count;
}

static cli_exit print_lines(const cli_call *call, const cairn_info *infos, int count)
{
    cli_exit result = CLI_FOUND;
    for (int i = 0; result == CLI_FOUND && i < count; i++)
        result = cli_print_json(call, cli_info_json(&infos[i]));
    return result;
}

/* Whether only this solver has failed: the others are asked all the same. */
static bool is_left_out(cairn_status status)
{
    return status == CAIRN_UNSUPPORTED || status == CAIRN_UNAVAILABLE || status == CAIRN_MEMORY_LIMIT ||
           status == CAIRN_NO_MEMORY;
}

/* An answer names the solver that it comes from; a table of solvers also names auto, which asked it. */
static void show_who_was_asked(const cli_call *call, const cairn_solver_info *asked, cairn_info *infos, int count)
{
    char shown[sizeof(infos->solver) + 16];
    for (int i = 0; i < count; i++) {
        if (strcmp(infos[i].solver, asked->name) == 0)
            continue;
        snprintf(shown, sizeof(shown), call->csv ? "%s" : "%s: %s", asked->name, infos[i].solver);
        shown[sizeof(infos->solver) - 1] = '\0';
        memcpy(infos[i].solver, shown, sizeof(infos->solver));
    }
}

/* Whether a solver takes the problem, with the options that it takes; the caller frees them. */
static cairn_status accepts(const cli_call *call, const cairn_solver_info *solver, cairn_options **own,
                            cairn_error *error)
{
    cairn_status status = cairn_options_for(NULL, call->options, solver->name, own, error);
    return status == CAIRN_OK ? cairn_solver_accepts(solver->name, call->problem, *own, error) : status;
}

/* Adds a solver's answers to the results, or says why it is left out. */
static cli_exit ask(cli_call *call, const cairn_solver_info *solver, const budgets *at, results *out)
{
    cairn_error error;
    cairn_options *own;
    cairn_info *infos = out->infos + out->count;
    cairn_status status = accepts(call, solver, &own, &error);
    if (status == CAIRN_OK) {
        const cairn_env *env = cli_watch_begin(solver->name);
        status = cairn_solve_many(env, call->problem, own, at->bytes, at->count, NULL, infos, &error);
        cli_watch_end();
    }
    cairn_options_free(own);
    if (is_left_out(status)) {
        bool names_itself = strncmp(error.message, solver->name, strlen(solver->name)) == 0;
        cli_note("left out: %s%s%s", names_itself ? "" : solver->name, names_itself ? "" : ": ", error.message);
        return CLI_FOUND;
    }
    if (status == CAIRN_CANCELLED && cli_was_interrupted())
        return CLI_INTERRUPTED; /* ask_all says so, if nobody has answered */
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    out->count += at->count;
    if (!call->json)
        show_who_was_asked(call, solver, infos, at->count);
    return call->json ? print_lines(call, infos, at->count) : CLI_FOUND;
}

static cli_exit print_results(const cli_call *call, const results *out)
{
    cairn_error error;
    cairn_status status = CAIRN_OK;
    if (call->csv)
        status = cairn_report_csv(NULL, out->infos, out->count, cli_stdout_sink(), &error);
    else if (!call->json)
        status = cairn_report_comparison(NULL, out->infos, out->count, cli_stdout_sink(), &error);
    return status == CAIRN_OK ? CLI_FOUND : cli_fail(call, NULL, &error);
}

/* Why a solver is not asked, of the reasons that many share; NULL: it is. */
static const char *reason_against(const cli_call *call, const cairn_solver_info *solver)
{
    bool is_chain = cairn_problem_chain(call->problem) != NULL, has_machine = false;
    cairn_machine machine;
    if (!(is_chain ? solver->takes_chains : solver->takes_graphs))
        return is_chain ? "because they take no chains" : "because they take no graphs";
    if (solver->minimizes_memory)
        return "because they minimize memory, which takes no budget";
    if (solver->needs_machine &&
        cairn_options_machine(call->options, call->problem, &machine, &has_machine, NULL) == CAIRN_OK && !has_machine)
        return "because there is no machine to offload to";
    return NULL;
}

/* On one line those that are left out for one reason, on which the given solver is the first. */
static void name_those_left_out(const cli_call *call, int first)
{
    char names[800];
    size_t length = 0;
    const cairn_solver_info *solver = cairn_solver_at(first);
    const char *reason = reason_against(call, solver);
    for (int i = 0; reason && (solver = cairn_solver_at(i)) && length < sizeof(names); i++) {
        const char *other = reason_against(call, solver);
        if (!other || strcmp(other, reason) != 0)
            continue;
        if (i < first)
            return; /* named already */
        length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%s", length ? ", " : "", solver->name);
    }
    if (length > 0)
        cli_note("left out %s: %s", reason, names);
}

/* A time limit is what `cairn solve` gives to the same solver at the same budget, so that what is compared is comparable. */
static void tell_the_time(const cli_call *call, const budgets *at)
{
    const cairn_solver_info *solver;
    cairn_options *own;
    int64_t each_ns;
    int solvers = 0;
    if (!call->time_limit || cairn_parse_duration(call->time_limit, &each_ns, NULL) != CAIRN_OK)
        return;
    for (int i = 0; (solver = cairn_solver_at(i)); i++) {
        solvers += accepts(call, solver, &own, NULL) == CAIRN_OK;
        cairn_options_free(own);
    }
    cli_note("each of %d solvers may take %s at each of %d budgets, %.3g s in all", solvers, call->time_limit,
             at->count, (double)each_ns / 1e9 * solvers * at->count);
}

static cli_exit ask_all(cli_call *call, const budgets *at)
{
    const cairn_solver_info *solver;
    results out = {calloc((size_t)solver_count() * (size_t)at->count + 1, sizeof(cairn_info)), 0};
    cli_exit result = CLI_FOUND;
    if (!out.infos)
        return cli_fail_plainly(call, CAIRN_NO_MEMORY, "out of memory");
    for (int i = 0; cairn_solver_at(i); i++)
        name_those_left_out(call, i);
    tell_the_time(call, at);
    for (int i = 0; result == CLI_FOUND && !cli_was_interrupted() && (solver = cairn_solver_at(i)); i++)
        if (!reason_against(call, solver))
            result = ask(call, solver, at, &out);
    if (result == CLI_FOUND && cli_was_interrupted())
        result = CLI_INTERRUPTED;
    if (result == CLI_INTERRUPTED && out.count == 0) {
        result = cli_fail_plainly(call, CAIRN_CANCELLED, "stopped before any answer");
    } else if (result == CLI_FOUND || result == CLI_INTERRUPTED) {
        result = print_results(call, &out);
        result = result == CLI_FOUND ? cli_end_of_answer(CLI_FOUND) : result;
    }
    for (int i = 0; i < out.count; i++)
        cairn_info_clear(&out.infos[i]);
    free(out.infos);
    return result;
}

/* An option goes to the solvers that take it; there has to be one. */
static cli_exit check_options(const cli_call *call)
{
    cairn_error error;
    if (cairn_solver_accepts("auto", call->problem, call->options, &error) != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    return CLI_FOUND;
}

static cli_exit run(cli_call *call)
{
    budgets at;
    cli_exit result = cli_check_outputs(call);
    if (result == CLI_FOUND)
        result = cli_load_problem(call);
    if (result == CLI_FOUND)
        result = check_options(call);
    if (result == CLI_FOUND)
        result = choose_budgets(call, &at);
    return result == CLI_FOUND ? ask_all(call, &at) : result;
}

const cli_command cli_compare = {
    .name = "compare",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_MACHINE | CLI_METHOD | CLI_SEARCH | CLI_LIMITS | CLI_BUDGETS,
    .summary = "every solver at several budgets",
    .details =
        "Asks every available solver that takes the problem, brute force only where it is small enough, and prints a\n"
        "line for each answer, with its time over that of store-all; solvers that are left out are named on standard\n"
        "error with the reason. --slots and --segments go to the solvers that take them; --time-limit holds for each\n"
        "answer, as in `cairn solve`: every solver at every budget.",
    .run = run,
};
