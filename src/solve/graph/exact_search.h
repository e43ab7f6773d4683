/*
 * A search of graph-exact: the least time on recomputation, or any schedule at all, within a budget.
 *
 * State, moves and bound are those of graph_exact.c. It ends with a schedule, with the proof that there is none below what
 * must be beaten, or cut short by the clock, the caller, work or memory: then the least bound of a state that is left holds.
 */
#ifndef CRN_EXACT_SEARCH_H
#define CRN_EXACT_SEARCH_H

#include "solve/graph/exact_states.h"

/** Moves that an iteration of --iterations may look at. */
enum { CRN_EXACT_MOVES_EACH = 1000 };

/** A graph as the search sees it, whatever the budget is. */
typedef struct crn_exact_graph {
    const crn_graph_model *model;
    crn_exact_set reads[CRN_EXACT_NODES_MAX];      /* of a node */
    crn_exact_set members[CRN_EXACT_NODES_MAX];    /* of a storage: its nodes */
    crn_exact_set useful[CRN_EXACT_NODES_MAX + 1]; /* nodes computed before that may still serve */
    crn_exact_set kept[CRN_EXACT_NODES_MAX + 1]; /* handles that stay, for their storage holds an output that exists */
    int32_t by_bytes[CRN_EXACT_NODES_MAX];       /* storages that take some, the largest first */
    int32_t sized_count;
} crn_exact_graph;

/** Fills in a graph of zeros. The model must outlive it. */
void crn_exact_graph_init(crn_exact_graph *graph, const crn_graph_model *model);

/** How a search ended. */
typedef enum crn_exact_ending {
    CRN_EXACT_FOUND,     /* one that is the best there is */
    CRN_EXACT_EXHAUSTED, /* there is none */
    CRN_EXACT_STOPPED,   /* by the clock or the caller */
    CRN_EXACT_FULL,      /* no memory for more states */
    CRN_EXACT_LIMITED    /* by work */
} crn_exact_ending;

/** A search: task, graph, suffix, budget and what to beat are set by the caller, the rest starts as zeros. */
typedef struct crn_exact_run {
    const crn_task *task;
    const crn_exact_graph *graph;
    const crn_graph_suffix *suffix; /* NULL = any schedule will do */
    int64_t budget_bytes;           /* without the fixed ones */
    int64_t below_ns;               /* what must be spent less than */
    int64_t states_max, moves_max, moves;
    bool halted; /* by the clock, the caller or a limit */
    crn_exact_states states;
    int64_t bound_ns; /* no way is left that spends less */
    int32_t last;     /* the state that was found */
    /* the state that is looked at; what may be dropped for a move from it, the largest first, and the bytes of a rest of it */
    int32_t from;
    const crn_exact_state *at;
    int32_t candidate_count, candidates[CRN_EXACT_NODES_MAX];
    int64_t bytes_from[CRN_EXACT_NODES_MAX + 1];
} crn_exact_run;

/** States that the memory limit has room for. */
int64_t crn_exact_states_max(const crn_task *task);
/** Moves that may be looked at: by the iterations asked for, else by the clock or a limit on work. */
int64_t crn_exact_moves(const crn_task *task);

/** Runs it. Without memory for more states it ends like any search that is cut short. Free r->states afterwards. */
crn_exact_ending crn_exact_search(crn_exact_run *r);

/** The operations of the schedule that was found. */
cairn_status crn_exact_emit(const crn_exact_run *r, cairn_builder *builder, cairn_error *error);

#endif
