#include "solve/milp/frontier_graph.h"

#include <string.h>

enum { NODES_MAX = 200 };

cairn_status crn_frontier_accepts(const crn_task *task, cairn_error *error)
{
    int32_t count = cairn_problem_graph(task->problem)->node_count;
    if (count <= NODES_MAX)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNSUPPORTED, "integer programs are for graphs of at most %d nodes, not %d", NODES_MAX,
                    count);
}

typedef struct making {
    crn_frontier_graph *made;
    const cairn_graph *graph;
    int64_t *cost, *bytes, *extra;
    int32_t *root, *dep_begin, *dep, *reader_begin, *reader, *latest, *always_from;
    int32_t *seen; /* storage -> last node that was found to read it */
    bool *once;
} making;

static bool lists_base(const cairn_node *node)
{
    for (int32_t i = 0; i < node->dep_count; i++)
        if (node->deps[i] == node->alias_of)
            return true;
    return node->alias_of < 0;
}

static int64_t count_edges(const cairn_graph *graph)
{
    int64_t edges = 0;
    for (int32_t v = 0; v < graph->node_count; v++)
        edges += graph->nodes[v].dep_count + (lists_base(&graph->nodes[v]) ? 0 : 1);
    return edges;
}

static bool reserve(making *m)
{
    crn_arena *arena = &m->made->arena;
    size_t n = (size_t)m->graph->node_count, edges = (size_t)count_edges(m->graph);
    return (m->cost = crn_arena_alloc(arena, n, sizeof(*m->cost))) &&
           (m->bytes = crn_arena_alloc(arena, n, sizeof(*m->bytes))) &&
           (m->extra = crn_arena_alloc(arena, n, sizeof(*m->extra))) &&
           (m->root = crn_arena_alloc(arena, n, sizeof(*m->root))) &&
           (m->dep_begin = crn_arena_alloc(arena, n + 1, sizeof(*m->dep_begin))) &&
           (m->dep = crn_arena_alloc(arena, edges, sizeof(*m->dep))) &&
           (m->reader_begin = crn_arena_alloc_zero(arena, n + 2, sizeof(*m->reader_begin))) &&
           (m->reader = crn_arena_alloc(arena, edges, sizeof(*m->reader))) &&
           (m->latest = crn_arena_alloc(arena, n, sizeof(*m->latest))) &&
           (m->always_from = crn_arena_alloc(arena, n, sizeof(*m->always_from))) &&
           (m->seen = crn_arena_alloc(arena, n, sizeof(*m->seen))) &&
           (m->once = crn_arena_alloc(arena, n, sizeof(*m->once)));
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* A kept handle is there from the stage after its node's on, and so is the root of its storage. */
static void fill_node(making *m, int32_t v)
{
    const cairn_node *node = &m->graph->nodes[v];
    int32_t root = node->alias_of < 0 ? v : m->root[node->alias_of], never = m->graph->node_count + 1;
    m->cost[v] = node->cost_ns;
    m->bytes[v] = node->bytes;
    m->extra[v] = crn_max(0, node->workspace_bytes);
    m->root[v] = root;
    m->once[v] = node->no_recompute;
    m->always_from[v] = node->keep ? v + 1 : never;
    if (node->keep && m->always_from[root] > v + 1)
        m->always_from[root] = v + 1;
    m->made->total_cost += node->cost_ns;
    m->made->cost_unit = common_divisor(m->made->cost_unit, node->cost_ns);
    m->made->bytes_unit = common_divisor(m->made->bytes_unit, m->bytes[v]);
    m->made->bytes_unit = common_divisor(m->made->bytes_unit, m->extra[v]);
}

static void fill_deps(making *m)
{
    int32_t edges = 0;
    for (int32_t v = 0; v < m->graph->node_count; v++) {
        const cairn_node *node = &m->graph->nodes[v];
        m->dep_begin[v] = edges;
        if (!lists_base(node))
            m->dep[edges++] = node->alias_of;
        for (int32_t i = 0; i < node->dep_count; i++)
            m->dep[edges++] = node->deps[i];
    }
    m->dep_begin[m->graph->node_count] = edges;
}

/* Counts every (storage, reader) pair once, readers ascending, or writes the readers down. */
static void visit_readers(making *m, bool write)
{
    int32_t n = m->graph->node_count;
    memset(m->seen, 0xff, (size_t)n * sizeof(*m->seen));
    for (int32_t v = 0; v < n; v++)
        for (int32_t i = m->dep_begin[v]; i < m->dep_begin[v + 1]; i++) {
            int32_t storage = m->root[m->dep[i]];
            if (m->seen[storage] == v)
                continue;
            m->seen[storage] = v;
            if (write)
                m->reader[m->reader_begin[storage + 1]++] = v;
            else
                m->reader_begin[storage + 2]++;
        }
}

/* Counting sort: entry s + 1 is where the next reader of s goes, in the end where its readers end. */
static void fill_readers(making *m)
{
    visit_readers(m, false);
    for (int32_t v = 0; v < m->graph->node_count; v++)
        m->reader_begin[v + 2] += m->reader_begin[v + 1];
    visit_readers(m, true);
}

/*
 * latest[v]: in stage t a handle is read by node t itself, or by an earlier node that is computed again, which makes
 * sense as long as that one's handle is of use. A storage is of use as long as one of its handles is.
 */
static void fill_latest(making *m)
{
    int32_t n = m->graph->node_count;
    for (int32_t v = 0; v < n; v++)
        m->latest[v] = v;
    for (int32_t u = n - 1; u >= 0; u--) {
        int64_t last = m->once[u] ? u : crn_max(u, crn_min(m->latest[u], m->always_from[u] - 1));
        for (int32_t i = m->dep_begin[u]; i < m->dep_begin[u + 1]; i++)
            m->latest[m->dep[i]] = (int32_t)crn_max(m->latest[m->dep[i]], last);
        m->latest[m->root[u]] = (int32_t)crn_max(m->latest[m->root[u]], m->latest[u]);
    }
}

static void hand_over(making *m)
{
    crn_frontier_graph *made = m->made;
    made->count = m->graph->node_count;
    made->cost = m->cost;
    made->bytes = m->bytes;
    made->extra = m->extra;
    made->root = m->root;
    made->dep_begin = m->dep_begin;
    made->dep = m->dep;
    made->reader_begin = m->reader_begin;
    made->reader = m->reader;
    made->latest = m->latest;
    made->always_from = m->always_from;
    made->once = m->once;
    made->bytes_unit = crn_max(1, made->bytes_unit);
    made->cost_unit = crn_max(1, made->cost_unit);
}

cairn_status crn_frontier_graph_new(const crn_task *task, crn_frontier_graph **graph, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    *graph = NULL;
    crn_frontier_graph *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    made->fixed_bytes = cairn_problem_info_of(task->problem)->fixed_bytes;
    making m = {.made = made, .graph = cairn_problem_graph(task->problem)};
    if (!reserve(&m)) {
        crn_frontier_graph_free(made);
        return crn_no_memory(error);
    }
    for (int32_t v = 0; v < m.graph->node_count; v++)
        fill_node(&m, v);
    fill_deps(&m);
    fill_readers(&m);
    fill_latest(&m);
    hand_over(&m);
    *graph = made;
    return CAIRN_OK;
}

void crn_frontier_graph_free(crn_frontier_graph *graph)
{
    if (!graph)
        return;
    crn_arena arena = graph->arena; /* the graph itself lies in the arena */
    crn_arena_clear(&arena);
}
