/* Operations one at a time: names, texts, and which operations a problem can have. */
#include <inttypes.h>
#include <stdio.h>

#include "base/failure.h"
#include "schedule/schedule.h"

static const char *const op_names[CAIRN_OP_COUNT] = {
#define CAIRN_X(constant, name, kinds) name,
    CAIRN_OP_MAP(CAIRN_X)
#undef CAIRN_X
};

enum { CHAIN = 1 << CAIRN_KIND_CHAIN, GRAPH = 1 << CAIRN_KIND_GRAPH, BOTH = CHAIN | GRAPH };

static const int op_kinds[CAIRN_OP_COUNT] = {
#define CAIRN_X(constant, name, kinds) kinds,
    CAIRN_OP_MAP(CAIRN_X)
#undef CAIRN_X
};

const char *cairn_op_name(cairn_op_code code)
{
    return (int)code >= 0 && code < CAIRN_OP_COUNT ? op_names[code] : NULL;
}

static bool is_on_value(cairn_op op)
{
    return op.code == CAIRN_OP_DROP || op.code == CAIRN_OP_OFFLOAD || op.code == CAIRN_OP_PREFETCH ||
           op.code == CAIRN_OP_DISCARD;
}

void crn_op_text(cairn_op op, cairn_problem_kind kind, char text[CRN_OP_TEXT_MAX])
{
    const char *name = op_names[op.code];
    if (kind == CAIRN_KIND_CHAIN && is_on_value(op))
        snprintf(text, CRN_OP_TEXT_MAX, "%s %s %" PRId32, name, op.value == CAIRN_VALUE_SAVED ? "saved" : "output",
                 op.index);
    else if (op.code == CAIRN_OP_FORWARD_SAVE)
        snprintf(text, CRN_OP_TEXT_MAX, "%s %" PRId32 " %u", name, op.index, (unsigned)op.option);
    else
        snprintf(text, CRN_OP_TEXT_MAX, "%s %" PRId32, name, op.index);
}

static cairn_status refuse(cairn_error *error, int64_t position, const char *what, int64_t value, int64_t least,
                           int64_t most)
{
    char path[CAIRN_ERROR_PATH_MAX];
    snprintf(path, sizeof(path), "ops[%" PRId64 "]", position);
    return crn_fail_at(error, CAIRN_BAD_INPUT, position, path, "%s is %" PRId64 "; %" PRId64 " to %" PRId64, what,
                       value, least, most);
}

static cairn_status check_chain_op(const cairn_chain *chain, cairn_op op, int64_t position, cairn_error *error)
{
    bool has_input = is_on_value(op) && op.value == CAIRN_VALUE_OUTPUT;
    int32_t first = has_input ? 0 : 1, options = 1;
    if (op.index < first || op.index > chain->stage_count)
        return refuse(error, position, "the stage", op.index, first, chain->stage_count);
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        options = chain->stages[op.index - 1].option_count;
    if (op.option >= options)
        return refuse(error, position, "the option", op.option, 0, options - 1);
    return CAIRN_OK;
}

static cairn_status check_graph_op(const cairn_graph *graph, cairn_op op, int64_t position, cairn_error *error)
{
    if (op.index < 0 || op.index >= graph->node_count)
        return refuse(error, position, "the node", op.index, 0, graph->node_count - 1);
    if (op.option > 0)
        return refuse(error, position, "the option", op.option, 0, 0);
    return CAIRN_OK;
}

static cairn_status check_op(const cairn_problem *problem, cairn_problem_kind kind, cairn_op op, int64_t position,
                             cairn_error *error)
{
    int most_value = kind == CAIRN_KIND_CHAIN && is_on_value(op) ? CAIRN_VALUE_SAVED : 0;
    if (op.code >= CAIRN_OP_COUNT)
        return refuse(error, position, "the operation", op.code, 0, CAIRN_OP_COUNT - 1);
    if (!(op_kinds[op.code] & 1 << kind)) {
        char path[CAIRN_ERROR_PATH_MAX];
        snprintf(path, sizeof(path), "ops[%" PRId64 "]", position);
        return crn_fail_at(error, CAIRN_BAD_INPUT, position, path, "%s has no %s",
                           kind == CAIRN_KIND_CHAIN ? "a chain" : "a graph", op_names[op.code]);
    }
    if (op.value > most_value)
        return refuse(error, position, "the value", op.value, 0, most_value);
    if (kind == CAIRN_KIND_CHAIN)
        return check_chain_op(cairn_problem_chain(problem), op, position, error);
    return check_graph_op(cairn_problem_graph(problem), op, position, error);
}

/* Whether it is a computation of a chain of so many stages, by the first option: most of a long list. */
static bool is_plain(cairn_op op, int32_t stage_count)
{
    return op.code <= CAIRN_OP_BACKWARD && op.value == 0 && op.option == 0 && op.index >= 1 && op.index <= stage_count;
}

cairn_status crn_ops_check(const cairn_problem *problem, const cairn_op *ops, int64_t count, int64_t position,
                           cairn_error *error)
{
    cairn_problem_kind kind = cairn_problem_kind_of(problem);
    int32_t stage_count = kind == CAIRN_KIND_CHAIN ? cairn_problem_chain(problem)->stage_count : 0;
    for (int64_t i = 0; i < count; i++)
        if (!is_plain(ops[i], stage_count))
            CRN_TRY(check_op(problem, kind, ops[i], position + i, error));
    return CAIRN_OK;
}
