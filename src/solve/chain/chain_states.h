/*
 * The states of a short chain in the simulator's model, the steps between them, and the least remaining time.
 *
 * Only schedules of this form are looked at; one of the fastest has it (docs/explanation/solvers/chain-bound.md):
 *   - a saved set stays until its backward. One that is dropped before serves as an output; a[l] does that as well,
 *     unless saving takes less time, or less memory while it runs;
 *   - of one stage, there is one value at a time;
 *   - a value is dropped right after the last step that reads it, or that drops the saved set that needs it.
 */
#ifndef CRN_CHAIN_STATES_H
#define CRN_CHAIN_STATES_H

#include "solve/solver.h"

enum { CRN_STATES_STAGES_MAX = 16, CRN_STATES_OPTIONS_MAX = 3 };

/** What is resident, three bits for each stage, and above them the next backward. */
typedef uint64_t crn_place;

typedef struct crn_state {
    crn_place at;
    int64_t ns;    /* from the beginning */
    int64_t bytes; /* resident beside the gradients */
} crn_state;

typedef struct crn_stage_least {
    int64_t once_ns;                     /* least forward and backward with the same option */
    int64_t again_ns;                    /* least forward */
    int64_t kept_bytes;                  /* least saved bytes */
    int64_t backward_bytes;              /* least of what its backward takes beside the gradients that are there */
    bool passes[CRN_STATES_OPTIONS_MAX]; /* whether it may stand in for a[l] */
} crn_stage_least;

/** Saving a stage instead of nothing, or with a larger option instead of a smaller one. */
typedef struct crn_stage_gain {
    int32_t l;
    int64_t least_bytes; /* that saving the stage takes, with any option */
    int64_t bytes, ns;   /* more bytes, and the time that they spare */
} crn_stage_gain;

/** A chain and a budget, and what does not depend on the state. */
typedef struct crn_chain_states {
    const cairn_chain *chain;
    int32_t n;
    int64_t budget_bytes;
    /* By c: what is always there, and the gradients while d[c] is the one at hand. */
    int64_t gradients_bytes[CRN_STATES_STAGES_MAX + 1];
    crn_stage_least least[CRN_STATES_STAGES_MAX + 1];
    crn_stage_gain gains[CRN_STATES_STAGES_MAX * CRN_STATES_OPTIONS_MAX]; /* the most time for its bytes first */
    int32_t gain_count;
} crn_chain_states;

/** OK, or UNSUPPORTED where a chain has too many stages or options. */
cairn_status crn_chain_states_accept(const cairn_chain *chain, cairn_error *error);
void crn_chain_states_init(crn_chain_states *states, const cairn_problem *problem, int64_t budget_bytes);

/** The state before the first step; false where the budget is too small for it. */
bool crn_chain_states_first(const crn_chain_states *states, crn_state *first);
/** The stage whose backward is next; 0 at the end. */
int32_t crn_chain_states_next_backward(crn_place at);
/** At least the time from there to the end; INT64_MAX where no schedule leads there. */
int64_t crn_chain_states_remaining_ns(const crn_chain_states *states, crn_place at);

/** Takes a state that a step leads to. */
typedef void (*crn_chain_states_reach)(void *context, const crn_state *to);
/** Expands a state: takes all steps from it that fit in the budget. */
void crn_chain_states_expand(const crn_chain_states *states, const crn_state *from, crn_chain_states_reach reach,
                             void *context);

/** Adds a step that was taken from one state to another, and the drops that go with it. */
cairn_status crn_chain_states_add_step(const crn_chain_states *states, crn_place from, crn_place to,
                                       cairn_builder *builder, cairn_error *error);

#endif
