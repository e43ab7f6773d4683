/*
 * What a solver is to the rest of the library.
 *
 * A solver is a file that ends in one exported crn_solver, with other files for its parts where it is large; registry.c
 * lists them all. It works in a session: open prepares what serves all budgets (tables of a dynamic program, say), solve
 * answers one budget, least answers "how little would do". So one session serves a whole trade-off curve, and limits cost
 * no solve.
 *
 * A solver does not mark its own work. It emits operations through the builder and says what it proved;
 * session_answer.c lets the simulator judge the schedule and fills in makespan and peak. What a solver allocates goes
 * through task->env, whose allocator is metered: passing the memory limit makes an allocation fail, and the call return
 * MEMORY_LIMIT.
 */
#ifndef CRN_SOLVER_H
#define CRN_SOLVER_H

#include <cairn/solve.h>

#include "base/checked.h"
#include "base/failure.h"
#include "base/memory.h"
#include "base/parallel.h"

/** Option values, parsed. CAIRN_NONE = not set, the solver chooses. */
typedef struct crn_settings {
    int64_t budget_bytes; /* CAIRN_NONE also for "none"; see has_budget */
    bool has_budget;
    char solver[32];
    int64_t slots;         /* 500 */
    int64_t segments;      /* of periodic */
    int64_t time_limit_ns; /* CAIRN_NONE: limited by work, not by the clock */
    int64_t iterations;
    int64_t seed;
    int64_t threads;            /* CAIRN_NONE = all processors */
    int64_t memory_limit_bytes; /* CAIRN_NONE = half of what there is */
    int64_t memory_bytes;       /* what there is for the process; 0: it was not looked at yet */
    bool minimize_memory;
    bool objective_eq9; /* asked for; where neither is, brute-select takes this one */
    bool objective_eq6;
    bool has_machine; /* machine overrides the problem's */
    cairn_machine machine;
} crn_settings;

enum { CRN_SOLVERS_MAX = 64, CRN_BOUND_METHODS_MAX = 8 };

/** What the bound methods keep for other budgets of a session, each its own, and what they said of the memory. */
typedef struct crn_bound_store {
    void *kept[CRN_BOUND_METHODS_MAX];
    int64_t least_lower_bytes[2]; /* without and with a machine; 0 = not asked yet */
} crn_bound_store;

/** An open session of a solver that another solver may ask, too, for all budgets up to that of storing everything. */
typedef struct crn_shared_session {
    const struct crn_solver *solver;
    void *state;
} crn_shared_session;

/** What is to be solved. The same for all calls of a session. */
typedef struct crn_task {
    const cairn_env *env; /* with the metered allocator */
    const cairn_problem *problem;
    const cairn_machine *machine; /* the one that holds; NULL = no offloading */
    const crn_settings *settings;
    crn_team *team;           /* threads to use; may be NULL */
    int64_t budget_max_bytes; /* no call of the session asks for more; CAIRN_NONE = no budget */
    int64_t deadline_ns;      /* of crn_clock_ns; CAIRN_NONE = none */
    crn_bound_store *bounds;  /* what bounds keep for the next budget; NULL = nothing is kept */
    const cairn_builder
        *known; /* a schedule within the budget, for those that start from others' answers; NULL = none */
    const cairn_builder *known_list;  /* the best known without transfers, where that is another one; NULL = none */
    const crn_shared_session *shared; /* of its lists_of, where that is open; NULL = none */
} crn_task;

/** How little memory would do. */
typedef struct crn_least {
    int64_t bytes;       /* the least budget at which this solver succeeds; CAIRN_NONE = at none */
    bool is_exact;       /* proved: no schedule at all needs less */
    int64_t lower_bytes; /* proved lower bound on what any schedule needs; CAIRN_NONE = none of its own */
    bool is_rough;       /* cut short while looking for it: less may do */
} crn_least;

