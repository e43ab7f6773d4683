#include "solve/graph/flow_network.h"

#include <string.h>

/* Arcs looked at between two questions whether to stop: some tenths of a millisecond. */
enum { POLL_STEPS = 100000 };

bool crn_flow_network_new(const crn_task *task, crn_arena *arena, int32_t node_max, int32_t arc_max,
                          crn_flow_network *network)
{
    size_t nodes = (size_t)node_max, arcs = 2 * (size_t)arc_max;
    *network = (crn_flow_network){.task = task};
    return (network->first = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
           (network->level = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
           (network->current = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
           (network->queue = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
           (network->path = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
           (network->next = crn_arena_alloc(arena, arcs, sizeof(int32_t))) &&
           (network->head = crn_arena_alloc(arena, arcs, sizeof(int32_t))) &&
           (network->residual = crn_arena_alloc(arena, arcs, sizeof(int64_t)));
}

void crn_flow_network_begin(crn_flow_network *network, int32_t node_count)
{
    network->node_count = node_count;
    network->arc_count = 0;
    memset(network->first, 0xff, (size_t)node_count * sizeof(*network->first));
}

static void half_arc(crn_flow_network *network, int32_t from, int32_t to, int64_t capacity)
{
    int32_t arc = network->arc_count++;
    network->head[arc] = to;
    network->residual[arc] = capacity;
    network->next[arc] = network->first[from];
    network->first[from] = arc;
}

void crn_flow_arc(crn_flow_network *network, int32_t from, int32_t to, int64_t capacity)
{
    half_arc(network, from, to, capacity);
    half_arc(network, to, from, 0);
}

static bool is_stopped(crn_flow_network *network, int32_t steps)
{
    network->steps += steps;
    if (network->steps >= POLL_STEPS && network->task) {
        network->steps = 0;
        network->stopped = network->stopped || crn_should_stop(network->task, NULL);
    }
    return network->stopped;
}

/* Distances from the source over arcs with room, of all nodes that can be reached; -1 for the others. */
static bool find_levels(crn_flow_network *network, int32_t source, int32_t sink)
{
    int32_t head = 0, tail = 0;
    memset(network->level, 0xff, (size_t)network->node_count * sizeof(*network->level));
    network->level[source] = 0;
    network->queue[tail++] = source;
    while (head < tail) {
        int32_t u = network->queue[head++];
        for (int32_t arc = network->first[u]; arc >= 0; arc = network->next[arc]) {
            int32_t v = network->head[arc];
            if (network->residual[arc] > 0 && network->level[v] < 0) {
                network->level[v] = network->level[u] + 1;
                network->queue[tail++] = v;
            }
        }
    }
    return network->level[sink] >= 0;
}

/* Sends flow along the path of arcs, and returns how much and the position of the first arc that is now full. */
static int64_t send(crn_flow_network *network, int32_t depth, int32_t *full)
{
    int64_t amount = CRN_FLOW_INFINITE;
    for (int32_t i = 0; i < depth; i++)
        if (network->residual[network->path[i]] < amount) {
            amount = network->residual[network->path[i]];
            *full = i;
        }
    for (int32_t i = 0; i < depth; i++) {
        int32_t arc = network->path[i];
        network->residual[arc] -= amount;
        if (network->residual[arc ^ 1] < CRN_FLOW_INFINITE)
            network->residual[arc ^ 1] += amount;
    }
    return amount;
}

/* A blocking flow in the level graph: one depth-first search that advances, retreats, and never looks twice at an arc. */
static int64_t block(crn_flow_network *network, int32_t source, int32_t sink)
{
    int64_t total = 0;
    int32_t depth = 0, at = source, full = 0;
    memcpy(network->current, network->first, (size_t)network->node_count * sizeof(*network->current));
    for (;;) {
        if (at == sink) {
            total += send(network, depth, &full);
            if (is_stopped(network, depth))
                return total;
            depth = full;
            at = network->head[network->path[depth] ^ 1];
        }
        int32_t arc = network->current[at];
        while (arc >= 0 &&
               (network->residual[arc] == 0 || network->level[network->head[arc]] != network->level[at] + 1))
            arc = network->next[arc];
        network->current[at] = arc;
        if (arc >= 0) {
            network->path[depth++] = arc;
            at = network->head[arc];
        } else if (depth == 0) {
            return total;
        } else {
            at = network->head[network->path[--depth] ^ 1];
            network->current[at] = network->next[network->current[at]];
        }
    }
}

int64_t crn_flow_maximise(crn_flow_network *network, int32_t source, int32_t sink)
{
    int64_t total = 0;
    while (!is_stopped(network, network->node_count) && find_levels(network, source, sink))
        total += block(network, source, sink);
    return total;
}

bool crn_flow_on_source_side(const crn_flow_network *network, int32_t node)
{
    return network->level[node] >= 0;
}
