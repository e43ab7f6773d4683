/*
 * auto: the best answer of all the other solvers.
 *
 * It asks every solver that takes the problem (brute force takes tiny ones only), but for those that need a library
 * found at run time (an answer does not depend on what else is installed), and keeps the schedule with the least
 * makespan (the least peak for minimize=memory), so it is never worse than any of them. It leaves out only what cannot
 * change the answer, and what cannot be afforded, which it names:
 *   - once a schedule meets the lower bound, nothing can beat it;
 *   - a solver whose class of schedules lies in that of one that has answered cannot beat it (crn_solver.rank);
 *   - a solver whose memory would pass the limit, or whose work would pass CRN_WORK_MAX while another has an answer.
 * store-all is asked first, for it is free and often fits; then the strongest, so that the others can be left out. Where
 * that takes seconds, those that take a small part of it are asked before, so that whoever stops it has an answer. With
 * a time limit exhaustive search comes next, where it needs a small part of it; then the baselines, in their share, as they
 * are for a solver that is asked alone (baselines.h); then those that cover others and will end in time, by their
 * estimate; then those that improve their answer until time ends, with all that is left, so that they have as much as
 * when they are asked alone; then, while there is time, the others, the cheapest first. Where one starts from what others
 * find, these share half of the time, and it gets the rest; a caller who asks that one gets the same (session.c).
 */
#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"
#include "solve/auto.h"
#include "solve/baselines.h"
#include "solve/options.h"
#include "solve/solver.h"

/*
 * One of so many parts of the time left. BOUND_SHARE: for the bound, before anybody is asked. REST_SHARE: for who comes
 * after one that should end in time, as its work is an estimate. LAST_SHARE: for one that starts from what others find.
 */
enum { BOUND_SHARE = 8, REST_SHARE = 8, LAST_SHARE = 2 };

/* With a time limit, those that would take so many times of what is left are not asked while there is an answer;
 * estimates are of the worst case. */
enum { LATE_TIMES = 16 };

/* Where no solver takes the problem, the first one that is for such problems says why it does not. */
static cairn_status auto_accepts(const crn_task *task, cairn_error *error)
{
    bool is_chain = cairn_problem_kind_of(task->problem) == CAIRN_KIND_CHAIN;
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++)
        if (crn_auto_may_ask(*solver, task))
            return CAIRN_OK;
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++) {
        const cairn_solver_info *info = &(*solver)->info;
        if ((is_chain ? info->takes_chains : info->takes_graphs) &&
            info->minimizes_memory == task->settings->minimize_memory)
            return crn_solver_accepts(*solver, task, error);
    }
    return crn_fail(error, CAIRN_UNSUPPORTED, "no solver takes this problem with these options");
}

static cairn_status auto_open(const crn_task *task, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_auto *session = crn_alloc_zero(&allocator, 1, sizeof(*session));
    *state = session;
    if (!session)
        return crn_no_memory(error);
    for (const crn_solver *const *solver = crn_solvers; *solver; solver++)
        if (crn_auto_may_ask(*solver, task))
            session->candidates[session->count++] =
                (crn_candidate){.solver = *solver, .work = (*solver)->work ? (*solver)->work(task) : 0};
    crn_auto_put_in_order(session, task);
    return CAIRN_OK;
}

static void close_candidate(const crn_task *task, crn_candidate *c)
{
    crn_solver_close(c->solver, task, c->state);
    c->is_open = c->is_wide = false;
    c->state = NULL;
}

static void auto_close(const crn_task *task, void *state)
{
    crn_auto *session = state;
    cairn_allocator allocator = crn_allocator(task->env);
    for (int i = 0; i < session->count; i++)
        close_candidate(task, &session->candidates[i]);
    crn_free(&allocator, session, 1, sizeof(*session));
}

static cairn_status open_candidate(const crn_task *task, crn_candidate *c, cairn_error *error)
{
    if (c->is_open)
        return CAIRN_OK;
    CRN_TRY(crn_solver_open(c->solver, task, &c->state, error));
    c->is_open = true;
    c->is_wide = task->budget_max_bytes == CAIRN_NONE;
    return CAIRN_OK;
}

static bool fits_memory(const crn_task *task, const crn_candidate *c)
{
    return !c->solver->memory || c->solver->memory(task) <= crn_memory_limit(task->settings);
}

/* ---- solving ---- */

