#include "solve/graph/graph_tiny.h"

/* NULL where the graph is too large. */
static const crn_solver *solver_of_tiny(const crn_task *alone)
{
    const crn_solver *brute = crn_solver_find("brute-graph");
    return crn_solver_accepts(brute, alone, NULL) == CAIRN_OK ? brute : NULL;
}

cairn_status crn_tiny_least(const crn_task *task, crn_least *least, cairn_error *error)
{
    const crn_task alone = crn_task_without_machine(task);
    const crn_solver *brute = solver_of_tiny(&alone);
    crn_least own = {CAIRN_NONE, false, CAIRN_NONE, false};
    cairn_status status = brute ? brute->least(&alone, NULL, &own, error) : CAIRN_OK;
    if (own.bytes != CAIRN_NONE) {
        least->bytes = own.bytes;
        least->is_exact = own.is_exact && !task->machine;
    }
    return status == CAIRN_CANCELLED ? CAIRN_OK : status;
}

/* What exhaustive search knows of the makespan holds without a machine only. */
cairn_status crn_tiny_solve(const crn_task *task, int64_t budget_bytes, crn_answer *answer, cairn_error *error)
{
    const crn_task alone = crn_task_without_machine(task);
    const crn_solver *brute = solver_of_tiny(&alone);
    int64_t bound_ns = answer->lower_bound_ns;
    if (!brute)
        return CAIRN_OK;
    CRN_TRY(brute->solve(&alone, NULL, budget_bytes, answer, error));
    answer->optimal_in_class = false;
    answer->lower_bound_ns = task->machine ? bound_ns : crn_max(bound_ns, answer->lower_bound_ns);
    return CAIRN_OK;
}
