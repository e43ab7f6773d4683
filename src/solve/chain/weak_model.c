#include "solve/chain/weak_model.h"

/* ---- sizes ---- */

static void fill_sizes(crn_weak_model *model)
{
    size_t next = 0;
    model->bytes.output[0] = 0; /* a[0] is always there */
    for (int32_t l = 1; l <= model->n; l++) {
        const cairn_stage *stage = crn_stage(model->chain, l);
        model->bytes.output[l] = stage->output_bytes;
        model->option_begin[l] = next;
        model->least_ns[l] = crn_option_ns(&stage->options[crn_fastest_option(stage)]);
        for (int32_t k = 0; k < stage->option_count; k++)
            model->bytes.saved[next++] = stage->options[k].saved_bytes;
    }
}

/* ---- saving forwards as mere ones ---- */

/* Whether keeping a[s] instead is never worse: then nothing is gained by A_k[s] as a checkpoint. */
static bool is_no_use(const cairn_stage *stage, const cairn_stage_option *option)
{
    return option->forward_ns >= stage->forward_only_ns && crn_save_bytes(option) >= crn_keep_bytes(stage);
}

static uint64_t useful_saves(const crn_chain_model *chain, int32_t s)
{
    const cairn_stage *stage = crn_stage(chain, s);
    uint64_t saves = 0;
    if (stage->no_recompute)
        return 0;
    for (int32_t k = 0; k < stage->option_count; k++)
        saves |= is_no_use(stage, &stage->options[k]) ? 0 : (uint64_t)1 << k;
    return saves;
}

/* Whether a way to a[j] saves all of s..j-1. Others are made of shorter ones, which parts can put together. */
static bool is_leap(const crn_forward *forward, int32_t j, const crn_way *way)
{
    if (j == forward->s)
        return false;
    for (j--; way->from_saved && j >= forward->s; j--)
        way = &forward->row[j].saved[way->parent];
    return j < forward->s && !way->from_saved;
}

/* Counts the leaps of a row, and lists them where there is a list. */
static size_t list_leaps(crn_forward *forward, int32_t s, crn_weak_leap *leaps)
{
    size_t count = 0;
    crn_forward_fill(forward, s, forward->model->n - 1);
    for (int32_t j = forward->s + 1; j <= forward->end; j++)
        for (int32_t i = 0; i < forward->row[j].alone_count; i++) {
            const crn_way *way = &forward->row[j].alone[i];
            if (!is_leap(forward, j, way))
                continue;
            if (leaps)
                leaps[count] = (crn_weak_leap){j, i, way->peak_bytes, way->ns};
            count++;
        }
    return count;
}

static bool fill_leaps(crn_weak_model *model)
{
    crn_forward forward;
    int32_t n = model->n;
    if (!crn_forward_init(&forward, &model->table->allocator, model->chain))
        return false;
    model->leap_begin[1] = 0;
    for (int32_t s = 1; s <= n; s++)
        model->leap_begin[s + 1] = model->leap_begin[s] + (model->saves[s] ? list_leaps(&forward, s, NULL) : 0);
    model->leaps = crn_arena_alloc(model->arena, model->leap_begin[n + 1], sizeof(*model->leaps));
    for (int32_t s = 1; model->leaps && s <= n; s++)
        if (model->leap_begin[s + 1] > model->leap_begin[s])
            list_leaps(&forward, s, model->leaps + model->leap_begin[s]);
    crn_forward_clear(&forward);
    return model->leaps != NULL;
}

/* ---- parts ---- */

static void number_parts(crn_weak_model *model)
{
    size_t next = 0;
    for (int32_t s = 1; s <= model->n; s++) {
        size_t count = crn_pair_count(model->n - s + 1);
        model->begin[CRN_WEAK_ALONE][s] = next;
        next += count;
        model->begin[CRN_WEAK_BESIDE][s] = next;
        next += crn_weak_has_besides(model, s) ? count : 0;
        model->begin[CRN_WEAK_PASS][s] = next;
        next += crn_weak_has_passes(model, s) ? count : 0;
    }
    model->part_count = next;
}

cairn_status crn_weak_model_init(crn_weak_model *model, const crn_chain_table *table, crn_arena *arena,
                                 cairn_error *error)
{
    size_t n = (size_t)table->model.n;
    *model = (crn_weak_model){.table = table, .chain = &table->model, .n = table->model.n, .arena = arena};
    model->bytes.output = crn_arena_alloc(arena, n + 1, sizeof(*model->bytes.output));
    model->bytes.saved = crn_arena_alloc(arena, crn_option_total(model->chain), sizeof(*model->bytes.saved));
    model->option_begin = crn_arena_alloc(arena, n + 1, sizeof(*model->option_begin));
    model->least_ns = crn_arena_alloc(arena, n + 1, sizeof(*model->least_ns));
    model->leap_begin = crn_arena_alloc(arena, n + 2, sizeof(*model->leap_begin));
    model->saves = crn_arena_alloc(arena, n + 1, sizeof(*model->saves));
    bool made = model->bytes.output && model->bytes.saved && model->option_begin && model->least_ns &&
                model->leap_begin && model->saves;
    for (int kind = CRN_WEAK_ALONE; made && kind <= CRN_WEAK_PASS; kind++) {
        model->begin[kind] = crn_arena_alloc(arena, n + 1, sizeof(*model->begin[kind]));
        made = model->begin[kind] != NULL;
    }
    if (!made)
        return crn_no_memory(error);
    fill_sizes(model);
    for (int32_t s = 1; s <= model->n; s++)
        model->saves[s] = useful_saves(model->chain, s);
    if (!fill_leaps(model))
        return crn_no_memory(error);
    number_parts(model);
    return CAIRN_OK;
}

