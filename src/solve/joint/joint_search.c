#include "solve/joint/joint_search.h"

#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"
#include "solve/joint/joint_random.h"

enum { CHUNK_WORK = 1000000, TRIES = 4, POLISH = 4, POLL_EVERY = 64 };

cairn_status crn_joint_begin(crn_joint_search *search, const crn_task *task, int64_t budget_bytes, cairn_error *error)
{
    const char *method;
    *search = (crn_joint_search){.task = task,
                                 .budget_bytes = crn_limit_of(budget_bytes),
                                 .best_ns = INT64_MAX,
                                 .best_peak_bytes = INT64_MAX,
                                 .seed = 1 + (uint64_t)crn_max(0, task->settings->seed),
                                 .random = UINT64_C(0x9E3779B97F4A7C15) ^ (uint64_t)crn_max(0, task->settings->seed),
                                 .allocator = crn_allocator(task->env)};
    CRN_TRY(crn_lower_bound(task, budget_bytes, &search->bound_ns, &method, error));
    return cairn_builder_new(task->env, task->problem, &search->best, error);
}

static void free_entry(crn_joint_search *search, crn_joint_entry *entry)
{
    crn_fit_free(entry->fit);
    crn_free(&search->allocator, entry->ops, (size_t)entry->count, sizeof(*entry->ops));
    *entry = (crn_joint_entry){0};
}

void crn_joint_end(crn_joint_search *search)
{
    for (int32_t i = 0; i < search->pool_count; i++)
        free_entry(search, &search->pool[i]);
    search->pool_count = 0;
    cairn_builder_free(search->best);
    search->best = NULL;
}

/* ---- complete schedules ---- */

static cairn_status copy_ops(const cairn_builder *from, cairn_builder *to, cairn_error *error)
{
    cairn_builder_truncate(to, 0);
    return crn_builder_add_all(to, cairn_builder_ops(from), cairn_builder_count(from), error);
}

cairn_status crn_joint_offer(crn_joint_search *search, const cairn_builder *builder, const char *from,
                             cairn_error *error)
{
    cairn_replay replay;
    int64_t budget = search->budget_bytes == INT64_MAX ? CAIRN_NONE : search->budget_bytes;
    CRN_TRY(crn_replay(search->task, cairn_builder_ops(builder), cairn_builder_count(builder), budget, &replay, error));
    if (!replay.valid || replay.makespan_ns > search->best_ns ||
        (replay.makespan_ns == search->best_ns && replay.peak_bytes >= search->best_peak_bytes))
        return CAIRN_OK;
    CRN_TRY(copy_ops(builder, search->best, error));
    search->best_ns = replay.makespan_ns;
    search->best_peak_bytes = replay.peak_bytes;
    snprintf(search->from, sizeof(search->from), "%s", from);
    return CAIRN_OK;
}

/* ---- lists ---- */

static cairn_status offer_fit(crn_joint_search *search, crn_fit *fit, cairn_error *error)
{
    cairn_builder *builder;
    CRN_TRY(cairn_builder_new(search->task->env, search->task->problem, &builder, error));
    cairn_status status = crn_fit_emit(fit, builder, error);
    if (status == CAIRN_OK)
        status = crn_joint_offer(search, builder, "", error);
    cairn_builder_free(builder);
    return status;
}

/* Keeps the entry among the best; those of equal makespan and length are taken to be the same. */
static void keep(crn_joint_search *search, crn_joint_entry *entry)
{
    int32_t at = search->pool_count;
    for (int32_t i = 0; i < search->pool_count; i++)
        if (search->pool[i].fit->best_ns == entry->fit->best_ns && search->pool[i].count == entry->count) {
            free_entry(search, entry);
            return;
        }
    while (at > 0 && search->pool[at - 1].fit->best_ns > entry->fit->best_ns)
        at--;
    if (at == CRN_JOINT_POOL) {
        free_entry(search, entry);
        return;
    }
    if (search->pool_count == CRN_JOINT_POOL)
        free_entry(search, &search->pool[--search->pool_count]);
    memmove(search->pool + at + 1, search->pool + at, (size_t)(search->pool_count - at) * sizeof(*entry));
    search->pool[at] = *entry;
    search->pool_count++;
}

