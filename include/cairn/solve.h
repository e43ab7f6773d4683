/*
 * Solving: one call for every solver, the options they take, and what they answer.
 */
#ifndef CAIRN_SOLVE_H
#define CAIRN_SOLVE_H

#include <cairn/schedule.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What was found. Whether the call worked is the cairn_status. */
typedef enum cairn_outcome {
    CAIRN_OUTCOME_OPTIMAL,    /**< proved for the problem as stated: lower_bound_ns = makespan_ns */
    CAIRN_OUTCOME_FEASIBLE,   /**< a schedule within the budget */
    CAIRN_OUTCOME_INFEASIBLE, /**< the solver has none; least_bytes says what would do */
    CAIRN_OUTCOME_UNKNOWN     /**< nothing was found before time, memory or the iterations that were asked for ended */
} cairn_outcome;

/** "optimal", "feasible", "infeasible", "unknown". Static storage. */
CAIRN_API const char *cairn_outcome_name(cairn_outcome outcome);

/*
 * Options: a table of name -> setter, with bounds and help; the command line, Python and the tests use this parser.
 */
typedef enum cairn_option_type {
    CAIRN_OPTION_SIZE,     /**< "8GiB", "12000" */
    CAIRN_OPTION_RATE,     /**< "12GB/s" */
    CAIRN_OPTION_DURATION, /**< "500ms" */
    CAIRN_OPTION_COUNT,    /**< an integer */
    CAIRN_OPTION_CHOICE,   /**< one of choices, separated by '|' */
    CAIRN_OPTION_TEXT,
    CAIRN_OPTION_FLAG /**< "true" or "false" */
} cairn_option_type;

typedef struct cairn_option_info {
    const char *name; /**< as on the command line, without dashes: "time-limit" */
    cairn_option_type type;
    int64_t min, max;     /**< of numbers, inclusive */
    const char *choices;  /**< of CAIRN_OPTION_CHOICE */
    const char *fallback; /**< what holds when it is not set, in words */
    const char *help;     /**< one line */
} cairn_option_info;

/** The table. Static storage. NULL past the end. */
CAIRN_API const cairn_option_info *cairn_option_at(int index);

/** A set of option values. */
typedef struct cairn_options cairn_options;

CAIRN_API cairn_status cairn_options_new(const cairn_env *env, cairn_options **options, cairn_error *error);
CAIRN_API void cairn_options_free(cairn_options *options);
/**
 * A copy for another solver, without what only others take (cairn_solver_has_option), for who asks several solvers with
 * the same options. Errors: BAD_INPUT (there is no such solver), NO_MEMORY.
 */
CAIRN_API cairn_status cairn_options_for(const cairn_env *env, const cairn_options *options, const char *solver,
                                         cairn_options **copy, cairn_error *error);
/** Sets an option from text. Errors: BAD_INPUT, naming the option, the value and what is allowed. */
CAIRN_API cairn_status cairn_options_set(cairn_options *options, const char *name, const char *value,
                                         cairn_error *error);
/** Sets a SIZE, RATE (bytes per second), DURATION (ns), COUNT or FLAG (0 or 1) option from a number. Errors: BAD_INPUT. */
CAIRN_API cairn_status cairn_options_set_int(cairn_options *options, const char *name, int64_t value,
                                             cairn_error *error);

/**
 * The machine that holds for a problem: the options on the host and the link, over the problem's own. *present is false
 * when there is none; options may be NULL. Errors: BAD_INPUT.
 */
CAIRN_API cairn_status cairn_options_machine(const cairn_options *options, const cairn_problem *problem,
                                             cairn_machine *machine, bool *present, cairn_error *error);

/** Parses "8GiB", "1.5GB/s", "500ms" into bytes, bytes per second, ns. "none" is not a size. Errors: BAD_INPUT. */
CAIRN_API cairn_status cairn_parse_size(const char *text, int64_t *bytes, cairn_error *error);
CAIRN_API cairn_status cairn_parse_rate(const char *text, int64_t *bytes_per_s, cairn_error *error);
CAIRN_API cairn_status cairn_parse_duration(const char *text, int64_t *ns, cairn_error *error);

/** A solver, as `cairn solvers` lists it. Static storage. */
typedef struct cairn_solver_info {
    const char *name;
    bool takes_chains, takes_graphs;
    bool needs_machine;     /**< only problems with a machine */
    bool minimizes_memory;  /**< takes part in minimize=memory, not in minimize=time */
    bool exhaustive;        /**< brute force: tiny problems only */
    bool available;         /**< built in, and found at run time */
    const char *optimal_in; /**< class of schedules in which its answer is optimal; "" = none, "all" = everything */
    const char *summary;    /**< what it does, one line */
    const char *source;     /**< authors, year, section */
    const char *cost;       /**< time and memory, in words */
} cairn_solver_info;

/** The registry, in the order of the documentation. NULL past the end. */
CAIRN_API const cairn_solver_info *cairn_solver_at(int index);

/**
 * Whether an option is one of a solver's own, which say how it goes about it: "slots" of chain-dp, "seed" of
 * graph-search. Those that go with every call ("budget", "time-limit", ...) are nobody's own. Of a solver that has not
 * got them, "iterations" and "seed" change nothing, and the others are refused (but "objective" where it is the
 * solver's). auto has those of all.
 */
CAIRN_API bool cairn_solver_has_option(const char *solver, const char *option);

/** Whether a solver takes this problem with these options. OK, or UNSUPPORTED / UNAVAILABLE / BAD_INPUT with the reason. */
CAIRN_API cairn_status cairn_solver_accepts(const char *solver, const cairn_problem *problem,
                                            const cairn_options *options, cairn_error *error);

#define CAIRN_REASON_MAX 240

