/* cairn max-batch: the largest batch that a budget allows at the price of one more forward. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static json_t *max_batch_json(const cairn_max_batch *found)
{
    cli_object out = cli_object_new();
    cli_add_int(&out, "max_batch", found->batch);
    cli_add_int(&out, "budget_bytes", found->budget_bytes);
    cli_add_int(&out, "makespan_ns", found->makespan_ns);
    return cli_object_take(&out);
}

/* What is proved about larger batches. */
static const char *proof_of(const cairn_max_batch *found, char *out, size_t size)
{
    int64_t next = found->batch == CAIRN_NONE ? 1 : found->batch + 1;
    const char *early = found->stopped_early ? "stopped early; " : "";
    if (found->refuted_batch == CAIRN_NONE)
        snprintf(out, size, "%snothing is proved about larger ones", early);
    else if (found->refuted_batch <= next)
        snprintf(out, size, "proved: %lld is not possible", (long long)found->refuted_batch);
    else
        snprintf(out, size, "%s%lld to %lld: not known; proved: %lld is not possible", early, (long long)next,
                 (long long)found->refuted_batch - 1, (long long)found->refuted_batch);
    return out;
}

/* What a batch of 1 needs at least, for who finds that not even that fits; nothing where it cannot be said. */
static void print_least(const cli_call *call, int64_t measured_batch)
{
    cairn_problem *one = NULL;
    cairn_limits limits;
    char value[32];
    cairn_status status = cairn_problem_scale(NULL, call->problem, 1, measured_batch, &one, NULL);
    if (status == CAIRN_OK) {
        status = cairn_limits_of(cli_watch_begin("finding the least memory"), one, call->options, &limits, NULL);
        cli_watch_end();
    }
    if (status == CAIRN_OK && limits.least_bytes != CAIRN_NONE)
        cli_row("least memory", cairn_format_budget(limits.least_bytes, value, sizeof(value)),
                "of a batch of 1, recomputing at any price");
    cairn_problem_free(one);
}

static void print_max_batch(const cli_call *call, int64_t measured_batch, const cairn_max_batch *found)
{
    char value[32], other[32], note[128];
    snprintf(value, sizeof(value), "%lld", (long long)found->batch);
    cli_row("max batch", found->batch == CAIRN_NONE ? "none" : value, proof_of(found, note, sizeof(note)));
    cli_row("budget", cairn_format_bytes(found->budget_bytes, value, sizeof(value)), NULL);
    if (found->batch == CAIRN_NONE && !found->stopped_early)
        print_least(call, measured_batch);
    if (found->batch == CAIRN_NONE)
        return;
    cli_row("peak", cairn_format_bytes(found->peak_bytes, value, sizeof(value)), NULL);
    cli_row("time", cairn_format_ns(found->makespan_ns, value, sizeof(value)), found->solver);
    snprintf(note, sizeof(note), "of at most %s, one forward",
             cairn_format_ns(found->forward_ns, other, sizeof(other)));
    cli_row("  recomputing", cairn_format_ns(found->recompute_ns, value, sizeof(value)), note);
}

static cli_exit read_batch(const cli_call *call, int64_t *batch)
{
    if (!call->batch)
        return cli_misuse(call, "`cairn max-batch` needs --batch N, the batch at which the problem was measured");
    errno = 0;
    *batch = strtoll(call->batch, NULL, 10);
    if (!*call->batch || call->batch[strspn(call->batch, "0123456789")] != '\0' || errno != 0 || *batch < 1)
        return cli_misuse(call, "--batch is an integer from 1 to 2^63 - 1, not \"%s\"", call->batch);
    return CLI_FOUND;
}

static cli_exit run(cli_call *call)
{
    cairn_max_batch found;
    cairn_error error;
    int64_t batch = 0;
    if (!call->budget || strcmp(call->budget, "none") == 0)
        return cli_misuse(call, "`cairn max-batch` needs --budget SIZE; without a limit there is no largest batch");
    cli_exit result = read_batch(call, &batch);
    if (result == CLI_FOUND)
        result = cli_load_problem(call);
    if (result != CLI_FOUND)
        return result;
    const cairn_env *env = cli_watch_begin("finding the largest batch");
    cairn_status status = cairn_max_batch_of(env, call->problem, call->options, batch, &found, &error);
    cli_watch_end();
    if (status != CAIRN_OK)
        return cli_fail(call, NULL, &error);
    cli_tell_unused(call);
    if (call->json)
        result = cli_print_json(call, max_batch_json(&found));
    else
        print_max_batch(call, batch, &found);
    if (result != CLI_FOUND)
        return result;
    return cli_end_of_answer(found.batch == CAIRN_NONE ? CLI_NOT_FOUND : CLI_FOUND);
}

const cli_command cli_max_batch = {
    .name = "max-batch",
    .operands = "PROBLEM",
    .operands_min = 1,
    .operands_max = 1,
    .flags = CLI_JSON | CLI_BUDGET | CLI_MACHINE | CLI_SOLVER | CLI_METHOD | CLI_SEARCH | CLI_LIMITS | CLI_BATCH,
    .summary = "the largest batch for one more forward",
    .details = "Scales the problem, measured at --batch, and finds the largest batch that fits --budget while "
               "recomputing takes\n"
               "at most one forward; says from which batch on that is proved impossible. Exit code 1: not even 1 fits.",
    .run = run,
};
