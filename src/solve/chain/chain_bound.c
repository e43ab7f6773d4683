/*
 * A lower bound on the makespan of every schedule of a chain within a budget, transfers excluded.
 *
 * Cut the stages s..t of a chain in two, L = s..r-1 and R = r..t. While backwards t, ..., r run, values of L take room
 * from R. Look at the moment in that time at which they take least. What of L is resident then was made by forwards
 * before that moment; what is not will be made anew after it. So, where room is what the budget leaves to stages s..t,
 *
 *   after(s..t, room) = min over what is kept of L of   ns(L, kept, room) + after(R, room - bytes kept)
 *
 * bounds the time of forwards and backwards of s..t from any moment before backward t at which nothing of s..t is
 * resident. ns(L, kept, room) adds up over the parts that L falls into when it is cut again and again:
 *
 *   a part of which nothing is kept   the least forwards of its stages + after(part, room),
 *   a stage whose output is kept      the same, for one stage,
 *   A_k[l] kept                       uF_k[l] + uB_k[l],
 *
 * and A_k[l] is kept only beside a value of l-1. Which to keep is a knapsack: the least ns for each number of bytes is a
 * front (chain_front.h) of each part, made of those of its two parts. docs/explanation/solvers/chain-bound.md has the
 * proof.
 *
 * after is tabulated over cells of room, and holds for a whole cell; fronts are made for a few levels of room, and hold
 * below them; those that grow too long are thinned from below. So every number is a bound, in integers, the same on all
 * machines. Sizes are counted in units of what storing everything takes, so that their scale changes nothing.
 *
 * One table answers all budgets. Time is linear in n; memory logarithmic, beside the model's.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/vector.h"
#include "solve/chain/chain_front.h"
#include "solve/chain/chain_model.h"

enum { LEVELS_MAX = 32, POLL_STAGES_MIN = 128, DEPTH_MAX = 64 };

/* What all cuts of a stage take for each point of each level. */
enum { POINT_NS = 70 };

#define UNITS CRN_FRONT_BYTES_MAX
#define NEVER CRN_FRONT_NEVER

/* How fine: 2^cells_log2 cells of room, levels of room for fronts, points of a front. Longer chains get no bound. */
typedef struct grain {
    int64_t stages_max;
    int cells_log2, levels, points;
} grain;

static const grain grains[] = {
    {8, 11, 16, 256}, {48, 12, 20, 160}, {400, 11, 16, 128}, {1500, 10, 12, 96}, {20000, 9, 8, 48}};

/* Where a part is cut: so many eighths of it are its lower half. One table each; the best counts. */
static const int32_t cuts[] = {2, 4, 5};

enum { GRAINS = sizeof(grains) / sizeof(grains[0]), CUTS = sizeof(cuts) / sizeof(cuts[0]) };

/* What may be kept of a part, something at least, and the least time that the part then takes in all. */
typedef struct level {
    int64_t empty_ns;     /* when nothing is kept */
    crn_front kept[2][2]; /* by: its first stage needs a value of the stage before; its last stage has one */
    int32_t number;       /* equal for levels that are alike */
} level;

/* Stages lo..hi. Its memory serves one part after the other. */
typedef struct part {
    int32_t lo, hi;
    int64_t first_ns;  /* sum of the least forwards */
    int64_t *after_ns; /* of cells of room */
    level levels[LEVELS_MAX];
    crn_point *points; /* of all fronts */
    size_t point_count, point_capacity;
} part;

/* What one cut works with, and the next one after it on the same thread. */
typedef struct workshop {
    crn_front_maker *maker;
    crn_point *scratch[2]; /* room for 4 fronts each */
    part whole;
    part *halves[DEPTH_MAX]; /* the two parts at each depth; 20,000 stages go down 40 levels */
} workshop;

/* One cut. */
typedef struct bounder {
    const crn_task *task;
    const crn_chain_model *model;
    grain grain;
    int32_t cut;
    int64_t full_bytes; /* UNITS */
    int32_t top[LEVELS_MAX];
    int64_t *whole_ns; /* what was found: of cells of room */
    workshop *shop;
    cairn_allocator allocator;
    atomic_bool *stopped; /* of all cuts */
    bool failed, polls;
} bounder;

static const crn_point nothing = {0, 0};
static const crn_front zero = {&nothing, 1};

