#include "solve/chain/weak_step_function.h"

#include "solve/chain/step_function.h"

enum { CELLS_MIN = 128, CELLS_MAX = 1024, CELLS_PER_STAGE = 4 };

struct crn_weak_steps {
    const crn_weak_model *model;
    crn_subchains subchains;
    size_t *begin; /* of a class of (s,l): its first table */
    crn_steps *tables;
    crn_cells cells;
    crn_arena arena; /* of all that is not points */
    crn_step_makers makers;
};

/* ---- which parts share a table ---- */

/* (s,l) are alike when s-1..l are; with s = 1 each is for itself. */
static size_t class_of(const crn_weak_steps *p, int32_t s, int32_t l)
{
    size_t kinds = (size_t)p->subchains.begin[p->model->n + 1];
    return s > 1 ? (size_t)crn_subchain_kind(&p->subchains, s - 1, l) : kinds + (size_t)l - 1;
}

/* Within a class: PASS, ALONE, BESIDE, each by t. */
static crn_steps *table_of(const crn_weak_steps *p, crn_weak_part part)
{
    size_t length = (size_t)(part.l - part.s) + 1, at = p->begin[class_of(p, part.s, part.l)];
    if (part.kind != CRN_WEAK_PASS && crn_weak_has_passes(p->model, part.s))
        at += length;
    if (part.kind == CRN_WEAK_BESIDE)
        at += length;
    return &p->tables[at + (size_t)(part.t - part.s)];
}

static size_t table_count(const crn_weak_steps *p, int32_t s, int32_t l)
{
    size_t kinds = 1 + (size_t)crn_weak_has_passes(p->model, s) + (size_t)crn_weak_has_besides(p->model, s);
    return kinds * ((size_t)(l - s) + 1);
}

/* A class of sub-chains of a length: number i; the last is that of s = 1. */
static int32_t class_count(const crn_weak_steps *p, int32_t length)
{
    return length < p->model->n ? p->subchains.begin[length + 2] - p->subchains.begin[length + 1] + 1 : 1;
}

static int32_t class_begin(const crn_weak_steps *p, int32_t length, int32_t i)
{
    return i + 1 < class_count(p, length) ? p->subchains.first[p->subchains.begin[length + 1] + i] + 1 : 1;
}

static size_t number_tables(crn_weak_steps *p)
{
    size_t next = 0;
    for (int32_t length = 1; length <= p->model->n; length++)
        for (int32_t i = 0; i < class_count(p, length); i++) {
            int32_t s = class_begin(p, length, i), l = s + length - 1;
            p->begin[class_of(p, s, l)] = next;
            next += table_count(p, s, l);
        }
    return next;
}

/* ---- tables ---- */

/* Weight gradients that exist while d[l] is the current gradient: tables count without them. */
static int64_t grads_after(const crn_weak_steps *p, int32_t l)
{
    return p->model->chain->base[l] - crn_stage(p->model->chain, l)->grad_bytes;
}

static const crn_steps *steps_of(const crn_weak_steps *p, crn_weak_part part)
{
    return part.kind == CRN_WEAK_DONE ? NULL : table_of(p, part);
}

/* A term of a part that ends with d[l], in the numbers of the tables. */
static crn_term in_tables(const crn_weak_steps *p, int32_t l, const crn_weak_term *term)
{
    bool has_second = term->second.kind != CRN_WEAK_DONE;
    return (crn_term){.first = steps_of(p, term->first),
                      .second = steps_of(p, term->second),
                      .first_shift = term->first_shift,
                      .second_shift = has_second ? grads_after(p, term->second.l) - grads_after(p, l) : 0,
                      .from_bytes = crn_max(0, term->from_shift + term->from_bytes - grads_after(p, l)),
                      .ns = term->ns};
}

typedef struct making {
    crn_weak_steps *p;
    crn_envelope *envelope;
    int worker;
    int32_t l;
    bool failed;
} making;

static bool add_term(void *context, const crn_weak_term *term)
{
    making *m = context;
    crn_term made = in_tables(m->p, m->l, term);
    m->failed = !crn_envelope_add(m->envelope, &made);
    return m->failed;
}

