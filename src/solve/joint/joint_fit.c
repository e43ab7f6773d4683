#include "solve/joint/joint_fit.h"

#include <string.h>

#include "solve/joint/joint_random.h"

enum { RUIN_MAX = 4, POLL_AFTER = 1 << 22 };

static int32_t random_below(crn_fit *f, int32_t below)
{
    return (int32_t)crn_joint_random_below(&f->random, below);
}

cairn_status crn_fit_new(crn_transfer *transfer, uint64_t seed, crn_fit **fit, cairn_error *error)
{
    crn_arena arena;
    size_t waits = (size_t)transfer->wait_count + 1, events = (size_t)transfer->event_count + 2;
    crn_arena_init(&arena, transfer->arena.allocator);
    crn_fit *f = crn_arena_alloc_zero(&arena, 1, sizeof(*f));
    *fit = NULL;
    bool fits = f && (f->now = crn_arena_alloc_zero(&arena, waits, sizeof(bool))) &&
                (f->best = crn_arena_alloc_zero(&arena, waits, sizeof(bool))) &&
                (f->order = crn_arena_alloc(&arena, waits, sizeof(*f->order))) &&
                (f->over = crn_arena_alloc(&arena, events, sizeof(*f->over))) &&
                (f->away = crn_arena_alloc(&arena, events, sizeof(*f->away))) &&
                (f->over_ns = crn_arena_alloc(&arena, events, sizeof(*f->over_ns)));
    if (!fits) {
        crn_arena_clear(&arena);
        crn_transfer_free(transfer);
        return crn_no_memory(error);
    }
    f->arena = arena;
    f->transfer = transfer;
    f->random = seed * UINT64_C(0x9E3779B97F4A7C15) + UINT64_C(0x2545F4914F6CDD1D);
    f->random |= f->random == 0;
    f->best_ns = f->now_ns = INT64_MAX;
    *fit = f;
    return CAIRN_OK;
}

void crn_fit_free(crn_fit *fit)
{
    if (!fit)
        return;
    crn_transfer_free(fit->transfer);
    crn_arena_clear(&fit->arena);
}

/* Whether to stop, asked after so many more events and waits were looked at. */
static bool is_stopped(crn_fit *f, int64_t looked_at)
{
    f->looked_at += looked_at;
    if (f->looked_at >= POLL_AFTER && !f->stopped) {
        f->looked_at = 0;
        f->stopped = crn_should_stop(f->transfer->task, NULL);
    }
    return f->stopped;
}

/* ---- memory ---- */

static int64_t bytes_of(const crn_fit *f, int32_t w)
{
    return f->transfer->copies[f->transfer->waits[w].copy].bytes;
}

static int64_t host_bytes_of_all(const crn_fit *f)
{
    int64_t sum = 0;
    for (int32_t w = 0; w < f->transfer->wait_count; w++)
        if (!crn_add(sum, bytes_of(f, w), &sum))
            return INT64_MAX;
    return sum;
}

int64_t crn_fit_need(crn_fit *fit)
{
    int64_t most = fit->transfer->start_bytes;
    if (host_bytes_of_all(fit) > fit->transfer->machine->host_bytes)
        return INT64_MAX;
    for (int32_t w = 0; w < fit->transfer->wait_count; w++)
        fit->now[w] = true;
    crn_transfer_levels(fit->transfer, fit->now, fit->over);
    for (int32_t e = 0; e < fit->transfer->event_count; e++)
        most = crn_max(most, fit->over[e]);
    return most;
}

/* over and away of what is offloaded now. */
static void measure(crn_fit *f)
{
    const crn_transfer *t = f->transfer;
    int64_t away = 0;
    crn_transfer_levels(t, f->now, f->over);
    for (int32_t e = 0; e < t->event_count; e++) {
        away = t->events[e].level_bytes - f->over[e];
        f->away[e] = away;
        f->over[e] -= f->budget_bytes;
    }
}

static void change(crn_fit *f, int32_t w, bool offloaded)
{
    const crn_wait *wait = &f->transfer->waits[w];
    int64_t bytes = offloaded ? bytes_of(f, w) : -bytes_of(f, w);
    for (int32_t e = wait->from + 1; e < wait->to; e++) {
        f->over[e] -= bytes;
        f->away[e] += bytes;
    }
    f->now[w] = offloaded;
}

