#include "solve/chain/weak_slots.h"

#include "solve/chain/slot_scale.h"
#include "solve/chain/slotted_rows.h"

typedef struct program {
    const crn_weak_model *model;
    crn_slot_scale scale;
    crn_weak_sizes sizes; /* in slots */
    int64_t *most;        /* of l: the largest saved sets of stages 1..l, summed, in slots */
    int64_t *enough;      /* of l, for the parts that are being laid: with so much all is kept */
    crn_row *rows;        /* of a part, at crn_weak_at */
    const crn_row_width *width;
    void *values;
    size_t value_count;
    crn_arena arena;
} program;

/* ---- rows ---- */

static void fill_sizes(program *p)
{
    const crn_weak_model *model = p->model;
    p->sizes.output[0] = p->most[0] = 0; /* a[0] is always there */
    for (int32_t l = 1; l <= model->n; l++) {
        size_t begin = model->option_begin[l];
        int64_t most = 0;
        p->sizes.output[l] = crn_slots_of(&p->scale, model->bytes.output[l]);
        for (int32_t k = 0; k < crn_stage(model->chain, l)->option_count; k++) {
            p->sizes.saved[begin + (size_t)k] = crn_slots_of(&p->scale, model->bytes.saved[begin + (size_t)k]);
            most = crn_max(most, p->sizes.saved[begin + (size_t)k]);
        }
        p->most[l] = p->most[l - 1] + most;
    }
}

/* The most that an operation on stage l needs beside base, its input and what it keeps. */
static int64_t extra_bytes(const crn_chain_model *chain, int32_t l)
{
    const cairn_stage *stage = crn_stage(chain, l);
    int64_t extra = crn_max(0, stage->forward_only_workspace_bytes);
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        extra = crn_max(extra, option->forward_workspace_bytes);
        extra = crn_max(extra, crn_backward_bytes(chain, l, option) - chain->base[l] - option->saved_bytes);
    }
    return extra;
}

static void lay_row(program *p, crn_row *row, int64_t low, int64_t high)
{
    *row = (crn_row){.floor_ns = p->width->infinite, .low = (int32_t)low, .high = (int32_t)high};
    if (low > high)
        return;
    size_t begin = p->value_count + CRN_ROW_LINE + (size_t)low % CRN_ROW_LINE;
    row->origin = begin - (size_t)low;
    p->value_count = (begin + (size_t)(high - low) + 2 * CRN_ROW_LINE - 1) / CRN_ROW_LINE * CRN_ROW_LINE;
}

/* From the least memory to that with which every term of every part in it has all that it can use. */
static void lay_rows(program *p, const crn_weak_least *least, crn_weak_kind kind, int32_t s)
{
    const crn_weak_model *model = p->model;
    int64_t base = model->chain->base[s - 1], extra = 0;
    for (int32_t l = s; l <= model->n; l++) {
        base = crn_max(base, model->chain->base[l]);
        extra = crn_max(extra, extra_bytes(model->chain, l));
        p->enough[l] = p->sizes.output[s - 1] + p->most[l] - p->most[s - 1] + crn_slots_of(&p->scale, base) +
                       crn_slots_of(&p->scale, extra);
    }
    for (int32_t t = s; t <= model->n; t++)
        for (int32_t l = t; l <= model->n; l++) {
            size_t at = crn_weak_at(model, (crn_weak_part){kind, s, t, l});
            lay_row(p, &p->rows[at], crn_slots_of(&p->scale, least->bytes[at]), crn_min(p->enough[l], p->scale.slots));
        }
}

static void lay_all_rows(program *p, const crn_weak_least *least)
{
    p->value_count = 0;
    for (int32_t s = 1; s <= p->model->n; s++) {
        lay_rows(p, least, CRN_WEAK_ALONE, s);
        if (crn_weak_has_besides(p->model, s))
            lay_rows(p, least, CRN_WEAK_BESIDE, s);
        if (crn_weak_has_passes(p->model, s))
            lay_rows(p, least, CRN_WEAK_PASS, s);
    }
}

/* ---- filling rows ---- */

/* Nothing left to do, which takes no time whatever m is. */
static const crn_row done = {.low = 0, .high = -CRN_ROW_LINE, .floor_ns = 0};

static const crn_row *row_of(const program *p, crn_weak_part part)
{
    return part.kind == CRN_WEAK_DONE ? &done : &p->rows[crn_weak_at(p->model, part)];
}

static int64_t from_of(const program *p, const crn_weak_term *term)
{
    return term->from_shift + crn_slots_of(&p->scale, term->from_bytes);
}

typedef struct relaxing {
    const program *p;
    const crn_row *to;
} relaxing;

