/*
 * What is on the device and on the host, by the order of the list alone.
 *
 * A residency takes the operations one after another and says of each which rule it breaks, or what it reads, adds and
 * removes. It knows no times: those are simulate.c's part. Violations of memory and time are not found here.
 *
 * Copies of values live in storages. A storage is made by the operation that fills it and is gone, for this file, with
 * the operation that removes its last holder; then its number may name another storage. A node and its aliases hold one
 * storage together; everything else has one to itself. The gradients d[l] and those of the weights have none: only the
 * compute lane touches them, so their bytes are all that counts.
 */
#ifndef CRN_RESIDENCY_H
#define CRN_RESIDENCY_H

#include "schedule/schedule.h"

enum { CRN_NO_STORAGE = -1, CRN_NO_VALUE = -1 };

typedef struct crn_storage {
    int64_t bytes;
    int32_t holders;
    int32_t option; /* of a saved set; the next unused storage where there are no holders */
} crn_storage;

/** The storages of a value's copies, or CRN_NO_STORAGE. */
typedef struct crn_place {
    int32_t device, host;
} crn_place;

typedef struct crn_residency {
    cairn_allocator allocator;
    const cairn_chain *chain; /* one of the two */
    const cairn_graph *graph;
    const cairn_machine *machine;
    int32_t value_count; /* chains: a[0..n], then A[1..n]; graphs: the nodes */
    crn_place *places;
    bool *computed;   /* by stage or node: a forward or computation was issued */
    int32_t progress; /* chains: the current gradient is d[progress]; graphs: nodes computed at least once */
    crn_storage *storages;
    int32_t storage_count, storage_capacity, storage_unused; /* in use so far; room; first of those given back */
    int32_t *reads;
    int32_t read_capacity;
    int32_t culprit; /* the value that the last violation is about, or CRN_NO_VALUE */
} crn_residency;

/** What an operation does. Byte sums include gradients, which have no storage. */
typedef struct crn_effect {
    cairn_lane lane; /* CAIRN_LANE_COUNT: a drop or discard, which takes no time */
    bool on_host;    /* what is added or released is host memory */
    bool repeats;    /* a computation that is not the first of its stage or node */
    const int32_t *reads;
    int32_t read_count;
    int32_t added;      /* storage that it fills */
    int32_t removed[2]; /* storages that go when it ends */
    int32_t removed_count;
    int32_t released;    /* storage that a drop or discard gives back; none while another holder is left */
    int64_t added_bytes; /* what memory it needs for what it adds */
    int64_t removed_bytes, released_bytes;
    int64_t compute_ns, workspace_bytes; /* of computations */
} crn_effect;

/** The start: nothing but a[0] and d[n], or nothing. op_count bounds the operations to come. Errors: NO_MEMORY. */
cairn_status crn_residency_init(crn_residency *residency, cairn_allocator allocator, const cairn_problem *problem,
                                const cairn_machine *machine, int64_t op_count, cairn_error *error);
void crn_residency_free(crn_residency *residency);

/** Takes the next operation. After a violation the residency is as before, and effect is not to be used. */
cairn_violation_code crn_residency_apply(crn_residency *residency, cairn_op op, crn_effect *effect);

/** Whether everything that must be computed has been. */
bool crn_residency_complete(const crn_residency *residency);

#endif
