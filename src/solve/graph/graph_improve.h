/*
 * Improving a sequence: remove some recomputations, repair what no longer fits, fill what became free.
 *
 *   repair   while an event does not fit, take an instance that waits across it for its next reader, and recompute it
 *            just before that reader instead: the one with the least added cost for the memory that it frees. Where the
 *            model has a link, it may be fetched from the host in time for the reader (graph_sequence.h)
 *   fill     remove recomputations whose instance can stay in memory instead, the most expensive first
 *   ruin     remove the recomputations in a random window, or insert a random one
 *
 * A round is ruin, repair, fill; its result is taken when it is not worse than what it came from, or now and then when
 * it is a little worse. When rounds find nothing better for a while, an excursion holds to one change of the best sequence
 * for some rounds: one costly value is recomputed in any case, or not at all. Every sequence is judged by the one pass of graph_sequence.h; the choices are heuristic, the
 * judgement is not.
 */
#ifndef CRN_GRAPH_IMPROVE_H
#define CRN_GRAPH_IMPROVE_H

#include <stdatomic.h>

#include "solve/graph/graph_sequence.h"

typedef struct crn_improver crn_improver;

/** When improvers that work side by side stop. Only one of them, on the thread of the task, may ask the task. */
typedef struct crn_improver_stop {
    const crn_task *task;
    atomic_bool stopped;
} crn_improver_stop;

/**
 * How much worse a trial may be and now and then be taken nevertheless: parts of what it came from, and of the best. And
 * how many rounds an excursion lasts.
 */
typedef struct crn_improver_leeway {
    int32_t step_part, far_part;
    int32_t excursion_rounds; /* 0 = it makes no excursions */
} crn_improver_leeway;

/** An improver for sequences of at most capacity events. */
cairn_status crn_improver_new(const crn_graph_model *model, int32_t capacity, uint64_t seed, crn_improver_leeway leeway,
                              crn_improver **improver, cairn_error *error);
void crn_improver_free(crn_improver *improver);

/** What begin and run heed from now on; asks: this improver may ask the task. */
void crn_improver_heed(crn_improver *improver, crn_improver_stop *stop, bool asks);
/**
 * Makes a start sequence fit the budget and fills it. False when repair fails, or is stopped; the improver then holds
 * nothing. Otherwise the sequence becomes the current and the best one.
 */
bool crn_improver_begin(crn_improver *improver, const crn_sequence *start, int64_t budget_bytes);
/** Runs rounds; returns when they are done, or soon after it was stopped. */
void crn_improver_run(crn_improver *improver, int64_t rounds);
/** The best sequence so far, valid until the next call, and its cost. */
const crn_sequence *crn_improver_best(const crn_improver *improver, int64_t *cost_ns);

#endif
