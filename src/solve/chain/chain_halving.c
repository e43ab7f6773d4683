#include "solve/chain/chain_halving.h"

#include <string.h>

#include "base/vector.h"

enum { POLL_STAGES_MIN = 128 };

static const crn_point nothing = {0, 0};
static const crn_front zero = {&nothing, 1};

/* ---- parts ---- */

/* Points of one front of a part: no more than there are ways to keep something. */
static int32_t front_points(const crn_halving *b, int32_t lo, int32_t hi)
{
    int64_t ways = 1;
    for (int32_t l = lo; l <= hi && ways < b->resolution.points; l++)
        ways *= crn_stage(b->model, l)->option_count + 2;
    return (int32_t)crn_min(ways, b->resolution.points);
}

static void part_clear(const crn_halving *b, crn_halving_part *p)
{
    crn_free(&b->allocator, p->after_ns, (size_t)crn_halving_cells(b) + 1, sizeof(*p->after_ns));
    crn_free(&b->allocator, p->points, p->point_capacity, sizeof(*p->points));
}

static bool reserve_points(const crn_halving *b, crn_halving_part *p, size_t capacity)
{
    if (p->points && p->point_capacity >= capacity)
        return true;
    crn_free(&b->allocator, p->points, p->point_capacity, sizeof(*p->points));
    p->points = crn_alloc(&b->allocator, capacity, sizeof(*p->points));
    p->point_capacity = p->points ? capacity : 0;
    return p->points != NULL;
}

static bool part_begin(crn_halving *b, crn_halving_part *p, int32_t lo, int32_t hi)
{
    p->lo = lo;
    p->hi = hi;
    p->point_count = 0;
    if (!p->after_ns)
        p->after_ns = crn_alloc(&b->allocator, (size_t)crn_halving_cells(b) + 1, sizeof(*p->after_ns));
    size_t points = (size_t)front_points(b, lo, hi) * 4 * (size_t)b->resolution.levels;
    b->failed |= !p->after_ns || !reserve_points(b, p, points);
    return !b->failed;
}

/* NULL when memory fails. */
static crn_halving_part *halves_at(crn_halving *b, int depth)
{
    if (!b->buffers->halves[depth])
        b->buffers->halves[depth] = crn_alloc_zero(&b->allocator, 2, sizeof(crn_halving_part));
    b->failed |= !b->buffers->halves[depth];
    return b->buffers->halves[depth];
}

/* Ends a front of the part. */
static crn_front end_front(const crn_halving *b, crn_halving_part *p, int64_t floor_ns)
{
    crn_point *points = p->points + p->point_count;
    int32_t most = (int32_t)crn_min(b->resolution.points, (int64_t)(p->point_capacity - p->point_count));
    int32_t count = crn_front_end(b->buffers->maker, floor_ns, points, most);
    p->point_count += (size_t)count;
    return (crn_front){points, count};
}

/* Unites fronts in a scratch list. */
static crn_front unite(const crn_halving *b, const crn_front *fronts, int count, crn_point *scratch)
{
    crn_front_begin(b->buffers->maker);
    for (int i = 0; i < count; i++)
        crn_front_add_sums(b->buffers->maker, zero, fronts[i]);
    return (crn_front){scratch, crn_front_end(b->buffers->maker, 0, scratch, 4 * b->resolution.points)};
}

/* ---- where parts are cut ---- */

static int32_t half_of(int32_t length, int32_t cut)
{
    return (int32_t)crn_max(1, (int64_t)length * cut / 8);
}

bool crn_halving_cut_alike(int32_t stages, int32_t cut, int32_t other)
{
    for (int32_t length = 2; length <= stages; length++)
        if (half_of(length, cut) != half_of(length, other))
            return false;
    return true;
}

/* ---- one stage ---- */

static int64_t least_forward_ns(const cairn_stage *stage)
{
    int64_t least = stage->no_recompute ? INT64_MAX : stage->forward_only_ns;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, stage->options[k].forward_ns);
    return least;
}

