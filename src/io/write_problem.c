/*
 * Writing cairn-chain and cairn-graph: every field explicit, one stage or node a line, the same bytes for the same
 * problem. Provenance goes out as it came in.
 */
#include <cairn/io.h>
#include <inttypes.h>
#include <string.h>

#include "base/failure.h"
#include "io/json_scan.h"
#include "io/write_parts.h"

/* ---- chains ---- */

static void put_option_fields(crn_textbuf *out, const cairn_stage_option *option)
{
    crn_put_int(out, "saved_bytes", option->saved_bytes);
    crn_put_int(out, "forward_ns", option->forward_ns);
    crn_put_int(out, "backward_ns", option->backward_ns);
    crn_put_int(out, "forward_workspace_bytes", option->forward_workspace_bytes);
    crn_put_int(out, "backward_workspace_bytes", option->backward_workspace_bytes);
}

static void put_options(crn_textbuf *out, const cairn_stage *stage)
{
    crn_put(out, ",\n   \"options\": [");
    for (int32_t k = 0; k < stage->option_count; k++) {
        crn_put(out, k > 0 ? ",\n    {\"name\": " : "\n    {\"name\": ");
        crn_textbuf_json(out, stage->options[k].name);
        put_option_fields(out, &stage->options[k]);
        crn_put(out, "}");
    }
    crn_put(out, "]");
}

static void put_stage(crn_textbuf *out, const cairn_stage *stage)
{
    crn_put(out, "{\"name\": ");
    crn_textbuf_json(out, stage->name);
    crn_put_int(out, "output_bytes", stage->output_bytes);
    crn_put_int(out, "grad_bytes", stage->grad_bytes);
    crn_put_int(out, "weight_grad_bytes", stage->weight_grad_bytes);
    crn_put(out, stage->no_recompute ? ", \"no_recompute\": true" : ", \"no_recompute\": false");
    crn_put_int(out, "forward_only_ns", stage->forward_only_ns);
    crn_put_int(out, "forward_only_workspace_bytes", stage->forward_only_workspace_bytes);
    if (stage->option_count == 1 && strcmp(stage->options[0].name, "keep") == 0)
        put_option_fields(out, &stage->options[0]);
    else
        put_options(out, stage);
    crn_put(out, "}");
}

static void put_chain(crn_textbuf *out, const cairn_chain *chain)
{
    crn_put_int(out, "input_bytes", chain->input_bytes);
    crn_put_int(out, "input_grad_bytes", chain->input_grad_bytes);
    crn_put(out, ",\n \"stages\": [");
    for (int32_t i = 0; i < chain->stage_count; i++) {
        crn_put(out, i > 0 ? ",\n  " : "\n  ");
        put_stage(out, &chain->stages[i]);
    }
    crn_put(out, "]");
}

/* ---- graphs ---- */

static void put_deps(crn_textbuf *out, const cairn_node *node)
{
    crn_put(out, ", \"deps\": [");
    for (int32_t i = 0; i < node->dep_count; i++) {
        if (i > 0)
            crn_put(out, ", ");
        crn_textbuf_int(out, node->deps[i]);
    }
    crn_put(out, "]");
}

static void put_node(crn_textbuf *out, const cairn_node *node)
{
    crn_put(out, "{\"name\": ");
    crn_textbuf_json(out, node->name);
    crn_put_int(out, "cost_ns", node->cost_ns);
    crn_put_int(out, "bytes", node->bytes);
    crn_put_int(out, "workspace_bytes", node->workspace_bytes);
    put_deps(out, node);
    crn_put_optional(out, "alias_of", node->alias_of);
    crn_put(out, node->keep ? ", \"keep\": true" : ", \"keep\": false");
    crn_put(out, node->no_recompute ? ", \"no_recompute\": true}" : ", \"no_recompute\": false}");
}

static void put_graph(crn_textbuf *out, const cairn_graph *graph)
{
    crn_put(out, ",\n \"nodes\": [");
    for (int32_t v = 0; v < graph->node_count; v++) {
        crn_put(out, v > 0 ? ",\n  " : "\n  ");
        put_node(out, &graph->nodes[v]);
    }
    crn_put(out, "]");
    if (graph->backward_begins_at >= 0)
        crn_textbuf_print(out, ",\n \"backward_begins_at\": %" PRId32, graph->backward_begins_at);
}

/* ---- problems ---- */

static cairn_status check_provenance(const char *text, cairn_error *error)
{
    crn_scan scan = {text, strlen(text), strspn(text, " \t\r\n"), NULL};
    bool is_object = text[scan.offset] == '{' && crn_json_scan(&scan);
    if (is_object && scan.offset + strspn(text + scan.offset, " \t\r\n") == scan.length)
        return CAIRN_OK;
    return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "provenance", "provenance is not the text of a JSON object");
}

static cairn_status check_chain_texts(const cairn_chain *chain, cairn_error *error)
{
    for (int32_t i = 0; i < chain->stage_count; i++) {
        CRN_TRY(crn_check_text(chain->stages[i].name, "a stage", i + 1, error));
        for (int32_t k = 0; k < chain->stages[i].option_count; k++)
            CRN_TRY(crn_check_text(chain->stages[i].options[k].name, "an option", i + 1, error));
    }
    return CAIRN_OK;
}

static cairn_status check_texts(const cairn_problem *problem, cairn_error *error)
{
    const cairn_graph *graph = cairn_problem_graph(problem);
    CRN_TRY(crn_check_text(cairn_problem_info_of(problem)->name, "the problem", CAIRN_NONE, error));
    CRN_TRY(check_provenance(cairn_problem_info_of(problem)->provenance, error));
    if (!graph)
        return check_chain_texts(cairn_problem_chain(problem), error);
    for (int32_t v = 0; v < graph->node_count; v++)
        CRN_TRY(crn_check_text(graph->nodes[v].name, "a node", v, error));
    return CAIRN_OK;
}

cairn_status cairn_problem_write(const cairn_env *env, const cairn_problem *problem, char **text, size_t *length,
                                 cairn_error *error)
{
    const cairn_problem_info *info = cairn_problem_info_of(problem);
    bool is_chain = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN;
    crn_textbuf out;
    *text = NULL;
    *length = 0;
    CRN_TRY(check_texts(problem, error));
    crn_textbuf_init(&out, crn_allocator(env));
    crn_textbuf_print(&out,
                      "{\"format\": \"%s\", \"version\": 1, \"name\": ", is_chain ? "cairn-chain" : "cairn-graph");
    crn_textbuf_json(&out, info->name);
    crn_put(&out, ",\n \"provenance\": ");
    crn_put(&out, info->provenance);
    crn_textbuf_print(&out, ",\n \"fixed_bytes\": %" PRId64, info->fixed_bytes);
    if (is_chain)
        put_chain(&out, cairn_problem_chain(problem));
    else
        put_graph(&out, cairn_problem_graph(problem));
    if (info->machine) {
        crn_put(&out, ",\n ");
        crn_put_machine(&out, info->machine);
    }
    crn_put(&out, "}\n");
    return crn_take_text(&out, text, length, error);
}