/* The shift with which the tables of a part are used most. */
static int64_t usual_shift(const crn_weak_steps *p, const crn_weak_part *part)
{
    const int64_t *output = p->model->bytes.output;
    if (part->kind == CRN_WEAK_PASS)
        return output[part->s - 1];
    return part->kind == CRN_WEAK_ALONE && part->s > 1 ? output[part->s - 2] : 0;
}

static void make_table(making *m, crn_weak_part part)
{
    m->l = part.l;
    crn_envelope_begin(m->envelope);
    crn_weak_terms(m->p->model, &m->p->model->bytes, part, add_term, m);
    m->failed = m->failed || !crn_envelope_end(m->envelope, usual_shift(m->p, &part), &m->p->makers.points[m->worker],
                                               table_of(m->p, part));
}

static void make_kind(making *m, crn_weak_kind kind, int32_t s, int32_t l)
{
    for (int32_t t = s; t <= l && !m->failed; t++)
        make_table(m, (crn_weak_part){kind, s, t, l});
}

typedef struct diagonal {
    crn_weak_steps *p;
    int32_t length;
} diagonal;

static void make_class(void *context, int64_t i, int worker)
{
    const diagonal *d = context;
    crn_weak_steps *p = d->p;
    making m = {.p = p, .envelope = p->makers.envelopes[worker], .worker = worker};
    int32_t s = class_begin(p, d->length, (int32_t)i), l = s + d->length - 1;
    if (crn_weak_has_passes(p->model, s))
        make_kind(&m, CRN_WEAK_PASS, s, l);
    make_kind(&m, CRN_WEAK_ALONE, s, l);
    if (crn_weak_has_besides(p->model, s))
        make_kind(&m, CRN_WEAK_BESIDE, s, l);
    if (m.failed)
        atomic_store(&p->makers.failed, true);
}

static cairn_status make_tables(crn_weak_steps *p, const crn_task *task, cairn_error *error)
{
    int32_t n = p->model->n;
    for (int32_t length = 1; length <= n; length++) {
        diagonal d = {p, length};
        cairn_progress progress = {"chain-weak", length, n, CAIRN_NONE, CAIRN_NONE};
        crn_team_run(task->team, class_count(p, length), make_class, &d);
        if (atomic_load(&p->makers.failed))
            return crn_no_memory(error);
        if (crn_should_stop(task, &progress))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %d of %d diagonals", length, n);
    }
    return CAIRN_OK;
}

/* ---- making and freeing ---- */

void crn_weak_steps_free(crn_weak_steps *p)
{
    if (!p)
        return;
    cairn_allocator allocator = p->arena.allocator;
    crn_step_makers_clear(&p->makers);
    crn_arena_clear(&p->arena);
    crn_free(&allocator, p, 1, sizeof(*p));
}

static int32_t cells_for(int32_t n)
{
    return (int32_t)crn_min(CELLS_MAX, crn_max(CELLS_MIN, (int64_t)CELLS_PER_STAGE * n));
}

static cairn_status prepare(crn_weak_steps *p, const crn_task *task, int64_t top_bytes, cairn_error *error)
{
    int32_t n = p->model->n;
    CRN_TRY(crn_subchains_init(&p->subchains, p->model->chain, &p->arena, error));
    size_t classes = (size_t)p->subchains.begin[n + 1] + (size_t)n;
    p->begin = crn_arena_alloc(&p->arena, classes, sizeof(*p->begin));
    if (!p->begin)
        return crn_no_memory(error);
    p->tables = crn_arena_alloc_zero(&p->arena, number_tables(p), sizeof(*p->tables));
    p->cells = crn_cells_for(top_bytes, cells_for(n));
    if (!p->tables || !crn_step_makers_init(&p->makers, crn_team_size(task->team), &p->cells, &p->arena))
        return crn_no_memory(error);
    return make_tables(p, task, error);
}

cairn_status crn_weak_steps_new(const crn_weak_model *model, const crn_task *task, int64_t top_bytes,
                                crn_weak_steps **steps, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_weak_steps *p = crn_alloc_zero(&allocator, 1, sizeof(*p));
    *steps = NULL;
    if (!p)
        return crn_no_memory(error);
    p->model = model;
    crn_arena_init(&p->arena, allocator);
    cairn_status status = prepare(p, task, top_bytes, error);
    crn_step_makers_rest(&p->makers);
    if (status == CAIRN_OK)
        *steps = p;
    else
        crn_weak_steps_free(p);
    return status;
}

