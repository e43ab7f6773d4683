/*
 * The options, and the saved sets to offload, with which a chain without recomputation needs the least device memory.
 *
 * Where the host has room for everything, everything goes; then an operation needs what it makes beside the two saved sets
 * that it reads, and the options follow from a shortest path whose greatest step is least. Where the host is scarce, what
 * goes is found by a program over (bytes on the host, greatest need so far), with dominance, of at most a few hundred
 * states; beyond those the answer is a choice, not the least.
 */
#ifndef CRN_OFFLOAD_LEAST_H
#define CRN_OFFLOAD_LEAST_H

#include "solve/offload/offload_plan.h"

typedef struct crn_offload_least {
    crn_offload_plan *plan;
    bool *goes;
    int64_t need_bytes;
    crn_arena arena;
} crn_offload_least;

/** Clear it with crn_offload_least_clear, also after a failure. */
cairn_status crn_offload_least_find(crn_offload_least *least, const crn_task *task, cairn_error *error);
void crn_offload_least_clear(crn_offload_least *least);
int64_t crn_offload_least_memory(const crn_task *task);

#endif
