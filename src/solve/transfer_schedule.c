/*
 * Placing transfers in time (transfer.h): first backwards, to find how late each prefetch may go, then forwards, merging
 * computations and transfers by their earliest start under the simulator's rules (docs/reference/formats/schedule.md).
 */
#include <string.h>

#include "solve/transfer.h"

#define NEVER INT64_MAX

/* Of a wait. AWAY: the copy has been dropped from the device; BACK: its prefetch was issued, or it never left. */
enum { STAYS, PLANNED, AWAY, BACK };

/* ---- which transfers, in which order ---- */

static bool returns(const crn_transfer *t, int32_t w)
{
    return t->waits[w].to < t->event_count;
}

/* Waits stand in the order of the events that they wait for, which is that of the prefetches. */
static void make_queues(crn_transfer *t, const bool *offloaded, int32_t *out_count, int32_t *back_count)
{
    *out_count = *back_count = 0;
    for (int32_t w = 0; w < t->wait_count; w++) {
        t->state[w] = offloaded[w] ? PLANNED : STAYS;
        if (offloaded[w] && returns(t, w))
            t->back_queue[(*back_count)++] = w;
        if (offloaded[t->by_from[w]])
            t->out_queue[(*out_count)++] = t->by_from[w];
    }
}

/* ---- backwards ---- */

/* Backwards in time, from the end of the schedule: what has been taken off the device, and when. */
typedef struct rewind {
    crn_transfer *t;
    int64_t budget_bytes, used_bytes;
    int64_t now_ns, link_ns;
    int32_t placed, freed,
        next;        /* of back_queue, from its end: those whose place is known, whose bytes are free, not yet begun */
    int64_t *end_ns; /* of a wait: when, backwards, its prefetch has left the device */
} rewind;

/* What must be on the device again when the event, seen backwards, begins. */
static int64_t rewound_bytes(const rewind *r, int32_t e, const bool *offloaded, int64_t *since_ns)
{
    const crn_transfer *t = r->t;
    int64_t bytes = crn_max(0, t->events[e].reserve_bytes - t->events[e].grow_bytes);
    for (int32_t c = t->events[e].dropped; c != CRN_NO_COPY; c = t->copies[c].next_dropped)
        bytes += t->copies[c].bytes;
    for (int32_t i = t->from_begin[e]; i < t->from_begin[e + 1]; i++) {
        int32_t w = t->by_from[i];
        if (!offloaded[w])
            continue;
        bytes += t->copies[t->waits[w].copy].bytes;
        if (returns(t, w))
            *since_ns = crn_max(*since_ns, r->end_ns[w]);
    }
    return bytes;
}

/* Waits until bytes are free; false when they never are. */
static bool rewind_wait(rewind *r, int64_t bytes, int64_t *start_ns)
{
    crn_transfer *t = r->t;
    while (r->freed > r->next) {
        int32_t w = t->back_queue[r->freed - 1];
        bool fits = bytes <= r->budget_bytes - r->used_bytes;
        if (fits && r->end_ns[w] > *start_ns)
            break;
        *start_ns = crn_max(*start_ns, r->end_ns[w]);
        r->used_bytes -= t->copies[t->waits[w].copy].bytes;
        r->freed--;
    }
    return bytes <= r->budget_bytes - r->used_bytes;
}

/* The event is done, backwards: what waits for it may leave; prefetches that end by now have found their place. */
static void rewind_past(rewind *r, int32_t e)
{
    crn_transfer *t = r->t;
    while (r->next > 0 && t->waits[t->back_queue[r->next - 1]].to == e) {
        int32_t w = t->back_queue[--r->next];
        r->link_ns = crn_add_saturating(crn_max(r->link_ns, r->now_ns), t->back_ns[w]);
        r->end_ns[w] = r->link_ns;
    }
    while (r->placed > r->next && r->end_ns[t->back_queue[r->placed - 1]] <= r->now_ns) {
        int32_t w = t->back_queue[--r->placed];
        t->release_at[w] = (int32_t)crn_min(e + 1, t->waits[w].to);
    }
}