/* ---- units ---- */

static int64_t units_down(const bounder *b, int64_t bytes)
{
    return bytes > b->full_bytes ? UNITS + 1 : (int64_t)((crn_wide)bytes * (crn_wide)UNITS / (crn_wide)b->full_bytes);
}

static int32_t cell_count(const bounder *b)
{
    return 1 << b->grain.cells_log2;
}

static int64_t units_of(const bounder *b, int64_t cells)
{
    return cells * (UNITS >> b->grain.cells_log2);
}

/* Whole cells. */
static int32_t cells_down(const bounder *b, int64_t units)
{
    return (int32_t)(units / units_of(b, 1));
}

/* ---- parts ---- */

/* Points of one front of a part: no more than there are ways to keep something. */
static int32_t front_points(const bounder *b, int32_t lo, int32_t hi)
{
    int64_t ways = 1;
    for (int32_t l = lo; l <= hi && ways < b->grain.points; l++)
        ways *= crn_stage(b->model, l)->option_count + 2;
    return (int32_t)crn_min(ways, b->grain.points);
}

static void part_clear(const bounder *b, part *p)
{
    crn_free(&b->allocator, p->after_ns, (size_t)cell_count(b) + 1, sizeof(*p->after_ns));
    crn_free(&b->allocator, p->points, p->point_capacity, sizeof(*p->points));
}

static bool reserve_points(const bounder *b, part *p, size_t capacity)
{
    if (p->points && p->point_capacity >= capacity)
        return true;
    crn_free(&b->allocator, p->points, p->point_capacity, sizeof(*p->points));
    p->points = crn_alloc(&b->allocator, capacity, sizeof(*p->points));
    p->point_capacity = p->points ? capacity : 0;
    return p->points != NULL;
}

static bool part_begin(bounder *b, part *p, int32_t lo, int32_t hi)
{
    p->lo = lo;
    p->hi = hi;
    p->point_count = 0;
    if (!p->after_ns)
        p->after_ns = crn_alloc(&b->allocator, (size_t)cell_count(b) + 1, sizeof(*p->after_ns));
    size_t points = (size_t)front_points(b, lo, hi) * 4 * (size_t)b->grain.levels;
    b->failed |= !p->after_ns || !reserve_points(b, p, points);
    return !b->failed;
}

/* NULL when memory fails. */
static part *halves_at(bounder *b, int depth)
{
    if (!b->shop->halves[depth])
        b->shop->halves[depth] = crn_alloc_zero(&b->allocator, 2, sizeof(part));
    b->failed |= !b->shop->halves[depth];
    return b->shop->halves[depth];
}

/* Ends a front of the part. */
static crn_front end_front(const bounder *b, part *p, int64_t floor_ns)
{
    crn_point *points = p->points + p->point_count;
    int32_t most = (int32_t)crn_min(b->grain.points, (int64_t)(p->point_capacity - p->point_count));
    int32_t count = crn_front_end(b->shop->maker, floor_ns, points, most);
    p->point_count += (size_t)count;
    return (crn_front){points, count};
}

/* Unites fronts in a scratch list. */
static crn_front unite(const bounder *b, const crn_front *fronts, int count, crn_point *scratch)
{
    crn_front_begin(b->shop->maker);
    for (int i = 0; i < count; i++)
        crn_front_add_sums(b->shop->maker, zero, fronts[i]);
    return (crn_front){scratch, crn_front_end(b->shop->maker, 0, scratch, 4 * b->grain.points)};
}

/* ---- where parts are cut ---- */

static int32_t half_of(int32_t length, int32_t cut)
{
    return (int32_t)crn_max(1, (int64_t)length * cut / 8);
}

/* Whether two cuts make the same parts of up to so many stages, as they do of few. */
static bool cut_alike(int32_t stages, int32_t cut, int32_t other)
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
static int32_t needed_cells(const bounder *b, int32_t l, const cairn_stage_option *option)
{
    return cells_down(b, units_down(b, crn_backward_bytes(b->model, l, option)) + units_of(b, 1) - 1);
}

static int32_t count_fitting(const bounder *b, int32_t l, int32_t cells)
{
    const cairn_stage *stage = crn_stage(b->model, l);
    int32_t count = 0;
    for (int32_t k = 0; k < stage->option_count; k++)
        count += needed_cells(b, l, &stage->options[k]) <= cells;
    return count;
}