/* ---- terms ---- */

/* The terms of a part, as they are gone through. */
typedef struct walk {
    const crn_weak_model *model;
    const crn_weak_sizes *sizes;
    crn_weak_part part;
    crn_weak_visit *visit;
    void *context;
} walk;

static crn_weak_part part_of(crn_weak_kind kind, int32_t s, int32_t t, int32_t l)
{
    return (crn_weak_part){kind, s, t, l};
}

static int64_t saved_size(const walk *w, int32_t l, int32_t k)
{
    return w->sizes->saved[w->model->option_begin[l] + (size_t)k];
}

/* The input of the part's first stage where it counts in the part's memory. */
static int64_t own_input(const walk *w)
{
    return w->part.kind == CRN_WEAK_ALONE ? w->sizes->output[w->part.s - 1] : 0;
}

static bool save_terms(const walk *w)
{
    const crn_chain_model *chain = w->model->chain;
    int32_t s = w->part.s, l = w->part.l;
    const cairn_stage *stage = crn_stage(chain, s);
    crn_weak_term term = {.move = CRN_WEAK_SAVE, .from_shift = own_input(w)};
    if (s < l)
        term.first = part_of(CRN_WEAK_ALONE, s + 1, s + 1, l);
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        term.option = k;
        term.first_shift = s < l ? own_input(w) + saved_size(w, s, k) - w->sizes->output[s] : 0;
        term.from_bytes = crn_max(chain->base[l] + crn_save_bytes(option), crn_backward_bytes(chain, s, option));
        term.ns = crn_option_ns(option) - w->model->least_ns[s];
        if (w->visit(w->context, &term))
            return true;
    }
    return false;
}

/* STEP and LEAP: to something later alone. X goes or stays, as the kind of the part says. */
static bool forward_terms(const walk *w)
{
    const crn_weak_model *model = w->model;
    int32_t s = w->part.s, t = w->part.t, l = w->part.l;
    bool gives_up = w->part.kind == CRN_WEAK_ALONE;
    int64_t base = model->chain->base[l];
    crn_weak_term term = {.move = CRN_WEAK_STEP, .first = part_of(CRN_WEAK_ALONE, s + 1, t, l)};
    term.from_bytes =
        base + (gives_up && s > 1 ? crn_drop_bytes(model->chain, s) : crn_keep_bytes(crn_stage(model->chain, s)));
    term.ns = crn_stage(model->chain, s)->forward_only_ns;
    if (w->visit(w->context, &term))
        return true;
    term.move = CRN_WEAK_LEAP;
    term.from_shift = own_input(w);
    for (size_t i = model->leap_begin[s]; i < model->leap_begin[s + 1] && model->leaps[i].end < t; i++) {
        const crn_weak_leap *leap = &model->leaps[i];
        term.end = leap->end;
        term.way = leap->way;
        term.first = part_of(CRN_WEAK_ALONE, leap->end + 1, t, l);
        term.from_bytes = base + leap->peak_bytes;
        term.ns = leap->ns;
        if (w->visit(w->context, &term))
            return true;
    }
    return false;
}

static bool save_drop_terms(const walk *w)
{
    const crn_chain_model *chain = w->model->chain;
    int32_t s = w->part.s, t = w->part.t, l = w->part.l;
    const cairn_stage *stage = crn_stage(chain, s);
    bool last = t == s + 1; /* its backward reads A_k[s] at the end */
    crn_weak_term term = {.move = CRN_WEAK_SAVE_DROP,
                          .first = part_of(last ? CRN_WEAK_ALONE : CRN_WEAK_BESIDE, s + 1, t, l)};
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        if (!(w->model->saves[s] >> k & 1))
            continue;
        term.option = k;
        term.first_shift = saved_size(w, s, k) - (last ? w->sizes->output[s] : 0);
        term.from_bytes = crn_max(chain->base[l] + crn_save_bytes(option), chain->base[t - 1] + option->saved_bytes);
        term.ns = option->forward_ns;
        if (w->visit(w->context, &term))
            return true;
    }
    return false;
}