/* From how many cells on backward l of an option fits; more than there are where it never does. */
static int32_t needed_cells(const crn_halving *b, int32_t l, const cairn_stage_option *option)
{
    return crn_halving_whole_cells(b, crn_halving_units(b, crn_backward_bytes(b->model, l, option)) +
                                          crn_halving_cell_units(b, 1) - 1);
}

static int32_t count_fitting(const crn_halving *b, int32_t l, int32_t cells)
{
    const cairn_stage *stage = crn_stage(b->model, l);
    int32_t count = 0;
    for (int32_t k = 0; k < stage->option_count; k++)
        count += needed_cells(b, l, &stage->options[k]) <= cells;
    return count;
}

static void fill_stage_after(const crn_halving *b, crn_halving_part *p)
{
    const cairn_stage *stage = crn_stage(b->model, p->lo);
    for (int32_t i = 0; i <= crn_halving_cells(b); i++)
        p->after_ns[i] = CRN_FRONT_NEVER;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t ns = crn_option_ns(option);
        for (int32_t i = needed_cells(b, p->lo, option); i <= crn_halving_cells(b); i++)
            p->after_ns[i] = crn_min(p->after_ns[i], ns);
    }
}

/* A set that is kept until its backward, or is saved anew where that may be. */
static crn_point saved_point(const crn_halving *b, const crn_halving_part *p, const cairn_stage_option *option,
                             int32_t cells, int64_t anew_ns)
{
    int64_t backward_ns = needed_cells(b, p->lo, option) <= cells ? option->backward_ns : CRN_FRONT_NEVER;
    return (crn_point){crn_halving_units(b, option->saved_bytes),
                       crn_min(CRN_FRONT_NEVER, option->forward_ns) + crn_min(backward_ns, anew_ns)};
}

/* The first stage's input is always there. */
static void fill_stage_level(crn_halving *b, crn_halving_part *p, crn_halving_level *v, int32_t cells)
{
    const cairn_stage *stage = crn_stage(b->model, p->lo);
    int64_t anew_ns = stage->no_recompute ? CRN_FRONT_NEVER : p->after_ns[cells];
    crn_point saved[CAIRN_STAGE_OPTIONS_MAX],
        output = {crn_halving_units(b, stage->output_bytes), p->first_ns + anew_ns};
    for (int32_t k = 0; k < stage->option_count; k++)
        saved[k] = saved_point(b, p, &stage->options[k], cells, anew_ns);
    bool is_first = p->lo == 1;
    v->empty_ns = crn_min(CRN_FRONT_NEVER, p->first_ns + anew_ns);
    v->kept[0][0] = v->kept[1][0] = (crn_front){NULL, 0}; /* what is kept is a value of the last stage, the only one */
    crn_front_begin(b->buffers->maker);
    crn_front_add_sums(b->buffers->maker, (crn_front){&output, 1}, zero);
    if (is_first)
        crn_front_add_sums(b->buffers->maker, (crn_front){saved, stage->option_count}, zero);
    v->kept[0][1] = end_front(b, p, 0);
    crn_front_begin(b->buffers->maker);
    if (!is_first)
        crn_front_add_sums(b->buffers->maker, (crn_front){saved, stage->option_count}, zero);
    v->kept[1][1] = end_front(b, p, 0);
}

static void fill_stage(crn_halving *b, crn_halving_part *p)
{
    p->first_ns = crn_min(CRN_FRONT_NEVER, least_forward_ns(crn_stage(b->model, p->lo)));
    fill_stage_after(b, p);
    for (int32_t i = 0; i < b->resolution.levels; i++) {
        crn_halving_level *v = &p->levels[i];
        v->number = count_fitting(b, p->lo, b->top[i]);
        if (i > 0 && v->number == (v - 1)->number)
            *v = *(v - 1);
        else
            fill_stage_level(b, p, v, b->top[i]);
    }
}