static bool relax(void *context, const crn_weak_term *term)
{
    const relaxing *r = context;
    int64_t from = from_of(r->p, term);
    if (from <= r->to->high && term->first_shift <= r->to->high)
        r->p->width->relax(r->p->values, r->to, row_of(r->p, term->first), (int32_t)term->first_shift,
                           row_of(r->p, term->second), term->ns, (int32_t)from);
    return false;
}

static void fill_row(void *context, crn_weak_part part)
{
    const program *p = context;
    crn_row *row = &p->rows[crn_weak_at(p->model, part)];
    relaxing r = {p, row};
    if (row->low > row->high)
        return;
    p->width->clear(p->values, row, INT64_MAX);
    crn_weak_terms(p->model, &p->sizes, part, relax, &r);
    p->width->finish(p->values, row, INT64_MAX);
}

/* ---- the way back ---- */

static int64_t value_at(const program *p, crn_weak_part part, int64_t m)
{
    if (part.kind == CRN_WEAK_DONE)
        return 0;
    return m < 0 ? CRN_ROW_INFINITE : p->width->value(p->values, row_of(p, part), (int32_t)m);
}

typedef struct search {
    const program *p;
    int64_t m, value;
    crn_weak_term found;
} search;

static bool is_it(void *context, const crn_weak_term *term)
{
    search *s = context;
    if (from_of(s->p, term) > s->m || term->ns > s->value ||
        term->ns + value_at(s->p, term->first, s->m - term->first_shift) + value_at(s->p, term->second, s->m) !=
            s->value)
        return false;
    s->found = *term;
    return true;
}

static crn_weak_term decide(const void *context, crn_weak_part part, int64_t m)
{
    const program *p = context;
    search s = {.p = p, .m = m, .value = value_at(p, part, m)};
    crn_weak_terms(p->model, &p->sizes, part, is_it, &s);
    return s.found;
}

/* ---- the program ---- */

static cairn_status make_program(program *p, const crn_weak_least *least, const crn_task *task, int64_t available,
                                 int32_t slots, const crn_row_width *width, cairn_error *error)
{
    const crn_weak_model *model = least->model;
    size_t n = (size_t)model->n,
           options = model->option_begin[n] + (size_t)crn_stage(model->chain, model->n)->option_count;
    *p = (program){.model = model, .width = width};
    crn_arena_init(&p->arena, crn_allocator(task->env));
    p->sizes.output = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->sizes.output));
    p->sizes.saved = crn_arena_alloc(&p->arena, options, sizeof(*p->sizes.saved));
    p->most = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->most));
    p->enough = crn_arena_alloc(&p->arena, n + 1, sizeof(*p->enough));
    p->rows = crn_arena_alloc(&p->arena, model->part_count, sizeof(*p->rows));
    if (!crn_slot_scale_init(&p->scale, available, slots, &p->arena) || !p->sizes.output || !p->sizes.saved ||
        !p->most || !p->enough || !p->rows)
        return crn_no_memory(error);
    fill_sizes(p);
    lay_all_rows(p, least);
    size_t line_bytes = CRN_ROW_LINE * width->value_bytes;
    char *values = crn_arena_alloc(&p->arena, p->value_count + CRN_ROW_LINE, width->value_bytes);
    if (!values)
        return crn_no_memory(error);
    p->values = values + (line_bytes - (uintptr_t)values % line_bytes) % line_bytes;
    return crn_weak_fill_parts(model, task, fill_row, p, error);
}

cairn_status crn_weak_slots_solve(const crn_weak_least *least, const crn_task *task, int64_t available_bytes,
                                  int32_t slots, int64_t less_than_ns, cairn_builder *builder, bool *found,
                                  cairn_error *error)
{
    program p;
    /* what is not less than the infinity of the width need not be told apart */
    bool short_times = less_than_ns <= crn_rows_of_32_bits.infinite;
    cairn_status status = make_program(&p, least, task, available_bytes, slots,
                                       short_times ? &crn_rows_of_32_bits : &crn_rows_of_64_bits, error);
    if (status == CAIRN_OK) {
        *found = value_at(&p, crn_weak_whole(p.model), slots) < crn_min(less_than_ns, CRN_ROW_INFINITE);
        if (*found) {
            cairn_builder_truncate(builder, 0);
            status = crn_weak_unfold(task, p.model, decide, &p, slots, builder, error);
        }
    }
    crn_arena_clear(&p.arena);
    return status;
}

int64_t crn_weak_slots_memory(int64_t part_count, int32_t slots)
{
    int64_t per_part = (int64_t)sizeof(crn_row) + 8 * ((int64_t)slots + 3 * CRN_ROW_LINE);
    return crn_mul_saturating(part_count, per_part);
}
