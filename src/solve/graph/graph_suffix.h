/*
 * How much recomputation no schedule within a budget can avoid after a moment, whatever it holds then.
 *
 * Let after(w) be the least time that any schedule spends on recomputation, counted from the first computation of
 * node w on. Right after that computation some handles P of nodes up to w are resident.
 *
 *   Given P.  Take the first computation of a node x > w. Nodes w+1 .. x have read values of the nodes up to w. Each of
 *   these was in P, or has been recomputed, after what it reads, of which the same holds. Let N(P, x) be the recomputed
 *   ones. Each was recomputed at least once before x, and from then on at least after(x) is spent:
 *
 *       rest(P)  =  max over x > w of  cost(N(P, x)) + after(x)
 *
 *   Whatever P is.  What is held while w runs fits beside it, what w reads and outputs that exist are in it:
 *
 *       after(w)  =  min of rest(P + w) over the sets P of storages that fit beside w and contain those
 *
 * from the last node down to the first. Unlike the relaxation of graph_bound.h nothing is held in fractions, and a
 * second recomputation of a value counts too. Branch and bound over storages finds the minimum. It begins with the
 * storages that are most expensive for their bytes. What does not fit must be dropped; that costs at least the
 * fractional knapsack of the costs. The search asks whether the minimum is below a number, and raises the number step
 * by step. When the limit on work ends it, the last number that was answered is a bound. The windows of graph_bound.h
 * hold as well, plus after(e) of the node e at which they end.
 *
 * after(0) bounds all schedules. The states of an exact search, which know what is held, use rest().
 *
 * Cost   O(T + E) a step of the branch and bound, and a knapsack for each value that is read later; steps limited.
 *        Memory O(T + E).
 */
#ifndef CRN_GRAPH_SUFFIX_H
#define CRN_GRAPH_SUFFIX_H

#include "solve/graph/graph_bound.h"

/** Up to so many nodes the uses of every moment are kept, for those who ask for what is left. */
enum { CRN_SUFFIX_LISTED_MAX = 128 };

/** A node before the moment, and the first from the moment on that reads it. */
typedef struct crn_suffix_use {
    int32_t node, reader;
} crn_suffix_use;

typedef struct crn_graph_suffix {
    const crn_graph_model *model;
    int64_t budget_bytes; /* without the fixed ones */
    int64_t *after;       /* of each node, ns; INT64_MAX = no schedule fits the budget. Entry node_count is 0 */
    bool is_listed;       /* the uses of all moments are; else only those of the last one looked at */
    int32_t *use_begin;   /* moment t, just before node t -> its uses, by reader */
    int32_t *use_end;
    crn_suffix_use *uses;
    size_t words;    /* of a set of nodes: 64 nodes in each */
    uint64_t *again; /* scratch: N(P, x) */
    int32_t *stack;  /* scratch */
    crn_arena arena;
} crn_graph_suffix;

/** Whether a problem is one that it handles: a graph without a machine, of a size for which it makes sense. */
bool crn_graph_suffix_applies(const crn_task *task);

/**
 * The bounds for a budget; windows, unless NULL, raise them. work_max: storages that branch and bound may look at, a
 * nanosecond or so each. The model must outlive it. When the task stops, what was found by then holds.
 */
cairn_status crn_graph_suffix_new(const crn_task *task, const crn_graph_model *model, int64_t budget_bytes,
                                  int64_t work_max, const crn_graph_windows *windows, crn_graph_suffix **suffix,
                                  cairn_error *error);
void crn_graph_suffix_free(crn_graph_suffix *suffix);

/**
 * rest(P) just before node t is computed first, in ns; INT64_MAX = it cannot be done. P is a set of handles in `words`
 * words, node v is bit v % 64 of word v / 64. For graphs of up to CRN_SUFFIX_LISTED_MAX nodes.
 */
int64_t crn_graph_suffix_rest(const crn_graph_suffix *suffix, int32_t t, const uint64_t *held);

/** The same; cost_at, unless NULL: cost(N(P, x)) for each use. */
int64_t crn_graph_suffix_rest_costs(const crn_graph_suffix *s, int32_t t, const uint64_t *held, int64_t *cost_at);

static inline bool crn_suffix_has(const uint64_t *set, int32_t v)
{
    return set[v / 64] >> (v % 64) & 1;
}

static inline void crn_suffix_put(uint64_t *set, int32_t v)
{
    set[v / 64] |= (uint64_t)1 << (v % 64);
}

#endif
