#include "solve/chain/slotted_program.h"

#include <stdatomic.h>

enum { TILE = 32, PART = 16 };

/* ---- slots ---- */

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static int32_t slots_of(const crn_slotted_program *p, int64_t bytes)
{
    return crn_slots_of(&p->scale, bytes);
}

static void fill_stages(crn_slotted_program *p)
{
    size_t next = 0;
    p->output[0] = 0; /* a[0] is always there */
    for (int32_t l = 1; l <= p->n; l++) {
        const cairn_stage *stage = crn_stage(p->model, l);
        p->output[l] = slots_of(p, stage->output_bytes);
        p->fastest[l] = crn_fastest_option(stage);
        p->option_begin[l] = next;
        for (int32_t k = 0; k < stage->option_count; k++)
            p->saved[next++] = slots_of(p, stage->options[k].saved_bytes);
    }
}

static int32_t saved_slots(const crn_slotted_program *p, int32_t l, int32_t k)
{
    return p->saved[p->option_begin[l] + (size_t)k];
}

/* ---- rows ---- */

static const crn_row *row_of(const crn_slotted_program *p, int32_t s, int32_t t)
{
    return &p->rows[crn_row_at(p->n, s, t)];
}

int64_t crn_slotted_value(const crn_slotted_program *p, int32_t s, int32_t t, int32_t m)
{
    return p->width->value(p->values, row_of(p, s, t), m);
}

/* From which m on stage s can be saved with its fastest option and run backward, while d[t] is current. */
static int32_t enough_to_save(const crn_slotted_program *p, int32_t s, int32_t t)
{
    const cairn_stage_option *option = &crn_stage(p->model, s)->options[p->fastest[s]];
    return slots_of(p, crn_max(p->model->base[t] + crn_save_bytes(option), crn_backward_bytes(p->model, s, option)));
}

/* From which m on C(s,t,m) is constant, given that of (s+1, t): everything is kept, and run with the fastest options. */
static int32_t enough(const crn_slotted_program *p, int32_t s, int32_t t, int32_t rest)
{
    int32_t kept = p->model->outputs_only ? p->output[s] : saved_slots(p, s, p->fastest[s]), here;
    if (s == t || !p->model->outputs_only)
        here = enough_to_save(p, s, t);
    else
        here = larger(enough_to_save(p, s, s), slots_of(p, p->model->base[t] + crn_keep_bytes(crn_stage(p->model, s))));
    here = s < t ? larger(here, kept + rest) : here;
    return smaller(here, p->slots + 1);
}

/* The range of a row. m of (s,.) is at most what X leaves: X = a[s-1] at least, nothing for s = 1. */
static crn_row lay_row(crn_slotted_program *p, int32_t s, int32_t t, int32_t enough_slots)
{
    int32_t most = smaller(p->slots - p->output[s - 1], crn_slotted_cuts_slots(&p->cuts, s, t));
    crn_row made = {.floor_ns = p->width->infinite,
                    .low = slots_of(p, crn_least_of(p->table, s, t)),
                    .high = smaller(enough_slots, most)};
    if (made.high < made.low || crn_slotted_cuts_ns(&p->cuts, s, t) < 0) {
        made.high = made.low - 1;
        return made;
    }
    /* value_count is a multiple of the line */
    size_t begin = p->value_count + CRN_ROW_LINE + (size_t)made.low % CRN_ROW_LINE;
    made.origin = begin - (size_t)made.low;
    p->value_count = (begin + (size_t)(made.high - made.low) + 2 * CRN_ROW_LINE - 1) / CRN_ROW_LINE * CRN_ROW_LINE;
    return made;
}

/* Where each row is constant, kept as its end. */
static void find_enough(crn_slotted_program *p)
{
    for (int32_t t = 1; t <= p->n; t++) {
        int32_t rest = 0;
        for (int32_t s = t; s >= 1; s--)
            p->rows[crn_row_at(p->n, s, t)].high = rest = enough(p, s, t, rest);
    }
}

static void lay_rows(crn_slotted_program *p)
{
    p->value_count = 0;
    for (int32_t t = 1; t <= p->n; t++)
        for (int32_t s = t; s >= 1; s--) {
            crn_row *row = &p->rows[crn_row_at(p->n, s, t)];
            *row = p->columns[crn_column_at(s, t)] = lay_row(p, s, t, row->high);
        }
}

