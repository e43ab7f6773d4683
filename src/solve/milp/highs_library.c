/*
 * The fence around HiGHS: prototypes of the few functions that are used, how they are found, and one solve.
 *
 * Prototypes are those of highs_c_api.h, stable since version 1.9. HighsInt must be int, as it is unless HiGHS was
 * configured otherwise; that is asked before anything else is. The library stays loaded once it was (RTLD_NODELETE):
 * it keeps its threads' state in places that do not survive being unloaded, and to open it again is then cheap, so that
 * nothing has to be remembered here.
 */
#define _GNU_SOURCE /* dladdr */
#include "solve/milp/highs_library.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct HighsCallbackDataOut highs_data_out; /* opaque; read by name */

typedef struct highs_data_in {
    int user_interrupt; /* the first member in every version; the rest is not ours */
} highs_data_in;

typedef void (*highs_callback)(int type, const char *message, const highs_data_out *out, highs_data_in *in,
                               void *context);

/* X(result, name, parameters) */
#define HIGHS_MAP(X)                                                                                            \
    X(void *, create, (void))                                                                                   \
    X(void, destroy, (void *))                                                                                  \
    X(const char *, version, (void))                                                                            \
    X(int, getSizeofHighsInt, (const void *))                                                                   \
    X(int, setBoolOptionValue, (void *, const char *, int))                                                     \
    X(int, setIntOptionValue, (void *, const char *, int))                                                      \
    X(int, setDoubleOptionValue, (void *, const char *, double))                                                \
    X(int, passMip,                                                                                             \
      (void *, int, int, int, int, int, double, const double *, const double *, const double *, const double *, \
       const double *, const int *, const int *, const double *, const int *))                                  \
    X(int, setSolution, (void *, const double *, const double *, const double *, const double *))               \
    X(int, setCallback, (void *, highs_callback, void *))                                                       \
    X(int, startCallback, (void *, int))                                                                        \
    X(const void *, getCallbackDataOutItem, (const highs_data_out *, const char *))                             \
    X(int, run, (void *))                                                                                       \
    X(int, getModelStatus, (const void *))                                                                      \
    X(int, getIntInfoValue, (const void *, const char *, int *))                                                \
    X(int, getDoubleInfoValue, (const void *, const char *, double *))                                          \
    X(int, getSolution, (const void *, double *, double *, double *, double *))

/* Of the time that is left, what is kept back: HiGHS looks at the clock only now and then. */
enum { LATE_SHARE = 8 };
/* Constants of highs_c_api.h. */
enum { STATUS_ERROR = -1, FORMAT_BY_ROWS = 2, SENSE_MINIMIZE = 1, SOLUTION_FEASIBLE = 2 };
enum { CALLBACK_SIMPLEX_INTERRUPT = 1, CALLBACK_MIP_INTERRUPT = 6 };
enum {
    MODEL_EMPTY = 6,
    MODEL_OPTIMAL = 7,
    MODEL_INFEASIBLE = 8,
    MODEL_UNBOUNDED_OR_INFEASIBLE = 9,
    MODEL_TIME_LIMIT = 13,
    MODEL_ITERATION_LIMIT = 14,
    MODEL_UNKNOWN = 15,
    MODEL_SOLUTION_LIMIT = 16,
    MODEL_INTERRUPT = 17,
    MODEL_MEMORY_LIMIT = 18
};

typedef struct highs {
#define CRN_X(result, name, parameters) result(*name) parameters;
    HIGHS_MAP(CRN_X)
#undef CRN_X
} highs;

/* ---- finding ---- */

static const char advice[] = "install it (pip install highsbox, or libhighs of the distribution) and let the "
                             "environment variable CAIRN_HIGHS_LIBRARY, or the build's CAIRN_HIGHS, name libhighs.so "
                             "where it lies neither beside libcairn nor where the dynamic linker looks";

#ifndef CRN_HIGHS_FILE /* what the build was told of; see CMakeLists.txt */
#define CRN_HIGHS_FILE ""
#endif

enum { OPEN_FLAGS = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE, PATH_MAX_BYTES = 4096 };

/* In the folder of this library, or where the package highsbox lies beside the installed Python package. */
static void *open_near_us(void)
{
    static const char *const places[] = {"libhighs.so", "../../../highsbox/highs_dist/lib/libhighs.so"};
    char path[PATH_MAX_BYTES];
    Dl_info here;
    void *handle = NULL;
    if (dladdr(advice, &here) == 0 || !here.dli_fname)
        return NULL;
    const char *slash = strrchr(here.dli_fname, '/');
    int folder = slash ? (int)(slash - here.dli_fname) + 1 : 0;
    for (size_t i = 0; folder > 0 && !handle && i < sizeof(places) / sizeof(places[0]); i++)
        if (snprintf(path, sizeof(path), "%.*s%s", folder, here.dli_fname, places[i]) < PATH_MAX_BYTES)
            handle = dlopen(path, OPEN_FLAGS);
    return handle;
}

