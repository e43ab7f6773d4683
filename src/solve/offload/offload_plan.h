/*
 * A chain without recomputation: every stage saves with one of its options, and some of what is saved is offloaded.
 *
 * A[l] is read by the next forward and then not before backward l + 1, so it has one wait, from forward l + 1 to backward
 * l + 1; between forward n and backward n nothing runs, so only A[1..n-2] have one. A plan is a choice of options with the
 * transfers' model for it; which saved sets go is a set of stages, `goes`, indexed by stage.
 */
#ifndef CRN_OFFLOAD_PLAN_H
#define CRN_OFFLOAD_PLAN_H

#include "solve/transfer.h"

/** Choices of options that the solvers try where they do not choose themselves. */
enum { CRN_OFFLOAD_PROFILES = 3 };

typedef struct crn_offload_plan {
    crn_task task; /* a copy, for a session outlives the call that opened it */
    int32_t n;
    int32_t *option; /* of a stage */
    int32_t *wait;   /* of a stage: its wait, or CRN_NO_COPY */
    bool *offloaded; /* scratch: of a wait */
    int64_t *levels; /* scratch: of an event */
    crn_transfer *transfer;
    crn_arena arena;
} crn_offload_plan;

/** The best schedule so far. goes has n + 1 entries. */
typedef struct crn_offload_best {
    int64_t makespan_ns; /* INT64_MAX = none */
    const crn_offload_plan *plan;
    bool patient;
    bool *goes;
} crn_offload_best;

/** The plan of these options (n + 1 entries, the first is not read). Errors: NO_MEMORY. */
cairn_status crn_offload_plan_new(const crn_task *task, const int32_t *option, crn_offload_plan **plan,
                                  cairn_error *error);
void crn_offload_plan_free(crn_offload_plan *plan);
/** Fastest options, smallest saved sets, first options; as many plans as differ. Fills plans[]; the rest is NULL. */
cairn_status crn_offload_profiles(const crn_task *task, crn_offload_plan *plans[CRN_OFFLOAD_PROFILES],
                                  cairn_error *error);
void crn_offload_profiles_free(crn_offload_plan *plans[CRN_OFFLOAD_PROFILES]);
int64_t crn_offload_plan_memory(const crn_task *task);

/** Whether the saved set of stage l may go. */
bool crn_offload_may_go(const crn_offload_plan *plan, int32_t l);
int64_t crn_offload_bytes(const crn_offload_plan *plan, int32_t l);
/** The least budget with which these go; INT64_MAX where the host cannot hold them all. */
int64_t crn_offload_need(const crn_offload_plan *plan, const bool *goes);
/** Schedules them and keeps the better of that and the best so far. Errors: none but the builder's. */
cairn_status crn_offload_try(const crn_offload_plan *plan, const bool *goes, int64_t budget_bytes,
                             crn_offload_best *best, cairn_error *error);
/**
 * A lower bound on the makespan of every schedule that computes nothing again; INT64_MAX where it proves that there is
 * none. It bounds nothing else: recomputation may be faster.
 */
int64_t crn_offload_bound(const crn_task *task, int64_t budget_bytes);
/** Says in an answer's reason what crn_offload_bound proves of it. */
void crn_offload_explain(const crn_task *task, int64_t budget_bytes, crn_answer *answer);
/** Emits and explains the best, if there is one. */
cairn_status crn_offload_answer(const crn_offload_best *best, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error);

#endif
