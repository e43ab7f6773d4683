/*
 * chain-weak: the fastest weakly persistent schedule of a chain, and never a slower one than chain-exact's.
 *
 * Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to
 * train deep neural networks with limited memory", ACM TOMS 2024: a kept output may be replaced by a later one before
 * the backward that it was kept for. The recurrence is in weak_model.h, with the costs of chain_model.h.
 *
 * Two programs have it. In bytes (weak_step_function.h): step functions of memory, one run for all budgets, nothing rounded,
 * so the answer is optimal among weakly persistent schedules. That takes about n^5 time and memory in the number of
 * distinct stages, and is what is done as long as an estimate, which depends on the problem alone, says that it is
 * affordable: up to some 80 stages that are all different. Beyond that in memory slots (weak_slots.h), for each budget
 * anew, O(n^4 S), with fewer slots than asked for where their rows would be too much, but no fewer than 2 n. Slots round
 * up, so a schedule from there can be slower than a persistent one in bytes. Therefore chain-exact is asked first, and
 * its answer stays unless there is a faster one: at every budget, and whatever the number of slots, chain-weak is no
 * worse.
 *
 * Where chain-exact's answer meets the lower bound of all schedules, there is nothing to look for; in slots, not where it
 * is within one per cent of it either, for many budgets would take a table each.
 *
 * The least budget is that of weakly persistent schedules, in bytes (weak_least.h), in either case.
 */
#include <stdio.h>

#include "solve/chain/chain_exact.h"
#include "solve/chain/weak_slots.h"
#include "solve/chain/weak_step_function.h"

/*
 * Where rows of values would take more than this, there are fewer slots; but with less than two for a stage rounding
 * takes more than is to be gained.
 */
#define ROWS_BYTES_MAX ((int64_t)1 << 30)

/* Up to so much, the program in bytes is taken: memory, and elementary steps. */
#define STEPS_BYTES_MAX ((int64_t)1 << 31)
#define STEPS_WORK_MAX ((int64_t)4000000000)

/* In slots, nothing is looked for where less than this share of the time is to be gained: each budget has its tables. */
enum { NEAR_SHARE = 100 };

typedef struct session {
    void *exact;                  /* session of chain-exact */
    const crn_chain_table *table; /* its table */
    int64_t exact_least;          /* its least budget */
    crn_weak_model model;
    crn_weak_least least;
    crn_arena arena; /* of model and least */
    int64_t least_bytes;
    bool in_bytes;         /* else in slots, for each budget anew */
    crn_weak_steps *steps; /* tables in bytes, from the first budget on that needs them */
    int32_t slots;
    bool has_parts; /* model and least are there */
    bool stopped_early;
} session;

/* ---- opening ---- */

static int32_t slots_for(const crn_task *task)
{
    int64_t parts, terms, stages = cairn_problem_chain(task->problem)->stage_count;
    crn_weak_model_counts(task, &parts, &terms);
    int64_t fitting = ROWS_BYTES_MAX / parts / (int64_t)sizeof(uint32_t);
    return (int32_t)crn_min(task->settings->slots, crn_max(2 * stages, fitting));
}

/* Whether the program in bytes is affordable. It does not depend on sizes, so that scaling them changes nothing. */
static bool is_affordable(const crn_weak_estimate *estimate)
{
    return estimate->bytes <= STEPS_BYTES_MAX && estimate->work <= STEPS_WORK_MAX;
}

/* The most that a solve of the session can use: with enough to save everything, chain-exact's answer is the best of all. */
static int64_t top_bytes(const session *p, const crn_task *task)
{
    int64_t top = crn_chain_full_bytes(&p->table->model);
    if (task->budget_max_bytes == CAIRN_NONE)
        return top;
    return crn_min(top, task->budget_max_bytes - p->table->model.always_bytes);
}

static void chain_weak_close(const crn_task *task, void *state)
{
    session *p = state;
    cairn_allocator allocator = crn_allocator(task->env);
    crn_weak_steps_free(p->steps);
    crn_arena_clear(&p->arena);
    crn_solver_close(&crn_chain_exact_solver, task, p->exact);
    crn_free(&allocator, p, 1, sizeof(*p));
}