static bool host_takes(const crn_fit *f, int32_t w)
{
    const crn_wait *wait = &f->transfer->waits[w];
    int64_t room = f->transfer->machine->host_bytes - bytes_of(f, w);
    for (int32_t e = wait->from + 1; f->host_is_scarce && e < wait->to; e++)
        if (f->away[e] > room)
            return false;
    return true;
}

static bool may_stay(const crn_fit *f, int32_t w)
{
    const crn_wait *wait = &f->transfer->waits[w];
    int64_t bytes = bytes_of(f, w);
    for (int32_t e = wait->from + 1; e < wait->to; e++)
        if (f->over[e] > -bytes)
            return false;
    return true;
}

/* ---- fit ---- */

static int32_t worst_event(const crn_fit *f)
{
    int32_t worst = 0;
    for (int32_t e = 1; e < f->transfer->event_count; e++)
        if (f->over[e] > f->over[worst])
            worst = e;
    return worst;
}

static void measure_over_ns(crn_fit *f)
{
    const crn_transfer *t = f->transfer;
    f->over_ns[0] = 0;
    for (int32_t e = 0; e < t->event_count; e++)
        f->over_ns[e + 1] = f->over_ns[e] + (f->over[e] > 0 ? 1 + (t->clock_ns[e + 1] - t->clock_ns[e]) : 0);
}

/*
 * What a wait is worth: the bytes that are wanted times the time for which they are, for each nanosecond on the link; less
 * where the wait is shorter than its transfers.
 */
static double worth(const crn_fit *f, int32_t w, int64_t wanted_bytes)
{
    const crn_transfer *t = f->transfer;
    const crn_wait *wait = &t->waits[w];
    bool returns = wait->to < t->event_count;
    double bytes = (double)crn_min(bytes_of(f, w), wanted_bytes);
    double wanted_ns = (double)(f->over_ns[wait->to] - f->over_ns[wait->from + 1]);
    double link_ns = 1 + (double)t->out_ns[w] + (returns ? (double)t->back_ns[w] : 0);
    double window_ns = 1 + (double)(t->clock_ns[wait->to] - t->clock_ns[wait->from + 1]);
    double score = bytes * wanted_ns / link_ns;
    return window_ns < link_ns ? score * window_ns / link_ns : score;
}

/*
 * The best wait across the event that is not offloaded yet, each worth up to `noise` percent more or less; -1 = none,
 * or stopped.
 */
static int32_t choose(crn_fit *f, int32_t e, int noise)
{
    const crn_transfer *t = f->transfer;
    int32_t best = -1;
    double best_worth = -1;
    for (int32_t w = 0; w < t->wait_count; w++) {
        if (f->now[w] || t->waits[w].from >= e || t->waits[w].to <= e)
            continue;
        if (is_stopped(f, f->host_is_scarce ? t->waits[w].to - t->waits[w].from : 1))
            return -1;
        if (!host_takes(f, w))
            continue;
        double value = worth(f, w, f->over[e]);
        if (noise > 0)
            value *= 100 - noise + random_below(f, 2 * noise + 1);
        if (value > best_worth) {
            best_worth = value;
            best = w;
        }
    }
    return best;
}

/* False where nothing that could be offloaded is left, and when stopped. */
static bool fit_all(crn_fit *f, int noise)
{
    for (;;) {
        int32_t e = worst_event(f);
        if (f->transfer->event_count == 0 || f->over[e] <= 0)
            return true;
        f->looked_at += (int64_t)f->transfer->event_count + f->transfer->wait_count;
        measure_over_ns(f);
        int32_t w = choose(f, e, noise);
        if (w < 0)
            return false;
        change(f, w, true);
    }
}

/* Brings back what may stay after all: in random order where noise is wanted, else as the waits are listed. */
static void prune(crn_fit *f, bool shuffled)
{
    int32_t count = 0;
    for (int32_t w = 0; w < f->transfer->wait_count; w++)
        if (f->now[w])
            f->order[count++] = w;
    for (int32_t i = 0; i < count; i++) {
        int32_t place = i + (shuffled ? random_below(f, count - i) : 0), w = f->order[place];
        f->order[place] = f->order[i];
        if (is_stopped(f, f->transfer->waits[w].to - f->transfer->waits[w].from))
            return;
        if (may_stay(f, w))
            change(f, w, false);
    }
}

