#include "support/random_problem.h"

#include <stdio.h>
#include <stdlib.h>

enum { STAGES_MAX = 8192, OPTIONS_MAX = CAIRN_STAGE_OPTIONS_MAX, NODES_MAX = 4096, DEPS_MAX = 64 };

static int64_t or_default(int64_t value, int64_t fallback)
{
    return value > 0 ? value : fallback;
}

static void *must_allocate(size_t count, size_t size)
{
    void *block = calloc(count, size);
    if (!block)
        abort();
    return block;
}

static cairn_problem *must_be_valid(cairn_status status, cairn_problem *problem, const cairn_error *error)
{
    if (status == CAIRN_OK)
        return problem;
    fprintf(stderr, "generated problem refused: %s at %s: %s\n", cairn_status_name(status), error->path,
            error->message);
    abort();
}

cairn_machine test_random_machine(test_random *random, int64_t bytes_max, int64_t ns_max)
{
    /* A rate of 1e9 bytes per second moves a byte in a nanosecond. */
    int64_t base = 1000000000 / or_default(ns_max, 12) * or_default(bytes_max, 12);
    cairn_machine machine;
    machine.host_bytes = test_random_chance(random, 70) ? 1000 * or_default(bytes_max, 12)
                                                        : test_random_between(random, 0, 4 * bytes_max);
    machine.to_host_bytes_per_s = test_random_between(random, 1, 4) * base;
    machine.to_device_bytes_per_s = test_random_between(random, 1, 4) * base;
    machine.latency_ns = test_random_chance(random, 50) ? 0 : test_random_between(random, 0, ns_max / 4);
    machine.shared_link = test_random_chance(random, 25);
    return machine;
}

/* ---- chains ---- */

test_chain_shape test_chain_of_everything(int32_t stages_max)
{
    return (test_chain_shape){.stages_max = stages_max,
                              .options_max = 3,
                              .signed_workspaces = true,
                              .weight_grads = true,
                              .no_recompute = true,
                              .fixed = true};
}

static int64_t amount(test_random *random, bool positive, int64_t max)
{
    return test_random_between(random, positive ? 1 : 0, max);
}

static int64_t workspace(test_random *random, bool positive, bool negative, int64_t max)
{
    if (!positive && !negative)
        return 0;
    return test_random_between(random, negative ? -max : 0, max);
}

static void random_option(test_random *random, const test_chain_shape *shape, int64_t output_bytes,
                          cairn_stage_option *option)
{
    option->saved_bytes = output_bytes + test_random_between(random, 0, shape->bytes_max);
    option->forward_ns = amount(random, shape->positive, shape->ns_max);
    option->backward_ns = amount(random, shape->positive, shape->ns_max);
    option->forward_workspace_bytes = workspace(random, shape->workspaces, shape->signed_workspaces, shape->bytes_max);
    option->backward_workspace_bytes = workspace(random, shape->workspaces, shape->signed_workspaces, shape->bytes_max);
}

static void random_stage(test_random *random, const test_chain_shape *shape, cairn_stage_option *options,
                         cairn_stage *stage)
{
    stage->output_bytes = amount(random, shape->positive, shape->bytes_max);
    stage->grad_bytes = shape->plain_grads ? stage->output_bytes : amount(random, shape->positive, shape->bytes_max);
    stage->weight_grad_bytes = shape->weight_grads ? test_random_between(random, 0, shape->bytes_max / 2) : 0;
    stage->no_recompute = shape->no_recompute && test_random_chance(random, 15);
    stage->option_count = (int32_t)test_random_between(random, 1, shape->options_max);
    stage->options = options;
    for (int32_t k = 0; k < stage->option_count; k++)
        random_option(random, shape, stage->output_bytes, &options[k]);
    stage->forward_only_ns = options[0].forward_ns;
    stage->forward_only_workspace_bytes = options[0].forward_workspace_bytes;
    if (!shape->equal_forwards) {
        stage->forward_only_ns = amount(random, shape->positive, shape->ns_max);
        stage->forward_only_workspace_bytes =
            workspace(random, shape->workspaces, shape->signed_workspaces, shape->bytes_max);
    }
}

