/*
 * Problems: a chain of stages or a graph of operations, with the machine that it runs on.
 *
 * The same plain structures describe a problem to the constructors (which copy everything) and show it again
 * afterwards (read-only views into the immutable problem). docs/reference/formats/ defines every field.
 */
#ifndef CAIRN_PROBLEM_H
#define CAIRN_PROBLEM_H

#include <cairn/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/** One way to run a stage. */
typedef struct cairn_stage_option {
    const char *name;
    int64_t saved_bytes; /**< A[l]: all that the backward needs, the stage's output included, its input excluded */
    int64_t forward_ns, backward_ns;
    int64_t forward_workspace_bytes, backward_workspace_bytes; /**< may be negative */
} cairn_stage_option;

/** Stage l of a chain. In arrays, stage l stands at index l - 1. */
typedef struct cairn_stage {
    const char *name;
    int64_t output_bytes;      /**< a[l] */
    int64_t grad_bytes;        /**< d[l] */
    int64_t weight_grad_bytes; /**< appears with the stage's backward and stays */
    int64_t forward_only_ns;   /**< time of a forward that saves nothing */
    int64_t forward_only_workspace_bytes;
    bool no_recompute;
    int32_t option_count; /**< at least 1, at most CAIRN_STAGE_OPTIONS_MAX */
    const cairn_stage_option *options;
} cairn_stage;

typedef struct cairn_chain {
    int64_t input_bytes;      /**< a[0] */
    int64_t input_grad_bytes; /**< d[0] */
    int32_t stage_count;      /**< n */
    const cairn_stage *stages;
} cairn_chain;

/** Node v of a graph; nodes stand in the order in which they are first computed. */
typedef struct cairn_node {
    const char *name;
    int64_t cost_ns;
    int64_t bytes;           /**< size of the output; 0 for an alias */
    int64_t workspace_bytes; /**< may be negative */
    const int32_t *deps;     /**< indices of earlier nodes, each once; ascending in views */
    int32_t dep_count;
    int32_t alias_of; /**< node whose storage this one shares, or -1 */
    bool keep;        /**< an output of the whole computation */
    bool no_recompute;
} cairn_node;

typedef struct cairn_graph {
    int32_t node_count; /**< T */
    const cairn_node *nodes;
    int32_t backward_begins_at; /**< nodes before the backward, or -1 */
} cairn_graph;

/** The link to host memory. */
typedef struct cairn_machine {
    int64_t host_bytes;
    int64_t to_host_bytes_per_s, to_device_bytes_per_s; /**< at least 1 */
    int64_t latency_ns;
    bool shared_link; /**< both directions share one lane */
} cairn_machine;

/** What chains and graphs have in common. Zero-initialise for the defaults. */
typedef struct cairn_problem_info {
    const char *name;             /**< NULL = "" */
    const char *provenance;       /**< text of a JSON object, kept as it is; NULL = "{}" */
    int64_t fixed_bytes;          /**< always resident, counts toward the budget */
    const cairn_machine *machine; /**< NULL = no offloading */
} cairn_problem_info;

typedef enum cairn_problem_kind { CAIRN_KIND_CHAIN, CAIRN_KIND_GRAPH } cairn_problem_kind;

/** An immutable, validated, hashed problem. */
typedef struct cairn_problem cairn_problem;

/**
 * Copies and validates a chain or a graph.
 * Errors: BAD_INPUT (with index and path), OVERFLOW, TOO_LARGE, NO_MEMORY. Cost: O(size). Free with cairn_problem_free.
 * In a stage description, everything is given explicitly: there are no defaults at this level.
 */
CAIRN_API cairn_status cairn_problem_new_chain(const cairn_env *env, const cairn_chain *chain,
                                               const cairn_problem_info *info, cairn_problem **problem,
                                               cairn_error *error);
CAIRN_API cairn_status cairn_problem_new_graph(const cairn_env *env, const cairn_graph *graph,
                                               const cairn_problem_info *info, cairn_problem **problem,
                                               cairn_error *error);
/** Frees a problem; NULL is allowed. The allocator of the env it was made with must still work. */
CAIRN_API void cairn_problem_free(cairn_problem *problem);

CAIRN_API cairn_problem_kind cairn_problem_kind_of(const cairn_problem *problem);
/** Read-only views, valid as long as the problem; NULL when the problem is of the other kind. */
CAIRN_API const cairn_chain *cairn_problem_chain(const cairn_problem *problem);
CAIRN_API const cairn_graph *cairn_problem_graph(const cairn_problem *problem);
/** Name, provenance, fixed bytes and machine; valid as long as the problem. */
CAIRN_API const cairn_problem_info *cairn_problem_info_of(const cairn_problem *problem);
/**
 * "sha256:" and 64 hexadecimal digits over the canonical form (docs/reference/formats/). Valid as long as the
 * problem.
 */
CAIRN_API const char *cairn_problem_hash(const cairn_problem *problem);

/**
 * A chain as a graph, for graph solvers: forward, loss gradient and backward as nodes
 * (docs/explanation/solvers/convert.md, also on what graphs allow and chains do not). A stage with several options runs
 * by its first. name, provenance and machine stay; fixed_bytes includes the input. Errors: UNSUPPORTED (a graph),
 * TOO_LARGE, NO_MEMORY. Cost: O(size).
 */
CAIRN_API cairn_status cairn_chain_to_graph(const cairn_env *env, const cairn_problem *chain, cairn_problem **graph,
                                            cairn_error *error);

/**
 * The problem at another size: all sizes, workspaces and times times multiplier / divisor, each rounded up; fixed_bytes
 * and the machine stay. Errors: BAD_INPUT (less than 1), OVERFLOW, NO_MEMORY. Cost: O(size).
 */
CAIRN_API cairn_status cairn_problem_scale(const cairn_env *env, const cairn_problem *problem, int64_t multiplier,
                                           int64_t divisor, cairn_problem **made, cairn_error *error);

/**
 * Duration of a transfer: latency + ceil(bytes * 1e9 / bytes_per_s). CAIRN_NONE when it passes 2^63 - 1, and where bytes
 * is below 0 or bytes_per_s below 1.
 */
CAIRN_API int64_t cairn_transfer_ns(int64_t bytes, int64_t bytes_per_s, int64_t latency_ns);

/** Checks a machine (as a problem's own is checked). Errors: BAD_INPUT. */
CAIRN_API cairn_status cairn_machine_check(const cairn_machine *machine, cairn_error *error);

#ifdef __cplusplus
}
#endif

#endif
