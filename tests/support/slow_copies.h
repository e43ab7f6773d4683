/*
 * What slow_replay.c asks of a list of operations: which copies are there before one, by searching backwards, and what it
 * reads. A violation is a predicate of its own.
 */
#ifndef TEST_SLOW_COPIES_H
#define TEST_SLOW_COPIES_H

#include "support/slow_replay.h"

__extension__ typedef __int128 slow_wide; /* sums that cannot overflow */

/* A copy is named by the position of the operation that makes it. */
enum { NO_COPY = -2, AT_START = -1 };

typedef enum slow_tier { DEVICE, HOST } slow_tier;

typedef struct slow_list {
    const cairn_chain *chain;
    const cairn_graph *graph;
    const cairn_machine *machine;
    const cairn_op *ops;
    int64_t fixed_bytes;
    slow_wide start[TEST_SLOW_OPS_MAX], end[TEST_SLOW_OPS_MAX]; /* of drops and discards: when the memory comes back */
    slow_wide reserved[TEST_SLOW_OPS_MAX];                      /* of computations */
} slow_list;

/* A value: a[index] or A[index] of a chain, node index of a graph. */
typedef struct slow_value {
    bool saved;
    int index;
} slow_value;

slow_value slow_make_value(bool saved, int index);
bool slow_same_value(slow_value a, slow_value b);
bool slow_is_transfer(cairn_op op);
bool slow_is_instant(cairn_op op);
bool slow_is_forward(cairn_op op);
bool slow_computes(cairn_op op);
slow_value slow_spoken_of(cairn_op op);
/** Whether the operation makes a copy of the value there. */
bool slow_makes(cairn_op op, slow_value v, slow_tier tier);
/** Whether no copy of the value is left there after the operation, by its own doing. */
bool slow_unmakes(cairn_op op, slow_value v, slow_tier tier);
/** The copy of a value that is there before operation i, by the order of the list. */
int slow_copy_before(const slow_list *r, int i, slow_value v, slow_tier tier);
bool slow_has(const slow_list *r, int i, slow_value v, slow_tier tier);
bool slow_has_any(const slow_list *r, int i, slow_value v);
/** The gradient that is there before operation i. */
int slow_gradient_before(const slow_list *r, int i);
/** Whether the stage or node of operation i was run before, be it with another option. */
bool slow_ran_before(const slow_list *r, int i, int index);
/** The option of a saved set that operation maker put there. */
int slow_option_of(const slow_list *r, int maker);
/** The operation that made the memory in which an output of a node lies: that of the node whose alias it is. */
int slow_storage_of(const slow_list *r, int maker);
int64_t slow_bytes_of(const slow_list *r, int maker);
/** The input that stage l reads before operation i: a[l-1] when it is there, else A[l-1]. */
slow_value slow_input_of(const slow_list *r, int i, int l);
bool slow_reads(const slow_list *r, int i, slow_tier tier, int maker);

/** The first rule that operation i breaks, memory and time apart. */
cairn_violation_code slow_first_violation(const slow_list *r, int i);

#endif