/* Memory for the rows that are laid. */
static cairn_status allocate_values(crn_slotted_program *p, cairn_error *error)
{
    size_t line_bytes = CRN_ROW_LINE * p->width->value_bytes;
    char *values = crn_arena_alloc(&p->arena, p->value_count + CRN_ROW_LINE, p->width->value_bytes);
    if (!values)
        return crn_no_memory(error);
    p->values = values + (line_bytes - (uintptr_t)values % line_bytes) % line_bytes;
    return CAIRN_OK;
}

/* ---- filling rows ---- */

static void relax(const crn_slotted_program *p, const crn_row *to, const crn_row *x, int32_t kept, const crn_row *y,
                  int64_t ns, int32_t from)
{
    p->width->relax(p->values, to, x, kept, y, ns, from);
}

/* From which m on an option's saving forward fits, and its backward. */
static int32_t save_from(const crn_slotted_program *p, int32_t t, const cairn_stage_option *option)
{
    return slots_of(p, p->model->base[t] + crn_save_bytes(option));
}

static int32_t backward_from(const crn_slotted_program *p, int32_t s, const cairn_stage_option *option)
{
    return slots_of(p, crn_backward_bytes(p->model, s, option));
}

/* Nothing left to do, which takes no time whatever m is. */
static const crn_row done = {.low = 0, .high = -CRN_ROW_LINE, .floor_ns = 0};

static int64_t least_ns(const crn_slotted_program *p, int32_t s)
{
    const cairn_stage_option *option = &crn_stage(p->model, s)->options[p->fastest[s]];
    return crn_option_ns(option);
}

/* rest: of (s + 1, t); again: of (s, s), or NULL to go without. */
static void relax_saves(const crn_slotted_program *p, int32_t s, int32_t t, const crn_row *to, const crn_row *rest,
                        const crn_row *again)
{
    const cairn_stage *stage = crn_stage(p->model, s);
    if (s < t && p->model->outputs_only)
        return;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int32_t from = save_from(p, t, option), kept = s < t ? saved_slots(p, s, k) : 0;
        int64_t ns = crn_option_ns(option) - least_ns(p, s);
        relax(p, to, rest, kept, &done, ns, larger(from, backward_from(p, s, option)));
        if (s < t && again && !stage->no_recompute)
            relax(p, to, rest, kept, again, option->forward_ns, from);
    }
}

/* Tries the splits first..last of (s,t), all of whose operands are known. */
static void relax_splits(const crn_slotted_program *p, int32_t s, int32_t t, int32_t first, int32_t last)
{
    const crn_row *to = row_of(p, s, t);
    if (to->low > to->high || first > last)
        return;
    const size_t *begin = p->table->pass_begin + crn_row_at(p->n, s, first - 1);
    const crn_row *left = row_of(p, s, first - 1), *right = &p->columns[crn_column_at(first, t)];
    int64_t base = p->model->base[t], known_bytes = -1;
    int32_t known_slots = 0;
    for (int32_t split = first; split <= last; split++, begin++, left++, right++)
        for (size_t i = begin[0]; i < begin[1]; i++) {
            const crn_pass *pass = &p->table->passes[i];
            if (pass->peak_bytes != known_bytes) { /* the peak of a longer way is mostly that of the shorter */
                known_bytes = pass->peak_bytes;
                known_slots = slots_of(p, base + known_bytes);
            }
            relax(p, to, right, p->output[split - 1], left, pass->ns, known_slots);
        }
}

/* Stages first..last. */
typedef struct span {
    int32_t first, last;
} span;

static span span_of(const crn_slotted_program *p, int32_t tile)
{
    return (span){tile * TILE + 1, smaller(tile * TILE + TILE, p->n)};
}

/* All rows of a tile with the splits of another, all of whose operands are known. */
static void relax_block(const crn_slotted_program *p, span of_s, span of_t, span of_split)
{
    for (int32_t s = of_s.first; s <= of_s.last; s++)
        for (int32_t t = of_t.first; t <= of_t.last; t++)
            relax_splits(p, s, t, of_split.first, smaller(of_split.last, p->model->fence[s]));
}

