/*
 * Weakly persistent schedules of a chain: the recurrence that all programs of chain-weak share.
 *
 * Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to
 * train deep neural networks with limited memory", ACM TOMS 2024: a schedule is weakly persistent when a kept output
 * may later be replaced by a later one. Here with the costs of chain_model.h, and further: options per stage, forwards
 * that save nothing, gradients of weights, signed workspaces, stages that must not run twice, saving forwards that
 * serve as mere ones and saved sets that serve as checkpoints.
 *
 * A part (s,t,l) runs the backwards l, l-1, ..., t and begins with d[l] and X, the input of stage s, s <= t <= l. Three
 * kinds of parts differ in what becomes of X, and in what their memory counts:
 *
 *   ALONE(s,t,l,m)    X = a[s-1] is the part's own: m counts it, and it may be given up as soon as it is not needed
 *                     (a[0] always stays and counts nothing);
 *   BESIDE(s,t,l,m)   X = A[s-1] belongs to who began the part: m does not count it, it stays;
 *   PASS(s,t,l,m)     s < t: X is any, m does not count it, it stays, and is read once: the part goes forward first.
 *
 * With x = a[s-1] (0 for s = 1), base[l] resident all along and time counted beyond the least of the stages t..l,
 *
 *   ALONE(s,t,l,m) = least of
 *     SAVE k       t = s:  uF_k + uB_k + ALONE(s+1,s+1,l, m - x - A_k[s] + a[s])
 *     SPLIT u      t < u <= l:  PASS(s,u,l, m - x) + ALONE(s,t,u-1, m)
 *     STEP         t > s:  uN[s] + ALONE(s+1,t,l, m)                           forward_drop s: a[s] replaces a[s-1]
 *     LEAP j       s < j < t:  way(s,j) + ALONE(j+1,t,l, m)                    by saving forwards, then X is dropped
 *     LAST         t > s:  PASS(s,t,l, m - x)
 *   BESIDE(s,t,l,m), t > s = least of
 *     SPLIT u      PASS(s,u,l, m) + BESIDE(s,t,u-1, m)
 *     LAST         PASS(s,t,l, m)
 *   PASS(s,t,l,m) = least of
 *     STEP         uN[s] + ALONE(s+1,t,l, m)                                   forward_keep s
 *     LEAP j       way(s,j) + ALONE(j+1,t,l, m)
 *     SAVE_DROP k  uF_k[s] + BESIDE(s+1,t,l, m - A_k[s])                       A_k[s] is dropped in the end
 *
 * where ALONE(s+1,s+1,l, m + a[s]) is written for BESIDE(s+1,s+1,l, m), which is the same: the backward of s+1 reads X,
 * so X stays to the end. Every line needs the memory of its first operations: see the functions; SAVE_DROP also
 * base[t-1] + A_k[s], which is there between the last backward and the drop. ALONE(1,1,n) is the whole chain.
 *
 * Why it is cheap: the split u belongs to PASS, so what replaces X within it is decided there and not here. That is the
 * shared inner minimum; written with the memory that counts X, STEP costs one term, so replacing X needs no loop of its
 * own, and each single forward is charged what it needs ("m_null" of the paper charges all of them at once, from the
 * first state on). O(n) terms for each of the n^3 / 6 parts of a kind.
 *
 * A stage whose saving forwards are no faster and need no less than its mere forward has no use for LEAP and SAVE_DROP:
 * then PASS is its STEP alone and is put in its place, and BESIDE and LAST are not needed: one kind of parts is left.
 */
#ifndef CRN_WEAK_MODEL_H
#define CRN_WEAK_MODEL_H

#include "solve/chain/chain_table.h"

typedef enum crn_weak_kind { CRN_WEAK_DONE, CRN_WEAK_ALONE, CRN_WEAK_BESIDE, CRN_WEAK_PASS } crn_weak_kind;

/** A part; DONE = nothing is left to do. */
typedef struct crn_weak_part {
    crn_weak_kind kind;
    int32_t s, t, l;
} crn_weak_part;

typedef enum crn_weak_move {
    CRN_WEAK_SAVE,
    CRN_WEAK_SPLIT,
    CRN_WEAK_STEP,
    CRN_WEAK_LEAP,
    CRN_WEAK_LAST,
    CRN_WEAK_SAVE_DROP
} crn_weak_move;