/* What is known while the candidates are asked, one after the other. */
typedef struct search {
    const crn_task *task;
    int64_t budget_bytes;
    crn_answer *best;
    cairn_replay replay;  /* of the best */
    cairn_builder *plain; /* the best without transfers, for the last one; NULL = nobody asks for it */
    int64_t plain_ns;
    int64_t bound_ns;
    bool is_bounded;     /* the bound has been asked for */
    int rank;            /* the highest of those that answered for all of their class */
    cairn_status failed; /* why a candidate gave nothing */
    int64_t pool_end_ns; /* until when baselines may take time; CAIRN_NONE = none was asked, or there is no limit */
    int64_t half_end_ns; /* the same of those whose answers another one starts from */
    crn_shared_session shared; /* what that one asks for more budgets */
    char asked[CAIRN_REASON_MAX], left_out[CAIRN_REASON_MAX];
} search;

static void add_name(char list[CAIRN_REASON_MAX], const char *name)
{
    size_t length = strlen(list);
    snprintf(list + length, CAIRN_REASON_MAX - length, "%s%s", length > 0 ? ", " : "", name);
}

static bool is_better(const search *s, const cairn_replay *replay)
{
    if (!s->best->found)
        return true;
    bool by_memory = s->task->settings->minimize_memory;
    int64_t first = by_memory ? replay->peak_bytes - s->replay.peak_bytes : replay->makespan_ns - s->replay.makespan_ns;
    int64_t second =
        by_memory ? replay->makespan_ns - s->replay.makespan_ns : replay->peak_bytes - s->replay.peak_bytes;
    return first < 0 || (first == 0 && second < 0);
}

/* Takes over an answer's operations and checkpoints; the answer gets the old ones, to be freed. */
static void take(search *s, const crn_candidate *c, crn_answer *own, const cairn_replay *replay)
{
    crn_answer old = *s->best;
    own->solver = own->solver ? own->solver : c->solver->info.name;
    *s->best = *own;
    *own = old;
    s->replay = *replay;
}

/* Takes an answer over where it is the best so far. What takes more than 2^63 - 1 ns is none. */
static cairn_status consider(search *s, const crn_candidate *c, crn_answer *own, bool *found, cairn_error *error)
{
    cairn_replay replay;
    s->bound_ns = crn_max(s->bound_ns, own->lower_bound_ns);
    *found = false;
    if (!own->found)
        return CAIRN_OK;
    CRN_TRY(crn_replay(s->task, cairn_builder_ops(own->builder), cairn_builder_count(own->builder), s->budget_bytes,
                       &replay, error));
    if (replay.violation.code == CAIRN_VIOLATION_OVERFLOW)
        return CAIRN_OK;
    if (!replay.valid)
        return crn_fail_at(error, CAIRN_INTERNAL, replay.violation.op, NULL, "%s made a schedule that is not valid: %s",
                           c->solver->info.name, replay.violation.message);
    *found = true;
    if (s->plain && !c->solver->info.needs_machine && replay.makespan_ns < s->plain_ns) {
        CRN_TRY(crn_builder_reserve(s->plain, cairn_builder_count(own->builder), error));
        s->plain_ns = replay.makespan_ns;
        cairn_builder_truncate(s->plain, 0);
        CRN_TRY(
            crn_builder_add_all(s->plain, cairn_builder_ops(own->builder), cairn_builder_count(own->builder), error));
    }
    if (is_better(s, &replay))
        take(s, c, own, &replay);
    return CAIRN_OK;
}

/*
 * Whether a candidate that finds nothing has spoken for its whole class. Where there is room, it has met times that it
 * cannot count; another may be able to.
 */
static cairn_status is_refusal(const search *s, const crn_task *part, const crn_candidate *c, bool *refuses,
                               cairn_error *error)
{
    crn_least least = {CAIRN_NONE, false, CAIRN_NONE, false};
    if (c->solver->least)
        CRN_TRY(c->solver->least(part, c->state, &least, error));
    *refuses = least.bytes == CAIRN_NONE || crn_limit_of(s->budget_bytes) < least.bytes;
    return CAIRN_OK;
}

static cairn_status ask(search *s, const crn_task *part, crn_candidate *c, cairn_error *error)
{
    crn_answer own;
    bool found = false;
    CRN_TRY(crn_answer_init(&own, s->task, error));
    cairn_status status = open_candidate(part, c, error);
    if (status == CAIRN_OK)
        status = c->solver->solve(part, c->state, s->budget_bytes, &own, error);
    bool answers = status == CAIRN_OK && !own.stopped_early && !own.cut_short && c->solver->rank > s->rank;
    bool stopped = s->best->stopped_early || own.stopped_early, cut = s->best->cut_short || own.cut_short;
    if (status == CAIRN_OK)
        status = consider(s, c, &own, &found, error);
    if (status == CAIRN_OK && answers && !found)
        status = is_refusal(s, part, c, &answers, error);
    if (status == CAIRN_OK && answers)
        s->rank = c->solver->rank;
    s->best->stopped_early = stopped;
    s->best->cut_short = cut;
    crn_answer_clear(&own, s->task);
    return status;
}

