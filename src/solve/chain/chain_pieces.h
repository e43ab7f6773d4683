/*
 * A persistent schedule of a chain as a list of pieces, without the tables of a dynamic program.
 *
 * The plan of a sub-problem (s, t) (chain_model.h) cuts its stages into pieces, in their order:
 *
 *   saved        one stage, by forward_save with an option; its backward uses that
 *   recomputed   stages first..last: the forward goes past them and keeps a[last]; before their backward they are solved
 *                as a sub-problem of their own, by a plan of theirs or, where there is none, by saving all of them
 *
 * The last piece is saved. What a piece may use is what the pieces before it leave of m.
 */
#ifndef CRN_CHAIN_PIECES_H
#define CRN_CHAIN_PIECES_H

#include "solve/chain_model.h"

enum { CRN_PIECE_RECOMPUTED = -1 };

/** Pieces of a plan lie one after the other. */
typedef struct crn_plan {
    size_t begin;
    int32_t count; /* 0 = no plan */
} crn_plan;

typedef struct crn_piece {
    int32_t first, last;
    int32_t option; /* of a saved stage, else CRN_PIECE_RECOMPUTED */
    crn_plan inner; /* of recomputed stages; none: all are saved, with their fastest options */
} crn_piece;

typedef struct crn_pieces {
    cairn_allocator allocator;
    crn_piece *list;
    size_t count, capacity;
} crn_pieces;

bool crn_pieces_add(crn_pieces *pieces, crn_piece piece);
void crn_pieces_clear(crn_pieces *pieces);
/** Moves all pieces from `from` on, and plans within them, down to `to`. */
void crn_pieces_move_down(crn_pieces *pieces, size_t to, size_t from);

/** The least m with which (s, t) can save all of its stages, with their fastest options. */
int64_t crn_pieces_full_bytes(const crn_chain_model *model, int32_t s, int32_t t);
/** What stage l needs in (l, t) to be saved and, while d[l] is current, to run backward. */
int64_t crn_piece_save_bytes(const crn_chain_model *model, int32_t l, int32_t t, const cairn_stage_option *option);
/** Time beyond the least of each stage; INT64_MAX: that, or more. */
int64_t crn_pieces_extra_ns(const crn_chain_model *model, const crn_pieces *pieces, crn_plan plan);
cairn_status crn_pieces_emit(const crn_chain_model *model, const crn_pieces *pieces, crn_plan plan,
                             cairn_builder *builder, cairn_error *error);

/**
 * Halving: keep the output in the middle, solve what is behind it, then what is before it in the same way; needs memory for
 * some log2 n outputs. A stage that must not be recomputed is saved. The least m with which (s, t) can be solved so.
 */
int64_t crn_halving_bytes(const crn_chain_model *model, int32_t s, int32_t t);
/** The plan of halving with m, at least the above; parts of which everything fits are saved. False when memory fails. */
bool crn_halving_make(const crn_chain_model *model, int32_t s, int32_t t, int64_t m, crn_pieces *pieces,
                      crn_plan *plan);

#endif
