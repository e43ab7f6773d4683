/*
 * Repair: while an event does not fit, an instance that waits across it for its next reader is recomputed just before that
 * reader instead, or fetched from the host.
 */
#include <math.h>
#include <string.h>

#include "solve/graph/improver.h"
#include "solve/graph/link_times.h"

enum { REPAIRS_MAX = 400, CANDIDATES_MAX = 1024 };

void crn_improver_find_waits(crn_improver *im, int32_t p)
{
    const crn_graph_model *model = im->model;
    const crn_sequence *s = &im->trial;
    for (int32_t e = 0; e < s->count; e++) {
        int32_t event = s->node[e], v = crn_event_node(model, event);
        for (int32_t i = crn_event_reads(model, event); i < crn_event_reads_end(model, event); i++) {
            int32_t instance = im->newest[model->root[model->dep[i]]];
            if (e <= p)
                im->before[instance] = e;
            else if (im->after[instance] < 0)
                im->after[instance] = e;
        }
        if (model->root[v] == v) {
            im->newest[v] = e;
            im->before[e] = e;
            im->after[e] = -1;
        }
    }
}

/* The instance of storage s that an event inserted before q would read. */
static int32_t instance_before(const crn_improver *im, int32_t s, int32_t q)
{
    int32_t instance = im->newest[s];
    while (instance >= q)
        instance = im->eval.previous[instance];
    return instance;
}

static bool can_be_fetched(const crn_graph_model *model, int32_t s)
{
    return model->link && model->link->price_ns[s] != CAIRN_NONE;
}

static bool comes_back(const crn_graph_model *model, int32_t s)
{
    return !model->once[s] || can_be_fetched(model, s);
}

/* Ancestors have smaller indices. */
static void sort_events(const crn_graph_model *model, int32_t *list, int32_t count)
{
    for (int32_t k = 1; k < count; k++)
        for (int32_t j = k; j > 0 && crn_event_node(model, list[j]) < crn_event_node(model, list[j - 1]); j--) {
            int32_t swap = list[j];
            list[j] = list[j - 1];
            list[j - 1] = swap;
        }
}

/* What brings back an ancestor that is gone before event q: recomputing or fetching it; -1 = neither, so it stays. */
static int32_t event_of_ancestor(const crn_improver *im, int32_t d, int32_t last, int32_t q)
{
    const crn_graph_model *model = im->model;
    int32_t from, to;
    bool has_time = crn_link_times_away(&im->eval, d, last, q, &from, &to);
    if (has_time && (model->once[d] || model->link->price_ns[d] <= model->cost[d]))
        return d + model->node_count;
    return model->once[d] ? -1 : d;
}

int32_t crn_improver_closure(crn_improver *im, int32_t s, int32_t q, int32_t list[CRN_IMPROVER_CLOSURE_MAX],
                             int64_t *cost)
{
    const crn_graph_model *model = im->model;
    int32_t count = 0;
    *cost = 0;
    if (im->marker == INT32_MAX) {
        memset(im->mark, 0, (size_t)model->node_count * sizeof(*im->mark));
        im->marker = 0;
    }
    im->marker++;
    list[count++] = s;
    im->mark[s] = im->marker;
    for (int32_t k = 0; k < count; k++) {
        int32_t v = list[k];
        *cost = crn_add_saturating(*cost, crn_event_cost(model, v));
        for (int32_t i = crn_event_reads(model, v); i < crn_event_reads_end(model, v); i++) {
            int32_t d = model->root[model->dep[i]], last = im->eval.last[instance_before(im, d, q)];
            if (im->mark[d] == im->marker || last >= q || model->keep[d])
                continue;
            im->mark[d] = im->marker;
            if (crn_improver_has_room(im, last + 1, q, model->bytes[d]))
                continue;
            int32_t event = event_of_ancestor(im, d, last, q);
            if (event < 0)
                continue;
            if (count == CRN_IMPROVER_CLOSURE_MAX)
                return 0;
            list[count++] = event;
        }
    }
    sort_events(model, list, count);
    return count;
}

static int32_t count_shortages(crn_improver *im)
{
    int32_t count = 0, worst = -1;
    for (int32_t e = 0; e < im->trial.count; e++) {
        im->short_count[e] = count;
        if (im->eval.level[e] <= im->budget_bytes)
            continue;
        count++;
        if (worst < 0 || im->eval.level[e] > im->eval.level[worst])
            worst = e;
    }
    im->short_count[im->trial.count] = count;
    return worst;
}

