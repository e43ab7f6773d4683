#include "solve/chain/chain_pieces.h"

#include <string.h>

/* ---- the list ---- */

bool crn_pieces_add(crn_pieces *pieces, crn_piece piece)
{
    if (pieces->count == pieces->capacity) {
        crn_piece *grown =
            crn_grow(&pieces->allocator, pieces->list, &pieces->capacity, pieces->count + 1, sizeof(*grown));
        if (!grown)
            return false;
        pieces->list = grown;
    }
    pieces->list[pieces->count++] = piece;
    return true;
}

void crn_pieces_clear(crn_pieces *pieces)
{
    crn_free(&pieces->allocator, pieces->list, pieces->capacity, sizeof(*pieces->list));
    *pieces = (crn_pieces){.allocator = pieces->allocator};
}

void crn_pieces_move_down(crn_pieces *pieces, size_t to, size_t from)
{
    memmove(pieces->list + to, pieces->list + from, (pieces->count - from) * sizeof(*pieces->list));
    pieces->count -= from - to;
    for (size_t i = to; i < pieces->count; i++)
        if (pieces->list[i].inner.count > 0)
            pieces->list[i].inner.begin -= from - to;
}

/* ---- what pieces need and take ---- */

static const cairn_stage_option *fastest_of(const crn_chain_model *model, int32_t l)
{
    const cairn_stage *stage = crn_stage(model, l);
    return &stage->options[crn_fastest_option(stage)];
}

int64_t crn_piece_save_bytes(const crn_chain_model *model, int32_t l, int32_t t, const cairn_stage_option *option)
{
    return crn_max(model->base[t] + crn_save_bytes(option), crn_backward_bytes(model, l, option));
}

/* What forward_keep first and forward_drop up to last need in (first, t). */
static int64_t pass_bytes(const crn_chain_model *model, int32_t first, int32_t last, int32_t t)
{
    int64_t peak = crn_keep_bytes(crn_stage(model, first));
    for (int32_t l = first + 1; l <= last; l++)
        peak = crn_max(peak, crn_drop_bytes(model, l));
    return model->base[t] + peak;
}

int64_t crn_pieces_full_bytes(const crn_chain_model *model, int32_t s, int32_t t)
{
    int64_t full = 0;
    for (int32_t l = t; l >= s; l--) {
        const cairn_stage_option *option = fastest_of(model, l);
        int64_t here = crn_piece_save_bytes(model, l, t, option);
        full = l < t ? crn_max(here, option->saved_bytes + full) : here;
    }
    return full;
}

static int64_t pass_ns(const crn_chain_model *model, int32_t first, int32_t last)
{
    int64_t ns = 0;
    for (int32_t l = first; l <= last; l++)
        ns = crn_add_saturating(ns, crn_stage(model, l)->forward_only_ns);
    return ns;
}

int64_t crn_pieces_extra_ns(const crn_chain_model *model, const crn_pieces *pieces, crn_plan plan)
{
    int64_t ns = 0;
    for (int32_t i = 0; i < plan.count; i++) {
        const crn_piece *piece = &pieces->list[plan.begin + (size_t)i];
        if (piece->option == CRN_PIECE_RECOMPUTED) {
            ns = crn_add_saturating(ns, pass_ns(model, piece->first, piece->last));
            ns = crn_add_saturating(ns, crn_pieces_extra_ns(model, pieces, piece->inner));
        } else {
            const cairn_stage_option *option = &crn_stage(model, piece->first)->options[piece->option];
            ns = crn_add_saturating(ns, crn_option_ns(option) - crn_option_ns(fastest_of(model, piece->first)));
        }
    }
    return ns;
}

/* ---- operations ---- */

static cairn_status emit_all_saved(const crn_chain_model *model, int32_t first, int32_t last, cairn_builder *builder,
                                   cairn_error *error)
{
    for (int32_t l = first; l <= last; l++)
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, l, crn_fastest_option(crn_stage(model, l)), 0, error));
    for (int32_t l = last; l >= first; l--)
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_BACKWARD, l, 0, 0, error));
    return CAIRN_OK;
}

