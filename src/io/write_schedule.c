/* Writing cairn-schedule: what is not recorded is null, one operation a line. */
#include <cairn/io.h>

#include "base/failure.h"
#include "io/write_parts.h"

static void put_op(crn_textbuf *out, cairn_op op, bool is_chain)
{
    bool moves = op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_OFFLOAD || op.code == CAIRN_OP_PREFETCH ||
                 op.code == CAIRN_OP_DISCARD;
    crn_put(out, "[\"");
    crn_put(out, cairn_op_name((cairn_op_code)op.code));
    crn_put(out, "\", ");
    if (moves && is_chain)
        crn_put(out, op.value == CAIRN_VALUE_SAVED ? "\"saved\", " : "\"output\", ");
    crn_textbuf_int(out, op.index);
    if (op.code == CAIRN_OP_FORWARD_SAVE) {
        crn_put(out, ", ");
        crn_textbuf_int(out, op.option);
    }
    crn_put(out, "]");
}

static void put_schedule_info(crn_textbuf *out, const cairn_schedule_info *info)
{
    crn_put(out, ",\n \"solver\": ");
    if (info->solver)
        crn_textbuf_json(out, info->solver);
    else
        crn_put(out, "null");
    crn_put_optional(out, "budget_bytes", info->budget_bytes);
    crn_put_optional(out, "makespan_ns", info->makespan_ns);
    crn_put_optional(out, "peak_bytes", info->peak_bytes);
    crn_put_optional(out, "lower_bound_ns", info->lower_bound_ns);
    crn_put(out, ",\n ");
    crn_put_machine(out, info->machine);
}

cairn_status cairn_schedule_write(const cairn_env *env, const cairn_schedule *schedule, char **text, size_t *length,
                                  cairn_error *error)
{
    const cairn_schedule_info *info = cairn_schedule_info_of(schedule);
    const cairn_op *ops = cairn_schedule_ops(schedule);
    bool is_chain = cairn_schedule_kind(schedule) == CAIRN_KIND_CHAIN;
    crn_textbuf out;
    *text = NULL;
    *length = 0;
    if (info->solver)
        CRN_TRY(crn_check_text(info->solver, "the solver", CAIRN_NONE, error));
    crn_textbuf_init(&out, crn_allocator(env));
    crn_textbuf_print(
        &out, "{\"format\": \"cairn-schedule\", \"version\": 1,\n \"problem\": {\"format\": \"%s\", \"hash\": \"%s\"}",
        is_chain ? "cairn-chain" : "cairn-graph", cairn_schedule_problem_hash(schedule));
    put_schedule_info(&out, info);
    crn_put(&out, ",\n \"ops\": [");
    for (int64_t i = 0; i < cairn_schedule_count(schedule); i++) {
        crn_put(&out, i > 0 ? ",\n  " : "\n  ");
        put_op(&out, ops[i], is_chain);
    }
    crn_put(&out, "]}\n");
    return crn_take_text(&out, text, length, error);
}