/* The term whose first is PASS(s,u,l), or what stands in its place. */
static crn_weak_term pass_term(const walk *w, crn_weak_move move, int32_t u)
{
    const crn_chain_model *chain = w->model->chain;
    int32_t s = w->part.s, l = w->part.l;
    crn_weak_term term = {.move = move, .first_shift = own_input(w), .from_shift = own_input(w)};
    term.steps = !crn_weak_has_passes(w->model, s);
    term.first = part_of(term.steps ? CRN_WEAK_ALONE : CRN_WEAK_PASS, term.steps ? s + 1 : s, u, l);
    if (!term.steps)
        return term;
    term.from_bytes = chain->base[l] + crn_keep_bytes(crn_stage(chain, s));
    term.ns = crn_stage(chain, s)->forward_only_ns;
    return term;
}

static bool split_terms(const walk *w)
{
    int32_t s = w->part.s, t = w->part.t, l = w->part.l, fence = w->model->chain->fence[s];
    int32_t last = fence == s ? s : fence < l ? fence : l;
    for (int32_t u = t + 1; u <= last; u++) {
        crn_weak_term term = pass_term(w, CRN_WEAK_SPLIT, u);
        term.second = part_of(w->part.kind, s, t, u - 1);
        if (w->visit(w->context, &term))
            return true;
    }
    return false;
}

static bool last_terms(const walk *w)
{
    if (w->part.kind == CRN_WEAK_ALONE && !crn_weak_has_passes(w->model, w->part.s))
        return false; /* STEP and LEAP do the same with less */
    crn_weak_term term = pass_term(w, CRN_WEAK_LAST, w->part.t);
    return w->visit(w->context, &term);
}

bool crn_weak_terms(const crn_weak_model *model, const crn_weak_sizes *sizes, crn_weak_part part, crn_weak_visit *visit,
                    void *context)
{
    walk w = {model, sizes, part, visit, context};
    if (part.t > model->chain->fence[part.s]) /* the forward of a stage would run twice */
        return false;
    if (part.kind == CRN_WEAK_PASS)
        return part.t > part.s && (forward_terms(&w) || save_drop_terms(&w));
    if (part.s == part.t)
        return part.kind == CRN_WEAK_ALONE && (save_terms(&w) || split_terms(&w));
    return (part.kind == CRN_WEAK_ALONE && forward_terms(&w)) || split_terms(&w) || last_terms(&w);
}

/* ---- the order ---- */

/* All parts of one s, a task for each t. */
typedef struct row {
    const crn_weak_model *model;
    int32_t s;
    bool passes; /* PASS of s, which the other kinds are made of, or those */
    crn_weak_fill *fill;
    void *context;
} row;

static void fill_kind(const row *r, crn_weak_kind kind, int32_t t)
{
    for (int32_t l = t; l <= r->model->n; l++)
        r->fill(r->context, (crn_weak_part){kind, r->s, t, l});
}

static void fill_row(void *context, int64_t i, int worker)
{
    const row *r = context;
    int32_t t = r->s + (int32_t)i;
    (void)worker;
    if (r->passes) {
        fill_kind(r, CRN_WEAK_PASS, t);
        return;
    }
    fill_kind(r, CRN_WEAK_ALONE, t);
    if (crn_weak_has_besides(r->model, r->s))
        fill_kind(r, CRN_WEAK_BESIDE, t);
}

cairn_status crn_weak_fill_parts(const crn_weak_model *model, const crn_task *task, crn_weak_fill *fill, void *context,
                                 cairn_error *error)
{
    for (int32_t s = model->n; s >= 1; s--) {
        row r = {model, s, true, fill, context};
        cairn_progress progress = {"chain-weak", model->n - s, model->n, CAIRN_NONE, CAIRN_NONE};
        if (crn_weak_has_passes(model, s))
            crn_team_run(task->team, model->n - s + 1, fill_row, &r);
        r.passes = false;
        crn_team_run(task->team, model->n - s + 1, fill_row, &r);
        if (crn_should_stop(task, &progress))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %d of %d stages", model->n - s + 1, model->n);
    }
    return CAIRN_OK;
}

/* ---- estimates ---- */

int32_t crn_weak_kinds_of(const crn_task *task)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        for (int32_t k = 0; k < stage->option_count && !stage->no_recompute; k++)
            if (!is_no_use(stage, &stage->options[k]))
                return 3;
    }
    return 1;
}

void crn_weak_model_counts(const crn_task *task, int64_t *parts, int64_t *terms)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t n = chain->stage_count;
    *parts = crn_mul_saturating(crn_mul_saturating(crn_mul_saturating(n, n + 1), n + 2) / 6, crn_weak_kinds_of(task));
    *terms = crn_mul_saturating(*parts, n / 4 + 4);
}

int64_t crn_weak_model_memory(const crn_task *task)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t n = chain->stage_count, leaps = crn_weak_kinds_of(task) > 1 ? n * n / 2 * CRN_WAYS_MAX : 0, options = 0;
    for (int32_t i = 0; i < n; i++)
        options += chain->stages[i].option_count;
    return (n + 2) * 8 * 10 + options * 8 + leaps * (int64_t)sizeof(crn_weak_leap) + crn_forward_memory((int32_t)n);
}
