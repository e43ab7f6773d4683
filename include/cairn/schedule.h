/*
 * Schedules: an immutable list of operations, and the simulator that says what it means.
 *
 * The schedule is the waist of Cairn: every solver emits one through the builder, one simulator judges it, every
 * executor replays it. docs/reference/formats/schedule.md defines the semantics; schedule/residency.c and
 * schedule/simulate.c implement that page and nothing else, schedule/serial.c the simple part of it once more, for
 * speed.
 */
#ifndef CAIRN_SCHEDULE_H
#define CAIRN_SCHEDULE_H

#include <cairn/problem.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(constant, name in files, "chain", "graph" or "both") */
#define CAIRN_OP_MAP(X)                                       \
    X(FORWARD_SAVE, "forward_save", CHAIN) /* rotor's Fall */ \
    X(FORWARD_KEEP, "forward_keep", CHAIN) /* Fck */          \
    X(FORWARD_DROP, "forward_drop", CHAIN) /* Fnone */        \
    X(BACKWARD, "backward", CHAIN)                            \
    X(COMPUTE, "compute", GRAPH)                              \
    X(DROP, "drop", BOTH)                                     \
    X(OFFLOAD, "offload", BOTH)                               \
    X(PREFETCH, "prefetch", BOTH)                             \
    X(DISCARD, "discard", BOTH)

#define CAIRN_X(constant, name, kinds) CAIRN_OP_##constant,
typedef enum cairn_op_code { CAIRN_OP_MAP(CAIRN_X) CAIRN_OP_COUNT } cairn_op_code;
#undef CAIRN_X

/** Which value of a stage a drop, offload, prefetch or discard of a chain speaks of. */
typedef enum cairn_value {
    CAIRN_VALUE_OUTPUT, /**< a[l] */
    CAIRN_VALUE_SAVED   /**< A[l] */
} cairn_value;

/** One operation. index: stage l (1-based; 0 for the input in "output") or node v (0-based). */
typedef struct cairn_op {
    uint8_t code;    /**< cairn_op_code */
    uint8_t value;   /**< cairn_value; 0 where it does not apply */
    uint16_t option; /**< of forward_save; 0 elsewhere */
    int32_t index;
} cairn_op;

/** Name of an operation as it stands in files ("forward_save"); NULL for a value that is none. */
CAIRN_API const char *cairn_op_name(cairn_op_code code);

/** As a budget: the one that the schedule records, or none if it records none. */
#define CAIRN_RECORDED (INT64_C(-2))

typedef struct cairn_schedule cairn_schedule;

/** The record of a schedule besides its operations. Zero values mean null except for sizes and times: CAIRN_NONE. */
typedef struct cairn_schedule_info {
    const char *solver;                              /**< NULL = none recorded */
    int64_t budget_bytes;                            /**< CAIRN_NONE = none recorded */
    int64_t makespan_ns, peak_bytes, lower_bound_ns; /**< CAIRN_NONE = not recorded */
    const cairn_machine *machine;                    /**< NULL = the problem's */
} cairn_schedule_info;

/** A cairn_schedule_info with nothing recorded. */
/* clang-format off */
#define CAIRN_SCHEDULE_INFO_INIT {NULL, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, NULL}
/* clang-format on */

/** Collects operations; the only way to make a schedule. */
typedef struct cairn_builder cairn_builder;

/** An empty builder for a problem, which must outlive it. Errors: NO_MEMORY. */
CAIRN_API cairn_status cairn_builder_new(const cairn_env *env, const cairn_problem *problem, cairn_builder **builder,
                                         cairn_error *error);
/**
 * Appends an operation. Errors: BAD_INPUT (an op of the other kind of problem, an index, option or value out of range:
 * error->index is the op's position), TOO_LARGE, NO_MEMORY. After a failure the builder holds what it held before.
 */
CAIRN_API cairn_status cairn_builder_add(cairn_builder *builder, cairn_op op, cairn_error *error);
/** Number of operations so far, and the operations (valid until the next add). */
CAIRN_API int64_t cairn_builder_count(const cairn_builder *builder);
CAIRN_API const cairn_op *cairn_builder_ops(const cairn_builder *builder);
/** Forgets all operations from position count on. */
CAIRN_API void cairn_builder_truncate(cairn_builder *builder, int64_t count);
/** Turns the operations into a schedule and empties the builder. info NULL = nothing recorded. Errors: BAD_INPUT, NO_MEMORY. */
CAIRN_API cairn_status cairn_builder_finish(cairn_builder *builder, const cairn_schedule_info *info,
                                            cairn_schedule **schedule, cairn_error *error);
CAIRN_API void cairn_builder_free(cairn_builder *builder);

CAIRN_API void cairn_schedule_free(cairn_schedule *schedule);
CAIRN_API int64_t cairn_schedule_count(const cairn_schedule *schedule);
CAIRN_API const cairn_op *cairn_schedule_ops(const cairn_schedule *schedule);
CAIRN_API const cairn_schedule_info *cairn_schedule_info_of(const cairn_schedule *schedule);
CAIRN_API cairn_problem_kind cairn_schedule_kind(const cairn_schedule *schedule);
/** Hash of the problem that it was built for. */
CAIRN_API const char *cairn_schedule_problem_hash(const cairn_schedule *schedule);
/** "sha256:..." over the problem's hash, the machine and the operations. */
CAIRN_API const char *cairn_schedule_hash(const cairn_schedule *schedule);

