/*
 * A chain as a graph: what graph solvers are to work on where the problem came as a chain.
 *
 * Model     The gradient of the last output is there from the start, as in the chain:
 *               node "output gradient": d[n], no cost, runs once (left out where d[n] is empty).
 *           Stage l with input y[l-1] (of stage 1: always resident, so no node), option 0, in two parts:
 *               x[l] = what the backward needs beside the output, A[l] - a[l]       reads y[l-1]
 *               y[l] = the output, a[l]                                            reads x[l], y[l-1]
 *           They cost uF together, each its share by size; where A[l] = a[l] there is no x[l]. Then, for l = n .. 1:
 *               w[l] = the weight gradients, an output of the whole; no cost        reads what b[l] reads
 *               b[l] = d[l-1], costs uB, runs once                                 reads d[l], x[l], y[l], y[l-1]
 *           fixed_bytes includes a[0]. x[l] has the workspace oF + a[l], so that its computation takes what the saving
 *           forward takes; w[l] comes first, so that b[l] runs beside both of its results.
 * Why so    Every chain schedule without transfers is one of the graph, operation by operation, with the same time and
 *           no more memory, where a forward that saves nothing takes the time and memory of one that saves:
 *           forward_save = x, y; forward_keep = x, y, drop x; forward_drop = forward_keep, drop y[l-1]; backward = w, b.
 *           docs/explanation/solvers/convert.md says where the graph allows more, and where it allows less.
 * Sums      Cannot pass 2^63 - 1: the chain's own total counts A[l], a[l], d[l] and every workspace on their own.
 * Cost      O(n) time and memory.
 */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/failure.h"
#include "problem/problem.h"

enum { STAGE_NODES_MAX = 4, STAGE_DEPS_MAX = 11, NONE = -1 };

typedef struct conversion {
    crn_arena arena;
    const cairn_chain *chain;
    cairn_node *nodes;
    int32_t *deps;           /* of all nodes, one after the other */
    int32_t *extra, *output; /* x[l] and y[l] of stage l; NONE where there is none */
    int32_t count, dep_count;
} conversion;

static bool reserve(conversion *c)
{
    size_t n = (size_t)c->chain->stage_count;
    c->nodes = crn_arena_alloc(&c->arena, STAGE_NODES_MAX * n + 1, sizeof(*c->nodes));
    c->deps = crn_arena_alloc(&c->arena, STAGE_DEPS_MAX * n, sizeof(*c->deps));
    c->extra = crn_arena_alloc(&c->arena, n + 1, sizeof(*c->extra));
    c->output = crn_arena_alloc(&c->arena, n + 1, sizeof(*c->output));
    return c->nodes && c->deps && c->extra && c->output;
}

/* "block 3.backward"; a stage without a name is "stage 3". NULL on failure. */
static const char *name_node(conversion *c, int32_t l, const char *suffix)
{
    char number[32];
    const char *stage = c->chain->stages[l - 1].name;
    snprintf(number, sizeof(number), "stage %d", (int)l);
    if (!stage[0])
        stage = number;
    size_t size = strlen(stage) + strlen(suffix) + 1;
    char *name = crn_arena_alloc(&c->arena, size, 1);
    if (name)
        snprintf(name, size, "%s%s", stage, suffix);
    return name;
}

/* The next node; what it reads is added by add_dep before the next one begins. Returns its index. */
static int32_t add_node(conversion *c, const char *name, int64_t cost_ns, int64_t bytes)
{
    c->nodes[c->count] = (cairn_node){
        .name = name, .cost_ns = cost_ns, .bytes = bytes, .deps = c->deps + c->dep_count, .alias_of = NONE};
    return c->count++;
}

static void add_dep(conversion *c, int32_t dep)
{
    if (dep == NONE)
        return;
    c->deps[c->dep_count++] = dep;
    c->nodes[c->count - 1].dep_count++;
}

/* The output's share of the forward's time, by size: all of it where nothing else is saved. */
static int64_t share_of_output(const cairn_stage *stage)
{
    const cairn_stage_option *option = &stage->options[0];
    if (option->saved_bytes == stage->output_bytes)
        return option->forward_ns;
    crn_wide product = (crn_wide)(uint64_t)option->forward_ns * (uint64_t)stage->output_bytes;
    return (int64_t)(product / (uint64_t)option->saved_bytes);
}

