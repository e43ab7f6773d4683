/*
 * The best schedule of a chain where each nanosecond on the link has a price, by dynamic programming.
 *
 * Segments  C(s..t, m, x) is the least cost of the forwards s..t and the backwards t..s. The input of stage s is there: x says
 *           whether it is the output of stage s - 1 or a saved set, and of which option. m is what the budget leaves beside
 *           that input and all that waits outside of the segment. Two ways, for s < t:
 *               save s with option k:   uF_k[s] + C(s+1..t, m - A_k[s], k) + uB_k[s]
 *               keep the output of r-1: forwards s..r-1 + C(r..t, m - a[r-1], output) + C(s..r-1, m, x)
 *           Meanwhile the input of s waits. On the host it leaves its bytes to the inner segment, for the price of its transfers.
 * Price     Transfers of a wait count as their time on the link times the price: of both on a shared link, else of the longer
 *           one. Their own time is not looked at, nor that the link is busy, nor what the host has room for in all. The list is
 *           made to fit afterwards, as all lists are, and more than one price is tried.
 * Near      the best among persistent schedules: memory is counted in slots, costs are floats, and the forwards of a segment
 *           run beside its input even where that is offloaded.
 * Pieces    The stages s..r-1 that are recomputed as one are a piece, of at most P stages. So there are segments that end with
 *           the chain, and others of at most P stages. Short pieces lose next to nothing but near the least budget.
 * Cost      O(n P^2 S) for S slots, times 1 + K for the most options K of a stage; memory O(n P S), times the same.
 * Source    Recomputation: Herrmann et al. 2019. With transfers: after Beaumont, Eyraud-Dubois, Shilova 2021, whose program
 *           counts the time of transfers in place of a price.
 */
#ifndef CRN_CHAIN_LINK_PROGRAM_H
#define CRN_CHAIN_LINK_PROGRAM_H

#include "solve/chain_model.h"

/** What a list is the best for. */
typedef struct crn_link_terms {
    double price;  /* of a nanosecond on the link, in nanoseconds */
    double spread; /* by the stage, the price lies between 1 - spread / 2 and 1 + spread / 2 times that */
    bool
        rounds_up; /* sizes of values, to whole slots: no list needs more than the budget. Else to the nearest number */
} crn_link_terms;

typedef struct crn_link_program {
    crn_chain_model model;
    const cairn_machine *machine;
    crn_arena arena;
    bool fits;          /* the budget holds what is always there, */
    int64_t room_bytes; /* and beside that so much, */
    int32_t room;       /* in slots */
    int64_t slot_bytes;
    int32_t piece_max;    /* stages of the longest piece */
    size_t segments;      /* that there are rows for */
    int32_t slots, kinds; /* of an input: 0 = an output, 1 + k = a saved set of option k */
    crn_link_terms terms;
    int32_t *taken;               /* slots: by kind, of what stages 0 to n make */
    float *table;                 /* by kind, segment and slot */
    struct crn_link_frame *stack; /* scratch: what is still to be emitted */
    cairn_allocator allocator;
    bool *goes; /* of a computation of the list: what it makes is offloaded, in one of its waits at least */
    size_t goes_capacity;
    int32_t made; /* computations */
} crn_link_program;

/** How much of the table is made. Pieces of 0 stages: there is no time for a few prices, or the chain is too long. */
typedef struct crn_link_extent {
    int32_t piece_max; /* stages of the longest piece */
    int32_t slots;
} crn_link_extent;

/** What there are memory and time for: pieces that are usual, or is_long: all, where near the least budget no others fit. */
crn_link_extent crn_link_extent_of(const crn_task *task, bool is_long);
/** An upper estimate of its memory. */
int64_t crn_link_program_memory(const crn_task *task, crn_link_extent extent);

/**
 * For a task whose problem is a chain with a machine, and a budget. Errors: NO_MEMORY. Free with crn_link_program_free, also
 * after one.
 */
cairn_status crn_link_program_new(const crn_task *task, int64_t budget_bytes, crn_link_extent extent,
                                  crn_link_program *program, cairn_error *error);
void crn_link_program_free(crn_link_program *program);

/**
 * The best list: its operations are added to the builder, and program->goes says what is offloaded. *found: false where no list
 * fits, or the task stops. Errors: NO_MEMORY.
 */
cairn_status crn_link_program_solve(crn_link_program *program, const crn_task *task, crn_link_terms terms,
                                    cairn_builder *builder, bool *found, cairn_error *error);

#endif
