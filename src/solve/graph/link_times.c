#include "solve/graph/link_times.h"

#include <string.h>

crn_link_times *crn_link_times_new(crn_arena *arena, int32_t capacity)
{
    size_t events = (size_t)capacity + 2;
    crn_link_times *times = crn_arena_alloc_zero(arena, 1, sizeof(*times));
    bool made = times && (times->first = crn_arena_alloc(arena, events, sizeof(*times->first))) &&
                (times->next = crn_arena_alloc(arena, events, sizeof(*times->next))) &&
                (times->lists = crn_arena_alloc(arena, events, sizeof(*times->lists))) &&
                (times->left = crn_arena_alloc(arena, events, sizeof(*times->left))) &&
                (times->begin = crn_arena_alloc(arena, events, sizeof(*times->begin))) &&
                (times->clock_ns = crn_arena_alloc(arena, events, sizeof(*times->clock_ns))) &&
                (times->out_ns = crn_arena_alloc(arena, events, sizeof(*times->out_ns))) &&
                (times->on_host = crn_arena_alloc(arena, events, sizeof(*times->on_host))) &&
                (times->back_ns = crn_arena_alloc(arena, events, sizeof(*times->back_ns)));
    return made ? times : NULL;
}

void crn_link_times_begin(crn_link_times *times, int32_t count)
{
    memset(times->first, 0xff, (size_t)count * sizeof(*times->first));
}

/* ---- lists of fetches by an event ---- */

static void clear_lists(crn_link_times *times, int32_t count)
{
    memset(times->lists, 0xff, ((size_t)count + 1) * sizeof(*times->lists));
}

static void enlist(crn_link_times *times, int32_t at, int32_t fetch)
{
    times->next[fetch] = times->lists[at];
    times->lists[at] = fetch;
}

/* ---- time ---- */

static void measure(const crn_graph_model *model, crn_link_times *times, const crn_sequence *sequence)
{
    times->clock_ns[0] = 0;
    for (int32_t e = 0; e < sequence->count; e++) {
        bool fetches = crn_event_is_fetch(model, sequence->node[e]);
        times->clock_ns[e + 1] = crn_add_saturating(times->clock_ns[e], fetches ? 0 : model->cost[sequence->node[e]]);
    }
}