/* Finds release_at of every wait that returns. False when an event does not fit even with all of them away. */
static bool place_prefetches(crn_transfer *t, const bool *offloaded, int32_t back_count, int64_t budget_bytes)
{
    rewind r = {.t = t,
                .budget_bytes = budget_bytes,
                .used_bytes = t->end_bytes,
                .placed = back_count,
                .freed = back_count,
                .next = back_count,
                .end_ns = t->left_ns};
    for (int32_t i = t->wait_count - 1; i >= 0 && !returns(t, i); i--)
        r.used_bytes -= offloaded[i] ? t->copies[t->waits[i].copy].bytes : 0;
    for (int32_t e = t->event_count - 1; e >= 0; e--) {
        int64_t start_ns = r.now_ns, bytes = rewound_bytes(&r, e, offloaded, &start_ns);
        if (!rewind_wait(&r, bytes, &start_ns))
            return false;
        r.used_bytes += bytes - crn_max(0, t->events[e].reserve_bytes - t->events[e].grow_bytes);
        r.used_bytes -= t->events[e].grow_bytes;
        r.now_ns = crn_add_saturating(start_ns, t->events[e].ns);
        rewind_past(&r, e);
    }
    while (r.placed > 0)
        t->release_at[t->back_queue[--r.placed]] = 0;
    return true;
}

/* ---- forwards: the state of the simulator ---- */

typedef struct lane_end {
    int64_t end_ns;
    int64_t device_bytes, host_bytes; /* that come back then */
} lane_end;

typedef struct playing {
    crn_transfer *t;
    lane_end lanes[CAIRN_LANE_COUNT];
    int64_t device_bytes, host_bytes, budget_bytes;
    int64_t now_ns, makespan_ns;
    int32_t event; /* the next one */
    int32_t out, out_count, back, back_count;
    const bool *offloaded;
    bool patient; /* a prefetch lets a computation go first that it would hold up */
    bool failed;  /* overflow */
    cairn_builder *builder;
    cairn_status status;
    cairn_error *error;
} playing;

static lane_end *lane_of(playing *p, cairn_lane lane)
{
    bool shared = lane == CAIRN_LANE_TO_DEVICE && p->t->machine->shared_link;
    return &p->lanes[shared ? CAIRN_LANE_TO_HOST : lane];
}

static void settle(playing *p, int64_t time_ns)
{
    for (int i = 0; i < CAIRN_LANE_COUNT; i++) {
        lane_end *lane = &p->lanes[i];
        if (lane->end_ns > time_ns)
            continue;
        p->device_bytes -= lane->device_bytes;
        p->host_bytes -= lane->host_bytes;
        lane->device_bytes = lane->host_bytes = 0;
    }
}

/* The earliest time from start on at which bytes are free, with what has been issued; NEVER when there is none. */
static int64_t when_free(const playing *p, bool on_host, int64_t bytes, int64_t start_ns)
{
    int64_t limit = on_host ? p->t->machine->host_bytes : p->budget_bytes;
    int64_t needed = bytes - limit + (on_host ? p->host_bytes : p->device_bytes);
    bool counted[CAIRN_LANE_COUNT] = {false};
    for (int i = 0; i < CAIRN_LANE_COUNT; i++)
        if (p->lanes[i].end_ns <= start_ns) {
            needed -= on_host ? p->lanes[i].host_bytes : p->lanes[i].device_bytes;
            counted[i] = true;
        }
    while (needed > 0) {
        int first = -1;
        for (int i = 0; i < CAIRN_LANE_COUNT; i++)
            if (!counted[i] && (first < 0 || p->lanes[i].end_ns < p->lanes[first].end_ns))
                first = i;
        if (first < 0)
            return NEVER;
        counted[first] = true;
        needed -= on_host ? p->lanes[first].host_bytes : p->lanes[first].device_bytes;
        start_ns = crn_max(start_ns, p->lanes[first].end_ns);
    }
    return start_ns;
}

/* Memory comes back when the last reader or writer of the copy has ended. */
static void give_back(playing *p, bool on_host, int64_t bytes, int64_t busy_ns)
{
    if (busy_ns <= p->now_ns) {
        p->device_bytes -= on_host ? 0 : bytes;
        p->host_bytes -= on_host ? bytes : 0;
        return;
    }
    int i = 0; /* whatever ends after now is the latest of its lane */
    while (i < CAIRN_LANE_COUNT - 1 && p->lanes[i].end_ns != busy_ns)
        i++;
    p->lanes[i].device_bytes += on_host ? 0 : bytes;
    p->lanes[i].host_bytes += on_host ? bytes : 0;
}