static cairn_status prepare_parts(session *p, const crn_task *task, cairn_error *error)
{
    crn_weak_estimate estimate;
    if (!p->table->row) /* no budget of the session is enough */
        return CAIRN_OK;
    CRN_TRY(crn_weak_model_init(&p->model, p->table, &p->arena, error));
    CRN_TRY(crn_weak_least_init(&p->least, &p->model, task, &p->arena, error));
    p->least_bytes = crn_min(p->least_bytes, p->table->model.always_bytes + crn_weak_least_of_whole(&p->least));
    p->slots = slots_for(task);
    p->has_parts = true;
    if (!crn_weak_steps_estimate(task, &estimate))
        return crn_no_memory(error);
    p->in_bytes = is_affordable(&estimate);
    return CAIRN_OK;
}

static cairn_status prepare(session *p, const crn_task *task, cairn_error *error)
{
    crn_least exact_least = {CAIRN_NONE, false, CAIRN_NONE, false};
    CRN_TRY(crn_solver_open(&crn_chain_exact_solver, task, &p->exact, error));
    p->table = crn_chain_exact_table(p->exact);
    CRN_TRY(crn_chain_exact_solver.least(task, p->exact, &exact_least, error));
    p->least_bytes = p->exact_least = exact_least.bytes;
    cairn_status status = prepare_parts(p, task, error);
    if (status != CAIRN_CANCELLED)
        return status;
    p->stopped_early = true; /* chain-exact has answers */
    return CAIRN_OK;
}

static cairn_status chain_weak_open(const crn_task *task, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    session *p = crn_alloc_zero(&allocator, 1, sizeof(*p));
    *state = p;
    if (!p)
        return crn_no_memory(error);
    crn_arena_init(&p->arena, allocator);
    return prepare(p, task, error);
}

static cairn_status chain_weak_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    const session *p = state;
    (void)task;
    (void)error;
    least->bytes = p->least_bytes;
    return CAIRN_OK;
}

/* ---- solving ---- */

/* The time of the operations in a builder; INT64_MAX where there are none. */
static cairn_status time_of(const crn_task *task, cairn_builder *builder, int64_t *ns, cairn_error *error)
{
    cairn_replay replay;
    *ns = INT64_MAX;
    if (cairn_builder_count(builder) == 0)
        return CAIRN_OK;
    CRN_TRY(crn_replay(task, cairn_builder_ops(builder), cairn_builder_count(builder), CAIRN_NONE, &replay, error));
    *ns = replay.valid ? replay.makespan_ns : INT64_MAX;
    return CAIRN_OK;
}

/*
 * Where weakly persistent schedules need less memory than persistent ones, that of least memory is an answer for all
 * budgets from there on. Tables in bytes have it, or better.
 */
static cairn_status consider_least(const session *p, const crn_task *task, crn_answer *answer, cairn_error *error)
{
    cairn_builder *builder;
    int64_t ns, least_ns;
    if (p->in_bytes || p->least_bytes == p->exact_least)
        return CAIRN_OK;
    CRN_TRY(time_of(task, answer->builder, &ns, error));
    CRN_TRY(cairn_builder_new(task->env, task->problem, &builder, error));
    cairn_status status = crn_weak_least_emit(&p->least, task, builder, error);
    if (status == CAIRN_OK)
        status = time_of(task, builder, &least_ns, error);
    if (status == CAIRN_OK && least_ns < ns) {
        cairn_builder_truncate(answer->builder, 0);
        status = crn_weak_least_emit(&p->least, task, answer->builder, error);
        answer->found = true;
        answer->optimal_in_class = false;
    }
    cairn_builder_free(builder);
    return status;
}

/* The answer's time, and how much less any schedule can take at most; INT64_MAX where there is no answer. */
static cairn_status find_room(const crn_task *task, int64_t budget_bytes, const crn_answer *answer, int64_t *ns,
                              int64_t *room_ns, cairn_error *error)
{
    const char *method;
    int64_t bound_ns;
    *ns = *room_ns = INT64_MAX;
    if (!answer->found)
        return CAIRN_OK;
    CRN_TRY(time_of(task, answer->builder, ns, error));
    CRN_TRY(crn_lower_bound(task, budget_bytes, &bound_ns, &method, error));
    *room_ns = crn_max(0, *ns - bound_ns);
    return CAIRN_OK;
}

/* Among weakly persistent schedules; what chain-exact claims is less. */
static void claim_class(crn_answer *answer)
{
    answer->optimal_in_class = true;
    answer->optimal_in = NULL;
}

