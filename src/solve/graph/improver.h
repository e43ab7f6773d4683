/*
 * What graph_improve.c, improver_repair.c and improver_fill.c share: the state of an improver, and the steps of a round.
 */
#ifndef CRN_IMPROVER_H
#define CRN_IMPROVER_H

#include "solve/graph/graph_improve.h"

enum { CRN_IMPROVER_POLL_EVERY = 256, CRN_IMPROVER_BLOCK = 64, CRN_IMPROVER_CLOSURE_MAX = 48 };

/* A recomputation, and what leaving it out is worth. */
typedef struct crn_improver_gain {
    double value;
    int32_t event;
} crn_improver_gain;

struct crn_improver {
    const crn_graph_model *model;
    crn_arena arena;
    int64_t budget_bytes;
    crn_improver_stop *stop;
    bool asks; /* the task whether to stop */
    uint64_t random;
    crn_improver_leeway leeway;
    crn_sequence current, trial, best;
    int64_t current_cost, best_cost;
    bool is_at_current;      /* the trial is the current sequence, and was judged */
    crn_sequence_eval eval;  /* of the trial */
    int32_t *newest;         /* of a storage: its newest instance, while scanning */
    int32_t *before, *after; /* of an instance: last reader up to, first reader after the position looked at */
    int32_t *short_count;    /* of an event: how many events before it do not fit */
    int32_t *following;      /* of an instance: the storage's next one */
    int32_t *waiting;        /* instances */
    int64_t *block_level;    /* of CRN_IMPROVER_BLOCK events: none of them is above it */
    crn_improver_gain *gains;
    int32_t *mark; /* of a storage: closure that it belongs to */
    int32_t marker;
    int32_t forced,
        spared; /* of an excursion: a storage whose recomputations stay, or that is not dropped; -1 = none */
    int64_t
        idle; /* rounds since the best was found or an excursion ended; in an excursion, -1 for each round that is left */
};

/** A random number below the bound; 0 where that is not positive. */
int32_t crn_improver_draw(crn_improver *im, int32_t bound);
/** A random factor in [1/2, 3/2). */
double crn_improver_factor(crn_improver *im);
bool crn_improver_is_stopped(const crn_improver *im);

/** Judges the trial. */
void crn_improver_judge(crn_improver *im);
/** Whether bytes more fit on all events in [from, to) of the trial, which was judged. */
bool crn_improver_has_room(const crn_improver *im, int32_t from, int32_t to, int64_t bytes);
/** The node that event e of the trial computes or fetches. */
static inline int32_t crn_improver_node(const crn_improver *im, int32_t e)
{
    return crn_event_node(im->model, im->trial.node[e]);
}
/** Whether event e is a recomputation, or a fetch, that may be left out. */
bool crn_improver_recomputes(const crn_improver *im, int32_t e);

/* ---- repair ---- */

/** For every instance: its last reader up to event p, its first one after. newest[] is left at the end of the list. */
void crn_improver_find_waits(crn_improver *im, int32_t p);
/** The instances that wait across event p for their next reader, in waiting[]; where there are very many, some of them. */
int32_t crn_improver_list_waiting(crn_improver *im, int32_t p);
/**
 * What must be computed just before event q to recompute storage s, in order: its root, and those ancestors that are gone by
 * then and cannot stay in memory until then. Ancestors that are cheaper to fetch are fetched. Returns their number, 0 when
 * it must not be done. s may be recomputed.
 */
int32_t crn_improver_closure(crn_improver *im, int32_t s, int32_t q, int32_t list[CRN_IMPROVER_CLOSURE_MAX],
                             int64_t *cost);
/** Drops instances of the trial until it fits. False where it costs too much, cannot fit, or was stopped. */
bool crn_improver_repair(crn_improver *im, int64_t give_up_cost);

/* ---- fill ---- */

/** Removes recomputations of the trial whose instance can stay in memory instead, until nothing more goes. */
void crn_improver_fill(crn_improver *im);

#endif