/* ---- two halves ---- */

/* least[i] = min(least[i], max(ns, left[i]) + right[i]) */
CRN_VECTOR static void lower_sums(int64_t *restrict least, const int64_t *restrict left, const int64_t *restrict right,
                                  int64_t ns, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int64_t lower = ns > left[i] ? ns : left[i];
        int64_t sum = lower + right[i];
        least[i] = sum < least[i] ? sum : least[i];
    }
}

/* Nothing is kept; no point where something must be. */
static crn_front front_of_empty(const crn_halving_level *v, crn_point *point)
{
    *point = (crn_point){0, v->empty_ns};
    return (crn_front){point, v->empty_ns < CRN_FRONT_NEVER};
}

/* When the upper half is one stage, the moment is that of its backward, which reads a value of the stage before. */
static crn_front kept_meanwhile(const crn_halving *b, const crn_halving_level *lower, bool is_stage, crn_point *empty)
{
    crn_front fronts[5] = {lower->kept[0][1], lower->kept[1][1], lower->kept[0][0], lower->kept[1][0]};
    fronts[4] = front_of_empty(lower, empty);
    return unite(b, fronts, is_stage ? 2 : 5, b->buffers->scratch[0]);
}

static void fill_after(const crn_halving *b, crn_halving_part *p, const crn_halving_part *lower,
                       const crn_halving_part *upper)
{
    int32_t begin = 0;
    for (int32_t i = 0; i <= crn_halving_cells(b); i++)
        p->after_ns[i] = CRN_FRONT_NEVER;
    crn_point empty;
    crn_front kept = {NULL, 0};
    for (int32_t v = 0; v < b->resolution.levels; v++) {
        if (v == 0 || lower->levels[v].number != lower->levels[v - 1].number)
            kept = kept_meanwhile(b, &lower->levels[v], upper->lo == upper->hi, &empty);
        for (int32_t i = 0; i < kept.count; i++) {
            int32_t shift = crn_halving_whole_cells(b, kept.points[i].bytes), from = shift > begin ? shift : begin;
            if (from <= b->top[v])
                lower_sums(p->after_ns + from, lower->after_ns + from, upper->after_ns + (from - shift),
                           kept.points[i].ns, b->top[v] + 1 - from);
        }
        begin = b->top[v] + 1;
    }
}

static void fill_front(crn_halving *b, crn_halving_part *p, crn_halving_level *v, const crn_halving_level *lower,
                       const crn_halving_level *upper, int32_t cells)
{
    int64_t floor_ns = p->after_ns[cells];
    crn_point points[2];
    crn_front lower_empty = front_of_empty(lower, &points[0]), upper_empty = front_of_empty(upper, &points[1]);
    for (int needs = 0; needs < 2; needs++) {
        crn_front any = unite(b, lower->kept[needs], 2, b->buffers->scratch[needs]);
        for (int has = 0; has < 2; has++) {
            crn_front_begin(b->buffers->maker);
            crn_front_add_sums(b->buffers->maker, any, upper->kept[0][has]);
            crn_front_add_sums(b->buffers->maker, lower->kept[needs][1], upper->kept[1][has]);
            if (needs == 0)
                crn_front_add_sums(b->buffers->maker, lower_empty, upper->kept[0][has]);
            if (has == 0)
                crn_front_add_sums(b->buffers->maker, upper_empty, any);
            v->kept[needs][has] = end_front(b, p, floor_ns);
        }
    }
}

