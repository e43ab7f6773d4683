/*
 * A team of threads for loops whose iterations are independent.
 *
 * The team is made once per solve and used for many loops: waking it costs microseconds, making it tens of them. The
 * calling thread works too. Results must not depend on the number of threads; loops write only to their own rows.
 */
#ifndef CRN_PARALLEL_H
#define CRN_PARALLEL_H

#include <cairn/base.h>

#include "base/memory.h"

typedef struct crn_team crn_team;

/** Processors that this process may use, at least 1. */
int crn_processor_count(void);

/**
 * A team of threads (0 = all processors). Falls back to fewer threads, in the end to the caller alone, where threads
 * cannot be made. NULL only when memory fails.
 */
crn_team *crn_team_new(const cairn_allocator *allocator, int threads);
void crn_team_free(crn_team *team);
int crn_team_size(const crn_team *team);

/**
 * Runs body(context, i, worker) for every i in [0, count), each once, in any order, and returns when all are done.
 * worker is in [0, team size): an index for scratch memory. team NULL runs everything on the caller as worker 0.
 */
void crn_team_run(crn_team *team, int64_t count, void (*body)(void *context, int64_t i, int worker), void *context);

#endif
