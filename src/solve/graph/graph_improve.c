#include "solve/graph/graph_improve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CLOSURE_MAX = 48, REPAIRS_MAX = 400, POLL_EVERY = 256, RUIN_MAX = 512, CANDIDATES_MAX = 1024, BLOCK = 64 };

typedef struct gain {
    double value;
    int32_t event;
} gain;

struct crn_improver {
    const crn_graph_model *model;
    crn_arena arena;
    int64_t budget_bytes;
    crn_improver_stop *stop;
    bool asks; /* the task whether to stop */
    uint64_t random;
    crn_improver_leeway leeway;
    crn_sequence current, trial, best;
    int64_t current_cost, best_cost;
    bool is_at_current;      /* the trial is the current sequence, and was judged */
    crn_sequence_eval eval;  /* of the trial */
    int32_t *newest;         /* of a storage: its newest instance, while scanning */
    int32_t *before, *after; /* of an instance: last reader up to, first reader after the position looked at */
    int32_t *short_count;    /* of an event: how many events before it do not fit */
    int32_t *following;      /* of an instance: the storage's next one */
    int32_t *waiting;        /* instances */
    int64_t *block_level;    /* of BLOCK events: none of them is above it */
    gain *gains;
    int32_t *mark; /* of a storage: closure that it belongs to */
    int32_t marker;
};