static void fill_levels(crn_halving *b, crn_halving_part *p, const crn_halving_part *lower,
                        const crn_halving_part *upper)
{
    for (int32_t i = 0; i < b->resolution.levels; i++) {
        crn_halving_level *v = &p->levels[i];
        const crn_halving_level *l = &lower->levels[i], *u = &upper->levels[i];
        int64_t after_ns = p->after_ns[b->top[i]];
        if (i > 0 && l->number == (l - 1)->number && u->number == (u - 1)->number &&
            after_ns == p->after_ns[b->top[i - 1]]) {
            *v = *(v - 1);
            continue;
        }
        bool must_keep = l->empty_ns >= CRN_FRONT_NEVER || u->empty_ns >= CRN_FRONT_NEVER;
        v->number = i;
        v->empty_ns = must_keep ? CRN_FRONT_NEVER : crn_min(CRN_FRONT_NEVER, p->first_ns + after_ns);
        fill_front(b, p, v, l, u, b->top[i]);
    }
}

static bool build(crn_halving *b, crn_halving_part *p, int depth, int32_t lo, int32_t hi);

static bool build_of_two(crn_halving *b, crn_halving_part *p, int depth)
{
    int32_t length = p->hi - p->lo + 1, half = half_of(length, b->cut);
    crn_halving_part *halves = halves_at(b, depth);
    if (!halves || !build(b, &halves[0], depth + 1, p->lo, p->lo + half - 1) ||
        !build(b, &halves[1], depth + 1, p->lo + half, p->hi))
        return false;
    p->first_ns = crn_min(CRN_FRONT_NEVER, halves[0].first_ns + halves[1].first_ns);
    fill_after(b, p, &halves[0], &halves[1]);
    fill_levels(b, p, &halves[0], &halves[1]);
    return true;
}

/* Every thread looks at the clock, for another may have gone through all of its cuts; only the caller's may poll. */
static bool must_stop(crn_halving *b)
{
    bool looks = b->model->n > POLL_STAGES_MIN;
    if (looks && (b->polls ? crn_should_stop(b->task, NULL) : crn_task_is_past(b->task)))
        atomic_store(b->stopped, true);
    return atomic_load(b->stopped);
}

static bool build(crn_halving *b, crn_halving_part *p, int depth, int32_t lo, int32_t hi)
{
    if (!part_begin(b, p, lo, hi) || must_stop(b))
        return false;
    if (lo < hi)
        return build_of_two(b, p, depth);
    fill_stage(b, p);
    return true;
}

/* ---- one cut ---- */

static bool make_buffers(crn_halving *b)
{
    crn_halving_buffers *buffers = b->buffers;
    if (!buffers->maker)
        buffers->maker = crn_front_maker_new(&b->allocator);
    b->failed |= !buffers->maker;
    for (int i = 0; i < 2; i++) {
        if (!buffers->scratch[i])
            buffers->scratch[i] =
                crn_alloc(&b->allocator, 4 * (size_t)b->resolution.points, sizeof(*buffers->scratch[i]));
        b->failed |= !buffers->scratch[i];
    }
    return !b->failed;
}

void crn_halving_free_buffers(const crn_halving *b)
{
    crn_halving_buffers *buffers = b->buffers;
    for (int depth = 0; depth < CRN_HALVING_DEPTH_MAX && buffers->halves[depth]; depth++) {
        part_clear(b, &buffers->halves[depth][0]);
        part_clear(b, &buffers->halves[depth][1]);
        crn_free(&b->allocator, buffers->halves[depth], 2, sizeof(crn_halving_part));
    }
    part_clear(b, &buffers->whole);
    for (int i = 0; i < 2; i++)
        crn_free(&b->allocator, buffers->scratch[i], 4 * (size_t)b->resolution.points, sizeof(*buffers->scratch[i]));
    crn_front_maker_free(buffers->maker);
    *buffers = (crn_halving_buffers){.maker = NULL}; /* others may share it */
}

void crn_halving_run(void *context, int64_t i, int worker)
{
    crn_halving *b = (crn_halving *)context + i;
    b->polls = worker == 0; /* on the caller's thread */
    if (make_buffers(b) && build(b, &b->buffers->whole, 0, 1, b->model->n))
        memcpy(b->whole_ns, b->buffers->whole.after_ns, ((size_t)crn_halving_cells(b) + 1) * sizeof(*b->whole_ns));
}
