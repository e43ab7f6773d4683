/*
 * How fast long problems and schedules are written and read, and in how much memory: a chain of a million stages, a
 * graph of half a million nodes, the chain's store-all schedule, and a stage with 92 MB of provenance. Prints one line
 * per file and direction: its size, the processor's time (best of three), megabytes a second, and the most memory that
 * the call had at once beside the text, as a multiple of the text.
 *
 *     bench_files [--quick]
 */
#include <cairn/io.h>
#include <cairn/solve.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support/bench.h"

enum { RUNS = 3 };

typedef struct meter {
    int64_t used, peak;
} meter;

static void *metered_resize(void *context, void *block, size_t old_size, size_t new_size)
{
    meter *bytes = context;
    void *moved = new_size > 0 ? realloc(block, new_size) : NULL;
    if (new_size == 0)
        free(block);
    bytes->used += (int64_t)new_size - (int64_t)old_size;
    bytes->peak = bytes->used > bytes->peak ? bytes->used : bytes->peak;
    return moved;
}

static cairn_problem *chain_of(int32_t n)
{
    cairn_stage *stages = must_allocate((size_t)n, sizeof(*stages));
    cairn_stage_option *options = must_allocate((size_t)n, sizeof(*options));
    char(*names)[24] = must_allocate((size_t)n, sizeof(*names));
    uint64_t state = 1;
    for (int32_t l = 0; l < n; l++) {
        int64_t bytes = next_number(&state, 1, 1 << 20), ns = next_number(&state, 1, 1 << 20);
        snprintf(names[l], sizeof(names[l]), "layers.%d.block", l);
        options[l] = (cairn_stage_option){"keep", 4 * bytes, ns, 2 * ns, 0, 0};
        stages[l] = (cairn_stage){names[l], bytes, bytes, 0, ns, 0, false, 1, &options[l]};
    }
    const cairn_chain chain = {1 << 20, 1 << 20, n, stages};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), &error);
    free(stages);
    free(options);
    free(names);
    return problem;
}

/* A stage whose provenance is an object of so many members of nearly MEMBER_BYTES. */
static cairn_problem *provenance_of(int32_t n)
{
    enum { MEMBER_BYTES = 100 };
    char *text = must_allocate((size_t)n + 1, MEMBER_BYTES), *end = text;
    *end++ = '{';
    for (int32_t i = 0; i < n; i++)
        end += snprintf(end, MEMBER_BYTES,
                        "%s\"layers.%07d.block\": [0.25, \"what the profile says of it\", null, {\"at\": %07d}, true]",
                        i > 0 ? ",\n" : "", i, 1000000 + i);
    memcpy(end, "}", sizeof("}"));
    const cairn_stage_option option = {"keep", 4, 1, 2, 0, 0};
    const cairn_stage stage = {"layer", 1, 1, 0, 1, 0, false, 1, &option};
    const cairn_chain chain = {1, 1, 1, &stage};
    const cairn_problem_info info = {.name = "model", .provenance = text};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_chain(NULL, &chain, &info, &problem, &error), &error);
    free(text);
    return problem;
}

static cairn_problem *graph_of(int32_t n)
{
    cairn_node *nodes = must_allocate((size_t)n, sizeof(*nodes));
    int32_t(*deps)[2] = must_allocate((size_t)n, sizeof(*deps));
    uint64_t state = 1;
    for (int32_t v = 0; v < n; v++) {
        deps[v][0] = v - 1;
        deps[v][1] = v > 1 ? (int32_t)next_number(&state, 0, v - 2) : 0;
        nodes[v] = (cairn_node){.name = "node",
                                .cost_ns = next_number(&state, 1, 1 << 20),
                                .bytes = next_number(&state, 1, 1 << 20),
                                .dep_count = v > 1 ? 2 : v,
                                .deps = deps[v],
                                .alias_of = -1};
    }
    const cairn_graph graph = {n, nodes, -1};
    cairn_problem *problem;
    cairn_error error;
    must(cairn_problem_new_graph(NULL, &graph, NULL, &problem, &error), &error);
    free(nodes);
    free(deps);
    return problem;
}

/* Best of several runs of one direction. */
typedef struct record {
    int64_t ns, peak_bytes;
} record;

static void take(record *best, clock_t begin, const meter *bytes, int64_t beside)
{
    int64_t ns = (int64_t)(clock() - begin) * (1000000000 / CLOCKS_PER_SEC);
    best->ns = best->ns == 0 || ns < best->ns ? ns : best->ns;
    best->peak_bytes = bytes->peak - beside;
}

static void print(const char *what, const char *direction, size_t length, const record *best)
{
    printf("%-8s %-5s %7.1f MB %9.1f ms %7.0f MB/s  memory %.2f of the text\n", what, direction, 1e-6 * (double)length,
           1e-6 * (double)best->ns, 1e3 * (double)length / (double)best->ns, (double)best->peak_bytes / (double)length);
}

/* Writes and reads a problem, or a schedule of it. */
static void measure(const char *what, const cairn_problem *problem, const cairn_schedule *schedule)
{
    record written = {0, 0}, read = {0, 0};
    size_t length = 0;
    for (int run = 0; run < RUNS; run++) {
        meter bytes = {0, 0};
        const cairn_env env = {.allocator = {&bytes, metered_resize}};
        cairn_error error;
        cairn_problem *again = NULL;
        cairn_schedule *schedule_again = NULL;
        char *text;
        clock_t begin = clock();
        must(schedule ? cairn_schedule_write(&env, schedule, &text, &length, &error)
                      : cairn_problem_write(&env, problem, &text, &length, &error),
             &error);
        take(&written, begin, &bytes, 0);
        bytes.peak = bytes.used;
        begin = clock();
        must(schedule ? cairn_schedule_read(&env, problem, text, length, &schedule_again, &error)
                      : cairn_problem_read(&env, text, length, &again, &error),
             &error);
        take(&read, begin, &bytes, (int64_t)length);
        cairn_schedule_free(schedule_again);
        cairn_problem_free(again);
        cairn_text_free(&env, text, length);
    }
    print(what, "write", length, &written);
    print(what, "read", length, &read);
}

static cairn_schedule *store_all(const cairn_problem *problem)
{
    cairn_options *options;
    cairn_schedule *schedule;
    cairn_info info;
    cairn_error error;
    must(cairn_options_new(NULL, &options, &error), &error);
    must(cairn_options_set(options, "solver", "store-all", &error), &error);
    must(cairn_options_set(options, "budget", "none", &error), &error);
    must(cairn_solve(NULL, problem, options, &schedule, &info, &error), &error);
    cairn_info_clear(&info);
    cairn_options_free(options);
    return schedule;
}

int main(int argc, char **argv)
{
    int32_t n = take_quick(&argc, argv, 0) ? 2000 : 1000000;
    cairn_problem *chain = chain_of(n), *graph = graph_of(n / 2), *model = provenance_of(n);
    cairn_schedule *schedule = store_all(chain);
    measure("chain", chain, NULL);
    measure("graph", graph, NULL);
    measure("schedule", chain, schedule);
    measure("model", model, NULL);
    cairn_schedule_free(schedule);
    cairn_problem_free(model);
    cairn_problem_free(graph);
    cairn_problem_free(chain);
    return 0;
}
