/*
 * Walking a graph under a budget: future-aware eviction.
 *
 * The walk computes the nodes in order. To compute one it first brings back what it reads and what was evicted, recursively;
 * when memory is short it evicts the storage with the least
 *
 *     weight * recompute cost / (bytes^a * distance to the next use^b)
 *
 * where the recompute cost counts the missing ancestors. The order is known, so the next use is known: this is Belady's
 * rule crossed with that of dynamic tensor rematerialization (Kirisame et al., 2021), which must guess it from the past.
 * Storages that nothing will read go first. Exponents are multiples of 1/2, so that squares of prices take nothing but
 * products and quotients: the same walk is made on every machine, and in every unit of sizes and times.
 */
#ifndef CRN_GRAPH_WALK_H
#define CRN_GRAPH_WALK_H

#include "solve/graph/graph_sequence.h"

typedef struct crn_walk_rule {
    bool
        online; /* the future is not known: recompute cost / (bytes * time since the last access), the rest is not read */
    bool unlocks; /* where nothing else can go, what waits for a later computation goes, and comes back for it */
    int half_bytes_power;    /* 2a */
    int half_distance_power; /* 2b */
    const float *weight;     /* of a storage's wait for each of its uses, indexed as model->use; NULL = 1 */
} crn_walk_rule;

/** Computations of a node, on average, for which sequences of walks have room: sessions hand them to each other. */
enum { CRN_WALK_TIMES = 8 };

typedef struct crn_walk crn_walk;

cairn_status crn_walk_new(const crn_graph_model *model, crn_walk **walk, cairn_error *error);
void crn_walk_free(crn_walk *walk);
/**
 * Walks under a budget and writes the sequence. False when it gets stuck: a node and what it reads do not fit, or a
 * value would have to be recomputed that must not be, or the sequence would pass its capacity. False also when the task
 * stops.
 */
bool crn_walk_run(crn_walk *walk, const crn_task *task, int64_t budget_bytes, const crn_walk_rule *rule,
                  crn_sequence *sequence);
/**
 * What the last walk took, as far as it came: under every budget between this and its own a walk goes the same way, to the
 * same end.
 */
int64_t crn_walk_needed(const crn_walk *walk);
/**
 * Limits the work of all walks from now on, or no longer: near the least memory, walks through large graphs recompute until
 * their sequence is full. Small graphs have no limit.
 */
void crn_walk_limit(crn_walk *walk, bool limited);
/** Whether the work is used up: the walk was stopped, and further ones fail. */
bool crn_walk_is_spent(const crn_walk *walk);

#endif
