/*
 * When storages that a sequence fetches from the host are away from the device.
 *
 * An instance that is followed by a fetch is offloaded after its last reader. Offloads go one after the other, in the order
 * of these readers. The fetched instance is read by some event first. Fetches go one after the other, in the order of these
 * events, as late as the link allows. Both are placed in the time that the computations take, as if none of them waited:
 * what is found says where memory is free, and not how long the schedule takes.
 */
#ifndef CRN_LINK_TIMES_H
#define CRN_LINK_TIMES_H

#include "solve/graph/graph_sequence.h"

typedef struct crn_link_times {
    int32_t *first;    /* of an instance: the event that reads it first; -1 = none */
    int32_t *next;     /* of an instance: another one in the same list */
    int32_t *lists;    /* of an event: the instances that are placed at it */
    int32_t *left;     /* of a fetch: the event after the last reader before it */
    int32_t *begin;    /* of a fetch: the event in which its transfer begins */
    int64_t *clock_ns; /* of an event: what those before it take */
    int64_t *out_ns;   /* of an event: when the link to the host has done what it has to do for readers up to it */
    int64_t *on_host;  /* of an event: bytes on the host, where not all storages fit there */
    int64_t *back_ns;  /* of an event: from when the link to the device works for readers from it on */
} crn_link_times;

/** NULL: no memory. */
crn_link_times *crn_link_times_new(crn_arena *arena, int32_t capacity);

/* ---- while a sequence is judged ---- */

void crn_link_times_begin(crn_link_times *times, int32_t count);
static inline void crn_link_times_read(crn_link_times *times, int32_t instance, int32_t e)
{
    if (times->first[instance] < 0)
        times->first[instance] = e;
}
/** Places all transfers, when all reads are known: instances last until they have been offloaded. */
void crn_link_times_place(crn_sequence_eval *eval, const crn_sequence *sequence);
/** Moves the memory of fetches, in freed[], which stands at zero, to the events in which their transfers begin. */
void crn_link_times_levels(crn_sequence_eval *eval, const crn_sequence *sequence);

/* ---- of a sequence that was judged ---- */

/** Where an instance is read last by one event and next by another, from which event to which it could be away. */
bool crn_link_times_away(const crn_sequence_eval *eval, int32_t storage, int32_t last, int32_t next, int32_t *from,
                         int32_t *to);

#endif
