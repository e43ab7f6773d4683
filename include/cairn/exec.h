/*
 * Running a verified schedule through the caller's own functions: for C programs and adjoint codes.
 */
#ifndef CAIRN_EXEC_H
#define CAIRN_EXEC_H

#include <cairn/schedule.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * What the caller does for each operation of a chain. stage is l (1-based). A non-zero return stops the run with
 * CAIRN_CALLBACK and error->index = the position of the operation (a wait: that before which it is called, or the last one
 * at the end; what is freed later, too); nothing is called after that.
 *
 * forward: computes a[stage] from a[stage-1], which is there as such or as part of the saved set of stage - 1. With
 * save: keep all that backward(stage) needs, in the way that option says; a[stage] is part of that. Without: keep
 * a[stage] alone. With drop_input: free a[stage-1] afterwards.
 * backward: computes d[stage-1] from d[stage] and the saved set of stage; then frees d[stage] and the saved set and, with
 * free_input, a[stage-1].
 * drop, offload, prefetch, discard: of a[stage] (CAIRN_VALUE_OUTPUT) or of the saved set of stage (CAIRN_VALUE_SAVED).
 * wait: a transfer of this value was started and must be complete now: what follows reads the copy that it makes, or frees
 * the one that it reads. A computation that only reads what is on its way to the host does not wait. What is dropped or
 * discarded on its way is waited for and freed later, before the first operation by whose start the transfer has ended in
 * the simulation, and at last at the end; no memory is used that the verified peak does not have. When the run ends well,
 * every transfer has been waited for.
 * The last five may be NULL where the schedule has no such operation.
 */
typedef struct cairn_exec_callbacks {
    void *context;
    int (*forward)(void *context, int32_t stage, int32_t option, bool save, bool drop_input);
    int (*backward)(void *context, int32_t stage, int32_t option, bool free_input);
    int (*drop)(void *context, int32_t stage, cairn_value value);
    int (*offload)(void *context, int32_t stage, cairn_value value);
    int (*prefetch)(void *context, int32_t stage, cairn_value value);
    int (*discard)(void *context, int32_t stage, cairn_value value);
    int (*wait)(void *context, int32_t stage, cairn_value value);
} cairn_exec_callbacks;

/**
 * Runs a verified chain schedule: calls back for its operations, in order.
 * Errors: BAD_ARGUMENT (a graph's schedule; verified, which cairn_verify leaves NULL where a schedule is not valid, or a
 * callback that it needs is NULL; nothing was called), CALLBACK, NO_MEMORY. Cost: O(operations), and with transfers a
 * simulation before.
 */
CAIRN_API cairn_status cairn_exec_run(const cairn_env *env, const cairn_verified *verified,
                                      const cairn_exec_callbacks *callbacks, cairn_error *error);

/**
 * The online mode: adjoint loops that do not know beforehand how many steps they take. All steps are alike; states are
 * kept in `slots` slots, numbered from 0, in addition to the current state. Slot 0 always holds the initial state.
 *
 * advance: computes the next state from the current one, that is, takes step `step` (0-based). In the first sweep it
 * sets *last when this was the last step; later, the call does not look at it.
 * store, restore: copy the current state, which is the one before step `step`, to or from a slot.
 * reverse: runs the adjoint of step `step`; the current state is the one before that step and may be destroyed.
 * A non-zero return stops the run with CAIRN_CALLBACK and error->index = the step.
 */
typedef struct cairn_online_callbacks {
    void *context;
    int (*advance)(void *context, int64_t step, bool *last);
    int (*store)(void *context, int64_t step, int32_t slot);
    int (*restore)(void *context, int64_t step, int32_t slot);
    int (*reverse)(void *context, int64_t step);
} cairn_online_callbacks;

/** What an online run did. */
typedef struct cairn_online_report {
    int64_t steps;
    int64_t advances; /**< in total; the first sweep included */
} cairn_online_report;

/**
 * Runs a loop of unknown length forward, then its adjoint backward from the last step to the first, with at least 1 slot.
 * Guarantee: with n <= C(slots + r, r) steps, none is advanced more than r times after the first sweep (Wang, Moin and
 * Iaccarino 2009 for the first sweep, binomial checkpointing by Griewank and Walther 2000 for the others).
 * report may be NULL. Errors: BAD_ARGUMENT, CALLBACK, NO_MEMORY. Cost: O(slots) memory, O(slots) time per step.
 */
CAIRN_API cairn_status cairn_exec_online(const cairn_env *env, int32_t slots, const cairn_online_callbacks *callbacks,
                                         cairn_online_report *report, cairn_error *error);

#ifdef __cplusplus
}
#endif

#endif
