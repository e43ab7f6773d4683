#include "solve/joint/joint_search.h"

#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"
#include "solve/joint/joint_random.h"

enum { CHUNK_WORK = 1000000, TRIES = 4, POLISH = 4, POLL_WORK = 20000 };

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

/* All or nothing: who lacks memory keeps what was there. */
static cairn_status copy_ops(const cairn_builder *from, cairn_builder *to, cairn_error *error)
{
    CRN_TRY(crn_builder_reserve(to, cairn_builder_count(from), error));
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
    int32_t at = search->pool_count, size = crn_joint_pool_size(search->task);
    for (int32_t i = 0; i < search->pool_count; i++)
        if (search->pool[i].fit->best_ns == entry->fit->best_ns && search->pool[i].count == entry->count) {
            free_entry(search, entry);
            return;
        }
    while (at > 0 && search->pool[at - 1].fit->best_ns > entry->fit->best_ns)
        at--;
    if (at == size) {
        free_entry(search, entry);
        return;
    }
    if (search->pool_count == size)
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

/*
 * Random choices. Without a time limit, all come from the seed, one after the other. With one, those of a list come from
 * its operations, so that what becomes of it does not depend on which lists others have offered before.
 */
static bool is_by_list(const crn_joint_search *search)
{
    return search->task->deadline_ns != CAIRN_NONE;
}

/* FNV-1a (Fowler, Noll and Vo) over what operations mean; not 0. */
static uint64_t seed_of(const cairn_op *ops, int64_t count, uint64_t seed)
{
    uint64_t hash = UINT64_C(0xCBF29CE484222325) ^ seed;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t words[] = {ops[i].code, ops[i].value, ops[i].option, (uint64_t)ops[i].index};
        for (int k = 0; k < 4; k++)
            hash = (hash ^ words[k]) * UINT64_C(0x100000001B3);
    }
    return hash | 1;
}

static uint64_t next_seed(crn_joint_search *search, const cairn_op *ops, int64_t count)
{
    uint64_t seed = (uint64_t)crn_max(0, search->task->settings->seed);
    return is_by_list(search) ? seed_of(ops, count, seed) : search->seed++;
}

/* An entry of these operations; its fit is NULL where transfers cannot be added to them. */
static cairn_status make_entry(crn_joint_search *search, const cairn_op *ops, int64_t count, const bool *goes,
                               crn_joint_entry *entry, cairn_error *error)
{
    crn_transfer *transfer;
    *entry = (crn_joint_entry){0};
    cairn_status status = crn_transfer_new(search->task, ops, count, &transfer, error);
    if (status != CAIRN_OK)
        return status == CAIRN_UNSUPPORTED ? CAIRN_OK : status;
    entry->random = next_seed(search, ops, count);
    CRN_TRY(crn_fit_new(transfer, entry->random, &entry->fit, error));
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

cairn_status crn_joint_try_list(crn_joint_search *search, const cairn_builder *builder, const bool *goes, bool improve,
                                int64_t *makespan_ns, cairn_error *error)
{
    crn_joint_entry entry;
    *makespan_ns = INT64_MAX;
    CRN_TRY(make_entry(search, cairn_builder_ops(builder), cairn_builder_count(builder), goes, &entry, error));
    if (!entry.fit)
        return CAIRN_OK;
    *makespan_ns = entry.fit->best_ns;
    if (improve)
        keep(search, &entry);
    else
        free_entry(search, &entry);
    return CAIRN_OK;
}

cairn_status crn_joint_offer_list(crn_joint_search *search, const cairn_builder *builder, const bool *goes,
                                  cairn_error *error)
{
    int64_t makespan_ns;
    return crn_joint_try_list(search, builder, goes, true, &makespan_ns, error);
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
    int64_t count = cairn_builder_count(search->best), room = 2 * count + 64, kept = count, replayed = 0;
    int64_t budget = search->budget_bytes == INT64_MAX ? CAIRN_NONE : search->budget_bytes;
    cairn_op *ops = crn_alloc(&search->allocator, (size_t)room, sizeof(*ops));
    cairn_op *best = crn_alloc(&search->allocator, (size_t)room, sizeof(*best));
    cairn_status status = ops && best ? CAIRN_OK : crn_no_memory(error);
    if (status == CAIRN_OK && count > 0)
        memcpy(best, cairn_builder_ops(search->best), (size_t)count * sizeof(*best));
    for (int64_t i = 0; status == CAIRN_OK && kept > 0 && i < rounds && search->best_ns > search->bound_ns; i++) {
        cairn_replay replay;
        if (replayed >= POLL_WORK && crn_should_stop(search->task, NULL))
            break;
        replayed = replayed >= POLL_WORK ? 0 : replayed;
        count = kept;
        memcpy(ops, best, (size_t)count * sizeof(*ops));
        for (int64_t changes = 1 + random_below(search, 3); changes > 0 && count + 1 < room && count > 0; changes--)
            change_list(search, true, ops, &count);
        status = crn_replay(search->task, ops, count, budget, &replay, error);
        replayed += count;
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
    search->random = is_by_list(search) ? entry->random : search->random;
    for (int64_t i = 0; i < rounds && search->best_ns > search->bound_ns; i++)
        CRN_TRY(mutate(search, at, error));
    entry->random = search->random;
    return CAIRN_OK;
}

/* The best lists first; of equal ones the one that was before. */
static void sort_pool(crn_joint_search *search)
{
    for (int32_t i = 1; i < search->pool_count; i++) {
        crn_joint_entry entry = search->pool[i];
        int32_t at = i;
        for (; at > 0 && search->pool[at - 1].fit->best_ns > entry.fit->best_ns; at--)
            search->pool[at] = search->pool[at - 1];
        search->pool[at] = entry;
    }
}

/* Under a time limit, the worse half of the lists is left out when half of the time has passed, and so on. */
static void leave_out(crn_joint_search *search, int64_t *halved_ns)
{
    int64_t now_ns = crn_clock_ns();
    if (search->task->deadline_ns == CAIRN_NONE || now_ns < *halved_ns)
        return;
    sort_pool(search);
    if (*halved_ns > 0)
        for (int32_t left = (search->pool_count + 1) / 2; search->pool_count > left;)
            free_entry(search, &search->pool[--search->pool_count]);
    *halved_ns = now_ns + (search->task->deadline_ns - now_ns) / 2;
}

/* Rounds are shared out a chunk at a time, the better half of the lists getting twice as many. */
cairn_status crn_joint_improve(crn_joint_search *search, int64_t rounds, crn_answer *answer, cairn_error *error)
{
    int64_t polishing = search->task->deadline_ns == CAIRN_NONE ? crn_mul_saturating(POLISH, rounds) : 1000;
    int64_t halved_ns = 0;
    while (rounds > 0 && search->pool_count > 0 && search->best_ns > search->bound_ns) {
        leave_out(search, &halved_ns);
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
