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
#include <string.h>

#include "solve/chain/chain_halving.h"

/* What all cuts of a stage take for each point of each level. */
enum { POINT_NS = 70 };

static const crn_halving_resolution resolutions[] = {
    {8, 11, 16, 256}, {48, 12, 20, 160}, {400, 11, 16, 128}, {1500, 10, 12, 96}, {20000, 9, 8, 48}};

/* Where a part is cut: so many eighths of it are its lower half. One table each; the best counts. */
static const int32_t cuts[] = {2, 4, 5};

enum { RESOLUTIONS = sizeof(resolutions) / sizeof(resolutions[0]), CUTS = sizeof(cuts) / sizeof(cuts[0]) };

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
static void place_levels(crn_halving *b)
{
    int64_t least = CRN_HALVING_UNITS;
    for (int32_t l = 1; l <= b->model->n; l++)
        for (int32_t k = 0; k < crn_stage(b->model, l)->option_count; k++)
            least = crn_min(least,
                            crn_halving_units(b, crn_backward_bytes(b->model, l, &crn_stage(b->model, l)->options[k])));
    int64_t low = crn_halving_whole_cells(b, least), span = crn_halving_cells(b) - low, levels = b->resolution.levels;
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

static const crn_halving_resolution *resolution_for(int64_t n)
{
    for (int i = 0; i < RESOLUTIONS; i++)
        if (n <= resolutions[i].stages_max)
            return &resolutions[i];
    return NULL;
}

/* A bounder for every cut that differs from the ones before; returns how many there are. */
static int make_bounders(const crn_halving *like, crn_halving *bounders, crn_halving_buffers *buffers, crn_arena *arena)
{
    bool has_threads = crn_team_size(like->task->team) > 1;
    int count = 0;
    for (int i = 0; i < CUTS; i++) {
        bool is_new = true;
        for (int j = 0; j < count; j++)
            is_new &= !crn_halving_cut_alike(like->model->n, cuts[i], bounders[j].cut);
        if (!is_new)
            continue;
        crn_halving *b = &bounders[count];
        *b = *like;
        b->cut = cuts[i];
        b->buffers = &buffers[has_threads ? count : 0];
        b->whole_ns = crn_arena_alloc(arena, (size_t)crn_halving_cells(like) + 1, sizeof(*b->whole_ns));
        b->failed = !b->whole_ns;
        count++;
    }
    return count;
}

/* The best of all cuts. */
static void take_best(const crn_halving *bounders, int count, table *made)
{
    memcpy(made->least_ns, bounders[0].whole_ns, ((size_t)crn_halving_cells(bounders) + 1) * sizeof(*made->least_ns));
    for (int c = 1; c < count; c++)
        for (int32_t i = 0; i <= crn_halving_cells(bounders); i++)
            made->least_ns[i] = crn_max(made->least_ns[i], bounders[c].whole_ns[i]);
}

static bool any_failed(const crn_halving *bounders, int count)
{
    bool failed = false;
    for (int i = 0; i < count; i++)
        failed |= bounders[i].failed;
    return failed;
}

/* All cuts; false when memory fails. */
static bool bound_by_cuts(const crn_halving *like, table *made)
{
    crn_arena arena;
    crn_halving_buffers buffers[CUTS] = {{.maker = NULL}};
    crn_halving bounders[CUTS];
    crn_arena_init(&arena, like->allocator);
    int count = make_bounders(like, bounders, buffers, &arena);
    bool failed = any_failed(bounders, count);
    if (!failed) {
        crn_team_run(like->task->team, count, crn_halving_run, bounders);
        failed = any_failed(bounders, count);
        if (!failed && !*like->stopped)
            take_best(bounders, count, made);
        for (int i = 0; i < count; i++)
            crn_halving_free_buffers(&bounders[i]);
    }
    crn_arena_clear(&arena);
    return !failed;
}

/* NULL with OK: there was no time for it. */
static cairn_status make_table(const crn_task *task, const crn_chain_model *model, table **made, cairn_error *error)
{
    atomic_bool stopped = false;
    crn_halving like = {.task = task,
                        .model = model,
                        .resolution = *resolution_for(model->n),
                        .allocator = crn_allocator(task->env),
                        .stopped = &stopped};
    *made = table_new(task, model, like.resolution.cells_log2);
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
    const crn_halving_resolution *resolution = resolution_for(n);
    int64_t work_ns = n * resolution->levels * resolution->points * POINT_NS;
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

/* CRN_FRONT_NEVER: there is no schedule. */
static int64_t look_up(const table *t, int64_t budget_bytes)
{
    int64_t room = budget_bytes - t->always_bytes, cells = (int64_t)1 << t->cells_log2;
    if (room < 0)
        return CRN_FRONT_NEVER;
    if (room < t->full_bytes)
        cells = (int64_t)(((crn_wide)room * (crn_wide)cells + (crn_wide)t->full_bytes - 1) / (crn_wide)t->full_bytes);
    return t->least_ns[cells];
}

static cairn_status raise_makespan(const crn_task *task, void **kept, int64_t budget_bytes, int64_t *bound_ns,
                                   cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    table *made = *kept;
    if (!chain || task->machine || budget_bytes == CAIRN_NONE || !resolution_for(chain->stage_count))
        return CAIRN_OK;
    if (!made)
        CRN_TRY(table_for(task, budget_bytes, &made, error));
    *kept = made;
    int64_t found_ns = made ? look_up(made, budget_bytes) : CRN_FRONT_NEVER;
    if (found_ns < CRN_FRONT_NEVER)
        *bound_ns = crn_max(*bound_ns, found_ns);
    return CAIRN_OK;
}

static void forget(const crn_task *task, void *kept)
{
    table_free(task, kept);
}

const crn_bound_method crn_chain_bound_method = {.name = "halving", .raise_makespan = raise_makespan, .forget = forget};
