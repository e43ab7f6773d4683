/* Stages and nodes, read one by one into arrays that grow. */
#ifndef CRN_READ_PROBLEM_H
#define CRN_READ_PROBLEM_H

#include <cairn/problem.h>

#include "io/json_file.h"

/** A problem while it is read. Texts, options and dependencies lie in the arena. */
typedef struct crn_draft {
    crn_file file;
    crn_arena arena;
    const char *format, *name, *provenance;
    int64_t version, fixed_bytes, input_bytes, input_grad_bytes, backward_begins_at;
    cairn_machine machine;
    bool has_machine;
    cairn_stage *stages;
    cairn_node *nodes;
    int64_t stage_count, stage_capacity, node_count, node_capacity, edge_count;
} crn_draft;

/** An element of "stages" or "nodes": for crn_file_elements, with the draft as context. */
cairn_status crn_read_stage(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error);
cairn_status crn_read_node(void *context, json_t *value, int64_t index, const crn_path *path, cairn_error *error);

/** Makes room for one more element; NULL on failure. */
void *crn_draft_grow(crn_draft *draft, void *elements, int64_t count, int64_t *capacity, size_t size);

#endif
