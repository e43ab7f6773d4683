/*
 * From the terms that a program of chain-weak chose to operations.
 *
 * A term of weak_model.h begins with its own operations, then come its first and its second part, and then what it owes:
 * the backward of SAVE, the drop of the saved set of SAVE_DROP, that of the input that LAST kept to the end. The
 * unfolding asks for one term after the other and keeps what is still to be done on a stack of its own.
 */
#ifndef CRN_WEAK_UNFOLD_H
#define CRN_WEAK_UNFOLD_H

#include "solve/chain/weak_model.h"

/** The term that gives a part's value with m, in whatever unit the program counts. */
typedef crn_weak_term crn_weak_decide(const void *context, crn_weak_part part, int64_t m);

/** Emits the operations of the whole chain with m. */
cairn_status crn_weak_unfold(const crn_task *task, const crn_weak_model *model, crn_weak_decide *decide,
                             const void *context, int64_t m, cairn_builder *builder, cairn_error *error);

#endif