static test_chain_shape chain_defaults(const test_chain_shape *given)
{
    test_chain_shape shape = *given;
    shape.stages_min = (int32_t)or_default(shape.stages_min, 1);
    shape.stages_max = (int32_t)or_default(shape.stages_max, 6);
    shape.options_max = (int32_t)or_default(shape.options_max, 1);
    shape.bytes_max = or_default(shape.bytes_max, 12);
    shape.ns_max = or_default(shape.ns_max, 12);
    if (shape.stages_max > STAGES_MAX || shape.options_max > OPTIONS_MAX)
        abort();
    return shape;
}

cairn_problem *test_random_chain(test_random *random, const test_chain_shape *shape)
{
    const test_chain_shape full = chain_defaults(shape);
    int32_t n = (int32_t)test_random_between(random, full.stages_min, full.stages_max);
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n * (size_t)full.options_max, sizeof(*options));
    cairn_chain chain = {.stage_count = n, .stages = stages};
    cairn_machine machine;
    cairn_problem_info info = {.fixed_bytes = full.fixed ? test_random_between(random, 0, full.bytes_max) : 0};
    cairn_problem *problem;
    cairn_error error;

    chain.input_bytes = amount(random, full.positive, full.bytes_max);
    chain.input_grad_bytes = full.plain_grads ? chain.input_bytes : amount(random, full.positive, full.bytes_max);
    for (int32_t i = 0; i < n; i++) {
        if (full.homogeneous && i > 0)
            stages[i] = stages[0];
        else
            random_stage(random, &full, options + (ptrdiff_t)i * full.options_max, &stages[i]);
    }
    if (full.machine) {
        machine = test_random_machine(random, full.bytes_max, full.ns_max);
        info.machine = &machine;
    }
    cairn_status status = cairn_problem_new_chain(NULL, &chain, &info, &problem, &error);
    free(options);
    free(stages);
    return must_be_valid(status, problem, &error);
}

cairn_problem *test_random_chain_with_link(uint64_t seed, int32_t stages_max)
{
    test_random random = test_random_seeded(seed);
    test_chain_shape shapes[] = {
        {.machine = true},
        {.machine = true, .positive = true, .plain_grads = true, .equal_forwards = true},
        {.machine = true, .options_max = 2, .weight_grads = true, .fixed = true},
        {.machine = true, .signed_workspaces = true, .no_recompute = true},
    };
    shapes[seed % 4].stages_max = stages_max;
    return test_random_chain(&random, &shapes[seed % 4]);
}

/* ---- graphs ---- */

test_graph_shape test_graph_of_everything(int32_t nodes_max)
{
    return (test_graph_shape){.nodes_max = nodes_max,
                              .aliases = true,
                              .keep = true,
                              .no_recompute = true,
                              .signed_workspaces = true,
                              .fixed = true};
}

/* The nodes under construction, with room for DEPS_MAX dependencies each. */
typedef struct plan {
    test_random *random;
    test_graph_shape shape;
    cairn_node *nodes;
    int32_t *deps;
    int32_t count;
} plan;

static int32_t *deps_of(plan *p, int32_t v)
{
    return p->deps + (ptrdiff_t)v * DEPS_MAX;
}

static void add_dep(plan *p, int32_t v, int32_t dep)
{
    cairn_node *node = &p->nodes[v];
    int32_t *deps = deps_of(p, v);
    for (int32_t i = 0; i < node->dep_count; i++)
        if (deps[i] == dep)
            return;
    if (node->dep_count < DEPS_MAX)
        deps[node->dep_count++] = dep;
}