static bool waits_across(const crn_improver *im, int32_t e, int32_t p)
{
    const crn_graph_model *model = im->model;
    int32_t s = crn_improver_node(im, e);
    return im->eval.last[e] > p && im->before[e] < p && im->after[e] >= 0 && !model->keep[s] && comes_back(model, s) &&
           model->bytes[s] > 0 && s != im->spared;
}

int32_t crn_improver_list_waiting(crn_improver *im, int32_t p)
{
    int32_t count = 0;
    crn_improver_find_waits(im, p);
    for (int32_t e = 0; e < p; e++)
        if (waits_across(im, e, p))
            im->waiting[count++] = e;
    if (count <= CANDIDATES_MAX)
        return count;
    int32_t stride = count / CANDIDATES_MAX, first = crn_improver_draw(im, stride);
    for (int32_t i = 0; i < CANDIDATES_MAX; i++)
        im->waiting[i] = im->waiting[first + i * stride];
    return CANDIDATES_MAX;
}

/* How an event is relieved: what is inserted, where, and what that costs for the memory that it frees. */
typedef struct relief {
    double price;
    int32_t at, count;
    int32_t events[CRN_IMPROVER_CLOSURE_MAX];
} relief;

/* Of bytes that are wanted, those of storage s, for the events from..to - 1 that do not fit. */
static double price_of(crn_improver *im, int64_t cost, int64_t wanted_bytes, int32_t s, int32_t from, int32_t to)
{
    double freed =
        (double)crn_min(wanted_bytes, im->model->bytes[s]) * (double)(im->short_count[to] - im->short_count[from]);
    return crn_priced_cost(cost) * crn_improver_factor(im) / freed;
}

/* The instance of event e is fetched in time for its next reader, if it can be away when event p runs. */
static void try_fetch(crn_improver *im, int32_t e, int32_t p, int64_t wanted_bytes, relief *best)
{
    int32_t s = crn_improver_node(im, e), from, to;
    if (!crn_link_times_away(&im->eval, s, im->before[e], im->after[e], &from, &to) || p < from || p >= to)
        return;
    double price = price_of(im, im->model->link->price_ns[s], wanted_bytes, s, from, to);
    if (price < best->price)
        *best = (relief){.price = price, .at = to, .count = 1, .events = {s + im->model->node_count}};
}

/* The instance of event e is recomputed just before its next reader. */
static void try_recomputation(crn_improver *im, int32_t e, int64_t wanted_bytes, relief *best)
{
    int32_t list[CRN_IMPROVER_CLOSURE_MAX], s = crn_improver_node(im, e), q = im->after[e];
    int64_t cost;
    int32_t count = im->model->once[s] ? 0 : crn_improver_closure(im, s, q, list, &cost);
    if (count == 0)
        return;
    double price = price_of(im, cost, wanted_bytes, s, im->before[e] + 1, q);
    if (price >= best->price)
        return;
    best->price = price;
    best->at = q;
    best->count = count;
    memcpy(best->events, list, (size_t)count * sizeof(*list));
}

/* Relieves event p of one instance that waits across it. */
static bool relieve(crn_improver *im, int32_t p)
{
    relief best = {.price = INFINITY};
    int64_t wanted_bytes = im->eval.level[p] - im->budget_bytes;
    int32_t waiting_count = crn_improver_list_waiting(im, p);
    for (int32_t i = 0; i < waiting_count; i++) {
        if (i % CRN_IMPROVER_POLL_EVERY == CRN_IMPROVER_POLL_EVERY - 1 && crn_improver_is_stopped(im))
            return false;
        try_fetch(im, im->waiting[i], p, wanted_bytes, &best);
        try_recomputation(im, im->waiting[i], wanted_bytes, &best);
    }
    return best.count > 0 && crn_sequence_insert(&im->trial, best.at, best.events, best.count);
}

bool crn_improver_repair(crn_improver *im, int64_t give_up_cost)
{
    for (int i = 0; i < REPAIRS_MAX; i++) {
        crn_improver_judge(im);
        if (im->eval.cost >= give_up_cost)
            return false;
        if (im->eval.peak <= im->budget_bytes)
            return true;
        if (crn_improver_is_stopped(im))
            return false;
        if (!relieve(im, count_shortages(im)))
            return false;
    }
    return false;
}