static cairn_status begin_fit(crn_fit *fit, int64_t budget_bytes, const bool *goes, cairn_error *error)
{
    const crn_transfer *transfer = fit->transfer;
    for (int32_t w = 0; w < transfer->wait_count; w++) {
        int32_t birth = transfer->copies[transfer->waits[w].copy].birth;
        fit->best[w] = goes && birth >= 0 && goes[birth];
    }
    return crn_fit_begin(fit, budget_bytes, fit->best, error);
}

/* An entry of these operations; its fit is NULL where transfers cannot be added to them. */
static cairn_status make_entry(crn_joint_search *search, const cairn_op *ops, int64_t count, const bool *goes,
                               crn_joint_entry *entry, cairn_error *error)
{
    crn_transfer *transfer;
    *entry = (crn_joint_entry){0};
    cairn_status status = crn_transfer_new(search->task, ops, count, &transfer, NULL);
    if (status == CAIRN_UNSUPPORTED)
        return CAIRN_OK;
    if (status != CAIRN_OK)
        return crn_no_memory(error);
    CRN_TRY(crn_fit_new(transfer, search->seed++, &entry->fit, error));
    entry->ops = crn_alloc(&search->allocator, (size_t)count, sizeof(*ops));
    entry->count = entry->ops ? count : 0;
    status = entry->ops ? begin_fit(entry->fit, search->budget_bytes, goes, error) : crn_no_memory(error);
    if (entry->ops)
        memcpy(entry->ops, ops, (size_t)count * sizeof(*ops));
    if (status == CAIRN_OK && entry->fit->best_ns < INT64_MAX && entry->fit->best_ns <= search->best_ns)
        status = offer_fit(search, entry->fit, error);
    if (status != CAIRN_OK || entry->fit->best_ns == INT64_MAX)
        free_entry(search, entry);
    return status;
}

cairn_status crn_joint_offer_list(crn_joint_search *search, const cairn_builder *builder, const bool *goes,
                                  cairn_error *error)
{
    crn_joint_entry entry;
    CRN_TRY(make_entry(search, cairn_builder_ops(builder), cairn_builder_count(builder), goes, &entry, error));
    if (entry.fit)
        keep(search, &entry);
    return CAIRN_OK;
}

/* ---- changing a list ---- */

static int64_t random_below(crn_joint_search *search, int64_t below)
{
    return crn_joint_random_below(&search->random, below);
}

/* Any but a backward; with transfers or without. */
static cairn_op random_op(crn_joint_search *search, bool transfers)
{
    static const cairn_op_code codes[] = {CAIRN_OP_FORWARD_SAVE, CAIRN_OP_FORWARD_KEEP, CAIRN_OP_FORWARD_DROP,
                                          CAIRN_OP_COMPUTE,      CAIRN_OP_DROP,         CAIRN_OP_OFFLOAD,
                                          CAIRN_OP_PREFETCH,     CAIRN_OP_DISCARD};
    const cairn_chain *chain = cairn_problem_chain(search->task->problem);
    int last = transfers ? 7 : 4;
    if (!chain) {
        const cairn_graph *graph = cairn_problem_graph(search->task->problem);
        return (cairn_op){.code = (uint8_t)codes[3 + random_below(search, last - 2)],
                          .index = (int32_t)random_below(search, graph->node_count)};
    }
    int64_t kind = random_below(search, last);
    cairn_op op = {.code = (uint8_t)codes[kind < 3 ? kind : kind + 1]};
    op.index = (int32_t)(1 + random_below(search, chain->stage_count));
    if (op.code == CAIRN_OP_FORWARD_SAVE)
        op.option = (uint16_t)random_below(search, chain->stages[op.index - 1].option_count);
    if (op.code > CAIRN_OP_COMPUTE)
        op.value = (uint8_t)random_below(search, 2);
    return op;
}

