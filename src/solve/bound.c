/*
 * Lower bounds that hold for every schedule of a problem: on its makespan and on the memory that it needs.
 *
 * Time. Every stage of a chain runs its backward once, with what a saving forward of the same option left; every node
 * of a graph is computed at least once. So
 *     chain: sum over l of min over k of uF_k[l] + uB_k[l],      graph: sum of cost_ns.
 * The methods of the registry (BOUND_MAP) raise that where they can, each from what the ones before have proved.
 *
 * Memory. An operation of a graph needs what it reads, what it makes and its workspace at once, besides what is always
 * resident. The methods raise that, too: chain_memory_bound.c, graph_bound.c and graph_demand.c.
 */
#include "problem/problem.h"
#include "solve/solver.h"

/*
 * A method that needs more memory than the caller allows says nothing more: what it has said holds. Where nobody set a
 * limit, the want of memory is the machine's.
 */
static cairn_status unless_limited(const crn_task *task, cairn_status status)
{
    bool forgiven = status == CAIRN_NO_MEMORY && task->settings->memory_limit_bytes != CAIRN_NONE;
    return forgiven ? CAIRN_OK : status;
}

void **crn_bound_kept(const crn_task *task, const crn_bound_method *method)
{
    for (int i = 0; task->bounds && crn_bound_methods[i]; i++)
        if (crn_bound_methods[i] == method)
            return &task->bounds->kept[i];
    return NULL;
}

static cairn_status raise_by(const crn_task *task, int method, int64_t budget_bytes, int64_t *bound_ns,
                             cairn_error *error)
{
    const crn_bound_method *asked = crn_bound_methods[method];
    void *own = NULL, **kept = task->bounds ? &task->bounds->kept[method] : &own;
    cairn_status status = asked->raise_makespan(task, kept, budget_bytes, bound_ns, error);
    if (own)
        asked->forget(task, own);
    return unless_limited(task, status);
}

int64_t crn_work_ns(const cairn_problem *problem)
{
    return problem->work_ns;
}

cairn_status crn_raise_bound(const crn_task *task, int64_t budget_bytes, int64_t enough_ns, int64_t *bound_ns,
                             const char **method, cairn_error *error)
{
    for (int i = 0; crn_bound_methods[i] && *bound_ns < enough_ns; i++) {
        int64_t before_ns = *bound_ns;
        if (crn_bound_methods[i]->raise_makespan)
            CRN_TRY(raise_by(task, i, budget_bytes, bound_ns, error));
        if (*bound_ns > before_ns)
            *method = crn_bound_methods[i]->name;
    }
    return CAIRN_OK;
}

cairn_status crn_lower_bound(const crn_task *task, int64_t budget_bytes, int64_t *bound_ns, const char **method,
                             cairn_error *error)
{
    *method = "work";
    *bound_ns = crn_work_ns(task->problem);
    return crn_raise_bound(task, budget_bytes, INT64_MAX, bound_ns, method, error);
}

void crn_bounds_forget(const crn_task *task)
{
    for (int i = 0; task->bounds && crn_bound_methods[i]; i++) {
        if (task->bounds->kept[i])
            crn_bound_methods[i]->forget(task, task->bounds->kept[i]);
        task->bounds->kept[i] = NULL;
    }
}

/* ---- memory ---- */

/* For the bytes of the storages that a node's computation touches: which of them were counted. */
typedef struct touched {
    const cairn_graph *graph;
    int32_t *root; /* of a node: the one whose storage its output lies in */
    int32_t *mark; /* of a root: the node that touched it last, or KEPT */
    int64_t kept_bytes;
} touched;

enum { UNTOUCHED = -1, KEPT = INT32_MAX };

static int64_t touch(touched *t, int32_t node, int32_t v)
{
    int32_t root = t->root[node];
    if (t->mark[root] == KEPT || t->mark[root] == v)
        return 0;
    t->mark[root] = v;
    return t->graph->nodes[root].bytes;
}

static int64_t node_memory(touched *t, int32_t v)
{
    const cairn_node *node = &t->graph->nodes[v];
    int64_t before = t->kept_bytes;
    for (int32_t i = 0; i < node->dep_count; i++)
        before += touch(t, node->deps[i], v);
    if (node->alias_of >= 0)
        before += touch(t, node->alias_of, v);
    return before + crn_max(node->bytes, node->bytes + node->workspace_bytes);
}

static void keep(touched *t, int32_t v)
{
    int32_t root = t->root[v];
    if (t->mark[root] != KEPT)
        t->kept_bytes += t->graph->nodes[root].bytes;
    t->mark[root] = KEPT;
}

static cairn_status graph_memory(const crn_task *task, int64_t *bytes, cairn_error *error)
{
    touched t = {.graph = cairn_problem_graph(task->problem)};
    cairn_allocator allocator = crn_allocator(task->env);
    int32_t count = t.graph->node_count;
    t.root = crn_alloc(&allocator, 2 * (size_t)count, sizeof(*t.root));
    if (!t.root)
        return crn_no_memory(error);
    t.mark = t.root + count;
    for (int32_t v = 0; v < count; v++)
        t.mark[v] = UNTOUCHED;
    *bytes = 0;
    for (int32_t v = 0; v < count; v++) {
        t.root[v] = t.graph->nodes[v].alias_of < 0 ? v : t.root[t.graph->nodes[v].alias_of];
        *bytes = crn_max(*bytes, node_memory(&t, v));
        if (t.graph->nodes[v].keep && !task->machine) /* with one, a copy on the host would do */
            keep(&t, v);
    }
    crn_free(&allocator, t.root, 2 * (size_t)count, sizeof(*t.root));
    return CAIRN_OK;
}

static cairn_status bound_memory(const crn_task *task, int64_t *bytes, cairn_error *error)
{
    *bytes = 0;
    if (cairn_problem_graph(task->problem))
        CRN_TRY(graph_memory(task, bytes, error));
    *bytes += cairn_problem_info_of(task->problem)->fixed_bytes;
    for (const crn_bound_method *const *other = crn_bound_methods; *other; other++)
        if ((*other)->raise_memory)
            CRN_TRY(unless_limited(task, (*other)->raise_memory(task, bytes, error)));
    return CAIRN_OK;
}

cairn_status crn_least_lower(const crn_task *task, int64_t *bytes, cairn_error *error)
{
    int64_t once = 0, *known = task->bounds ? &task->bounds->least_lower_bytes[task->machine != NULL] : &once;
    if (*known == 0)
        CRN_TRY(bound_memory(task, known, error));
    *bytes = *known;
    return CAIRN_OK;
}