static void *open_library(cairn_error *error)
{
    static const char *const names[] = {"libhighs.so", "libhighs.so.1", "libhighs.dylib"};
    const char *chosen = getenv("CAIRN_HIGHS_LIBRARY");
    if (chosen && chosen[0]) {
        void *named = dlopen(chosen, OPEN_FLAGS);
        if (!named)
            crn_fail(error, CAIRN_UNAVAILABLE,
                     "HiGHS cannot be loaded from %s, which CAIRN_HIGHS_LIBRARY names: let it name the libhighs.so of "
                     "an installed HiGHS (pip install highsbox)",
                     chosen);
        return named;
    }
    void *handle = CRN_HIGHS_FILE[0] ? dlopen(CRN_HIGHS_FILE, OPEN_FLAGS) : NULL;
    handle = handle ? handle : open_near_us();
    for (size_t i = 0; !handle && i < sizeof(names) / sizeof(names[0]); i++)
        handle = dlopen(names[i], OPEN_FLAGS);
    if (!handle)
        crn_fail(error, CAIRN_UNAVAILABLE, "HiGHS was not found: %s", advice);
    return handle;
}

/* A function pointer out of a data pointer: what POSIX promises to work and ISO C cannot say. */
static bool find_function(void *handle, const char *name, void *function, size_t size)
{
    void *found = dlsym(handle, name);
    memcpy(function, &found, size);
    return found != NULL;
}