static void take_out(cairn_op *ops, int64_t *count, int64_t at)
{
    --*count;
    memmove(ops + at, ops + at + 1, (size_t)(*count - at) * sizeof(*ops));
}

static void put_in(cairn_op *ops, int64_t *count, int64_t at, cairn_op op)
{
    memmove(ops + at + 1, ops + at, (size_t)(*count - at) * sizeof(*ops));
    ops[at] = op;
    ++*count;
}

/* A place near another one, so that changes on long lists are mostly valid. */
static int64_t place_near(crn_joint_search *search, int64_t at, int64_t count)
{
    int64_t reach = random_below(search, 2) ? 3 : 16, low = crn_max(0, at - reach);
    return low + random_below(search, crn_min(count, at + reach) - low + 1);
}

/* Moves, removes, replaces or inserts an operation; there is room for one more. Backwards stay. */
static void change_list(crn_joint_search *search, bool transfers, cairn_op *ops, int64_t *count)
{
    int64_t at = random_below(search, *count);
    cairn_op op = ops[at];
    int64_t kind = random_below(search, 8);
    if (kind == 0) {
        put_in(ops, count, at, random_op(search, transfers));
        return;
    }
    if (op.code == CAIRN_OP_BACKWARD)
        return;
    if (kind == 1) { /* the same stage otherwise */
        cairn_op other = random_op(search, transfers);
        other.index = op.index;
        other.option = 0;
        ops[at] = other;
        return;
    }
    take_out(ops, count, at);
    if (kind > 2)
        put_in(ops, count, place_near(search, at, *count), op);
}

/* Replaces an entry by a changed one that is not worse. */
static cairn_status mutate(crn_joint_search *search, int32_t at, cairn_error *error)
{
    crn_joint_entry *old = &search->pool[at], entry;
    int64_t count = old->count, room = count + 2;
    cairn_op *ops = crn_alloc(&search->allocator, (size_t)room, sizeof(*ops));
    if (!ops)
        return crn_no_memory(error);
    memcpy(ops, old->ops, (size_t)count * sizeof(*ops));
    for (int64_t changes = 1 + random_below(search, 2); changes > 0; changes--)
        change_list(search, false, ops, &count);
    cairn_status status = make_entry(search, ops, count, NULL, &entry, error);
    crn_free(&search->allocator, ops, (size_t)room, sizeof(*ops));
    if (status != CAIRN_OK || !entry.fit)
        return status;
    status = crn_fit_improve(entry.fit, TRIES, search->bound_ns, error);
    if (status == CAIRN_OK && entry.fit->best_ns < search->best_ns)
        status = offer_fit(search, entry.fit, error);
    if (status == CAIRN_OK && entry.fit->best_ns <= old->fit->best_ns) {
        free_entry(search, old);
        *old = entry;
        return CAIRN_OK;
    }
    free_entry(search, &entry);
    return status;
}

/* ---- polishing ---- */