/* Part i of a span that is cut into pieces of PART. */
static span part_of(span whole, int32_t i)
{
    int32_t first = whole.first + i * PART;
    return (span){first, smaller(first + PART - 1, whole.last)};
}

/* What is left: saves, and the splits that have an operand in the tile itself. */
static void finish_row(const crn_slotted_program *p, int32_t s, int32_t t, int32_t last_s, int32_t first_t)
{
    crn_row *r = &p->rows[crn_row_at(p->n, s, t)];
    int32_t last = crn_last_split(p->table, s, t);
    if (r->low > r->high)
        return;
    relax_saves(p, s, t, r, s < t ? row_of(p, s + 1, t) : &done, row_of(p, s, s));
    if (first_t <= last_s) { /* one tile for s and t */
        relax_splits(p, s, t, s + 1, last);
    } else {
        relax_splits(p, s, t, s + 1, smaller(last_s, last));
        relax_splits(p, s, t, first_t, last);
    }
    p->width->finish(p->values, r, crn_slotted_cuts_ns(&p->cuts, s, t));
    p->columns[crn_column_at(s, t)] = *r;
}

/* ---- an answer to cut with ---- */

/*
 * The best of the answers in which no stage runs forward more than twice: (s,n) splits, but what a split leaves to its left
 * is small enough to be saved as a whole. One row for each s.
 */
static void fill_simple_row(const crn_slotted_program *p, const crn_row *rows, int32_t s)
{
    const crn_row *to = &rows[s];
    const size_t *begin = p->table->pass_begin + crn_row_at(p->n, s, s);
    relax_saves(p, s, p->n, to, s < p->n ? &rows[s + 1] : &done, NULL);
    for (int32_t split = s + 1; split <= crn_last_split(p->table, s, p->n); split++, begin++) {
        int32_t from = p->rows[crn_row_at(p->n, s, split - 1)].high; /* enough for all to the left */
        for (size_t i = begin[0]; i < begin[1]; i++) {
            const crn_pass *pass = &p->table->passes[i];
            relax(p, to, &rows[split], p->output[split - 1], &done, pass->ns,
                  larger(from, slots_of(p, p->model->base[p->n] + pass->peak_bytes)));
        }
    }
}