/* A candidate that fails for want of memory or is stopped does not spoil the answers of the others. */
static cairn_status ask_and_forgive(search *s, const crn_task *part, crn_candidate *c, cairn_error *error)
{
    cairn_status status = ask(s, part, c, error);
    bool lacks_memory = status == CAIRN_NO_MEMORY || status == CAIRN_MEMORY_LIMIT;
    add_name(lacks_memory ? s->left_out : s->asked, c->solver->info.name);
    if (status == CAIRN_CANCELLED)
        s->best->stopped_early = true;
    if (status == CAIRN_CANCELLED || lacks_memory) {
        s->failed = status;
        close_candidate(s->task, c);
        return CAIRN_OK;
    }
    return status;
}

static bool is_settled(const search *s)
{
    return s->best->found && !s->task->settings->minimize_memory && s->replay.makespan_ns <= s->bound_ns;
}

static bool should_stop(const search *s, int asked, int count)
{
    int64_t best_ns = s->best->found ? s->replay.makespan_ns : CAIRN_NONE;
    const cairn_progress progress = {"asking solvers", asked, count, best_ns, s->bound_ns};
    return crn_should_stop(s->task, &progress);
}

static int baselines_left(const crn_auto *session, int i)
{
    int left = 0;
    for (; i < session->count; i++)
        left += crn_is_baseline(session->candidates[i].solver) && !session->candidates[i].solver->is_quick;
    return left;
}

/* When the last one begins: with half of the time; where that is a small part of its work, with what little pays. */
static int64_t begin_of_last(const crn_task *task, const crn_candidate *last)
{
    bool pays = (task->deadline_ns - crn_clock_ns()) / LAST_SHARE > last->work / CRN_CHEAP_SHARE;
    return pays ? crn_task_part(task, LAST_SHARE).deadline_ns : crn_task_but_part(task, REST_SHARE).deadline_ns;
}

/* Whether the last one asks its session for more budgets. */
static bool is_shared(const crn_auto *session, const crn_candidate *c)
{
    const char *lists_of = session->candidates[session->count - 1].solver->lists_of;
    return lists_of && strcmp(lists_of, c->solver->info.name) == 0;
}

/*
 * What is left of the time where another one waits: half, together; but those that will end in time may take what they
 * need. The one whose answers at larger budgets are asked for is opened for those, too, if it will end even so.
 */
static void limit_for_last(const search *s, const crn_auto *session, int i, crn_task *part)
{
    const crn_candidate *c = &session->candidates[i];
    part->deadline_ns = s->half_end_ns;
    if (c->turn == CRN_TURN_SURE)
        part->deadline_ns = crn_task_but_part(s->task, REST_SHARE).deadline_ns;
    if (is_shared(session, c) && c->turn <= CRN_TURN_SURE && c->work < part->deadline_ns - crn_clock_ns())
        part->budget_max_bytes = CAIRN_NONE;
}

/*
 * The task with what this one may have of the time that is left: the baselines their share, the others all of it, but
 * half of what baselines leave, together, where one waits that starts from what others find.
 */
static crn_task part_for(search *s, const crn_auto *session, int i)
{
    const crn_solver *solver = session->candidates[i].solver;
    const crn_candidate *last = &session->candidates[session->count - 1];
    bool waits = last->turn == CRN_TURN_LAST && !last->is_asked && fits_memory(s->task, last);
    crn_task part = *s->task;
    if (session->candidates[i].turn == CRN_TURN_LAST && s->best->found) {
        part.known = s->best->builder;
        part.known_list = s->plain_ns < INT64_MAX && s->plain_ns != s->replay.makespan_ns ? s->plain : NULL;
        part.shared = s->shared.solver ? &s->shared : NULL;
    }
    if (part.deadline_ns == CAIRN_NONE || session->candidates[i].turn == CRN_TURN_LAST)
        return part;
    if (crn_is_baseline(solver)) {
        if (s->pool_end_ns == CAIRN_NONE)
            s->pool_end_ns = crn_baselines_end(s->task);
        return crn_baseline_part(s->task, solver, s->pool_end_ns, crn_max(1, baselines_left(session, i)));
    }
    if (waits && s->half_end_ns == CAIRN_NONE)
        s->half_end_ns = begin_of_last(s->task, last);
    if (waits)
        limit_for_last(s, session, i, &part);
    else if (session->candidates[i].turn == CRN_TURN_SURE)
        part.deadline_ns = crn_task_but_part(s->task, REST_SHARE).deadline_ns;
    return part;
}

/* Whether nobody should wait for a candidate while there is an answer. */
static bool is_dear(const search *s, const crn_candidate *c)
{
    int64_t deadline_ns = s->task->deadline_ns;
    if (deadline_ns == CAIRN_NONE || s->task->settings->minimize_memory)
        return c->work > CRN_WORK_MAX;
    return !c->solver->is_anytime && c->work / LATE_TIMES > crn_max(0, deadline_ns - crn_clock_ns());
}