/* Dependencies in [0, below), near ones more likely than far ones, so that graphs are mostly connected. */
static void add_random_deps(plan *p, int32_t v, int32_t below)
{
    if (below <= 0)
        return;
    int64_t count = test_random_between(p->random, test_random_chance(p->random, 90) ? 1 : 0, p->shape.deps_max);
    for (int64_t i = 0; i < count; i++) {
        int32_t low = test_random_chance(p->random, 60) && below > 3 ? below - 3 : 0;
        add_dep(p, v, (int32_t)test_random_between(p->random, low, below - 1));
    }
}

static void random_node(plan *p, int32_t v)
{
    cairn_node *node = &p->nodes[v];
    *node = (cairn_node){.alias_of = -1, .deps = deps_of(p, v)};
    node->cost_ns = amount(p->random, p->shape.positive, p->shape.ns_max);
    node->bytes = amount(p->random, p->shape.positive, p->shape.bytes_max);
    node->workspace_bytes = workspace(p->random, p->shape.workspaces, p->shape.signed_workspaces, p->shape.bytes_max);
    node->keep = p->shape.keep && (v == p->count - 1 || test_random_chance(p->random, 10));
    node->no_recompute = p->shape.no_recompute && test_random_chance(p->random, 10);
    if (p->shape.aliases && v > 0 && test_random_chance(p->random, 20)) {
        node->alias_of = (int32_t)test_random_between(p->random, 0, v - 1);
        node->bytes = 0;
    }
}

/* The backward node of forward node f reads the gradient before it, f's inputs and, now and then, f itself. */
static void add_backward_deps(plan *p, int32_t v, int32_t f)
{
    const cairn_node *forward = &p->nodes[f];
    add_dep(p, v, v - 1);
    for (int32_t i = 0; i < forward->dep_count; i++)
        if (test_random_chance(p->random, 80))
            add_dep(p, v, forward->deps[i]);
    if (test_random_chance(p->random, 50))
        add_dep(p, v, f);
}

static void random_nodes(plan *p, int32_t forward_count)
{
    for (int32_t v = 0; v < p->count; v++) {
        random_node(p, v);
        if (v < forward_count)
            add_random_deps(p, v, v);
        else
            add_backward_deps(p, v, p->count - 1 - v);
    }
}

static test_graph_shape graph_defaults(const test_graph_shape *given)
{
    test_graph_shape shape = *given;
    shape.nodes_min = (int32_t)or_default(shape.nodes_min, 1);
    shape.nodes_max = (int32_t)or_default(shape.nodes_max, 8);
    shape.deps_max = (int32_t)or_default(shape.deps_max, 3);
    shape.bytes_max = or_default(shape.bytes_max, 12);
    shape.ns_max = or_default(shape.ns_max, 12);
    if (shape.nodes_max > NODES_MAX || shape.deps_max > DEPS_MAX)
        abort();
    return shape;
}

cairn_problem *test_random_graph(test_random *random, const test_graph_shape *shape)
{
    plan p = {.random = random, .shape = graph_defaults(shape)};
    p.count = (int32_t)test_random_between(random, p.shape.nodes_min, p.shape.nodes_max);
    if (p.shape.training && p.count % 2 != 0)
        p.count++;
    p.nodes = must_allocate((size_t)p.count, sizeof(*p.nodes));
    p.deps = must_allocate((size_t)p.count * DEPS_MAX, sizeof(*p.deps));
    int32_t forward_count = p.shape.training ? p.count / 2 : p.count;
    random_nodes(&p, forward_count);

    cairn_graph graph = {p.count, p.nodes, p.shape.training ? forward_count : -1};
    cairn_problem_info info = {.fixed_bytes = p.shape.fixed ? test_random_between(random, 0, p.shape.bytes_max) : 0};
    cairn_machine machine;
    cairn_problem *problem;
    cairn_error error;
    if (p.shape.machine) {
        machine = test_random_machine(random, p.shape.bytes_max, p.shape.ns_max);
        info.machine = &machine;
    }
    cairn_status status = cairn_problem_new_graph(NULL, &graph, &info, &problem, &error);
    free(p.deps);
    free(p.nodes);
    return must_be_valid(status, problem, &error);
}