/* ---- the way back ---- */

typedef struct search {
    const crn_weak_steps *p;
    int32_t l;
    int64_t bytes, ns;
    crn_weak_term found;
} search;

static bool is_it(void *context, const crn_weak_term *term)
{
    search *s = context;
    crn_term t = in_tables(s->p, s->l, term);
    if (t.ns > s->ns || crn_term_at(&t, &s->p->cells, s->bytes) != s->ns)
        return false;
    s->found = *term;
    return true;
}

static crn_weak_term decide(const void *context, crn_weak_part part, int64_t m)
{
    const crn_weak_steps *p = context;
    search s = {.p = p, .l = part.l, .bytes = m - grads_after(p, part.l)};
    s.ns = crn_steps_at(table_of(p, part), &p->cells, s.bytes);
    crn_weak_terms(p->model, &p->model->bytes, part, is_it, &s);
    return s.found;
}

cairn_status crn_weak_steps_solve(const crn_weak_steps *p, const crn_task *task, int64_t available_bytes,
                                  int64_t less_than_ns, cairn_builder *builder, bool *found, cairn_error *error)
{
    const crn_steps *whole = table_of(p, crn_weak_whole(p->model));
    const crn_step *last = NULL;
    for (int32_t i = 0; i < whole->count && whole->points[i].bytes <= available_bytes; i++)
        last = &whole->points[i];
    *found = last && last->ns < less_than_ns;
    if (!*found)
        return CAIRN_OK;
    cairn_builder_truncate(builder, 0);
    return crn_weak_unfold(task, p->model, decide, p, last->bytes, builder, error);
}

/* ---- estimates ---- */

/* Longer chains have too many parts even where all stages are alike. */
enum { STAGES_MAX = 1024, FEW = 4 };

/* How often the most frequent of the stages occurs. */
static int64_t most_alike(const crn_subchains *subchains)
{
    int64_t most = 0, count = 0;
    for (int32_t kind = subchains->begin[1]; kind < subchains->begin[2]; kind++, count = 0) {
        for (int32_t l = 1; l <= subchains->n; l++)
            count += crn_subchain_kind(subchains, l, l) == kind;
        most = crn_max(most, count);
    }
    return most;
}

/* Among stages that are all alike but for a few there are few different times. */
static int64_t steps_estimate(int64_t length, bool alike)
{
    return alike ? 8 * length + 8 : length * length / 2 + 8;
}

static int64_t table_bytes(int64_t length, int64_t n, bool alike)
{
    int64_t cells = cells_for((int32_t)n) * length / n + 4 * CRN_STEPS_BLOCK;
    return steps_estimate(length, alike) * (int64_t)sizeof(crn_step) + cells * 14 + CELLS_MAX / CRN_STEPS_BLOCK * 8 +
           (int64_t)sizeof(crn_steps);
}

static void estimate(const crn_subchains *subchains, int64_t kinds, crn_weak_estimate *made)
{
    int64_t n = subchains->n;
    bool alike = most_alike(subchains) + FEW >= n;
    *made = (crn_weak_estimate){crn_subchains_memory((int32_t)n), 0};
    for (int64_t length = 1; length <= n; length++) {
        int64_t classes = length < n ? subchains->begin[length + 2] - subchains->begin[length + 1] + 1 : 1;
        int64_t tables = crn_mul_saturating(classes, length * kinds), steps = steps_estimate(length, alike);
        made->bytes = crn_add_saturating(made->bytes, crn_mul_saturating(tables, table_bytes(length, n, alike)));
        made->work = crn_add_saturating(made->work, crn_mul_saturating(tables, 30 * steps + 200 * length));
    }
}

bool crn_weak_steps_estimate(const crn_task *task, crn_weak_estimate *made)
{
    crn_chain_model chain;
    crn_subchains subchains;
    *made = (crn_weak_estimate){INT64_MAX, INT64_MAX};
    if (cairn_problem_chain(task->problem)->stage_count > STAGES_MAX)
        return true;
    bool known = crn_chain_model_init(&chain, task, NULL) == CAIRN_OK &&
                 crn_subchains_init(&subchains, &chain, &chain.arena, NULL) == CAIRN_OK;
    if (known)
        estimate(&subchains, crn_weak_kinds_of(task), made);
    crn_chain_model_clear(&chain);
    return known;
}