static void fill_stage_after(const bounder *b, part *p)
{
    const cairn_stage *stage = crn_stage(b->model, p->lo);
    for (int32_t i = 0; i <= cell_count(b); i++)
        p->after_ns[i] = NEVER;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t ns = crn_option_ns(option);
        for (int32_t i = needed_cells(b, p->lo, option); i <= cell_count(b); i++)
            p->after_ns[i] = crn_min(p->after_ns[i], ns);
    }
}

/* A set that is kept until its backward, or is saved anew where that may be. */
static crn_point saved_point(const bounder *b, const part *p, const cairn_stage_option *option, int32_t cells,
                             int64_t anew_ns)
{
    int64_t backward_ns = needed_cells(b, p->lo, option) <= cells ? option->backward_ns : NEVER;
    return (crn_point){units_down(b, option->saved_bytes),
                       crn_min(NEVER, option->forward_ns) + crn_min(backward_ns, anew_ns)};
}

/* The first stage's input is always there. */
static void fill_stage_level(bounder *b, part *p, level *v, int32_t cells)
{
    const cairn_stage *stage = crn_stage(b->model, p->lo);
    int64_t anew_ns = stage->no_recompute ? NEVER : p->after_ns[cells];
    crn_point saved[CAIRN_STAGE_OPTIONS_MAX], output = {units_down(b, stage->output_bytes), p->first_ns + anew_ns};
    for (int32_t k = 0; k < stage->option_count; k++)
        saved[k] = saved_point(b, p, &stage->options[k], cells, anew_ns);
    bool is_first = p->lo == 1;
    v->empty_ns = crn_min(NEVER, p->first_ns + anew_ns);
    v->kept[0][0] = v->kept[1][0] = (crn_front){NULL, 0}; /* what is kept is a value of the last stage, the only one */
    crn_front_begin(b->shop->maker);
    crn_front_add_sums(b->shop->maker, (crn_front){&output, 1}, zero);
    if (is_first)
        crn_front_add_sums(b->shop->maker, (crn_front){saved, stage->option_count}, zero);
    v->kept[0][1] = end_front(b, p, 0);
    crn_front_begin(b->shop->maker);
    if (!is_first)
        crn_front_add_sums(b->shop->maker, (crn_front){saved, stage->option_count}, zero);
    v->kept[1][1] = end_front(b, p, 0);
}