/* Judges what is offloaded now, and takes it as the best where it is. */
static cairn_status judge(crn_fit *f, cairn_error *error)
{
    f->now_ns = INT64_MAX;
    for (int patient = 0; patient < 2; patient++) {
        int64_t makespan_ns;
        CRN_TRY(crn_transfer_schedule(f->transfer, f->now, f->budget_bytes, patient, NULL, &makespan_ns, error));
        f->now_ns = crn_min(f->now_ns, makespan_ns);
        if (makespan_ns >= f->best_ns)
            continue;
        f->best_ns = makespan_ns;
        f->patient = patient;
        memcpy(f->best, f->now, (size_t)f->transfer->wait_count);
    }
    return CAIRN_OK;
}

static cairn_status fit_once(crn_fit *f, int noise, cairn_error *error)
{
    measure(f);
    if (!fit_all(f, noise))
        return CAIRN_OK;
    prune(f, noise > 0);
    return judge(f, error);
}

/* What is offloaded to begin with, as far as the host has room. */
static void take_first(crn_fit *f, const bool *first)
{
    if (!f->host_is_scarce) {
        memcpy(f->now, first, (size_t)f->transfer->wait_count);
        return;
    }
    measure(f);
    for (int32_t w = 0; w < f->transfer->wait_count && !is_stopped(f, 1); w++)
        if (first[w] && host_takes(f, w))
            change(f, w, true);
}

cairn_status crn_fit_begin(crn_fit *fit, int64_t budget_bytes, const bool *first, cairn_error *error)
{
    size_t count = (size_t)fit->transfer->wait_count;
    int64_t most = fit->transfer->start_bytes;
    for (int32_t e = 0; e < fit->transfer->event_count; e++)
        most = crn_max(most, fit->transfer->events[e].level_bytes);
    fit->budget_bytes = crn_min(budget_bytes, most); /* more changes nothing */
    fit->host_is_scarce = host_bytes_of_all(fit) > fit->transfer->machine->host_bytes;
    fit->best_ns = INT64_MAX;
    memset(fit->now, 0, count);
    if (first)
        take_first(fit, first);
    CRN_TRY(fit_once(fit, 0, error));
    if (fit->best_ns < INT64_MAX || fit->host_is_scarce)
        return CAIRN_OK;
    memset(fit->now, 1, count);
    return fit_once(fit, 0, error);
}

/* ---- improve ---- */

static void ruin(crn_fit *f)
{
    int32_t count = f->transfer->wait_count, changes = 1 + random_below(f, RUIN_MAX);
    for (int32_t i = 0; i < changes; i++) {
        int32_t w = random_below(f, count);
        for (int32_t tries = 0; !f->now[w] && i % 2 == 0 && tries < 8; tries++)
            w = random_below(f, count); /* what is offloaded is more often worth a change */
        if (f->now[w] || host_takes(f, w))
            change(f, w, !f->now[w]);
    }
}

static cairn_status round_once(crn_fit *f, bool *before, cairn_error *error)
{
    size_t count = (size_t)f->transfer->wait_count;
    int64_t before_ns = f->now_ns;
    memcpy(before, f->now, count);
    measure(f);
    ruin(f);
    bool fits = fit_all(f, 30);
    if (fits && random_below(f, 4) > 0)
        prune(f, true);
    f->now_ns = INT64_MAX;
    if (fits)
        CRN_TRY(judge(f, error));
    if (f->now_ns <= before_ns)
        return CAIRN_OK;
    memcpy(f->now, before, count);
    f->now_ns = before_ns;
    return CAIRN_OK;
}

cairn_status crn_fit_improve(crn_fit *fit, int64_t rounds, int64_t stop_ns, cairn_error *error)
{
    size_t count = (size_t)fit->transfer->wait_count;
    cairn_status status = CAIRN_OK;
    if (count == 0 || fit->best_ns == INT64_MAX)
        return CAIRN_OK;
    bool *before = crn_alloc(&fit->arena.allocator, count, sizeof(*before));
    if (!before)
        return crn_no_memory(error);
    memcpy(fit->now, fit->best, count);
    fit->now_ns = fit->best_ns;
    for (int64_t i = 0; status == CAIRN_OK && i < rounds && fit->best_ns > stop_ns; i++)
        status = round_once(fit, before, error);
    crn_free(&fit->arena.allocator, before, count, sizeof(*before));
    return status;
}

cairn_status crn_fit_emit(crn_fit *fit, cairn_builder *builder, cairn_error *error)
{
    int64_t makespan_ns;
    return crn_transfer_schedule(fit->transfer, fit->best, fit->budget_bytes, fit->patient, builder, &makespan_ns,
                                 error);
}