/* What chain-exact claims for its schedule stays true while that is the answer. */
static cairn_status improve(session *p, const crn_task *task, int64_t available, crn_answer *answer, cairn_error *error)
{
    int64_t ns;
    bool found = false;
    CRN_TRY(consider_least(p, task, answer, error));
    CRN_TRY(time_of(task, answer->builder, &ns, error));
    ns = answer->found ? ns - p->table->model.work_ns : INT64_MAX;
    if (p->in_bytes && !p->steps)
        CRN_TRY(crn_weak_steps_new(&p->model, task, top_bytes(p, task), &p->steps, error));
    if (p->in_bytes)
        CRN_TRY(crn_weak_steps_solve(p->steps, task, available, ns, answer->builder, &found, error));
    else
        CRN_TRY(crn_weak_slots_solve(&p->least, task, available, p->slots, ns, answer->builder, &found, error));
    answer->found |= found;
    if (p->in_bytes && !p->table->gave_up)
        claim_class(answer);
    else if (found)
        answer->optimal_in_class = false;
    return CAIRN_OK;
}

/* Without memory for tables of its own chain-exact's answer stays, from tables that are there. */
static cairn_status fall_back(const session *p, const crn_task *task, int64_t budget_bytes, crn_answer *answer,
                              cairn_error *error)
{
    cairn_builder_truncate(answer->builder, 0);
    snprintf(answer->reason, sizeof(answer->reason),
             "chain-exact's: no memory to look for weakly persistent ones (option memory-limit)");
    return crn_chain_exact_solver.solve(task, p->exact, budget_bytes, answer, error);
}

static cairn_status chain_weak_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                                     cairn_error *error)
{
    session *p = state;
    int64_t ns, room_ns;
    CRN_TRY(crn_chain_exact_solver.solve(task, p->exact, budget_bytes, answer, error));
    answer->stopped_early |= p->stopped_early;
    answer->optimal_in = crn_chain_exact_solver.info.optimal_in;
    cairn_status status = find_room(task, budget_bytes, answer, &ns, &room_ns, error);
    if (room_ns == 0)
        claim_class(answer);
    bool is_near = room_ns == 0 || (!p->in_bytes && room_ns <= ns / NEAR_SHARE);
    if (is_near || !p->has_parts || budget_bytes == CAIRN_NONE || budget_bytes < p->least_bytes)
        return status;
    bool has_answer = answer->found;
    if (status == CAIRN_OK)
        status = improve(p, task, budget_bytes - p->table->model.always_bytes, answer, error);
    if (status == CAIRN_NO_MEMORY && has_answer)
        return fall_back(p, task, budget_bytes, answer, error);
    if (status != CAIRN_CANCELLED || !answer->found)
        return status;
    answer->stopped_early = true; /* chain-exact has an answer */
    return CAIRN_OK;
}

/* ---- estimates ---- */

static int64_t chain_weak_memory(const crn_task *task)
{
    crn_weak_estimate estimate;
    int64_t parts, terms, bytes = crn_chain_exact_solver.memory(task);
    if (bytes > crn_memory_limit(task->settings))
        return bytes;
    crn_weak_model_counts(task, &parts, &terms);
    bytes = crn_add_saturating(bytes, crn_weak_model_memory(task));
    bytes = crn_add_saturating(bytes, crn_mul_saturating(parts, (int64_t)sizeof(int64_t)));
    if (!crn_weak_steps_estimate(task, &estimate))
        return bytes;
    return crn_add_saturating(bytes, is_affordable(&estimate) ? estimate.bytes
                                                              : crn_weak_slots_memory(parts, slots_for(task)));
}

static int64_t chain_weak_work(const crn_task *task)
{
    crn_weak_estimate estimate;
    int64_t parts, terms, work = crn_chain_exact_solver.work(task);
    if (work == INT64_MAX) /* nobody asks for what comes on top of it */
        return work;
    crn_weak_model_counts(task, &parts, &terms);
    if (!crn_weak_steps_estimate(task, &estimate))
        return INT64_MAX;
    bool in_bytes = is_affordable(&estimate);
    return crn_add_saturating(work, in_bytes ? estimate.work
                                             : crn_mul_saturating(terms, 100 + 2 * (int64_t)slots_for(task) / 5));
}

const crn_solver crn_chain_weak_solver = {
    .info = {.name = "chain-weak",
             .takes_chains = true,
             .available = true,
             .optimal_in = "weakly-persistent",
             .summary = "fastest weakly persistent schedule, never worse than chain-exact's",
             .source = "Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2024, by a shared inner minimum",
             .cost = "O(n^4 S) time, O(n^3 S) memory, on top of chain-exact's"},
    .options = "slots",
    .rank = 30,
    .memory = chain_weak_memory,
    .work = chain_weak_work,
    .open = chain_weak_open,
    .close = chain_weak_close,
    .least = chain_weak_least,
    .solve = chain_weak_solve,
};