static void fill_stage(bounder *b, part *p)
{
    p->first_ns = crn_min(NEVER, least_forward_ns(crn_stage(b->model, p->lo)));
    fill_stage_after(b, p);
    for (int32_t i = 0; i < b->grain.levels; i++) {
        level *v = &p->levels[i];
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
static crn_front front_of_empty(const level *v, crn_point *point)
{
    *point = (crn_point){0, v->empty_ns};
    return (crn_front){point, v->empty_ns < NEVER};
}

/* When the upper half is one stage, the moment is that of its backward, which reads a value of the stage before. */
static crn_front kept_meanwhile(const bounder *b, const level *lower, bool is_stage, crn_point *empty)
{
    crn_front fronts[5] = {lower->kept[0][1], lower->kept[1][1], lower->kept[0][0], lower->kept[1][0]};
    fronts[4] = front_of_empty(lower, empty);
    return unite(b, fronts, is_stage ? 2 : 5, b->shop->scratch[0]);
}

static void fill_after(const bounder *b, part *p, const part *lower, const part *upper)
{
    int32_t begin = 0;
    for (int32_t i = 0; i <= cell_count(b); i++)
        p->after_ns[i] = NEVER;
    crn_point empty;
    crn_front kept = {NULL, 0};
    for (int32_t v = 0; v < b->grain.levels; v++) {
        if (v == 0 || lower->levels[v].number != lower->levels[v - 1].number)
            kept = kept_meanwhile(b, &lower->levels[v], upper->lo == upper->hi, &empty);
        for (int32_t i = 0; i < kept.count; i++) {
            int32_t shift = cells_down(b, kept.points[i].bytes), from = shift > begin ? shift : begin;
            if (from <= b->top[v])
                lower_sums(p->after_ns + from, lower->after_ns + from, upper->after_ns + (from - shift),
                           kept.points[i].ns, b->top[v] + 1 - from);
        }
        begin = b->top[v] + 1;
    }
}

static void fill_front(bounder *b, part *p, level *v, const level *lower, const level *upper, int32_t cells)
{
    int64_t floor_ns = p->after_ns[cells];
    crn_point points[2];
    crn_front lower_empty = front_of_empty(lower, &points[0]), upper_empty = front_of_empty(upper, &points[1]);
    for (int needs = 0; needs < 2; needs++) {
        crn_front any = unite(b, lower->kept[needs], 2, b->shop->scratch[needs]);
        for (int has = 0; has < 2; has++) {
            crn_front_begin(b->shop->maker);
            crn_front_add_sums(b->shop->maker, any, upper->kept[0][has]);
            crn_front_add_sums(b->shop->maker, lower->kept[needs][1], upper->kept[1][has]);
            if (needs == 0)
                crn_front_add_sums(b->shop->maker, lower_empty, upper->kept[0][has]);
            if (has == 0)
                crn_front_add_sums(b->shop->maker, upper_empty, any);
            v->kept[needs][has] = end_front(b, p, floor_ns);
        }
    }
}

static void fill_levels(bounder *b, part *p, const part *lower, const part *upper)
{
    for (int32_t i = 0; i < b->grain.levels; i++) {
        level *v = &p->levels[i];
        const level *l = &lower->levels[i], *u = &upper->levels[i];
        int64_t after_ns = p->after_ns[b->top[i]];
        if (i > 0 && l->number == (l - 1)->number && u->number == (u - 1)->number &&
            after_ns == p->after_ns[b->top[i - 1]]) {
            *v = *(v - 1);
            continue;
        }
        bool must_keep = l->empty_ns >= NEVER || u->empty_ns >= NEVER;
        v->number = i;
        v->empty_ns = must_keep ? NEVER : crn_min(NEVER, p->first_ns + after_ns);
        fill_front(b, p, v, l, u, b->top[i]);
    }
}

static bool build(bounder *b, part *p, int depth, int32_t lo, int32_t hi);

static bool build_of_two(bounder *b, part *p, int depth)
{
    int32_t length = p->hi - p->lo + 1, half = half_of(length, b->cut);
    part *halves = halves_at(b, depth);
    if (!halves || !build(b, &halves[0], depth + 1, p->lo, p->lo + half - 1) ||
        !build(b, &halves[1], depth + 1, p->lo + half, p->hi))
        return false;
    p->first_ns = crn_min(NEVER, halves[0].first_ns + halves[1].first_ns);
    fill_after(b, p, &halves[0], &halves[1]);
    fill_levels(b, p, &halves[0], &halves[1]);
    return true;
}

/* Every thread looks at the clock, for another may have gone through all of its cuts; only the caller's may poll. */
static bool must_stop(bounder *b)
{
    bool looks = b->model->n > POLL_STAGES_MIN;
    if (looks && (b->polls ? crn_should_stop(b->task, NULL) : crn_task_is_past(b->task)))
        atomic_store(b->stopped, true);
    return atomic_load(b->stopped);
}

static bool build(bounder *b, part *p, int depth, int32_t lo, int32_t hi)
{
    if (!part_begin(b, p, lo, hi) || must_stop(b))
        return false;
    if (lo < hi)
        return build_of_two(b, p, depth);
    fill_stage(b, p);
    return true;
}

/* ---- one cut ---- */

static bool open_shop(bounder *b)
{
    workshop *shop = b->shop;
    if (!shop->maker)
        shop->maker = crn_front_maker_new(&b->allocator);
    b->failed |= !shop->maker;
    for (int i = 0; i < 2; i++) {
        if (!shop->scratch[i])
            shop->scratch[i] = crn_alloc(&b->allocator, 4 * (size_t)b->grain.points, sizeof(*shop->scratch[i]));
        b->failed |= !shop->scratch[i];
    }
    return !b->failed;
}

static void close_shop(const bounder *b)
{
    workshop *shop = b->shop;
    for (int depth = 0; depth < DEPTH_MAX && shop->halves[depth]; depth++) {
        part_clear(b, &shop->halves[depth][0]);
        part_clear(b, &shop->halves[depth][1]);
        crn_free(&b->allocator, shop->halves[depth], 2, sizeof(part));
    }
    part_clear(b, &shop->whole);
    for (int i = 0; i < 2; i++)
        crn_free(&b->allocator, shop->scratch[i], 4 * (size_t)b->grain.points, sizeof(*shop->scratch[i]));
    crn_front_maker_free(shop->maker);
    *shop = (workshop){.maker = NULL}; /* others may share it */
}

static void run_cut(void *context, int64_t i, int worker)
{
    bounder *b = (bounder *)context + i;
    b->polls = worker == 0; /* on the caller's thread */
    if (open_shop(b) && build(b, &b->shop->whole, 0, 1, b->model->n))
        memcpy(b->whole_ns, b->shop->whole.after_ns, ((size_t)cell_count(b) + 1) * sizeof(*b->whole_ns));
}

/* ---- the table ---- */

typedef struct table {
    int64_t full_bytes; /* with so much beside always_bytes the bound is what no schedule can avoid */
    int64_t always_bytes;
    int cells_log2;
    int64_t *least_ns; /* of cells of what the budget leaves beside always_bytes */
} table;

/* What backwards take, beside always_bytes, when everything is saved with the fastest options. */
static int64_t find_full_bytes(const crn_chain_model *model)
{
    int64_t full = 0, saved = 0;
    for (int32_t l = 1; l <= model->n; l++) {
        const cairn_stage *stage = crn_stage(model, l);
        const cairn_stage_option *fastest = &stage->options[crn_fastest_option(stage)];
        full = crn_max(full, saved + crn_backward_bytes(model, l, fastest));
        saved += fastest->saved_bytes;
    }
    return full;
}

/* Levels lie denser where there is little room. */
static void place_levels(bounder *b)
{
    int64_t least = UNITS;
    for (int32_t l = 1; l <= b->model->n; l++)
        for (int32_t k = 0; k < crn_stage(b->model, l)->option_count; k++)
            least = crn_min(least, units_down(b, crn_backward_bytes(b->model, l, &crn_stage(b->model, l)->options[k])));
    int64_t low = cells_down(b, least), span = cell_count(b) - low, levels = b->grain.levels;
    for (int64_t i = 0; i < levels; i++)
        b->top[i] = (int32_t)(low + span * (i + 1) * (i + 1) / (levels * levels));
}

static void table_free(const crn_task *task, table *made)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, made->least_ns, ((size_t)1 << made->cells_log2) + 1, sizeof(*made->least_ns));
    crn_free(&allocator, made, 1, sizeof(*made));
}

