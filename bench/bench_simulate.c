/*
 * How fast schedules are built and simulated: about a million operations on chains and graphs, with and without
 * transfers, and short schedules again and again, as a search does it. Prints one line per case, best of several runs.
 *
 *     bench_simulate [--quick]
 */
#include <cairn/schedule.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/bench.h"

enum { RUNS = 5 };

static const cairn_machine link = {(int64_t)1 << 40, 12000000000, 12000000000, 10000, false};

static cairn_problem *chain_of(int32_t stage_count)
{
    static const cairn_stage_option option = {"keep", 65536, 1000, 2000, 512, -512};
    cairn_stage *stages = must_allocate((size_t)stage_count, sizeof(*stages));
    for (int32_t i = 0; i < stage_count; i++)
        stages[i] = (cairn_stage){"", 4096, 4096, 64, 950, 512, false, 1, &option};
    const cairn_chain chain = {4096, 4096, stage_count, stages};
    const cairn_problem_info info = {NULL, NULL, 0, &link};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_chain(NULL, &chain, &info, &problem, &error), &error);
    free(stages);
    return problem;
}

/* Each node reads the two before it. */
static cairn_problem *graph_of(int32_t node_count)
{
    cairn_node *nodes = must_allocate((size_t)node_count, sizeof(*nodes));
    int32_t *deps = must_allocate((size_t)node_count + 2, sizeof(*deps));
    for (int32_t v = 0; v < node_count; v++) {
        deps[v] = v;
        nodes[v] = (cairn_node){"", 1000, 4096, 100, v < 2 ? deps : deps + v - 2, v < 2 ? v : 2, -1, false, false};
    }
    const cairn_graph graph = {node_count, nodes, -1};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_graph(NULL, &graph, NULL, &problem, &error), &error);
    free(deps);
    free(nodes);
    return problem;
}

static void add(cairn_builder *builder, cairn_op_code code, cairn_value value, int32_t index)
{
    cairn_error error;
    must(cairn_builder_add(builder, (cairn_op){(uint8_t)code, (uint8_t)value, 0, index}, &error), &error);
}

static void store_all(cairn_builder *builder, int32_t n)
{
    for (int32_t l = 1; l <= n; l++)
        add(builder, CAIRN_OP_FORWARD_SAVE, CAIRN_VALUE_OUTPUT, l);
    for (int32_t l = n; l >= 1; l--)
        add(builder, CAIRN_OP_BACKWARD, CAIRN_VALUE_OUTPUT, l);
}

/* Every saved set is offloaded: the device holds two, the host all. */
static void offload_all(cairn_builder *builder, int32_t n)
{
    for (int32_t l = 1; l <= n; l++) {
        add(builder, CAIRN_OP_FORWARD_SAVE, CAIRN_VALUE_OUTPUT, l);
        add(builder, CAIRN_OP_OFFLOAD, CAIRN_VALUE_SAVED, l);
        if (l > 1)
            add(builder, CAIRN_OP_DROP, CAIRN_VALUE_SAVED, l - 1);
    }
    for (int32_t l = n; l >= 1; l--) {
        if (l > 1)
            add(builder, CAIRN_OP_PREFETCH, CAIRN_VALUE_SAVED, l - 1);
        add(builder, CAIRN_OP_BACKWARD, CAIRN_VALUE_OUTPUT, l);
        add(builder, CAIRN_OP_DISCARD, CAIRN_VALUE_SAVED, l);
    }
}

static void compute_all(cairn_builder *builder, int32_t node_count)
{
    for (int32_t v = 0; v < node_count; v++) {
        add(builder, CAIRN_OP_COMPUTE, CAIRN_VALUE_OUTPUT, v);
        if (v >= 2)
            add(builder, CAIRN_OP_DROP, CAIRN_VALUE_OUTPUT, v - 2);
    }
}

static double best_simulation(const cairn_problem *problem, const cairn_schedule *schedule, int64_t budget_bytes,
                              int repeats)
{
    double best = 1e9;
    for (int run = 0; run < RUNS; run++) {
        cairn_replay replay;
        cairn_error error;
        double begin = clock_seconds();
        for (int i = 0; i < repeats; i++)
            must(cairn_simulate(NULL, problem, schedule, budget_bytes, NULL, &replay, &error), &error);
        double took = clock_seconds() - begin;
        if (!replay.valid) {
            fprintf(stderr, "%s\n", replay.violation.message);
            exit(1);
        }
        best = took < best ? took : best;
    }
    return best;
}

static void measure(const char *name, cairn_problem *problem, int32_t size, int64_t budget_bytes, int repeats,
                    void (*fill)(cairn_builder *builder, int32_t size))
{
    cairn_builder *builder;
    cairn_schedule *schedule;
    cairn_error error;
    must(cairn_builder_new(NULL, problem, &builder, &error), &error);
    double begin = clock_seconds();
    fill(builder, size);
    double added = clock_seconds();
    must(cairn_builder_finish(builder, NULL, &schedule, &error), &error);
    double finished = clock_seconds();
    double simulated = best_simulation(problem, schedule, budget_bytes, repeats);
    double total = (double)cairn_schedule_count(schedule) * repeats;
    printf("%-24s %8" PRId64 " ops  add %6.3f s  finish %6.3f s  simulate %6.3f s  %5.1f M ops/s\n", name,
           cairn_schedule_count(schedule), added - begin, finished - added, simulated, total / simulated / 1e6);
    cairn_schedule_free(schedule);
    cairn_builder_free(builder);
    cairn_problem_free(problem);
}

int main(int argc, char **argv)
{
    int32_t scale = take_quick(&argc, argv, 0) ? 100 : 1, long_chain = 500000 / scale, offloading = 166667 / scale;
    measure("chain, store all", chain_of(long_chain), long_chain, CAIRN_NONE, 1, store_all);
    measure("chain, offload all", chain_of(offloading), offloading, 400000 + 64 * (int64_t)offloading, 1, offload_all);
    measure("graph, drop when used", graph_of(long_chain), long_chain, 16384, 1, compute_all);
    measure("chain of 50, repeated", chain_of(50), 50, CAIRN_NONE, 10000 / scale, store_all);
    return 0;
}
