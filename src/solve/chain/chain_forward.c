#include "solve/chain/chain_forward.h"

#include <string.h>

static size_t row_count(int32_t n)
{
    return (size_t)n + 1;
}

bool crn_forward_init(crn_forward *forward, const cairn_allocator *allocator, const crn_chain_model *model)
{
    *forward = (crn_forward){.model = model, .allocator = *allocator};
    forward->row = crn_alloc(allocator, row_count(model->n), sizeof(*forward->row));
    return forward->row != NULL;
}

void crn_forward_clear(crn_forward *forward)
{
    if (forward->row)
        crn_free(&forward->allocator, forward->row, row_count(forward->model->n), sizeof(*forward->row));
    forward->row = NULL;
}

int64_t crn_forward_memory(int32_t n)
{
    return (int64_t)row_count(n) * (int64_t)sizeof(crn_ways);
}

/* ---- keeping what no other beats ---- */

static bool is_no_worse(const crn_way *a, const crn_way *b)
{
    return a->peak_bytes <= b->peak_bytes && a->ns <= b->ns && a->resident_bytes <= b->resident_bytes;
}

/* The place of the way to give up in a full list: the largest peak, but not that of the fastest way. */
static int32_t least_useful(const crn_way *list, int32_t count)
{
    int32_t fastest = 0;
    for (int32_t i = 1; i < count; i++)
        if (list[i].ns < list[fastest].ns)
            fastest = i;
    return fastest == count - 1 ? count - 2 : count - 1;
}

/*
 * Adds a way unless one is no worse; what it beats goes. The list is in order of peak and has room for max + 1; false
 * where one was given up.
 */
static bool add_way(crn_way *list, int32_t *count, int32_t max, const crn_way *way)
{
    int32_t kept = 0, i;
    for (i = 0; i < *count; i++)
        if (is_no_worse(&list[i], way))
            return true;
    for (i = 0; i < *count; i++)
        if (!is_no_worse(way, &list[i]))
            list[kept++] = list[i];
    for (i = kept; i > 0 && list[i - 1].peak_bytes > way->peak_bytes; i--)
        list[i] = list[i - 1];
    list[i] = *way;
    *count = ++kept;
    if (kept <= max)
        return true;
    i = least_useful(list, kept);
    memmove(&list[i], &list[i + 1], (size_t)(kept - 1 - i) * sizeof(*list));
    *count = max;
    return false;
}

/* The way of length one more: peak and time of an operation added. Times near 2^63 do not wrap: such a way is not there. */
static bool extend(const crn_way *from, int32_t index, bool from_saved, int64_t op_bytes, int64_t op_ns, crn_way *way)
{
    *way = (crn_way){.peak_bytes = crn_max(from->peak_bytes, op_bytes), .parent = index, .from_saved = from_saved};
    return crn_add(from->ns, op_ns, &way->ns);
}

/* ---- one stage further ---- */

static void save_from(const crn_chain_model *model, const crn_way *from, int32_t index, bool from_saved, int32_t j,
                      crn_ways *to)
{
    const cairn_stage *stage = crn_stage(model, j);
    crn_way way;
    for (int32_t k = 0; k < stage->option_count && !model->outputs_only; k++) {
        const cairn_stage_option *option = &stage->options[k];
        if (!extend(from, index, from_saved, from->resident_bytes + crn_save_bytes(option), option->forward_ns, &way))
            continue;
        way.resident_bytes = from->resident_bytes + option->saved_bytes;
        way.option = (int16_t)k;
        to->gave_up |= !add_way(to->saved, &to->saved_count, CRN_SAVED_WAYS_MAX, &way);
    }
}

static void go_alone(const crn_chain_model *model, const crn_way *from, int32_t index, bool from_saved,
                     int64_t op_bytes, int32_t j, crn_ways *to)
{
    crn_way way;
    if (!extend(from, index, from_saved, op_bytes, crn_stage(model, j)->forward_only_ns, &way))
        return;
    way.resident_bytes = model->output[j];
    to->gave_up |= !add_way(to->alone, &to->alone_count, CRN_WAYS_MAX, &way);
}