/* Whether one that uses the time well bounds its answer itself, after it has one. */
static bool bounds_itself(const crn_task *task, const crn_auto *session)
{
    for (int i = 0; task->deadline_ns != CAIRN_NONE && i < session->count; i++)
        if (session->candidates[i].solver->has_own_bound)
            return true;
    return false;
}

/*
 * Asks for the bound, once: with a time limit before anybody is asked, for its part of the time; else when there is an
 * answer, until it is met.
 */
static cairn_status find_bound(search *s, const crn_auto *session, cairn_error *error)
{
    const char *method;
    const crn_task part = crn_task_part(s->task, BOUND_SHARE);
    bool is_time = s->task->deadline_ns != CAIRN_NONE || s->best->found;
    int64_t enough_ns = s->best->found && !s->task->settings->minimize_memory ? s->replay.makespan_ns : INT64_MAX;
    if (s->is_bounded || !is_time || bounds_itself(s->task, session))
        return CAIRN_OK;
    s->is_bounded = true;
    return crn_raise_bound(&part, s->budget_bytes, enough_ns, &s->bound_ns, &method, error);
}

static cairn_status ask_all(search *s, crn_auto *session, bool dear, cairn_error *error)
{
    for (int i = 0; i < session->count && !is_settled(s); i++) {
        crn_candidate *c = &session->candidates[i];
        if (c->is_asked || (is_dear(s, c) && !dear))
            continue;
        bool is_free = c->turn == 0 && crn_task_is_past(s->task); /* then it is asked in any case */
        if (!is_free && should_stop(s, i, session->count)) {
            s->best->stopped_early = true;
            return CAIRN_OK;
        }
        if (crn_candidate_is_covered(c, s->rank))
            continue;
        bool is_late = dear && s->best->found, fits = is_late || fits_memory(s->task, c);
        s->best->cut_short = s->best->cut_short || (!fits && s->task->settings->memory_limit_bytes != CAIRN_NONE);
        if (is_late || !fits) {
            c->is_asked = true;
            add_name(s->left_out, c->solver->info.name);
            continue;
        }
        const crn_task part = part_for(s, session, i);
        c->is_asked = true;
        CRN_TRY(ask_and_forgive(s, &part, c, error));
        if (c->is_wide && is_shared(session, c))
            s->shared = (crn_shared_session){c->solver, c->state};
        CRN_TRY(find_bound(s, session, error));
    }
    return CAIRN_OK;
}

static void explain(const search *s)
{
    char *reason = s->best->reason;
    if (!s->best->found)
        return;
    int length = snprintf(reason, CAIRN_REASON_MAX,
                          is_settled(s) ? "%s meets the lower bound; asked: %s" : "%s is the best of those asked: %s",
                          s->best->solver, s->asked);
    if (s->left_out[0] && length < CAIRN_REASON_MAX)
        snprintf(reason + length, (size_t)(CAIRN_REASON_MAX - length), "; too costly: %s", s->left_out);
}

static cairn_status search_all(search *s, crn_auto *session, cairn_error *error)
{
    for (int i = 0; i < session->count; i++)
        session->candidates[i].is_asked = false;
    if (session->candidates[session->count - 1].turn == CRN_TURN_LAST)
        CRN_TRY(cairn_builder_new(s->task->env, s->task->problem, &s->plain, error));
    s->bound_ns = crn_work_ns(s->task->problem);
    CRN_TRY(find_bound(s, session, error));
    CRN_TRY(ask_all(s, session, false, error));
    return ask_all(s, session, true, error);
}

static cairn_status auto_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                               cairn_error *error)
{
    search s = {.task = task,
                .budget_bytes = budget_bytes,
                .best = answer,
                .plain_ns = INT64_MAX,
                .pool_end_ns = CAIRN_NONE,
                .half_end_ns = CAIRN_NONE};
    cairn_status status = search_all(&s, state, error);
    cairn_builder_free(s.plain);
    CRN_TRY(status);
    if (!answer->found && s.failed != CAIRN_OK && s.failed != CAIRN_CANCELLED)
        return s.failed;
    answer->lower_bound_ns = s.bound_ns;
    explain(&s);
    return CAIRN_OK;
}

const crn_solver crn_auto_solver = {
    .info = {.name = "auto",
             .takes_chains = true,
             .takes_graphs = true,
             .available = true,
             .optimal_in = "",
             .summary = "the best answer of all the others",
             .source = "",
             .cost = "the sum of those that it asks"},
    .options = "slots segments iterations seed objective",
    .accepts = auto_accepts,
    .open = auto_open,
    .close = auto_close,
    .least = crn_auto_least,
    .solve = auto_solve,
};
