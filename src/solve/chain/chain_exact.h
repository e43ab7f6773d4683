/*
 * chain-exact, for the solvers that ask it themselves: chain-alike and chain-weak.
 */
#ifndef CRN_CHAIN_EXACT_H
#define CRN_CHAIN_EXACT_H

#include "solve/chain/chain_table.h"

extern const crn_solver crn_chain_exact_solver;

/** What all budgets share in a session of it that is open; belongs to the session. */
const crn_chain_table *crn_chain_exact_table(const void *state);

#endif