static void emit(playing *p, cairn_op_code code, cairn_op value)
{
    if (!p->builder || p->status != CAIRN_OK)
        return;
    value.code = (uint8_t)code;
    p->status = cairn_builder_add(p->builder, value, p->error);
}

/* Takes a lane from start on; false on overflow. */
static bool occupy(playing *p, cairn_lane lane, int64_t start_ns, int64_t ns, int64_t *end_ns)
{
    settle(p, start_ns);
    p->failed |= start_ns == NEVER || !crn_add(start_ns, ns, end_ns);
    if (p->failed)
        return false;
    p->now_ns = start_ns;
    p->makespan_ns = crn_max(p->makespan_ns, *end_ns);
    lane_of(p, lane)->end_ns = *end_ns;
    return true;
}

/* ---- releases ---- */

/* Whether the copy's storage has this alias at an event, before which offloaded waits have broken it off. */
static bool has_alias(const playing *p, int32_t copy, const crn_alias *alias, int32_t event)
{
    const crn_transfer *t = p->t;
    if (alias->created > event)
        return false;
    for (int32_t w = t->copies[copy].first_wait; w != CRN_NO_COPY && t->waits[w].to <= event; w = t->next_wait[w])
        if (t->state[w] == BACK && p->offloaded[w] && t->waits[w].from >= alias->created &&
            alias->last_read < t->waits[w].to)
            return false;
    return true;
}

static void emit_drops(playing *p, int32_t copy, int32_t event)
{
    const crn_transfer *t = p->t;
    if (!p->builder)
        return;
    emit(p, CAIRN_OP_DROP, t->copies[copy].value);
    for (int32_t a = t->copies[copy].first_alias; a != CRN_NO_COPY; a = t->aliases[a].next)
        if (has_alias(p, copy, &t->aliases[a], event))
            emit(p, CAIRN_OP_DROP, (cairn_op){.index = t->aliases[a].node});
}

static void drop(playing *p, int32_t copy, int32_t event)
{
    emit_drops(p, copy, event);
    give_back(p, false, p->t->copies[copy].bytes, p->t->busy_ns[copy]);
}

/* ---- the three things that can be next ---- */

/* Waits for the next event that never left stay; the copies of the others must be on their way. */
static bool is_event_held_up(playing *p)
{
    crn_transfer *t = p->t;
    for (; p->back < p->back_count; p->back++) {
        int32_t w = t->back_queue[p->back];
        if (t->waits[w].to > p->event)
            return false;
        if (t->state[w] == AWAY)
            return true;
        t->state[w] = STAYS;
    }
    return false;
}

static int64_t event_start(playing *p)
{
    const crn_transfer *t = p->t;
    const crn_event *event = &t->events[p->event];
    int64_t start_ns = crn_max(p->now_ns, p->lanes[CAIRN_LANE_COMPUTE].end_ns);
    if (is_event_held_up(p))
        return NEVER;
    for (int32_t i = 0; i < event->read_count; i++) {
        int32_t c = t->reads[event->first_read + i];
        bool goes = t->copies[c].removed && t->copies[c].end == p->event;
        start_ns = crn_max(start_ns, goes ? t->busy_ns[c] : t->ready_ns[c]);
    }
    return when_free(p, false, event->reserve_bytes, start_ns);
}

static int64_t offload_start(playing *p)
{
    crn_transfer *t = p->t;
    for (; p->out < p->out_count; p->out++) {
        int32_t w = t->out_queue[p->out];
        if (t->state[w] == PLANNED && !t->on_host[t->waits[w].copy])
            break;
    }
    if (p->out == p->out_count)
        return NEVER;
    int32_t copy = t->waits[t->out_queue[p->out]].copy;
    if (t->copies[copy].birth >= p->event)
        return NEVER;
    int64_t start_ns = crn_max(crn_max(p->now_ns, p->lanes[CAIRN_LANE_TO_HOST].end_ns), t->ready_ns[copy]);
    return when_free(p, true, t->copies[copy].bytes, start_ns);
}

