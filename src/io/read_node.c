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
    int32_t *deps = crn_arena_alloc(&draft->arena, count, sizeof(*deps));
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

cairn_status crn_read_node(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error)
{
    crn_draft *draft = context;
    node_draft made = {.node.name = "", .alias_of = -1};
    crn_target target = {&made, &draft->arena, 0};
    crn_path alias = {path, "alias_of", 0};
    if (index >= CAIRN_NODES_MAX)
        return crn_path_fail(error, CAIRN_TOO_LARGE, path, "more than %lld nodes", (long long)CAIRN_NODES_MAX);
    CRN_TRY(crn_fields_read(value, node_fields, sizeof(node_fields) / sizeof(node_fields[0]), &target, path, error));
    CRN_TRY(read_deps(draft, &made, index, path, error));
    if (made.alias_of != -1)
        CRN_TRY(check_earlier(made.alias_of, index, &alias, error));
    made.node.alias_of = (int32_t)made.alias_of;
    cairn_node *nodes = crn_draft_grow(draft, draft->nodes, draft->node_count, &draft->node_capacity, sizeof(*nodes));
    if (!nodes)
        return crn_no_memory(error);
    draft->nodes = nodes;
    nodes[draft->node_count++] = made.node;
    return CAIRN_OK;
}
