/*
 * A sequence from the set of forward values that stay. The forward runs once. A value that does not stay is dropped
 * after its last forward reader. When the backward needs a value that is gone, this value and what it lacks are
 * recomputed, as little as possible. From then on they stay until their last reader. Outputs and what must not run
 * twice always stay.
 */
#ifndef CRN_GRAPH_REPLAN_H
#define CRN_GRAPH_REPLAN_H

#include "solve/graph/graph_sequence.h"

/** Computations of a node for which a replan gets room; it makes two at most. */
enum { CRN_REPLAN_TIMES = 3 };

typedef struct crn_replan {
    const crn_graph_model *model;
    int32_t backward_begin; /* the first node of the backward */
    bool *present;          /* of a storage, while a sequence is made */
    int32_t *stack, *cursor;
    crn_sequence sequence;
} crn_replan;

/** Room for sequences of capacity events; crn_replan_find_backward comes next. */
cairn_status crn_replan_new(const crn_graph_model *model, crn_arena *arena, int32_t capacity, crn_replan *replan,
                            cairn_error *error);
/** Sets backward_begin: backward_begins_at, else the node at which storing everything peaks. Uses the sequence. */
void crn_replan_find_backward(crn_replan *replan, const cairn_graph *graph, crn_sequence_eval *eval);

static inline bool crn_always_stays(const crn_graph_model *model, int32_t s)
{
    return model->once[s] || model->keep[s];
}

/** Begins a sequence with the forward, after which the kept storages (by index) are present. False: no room. */
bool crn_replan_forward(crn_replan *replan, const bool *kept);
/** Computes v, and before it whatever it lacks. False: no room. */
bool crn_replan_require(crn_replan *replan, int32_t v);
/** The whole sequence. False: no room. */
bool crn_replan_make(crn_replan *replan, const bool *kept);

#endif