/** ns + first(m - first_shift) + second(m), for m >= from_shift + from_bytes. Shifts are in the program's unit. */
typedef struct crn_weak_term {
    crn_weak_move move;
    int32_t option;   /* of SAVE and SAVE_DROP */
    int32_t end, way; /* of LEAP: j, and which way to it */
    bool steps;       /* SPLIT, LAST: PASS is the STEP alone, first is what follows it */
    crn_weak_part first, second;
    int64_t first_shift, from_shift, from_bytes, ns;
} crn_weak_term;

/** A way of saving forwards from X to {X, a[end]}: pass number `way` of (s, end). */
typedef struct crn_weak_leap {
    int32_t end, way;
    int64_t peak_bytes, ns;
} crn_weak_leap;

/** Sizes of what is kept, in the unit in which a program counts memory. */
typedef struct crn_weak_sizes {
    int64_t *output; /* a[0..n], a[0] = 0 */
    int64_t *saved;  /* A_k[l] at option_begin[l] + k */
} crn_weak_sizes;

typedef struct crn_weak_model {
    const crn_chain_table *table;
    const crn_chain_model *chain;
    int32_t n;
    crn_weak_sizes bytes;
    size_t *option_begin;
    int64_t *least_ns; /* of a stage: least forward + backward */
    crn_weak_leap *leaps;
    size_t *leap_begin; /* of s; one more at the end */
    uint64_t *saves;    /* of s: bit k is set where SAVE_DROP k may be of use */
    size_t *begin[4];   /* of a kind and s: the first part */
    size_t part_count;
    crn_arena *arena;
} crn_weak_model;

/** All memory is the arena's. Errors: NO_MEMORY. */
cairn_status crn_weak_model_init(crn_weak_model *model, const crn_chain_table *table, crn_arena *arena,
                                 cairn_error *error);
/** Upper estimate of its bytes. */
int64_t crn_weak_model_memory(const crn_task *task);
/** How many kinds of parts there may be of a stage, without a closer look: 1 or 3. */
int32_t crn_weak_kinds_of(const crn_task *task);
/** Upper estimate of part_count, and of the terms of all parts; saturating. */
void crn_weak_model_counts(const crn_task *task, int64_t *parts, int64_t *terms);

/**
 * Whether PASS of s is more than its STEP. A leap that begins with an option that SAVE_DROP has no use for is never
 * better than a step and a leap from there.
 */
static inline bool crn_weak_has_passes(const crn_weak_model *model, int32_t s)
{
    return model->saves[s] != 0;
}

/** Whether a part of s may begin beside a saved set. */
static inline bool crn_weak_has_besides(const crn_weak_model *model, int32_t s)
{
    return s > 1 && model->saves[s - 1] != 0;
}

/** Number of a part, less than part_count: parts of one kind and s one after the other, by t, and then by l. */
static inline size_t crn_weak_at(const crn_weak_model *model, crn_weak_part part)
{
    int32_t before = part.s - 1;
    return model->begin[part.kind][part.s] + crn_row_at(model->n - before, part.t - before, part.l - before);
}

/** What is done with each term; true = that is enough. */
typedef bool crn_weak_visit(void *context, const crn_weak_term *term);

/** All terms of a part, in a fixed order: SAVE, STEP, LEAP, SAVE_DROP, SPLIT, LAST. Whether a visit said enough. */
bool crn_weak_terms(const crn_weak_model *model, const crn_weak_sizes *sizes, crn_weak_part part, crn_weak_visit *visit,
                    void *context);

/** Runs fill for every part, those that it is made of first: by descending s; different t on different threads. */
typedef void crn_weak_fill(void *context, crn_weak_part part);
cairn_status crn_weak_fill_parts(const crn_weak_model *model, const crn_task *task, crn_weak_fill *fill, void *context,
                                 cairn_error *error);

/** The part that is the whole chain. */
static inline crn_weak_part crn_weak_whole(const crn_weak_model *model)
{
    return (crn_weak_part){CRN_WEAK_ALONE, 1, 1, model->n};
}

#endif