static table *table_new(const crn_task *task, const crn_chain_model *model, int cells_log2)
{
    cairn_allocator allocator = crn_allocator(task->env);
    table *made = crn_alloc_zero(&allocator, 1, sizeof(*made));
    if (!made)
        return NULL;
    made->full_bytes = find_full_bytes(model);
    made->always_bytes = model->always_bytes;
    made->cells_log2 = cells_log2;
    made->least_ns = crn_alloc(&allocator, ((size_t)1 << made->cells_log2) + 1, sizeof(*made->least_ns));
    if (made->least_ns)
        return made;
    table_free(task, made);
    return NULL;
}

static const grain *grain_for(int64_t n)
{
    for (int i = 0; i < GRAINS; i++)
        if (n <= grains[i].stages_max)
            return &grains[i];
    return NULL;
}

/* A bounder for every cut that differs from the ones before; returns how many there are. */
static int make_bounders(const bounder *like, bounder *bounders, workshop *shops, crn_arena *arena)
{
    bool has_threads = crn_team_size(like->task->team) > 1;
    int count = 0;
    for (int i = 0; i < CUTS; i++) {
        bool is_new = true;
        for (int j = 0; j < count; j++)
            is_new &= !cut_alike(like->model->n, cuts[i], bounders[j].cut);
        if (!is_new)
            continue;
        bounder *b = &bounders[count];
        *b = *like;
        b->cut = cuts[i];
        b->shop = &shops[has_threads ? count : 0];
        b->whole_ns = crn_arena_alloc(arena, (size_t)cell_count(like) + 1, sizeof(*b->whole_ns));
        b->failed = !b->whole_ns;
        count++;
    }
    return count;
}