/* Random changes of the best schedule itself, transfers and all; the simulator says which are valid and not worse. */
static cairn_status polish(crn_joint_search *search, int64_t rounds, cairn_error *error)
{
    int64_t count = cairn_builder_count(search->best), room = 2 * count + 64, kept = count;
    int64_t budget = search->budget_bytes == INT64_MAX ? CAIRN_NONE : search->budget_bytes;
    cairn_op *ops = crn_alloc(&search->allocator, (size_t)room, sizeof(*ops));
    cairn_op *best = crn_alloc(&search->allocator, (size_t)room, sizeof(*best));
    cairn_status status = ops && best ? CAIRN_OK : crn_no_memory(error);
    if (status == CAIRN_OK && count > 0)
        memcpy(best, cairn_builder_ops(search->best), (size_t)count * sizeof(*best));
    for (int64_t i = 0; status == CAIRN_OK && kept > 0 && i < rounds && search->best_ns > search->bound_ns; i++) {
        cairn_replay replay;
        if (i % POLL_EVERY == POLL_EVERY - 1 && crn_should_stop(search->task, NULL))
            break;
        count = kept;
        memcpy(ops, best, (size_t)count * sizeof(*ops));
        for (int64_t changes = 1 + random_below(search, 3); changes > 0 && count + 1 < room && count > 0; changes--)
            change_list(search, true, ops, &count);
        status = crn_replay(search->task, ops, count, budget, &replay, error);
        if (status != CAIRN_OK || !replay.valid || replay.makespan_ns > search->best_ns)
            continue;
        memcpy(best, ops, (size_t)count * sizeof(*best));
        kept = count;
        if (replay.makespan_ns < search->best_ns)
            search->from[0] = '\0';
        search->best_ns = replay.makespan_ns;
        search->best_peak_bytes = replay.peak_bytes;
    }
    cairn_builder_truncate(search->best, 0);
    for (int64_t i = 0; status == CAIRN_OK && i < kept; i++)
        status = cairn_builder_add(search->best, best[i], error);
    crn_free(&search->allocator, ops, (size_t)room, sizeof(*ops));
    crn_free(&search->allocator, best, (size_t)room, sizeof(*best));
    return status;
}

/* ---- improving ---- */

static int64_t size_of(const crn_joint_entry *entry)
{
    return (int64_t)entry->fit->transfer->event_count + entry->fit->transfer->wait_count;
}

static cairn_status improve_entry(crn_joint_search *search, int32_t at, int64_t rounds, cairn_error *error)
{
    crn_joint_entry *entry = &search->pool[at];
    int64_t before_ns = entry->fit->best_ns;
    CRN_TRY(crn_fit_improve(entry->fit, rounds, search->bound_ns, error));
    if (entry->fit->best_ns < before_ns && entry->fit->best_ns < search->best_ns)
        CRN_TRY(offer_fit(search, entry->fit, error));
    if (!cairn_problem_chain(search->task->problem))
        return CAIRN_OK;
    for (int64_t i = 0; i < rounds && search->best_ns > search->bound_ns; i++)
        CRN_TRY(mutate(search, at, error));
    return CAIRN_OK;
}

/* Rounds are shared out a chunk at a time, the better half of the lists getting twice as many. */
cairn_status crn_joint_improve(crn_joint_search *search, int64_t rounds, crn_answer *answer, cairn_error *error)
{
    int64_t polishing = search->task->deadline_ns == CAIRN_NONE ? crn_mul_saturating(POLISH, rounds) : 1000;
    while (rounds > 0 && search->pool_count > 0 && search->best_ns > search->bound_ns)
        for (int32_t i = 0; i < search->pool_count && rounds > 0; i++) {
            int64_t chunk = crn_max(1, CHUNK_WORK / (80 * size_of(&search->pool[i]) + 1));
            chunk = crn_min(rounds, 2 * i < search->pool_count ? 2 * chunk : chunk);
            rounds -= chunk;
            CRN_TRY(improve_entry(search, i, chunk, error));
            if (crn_should_stop(search->task, NULL)) {
                answer->stopped_early = true;
                return CAIRN_OK;
            }
        }
    return polish(search, polishing, error);
}

cairn_status crn_joint_answer(crn_joint_search *search, crn_answer *answer, cairn_error *error)
{
    answer->lower_bound_ns = search->bound_ns;
    answer->found = search->best_ns < INT64_MAX;
    answer->cut_short = search->cut_short;
    if (!answer->found && search->cut_short && search->task->deadline_ns != CAIRN_NONE)
        answer->stopped_early = true;
    if (!answer->found)
        return CAIRN_OK;
    if (search->from[0])
        snprintf(answer->reason, sizeof(answer->reason), "nothing that was tried beats %s", search->from);
    return copy_ops(search->best, answer->builder, error);
}

