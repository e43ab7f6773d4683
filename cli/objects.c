/* The JSON objects that commands print. Members stand in the order in which they are added. */
#include <stdio.h>

#include "cli.h"

cli_object cli_object_new(void)
{
    json_t *object = json_object();
    return (cli_object){object, object == NULL};
}

void cli_add(cli_object *out, const char *key, json_t *value)
{
    out->failed |= json_object_set_new(out->object, key, value) != 0;
}

void cli_add_text(cli_object *out, const char *key, const char *text)
{
    cli_add(out, key, text && *text ? json_string(text) : json_null());
}

void cli_add_int(cli_object *out, const char *key, int64_t value)
{
    cli_add(out, key, value == CAIRN_NONE ? json_null() : json_integer(value));
}

void cli_add_bool(cli_object *out, const char *key, bool value)
{
    cli_add(out, key, json_boolean(value));
}

json_t *cli_object_take(cli_object *out)
{
    if (out->failed) {
        json_decref(out->object);
        out->object = NULL;
    }
    return out->object;
}

static json_t *checkpoints_json(const cairn_info *info)
{
    if (info->checkpoint_count < 0)
        return json_null();
    json_t *list = json_array();
    for (int32_t i = 0; i < info->checkpoint_count; i++)
        if (json_array_append_new(list, json_integer(info->checkpoints[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

json_t *cli_info_json(const cairn_info *info)
{
    cli_object out = cli_object_new();
    bool has_least = info->least_bytes != CAIRN_NONE || info->least_lower_bytes != CAIRN_NONE;
    cli_add_text(&out, "outcome", cairn_outcome_name(info->outcome));
    cli_add_text(&out, "solver", info->solver);
    cli_add_int(&out, "budget_bytes", info->budget_bytes);
    cli_add_int(&out, "makespan_ns", info->makespan_ns);
    cli_add_int(&out, "peak_bytes", info->peak_bytes);
    cli_add_int(&out, "host_peak_bytes", info->host_peak_bytes);
    cli_add_int(&out, "lower_bound_ns", info->lower_bound_ns);
    cli_add(&out, "gap", info->gap >= 0 ? json_real(info->gap) : json_null());
    cli_add_int(&out, "least_bytes", info->least_bytes);
    cli_add(&out, "least_is_exact", has_least ? json_boolean(info->least_is_exact) : json_null());
    cli_add_int(&out, "least_lower_bytes", info->least_lower_bytes);
    cli_add_int(&out, "store_all_bytes", info->store_all_bytes);
    cli_add_int(&out, "store_all_ns", info->store_all_ns);
    cli_add_text(&out, "reason", info->reason);
    cli_add_text(&out, "optimal_in", info->optimal_in);
    cli_add_int(&out, "recompute_ns", info->recompute_ns);
    cli_add_int(&out, "stall_ns", info->stall_ns);
    cli_add_int(&out, "solve_ns", info->solve_ns);
    cli_add_int(&out, "solver_peak_bytes", info->solver_peak_bytes);
    cli_add(&out, "checkpoints", checkpoints_json(info));
    cli_add_int(&out, "objective_bytes", info->objective_bytes);
    return cli_object_take(&out);
}

/* ---- replays ---- */

static json_t *violation_json(const cairn_violation *violation)
{
    char message[CAIRN_ERROR_MESSAGE_MAX];
    cli_object out = cli_object_new();
    cli_add_text(&out, "code", cairn_violation_name(violation->code));
    cli_add_int(&out, "op", violation->op);
    cli_add_text(&out, "message", cli_clean(violation->message, message, sizeof(message)));
    return cli_object_take(&out);
}

static json_t *replay_json(const cairn_replay *replay)
{
    cli_object out = cli_object_new();
    cli_add_bool(&out, "valid", replay->valid);
    cli_add_int(&out, "makespan_ns", replay->makespan_ns);
    cli_add_int(&out, "peak_bytes", replay->peak_bytes);
    cli_add_int(&out, "host_peak_bytes", replay->host_peak_bytes);
    cli_add_int(&out, "recompute_ns", replay->recompute_ns);
    cli_add_int(&out, "stall_ns", replay->stall_ns);
    cli_add(&out, "violation", replay->valid ? json_null() : violation_json(&replay->violation));
    return cli_object_take(&out);
}

static void print_replay(const cairn_replay *replay, int64_t budget_bytes)
{
    char value[32], message[CAIRN_ERROR_MESSAGE_MAX];
    if (!replay->valid) {
        printf("not valid: %s: %s\n", cairn_violation_name(replay->violation.code),
               cli_clean(replay->violation.message, message, sizeof(message)));
        return;
    }
    printf("valid\n");
    cli_row("budget", budget_bytes == CAIRN_NONE ? "none" : cairn_format_bytes(budget_bytes, value, sizeof(value)),
            NULL);
    cli_row("time", cairn_format_ns(replay->makespan_ns, value, sizeof(value)), NULL);
    cli_row("  recomputing", cairn_format_ns(replay->recompute_ns, value, sizeof(value)), NULL);
    cli_row("  waiting", cairn_format_ns(replay->stall_ns, value, sizeof(value)), NULL);
    cli_row("peak", cairn_format_bytes(replay->peak_bytes, value, sizeof(value)), NULL);
    if (replay->host_peak_bytes > 0)
        cli_row("host peak", cairn_format_bytes(replay->host_peak_bytes, value, sizeof(value)), NULL);
}

cli_exit cli_print_replay(const cli_call *call, const cairn_replay *replay, int64_t budget_bytes)
{
    int64_t recorded_bytes = cairn_schedule_info_of(call->schedule)->budget_bytes;
    cli_exit result = replay->valid ? CLI_FOUND : CLI_NOT_FOUND, printed = CLI_FOUND;
    if (call->json)
        printed = cli_print_json(call, replay_json(replay));
    else if (!cli_stdout_is_taken(call))
        print_replay(replay, budget_bytes == CAIRN_RECORDED ? recorded_bytes : budget_bytes);
    else if (!replay->valid)
        cli_note("not valid: %s: %s", cairn_violation_name(replay->violation.code), replay->violation.message);
    return printed == CLI_FOUND ? result : printed;
}
