#include "solve/graph_model.h"

#include "problem/problem.h"

typedef struct building {
    crn_graph_model *model;
    const cairn_graph *graph;
    int64_t *cost, *bytes, *extra;
    int32_t *root, *dep_begin, *dep, *use_begin, *use, *keep_from;
    int32_t *seen; /* storage -> last node that was found to read it */
    bool *keep, *once, *once_node;
} building;

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

static bool reserve(building *b)
{
    crn_arena *arena = &b->model->arena;
    size_t n = (size_t)b->graph->node_count, edges = (size_t)count_edges(b->graph);
    b->cost = crn_arena_alloc(arena, n, sizeof(*b->cost));
    b->bytes = crn_arena_alloc(arena, n, sizeof(*b->bytes));
    b->extra = crn_arena_alloc(arena, n, sizeof(*b->extra));
    b->root = crn_arena_alloc(arena, n, sizeof(*b->root));
    b->dep_begin = crn_arena_alloc(arena, n + 1, sizeof(*b->dep_begin));
    b->dep = crn_arena_alloc(arena, edges, sizeof(*b->dep));
    b->use_begin = crn_arena_alloc_zero(arena, n + 2, sizeof(*b->use_begin));
    b->use = crn_arena_alloc(arena, edges, sizeof(*b->use));
    b->keep_from = crn_arena_alloc(arena, n, sizeof(*b->keep_from));
    b->seen = crn_arena_alloc(arena, n, sizeof(*b->seen));
    b->keep = crn_arena_alloc_zero(arena, n, sizeof(*b->keep));
    b->once = crn_arena_alloc_zero(arena, n, sizeof(*b->once));
    b->once_node = crn_arena_alloc(arena, n, sizeof(*b->once_node));
    return b->once_node && b->cost && b->bytes && b->extra && b->root && b->dep_begin && b->dep && b->use_begin &&
           b->use && b->keep_from && b->seen && b->keep && b->once;
}

static void fill_nodes(building *b)
{
    int32_t edges = 0;
    for (int32_t v = 0; v < b->graph->node_count; v++) {
        const cairn_node *node = &b->graph->nodes[v];
        int32_t root = node->alias_of < 0 ? v : b->root[node->alias_of];
        b->cost[v] = node->cost_ns;
        b->bytes[v] = node->bytes;
        b->extra[v] = crn_max(0, node->workspace_bytes);
        b->root[v] = root;
        b->keep_from[v] = b->graph->node_count;
        if (node->keep && !b->keep[root]) {
            b->keep[root] = true;
            b->keep_from[root] = v;
        }
        b->once[root] = b->once[root] || node->no_recompute;
        b->once_node[v] = node->no_recompute;
        b->dep_begin[v] = edges;
        if (!lists_base(node))
            b->dep[edges++] = node->alias_of;
        for (int32_t i = 0; i < node->dep_count; i++)
            b->dep[edges++] = node->deps[i];
        b->model->total_cost += node->cost_ns;
    }
    b->dep_begin[b->graph->node_count] = edges;
}

/* Calls for every (storage, reader) pair once, readers ascending: counts them, or writes the readers down. */
static void visit_uses(building *b, bool write)
{
    int32_t n = b->graph->node_count;
    for (int32_t v = 0; v < n; v++)
        b->seen[v] = -1;
    for (int32_t v = 0; v < n; v++)
        for (int32_t i = b->dep_begin[v]; i < b->dep_begin[v + 1]; i++) {
            int32_t storage = b->root[b->dep[i]];
            if (b->seen[storage] == v)
                continue;
            b->seen[storage] = v;
            if (write)
                b->use[b->use_begin[storage + 1]++] = v;
            else
                b->use_begin[storage + 2]++;
        }
}

/* Users of every storage by counting sort: entry s + 1 is where the next user of s goes, in the end where they end. */
static void fill_uses(building *b)
{
    visit_uses(b, false);
    for (int32_t v = 0; v < b->graph->node_count; v++)
        b->use_begin[v + 2] += b->use_begin[v + 1];
    visit_uses(b, true);
}

cairn_status crn_graph_model_new(const crn_task *task, crn_graph_model **model, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    *model = NULL;
    crn_graph_model *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    building b = {.model = made, .graph = cairn_problem_graph(task->problem)};
    if (!reserve(&b)) {
        crn_graph_model_free(made);
        return crn_no_memory(error);
    }
    fill_nodes(&b);
    fill_uses(&b);
    made->node_count = b.graph->node_count;
    made->fixed_bytes = cairn_problem_info_of(task->problem)->fixed_bytes;
    made->cost = b.cost;
    made->bytes = b.bytes;
    made->extra = b.extra;
    made->root = b.root;
    made->dep_begin = b.dep_begin;
    made->dep = b.dep;
    made->use_begin = b.use_begin;
    made->use = b.use;
    made->keep = b.keep;
    made->keep_from = b.keep_from;
    made->once = b.once;
    made->once_node = b.once_node;
    *model = made;
    return CAIRN_OK;
}

void crn_graph_model_free(crn_graph_model *model)
{
    if (!model)
        return;
    crn_arena_clear(&model->arena);
}
