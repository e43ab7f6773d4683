/*
 * The canonical form of a problem and its hash (docs/reference/formats/README.md): JSON without names and provenance,
 * defaults written out, keys sorted, no spaces. It is streamed into the hash and never exists as a text, so it cannot
 * fail.
 */
#include <string.h>

#include "base/digits.h"
#include "problem/problem.h"

static void put(crn_sha256 *hash, const char *text)
{
    crn_sha256_add(hash, text, strlen(text));
}

/* A field, behind the brace that opens its object or the comma that ends the field before. */
static void put_int(crn_sha256 *hash, char before, const char *key, int64_t value)
{
    char text[96], *end = text + sizeof(text), *begin = crn_digits_before(end, value);
    size_t length = strlen(key);
    *--begin = ':';
    *--begin = '"';
    begin -= length;
    memcpy(begin, key, length);
    *--begin = '"';
    *--begin = before;
    crn_sha256_add(hash, begin, (size_t)(end - begin));
}

static void put_bool(crn_sha256 *hash, char before, const char *key, bool value)
{
    const char begin[] = {before, '"', '\0'};
    put(hash, begin);
    put(hash, key);
    put(hash, value ? "\":true" : "\":false");
}

static void put_machine(crn_sha256 *hash, const cairn_machine *machine)
{
    put(hash, ",\"machine\":");
    if (!machine) {
        put(hash, "null");
        return;
    }
    put_int(hash, '{', "host_bytes", machine->host_bytes);
    put_int(hash, ',', "latency_ns", machine->latency_ns);
    put_bool(hash, ',', "shared_link", machine->shared_link);
    put_int(hash, ',', "to_device_bytes_per_s", machine->to_device_bytes_per_s);
    put_int(hash, ',', "to_host_bytes_per_s", machine->to_host_bytes_per_s);
    put(hash, "}");
}

static void put_option(crn_sha256 *hash, const cairn_stage_option *option)
{
    put_int(hash, '{', "backward_ns", option->backward_ns);
    put_int(hash, ',', "backward_workspace_bytes", option->backward_workspace_bytes);
    put_int(hash, ',', "forward_ns", option->forward_ns);
    put_int(hash, ',', "forward_workspace_bytes", option->forward_workspace_bytes);
    put_int(hash, ',', "saved_bytes", option->saved_bytes);
    put(hash, "}");
}

static void put_stage(crn_sha256 *hash, const cairn_stage *stage)
{
    put_int(hash, '{', "forward_only_ns", stage->forward_only_ns);
    put_int(hash, ',', "forward_only_workspace_bytes", stage->forward_only_workspace_bytes);
    put_int(hash, ',', "grad_bytes", stage->grad_bytes);
    put_bool(hash, ',', "no_recompute", stage->no_recompute);
    put(hash, ",\"options\":[");
    for (int32_t k = 0; k < stage->option_count; k++) {
        if (k > 0)
            put(hash, ",");
        put_option(hash, &stage->options[k]);
    }
    put(hash, "]");
    put_int(hash, ',', "output_bytes", stage->output_bytes);
    put_int(hash, ',', "weight_grad_bytes", stage->weight_grad_bytes);
    put(hash, "}");
}

static void put_chain(crn_sha256 *hash, const cairn_problem *problem)
{
    put_int(hash, '{', "fixed_bytes", problem->info.fixed_bytes);
    put(hash, ",\"format\":\"cairn-chain\"");
    put_int(hash, ',', "input_bytes", problem->chain.input_bytes);
    put_int(hash, ',', "input_grad_bytes", problem->chain.input_grad_bytes);
    put_machine(hash, problem->info.machine);
    put(hash, ",\"stages\":[");
    for (int32_t i = 0; i < problem->chain.stage_count; i++) {
        if (i > 0)
            put(hash, ",");
        put_stage(hash, &problem->chain.stages[i]);
    }
    put(hash, "],\"version\":1}");
}

static void put_node(crn_sha256 *hash, const cairn_node *node)
{
    char text[CRN_DIGITS_MAX + 1], *end = text + sizeof(text);
    if (node->alias_of >= 0)
        put_int(hash, '{', "alias_of", node->alias_of);
    else
        put(hash, "{\"alias_of\":null");
    put_int(hash, ',', "bytes", node->bytes);
    put_int(hash, ',', "cost_ns", node->cost_ns);
    put(hash, ",\"deps\":[");
    for (int32_t i = 0; i < node->dep_count; i++) {
        char *begin = crn_digits_before(end, node->deps[i]);
        if (i > 0)
            *--begin = ',';
        crn_sha256_add(hash, begin, (size_t)(end - begin));
    }
    put(hash, "]");
    put_bool(hash, ',', "keep", node->keep);
    put_bool(hash, ',', "no_recompute", node->no_recompute);
    put_int(hash, ',', "workspace_bytes", node->workspace_bytes);
    put(hash, "}");
}

static void put_graph(crn_sha256 *hash, const cairn_problem *problem)
{
    put_int(hash, '{', "fixed_bytes", problem->info.fixed_bytes);
    put(hash, ",\"format\":\"cairn-graph\"");
    put_machine(hash, problem->info.machine);
    put(hash, ",\"nodes\":[");
    for (int32_t v = 0; v < problem->graph.node_count; v++) {
        if (v > 0)
            put(hash, ",");
        put_node(hash, &problem->graph.nodes[v]);
    }
    put(hash, "],\"version\":1}");
}

void crn_problem_hash_fill(cairn_problem *problem)
{
    crn_sha256 hash;
    crn_sha256_init(&hash);
    if (problem->kind == CAIRN_KIND_CHAIN)
        put_chain(&hash, problem);
    else
        put_graph(&hash, problem);
    crn_sha256_text(&hash, problem->hash);
}
