/* Inside of a schedule, and what the files of this folder share about operations. */
#ifndef CRN_SCHEDULE_H
#define CRN_SCHEDULE_H

#include <cairn/schedule.h>

#include "base/memory.h"
#include "base/sha256.h"

/** Everything hangs on the arena, the structure itself included. */
struct cairn_schedule {
    crn_arena arena;
    cairn_problem_kind kind;
    cairn_schedule_info info;
    cairn_machine machine; /* info.machine points here, or is NULL */
    char problem_hash[CRN_HASH_TEXT_MAX];
    char hash[CRN_HASH_TEXT_MAX];
    int64_t count;
    const cairn_op *ops;
};

enum { CRN_OP_TEXT_MAX = 48 };

/** An operation as people read it: "forward_save 3 0", "drop saved 2". */
void crn_op_text(cairn_op op, cairn_problem_kind kind, char text[CRN_OP_TEXT_MAX]);

/** A schedule of a copy of the operations. info NULL = nothing recorded. Errors: BAD_INPUT, NO_MEMORY. */
cairn_status crn_schedule_new(cairn_allocator allocator, const cairn_problem *problem, const cairn_op *ops,
                              int64_t count, const cairn_schedule_info *info, cairn_schedule **schedule,
                              cairn_error *error);

/**
 * A schedule that looks at the caller's operations, for a simulation of them and nothing else: it copies nothing, has no
 * hash, and is not freed. It records the machine.
 */
void crn_schedule_borrow(const cairn_problem *problem, const cairn_op *ops, int64_t count, const cairn_machine *machine,
                         cairn_schedule *schedule);

/** Makes room for so many operations in all, where their number is known beforehand. */
cairn_status crn_builder_reserve(cairn_builder *builder, int64_t count, cairn_error *error);

/** Appends operations, all or none; as cairn_builder_add one by one, in less time. */
cairn_status crn_builder_add_all(cairn_builder *builder, const cairn_op *ops, int64_t count, cairn_error *error);

/** The budget under which it was verified, as cairn_verify took it. */
int64_t crn_verified_budget(const cairn_verified *verified);

/** BAD_INPUT, and why, for operations that the problem cannot have; position is where the first stands in the list. */
cairn_status crn_ops_check(const cairn_problem *problem, const cairn_op *ops, int64_t count, int64_t position,
                           cairn_error *error);

#endif