cairn_status crn_improver_new(const crn_graph_model *model, int32_t capacity, uint64_t seed, crn_improver_leeway leeway,
                              crn_improver **improver, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, model->arena.allocator);
    size_t n = (size_t)model->node_count, events = (size_t)capacity + 1;
    crn_improver *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    *improver = NULL;
    bool fits = made && crn_sequence_new(&arena, capacity, &made->current) &&
                crn_sequence_new(&arena, capacity, &made->trial) && crn_sequence_new(&arena, capacity, &made->best) &&
                (made->newest = crn_arena_alloc(&arena, n, sizeof(int32_t))) &&
                (made->mark = crn_arena_alloc_zero(&arena, n, sizeof(int32_t))) &&
                (made->before = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                (made->after = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                (made->following = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                (made->waiting = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                (made->block_level = crn_arena_alloc(&arena, events / BLOCK + 1, sizeof(int64_t))) &&
                (made->gains = crn_arena_alloc(&arena, events, sizeof(gain))) &&
                (made->short_count = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                crn_sequence_eval_new(model, &arena, capacity, &made->eval, NULL) == CAIRN_OK;
    if (!fits) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    made->model = model;
    made->leeway = leeway;
    made->random = seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    made->arena = arena;
    *improver = made;
    return CAIRN_OK;
}

void crn_improver_free(crn_improver *improver)
{
    if (!improver)
        return;
    crn_arena_clear(&improver->arena);
}

crn_sequence_eval *crn_improver_eval(crn_improver *improver)
{
    improver->is_at_current = false;
    return &improver->eval;
}

/* splitmix64 (Steele, Lea, Flood, 2014). */
static uint64_t next_random(crn_improver *im)
{
    uint64_t z = im->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int32_t random_below(crn_improver *im, int32_t bound)
{
    return bound > 0 ? (int32_t)(next_random(im) % (uint64_t)bound) : 0;
}

/* In [1/2, 3/2). */
static double random_factor(crn_improver *im)
{
    return 0.5 + (double)(next_random(im) >> 11) * 0x1p-53;
}

static bool is_stopped(const crn_improver *im)
{
    crn_improver_stop *stop = im->stop;
    int64_t deadline_ns = stop->task->deadline_ns;
    if (im->asks ? crn_should_stop(stop->task, NULL) : deadline_ns != CAIRN_NONE && crn_clock_ns() >= deadline_ns)
        atomic_store(&stop->stopped, true);
    return atomic_load(&stop->stopped);
}

void crn_improver_heed(crn_improver *im, crn_improver_stop *stop, bool asks)
{
    im->stop = stop;
    im->asks = asks;
}

static void judge(crn_improver *im)
{
    crn_sequence_judge(&im->eval, &im->trial);
    for (int32_t e = 0; e < im->trial.count; e++) {
        int64_t *block = &im->block_level[e / BLOCK];
        *block = e % BLOCK == 0 ? im->eval.level[e] : crn_max(*block, im->eval.level[e]);
    }
}

static void remove_event(crn_sequence *sequence, int32_t e)
{
    sequence->count--;
    memmove(sequence->node + e, sequence->node + e + 1, (size_t)(sequence->count - e) * sizeof(*sequence->node));
}

static bool insert_events(crn_sequence *sequence, int32_t e, const int32_t *nodes, int32_t count)
{
    if (sequence->count + count > sequence->capacity)
        return false;
    memmove(sequence->node + e + count, sequence->node + e, (size_t)(sequence->count - e) * sizeof(*sequence->node));
    memcpy(sequence->node + e, nodes, (size_t)count * sizeof(*nodes));
    sequence->count += count;
    return true;
}

/* Whether bytes more fit on all events in [from, to). */
static bool has_room(const crn_improver *im, int32_t from, int32_t to, int64_t bytes)
{
    int64_t most = im->budget_bytes - bytes;
    for (int32_t e = from; e < to;) {
        bool is_block = e % BLOCK == 0 && to - e >= BLOCK;
        if (!is_block || im->block_level[e / BLOCK] > most) {
            if (im->eval.level[e] > most)
                return false;
            e++;
        } else {
            e += BLOCK;
        }
    }
    return true;
}

/* Bytes more on all events in [from, to). */
static void raise_levels(crn_improver *im, int32_t from, int32_t to, int64_t bytes)
{
    for (int32_t e = from; e < to; e++) {
        im->eval.level[e] += bytes;
        im->block_level[e / BLOCK] = crn_max(im->block_level[e / BLOCK], im->eval.level[e]);
    }
}

/* ---- repair ---- */

/* For every instance: its last reader up to event p, its first one after. newest[] is left at the end of the list. */
static void find_waits(crn_improver *im, int32_t p)
{
    const crn_graph_model *model = im->model;
    const crn_sequence *s = &im->trial;
    for (int32_t e = 0; e < s->count; e++) {
        int32_t v = s->node[e];
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
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

/*
 * What must be computed just before event q to make storage s resident, in order: its root, and those ancestors that
 * are gone by then and cannot stay in memory until then. Returns their number, 0 when it must not be done.
 */
static int32_t closure(crn_improver *im, int32_t s, int32_t q, int32_t list[CLOSURE_MAX], int64_t *cost)
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
        *cost += model->cost[v];
        for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
            int32_t d = model->root[model->dep[i]], instance = instance_before(im, d, q);
            if (im->mark[d] == im->marker || im->eval.last[instance] >= q || model->keep[d])
                continue;
            im->mark[d] = im->marker;
            if (model->once[d] || has_room(im, im->eval.last[instance] + 1, q, model->bytes[d]))
                continue;
            if (count == CLOSURE_MAX)
                return 0;
            list[count++] = d;
        }
    }
    for (int32_t k = 1; k < count; k++) /* insertion sort: ancestors have smaller indices */
        for (int32_t j = k; j > 0 && list[j] < list[j - 1]; j--) {
            int32_t swap = list[j];
            list[j] = list[j - 1];
            list[j - 1] = swap;
        }
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
    int32_t s = im->trial.node[e];
    return im->eval.last[e] > p && im->before[e] < p && im->after[e] >= 0 && !model->keep[s] && !model->once[s] &&
           model->bytes[s] > 0;
}

/* The instances that wait across event p for their next reader, in waiting[]; where there are very many, some of them. */
static int32_t list_waiting(crn_improver *im, int32_t p)
{
    int32_t count = 0;
    find_waits(im, p);
    for (int32_t e = 0; e < p; e++)
        if (waits_across(im, e, p))
            im->waiting[count++] = e;
    if (count <= CANDIDATES_MAX)
        return count;
    int32_t stride = count / CANDIDATES_MAX, first = random_below(im, stride);
    for (int32_t i = 0; i < CANDIDATES_MAX; i++)
        im->waiting[i] = im->waiting[first + i * stride];
    return CANDIDATES_MAX;
}

/* Relieves event p of one instance that waits across it. */
static bool relieve(crn_improver *im, int32_t p)
{
    const crn_graph_model *model = im->model;
    int32_t list[CLOSURE_MAX], chosen[CLOSURE_MAX], chosen_count = 0, chosen_at = 0;
    double least = INFINITY;
    int64_t lack = im->eval.level[p] - im->budget_bytes, cost;
    int32_t waiting_count = list_waiting(im, p);
    for (int32_t i = 0; i < waiting_count; i++) {
        if (i % POLL_EVERY == POLL_EVERY - 1 && is_stopped(im))
            return false;
        int32_t e = im->waiting[i], s = im->trial.node[e], q = im->after[e];
        int32_t count = closure(im, s, q, list, &cost);
        if (count == 0)
            continue;
        double relieved =
            (double)crn_min(lack, model->bytes[s]) * (double)(im->short_count[q] - im->short_count[im->before[e] + 1]);
        double price = crn_priced_cost(cost) * random_factor(im) / relieved;
        if (price < least) {
            least = price;
            chosen_count = count;
            chosen_at = q;
            memcpy(chosen, list, (size_t)count * sizeof(*list));
        }
    }
    return chosen_count > 0 && insert_events(&im->trial, chosen_at, chosen, chosen_count);
}

static bool repair(crn_improver *im, int64_t give_up_cost)
{
    for (int i = 0; i < REPAIRS_MAX; i++) {
        judge(im);
        if (im->eval.cost >= give_up_cost)
            return false;
        if (im->eval.peak <= im->budget_bytes)
            return true;
        if (is_stopped(im))
            return false;
        if (!relieve(im, count_shortages(im)))
            return false;
    }
    return false;
}

/* ---- fill ---- */

static bool is_recomputation(const crn_improver *im, int32_t e)
{
    return im->eval.previous[e] >= 0;
}

static int compare_gains(const void *a, const void *b)
{
    const gain *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? 1 : -1;
    return (x->event > y->event) - (x->event < y->event);
}

/* The recomputations, the most expensive first, give or take a random factor; following[] links their storage's instances. */
static int32_t list_gains(crn_improver *im)
{
    int32_t count = 0;
    for (int32_t e = 0; e < im->trial.count; e++) {
        im->following[e] = -1;
        if (!is_recomputation(im, e))
            continue;
        double cost = crn_priced_cost(im->model->cost[im->trial.node[e]]);
        im->gains[count++] = (gain){cost * random_factor(im), e};
        im->following[im->eval.previous[e]] = e;
    }
    qsort(im->gains, (size_t)count, sizeof(*im->gains), compare_gains);
    return count;
}

/* Lets the instance before e live on instead of computing e, where memory allows; levels, lives and links are kept up to date. */
static bool absorb(crn_improver *im, int32_t e)
{
    crn_sequence_eval *eval = &im->eval;
    int32_t before = eval->previous[e], from = eval->last[before] + 1;
    int64_t bytes = im->model->bytes[im->trial.node[e]];
    if (eval->last[e] > e) { /* somebody reads it */
        if (!has_room(im, from, e, bytes))
            return false;
        raise_levels(im, from, e, bytes);
        eval->last[before] = eval->last[e];
    } else {
        eval->level[e] -= bytes;
    }
    im->following[before] = im->following[e];
    if (im->following[e] >= 0)
        eval->previous[im->following[e]] = before;
    im->trial.node[e] = -1;
    return true;
}

static void close_up(crn_sequence *sequence)
{
    int32_t count = 0;
    for (int32_t e = 0; e < sequence->count; e++)
        if (sequence->node[e] >= 0)
            sequence->node[count++] = sequence->node[e];
    sequence->count = count;
}

/* Removing one recomputation may free the memory, or the only reader, of another: until nothing more goes. */
static void fill(crn_improver *im)
{
    for (;;) {
        int32_t removed = 0, count = list_gains(im);
        for (int32_t i = 0; i < count && (i % POLL_EVERY > 0 || !is_stopped(im)); i++)
            removed += absorb(im, im->gains[i].event);
        if (removed == 0)
            return;
        close_up(&im->trial);
        judge(im);
        if (is_stopped(im))
            return;
    }
}

/* ---- rounds ---- */

static void ruin(crn_improver *im)
{
    crn_sequence *s = &im->trial;
    int32_t from = random_below(im, s->count);
    int32_t width = (int32_t)crn_min(s->count / 8, RUIN_MAX);
    int32_t to = (int32_t)crn_min(from + 1 + random_below(im, 1 + width), s->count);
    uint64_t coins = next_random(im);
    coins |= next_random(im); /* three of four */
    for (int32_t e = to - 1; e >= from; e--)
        if (is_recomputation(im, e) && (coins >> (e & 63) & 1))
            remove_event(s, e);
}

/* Recomputes a random value just before one of its readers. */
static void kick(crn_improver *im)
{
    const crn_graph_model *model = im->model;
    int32_t list[CLOSURE_MAX];
    int64_t cost;
    int32_t q = random_below(im, im->trial.count), v = im->trial.node[q];
    int32_t degree = model->dep_begin[v + 1] - model->dep_begin[v];
    if (degree == 0)
        return;
    int32_t s = model->root[model->dep[model->dep_begin[v] + random_below(im, degree)]];
    if (model->keep[s] || model->once[s])
        return;
    find_waits(im, q);
    int32_t count = closure(im, s, q, list, &cost);
    if (count > 0)
        insert_events(&im->trial, q, list, count);
}

/* Takes the trial, which was judged. */
static void take_current(crn_improver *im)
{
    crn_sequence_copy(&im->current, &im->trial);
    im->current_cost = im->eval.cost;
    im->is_at_current = true;
    if (im->current_cost < im->best_cost) {
        crn_sequence_copy(&im->best, &im->trial);
        im->best_cost = im->current_cost;
    }
}

bool crn_improver_begin(crn_improver *im, const crn_sequence *start, int64_t budget_bytes)
{
    im->budget_bytes = budget_bytes;
    im->best_cost = INT64_MAX;
    if (start->count > im->trial.capacity)
        return false;
    crn_sequence_copy(&im->trial, start);
    if (!repair(im, INT64_MAX))
        return false;
    take_current(im);
    im->is_at_current = false;
    fill(im);
    if (im->eval.peak <= budget_bytes) /* aliases that are recomputed with another instance may need more */
        take_current(im);
    return true;
}

static void round_once(crn_improver *im)
{
    int64_t slack = im->current_cost / im->leeway.step_part, far = im->best_cost / im->leeway.far_part;
    if (!im->is_at_current) {
        crn_sequence_copy(&im->trial, &im->current);
        judge(im);
    }
    if (random_below(im, 4) == 0)
        kick(im);
    else
        ruin(im);
    im->is_at_current = false;
    if (!repair(im, crn_add_saturating(im->current_cost, im->current_cost / 16 + 1)))
        return;
    fill(im);
    if (im->eval.peak > im->budget_bytes) /* as above */
        return;
    int64_t allowed = random_below(im, 8) == 0 ? crn_add_saturating(im->current_cost, slack) : im->current_cost;
    if (im->eval.cost <= allowed && im->eval.cost <= crn_add_saturating(im->best_cost, far))
        take_current(im);
}

void crn_improver_run(crn_improver *im, int64_t rounds)
{
    if (im->best_cost == INT64_MAX || im->best_cost <= im->model->total_cost)
        return;
    for (int64_t i = 0; i < rounds && !is_stopped(im); i++)
        round_once(im);
}

const crn_sequence *crn_improver_best(const crn_improver *im, int64_t *cost_ns)
{
    *cost_ns = im->best_cost;
    return &im->best;
}
