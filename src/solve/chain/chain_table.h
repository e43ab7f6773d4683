/*
 * What all budgets of a chain share: the ways forward from every stage, and the least memory of every sub-problem.
 *
 * L(s,t), the least m with which (s,t) can be solved by the programs' schedules, in bytes: the smallest over
 *
 *   SAVE k           max(base[t] + save_k[s], backward_k[s], A_k[s] + L(s+1,t))
 *   SAVE_AND_DROP k  max(base[t] + save_k[s], A_k[s] + L(s+1,t), L(s,s))
 *   CHECKPOINT s'    max(base[t] + least peak of a way to s'-1, a[s'-1] + L(s',t), L(s,s'-1))
 *
 * with the bytes of chain_model.h; only SAVE where s must not be recomputed, and s'-1 below the next such stage. O(n^3)
 * time, vectorised, by diagonals on all threads; 16 bytes for each of the n(n+1)/2 sub-problems, and 16 a way.
 */
#ifndef CRN_CHAIN_TABLE_H
#define CRN_CHAIN_TABLE_H

#include "solve/chain/chain_unfold.h"

/** One way from X, the input of s, to {X, a[j]}: see chain_forward.h. In increasing order of peak. */
typedef struct crn_pass {
    int64_t peak_bytes, ns;
} crn_pass;

typedef struct crn_chain_table {
    crn_chain_model model;
    cairn_allocator allocator;
    crn_pass *passes;
    size_t pass_count, pass_capacity;
    size_t *pass_begin;  /* of (s, j), at crn_row_at; one more at the end */
    int64_t *pass_peak;  /* of (s, j): the least peak of its passes */
    int64_t least_bytes; /* always_bytes + L(1,n) */
    int64_t *row;        /* L(s,t), at crn_row_at */
    int64_t *column;     /* L(s,t), at crn_column_at */
    bool gave_up;        /* ways forward, for want of room: what is found may not be the best of its class */
} crn_chain_table;

/**
 * Where no budget of the session is enough, and that is seen at once, there is nothing but the model and the least.
 *
 * outputs_only: SAVE only for s = t, no SAVE_AND_DROP, and only the plain ways; no stage but the last may be one that must
 * not be recomputed. Errors: NO_MEMORY, CANCELLED. Free with crn_chain_table_clear, also after a failure.
 */
cairn_status crn_chain_table_init(crn_chain_table *table, const crn_task *task, bool outputs_only, cairn_error *error);
void crn_chain_table_clear(crn_chain_table *table);
/** Upper estimate of its bytes. */
int64_t crn_chain_table_memory(const cairn_chain *chain);

/** L(s,t). */
static inline int64_t crn_least_of(const crn_chain_table *table, int32_t s, int32_t t)
{
    return table->row[crn_row_at(table->model.n, s, t)];
}

/** The ways from X to {X, a[j]}, s <= j < n; none past a stage that must not be recomputed. */
static inline const crn_pass *crn_passes_of(const crn_chain_table *table, int32_t s, int32_t j, int32_t *count)
{
    size_t at = crn_row_at(table->model.n, s, j);
    *count = (int32_t)(table->pass_begin[at + 1] - table->pass_begin[at]);
    return table->passes + table->pass_begin[at];
}

/** The last s' to which a CHECKPOINT of (s, t) may lead; less than s + 1 where there is none. */
static inline int32_t crn_last_split(const crn_chain_table *table, int32_t s, int32_t t)
{
    int32_t fence = table->model.fence[s];
    return fence < t ? fence : t;
}

/** The least budget, always_bytes included. */
static inline int64_t crn_chain_table_least(const crn_chain_table *table)
{
    return table->least_bytes;
}

/** Emits a schedule that needs no more than the least budget. */
cairn_status crn_chain_table_emit(const crn_chain_table *table, const crn_task *task, cairn_builder *builder,
                                  cairn_error *error);

#endif
