/* A node of a cairn-graph. */
#include "base/failure.h"
#include "io/read_problem.h"

typedef struct node_draft {
    cairn_node node;
    int64_t alias_of;
    json_t *deps;
} node_draft;

static const crn_field node_fields[] = {
    {"name", CRN_FIELD_TEXT, 0, offsetof(node_draft, node.name)},
    {"cost_ns", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(node_draft, node.cost_ns)},
    {"bytes", CRN_FIELD_COUNT, CRN_REQUIRED, offsetof(node_draft, node.bytes)},
    {"workspace_bytes", CRN_FIELD_SIGNED, 0, offsetof(node_draft, node.workspace_bytes)},
    {"deps", CRN_FIELD_LIST, CRN_REQUIRED, offsetof(node_draft, deps)},
    {"alias_of", CRN_FIELD_COUNT, CRN_NULLABLE, offsetof(node_draft, alias_of)},
    {"keep", CRN_FIELD_BOOL, 0, offsetof(node_draft, node.keep)},
    {"no_recompute", CRN_FIELD_BOOL, 0, offsetof(node_draft, node.no_recompute)},
};

enum { NODE_ROWS = sizeof(node_fields) / sizeof(node_fields[0]) };

/* An index of an earlier node. That it is listed once is checked where the problem is made. */
static cairn_status check_earlier(int64_t earlier, int64_t index, const crn_path *path, cairn_error *error)
{
    if (earlier >= 0 && earlier < index)
        return CAIRN_OK;
    return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%lld is not the index of an earlier node than %lld",
                         (long long)earlier, (long long)index);
}

static cairn_status read_deps(crn_draft *draft, node_draft *made, int64_t index, const crn_path *path,
                              cairn_error *error)
{
    crn_path list = {path, "deps", 0}, here = {&list, NULL, 0};
    size_t count = json_array_size(made->deps);
    draft->edge_count += (int64_t)count;
    if (draft->edge_count > CAIRN_EDGES_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, &list, "more than %lld dependencies", (long long)CAIRN_EDGES_MAX);
    int32_t *deps = crn_arena_alloc(&draft->lists, count, sizeof(*deps));
    if (!deps)
        return crn_no_memory(error);
    for (size_t i = 0; i < count; i++) {
        int64_t dep = 0;
        here.index = (int64_t)i;
        CRN_TRY(crn_integer_read(json_array_get(made->deps, i), &dep, &here, error));
        CRN_TRY(check_earlier(dep, index, &here, error));
        deps[i] = (int32_t)dep;
    }
    made->node.deps = deps;
    made->node.dep_count = (int32_t)count;
    return CAIRN_OK;
}

/* False: out of memory. */
static bool add_node(crn_draft *draft, node_draft *made)
{
    made->node.alias_of = (int32_t)made->alias_of;
    cairn_node *nodes = crn_draft_grow(draft, draft->nodes, draft->node_count, sizeof(*nodes));
    if (!nodes)
        return false;
    draft->nodes = nodes;
    nodes[draft->node_count++] = made->node;
    return true;
}

static cairn_status read_node(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error)
{
    crn_draft *draft = context;
    node_draft made = {.node.name = "", .alias_of = -1};
    crn_target target = {&made, &draft->arena, 0};
    crn_path alias = {path, "alias_of", 0};
    if (index >= CAIRN_NODES_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, path, "more than %lld nodes", (long long)CAIRN_NODES_MAX);
    CRN_TRY(crn_fields_read(value, node_fields, NODE_ROWS, &target, path, error));
    CRN_TRY(read_deps(draft, &made, index, path, error));
    if (made.alias_of != -1)
        CRN_TRY(check_earlier(made.alias_of, index, &alias, error));
    return add_node(draft, &made) ? CAIRN_OK : crn_no_memory(error);
}

/* ---- the plain form ---- */

typedef struct plain_node {
    crn_draft *draft;
    node_draft made;
    int64_t index;
} plain_node;

static crn_plain_result plain_deps(void *context, crn_plain *in)
{
    plain_node *plain = context;
    bool first = true, more = crn_plain_take(in, '[');
    size_t count = more ? crn_plain_count(*in) : 0, read = 0;
    int32_t *deps = crn_arena_alloc(&plain->draft->lists, count, sizeof(*deps));
    if (!deps)
        return CRN_PLAIN_NO_MEMORY;
    while (more && crn_plain_step(in, ']', &first, &more) && more) {
        int64_t dep;
        if (read == count || !crn_plain_integer(in, &dep) || dep < 0 || dep >= plain->index)
            return CRN_PLAIN_ODD;
        deps[read++] = (int32_t)dep;
    }
    plain->made.node.deps = deps;
    plain->made.node.dep_count = (int32_t)count;
    return read == count && !more && !first ? CRN_PLAIN_TAKEN : CRN_PLAIN_ODD;
}

static crn_plain_result read_plain_node(void *context, crn_plain *in, int64_t index)
{
    plain_node plain = {context, {.node.name = "", .alias_of = -1}, index};
    crn_target target = {&plain.made, &plain.draft->arena, 0};
    if (index >= CAIRN_NODES_MAX)
        return CRN_PLAIN_ODD;
    crn_plain_result result = crn_plain_fields(in, node_fields, NODE_ROWS, &target, plain_deps, &plain);
    if (result != CRN_PLAIN_TAKEN)
        return result;
    if (plain.made.alias_of >= index || plain.draft->edge_count + plain.made.node.dep_count > CAIRN_EDGES_MAX)
        return CRN_PLAIN_ODD;
    plain.draft->edge_count += plain.made.node.dep_count;
    return add_node(plain.draft, &plain.made) ? CRN_PLAIN_TAKEN : CRN_PLAIN_NO_MEMORY;
}

const crn_element crn_node_element = {read_plain_node, read_node};