static cairn_status find_simple(crn_slotted_program *p, crn_row *rows, const crn_task *task, int64_t *ns,
                                cairn_error *error)
{
    p->value_count = 0;
    for (int32_t s = p->n; s >= 1; s--)
        rows[s] = lay_row(p, s, p->n, p->slots);
    CRN_TRY(allocate_values(p, error));
    for (int32_t s = p->n; s >= 1; s--) {
        p->width->clear(p->values, &rows[s], INT64_MAX);
        fill_simple_row(p, rows, s);
        p->width->finish(p->values, &rows[s], INT64_MAX);
        if (crn_should_stop(task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped before the first wave");
    }
    *ns = p->width->value(p->values, &rows[1], p->slots);
    return CAIRN_OK;
}

static int32_t least_saved_slots(const crn_slotted_program *p, int32_t l)
{
    int32_t least = saved_slots(p, l, 0);
    for (int32_t k = 1; k < crn_stage(p->model, l)->option_count; k++)
        least = smaller(least, saved_slots(p, l, k));
    return least;
}

static int64_t least_pass_ns(const cairn_stage *stage)
{
    int64_t least = stage->forward_only_ns;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, stage->options[k].forward_ns);
    return least;
}

static cairn_status find_cuts(crn_slotted_program *p, const crn_task *task, cairn_error *error)
{
    size_t n = (size_t)p->n;
    crn_row *rows = crn_arena_alloc(&p->arena, n + 1, sizeof(*rows));
    int64_t *pass_ns = crn_arena_alloc(&p->arena, n + 1, sizeof(*pass_ns)), known_ns = CRN_ROW_INFINITE;
    int32_t *saved = crn_arena_alloc(&p->arena, n + 1, sizeof(*saved));
    if (!rows || !pass_ns || !saved)
        return crn_no_memory(error);
    p->cuts = (crn_slotted_cuts){.n = p->n, .slots = p->slots, .most_ns = -1};
    if (p->model->outputs_only)
        return CAIRN_OK;
    CRN_TRY(find_simple(p, rows, task, &known_ns, error));
    if (known_ns == CRN_ROW_INFINITE)
        return CAIRN_OK;
    for (int32_t l = 1; l <= p->n; l++) {
        saved[l] = least_saved_slots(p, l);
        pass_ns[l] = least_pass_ns(crn_stage(p->model, l));
    }
    bool made = crn_slotted_cuts_init(&p->cuts, p->n, p->slots, known_ns, pass_ns, saved, &p->arena);
    return made ? CAIRN_OK : crn_no_memory(error);
}

/* The tiles whose rows have (almost) the same t - s. */
typedef struct wave {
    const crn_slotted_program *program;
    int32_t distance; /* of the tile of t from that of s */
    const crn_task *task;
    cairn_progress progress;
    atomic_bool stopped;
} wave;

enum { PARTS = TILE / PART };

/* A wave of a long chain takes long: the caller's own thread asks within it. */
static bool is_stopped(wave *w, int worker)
{
    if (worker == 0 && !atomic_load(&w->stopped) && crn_should_stop(w->task, &w->progress))
        atomic_store(&w->stopped, true);
    return atomic_load(&w->stopped);
}

/*
 * A part of a tile with the splits in the tiles between, in small blocks as in a product of matrices: what a block uses
 * fits the second cache. Parts are independent, so that the few tiles of the last waves still are work for all threads.
 */
static void relax_part(void *context, int64_t i, int worker)
{
    wave *w = context;
    const crn_slotted_program *p = w->program;
    int32_t tile = (int32_t)i / (PARTS * PARTS), part = (int32_t)i % (PARTS * PARTS);
    span of_s = part_of(span_of(p, tile), part / PARTS);
    span of_t = part_of(span_of(p, tile + w->distance), part % PARTS);
    if (is_stopped(w, worker))
        return;
    for (int32_t s = of_s.first; s <= of_s.last; s++)
        for (int32_t t = larger(s, of_t.first); t <= of_t.last; t++)
            p->width->clear(p->values, row_of(p, s, t), crn_slotted_cuts_ns(&p->cuts, s, t));
    for (int32_t between = tile + 1; between < tile + w->distance; between++)
        for (int32_t j = 0; j < PARTS; j++)
            relax_block(p, of_s, of_t, part_of(span_of(p, between), j));
}

static void finish_tile(void *context, int64_t i, int worker)
{
    wave *w = context;
    const crn_slotted_program *p = w->program;
    span of_s = span_of(p, (int32_t)i), of_t = span_of(p, (int32_t)i + w->distance);
    if (is_stopped(w, worker))
        return;
    for (int32_t t = of_t.first; t <= of_t.last; t++)
        for (int32_t s = smaller(of_s.last, t); s >= of_s.first; s--)
            finish_row(p, s, t, of_s.last, of_t.first);
}

static cairn_status fill_rows(crn_slotted_program *p, const crn_task *task, cairn_error *error)
{
    int32_t tiles = (p->n + TILE - 1) / TILE;
    for (int32_t distance = 0; distance < tiles; distance++) {
        wave w = {p, distance, task, {"filling rows", distance, tiles, CAIRN_NONE, CAIRN_NONE}, false};
        crn_team_run(task->team, (int64_t)(tiles - distance) * PARTS * PARTS, relax_part, &w);
        crn_team_run(task->team, tiles - distance, finish_tile, &w);
        if (is_stopped(&w, 0))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %d of %d waves", distance + 1, tiles);
    }
    return CAIRN_OK;
}

/* ---- the way back ---- */

static bool is_split(const crn_slotted_program *p, int32_t s, int32_t t, int32_t m, int64_t value,
                     crn_decision *decision)
{
    for (int32_t split = s + 1; split <= crn_last_split(p->table, s, t); split++) {
        int32_t count, rest = m - p->output[split - 1];
        const crn_pass *pass = crn_passes_of(p->table, s, split - 1, &count);
        int64_t both_ns = crn_slotted_value(p, split, t, rest) + crn_slotted_value(p, s, split - 1, m);
        for (int32_t i = 0; i < count; i++)
            if (crn_add_saturating(pass[i].ns, both_ns) == value &&
                slots_of(p, p->model->base[t] + pass[i].peak_bytes) <= m) {
                *decision =
                    (crn_decision){.kind = CRN_DECIDE_CHECKPOINT, .split = split, .way = i, .right = rest, .left = m};
                return true;
            }
    }
    return false;
}

static bool is_save(const crn_slotted_program *p, int32_t s, int32_t t, int32_t m, int64_t value,
                    crn_decision *decision)
{
    const cairn_stage *stage = crn_stage(p->model, s);
    for (int32_t k = 0; k < stage->option_count && (s == t || !p->model->outputs_only); k++) {
        const cairn_stage_option *option = &stage->options[k];
        int32_t rest = m - saved_slots(p, s, k);
        int64_t ns = crn_option_ns(option) - least_ns(p, s);
        if (crn_add_saturating(ns, s < t ? crn_slotted_value(p, s + 1, t, rest) : 0) == value &&
            save_from(p, t, option) <= m && backward_from(p, s, option) <= m) {
            *decision = (crn_decision){.kind = CRN_DECIDE_SAVE, .option = k, .right = rest};
            return true;
        }
    }
    return false;
}

static crn_decision save_and_drop(const crn_slotted_program *p, int32_t s, int32_t t, int32_t m, int64_t value)
{
    const cairn_stage *stage = crn_stage(p->model, s);
    crn_decision decision = {.kind = CRN_DECIDE_SAVE_AND_DROP, .left = m};
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        decision.option = k;
        decision.right = m - saved_slots(p, s, k);
        int64_t rest_ns = crn_slotted_value(p, s + 1, t, (int32_t)decision.right) + crn_slotted_value(p, s, s, m);
        if (crn_add_saturating(option->forward_ns, rest_ns) == value && save_from(p, t, option) <= m)
            break;
    }
    return decision;
}