/* ---- other solvers ---- */

static bool is_cut_short(cairn_status status)
{
    return status == CAIRN_CANCELLED || status == CAIRN_NO_MEMORY || status == CAIRN_MEMORY_LIMIT;
}

static bool is_passed_over(cairn_status status)
{
    return is_cut_short(status) || status == CAIRN_UNSUPPORTED || status == CAIRN_UNAVAILABLE;
}

static cairn_status ask_once(const crn_task *task, const crn_solver *solver, void *state, int64_t budget_bytes,
                             crn_joint_take take, void *context, bool *cut_short, cairn_error *error)
{
    crn_answer own;
    CRN_TRY(crn_answer_init(&own, task, error));
    cairn_status status = solver->solve(task, state, budget_bytes, &own, error);
    *cut_short = *cut_short || own.stopped_early || own.cut_short;
    if (status == CAIRN_OK && own.found)
        status = take(context, budget_bytes, &own, error);
    crn_answer_clear(&own, task);
    return status;
}

static cairn_status ask_least(const crn_task *task, const crn_solver *solver, void *state, int64_t *least_bytes,
                              bool *cut_short, cairn_error *error)
{
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    if (!least_bytes || !solver->least)
        return CAIRN_OK;
    CRN_TRY(solver->least(task, state, &least, error));
    *cut_short = *cut_short || least.is_rough;
    if (least.bytes != CAIRN_NONE)
        *least_bytes = crn_min(*least_bytes, least.bytes);
    return CAIRN_OK;
}

cairn_status crn_joint_ask(const crn_task *task, const char *name, const int64_t *budgets, int32_t count,
                           crn_joint_take take, void *context, int64_t *least_bytes, bool *cut_short,
                           cairn_error *error)
{
    const crn_solver *solver = crn_solver_find(name);
    void *state;
    if (!solver || crn_solver_accepts(solver, task, NULL) != CAIRN_OK)
        return CAIRN_OK;
    if (solver->memory && solver->memory(task) > crn_memory_limit(task->settings)) {
        *cut_short = *cut_short || task->settings->memory_limit_bytes != CAIRN_NONE;
        return CAIRN_OK;
    }
    cairn_status status = crn_solver_open(solver, task, &state, error);
    for (int32_t i = 0; status == CAIRN_OK && i < count && (i == 0 || !crn_should_stop(task, NULL)); i++)
        status = ask_once(task, solver, state, budgets[i], take, context, cut_short, error);
    if (status == CAIRN_OK)
        status = ask_least(task, solver, state, least_bytes, cut_short, error);
    crn_solver_close(solver, task, state);
    *cut_short = *cut_short || is_cut_short(status) || crn_task_is_past(task);
    return is_passed_over(status) ? CAIRN_OK : status;
}

/* ---- all solvers without transfers ---- */

/*
 * Of the time that is left, one of so many parts is for them; and of that, what those may take that are asked first, so
 * that there is something to go on with when it ends.
 */
enum { ALONE_SHARE = 2, QUICK_SHARE = 16 };

/* When solvers are asked: the quick ones under a time limit, the others, and those that may take too long. */
typedef enum turn { QUICK, USUAL, DEAR } turn;

typedef struct candidate {
    const crn_solver *solver;
    turn turn;
} candidate;

typedef struct asking {
    crn_joint_search *search;
    candidate candidates[CRN_SOLVERS_MAX];
    int count;
    const crn_solver *solver; /* who is being asked */
    int64_t budget_bytes;     /* the search's, as solvers want it */
    int64_t quick_work;       /* who takes no more is quick; below 0 = nobody is */
    int rank;                 /* of those that answered completely */
} asking;