static cairn_status load(highs *api, cairn_error *error)
{
    void *handle = open_library(error);
    bool complete = true;
    if (!handle)
        return CAIRN_UNAVAILABLE;
#define CRN_X(result, name, parameters) \
    complete = find_function(handle, "Highs_" #name, &api->name, sizeof(api->name)) && complete;
    HIGHS_MAP(CRN_X)
#undef CRN_X
    dlclose(handle);
    if (complete)
        return CAIRN_OK;
    return crn_fail(error, CAIRN_UNAVAILABLE, "the HiGHS that was found is older than 1.9: %s", advice);
}

cairn_status crn_highs_available(cairn_error *error)
{
    highs api;
    return load(&api, error);
}

/* ---- one solve ---- */

/* Work of one program without a time limit, simplex iterations times entries: a minute or two. */
#define WORK_MAX ((int64_t)25000000000)

int64_t crn_highs_iterations(const crn_task *task, const crn_linear_program *program)
{
    if (task->settings->iterations >= 0)
        return crn_min(task->settings->iterations, INT32_MAX) * CRN_HIGHS_ITERATIONS_EACH;
    return task->deadline_ns != CAIRN_NONE ? INT64_MAX : WORK_MAX / (program->entries + 1) + 1;
}

typedef struct run {
    const crn_task *task;
    const crn_highs_question *question;
    const highs *api;
    void *model;
    bool stopped; /* the deadline or poll said so */
    bool refused; /* an option or the model was not taken */
} run;

static int64_t item_of(const run *r, const highs_data_out *out, const char *name, bool is_64_bits)
{
    const void *item = r->api->getCallbackDataOutItem(out, name);
    int64_t wide = 0;
    int narrow = 0;
    if (item && is_64_bits)
        memcpy(&wide, item, sizeof(wide));
    else if (item)
        memcpy(&narrow, item, sizeof(narrow));
    return is_64_bits ? wide : narrow;
}

/* HiGHS calls this from the thread that called it, at points that depend on its work only. */
static void watch(int type, const char *message, const highs_data_out *out, highs_data_in *in, void *context)
{
    run *r = context;
    cairn_progress progress = r->question->progress;
    bool in_tree = type == CALLBACK_MIP_INTERRUPT;
    int64_t iterations = item_of(r, out, in_tree ? "mip_total_lp_iterations" : "simplex_iteration_count", in_tree);
    (void)message;
    if (!in)
        return;
    progress.done = in_tree ? item_of(r, out, "mip_node_count", true) : 0;
    r->stopped = r->stopped || crn_should_stop(r->task, &progress);
    if (r->stopped || iterations > r->question->iterations_max)
        in->user_interrupt = 1;
}

static void set_bool(run *r, const char *option, bool value)
{
    r->refused |= r->api->setBoolOptionValue(r->model, option, value) == STATUS_ERROR;
}

static void set_int(run *r, const char *option, int64_t value)
{
    int small = (int)crn_min(crn_max(0, value), INT32_MAX);
    r->refused |= r->api->setIntOptionValue(r->model, option, small) == STATUS_ERROR;
}

static void set_double(run *r, const char *option, double value)
{
    r->refused |= r->api->setDoubleOptionValue(r->model, option, value) == STATUS_ERROR;
}

/* The clock is asked in watch, too; HiGHS's own limit covers what does not call back. */
static void set_options(run *r)
{
    const crn_task *task = r->task;
    set_bool(r, "output_flag", false);
    set_int(r, "threads", 1);
    set_int(r, "random_seed", task->settings->seed);
    set_double(r, "mip_rel_gap", 0);
    set_double(r, "mip_abs_gap", r->question->gap);
    set_int(r, "simplex_iteration_limit", r->question->iterations_max);
    if (task->deadline_ns != CAIRN_NONE)
        set_double(r, "time_limit", (double)crn_max(0, task->deadline_ns - crn_clock_ns()) / 1e9);
}

static void pass(run *r)
{
    const crn_linear_program *p = r->question->program;
    const highs *api = r->api;
    if (r->refused)
        return;
    r->refused |= api->passMip(r->model, p->columns, p->rows, p->entries, FORMAT_BY_ROWS, SENSE_MINIMIZE, 0, p->cost,
                               p->lower, p->upper, p->row_lower, p->row_upper, p->row_begin, p->index, p->value,
                               r->question->relax ? NULL : p->is_integer) == STATUS_ERROR;
    if (!r->refused && r->question->start)
        r->refused |= api->setSolution(r->model, r->question->start, NULL, NULL, NULL) == STATUS_ERROR;
    if (!r->refused)
        r->refused |= api->setCallback(r->model, watch, r) == STATUS_ERROR ||
                      api->startCallback(r->model, CALLBACK_SIMPLEX_INTERRUPT) == STATUS_ERROR ||
                      api->startCallback(r->model, CALLBACK_MIP_INTERRUPT) == STATUS_ERROR;
}

static bool is_an_end(int model_status)
{
    switch (model_status) {
    case MODEL_EMPTY:
    case MODEL_OPTIMAL:
    case MODEL_INFEASIBLE:
    case MODEL_UNBOUNDED_OR_INFEASIBLE: /* costs are not negative: never unbounded */
    case MODEL_TIME_LIMIT:
    case MODEL_ITERATION_LIMIT:
    case MODEL_UNKNOWN:
    case MODEL_SOLUTION_LIMIT:
    case MODEL_INTERRUPT:
        return true;
    default:
        return false;
    }
}

static cairn_status take(const run *r, int model_status, crn_highs_reply *reply, cairn_error *error)
{
    int found = 0;
    bool optimal = model_status == MODEL_OPTIMAL || model_status == MODEL_EMPTY;
    bool infeasible = model_status == MODEL_INFEASIBLE || model_status == MODEL_UNBOUNDED_OR_INFEASIBLE;
    const char *bound = r->question->relax ? "objective_function_value" : "mip_dual_bound";
    reply->closed = optimal || infeasible;
    reply->stopped_early = !reply->closed && (r->stopped || model_status == MODEL_TIME_LIMIT);
    r->api->getIntInfoValue(r->model, "primal_solution_status", &found);
    reply->found = found == SOLUTION_FEASIBLE && (optimal || !r->question->relax);
    if (reply->found && r->api->getSolution(r->model, reply->values, NULL, NULL, NULL) == STATUS_ERROR)
        return crn_fail(error, CAIRN_INTERNAL, "HiGHS has a solution and does not give it");
    if (optimal || !r->question->relax)
        r->api->getDoubleInfoValue(r->model, bound, &reply->bound);
    if (infeasible)
        reply->bound = INFINITY;
    return CAIRN_OK;
}

static cairn_status solve(run *r, crn_highs_reply *reply, cairn_error *error)
{
    if (r->api->getSizeofHighsInt(r->model) != (int)sizeof(int))
        return crn_fail(error, CAIRN_UNAVAILABLE, "HiGHS %s was built with integers of another size: %s",
                        r->api->version(), advice);
    set_options(r);
    pass(r);
    if (r->refused)
        return crn_fail(error, CAIRN_INTERNAL, "HiGHS %s refuses an option or the program", r->api->version());
    int run_status = r->api->run(r->model), model_status = r->api->getModelStatus(r->model);
    if (model_status == MODEL_MEMORY_LIMIT)
        return crn_no_memory(error);
    if (run_status == STATUS_ERROR || !is_an_end(model_status))
        return crn_fail(error, CAIRN_INTERNAL, "HiGHS %s failed: run %d, model status %d", r->api->version(),
                        run_status, model_status);
    return take(r, model_status, reply, error);
}

cairn_status crn_highs_solve(const crn_task *task, const crn_highs_question *question, crn_highs_reply *reply,
                             cairn_error *error)
{
    highs api;
    crn_task hurried = *task;
    if (task->deadline_ns != CAIRN_NONE) /* it looks at the clock now and then only */
        hurried.deadline_ns -= crn_max(0, task->deadline_ns - crn_clock_ns()) / LATE_SHARE;
    run r = {.task = &hurried, .question = question, .api = &api};
    double *values = reply->values;
    *reply = (crn_highs_reply){.bound = -INFINITY, .values = values};
    CRN_TRY(load(&api, error));
    r.model = api.create();
    if (!r.model)
        return crn_no_memory(error);
    cairn_status status = solve(&r, reply, error);
    api.destroy(r.model);
    return status;
}