static int64_t prefetch_start(playing *p)
{
    const crn_transfer *t = p->t;
    if (p->back == p->back_count)
        return NEVER;
    int32_t w = t->back_queue[p->back], copy = t->waits[w].copy;
    if (t->state[w] != AWAY || p->event < t->release_at[w])
        return NEVER;
    int64_t start_ns = crn_max(crn_max(p->now_ns, lane_of(p, CAIRN_LANE_TO_DEVICE)->end_ns), t->host_ready_ns[copy]);
    return when_free(p, false, t->copies[copy].bytes, start_ns);
}

static void leave(playing *p, int32_t w)
{
    p->t->state[w] = AWAY;
    drop(p, p->t->waits[w].copy, p->event - 1);
}

/* Waits that begin after the event, whose copy is on the host already, begin there. */
static void leave_after(playing *p, int32_t e)
{
    const crn_transfer *t = p->t;
    for (int32_t i = t->from_begin[e]; i < t->from_begin[e + 1]; i++) {
        int32_t w = t->by_from[i];
        if (t->state[w] == PLANNED && t->on_host[t->waits[w].copy])
            leave(p, w);
    }
}

static void play_offload(playing *p, int64_t start_ns)
{
    crn_transfer *t = p->t;
    int32_t w = t->out_queue[p->out++], copy = t->waits[w].copy;
    int64_t end_ns;
    if (!occupy(p, CAIRN_LANE_TO_HOST, start_ns, t->out_ns[w], &end_ns))
        return;
    p->host_bytes += t->copies[copy].bytes;
    t->on_host[copy] = true;
    t->host_ready_ns[copy] = t->host_busy_ns[copy] = end_ns;
    t->busy_ns[copy] = crn_max(t->busy_ns[copy], end_ns);
    emit(p, CAIRN_OP_OFFLOAD, t->copies[copy].value);
    if (t->waits[w].from < p->event)
        leave(p, w);
}

/* Whether the copy is offloaded again: then its host copy stays. */
static bool offloaded_again(const playing *p, int32_t w)
{
    const crn_transfer *t = p->t;
    while ((w = t->next_wait[w]) != CRN_NO_COPY)
        if (t->state[w] == PLANNED)
            return true;
    return false;
}

static void play_prefetch(playing *p, int64_t start_ns)
{
    crn_transfer *t = p->t;
    int32_t w = t->back_queue[p->back++], copy = t->waits[w].copy;
    int64_t end_ns;
    if (!occupy(p, CAIRN_LANE_TO_DEVICE, start_ns, t->back_ns[w], &end_ns))
        return;
    p->device_bytes += t->copies[copy].bytes;
    t->state[w] = BACK;
    t->ready_ns[copy] = t->busy_ns[copy] = end_ns;
    t->host_busy_ns[copy] = crn_max(t->host_busy_ns[copy], end_ns);
    emit(p, CAIRN_OP_PREFETCH, t->copies[copy].value);
    if (offloaded_again(p, w))
        return;
    t->on_host[copy] = false;
    emit(p, CAIRN_OP_DISCARD, t->copies[copy].value);
    give_back(p, true, t->copies[copy].bytes, t->host_busy_ns[copy]);
}

/* The next alias, in the order in which they were made, that the wait broke off and that is read after it. */
static int32_t next_alias(const crn_transfer *t, const crn_wait *wait, int32_t after)
{
    int32_t next = CRN_NO_COPY;
    for (int32_t a = t->copies[wait->copy].first_alias; a > after; a = t->aliases[a].next)
        if (t->aliases[a].created <= wait->from && t->aliases[a].last_read >= wait->to)
            next = a;
    return next;
}