static cairn_status emit_forward(const crn_piece *piece, cairn_builder *builder, cairn_error *error)
{
    if (piece->option != CRN_PIECE_RECOMPUTED)
        return crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, piece->first, piece->option, 0, error);
    CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_KEEP, piece->first, 0, 0, error));
    for (int32_t l = piece->first + 1; l <= piece->last; l++)
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_DROP, l, 0, 0, error));
    return CAIRN_OK;
}

cairn_status crn_pieces_emit(const crn_chain_model *model, const crn_pieces *pieces, crn_plan plan,
                             cairn_builder *builder, cairn_error *error)
{
    for (int32_t i = 0; i < plan.count; i++)
        CRN_TRY(emit_forward(&pieces->list[plan.begin + (size_t)i], builder, error));
    for (int32_t i = plan.count - 1; i >= 0; i--) {
        const crn_piece *piece = &pieces->list[plan.begin + (size_t)i];
        if (piece->option != CRN_PIECE_RECOMPUTED)
            CRN_TRY(crn_chain_emit(builder, CAIRN_OP_BACKWARD, piece->first, 0, 0, error));
        else if (piece->inner.count > 0)
            CRN_TRY(crn_pieces_emit(model, pieces, piece->inner, builder, error));
        else
            CRN_TRY(emit_all_saved(model, piece->first, piece->last, builder, error));
    }
    return CAIRN_OK;
}

/* ---- halving ---- */

/* The option with which stage l needs least in (l, t), and of its own saved set where others come after it. */
static int32_t smallest_option(const crn_chain_model *model, int32_t l, int32_t t)
{
    const cairn_stage *stage = crn_stage(model, l);
    int64_t least = INT64_MAX;
    int32_t smallest = 0;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t needed = l < t ? option->saved_bytes : crn_piece_save_bytes(model, l, t, option);
        if (needed < least) {
            least = needed;
            smallest = k;
        }
    }
    return smallest;
}

/* The piece of (s, t) that begins with s. */
static crn_piece halving_piece(const crn_chain_model *model, int32_t s, int32_t t)
{
    int32_t end = (int32_t)crn_min(s + (t - s + 1) / 2, model->fence[s]) - 1;
    if (s == t || end < s)
        return (crn_piece){s, s, smallest_option(model, s, t), {0, 0}};
    return (crn_piece){s, end, CRN_PIECE_RECOMPUTED, {0, 0}};
}

static int64_t kept_bytes(const crn_chain_model *model, const crn_piece *piece)
{
    return piece->option == CRN_PIECE_RECOMPUTED ? model->output[piece->last]
                                                 : crn_stage(model, piece->first)->options[piece->option].saved_bytes;
}

int64_t crn_halving_bytes(const crn_chain_model *model, int32_t s, int32_t t)
{
    int64_t needed = 0, kept = 0;
    while (s <= t) {
        crn_piece piece = halving_piece(model, s, t);
        int64_t here;
        if (piece.option == CRN_PIECE_RECOMPUTED)
            here = crn_max(pass_bytes(model, s, piece.last, t), crn_halving_bytes(model, s, piece.last));
        else
            here = crn_piece_save_bytes(model, s, t, &crn_stage(model, s)->options[piece.option]);
        needed = crn_max(needed, kept + here);
        kept += kept_bytes(model, &piece);
        s = piece.last + 1;
    }
    return needed;
}

bool crn_halving_make(const crn_chain_model *model, int32_t s, int32_t t, int64_t m, crn_pieces *pieces, crn_plan *plan)
{
    *plan = (crn_plan){pieces->count, 0};
    while (s <= t) {
        crn_piece piece = halving_piece(model, s, t);
        if (!crn_pieces_add(pieces, piece))
            return false;
        plan->count++;
        s = piece.last + 1;
    }
    for (int32_t i = 0; i < plan->count; i++) {
        crn_piece piece = pieces->list[plan->begin + (size_t)i];
        bool has_plan =
            piece.option == CRN_PIECE_RECOMPUTED && crn_pieces_full_bytes(model, piece.first, piece.last) > m;
        if (has_plan && !crn_halving_make(model, piece.first, piece.last, m, pieces, &piece.inner))
            return false;
        pieces->list[plan->begin + (size_t)i] = piece;
        m -= kept_bytes(model, &piece);
    }
    return true;
}