/* X(constant, name, text). Where several apply to one operation the earliest is reported. */
#define CAIRN_VIOLATION_MAP(X)                                                                         \
    X(PINNED, "pinned", "the input of the chain is never dropped, moved or removed")                   \
    X(WRONG_ORDER, "wrong_order", "the gradient is not the current one, or nodes overtake each other") \
    X(RECOMPUTED, "recomputed", "a no_recompute stage or node runs more than once")                    \
    X(KEEP_DROPPED, "keep_dropped", "the last copy of a kept node would go")                           \
    X(ALIAS_MOVED, "alias_moved", "an alias is not moved; move the base")                              \
    X(NO_MACHINE, "no_machine", "a transfer, and the problem has no machine")                          \
    X(ALREADY_RESIDENT, "already_resident", "the value is on the device already")                      \
    X(ALREADY_ON_HOST, "already_on_host", "the value is on the host already")                          \
    X(NOT_ON_HOST, "not_on_host", "the value is not on the host")                                      \
    X(NOT_RESIDENT, "not_resident", "a value that the operation needs is not on the device")           \
    X(INPUT_NEEDED, "input_needed", "a saved set would lose its stage's input")                        \
    X(OVER_BUDGET, "over_budget", "more device memory is needed than the budget leaves")               \
    X(OVER_HOST_BUDGET, "over_host_budget", "more host memory is needed than there is")                \
    X(OVERFLOW, "overflow", "a time or a sum of sizes passes 2^63 - 1")                                \
    X(INCOMPLETE, "incomplete", "the list ends before the computation is complete")                    \
    X(RECORDED_MAKESPAN, "recorded_makespan", "the recorded makespan is not the simulated one")        \
    X(RECORDED_PEAK, "recorded_peak", "the recorded peak is not the simulated one")

#define CAIRN_X(constant, name, text) CAIRN_VIOLATION_##constant,
typedef enum cairn_violation_code {
    CAIRN_VIOLATION_NONE,
    CAIRN_VIOLATION_MAP(CAIRN_X) CAIRN_VIOLATION_COUNT
} cairn_violation_code;
#undef CAIRN_X

CAIRN_API const char *cairn_violation_name(cairn_violation_code code);

typedef struct cairn_violation {
    cairn_violation_code code;
    int64_t op;                       /**< position in the list, CAIRN_NONE for incomplete and recorded_* */
    int64_t needed_bytes, free_bytes; /**< of over_budget and over_host_budget, else CAIRN_NONE */
    char message[CAIRN_ERROR_MESSAGE_MAX];
} cairn_violation;

/** What the simulator found. When the schedule is not valid, every number is CAIRN_NONE. */
typedef struct cairn_replay {
    bool valid;
    cairn_violation violation;
    int64_t makespan_ns;
    int64_t peak_bytes, host_peak_bytes;
    int64_t compute_ns;   /**< time of all computations */
    int64_t recompute_ns; /**< of those that are not the first of their stage or node */
    int64_t stall_ns;     /**< makespan - compute_ns */
} cairn_replay;

typedef enum cairn_lane { CAIRN_LANE_COMPUTE, CAIRN_LANE_TO_HOST, CAIRN_LANE_TO_DEVICE, CAIRN_LANE_COUNT } cairn_lane;

/** Watches a simulation, for traces. Callbacks may be NULL. They are called in the order of the list (op), of time (memory). */
typedef struct cairn_observer {
    void *context;
    /** A computation or transfer. */
    void (*op)(void *context, int64_t position, cairn_op op, cairn_lane lane, int64_t start_ns, int64_t end_ns);
    /** Device and host memory in use from time_ns on. */
    void (*memory)(void *context, int64_t time_ns, int64_t device_bytes, int64_t host_bytes);
} cairn_observer;

/**
 * Replays a schedule under a device budget (CAIRN_NONE: none; then nothing waits for device memory; CAIRN_RECORDED).
 * The machine is the schedule's, else the problem's. A violation is a result: CAIRN_OK with replay->valid false.
 * Recorded makespan and peak are not looked at: that is cairn_verify's part.
 * Errors: MISMATCH (wrong hash), BAD_ARGUMENT (a negative budget that is neither), NO_MEMORY. Cost: linear in the size of
 * the problem and the number of operations, a graph's computation counting its dependencies; linear memory.
 */
CAIRN_API cairn_status cairn_simulate(const cairn_env *env, const cairn_problem *problem,
                                      const cairn_schedule *schedule, int64_t budget_bytes,
                                      const cairn_observer *observer, cairn_replay *replay, cairn_error *error);

/** A schedule that was verified against its problem: what executors take. */
typedef struct cairn_verified cairn_verified;

/**
 * Simulates under budget_bytes and compares the recorded makespan and peak (under the recorded budget).
 * budget_bytes: CAIRN_RECORDED = the recorded one (none recorded: none), CAIRN_NONE = no budget. On success with replay->valid, *verified is an
 * object that refers to problem and schedule, which must outlive it; otherwise NULL. verified may be NULL (only judge).
 * Errors: as cairn_simulate.
 */
CAIRN_API cairn_status cairn_verify(const cairn_env *env, const cairn_problem *problem, const cairn_schedule *schedule,
                                    int64_t budget_bytes, cairn_verified **verified, cairn_replay *replay,
                                    cairn_error *error);
CAIRN_API const cairn_problem *cairn_verified_problem(const cairn_verified *verified);
CAIRN_API const cairn_schedule *cairn_verified_schedule(const cairn_verified *verified);
/** The replay that verified it. */
CAIRN_API const cairn_replay *cairn_verified_replay(const cairn_verified *verified);
CAIRN_API void cairn_verified_free(cairn_verified *verified);

#ifdef __cplusplus
}
#endif

#endif