static bool add_forward(conversion *c, int32_t l)
{
    const cairn_stage *stage = &c->chain->stages[l - 1];
    const cairn_stage_option *option = &stage->options[0];
    int64_t extra_bytes = option->saved_bytes - stage->output_bytes, cost_ns = share_of_output(stage);
    const char *output_name = name_node(c, l, ""), *extra_name = name_node(c, l, ".saved");
    c->extra[l] = NONE;
    if (!output_name || !extra_name)
        return false;
    if (extra_bytes > 0) {
        c->extra[l] = add_node(c, extra_name, option->forward_ns - cost_ns, extra_bytes);
        c->nodes[c->extra[l]].workspace_bytes = option->forward_workspace_bytes + stage->output_bytes;
        c->nodes[c->extra[l]].no_recompute = stage->no_recompute;
        add_dep(c, c->output[l - 1]);
    }
    c->output[l] = add_node(c, output_name, cost_ns, stage->output_bytes);
    if (extra_bytes == 0)
        c->nodes[c->output[l]].workspace_bytes = option->forward_workspace_bytes;
    c->nodes[c->output[l]].no_recompute = stage->no_recompute;
    add_dep(c, c->output[l - 1]);
    add_dep(c, c->extra[l]);
    return true;
}

static void read_for_backward(conversion *c, int32_t l, int32_t gradient)
{
    add_dep(c, gradient);
    add_dep(c, c->output[l - 1]);
    add_dep(c, c->extra[l]);
    add_dep(c, c->output[l]);
}

static bool add_backward(conversion *c, int32_t l, int32_t *gradient)
{
    const cairn_stage *stage = &c->chain->stages[l - 1];
    int64_t result_bytes = l > 1 ? c->chain->stages[l - 2].grad_bytes : c->chain->input_grad_bytes;
    const char *weights_name = name_node(c, l, ".weight_grad"), *name = name_node(c, l, ".backward");
    if (!weights_name || !name)
        return false;
    if (stage->weight_grad_bytes > 0) {
        int32_t weights = add_node(c, weights_name, 0, stage->weight_grad_bytes);
        c->nodes[weights].keep = c->nodes[weights].no_recompute = true;
        read_for_backward(c, l, *gradient);
    }
    int32_t backward = add_node(c, name, stage->options[0].backward_ns, result_bytes);
    c->nodes[backward].workspace_bytes = stage->options[0].backward_workspace_bytes;
    c->nodes[backward].no_recompute = true;
    c->nodes[backward].keep = l == 1;
    read_for_backward(c, l, *gradient);
    *gradient = backward;
    return true;
}

static bool add_all(conversion *c, int32_t *backward_begins_at)
{
    int32_t n = c->chain->stage_count, gradient = NONE;
    bool fits = reserve(c);
    if (!fits)
        return false;
    if (c->chain->stages[n - 1].grad_bytes > 0) {
        gradient = add_node(c, "output gradient", 0, c->chain->stages[n - 1].grad_bytes);
        c->nodes[gradient].no_recompute = true;
    }
    c->output[0] = NONE;
    for (int32_t l = 1; fits && l <= n; l++)
        fits = add_forward(c, l);
    *backward_begins_at = c->count;
    for (int32_t l = n; fits && l >= 1; l--)
        fits = add_backward(c, l, &gradient);
    return fits;
}

cairn_status cairn_chain_to_graph(const cairn_env *env, const cairn_problem *chain, cairn_problem **graph,
                                  cairn_error *error)
{
    conversion c = {.chain = cairn_problem_chain(chain)};
    cairn_graph made = {.node_count = 0};
    cairn_problem_info info = *cairn_problem_info_of(chain);
    *graph = NULL;
    if (!c.chain)
        return crn_fail(error, CAIRN_UNSUPPORTED, "only a chain is converted, and the problem is a graph");
    crn_arena_init(&c.arena, crn_allocator(env));
    cairn_status status = CAIRN_OK;
    if (!add_all(&c, &made.backward_begins_at))
        status = crn_no_memory(error);
    made.node_count = c.count;
    made.nodes = c.nodes;
    info.fixed_bytes += c.chain->input_bytes;
    if (status == CAIRN_OK)
        status = cairn_problem_new_graph(env, &made, &info, graph, error);
    crn_arena_clear(&c.arena);
    return status;
}
