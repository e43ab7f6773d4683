/*
 * Lower bounds with a link: recomputation priced by the bounds that know none, transfers by their time.
 *
 * Take any schedule, and let h be the most bytes that it has on the host, and not also on the device, at any time. Keep those on
 * the device instead: leave the transfers out, and computations of what is there anyway. What remains is a schedule without
 * transfers within the budget plus h. So with G(b) a lower bound on the makespan without transfers within b bytes,
 *
 *     T >= G(budget + h),      T >= out(h),      h <= host memory,
 *
 * the second because all of h has left on one link; where all of it must come back, T >= out(h) + in(h), for it comes back
 * after it all has left. In a graph everything but outputs does, or need not have left. In a chain a copy on the host may only hold the
 * place of a saved set's input, so there is no second term. G falls as h rises and the times rise, so the least T that
 * satisfies both is found by bisection; every T that does not is too small, so the search may stop at any time.
 *
 * The same argument bounds the memory: what is needed without transfers, less the host's.
 */
#include "solve/solver.h"

enum { BISECTIONS = 8, TIME_PARTS = 4 };

typedef struct relaxation {
    crn_task sub; /* without the machine */
    const cairn_machine *machine;
    int64_t budget_bytes, least_bytes; /* what is needed without transfers */
    int64_t one_way_bytes;             /* of what need not come back */
} relaxation;

static int64_t one_way_bytes(const cairn_problem *problem)
{
    const cairn_graph *graph = cairn_problem_graph(problem);
    int64_t bytes = 0;
    if (!graph)
        return INT64_MAX;
    for (int32_t v = 0; v < graph->node_count; v++)
        bytes += graph->nodes[v].keep ? graph->nodes[v].bytes : 0;
    return bytes;
}

/* Whether so many bytes can leave, and come back where they must, in a time; in case of doubt they can. */
static bool can_offload(const relaxation *r, int64_t bytes, int64_t ns)
{
    int64_t back = bytes > r->one_way_bytes ? bytes - r->one_way_bytes : 0;
    crn_wide out_ns = (crn_wide)bytes * 1000000000u / (crn_wide)r->machine->to_host_bytes_per_s;
    crn_wide back_ns = (crn_wide)back * 1000000000u / (crn_wide)r->machine->to_device_bytes_per_s;
    return out_ns + back_ns <= (crn_wide)ns;
}

static int64_t most_on_host(const relaxation *r, int64_t ns)
{
    int64_t low = 0, high = r->machine->host_bytes;
    while (low < high) {
        int64_t middle = high - (high - low) / 2;
        if (can_offload(r, middle, ns))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* G(budget + h) for the most that can be on the host within a makespan; INT64_MAX where nothing fits. */
static cairn_status least_with(const relaxation *r, int64_t ns, int64_t *least_ns, cairn_error *error)
{
    const char *method;
    int64_t bytes;
    if (!crn_add(r->budget_bytes, most_on_host(r, ns), &bytes))
        bytes = INT64_MAX;
    *least_ns = INT64_MAX;
    if (bytes < r->least_bytes)
        return CAIRN_OK;
    return crn_lower_bound(&r->sub, bytes, least_ns, &method, error);
}

static cairn_status bisect(const relaxation *r, int64_t *bound_ns, cairn_error *error)
{
    int64_t low = *bound_ns, high;
    CRN_TRY(least_with(r, low, &high, error));
    if (high <= low)
        return CAIRN_OK;
    if (high == INT64_MAX) { /* nothing fits at all within this time: how long until enough has left? */
        for (low = crn_max(1, low); low <= INT64_MAX / 2; low *= 2)
            if (can_offload(r, r->least_bytes - r->budget_bytes, low))
                break;
        high = low;
        low = *bound_ns;
    }
    for (int i = 0; i < BISECTIONS && high - low > 1; i++) {
        int64_t middle = low + (high - low) / 2, least_ns;
        CRN_TRY(least_with(r, middle, &least_ns, error));
        if (least_ns > middle)
            low = middle;
        else
            high = middle;
    }
    *bound_ns = low + 1;
    return CAIRN_OK;
}

static cairn_status relax(relaxation *r, const crn_task *task, int64_t budget_bytes, cairn_error *error)
{
    *r = (relaxation){.sub = crn_task_part(task, TIME_PARTS),
                      .machine = task->machine,
                      .budget_bytes = budget_bytes,
                      .one_way_bytes = one_way_bytes(task->problem)};
    r->sub.machine = NULL;
    return crn_least_lower(&r->sub, &r->least_bytes, error);
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    relaxation r;
    crn_bound_store store = {.kept = {NULL}};
    (void)kept;
    if (!task->machine || budget_bytes == CAIRN_NONE)
        return CAIRN_OK;
    CRN_TRY(relax(&r, task, budget_bytes, error));
    if (r.least_bytes > budget_bytes && r.least_bytes - budget_bytes > task->machine->host_bytes)
        return CAIRN_OK; /* there is no schedule: nothing to bound */
    if (task->bounds)
        return bisect(&r, bound_ns, error);
    r.sub.bounds = &store;
    cairn_status status = bisect(&r, bound_ns, error);
    crn_bounds_forget(&r.sub);
    return status;
}

static cairn_status raise_memory(const crn_task *task, int64_t *bound_bytes, cairn_error *error)
{
    relaxation r;
    if (!task->machine)
        return CAIRN_OK;
    CRN_TRY(relax(&r, task, 0, error));
    *bound_bytes = crn_max(*bound_bytes, r.least_bytes - task->machine->host_bytes);
    return CAIRN_OK;
}

const crn_bound_method crn_joint_bound_method = {
    .name = "link", .raise_makespan = raise_makespan, .raise_memory = raise_memory};
