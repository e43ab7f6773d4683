#include "solve/chain/weak_least.h"

/* ---- least memory ---- */

static int64_t least_of(const crn_weak_least *least, crn_weak_part part)
{
    return part.kind == CRN_WEAK_DONE ? 0 : least->bytes[crn_weak_at(least->model, part)];
}

/* What a term needs. */
static int64_t needed(const crn_weak_least *least, const crn_weak_term *term)
{
    int64_t first = least_of(least, term->first), second = least_of(least, term->second);
    if (first == CRN_WEAK_NEVER || second == CRN_WEAK_NEVER)
        return CRN_WEAK_NEVER;
    return crn_max(term->from_shift + term->from_bytes, crn_max(first + term->first_shift, second));
}

typedef struct lowering {
    const crn_weak_least *least;
    int64_t bytes;
} lowering;

static bool lower(void *context, const crn_weak_term *term)
{
    lowering *l = context;
    l->bytes = crn_min(l->bytes, needed(l->least, term));
    return false;
}

static void fill_least(void *context, crn_weak_part part)
{
    const crn_weak_least *least = context;
    lowering l = {least, CRN_WEAK_NEVER};
    crn_weak_terms(least->model, &least->model->bytes, part, lower, &l);
    least->bytes[crn_weak_at(least->model, part)] = l.bytes;
}

cairn_status crn_weak_least_init(crn_weak_least *least, const crn_weak_model *model, const crn_task *task,
                                 crn_arena *arena, cairn_error *error)
{
    *least = (crn_weak_least){model, crn_arena_alloc(arena, model->part_count, sizeof(*least->bytes))};
    return least->bytes ? crn_weak_fill_parts(model, task, fill_least, least, error) : crn_no_memory(error);
}

int64_t crn_weak_least_of_whole(const crn_weak_least *least)
{
    return least_of(least, crn_weak_whole(least->model));
}

/* ---- a schedule of least memory ---- */

typedef struct search {
    const crn_weak_least *least;
    int64_t bytes;
    crn_weak_term found;
} search;

static bool take_if_enough(void *context, const crn_weak_term *term)
{
    search *s = context;
    if (needed(s->least, term) > s->bytes)
        return false;
    s->found = *term;
    return term->move != CRN_WEAK_SPLIT;
}

/* The first term that the memory is enough for; of splits the last, for to start again for each backward is quick. */
static crn_weak_term decide(const void *context, crn_weak_part part, int64_t m)
{
    search s = {.least = context, .bytes = m};
    crn_weak_terms(s.least->model, &s.least->model->bytes, part, take_if_enough, &s);
    return s.found;
}

cairn_status crn_weak_least_emit(const crn_weak_least *least, const crn_task *task, cairn_builder *builder,
                                 cairn_error *error)
{
    return crn_weak_unfold(task, least->model, decide, least, crn_weak_least_of_whole(least), builder, error);
}
