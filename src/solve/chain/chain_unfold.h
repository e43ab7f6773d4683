/*
 * From the decisions of a dynamic program to operations.
 *
 * A sub-problem (s, t) with m to spend begins in one of three ways:
 *
 *   SAVE k           forward_save s k; solve (s+1, t); backward s
 *   CHECKPOINT s'    go forward to a[s'-1]; solve (s', t); solve (s, s'-1)
 *   SAVE_AND_DROP k  forward_save s k; solve (s+1, t) from A_k[s]; drop it; solve (s, s) anew
 *
 * The unfolding asks for one decision after the other and keeps what is still to be done on a stack of its own.
 */
#ifndef CRN_CHAIN_UNFOLD_H
#define CRN_CHAIN_UNFOLD_H

#include "solve/chain/chain_forward.h"

typedef enum crn_decision_kind { CRN_DECIDE_SAVE, CRN_DECIDE_CHECKPOINT, CRN_DECIDE_SAVE_AND_DROP } crn_decision_kind;

typedef struct crn_decision {
    crn_decision_kind kind;
    int32_t option; /* of SAVE and SAVE_AND_DROP */
    int32_t split;  /* of CHECKPOINT: s' */
    int32_t way;    /* of CHECKPOINT: which way to a[s'-1] */
    int64_t right;  /* m of what comes first: (s+1, t) or (s', t) */
    int64_t left;   /* m of what comes then: (s, s'-1) or (s, s) */
} crn_decision;

/** The decision for (s, t) with m, in whatever unit the program counts. */
typedef crn_decision crn_decide(const void *context, int32_t s, int32_t t, int64_t m);

/** Emits the operations of (1, n) with m. */
cairn_status crn_chain_unfold(const crn_task *task, const crn_chain_model *model, crn_decide *decide,
                              const void *context, int64_t m, cairn_builder *builder, cairn_error *error);

#endif
