/*
 * The states of graph-exact: those that were reached, each once, and the queue of those to look at, best bound first.
 */
#ifndef CRN_EXACT_STATES_H
#define CRN_EXACT_STATES_H

#include "base/queue.h"
#include "solve/graph/graph_suffix.h"

enum { CRN_EXACT_WORDS = 2, CRN_EXACT_NODES_MAX = 64 * CRN_EXACT_WORDS };

/** Handles, node v is bit v % 64 of word v / 64. */
typedef struct crn_exact_set {
    uint64_t word[CRN_EXACT_WORDS];
} crn_exact_set;

static inline bool crn_exact_has(const crn_exact_set *set, int32_t v)
{
    return crn_suffix_has(set->word, v);
}

static inline crn_exact_set crn_exact_with(crn_exact_set set, int32_t v)
{
    crn_suffix_put(set.word, v);
    return set;
}

static inline crn_exact_set crn_exact_without(crn_exact_set set, const crn_exact_set *other)
{
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        set.word[i] &= ~other->word[i];
    return set;
}

static inline crn_exact_set crn_exact_both(crn_exact_set set, const crn_exact_set *other)
{
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        set.word[i] |= other->word[i];
    return set;
}

static inline bool crn_exact_meet(const crn_exact_set *a, const crn_exact_set *b)
{
    uint64_t common = 0;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        common |= a->word[i] & b->word[i];
    return common != 0;
}

static inline bool crn_exact_contains(const crn_exact_set *set, const crn_exact_set *other)
{
    uint64_t missing = 0;
    for (int i = 0; i < CRN_EXACT_WORDS; i++)
        missing |= other->word[i] & ~set->word[i];
    return missing == 0;
}

typedef struct crn_exact_state {
    crn_exact_set held;
    int64_t spent;          /* least time on recomputation by which it is reached */
    int32_t parent;         /* from which; -1 = the start */
    uint8_t computed, node; /* nodes that have been computed; the one that was last */
    bool settled;
} crn_exact_state;

typedef struct crn_exact_states {
    cairn_allocator allocator;
    crn_exact_state *states;
    int32_t count, capacity;
    int32_t *table; /* open addressing: state, -1 = free */
    int32_t table_size;
    crn_queue queue; /* of states, by how many nodes are left; one that was settled since may still be in it */
    bool failed;     /* an allocation did, and a state was not kept */
} crn_exact_states;

/** What one state takes at most, the table, the queue and growing included. */
enum { CRN_EXACT_STATE_BYTES = 160 };

void crn_exact_states_init(crn_exact_states *all, cairn_allocator allocator);
void crn_exact_states_free(crn_exact_states *all);
/** Ends reaching and settling: of all the memory, the states alone stay. */
void crn_exact_states_close(crn_exact_states *all);

/** Remembers a way to a state, where it is a better one, and queues the state. `left` nodes are not computed then. */
void crn_exact_reach(crn_exact_states *all, const crn_exact_state *way, int64_t bound, int32_t left);

/** Settles the best one of the queue, and says its bound; -1 = none is left. */
int32_t crn_exact_next(crn_exact_states *all, int64_t *bound);

#endif
