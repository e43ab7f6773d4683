#include "solve/graph/graph_improve.h"

#include <string.h>

#include "solve/graph/improver.h"

/* DRAWS_MAX: an excursion chooses among so many values. IDLE_MAX: it begins when so many rounds did not find a better best. */
enum { RUIN_MAX = 512, DRAWS_MAX = 8, IDLE_MAX = 20 };

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
                (made->block_level = crn_arena_alloc(&arena, events / CRN_IMPROVER_BLOCK + 1, sizeof(int64_t))) &&
                (made->gains = crn_arena_alloc(&arena, events, sizeof(crn_improver_gain))) &&
                (made->short_count = crn_arena_alloc(&arena, events, sizeof(int32_t))) &&
                crn_sequence_eval_new(model, &arena, capacity, &made->eval, NULL) == CAIRN_OK;
    if (!fits) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    made->model = model;
    made->leeway = leeway;
    made->forced = made->spared = -1;
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

/* splitmix64 (Steele, Lea, Flood, 2014). */
static uint64_t next_random(crn_improver *im)
{
    uint64_t z = im->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int32_t crn_improver_draw(crn_improver *im, int32_t bound)
{
    return bound > 0 ? (int32_t)(next_random(im) % (uint64_t)bound) : 0;
}

double crn_improver_factor(crn_improver *im)
{
    return 0.5 + (double)(next_random(im) >> 11) * 0x1p-53;
}

bool crn_improver_is_stopped(const crn_improver *im)
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

void crn_improver_judge(crn_improver *im)
{
    crn_sequence_judge(&im->eval, &im->trial);
    for (int32_t e = 0; e < im->trial.count; e++) {
        int64_t *block = &im->block_level[e / CRN_IMPROVER_BLOCK];
        *block = e % CRN_IMPROVER_BLOCK == 0 ? im->eval.level[e] : crn_max(*block, im->eval.level[e]);
    }
}

bool crn_improver_has_room(const crn_improver *im, int32_t from, int32_t to, int64_t bytes)
{
    int64_t most = im->budget_bytes - bytes;
    for (int32_t e = from; e < to;) {
        bool is_block = e % CRN_IMPROVER_BLOCK == 0 && to - e >= CRN_IMPROVER_BLOCK;
        if (!is_block || im->block_level[e / CRN_IMPROVER_BLOCK] > most) {
            if (im->eval.level[e] > most)
                return false;
            e++;
        } else {
            e += CRN_IMPROVER_BLOCK;
        }
    }
    return true;
}

bool crn_improver_recomputes(const crn_improver *im, int32_t e)
{
    return im->eval.previous[e] >= 0 && crn_improver_node(im, e) != im->forced;
}

/* ---- rounds ---- */

static void ruin(crn_improver *im)
{
    crn_sequence *s = &im->trial;
    int32_t from = crn_improver_draw(im, s->count);
    int32_t width = (int32_t)crn_min(s->count / 8, RUIN_MAX);
    int32_t to = (int32_t)crn_min(from + 1 + crn_improver_draw(im, 1 + width), s->count);
    uint64_t coins = next_random(im);
    coins |= next_random(im); /* three of four */
    for (int32_t e = to - 1; e >= from; e--)
        if (crn_improver_recomputes(im, e) && (coins >> (e & 63) & 1))
            crn_sequence_remove(s, e);
}

/* Recomputes a value just before one of its readers. newest[] is at the end of the list. */
static bool recompute(crn_improver *im, int32_t s, int32_t q)
{
    if (im->model->once[s])
        return false;
    int32_t list[CRN_IMPROVER_CLOSURE_MAX];
    int64_t cost;
    int32_t count = crn_improver_closure(im, s, q, list, &cost);
    return count > 0 && crn_sequence_insert(&im->trial, q, list, count);
}

/* A value that a random event reads and that may be recomputed; -1 = it reads none. */
static int32_t draw_read(crn_improver *im, int32_t *at)
{
    const crn_graph_model *model = im->model;
    *at = crn_improver_draw(im, im->trial.count);
    int32_t event = im->trial.node[*at], v = crn_event_node(model, event);
    int32_t degree = model->dep_begin[v + 1] - model->dep_begin[v];
    if (degree == 0 || crn_event_is_fetch(model, event))
        return -1;
    int32_t s = model->root[model->dep[model->dep_begin[v] + crn_improver_draw(im, degree)]];
    return model->keep[s] || model->once[s] ? -1 : s;
}

/* Recomputes a random value just before one of its readers. */
static void kick(crn_improver *im)
{
    int32_t at, s = draw_read(im, &at);
    if (s < 0)
        return;
    crn_improver_find_waits(im, at);
    recompute(im, s, at);
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
    im->forced = im->spared = -1;
    im->idle = 0;
    if (start->count > im->trial.capacity)
        return false;
    crn_sequence_copy(&im->trial, start);
    if (!crn_improver_repair(im, INT64_MAX))
        return false;
    take_current(im);
    im->is_at_current = false;
    crn_improver_fill(im);
    if (im->eval.peak <= budget_bytes) /* aliases that are recomputed with another instance may need more */
        take_current(im);
    return true;
}

/* Makes the trial fit again. False where that takes too long, or it does not fit. */
static bool mend(crn_improver *im, int64_t give_up_cost)
{
    im->is_at_current = false;
    if (!crn_improver_repair(im, give_up_cost))
        return false;
    crn_improver_fill(im);
    return im->eval.peak <= im->budget_bytes; /* as above */
}

/* Excursions may lead as far from the best as they like. */
static bool is_accepted(crn_improver *im)
{
    int64_t slack = im->current_cost / im->leeway.step_part, far = im->best_cost / im->leeway.far_part;
    int64_t allowed = crn_improver_draw(im, 8) == 0 ? crn_add_saturating(im->current_cost, slack) : im->current_cost;
    return im->eval.cost <= allowed && (im->idle < 0 || im->eval.cost <= crn_add_saturating(im->best_cost, far));
}

static void round_once(crn_improver *im)
{
    if (!im->is_at_current) {
        crn_sequence_copy(&im->trial, &im->current);
        crn_improver_judge(im);
    }
    if (crn_improver_draw(im, 4) == 0)
        kick(im);
    else
        ruin(im);
    if (mend(im, crn_add_saturating(im->current_cost, im->current_cost / 16 + 1)) && is_accepted(im))
        take_current(im);
}

/*
 * ---- excursions ----
 *
 * Where values are few and large, another choice of what is dropped may need several changes at once, each of which makes
 * the schedule slower. An excursion starts from the best sequence, makes one such change and holds to it for some rounds.
 */

/* Of a few values that wait across a random event, the one that costs most is recomputed before its next reader. */
static bool force_costly(crn_improver *im)
{
    int32_t count = crn_improver_list_waiting(im, crn_improver_draw(im, im->trial.count)), chosen = -1;
    for (int i = crn_improver_draw(im, DRAWS_MAX); i >= 0 && count > 0; i--) {
        int32_t e = im->waiting[crn_improver_draw(im, count)];
        if (chosen < 0 || im->model->cost[crn_improver_node(im, e)] > im->model->cost[crn_improver_node(im, chosen)])
            chosen = e;
    }
    if (chosen < 0 || !recompute(im, crn_improver_node(im, chosen), im->after[chosen]))
        return false;
    im->forced = crn_improver_node(im, chosen);
    return true;
}

/* Of a few values that are recomputed, the one that costs most is recomputed no more. */
static bool spare_costly(crn_improver *im)
{
    int32_t chosen = -1;
    for (int i = crn_improver_draw(im, 2 * DRAWS_MAX); i >= 0; i--) {
        int32_t e = crn_improver_draw(im, im->trial.count), s = crn_improver_node(im, e);
        if (crn_improver_recomputes(im, e) && (chosen < 0 || im->model->cost[s] > im->model->cost[chosen]))
            chosen = s;
    }
    for (int32_t e = im->trial.count - 1; e >= 0; e--)
        if (crn_improver_node(im, e) == chosen && crn_improver_recomputes(im, e))
            crn_sequence_remove(&im->trial, e);
    im->spared = chosen;
    return chosen >= 0;
}

static void end_excursion(crn_improver *im)
{
    im->forced = im->spared = -1;
    im->idle = 0;
    if (im->current_cost == im->best_cost)
        return;
    crn_sequence_copy(&im->current, &im->best);
    im->current_cost = im->best_cost;
    im->is_at_current = false;
}

static void begin_excursion(crn_improver *im)
{
    crn_sequence_copy(&im->trial, &im->best);
    crn_improver_judge(im);
    im->is_at_current = false;
    if ((crn_improver_draw(im, 2) == 0 ? spare_costly(im) : force_costly(im)) && mend(im, INT64_MAX)) {
        take_current(im);
        im->idle = -im->leeway.excursion_rounds;
    } else {
        end_excursion(im);
    }
}

/* One round, or a step into an excursion or out of it. */
static void run_once(crn_improver *im)
{
    int64_t before = im->best_cost;
    if (im->leeway.excursion_rounds > 0 && im->idle >= IDLE_MAX) {
        begin_excursion(im);
        return;
    }
    round_once(im);
    if (++im->idle == 0)
        end_excursion(im);
    else if (im->idle > 0 && im->best_cost < before)
        im->idle = 0;
}

void crn_improver_run(crn_improver *im, int64_t rounds)
{
    if (im->best_cost == INT64_MAX || im->best_cost <= im->model->total_cost)
        return;
    for (int64_t i = 0; i < rounds && !crn_improver_is_stopped(im); i++)
        run_once(im);
}

const crn_sequence *crn_improver_best(const crn_improver *im, int64_t *cost_ns)
{
    *cost_ns = im->best_cost;
    return &im->best;
}
