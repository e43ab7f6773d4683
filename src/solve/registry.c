/* The solvers, in the order of the documentation, and the bounds. Each is one descriptor and one line here. */
#include <stdio.h>
#include <string.h>

#include "solve/solver.h"

/* X(descriptor) */
#define SOLVER_MAP(X)              \
    X(crn_store_all_solver)        \
    X(crn_periodic_solver)         \
    X(crn_chen_sqrt_solver)        \
    X(crn_chen_greedy_solver)      \
    X(crn_keep_greedy_solver)      \
    X(crn_revolve_solver)          \
    X(crn_revolve_hetero_solver)   \
    X(crn_chain_dp_solver)         \
    X(crn_chain_exact_solver)      \
    X(crn_chain_alike_solver)      \
    X(crn_chain_lagrangian_solver) \
    X(crn_chain_weak_solver)       \
    X(crn_chain_states_solver)     \
    X(crn_brute_chain_solver)      \
    X(crn_offload_greedy_solver)   \
    X(crn_offload_dp_solver)       \
    X(crn_offload_vdnn_solver)     \
    X(crn_offload_exact_solver)    \
    X(crn_joint_chain_solver)      \
    X(crn_joint_graph_solver)      \
    X(crn_select_cubic_solver)     \
    X(crn_select_quadratic_solver) \
    X(crn_select_linear_solver)    \
    X(crn_brute_select_solver)     \
    X(crn_ap_sqrt_solver)          \
    X(crn_ap_greedy_solver)        \
    X(crn_linear_sqrt_solver)      \
    X(crn_linear_greedy_solver)    \
    X(crn_griewank_log_solver)     \
    X(crn_graph_online_solver)     \
    X(crn_graph_search_solver)     \
    X(crn_select_acg_solver)       \
    X(crn_graph_milp_solver)       \
    X(crn_graph_lp_round_solver)   \
    X(crn_graph_exact_solver)      \
    X(crn_brute_graph_solver)      \
    X(crn_auto_solver)

#define CRN_X(solver) extern const crn_solver solver;
SOLVER_MAP(CRN_X)
#undef CRN_X

const crn_solver *const crn_solvers[] = {
#define CRN_X(solver) &solver,
    SOLVER_MAP(CRN_X)
#undef CRN_X
        NULL,
};

/* X(descriptor) */
#define BOUND_MAP(X)                 \
    X(crn_chain_knapsack_method)     \
    X(crn_chain_bound_method)        \
    X(crn_chain_states_method)       \
    X(crn_chain_moments_method)      \
    X(crn_chain_memory_bound_method) \
    X(crn_graph_bound_method)        \
    X(crn_graph_demand_method)       \
    X(crn_joint_bound_method)

#define CRN_X(bound) extern const crn_bound_method bound;
BOUND_MAP(CRN_X)
#undef CRN_X

const crn_bound_method *const crn_bound_methods[] = {
#define CRN_X(bound) &bound,
    BOUND_MAP(CRN_X)
#undef CRN_X
        NULL,
};

_Static_assert(sizeof(crn_bound_methods) / sizeof(crn_bound_methods[0]) - 1 <= CRN_BOUND_METHODS_MAX,
               "too many bounds");

enum { SOLVER_COUNT = sizeof(crn_solvers) / sizeof(crn_solvers[0]) - 1 };
_Static_assert((int)SOLVER_COUNT <= (int)CRN_SOLVERS_MAX, "too many solvers");

const crn_solver *crn_solver_find(const char *name)
{
    for (const crn_solver *const *solver = crn_solvers; name && *solver; solver++)
        if (strcmp((*solver)->info.name, name) == 0)
            return *solver;
    return NULL;
}

const cairn_solver_info *cairn_solver_at(int index)
{
    const crn_solver *solver = index >= 0 && index < SOLVER_COUNT ? crn_solvers[index] : NULL;
    if (!solver)
        return NULL;
    return solver->available && solver->available(NULL) != CAIRN_OK ? solver->absent : &solver->info;
}

static bool takes_kind(const cairn_solver_info *info, const crn_task *task)
{
    return cairn_problem_kind_of(task->problem) == CAIRN_KIND_CHAIN ? info->takes_chains : info->takes_graphs;
}

enum { NAMES_MAX = CAIRN_ERROR_MESSAGE_MAX / 4 * 3 };

/* Whether it minimizes what is wanted, and has the machine that it needs. */
static bool serves(const cairn_solver_info *solver, const crn_task *task)
{
    if (strcmp(solver->name, "auto") == 0)
        return true;
    return solver->minimizes_memory == task->settings->minimize_memory && (task->machine || !solver->needs_machine);
}

/* The solvers that can be asked about this problem, but for those that try everything. */
static const char *others(const crn_task *task, char names[NAMES_MAX])
{
    size_t length = 0;
    names[0] = '\0';
    for (int i = 0; i < SOLVER_COUNT && length < NAMES_MAX; i++) {
        const cairn_solver_info *other = cairn_solver_at(i);
        if (other->available && takes_kind(other, task) && serves(other, task) && !other->exhaustive)
            length += (size_t)snprintf(names + length, NAMES_MAX - length, "%s%s", length ? ", " : "", other->name);
    }
    return names;
}

static cairn_status check_kind(const crn_solver *solver, const crn_task *task, cairn_error *error)
{
    const cairn_solver_info *info = &solver->info;
    if (takes_kind(info, task))
        return CAIRN_OK;
    char names[NAMES_MAX];
    return crn_fail(error, CAIRN_UNSUPPORTED, "%s takes %s, and the problem is a %s; for it there are %s, among others",
                    info->name, info->takes_chains ? "chains" : "graphs", info->takes_chains ? "graph" : "chain",
                    others(task, names));
}

cairn_status crn_solver_accepts(const crn_solver *solver, const crn_task *task, cairn_error *error)
{
    const cairn_solver_info *info = &solver->info;
    char names[NAMES_MAX];
    CRN_TRY(check_kind(solver, task, error));
    if (solver->available)
        CRN_TRY(solver->available(error));
    if (info->needs_machine && !task->machine)
        return crn_fail(error, CAIRN_UNSUPPORTED,
                        "%s needs a machine to offload to: one in the problem, or options host-budget, to-host and "
                        "to-device",
                        info->name);
    if (info->minimizes_memory != task->settings->minimize_memory && strcmp(info->name, "auto") != 0)
        return crn_fail(error, CAIRN_UNSUPPORTED, "%s minimizes %s; for %s there are %s, among others", info->name,
                        info->minimizes_memory ? "memory (option minimize)" : "time",
                        info->minimizes_memory ? "time" : "memory", others(task, names));
    return solver->accepts ? solver->accepts(task, error) : CAIRN_OK;
}

cairn_status crn_solver_open(const crn_solver *solver, const crn_task *task, void **session, cairn_error *error)
{
    *session = NULL;
    cairn_status status = solver->open ? solver->open(task, session, error) : CAIRN_OK;
    if (status != CAIRN_OK) {
        crn_solver_close(solver, task, *session);
        *session = NULL;
    }
    return status;
}

void crn_solver_close(const crn_solver *solver, const crn_task *task, void *session)
{
    if (session)
        solver->close(task, session);
}

const char *cairn_outcome_name(cairn_outcome outcome)
{
    static const char *const names[] = {"optimal", "feasible", "infeasible", "unknown"};
    return (int)outcome >= 0 && outcome <= CAIRN_OUTCOME_UNKNOWN ? names[outcome] : "unknown";
}