/* The best of all cuts. */
static void take_best(const bounder *bounders, int count, table *made)
{
    memcpy(made->least_ns, bounders[0].whole_ns, ((size_t)cell_count(bounders) + 1) * sizeof(*made->least_ns));
    for (int c = 1; c < count; c++)
        for (int32_t i = 0; i <= cell_count(bounders); i++)
            made->least_ns[i] = crn_max(made->least_ns[i], bounders[c].whole_ns[i]);
}

static bool any_failed(const bounder *bounders, int count)
{
    bool failed = false;
    for (int i = 0; i < count; i++)
        failed |= bounders[i].failed;
    return failed;
}

/* All cuts; false when memory fails. */
static bool bound_by_cuts(const bounder *like, table *made)
{
    crn_arena arena;
    workshop shops[CUTS] = {{.maker = NULL}};
    bounder bounders[CUTS];
    crn_arena_init(&arena, like->allocator);
    int count = make_bounders(like, bounders, shops, &arena);
    bool failed = any_failed(bounders, count);
    if (!failed) {
        crn_team_run(like->task->team, count, run_cut, bounders);
        failed = any_failed(bounders, count);
        if (!failed && !*like->stopped)
            take_best(bounders, count, made);
        for (int i = 0; i < count; i++)
            close_shop(&bounders[i]);
    }
    crn_arena_clear(&arena);
    return !failed;
}

/* NULL with OK: there was no time for it. */
static cairn_status make_table(const crn_task *task, const crn_chain_model *model, table **made, cairn_error *error)
{
    atomic_bool stopped = false;
    bounder like = {.task = task,
                    .model = model,
                    .grain = *grain_for(model->n),
                    .allocator = crn_allocator(task->env),
                    .stopped = &stopped};
    *made = table_new(task, model, like.grain.cells_log2);
    if (!*made)
        return crn_no_memory(error);
    like.full_bytes = (*made)->full_bytes;
    place_levels(&like);
    bool done = bound_by_cuts(&like, *made);
    if (done && !stopped)
        return CAIRN_OK;
    table_free(task, *made);
    *made = NULL;
    return done ? CAIRN_OK : crn_no_memory(error);
}

/* Whether all cuts end in time, roughly and on one thread. Half a table is none, so that none is begun in vain. */
static bool has_time(const crn_task *task, int64_t n)
{
    const grain *fineness = grain_for(n);
    int64_t work_ns = n * fineness->levels * fineness->points * POINT_NS;
    return task->deadline_ns == CAIRN_NONE || work_ns <= task->deadline_ns - crn_clock_ns();
}

/* NULL with OK also where the budget is enough for everything, or for nothing. */
static cairn_status table_for(const crn_task *task, int64_t budget_bytes, table **made, cairn_error *error)
{
    crn_chain_model model;
    cairn_status status = crn_chain_model_init(&model, task, error);
    if (status == CAIRN_OK && has_time(task, model.n) && budget_bytes > model.always_bytes &&
        budget_bytes - model.always_bytes < find_full_bytes(&model))
        status = make_table(task, &model, made, error);
    crn_chain_model_clear(&model);
    return status;
}

/* NEVER: there is no schedule. */
static int64_t look_up(const table *t, int64_t budget_bytes)
{
    int64_t room = budget_bytes - t->always_bytes, cells = (int64_t)1 << t->cells_log2;
    if (room < 0)
        return NEVER;
    if (room < t->full_bytes)
        cells = (int64_t)(((crn_wide)room * (crn_wide)cells + (crn_wide)t->full_bytes - 1) / (crn_wide)t->full_bytes);
    return t->least_ns[cells];
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    table *made = *kept;
    if (!chain || task->machine || budget_bytes == CAIRN_NONE || !grain_for(chain->stage_count))
        return CAIRN_OK;
    if (!made)
        CRN_TRY(table_for(task, budget_bytes, &made, error));
    *kept = made;
    int64_t found_ns = made ? look_up(made, budget_bytes) : NEVER;
    if (found_ns < NEVER)
        *bound_ns = crn_max(*bound_ns, found_ns);
    return CAIRN_OK;
}

static void forget(const crn_task *task, void *kept)
{
    table_free(task, kept);
}

const crn_bound_method crn_chain_bound_method = {.name = "halving", .raise_makespan = raise_makespan, .forget = forget};