/* What has come back for the event needs its aliases again. */
static void play_aliases(playing *p)
{
    crn_transfer *t = p->t;
    int64_t end_ns;
    for (int32_t i = p->back - 1; i >= 0 && t->waits[t->back_queue[i]].to >= p->event; i--) {
        const crn_wait *wait = &t->waits[t->back_queue[i]];
        if (wait->to > p->event || t->state[t->back_queue[i]] != BACK)
            continue;
        for (int32_t a = next_alias(t, wait, -1); a != CRN_NO_COPY; a = next_alias(t, wait, a)) {
            int64_t start_ns =
                crn_max(crn_max(p->now_ns, p->lanes[CAIRN_LANE_COMPUTE].end_ns), t->ready_ns[wait->copy]);
            if (!occupy(p, CAIRN_LANE_COMPUTE, start_ns, t->aliases[a].ns, &end_ns))
                return;
            t->busy_ns[wait->copy] = crn_max(t->busy_ns[wait->copy], end_ns);
            emit(p, CAIRN_OP_COMPUTE, (cairn_op){.index = t->aliases[a].node});
        }
    }
}

static void play_event(playing *p)
{
    crn_transfer *t = p->t;
    const crn_event *event = &t->events[p->event];
    int64_t end_ns;
    play_aliases(p);
    int64_t start_ns = event_start(p);
    if (!occupy(p, CAIRN_LANE_COMPUTE, start_ns, event->ns, &end_ns))
        return;
    p->device_bytes += event->reserve_bytes;
    p->lanes[CAIRN_LANE_COMPUTE].device_bytes = event->reserve_bytes - event->grow_bytes;
    for (int32_t i = 0; i < event->read_count; i++)
        t->busy_ns[t->reads[event->first_read + i]] = crn_max(t->busy_ns[t->reads[event->first_read + i]], end_ns);
    if (event->added != CRN_NO_COPY)
        t->ready_ns[event->added] = t->busy_ns[event->added] = end_ns;
    emit(p, (cairn_op_code)event->op.code, event->op);
    p->event++;
    leave_after(p, p->event - 1);
    for (int32_t c = event->dropped; c != CRN_NO_COPY; c = t->copies[c].next_dropped)
        drop(p, c, p->event - 1);
}

/* Whether the event would start later if the prefetch began before it. */
static bool holds_up(playing *p, int64_t prefetch_ns, int64_t event_ns)
{
    const crn_transfer *t = p->t;
    int64_t bytes = t->copies[t->waits[t->back_queue[p->back]].copy].bytes;
    if (event_ns == NEVER)
        return false;
    p->device_bytes += bytes;
    int64_t then_ns = event_start(p);
    p->device_bytes -= bytes;
    return crn_max(then_ns, prefetch_ns) > event_ns;
}

/* Issues what can start first; false when nothing can. */
static bool play_next(playing *p)
{
    int64_t event_ns = event_start(p), out_ns = offload_start(p), back_ns = prefetch_start(p);
    if (back_ns != NEVER && p->patient && holds_up(p, back_ns, event_ns))
        back_ns = NEVER;
    if (event_ns == NEVER && out_ns == NEVER && back_ns == NEVER)
        return false;
    if (out_ns <= event_ns && out_ns <= back_ns)
        play_offload(p, out_ns);
    else if (back_ns <= event_ns)
        play_prefetch(p, back_ns);
    else
        play_event(p);
    return !p->failed && p->status == CAIRN_OK;
}

static void play(playing *p)
{
    crn_transfer *t = p->t;
    for (int32_t c = 0; c < t->copy_count; c++) {
        t->on_host[c] = false;
        t->ready_ns[c] = t->busy_ns[c] = 0;
    }
    while (p->event < t->event_count && play_next(p))
        ;
    p->failed |= p->event < t->event_count;
}

cairn_status crn_transfer_schedule(crn_transfer *transfer, const bool *offloaded, int64_t budget_bytes, bool patient,
                                   cairn_builder *builder, int64_t *makespan_ns, cairn_error *error)
{
    playing p = {.t = transfer,
                 .device_bytes = transfer->start_bytes,
                 .budget_bytes = budget_bytes,
                 .offloaded = offloaded,
                 .patient = patient,
                 .builder = builder,
                 .error = error};
    *makespan_ns = NEVER;
    if (transfer->start_bytes > budget_bytes)
        return CAIRN_OK;
    make_queues(transfer, offloaded, &p.out_count, &p.back_count);
    if (!place_prefetches(transfer, offloaded, p.back_count, budget_bytes))
        return CAIRN_OK;
    play(&p);
    if (!p.failed && p.status == CAIRN_OK)
        *makespan_ns = p.makespan_ns;
    return p.status;
}
