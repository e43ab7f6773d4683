/*
 * The rows of a dynamic program over m in slots, and how they are filled: what chain-dp and revolve-hetero have in common.
 * The recurrence is in chain_dp.c.
 */
#ifndef CRN_SLOTTED_PROGRAM_H
#define CRN_SLOTTED_PROGRAM_H

#include "solve/chain/chain_table.h"
#include "solve/chain/slot_scale.h"
#include "solve/chain/slotted_cuts.h"
#include "solve/chain/slotted_rows.h"

/** Values are times beyond the least of each stage: C(s,t,m) less the sum of the least uF + uB of s..t. */
typedef struct crn_slotted_program {
    const crn_chain_table *table;
    const crn_chain_model *model;
    int32_t n, slots;
    crn_slot_scale scale;
    crn_slotted_cuts cuts;
    int32_t *output;      /* a[l] in slots */
    size_t *option_begin; /* of stage l - 1 */
    int32_t *saved;       /* A_k[l] in slots */
    int32_t *fastest;     /* crn_fastest_option of stage l */
    crn_row *rows;        /* of (s, t), see crn_row_at */
    crn_row *columns;     /* the same at crn_column_at */
    const crn_row_width *width;
    void *values;
    size_t value_count;
    crn_arena arena;
} crn_slotted_program;

/** Fills the rows for a budget that leaves so much beside what is always there. Clear the arena, also after a failure. */
cairn_status crn_slotted_program_make(crn_slotted_program *p, const crn_chain_table *table, const crn_task *task,
                                      int64_t available, const crn_row_width *width, cairn_error *error);

/** C(s,t,m) less the least of each stage. */
int64_t crn_slotted_value(const crn_slotted_program *p, int32_t s, int32_t t, int32_t m);

/** The decision that gives C(s,t,m): the first of SAVE, CHECKPOINT, SAVE_AND_DROP, in increasing order of k and s'. */
crn_decision crn_slotted_decide(const void *context, int32_t s, int32_t t, int64_t units);

/** Whether nothing that is kept was rounded: then the table has the optimum in bytes. */
bool crn_slotted_is_exact(const crn_slotted_program *p);

#endif