crn_decision crn_slotted_decide(const void *context, int32_t s, int32_t t, int64_t units)
{
    const crn_slotted_program *p = context;
    int32_t m = (int32_t)units;
    int64_t value = crn_slotted_value(p, s, t, m);
    crn_decision decision;
    if (is_save(p, s, t, m, value, &decision) || is_split(p, s, t, m, value, &decision))
        return decision;
    return save_and_drop(p, s, t, m, value);
}

/* ---- the program for one budget ---- */

cairn_status crn_slotted_program_make(crn_slotted_program *p, const crn_chain_table *table, const crn_task *task,
                                      int64_t available, const crn_row_width *width, cairn_error *error)
{
    size_t n = (size_t)table->model.n;
    *p = (crn_slotted_program){.table = table,
                               .model = &table->model,
                               .n = table->model.n,
                               .slots = (int32_t)task->settings->slots,
                               .width = width};
    crn_arena_init(&p->arena, crn_allocator(task->env));
    p->output = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->output));
    p->option_begin = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->option_begin));
    p->saved = crn_arena_alloc(&p->arena, crn_option_total(p->model), sizeof(*p->saved));
    p->fastest = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->fastest));
    p->rows = crn_arena_alloc(&p->arena, crn_pair_count(p->n), sizeof(*p->rows));
    p->columns = crn_arena_alloc(&p->arena, crn_pair_count(p->n), sizeof(*p->columns));
    if (!crn_slot_scale_init(&p->scale, available, p->slots, &p->arena) || !p->output || !p->option_begin ||
        !p->saved || !p->fastest || !p->rows || !p->columns)
        return crn_no_memory(error);
    fill_stages(p);
    find_enough(p);
    CRN_TRY(find_cuts(p, task, error));
    lay_rows(p);
    CRN_TRY(allocate_values(p, error));
    return fill_rows(p, task, error);
}

bool crn_slotted_is_exact(const crn_slotted_program *p)
{
    for (int32_t l = 1; l <= p->n; l++) {
        const cairn_stage *stage = crn_stage(p->model, l);
        if (l < p->n && !crn_slots_are_whole(&p->scale, stage->output_bytes))
            return false;
        for (int32_t k = 0; k < stage->option_count; k++)
            if (stage->options[k].saved_bytes <= p->scale.available_bytes &&
                !crn_slots_are_whole(&p->scale, stage->options[k].saved_bytes))
                return false;
    }
    return true;
}
