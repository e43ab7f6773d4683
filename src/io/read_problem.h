/* Stages and nodes, read one by one into memory that the problem takes over. */
#ifndef CRN_READ_PROBLEM_H
#define CRN_READ_PROBLEM_H

#include <cairn/problem.h>

#include "io/json_file.h"

/**
 * A problem while it is read. Stages or nodes are one array that grows, all there is in their arena; options or
 * dependencies lie in lists, texts and what else is read in arena: whoever goes through a problem meets numbers alone.
 */
typedef struct crn_draft {
    crn_file file;
    crn_arena arena, lists, elements;
    const char *format, *name, *provenance;
    int64_t version, fixed_bytes, input_bytes, input_grad_bytes, backward_begins_at;
    cairn_machine machine;
    bool has_machine;
    cairn_stage *stages;
    cairn_node *nodes;
    int64_t stage_count, node_count, capacity, edge_count;
} crn_draft;

/** The elements of "stages" and "nodes": for crn_file_elements, with the draft as context. */
extern const crn_element crn_stage_element, crn_node_element;

/** As cairn_problem_read; by_tree: by jansson's trees alone, slower. For tests that compare the two. */
cairn_status crn_problem_read(const cairn_env *env, const char *text, size_t length, bool by_tree,
                              cairn_problem **problem, cairn_error *error);

/** Makes room for one more element; NULL on failure. */
void *crn_draft_grow(crn_draft *draft, void *elements, int64_t count, size_t size);

#endif
