/*
 * Dynamic programs of chains over memory slots: the parts of a solver that chain-dp and revolve-hetero share.
 *
 * outputs_only: nothing is saved before its own backward is next; see revolve_hetero.c.
 */
#ifndef CRN_SLOTTED_H
#define CRN_SLOTTED_H

#include "solve/chain/chain_table.h"

cairn_status crn_slotted_open(const crn_task *task, bool outputs_only, void **state, cairn_error *error);
void crn_slotted_close(const crn_task *task, void *state);
cairn_status crn_slotted_least(const crn_task *task, void *state, crn_least *least, cairn_error *error);
cairn_status crn_slotted_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error);
int64_t crn_slotted_memory(const crn_task *task);
int64_t crn_slotted_work(const crn_task *task);

#endif
