/*
 * Which values are offloaded, given the computations: the part that all solvers with a machine share.
 *
 * A list of operations without transfers fixes what is computed and in which order: its *events*. Between two events that
 * read it a copy on the device only *waits*; a wait may be spent on the host instead. So a schedule with transfers is a
 * list without any, which may be over the budget, and a set of waits to offload. crn_transfer_schedule places their
 * transfers in time:
 *
 *   - offloads go as early as data and link allow, in the order in which their memory is wanted back;
 *   - prefetches go as late as the link allows. Their place is found by running the same rule backwards in time, where a
 *     prefetch is an offload: a copy leaves the device once its (in time, next) reader is done with it;
 *   - both are then merged with the events by an event simulation with the simulator's rules: what can start first is
 *     issued first, so nothing in the list holds up what could go ahead. A wait whose offload has not begun when its
 *     reader comes stays where it is.
 *
 * In the backward run the budget is kept, so a set of waits without which every event fits can always be scheduled, host
 * memory permitting: nothing deadlocks. The makespan that is found is the simulator's for the list that is emitted.
 *
 * Copies of a graph are storages: a copy leaves and comes back with its base, and the aliases that are read afterwards
 * are computed again before the reader. A storage is dropped after its last reader. A copy that must be kept to the end
 * need not come back.
 */
#ifndef CRN_TRANSFER_H
#define CRN_TRANSFER_H

#include "solve/solver.h"

enum { CRN_NO_COPY = -1 };

/** A computation of the list. */
typedef struct crn_event {
    cairn_op op;
    int64_t ns;
    int64_t reserve_bytes; /* what it reserves beyond what is there when it starts */
    int64_t grow_bytes;    /* how much more there is after it than before it */
    int64_t level_bytes;   /* memory while it runs, when nothing is offloaded */
    int32_t first_read, read_count;
    int32_t added;   /* the copy that it makes; CRN_NO_COPY for an alias */
    int32_t dropped; /* the first copy that is dropped after it; chained by crn_copy.next_dropped */
} crn_event;

/** One copy of a value on the device, from the event that makes it to the one that removes it or after which it is dropped. */
typedef struct crn_copy {
    cairn_op value; /* of an operation on it: index, value */
    int64_t bytes;
    int32_t birth, end; /* events; -1 = there from the start, event_count = never dropped */
    bool removed;       /* event end removes it; else it is dropped after it */
    bool pinned;        /* never offloaded: the input, what a kept alias holds, aliases that cannot be computed again */
    int32_t last_read;
    int32_t next_dropped, first_alias;
    int32_t first_wait; /* CRN_NO_COPY where it has none; the others follow by crn_transfer.next_wait */
} crn_copy;

/** An alias in a copy's storage. */
typedef struct crn_alias {
    int32_t node, created, last_read; /* events */
    int64_t ns;
    int32_t next;
    bool is_kept;
} crn_alias;

/** A copy waits from after event `from` until event `to`, which reads it; to = event_count: until the end. */
typedef struct crn_wait {
    int32_t copy, from, to;
} crn_wait;

typedef struct crn_transfer {
    crn_arena arena;
    const crn_task *task;
    const cairn_machine *machine;
    crn_event *events;
    int32_t event_count;
    int32_t *reads; /* copies */
    int32_t read_count;
    crn_copy *copies;
    int32_t copy_count;
    crn_alias *aliases;
    int32_t alias_count;
    crn_wait *waits; /* by the event `to`; those until the end are last, by copy */
    int32_t wait_count;
    int64_t *out_ns, *back_ns; /* of a wait: its transfers */
    int32_t *next_wait;        /* of the same copy; CRN_NO_COPY after the last */
    int64_t *clock_ns;         /* of an event: sum of the times of those before it; event_count + 1 entries */
    int64_t start_bytes, end_bytes;
    /* scratch of crn_transfer_schedule */
    int32_t *out_queue, *back_queue; /* waits, as their transfers are issued */
    int32_t *release_at;             /* of a wait: the event before which its prefetch may be issued */
    int32_t *by_from, *from_begin;   /* waits by their event from, and where those of an event begin */
    uint8_t *state;                  /* of a wait */
    int64_t *left_ns;                /* of a wait: when, backwards in time, it has left the device */
    bool *on_host;                   /* of a copy: a host copy exists */
    int64_t *ready_ns, *busy_ns, *host_ready_ns, *host_busy_ns;
} crn_transfer;

/**
 * Reads a list of operations without transfers, valid but for its peak, which may pass every budget. A graph's drops are
 * not read: storages are dropped after their last reader. Errors: NO_MEMORY; UNSUPPORTED when the list is not valid.
 */
cairn_status crn_transfer_new(const crn_task *task, const cairn_op *ops, int64_t count, crn_transfer **transfer,
                              cairn_error *error);
void crn_transfer_free(crn_transfer *transfer);
/** An upper estimate of a model's memory for a list of count operations of the task's problem. */
int64_t crn_transfer_memory(const crn_task *task, int64_t count);

/** Memory while each event runs when the waits that are offloaded are on the host all the time between their ends. */
void crn_transfer_levels(const crn_transfer *transfer, const bool *offloaded, int64_t *levels);

/**
 * Schedules the transfers under a budget (INT64_MAX = none). *makespan_ns = INT64_MAX when they cannot be: an event does
 * not fit, or the host is full. patient: a prefetch does not go before a computation that it would hold up; neither rule
 * is always the better one. builder NULL = only judge; else the operations are appended, and what was appended is to be
 * forgotten after an INT64_MAX. Errors: the builder's. Cost: O(events + reads + waits).
 */
cairn_status crn_transfer_schedule(crn_transfer *transfer, const bool *offloaded, int64_t budget_bytes, bool patient,
                                   cairn_builder *builder, int64_t *makespan_ns, cairn_error *error);

#endif