/** What a solver answered. A number that does not apply is CAIRN_NONE, a text that does not apply is empty. */
typedef struct cairn_info {
    cairn_outcome outcome;
    char solver[32]; /**< the one that gave the answer (auto names whom it chose) */
    int64_t budget_bytes;
    int64_t makespan_ns, peak_bytes, host_peak_bytes; /**< the simulator's */
    int64_t recompute_ns, stall_ns;                   /**< the simulator's */
    int64_t lower_bound_ns;    /**< on the makespan of every schedule of the problem within the budget */
    double gap;                /**< (makespan - bound) / makespan; negative when it does not apply */
    int64_t least_bytes;       /**< least budget at which this solver succeeds */
    bool least_is_exact;       /**< no schedule at all needs less */
    int64_t least_lower_bytes; /**< proved lower bound on what any schedule needs */
    int64_t store_all_bytes, store_all_ns;
    int64_t solve_ns,
        solver_peak_bytes;   /**< what the call took; of several budgets, the first counts for all it shares */
    int64_t objective_bytes; /**< of the selection solvers */
    int64_t iterations; /**< of a search that work limits: so many at most (option iterations, or chosen by size) */
    int32_t checkpoint_count; /**< of the selection solvers; -1 when it does not apply */
    int32_t *checkpoints;     /**< ascending; freed by cairn_info_clear */
    bool stopped_early;       /**< by the time limit or by poll: the best answer so far */
    char optimal_in[24];      /**< class in which the answer is proved optimal */
    char reason[CAIRN_REASON_MAX];
    cairn_allocator allocator; /**< owner of checkpoints */
} cairn_info;

/** Frees what the info owns and resets it. Safe on a zero-initialised info, and twice. */
CAIRN_API void cairn_info_clear(cairn_info *info);

/**
 * Solves a problem. Options: "budget" (required unless minimize=memory), "solver", ... (cairn_option_at).
 * On OK, info is filled and *schedule is a schedule that the simulator accepted, with its makespan and peak recorded,
 * or NULL when the outcome is infeasible or unknown. schedule may be NULL when only the info is wanted.
 * Errors: BAD_INPUT (options), UNSUPPORTED (the solver does not take the problem, or an option), UNAVAILABLE,
 * MEMORY_LIMIT, NO_MEMORY, OVERFLOW, CANCELLED (nothing found), INTERNAL (a solver's schedule did not verify).
 */
CAIRN_API cairn_status cairn_solve(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                                   cairn_schedule **schedule, cairn_info *info, cairn_error *error);

/**
 * The same for several budgets at once (CAIRN_NONE = no budget; option "budget" is not looked at): solvers that keep
 * tables build them once. infos and, unless it is NULL, schedules have room for count; a time limit holds for each
 * budget. On failure all of them are empty. Errors: as cairn_solve; BAD_ARGUMENT (a count below 0).
 */
CAIRN_API cairn_status cairn_solve_many(const cairn_env *env, const cairn_problem *problem,
                                        const cairn_options *options, const int64_t *budgets_bytes, int count,
                                        cairn_schedule **schedules, cairn_info *infos, cairn_error *error);

/** Least memory, and what storing everything takes. */
typedef struct cairn_limits {
    int64_t least_bytes; /**< least budget at which the solver succeeds */
    bool least_is_exact;
    int64_t least_lower_bytes;
    int64_t store_all_bytes, store_all_ns;
} cairn_limits;

/** The limits of a problem with option "solver" (auto by default); "budget" is not looked at. Errors: as cairn_solve. */
CAIRN_API cairn_status cairn_limits_of(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                                       cairn_limits *limits, cairn_error *error);

/** A proved lower bound on the makespan of every schedule within option "budget". */
typedef struct cairn_bound {
    int64_t lower_bound_ns;
    char method[32];
    int64_t least_lower_bytes; /**< proved lower bound on what any schedule needs; above the budget: there is none */
} cairn_bound;

CAIRN_API cairn_status cairn_bound_of(const cairn_env *env, const cairn_problem *problem, const cairn_options *options,
                                      cairn_bound *bound, cairn_error *error);

/** The largest batch, and what is proved about larger ones. */
typedef struct cairn_max_batch {
    int64_t batch; /**< the largest for which a schedule was found; CAIRN_NONE: not even 1 */
    int64_t
        refuted_batch; /**< proved: neither this batch nor any larger one is possible; CAIRN_NONE: nothing is proved */
    int64_t budget_bytes;
    int64_t makespan_ns, peak_bytes, recompute_ns; /**< of the schedule for batch, the simulator's */
    int64_t forward_ns;                            /**< one forward at batch: what recompute_ns may be at most */
    char solver[32];                               /**< whose schedule it is */
    bool stopped_early;                            /**< by the time limit or by poll: the largest so far */
} cairn_max_batch;

/**
 * The largest batch b such that the problem, measured at measured_batch and scaled to b (cairn_problem_scale by
 * b / measured_batch), has a schedule within option "budget" whose recompute_ns is at most one forward: the nodes before
 * backward_begins_at, or all forwards of a chain (of the first options). Other options as cairn_solve; a time limit holds
 * for all of it. Where refuted_batch = batch + 1 the answer is proved. docs/explanation/solvers/max-batch.md has the
 * method. Errors: as cairn_solve; BAD_INPUT (no budget, a graph without backward_begins_at), OVERFLOW (there is no
 * largest), CANCELLED (nothing found).
 */
CAIRN_API cairn_status cairn_max_batch_of(const cairn_env *env, const cairn_problem *problem,
                                          const cairn_options *options, int64_t measured_batch,
                                          cairn_max_batch *max_batch, cairn_error *error);

#ifdef __cplusplus
}
#endif

#endif
