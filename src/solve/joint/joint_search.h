/*
 * The best of many schedules in which values stay, are recomputed or offloaded.
 *
 * A search is given complete schedules (answers of other solvers) and lists without transfers that may be over the budget
 * (answers of solvers that recompute, at larger budgets). The former are kept where they are the best so far; the latter
 * are made to fit by offloading copies (joint_fit.h), and the best few of them are improved. So the answer is never
 * worse than any schedule that it was given.
 */
#ifndef CRN_JOINT_SEARCH_H
#define CRN_JOINT_SEARCH_H

#include "solve/joint/joint_fit.h"

/** How many lists are improved: with a time limit more at first, of which ever fewer are left as it passes. */
enum { CRN_JOINT_POOL = 6, CRN_JOINT_POOL_TIMED = 16 };

static inline int32_t crn_joint_pool_size(const crn_task *task)
{
    return task->deadline_ns == CAIRN_NONE ? CRN_JOINT_POOL : CRN_JOINT_POOL_TIMED;
}

/** A list without transfers, and what of it is offloaded. */
typedef struct crn_joint_entry {
    crn_fit *fit;
    cairn_op *ops;
    int64_t count;
    uint64_t random; /* of its mutations, under a time limit */
} crn_joint_entry;

typedef struct crn_joint_search {
    const crn_task *task;
    int64_t budget_bytes; /* INT64_MAX = none */
    int64_t bound_ns;     /* nothing is faster */
    cairn_builder *best;  /* of all so far */
    int64_t best_ns, best_peak_bytes;
    crn_joint_entry pool[CRN_JOINT_POOL_TIMED]; /* the best lists first, until one is replaced */
    int32_t pool_count;
    bool cut_short;  /* somebody who was asked: what was not found may be there */
    uint64_t seed;   /* of the next list */
    uint64_t random; /* of mutations */
    char from[32];   /* who gave the best */
    cairn_allocator allocator;
} crn_joint_search;

cairn_status crn_joint_begin(crn_joint_search *search, const crn_task *task, int64_t budget_bytes, cairn_error *error);
void crn_joint_end(crn_joint_search *search);

/** A complete schedule of the task, within the budget or not. */
cairn_status crn_joint_offer(crn_joint_search *search, const cairn_builder *builder, const char *from,
                             cairn_error *error);
/**
 * A list without transfers. goes (NULL = none): by computation, whether what it makes is offloaded to begin with.
 * Lists to which transfers cannot be added are passed over.
 */
cairn_status crn_joint_offer_list(crn_joint_search *search, const cairn_builder *builder, const bool *goes,
                                  cairn_error *error);
/** The same, to be improved or only judged; its makespan before that, INT64_MAX where it does not fit. */
cairn_status crn_joint_try_list(crn_joint_search *search, const cairn_builder *builder, const bool *goes, bool improve,
                                int64_t *makespan_ns, cairn_error *error);
/**
 * Improves the best lists with this many rounds in all: mostly which of their copies are offloaded; now and then, of
 * a chain, the list itself, by a random change that leaves it valid. Polls.
 */
cairn_status crn_joint_improve(crn_joint_search *search, int64_t rounds, crn_answer *answer, cairn_error *error);
/** Takes the best schedule into the answer. */
cairn_status crn_joint_answer(crn_joint_search *search, crn_answer *answer, cairn_error *error);

#endif