static cairn_status take_answer(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error)
{
    asking *a = context;
    if (budget_bytes == a->budget_bytes) {
        if (!own->stopped_early && !own->cut_short && a->solver->rank > a->rank)
            a->rank = a->solver->rank;
        CRN_TRY(crn_joint_offer(a->search, own->builder, a->solver->info.name, error));
    }
    if (budget_bytes == CAIRN_NONE || a->search->best_ns <= a->search->bound_ns)
        return CAIRN_OK;
    return crn_joint_offer_list(a->search, own->builder, NULL, error);
}

static bool is_alone(const crn_task *sub, const crn_solver *solver)
{
    const cairn_solver_info *info = &solver->info;
    return strcmp(info->name, "auto") != 0 && !info->needs_machine && !info->minimizes_memory && !solver->available &&
           crn_solver_accepts(solver, sub, NULL) == CAIRN_OK;
}

static turn turn_of(const asking *a, const crn_task *sub, const crn_solver *solver)
{
    int64_t work = solver->work ? solver->work(sub) : 0;
    if (work > CRN_WORK_MAX)
        return DEAR;
    return work <= a->quick_work && !solver->has_own_bound ? QUICK : USUAL;
}

/* The strongest first, in the order of the registry among equals. */
static void list_solvers(asking *a, const crn_task *sub)
{
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++) {
        int at = a->count;
        if (!is_alone(sub, *solver))
            continue;
        for (; at > 0 && a->candidates[at - 1].solver->rank < (*solver)->rank; at--)
            a->candidates[at] = a->candidates[at - 1];
        a->candidates[at] = (candidate){*solver, turn_of(a, sub, *solver)};
        a->count++;
    }
}

static cairn_status ask_ranked(asking *a, const crn_task *sub, turn whose, const char *lists_of, const int64_t *budgets,
                               int32_t count, cairn_error *error)
{
    crn_joint_search *search = a->search;
    for (int i = 0; i < a->count; i++) {
        a->solver = a->candidates[i].solver;
        const char *name = a->solver->info.name;
        bool lists = lists_of && strcmp(name, lists_of) == 0,
             covered = a->solver->rank > 0 && a->solver->rank < a->rank;
        if (a->candidates[i].turn != whose || search->best_ns <= search->bound_ns ||
            (whose == DEAR && search->best_ns < INT64_MAX) || (covered && !lists) || crn_should_stop(sub, NULL))
            continue;
        CRN_TRY(crn_joint_ask(sub, name, lists ? budgets : &a->budget_bytes, lists ? count : 1, take_answer, a, NULL,
                              &a->search->cut_short, error));
    }
    return CAIRN_OK;
}

cairn_status crn_joint_ask_alone(crn_joint_search *search, const char *lists_of, const int64_t *budgets, int32_t count,
                                 cairn_error *error)
{
    crn_task sub = crn_task_part(search->task, ALONE_SHARE);
    asking a = {.search = search,
                .budget_bytes = search->budget_bytes == INT64_MAX ? CAIRN_NONE : search->budget_bytes,
                .quick_work = -1};
    if (sub.deadline_ns != CAIRN_NONE)
        a.quick_work = crn_max(0, sub.deadline_ns - crn_clock_ns()) / QUICK_SHARE;
    sub.machine = NULL;
    for (int32_t i = 0; i < count; i++)
        if (sub.budget_max_bytes != CAIRN_NONE)
            sub.budget_max_bytes = crn_max(sub.budget_max_bytes, budgets[i]);
    list_solvers(&a, &sub);
    CRN_TRY(ask_ranked(&a, &sub, QUICK, lists_of, budgets, count, error));
    CRN_TRY(ask_ranked(&a, &sub, USUAL, lists_of, budgets, count, error));
    return ask_ranked(&a, &sub, DEAR, NULL, NULL, 0, error);
}
