/*
 * chain-dp: the fastest memory-persistent schedule of a chain, in memory slots.
 *
 * Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019),
 * theorem 1, with the terms put right and with options per stage, forwards that save nothing, weight gradients and
 * signed workspaces. The model, with the bytes of every operation, is in chain_model.h.
 *
 * C(s,t,m): the least time from {X, d[t]} to d[s-1] with m beside X. With the thresholds of chain_model.h,
 *
 *   SAVE k           uF_k[s] + uB_k[s] + C(s+1, t, m - A_k[s])       if m >= base[t] + save_k[s], m >= backward_k[s]
 *   CHECKPOINT s'    way(s, s'-1) + C(s', t, m - a[s'-1]) + C(s, s'-1, m)   if m >= base[t] + peak of the way
 *   SAVE_AND_DROP k  uF_k[s] + C(s+1, t, m - A_k[s]) + C(s, s, m)    if m >= base[t] + save_k[s]
 *
 * and C is the least of them; C(s+1, s, m) = 0. A stage that must not be recomputed only saves.
 *
 * A slot is the rational M / S, where M is what the budget leaves beside fixed_bytes and a[0]: values that are kept are
 * rounded up to slots, each by itself, and what an operation needs is rounded up as a whole. So scaling all sizes
 * changes nothing, and the answer never gets worse when the budget grows. Rounding can make the answer worse than the
 * best in bytes; where every size is a whole number of slots there is no rounding, and the answer is optimal among
 * persistent schedules. Beside the table's answer two others are considered, so that rounding never matters at the ends:
 * saving everything with the fastest options, and the schedule of least memory (chain_table.h).
 *
 * Cost: O(n^3 S) time in the worst case, n(n+1)/2 * (S+1) * 8 bytes at most. What makes it fast:
 *   - m is innermost and contiguous; the minimum over a split is a vector loop.
 *   - A row (s,t) holds only the m between L(s,t), below which it is infinite, and the m from which on it is constant.
 *   - C does not increase with m, so a block of m is skipped when even its last entries cannot beat its first.
 *   - Rows are filled in tiles, operands in blocks, as in a product of matrices: they are used often while in a cache.
 *     Tiles with the same t - s are independent: all threads.
 *   - Values are times beyond the least of each stage, in 32 bits where the answer fits.
 *   - Decisions are found again on the way back, not stored.
 *   - A simpler program, of O(n^2 S), gives a first answer; what can be in no answer as good is not filled in
 *     (slotted_cuts.h).
 */
#include "solve/chain/slotted.h"

static cairn_status chain_dp_open(const crn_task *task, void **state, cairn_error *error)
{
    return crn_slotted_open(task, false, state, error);
}

const crn_solver crn_chain_dp_solver = {
    .info = {.name = "chain-dp",
             .takes_chains = true,
             .available = true,
             .optimal_in = "persistent",
             .summary = "fastest memory-persistent schedule, in memory slots",
             .source = "Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, theorem 1, corrected",
             .cost = "O(n^3 S) time, O(n^2 S) memory"},
    .options = "slots",
    .rank = 10,
    .memory = crn_slotted_memory,
    .work = crn_slotted_work,
    .open = chain_dp_open,
    .close = crn_slotted_close,
    .least = crn_slotted_least,
    .solve = crn_slotted_solve,
};