/** What a solver found for one budget; it begins as crn_answer_init makes it. */
typedef struct crn_answer {
    cairn_builder *builder; /* the operations; left empty when nothing was found */
    bool found;
    bool stopped_early;       /* by deadline or poll */
    bool cut_short;           /* by memory, or by the iterations that were asked for: what was not found may be there */
    bool optimal_in_class;    /* proved within info.optimal_in, or within optimal_in below */
    const char *optimal_in;   /* the class, where it is a smaller one than the solver's; NULL = the solver's */
    int64_t lower_bound_ns;   /* proved for all schedules of the problem; CAIRN_NONE = none of its own */
    int64_t objective_bytes;  /* of the selection solvers; CAIRN_NONE */
    int32_t *checkpoints;     /* of the selection solvers, from task->env's allocator, owned by the answer */
    int32_t checkpoint_count; /* -1 when it does not apply */
    int64_t iterations;       /* of its search, at most; 0 = it has no such limit: crn_work_limit */
    const char *solver;       /* of auto: whom it chose; NULL = itself */
    char reason[CAIRN_REASON_MAX];
} crn_answer;

/** "Infeasible, nothing proved", without operations. Errors: NO_MEMORY. Free with crn_answer_clear, unless it failed. */
cairn_status crn_answer_init(crn_answer *answer, const crn_task *task, cairn_error *error);
void crn_answer_clear(crn_answer *answer, const crn_task *task);

enum { CRN_RANK_ALL = 1000 };
/** Half a minute of one core, or so: whose work takes longer is asked with others only while nobody has an answer. */
#define CRN_WORK_MAX ((int64_t)30000000000)

typedef struct crn_solver {
    cairn_solver_info info; /* available: true; where that is known at run time only, `available` below says it */
    /** OK, or UNAVAILABLE and how to get what it needs, asked whenever it matters. NULL = always. */
    cairn_status (*available)(cairn_error *error);
    const cairn_solver_info *absent; /* what is shown instead of info where it is not available */
    const char *options;             /* its own, as in "slots seed", or "objective=eq9" for one choice; NULL = none */
    /** OK, or UNSUPPORTED and why (options, heterogeneity, size). NULL = takes every problem of its kind. */
    cairn_status (*accepts)(const crn_task *task, cairn_error *error);
    /** An upper estimate of the memory of open and solve, made before anything is allocated. NULL = linear, small. */
    int64_t (*memory)(const crn_task *task);
    /** Elementary steps (a nanosecond or so each) of open and one solve, roughly; auto reads it. NULL = linear, small. */
    int64_t (*work)(const crn_task *task);
    /**
     * For auto: a complete answer of a solver of rank r > 0 is never worse than one of a solver of a rank in (0, r),
     * which is then not asked. 0 = compares with none: auto always asks it. CRN_RANK_ALL: never worse than any other
     * solver that auto would ask, for it asks them all itself.
     */
    int rank;
    /** Has an answer soon and improves it: stopped, it has not worked in vain. */
    bool is_anytime;
    /** Goes on until time ends, and bounds its answer itself: with a time limit auto gives it all that baselines leave. */
    bool has_own_bound;
    const char *lists_of; /* the solver from whose answers at larger budgets it starts; NULL = none */
    /** Goes over the problem once or so: where time is short it is asked first, so that there is an answer. */
    bool is_quick;
    /**
     * Makes a session; NULL = the solver needs none. *session, NULL at first, is closed even if open fails. open, least
     * and solve return CANCELLED when crn_should_stop is true and they have no answer yet.
     */
    cairn_status (*open)(const crn_task *task, void **session, cairn_error *error);
    void (*close)(const crn_task *task, void *session); /* not called with NULL */
    cairn_status (*least)(const crn_task *task, void *session, crn_least *least, cairn_error *error);
    const char *has_least_of; /* the solver whose least its own is never above; NULL = none */
    /** budget_bytes CAIRN_NONE = no budget. Not found is OK with answer->found false. */
    cairn_status (*solve)(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                          cairn_error *error);
} crn_solver;

/** Refuses what the solver cannot handle: UNSUPPORTED or UNAVAILABLE, and why. */
cairn_status crn_solver_accepts(const crn_solver *solver, const crn_task *task, cairn_error *error);
/** Opens a session of a solver. *session is NULL where that fails or the solver needs none. */
cairn_status crn_solver_open(const crn_solver *solver, const crn_task *task, void **session, cairn_error *error);
/** Closes a session; NULL is allowed. */
void crn_solver_close(const crn_solver *solver, const crn_task *task, void *session);