/* The first of the events from..to that begins at a time or later; `to` where none before it does. */
static int32_t event_at(const crn_link_times *times, int64_t ns, int32_t from, int32_t to)
{
    while (from < to) {
        int32_t middle = from + (to - from) / 2;
        if (times->clock_ns[middle] < ns)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* The event from..to - 1 in which a transfer begins that ends at event `to` at the latest. */
static int32_t event_before(const crn_link_times *times, int64_t ns, int32_t from, int32_t to)
{
    return (int32_t)crn_max(from, event_at(times, ns < INT64_MAX ? ns + 1 : ns, from, to) - 1);
}

/* ---- placing ---- */

static void place_offloads(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    const crn_graph_model *model = eval->model;
    crn_link_times *times = eval->times;
    int64_t done_ns = 0;
    clear_lists(times, sequence->count);
    for (int32_t e = sequence->count - 1; e >= 0; e--)
        if (crn_event_is_fetch(model, sequence->node[e]))
            enlist(times, eval->last[eval->previous[e]], e);
    for (int32_t u = 0; u < sequence->count; u++) {
        for (int32_t e = times->lists[u]; e >= 0; e = times->next[e]) {
            times->left[e] = u + 1;
            if (crn_event_is_fetch(model, sequence->node[eval->previous[e]]))
                continue; /* it is on the host still */
            int64_t begin_ns = crn_max(done_ns, times->clock_ns[u + 1]);
            done_ns = crn_add_saturating(begin_ns, model->link->out_ns[crn_event_node(model, sequence->node[e])]);
            eval->last[eval->previous[e]] = event_at(times, done_ns, u + 1, e) - 1;
        }
        times->out_ns[u] = done_ns;
    }
}

static void place_fetches(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    const crn_graph_model *model = eval->model;
    crn_link_times *times = eval->times;
    int64_t free_ns = INT64_MAX;
    clear_lists(times, sequence->count);
    for (int32_t e = 0; e < sequence->count; e++)
        if (crn_event_is_fetch(model, sequence->node[e]))
            enlist(times, times->first[e] < 0 ? e : times->first[e], e);
    for (int32_t q = sequence->count - 1; q >= 0; q--) {
        for (int32_t e = times->lists[q]; e >= 0; e = times->next[e]) {
            int64_t end_ns = crn_min(free_ns, times->clock_ns[q]);
            free_ns = crn_max(-1, end_ns - model->link->back_ns[crn_event_node(model, sequence->node[e])]);
            times->begin[e] = event_before(times, free_ns, eval->last[eval->previous[e]] + 1, q);
        }
        times->back_ns[q] = free_ns;
    }
}

/* ---- the host ---- */

static bool host_is_scarce(const crn_graph_model *model)
{
    return model->link->host_bytes < INT64_MAX;
}

/* From which event on the copy that is fetched is on the host: since it was offloaded, or last fetched and read. */
static int32_t host_begin(const crn_sequence_eval *eval, const crn_sequence *sequence, int32_t e)
{
    int32_t before = eval->previous[e];
    while (crn_event_is_fetch(eval->model, sequence->node[before]) && eval->times->first[before] < 0) {
        e = before;
        before = eval->previous[e];
    }
    return crn_event_is_fetch(eval->model, sequence->node[before]) ? eval->times->first[before] : eval->times->left[e];
}

static void measure_host(const crn_sequence_eval *eval, const crn_sequence *sequence)
{
    const crn_link_times *times = eval->times;
    memset(times->on_host, 0, ((size_t)sequence->count + 1) * sizeof(*times->on_host));
    for (int32_t e = 0; e < sequence->count; e++) {
        if (!crn_event_is_fetch(eval->model, sequence->node[e]) || times->first[e] < 0)
            continue;
        int64_t bytes = eval->model->bytes[crn_event_node(eval->model, sequence->node[e])];
        times->on_host[host_begin(eval, sequence, e)] += bytes;
        times->on_host[times->first[e]] -= bytes;
    }
    for (int32_t e = 0; e < sequence->count; e++)
        times->on_host[e + 1] += times->on_host[e];
}

static bool host_has_room(const crn_sequence_eval *eval, int32_t from, int32_t to, int64_t bytes)
{
    if (!host_is_scarce(eval->model))
        return true;
    for (int32_t e = from; e < to; e++)
        if (eval->times->on_host[e] > eval->model->link->host_bytes - bytes)
            return false;
    return true;
}

/* ---- all ---- */

void crn_link_times_place(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    measure(eval->model, eval->times, sequence);
    place_offloads(eval, sequence);
    place_fetches(eval, sequence);
    if (host_is_scarce(eval->model))
        measure_host(eval, sequence);
}

void crn_link_times_levels(crn_sequence_eval *eval, const crn_sequence *sequence)
{
    for (int32_t e = 0; e < sequence->count; e++) {
        if (!crn_event_is_fetch(eval->model, sequence->node[e]))
            continue;
        int64_t bytes = eval->model->bytes[crn_event_node(eval->model, sequence->node[e])];
        eval->freed[eval->times->begin[e]] -= bytes;
        eval->freed[e] += bytes;
    }
}

bool crn_link_times_away(const crn_sequence_eval *eval, int32_t storage, int32_t last, int32_t next, int32_t *from,
                         int32_t *to)
{
    const crn_link_times *times = eval->times;
    const crn_graph_link *link = eval->model->link;
    if (!link || link->price_ns[storage] == CAIRN_NONE)
        return false;
    int64_t out_ns = crn_max(times->out_ns[last], times->clock_ns[last + 1]);
    int64_t back_ns = crn_min(times->back_ns[next], times->clock_ns[next]) - link->back_ns[storage];
    *from = event_at(times, crn_add_saturating(out_ns, link->out_ns[storage]), last + 1, next);
    *to = event_before(times, back_ns, last + 1, next);
    return *from < *to && host_has_room(eval, last + 1, next, eval->model->bytes[storage]);
}
