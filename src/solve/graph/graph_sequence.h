/*
 * A schedule of a graph without transfers, reduced to what matters: the sequence of its computations.
 *
 * Where drops stand follows: a storage is best freed right after its last reader, so a sequence of nodes in which every
 * node comes after its dependencies, and first computations come in index order, is a schedule. Its cost is the sum of
 * the nodes' costs, its memory follows from who reads what last. So the search space is sequences, every sequence is
 * valid but for its peak, and judging one takes one pass, O(events + reads).
 *
 * Recomputed aliases are not written down: reading an alias that the storage's newest instance does not have yet
 * computes it on the spot. Every other recomputation is that of a storage's root, and begins a new *instance*.
 *
 * Where the model has prices for it, a storage may be fetched from the host instead of being recomputed: that begins a new
 * instance as well, and reads nothing. Such an event is written as the storage plus node_count. Sequences with fetches are
 * judged, but not emitted: when and whether transfers have time is not known here.
 */
#ifndef CRN_GRAPH_SEQUENCE_H
#define CRN_GRAPH_SEQUENCE_H

#include "solve/graph_model.h"

typedef struct crn_sequence {
    int32_t *node; /* events */
    int32_t count, capacity;
} crn_sequence;

/**
 * Room for sequences of up to so many computations a node, for one of every node at least; of more, schedules with what
 * they free would be too long.
 */
int32_t crn_sequence_capacity(int32_t node_count, int32_t times);

/** An empty sequence with room for so many events, in the arena. False: no memory. */
bool crn_sequence_new(crn_arena *arena, int32_t capacity, crn_sequence *sequence);
/** `to` has room for it. */
void crn_sequence_copy(crn_sequence *to, const crn_sequence *from);
void crn_sequence_remove(crn_sequence *sequence, int32_t e);
/** Puts so many nodes before event e. False where there is no room for them; nothing is changed then. */
bool crn_sequence_insert(crn_sequence *sequence, int32_t e, const int32_t *nodes, int32_t count);
/** Every node once. */
void crn_sequence_store_all(const crn_graph_model *model, crn_sequence *sequence);

static inline bool crn_event_is_fetch(const crn_graph_model *model, int32_t event)
{
    return event >= model->node_count;
}

/** The node that an event computes or fetches. */
static inline int32_t crn_event_node(const crn_graph_model *model, int32_t event)
{
    return crn_event_is_fetch(model, event) ? event - model->node_count : event;
}

static inline int64_t crn_event_cost(const crn_graph_model *model, int32_t event)
{
    return crn_event_is_fetch(model, event) ? model->link->price_ns[event - model->node_count] : model->cost[event];
}

/** What an event reads lies in model->dep[] from here to the end. A fetch reads nothing. */
static inline int32_t crn_event_reads(const crn_graph_model *model, int32_t event)
{
    return model->dep_begin[crn_event_node(model, event)];
}

static inline int32_t crn_event_reads_end(const crn_graph_model *model, int32_t event)
{
    int32_t v = crn_event_node(model, event);
    return crn_event_is_fetch(model, event) ? model->dep_begin[v] : model->dep_begin[v + 1];
}

/** What one pass over a sequence finds. Arrays are indexed by event, unless said otherwise. */
typedef struct crn_sequence_eval {
    const crn_graph_model *model;
    int32_t capacity;
    int64_t cost;                 /* of all events and implied aliases; INT64_MAX where it passes that */
    bool too_long;                /* it does: no schedule */
    int64_t peak;                 /* fixed bytes included; INT64_MAX where it is too long, for then it fits no budget */
    int64_t *level;               /* memory while the event runs */
    int32_t *last;                /* last event that reads the instance made here; -1 for events that make none */
    int32_t *previous;            /* event of the storage's instance before this one, -1 = first computation */
    int32_t *instance;            /* of a storage: its newest instance */
    int32_t *handle;              /* of a node: newest instance that has this handle */
    struct crn_link_times *times; /* NULL where nothing is fetched */
    int64_t *freed;               /* scratch: bytes that the event before frees */
    int32_t *stack;               /* scratch */
} crn_sequence_eval;

cairn_status crn_sequence_eval_new(const crn_graph_model *model, crn_arena *arena, int32_t capacity,
                                   crn_sequence_eval *eval, cairn_error *error);
/** Judges a sequence of at most eval->capacity events. */
void crn_sequence_judge(crn_sequence_eval *eval, const crn_sequence *sequence);

/** The first backward node: where the graph says it, else under which storing everything, judged last, takes most. */
int32_t crn_sequence_backward_begin(const cairn_graph *graph, const crn_sequence_eval *store_all);

/** Writes the sequence as operations, each storage dropped right after its last reader. Errors: the builder's. */
cairn_status crn_sequence_emit(crn_sequence_eval *eval, const crn_sequence *sequence, cairn_builder *builder,
                               cairn_error *error);

#endif