/**
 * A lower bound on all schedules of a problem; listed in registry.c after the solvers. Each call raises the given
 * number or leaves it unchanged; it leaves it where the bound does not hold, for example with a machine. budget_bytes
 * CAIRN_NONE = no budget.
 */
typedef struct crn_bound_method {
    const char *name;
    /** NULL = nothing to say. */
    cairn_status (*raise_makespan)(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error);
    /** Frees what raise_makespan left in *kept for other budgets of the problem; never called with NULL. */
    void (*forget)(const crn_task *task, void *kept);
    /** Of the device memory that any schedule needs, fixed bytes included. NULL = nothing to say. */
    cairn_status (*raise_memory)(const crn_task *task, int64_t *bound_bytes, cairn_error *error);
} crn_bound_method;

/** All bounds; ends in NULL. */
extern const crn_bound_method *const crn_bound_methods[];

/** All solvers, in the order of the documentation; ends in NULL. */
extern const crn_solver *const crn_solvers[];
const crn_solver *crn_solver_find(const char *name);

/** Whether the deadline of a task has passed, its poll aside. */
bool crn_task_is_past(const crn_task *task);
/** Nanoseconds of a monotonic clock. */
int64_t crn_clock_ns(void);
/** What the settings let a solver allocate: half of the memory that there is for the process where they say nothing. */
int64_t crn_memory_limit(const crn_settings *settings);
/**
 * Whether to stop now: the deadline has passed, or poll asks for it. Cheap enough for an inner loop to call every few
 * thousand steps. progress may be NULL.
 */
bool crn_should_stop(const crn_task *task, const cairn_progress *progress);

/** What no schedule can avoid: the least forward and backward of each stage, or the cost of each node. */
int64_t crn_work_ns(const cairn_problem *problem);

/** The task with a deadline after one part in so many of the time that is left; the task itself without a deadline. */
crn_task crn_task_part(const crn_task *task, int64_t parts);
/** The task without the last part in so many of the time that is left, which is for something else. */
crn_task crn_task_but_part(const crn_task *task, int64_t parts);
/** What an answer says of its search's limit: nothing where the clock is the limit. */
static inline int64_t crn_work_limit(const crn_task *task, int64_t iterations)
{
    return task->settings->iterations < 0 && task->deadline_ns != CAIRN_NONE ? 0 : iterations;
}
/** The task of which schedules transfer nothing. */
crn_task crn_task_without_machine(const crn_task *task);

/**
 * Raises a lower bound by the methods, until it is enough_ns; *method: static text, the name of the last that raised it,
 * else left alone. Those that need more than the caller's memory limit say nothing, here and in all that follows.
 */
cairn_status crn_raise_bound(const crn_task *task, int64_t budget_bytes, int64_t enough_ns, int64_t *bound_ns,
                             const char **method, cairn_error *error);

/** A proved lower bound on the makespan of every schedule within a budget; method: static text. */
cairn_status crn_lower_bound(const crn_task *task, int64_t budget_bytes, int64_t *bound_ns, const char **method,
                             cairn_error *error);

/** Where a method keeps what it found for other budgets, for a solver that finds the same; NULL = nothing is kept. */
void **crn_bound_kept(const crn_task *task, const crn_bound_method *method);
/** Empties task->bounds, where there is one. */
void crn_bounds_forget(const crn_task *task);

/** A proved lower bound on the device memory that any schedule needs. */
cairn_status crn_least_lower(const crn_task *task, int64_t *bytes, cairn_error *error);

/** What the simulator says of a list of operations under a budget (CAIRN_NONE = none). */
cairn_status crn_replay(const crn_task *task, const cairn_op *ops, int64_t count, int64_t budget_bytes,
                        cairn_replay *replay, cairn_error *error);

/** Peak and makespan of storing everything, without a budget (the simulator's). */
cairn_status crn_store_all(const crn_task *task, int64_t *peak_bytes, int64_t *makespan_ns, cairn_error *error);

#endif