static void step(const crn_chain_model *model, int32_t s, int32_t j, const crn_ways *from, crn_ways *to)
{
    const cairn_stage *stage = crn_stage(model, j);
    int64_t keep_bytes = crn_keep_bytes(stage);
    int64_t alone_bytes = j == s ? keep_bytes : crn_drop_bytes(model, j);
    to->alone_count = to->saved_count = 0;
    to->gave_up = from->gave_up;
    for (int32_t i = 0; i < from->alone_count; i++) {
        go_alone(model, &from->alone[i], i, false, alone_bytes, j, to);
        save_from(model, &from->alone[i], i, false, j, to);
    }
    for (int32_t i = 0; i < from->saved_count; i++) {
        go_alone(model, &from->saved[i], i, true, from->saved[i].resident_bytes + keep_bytes, j, to);
        save_from(model, &from->saved[i], i, true, j, to);
    }
}

void crn_forward_fill(crn_forward *forward, int32_t s, int32_t last)
{
    const crn_chain_model *model = forward->model;
    crn_ways *row = forward->row;
    forward->s = s;
    forward->end = model->fence[s] - 1 < last ? model->fence[s] - 1 : last;
    memset(&row[s - 1], 0, sizeof(row[s - 1]));
    row[s - 1].alone_count = 1; /* nothing but X */
    for (int32_t j = s; j <= forward->end; j++)
        step(model, s, j, &row[j - 1], &row[j]);
}

void crn_forward_walk_begin(crn_forward_walk *walk, const crn_chain_model *model)
{
    *walk = (crn_forward_walk){.model = model, .ways[0].alone_count = 1}; /* nothing but X */
}

int64_t crn_forward_walk_on(crn_forward_walk *walk)
{
    int32_t j = ++walk->j;
    crn_ways *to = &walk->ways[j % 2];
    if (j >= walk->model->fence[1])
        return INT64_MAX;
    step(walk->model, 1, j, &walk->ways[(j - 1) % 2], to);
    return to->alone_count > 0 ? to->alone[0].peak_bytes : INT64_MAX;
}

/* ---- emitting ---- */

static cairn_status drop(cairn_builder *builder, cairn_value value, int32_t l, cairn_error *error)
{
    return crn_chain_emit(builder, CAIRN_OP_DROP, l, 0, value, error);
}

/* After a[j] was computed from the saved sets of first..j-1, on top of a[first-1]. The last saved goes first. */
static cairn_status drop_saved(const crn_forward *forward, int32_t first, int32_t j, cairn_builder *builder,
                               cairn_error *error)
{
    for (int32_t l = j - 1; l >= first; l--)
        CRN_TRY(drop(builder, CAIRN_VALUE_SAVED, l, error));
    return first > forward->s ? drop(builder, CAIRN_VALUE_OUTPUT, first - 1, error) : CAIRN_OK;
}

/* Walks from the end of the way to its beginning and turns the parents round: the way at j then says what comes next. */
typedef struct link {
    int32_t index;
    bool is_saved;
} link;

static const crn_way *way_at(const crn_forward *forward, int32_t j, link at)
{
    const crn_ways *ways = &forward->row[j];
    return at.is_saved ? &ways->saved[at.index] : &ways->alone[at.index];
}

static cairn_status emit_step(const crn_forward *forward, int32_t j, const crn_way *way, bool is_saved,
                              int32_t *first_saved, cairn_builder *builder, cairn_error *error)
{
    if (is_saved) {
        if (!way->from_saved)
            *first_saved = j;
        return crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, j, way->option, 0, error);
    }
    if (!way->from_saved)
        return crn_chain_emit(builder, j == forward->s ? CAIRN_OP_FORWARD_KEEP : CAIRN_OP_FORWARD_DROP, j, 0, 0, error);
    CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_KEEP, j, 0, 0, error));
    return drop_saved(forward, *first_saved, j, builder, error);
}

cairn_status crn_forward_emit(crn_forward *forward, int32_t j, int32_t way, cairn_builder *builder, cairn_error *error)
{
    int32_t s = forward->s, first_saved = s;
    size_t count = (size_t)(j - s + 1);
    link *path = crn_alloc(&forward->allocator, count, sizeof(*path));
    cairn_status status = CAIRN_OK;
    if (!path)
        return crn_no_memory(error);
    path[j - s] = (link){way, false};
    for (int32_t l = j; l > s; l--) {
        const crn_way *at = way_at(forward, l, path[l - s]);
        path[l - s - 1] = (link){at->parent, at->from_saved};
    }
    for (int32_t l = s; status == CAIRN_OK && l <= j; l++)
        status =
            emit_step(forward, l, way_at(forward, l, path[l - s]), path[l - s].is_saved, &first_saved, builder, error);
    crn_free(&forward->allocator, path, count, sizeof(*path));
    return status;
}
