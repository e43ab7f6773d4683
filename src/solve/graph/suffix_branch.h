/*
 * The branch and bound of graph_suffix.h: what no schedule can avoid from the first computation of a node on, whatever it
 * holds then.
 */
#ifndef CRN_SUFFIX_BRANCH_H
#define CRN_SUFFIX_BRANCH_H

#include "solve/graph/graph_suffix.h"

/** A storage that may be held or dropped. */
typedef struct crn_branch_item {
    int32_t root, reader; /* who reads one of its handles first; node_count = none directly */
    int64_t bytes, cost;  /* of the root; 0 where nobody reads it directly */
} crn_branch_item;

typedef enum crn_branch_choice { CRN_BRANCH_OPEN, CRN_BRANCH_HELD, CRN_BRANCH_DROPPED } crn_branch_choice;

/** The search for after(w), one node w after the other. Task and work_max are the caller's. */
typedef struct crn_branching {
    const crn_task *task;
    crn_graph_suffix *suffix;
    int32_t node;                 /* w */
    crn_branch_item *items;       /* those most expensive for their bytes first */
    int32_t item_count, *item_of; /* storage -> item, or negative where it is none */
    crn_branch_choice *choices;
    int64_t *bound_at; /* of an item that is held: the bound before that was decided */
    int64_t *cost_at;  /* scratch, of a use */
    uint64_t *held;    /* all that is not dropped */
    int64_t room;      /* for what is open */
    int64_t open_bytes;
    int64_t best;
    int64_t work, work_max;
    int64_t poll_at; /* the work after which it asks whether to stop */
    bool stopped;
    /* storage -> its nodes */
    const int32_t *member_begin, *members;
} crn_branching;

/** What it works with, in the arena; false when memory fails. */
bool crn_branching_new(crn_graph_suffix *s, crn_arena *arena, crn_branching *b);

/** after(w), with what is after w known already. */
int64_t crn_branching_after(crn_branching *b, int32_t w);

#endif
