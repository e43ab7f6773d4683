/*
 * Which sub-chains of a chain are alike.
 *
 * Stages are alike when everything that a dynamic program reads of them is equal: sizes, times, options, and the
 * gradient that their backward makes, which belongs to the stage before. The first stage is like no other, for its
 * input is the chain's, which stays. Sub-chains (s, t) of one length are alike when their stages are, one by one; then
 * one table serves them all. Kinds are numbered by length, so that a table is only made of tables with smaller numbers.
 */
#ifndef CRN_SUBCHAIN_H
#define CRN_SUBCHAIN_H

#include "solve/chain_model.h"

typedef struct crn_subchains {
    int32_t n;
    int32_t *kind;          /* of (s, t), at crn_column_at */
    int32_t *first;         /* s of the first sub-chain of a kind */
    int32_t *begin;         /* kinds of length L: begin[L] .. begin[L+1] - 1, L = 1..n */
    int32_t distinct_count; /* of stages */
} crn_subchains;

/** All memory is the arena's. O(n^2) time. Errors: NO_MEMORY. */
cairn_status crn_subchains_init(crn_subchains *subchains, const crn_chain_model *model, crn_arena *arena,
                                cairn_error *error);
/**
 * In O(n), how many kinds there are at least: only begin and distinct_count are filled in. A sub-chain that begins with
 * the first stage of its kind is like none before it, and of d such stages at most L - 1 are too far back for length L.
 */
cairn_status crn_subchains_count_least(crn_subchains *subchains, const crn_chain_model *model, crn_arena *arena,
                                       cairn_error *error);
/** Upper estimate of its bytes. */
int64_t crn_subchains_memory(int32_t n);

static inline int32_t crn_subchain_kind(const crn_subchains *subchains, int32_t s, int32_t t)
{
    return subchains->kind[crn_column_at(s, t)];
}

#endif
