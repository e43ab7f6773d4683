/*
 * How little memory any schedule of a chain can do with, transfers excluded.
 *
 * To run backward c, a schedule needs A_k[c] and its input, and A_k[c] was saved while some d[c'], c' >= c, was current,
 * on top of what had been computed by then. Saved sets keep their inputs alive; so at any time, what stage j was computed
 * from is at least one of
 *
 *   alone(j): a[j],                              saved(j): A[j], ..., A[i+1] of some options, and a[i] (nothing for i = 0),
 *
 * and every operation that led there ran with no less than base(c) = d[c'] + weight grads, the least over c' >= c, beside it
 * (base of chain_model.h). For each state the pairs (resident, peak) that no other beats are found by going through
 * the stages once:
 *
 *   alone(j) from alone(j-1): forward_keep or forward_drop;  from saved(j-1): forward_keep, the saved sets then dropped,
 *   saved(j) from either: forward_save with any option;
 *
 * and backward c needs base[c], the resident of the state that it reads from, and what it makes, at once:
 *
 *   bound(c) = min over the states that c can be computed from, and options k, of
 *              max(least base[c' >= c] + peak of saving c,  backward_k[c] + resident),   bound = max over c.
 *
 * Why no schedule does with less: take the moment at which backward c starts and follow the values back to where they
 * came from, at each stage the operation that made them. That is a path over the states above, whose resident sets are
 * contained in what was resident then. Stages that must not be recomputed are saved once and stay until their
 * backward: what is below j of them is counted at each alone(j). The bound is met wherever a schedule that starts again
 * from a[0] for each c can be had, which is so when base does not grow as c falls; else it may be too low.
 *
 * O(n) time for a bounded number of options. Lists of pairs that grow too long are thinned by merging two into one that
 * beats both: the bound gets lower, and still holds.
 */
#include "solve/chain/chain_model.h"

enum { PAIRS_MAX = 24 };

/* Resident and peak beside base and a[0]. */
typedef struct pair {
    int64_t resident_bytes, peak_bytes;
} pair;

/* In increasing order of resident and decreasing order of peak. */
typedef struct pairs {
    pair list[PAIRS_MAX + 1];
    int32_t count;
} pairs;

static void merge_two(pairs *p)
{
    int32_t at = 0;
    for (int32_t i = 1; i + 1 < p->count; i++) /* the two whose resident sizes are nearest */
        if (p->list[i + 1].resident_bytes - p->list[i].resident_bytes <
            p->list[at + 1].resident_bytes - p->list[at].resident_bytes)
            at = i;
    p->list[at].peak_bytes = p->list[at + 1].peak_bytes;
    for (int32_t i = at + 1; i + 1 < p->count; i++)
        p->list[i] = p->list[i + 1];
    p->count--;
}

static void add_pair(pairs *p, int64_t resident, int64_t peak)
{
    int32_t kept = 0, i;
    for (i = 0; i < p->count; i++)
        if (p->list[i].resident_bytes <= resident && p->list[i].peak_bytes <= peak)
            return;
    for (i = 0; i < p->count; i++)
        if (p->list[i].resident_bytes < resident || p->list[i].peak_bytes < peak)
            p->list[kept++] = p->list[i];
    for (i = kept; i > 0 && p->list[i - 1].resident_bytes > resident; i--)
        p->list[i] = p->list[i - 1];
    p->list[i] = (pair){resident, peak};
    p->count = kept + 1;
    if (p->count > PAIRS_MAX)
        merge_two(p);
}

/* What stage j can be computed from, and what there is beside it. */
typedef struct states {
    pairs alone, saved;
    int64_t pinned_bytes; /* the least that stages up to j that must not be recomputed keep */
} states;

static int64_t pinned_by(const cairn_stage *stage)
{
    int64_t least = INT64_MAX;
    if (!stage->no_recompute)
        return 0;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, stage->options[k].saved_bytes);
    return least;
}

static void save_all(const cairn_stage *stage, const pairs *from, pairs *to)
{
    for (int32_t i = 0; i < from->count; i++)
        for (int32_t k = 0; k < stage->option_count; k++) {
            const cairn_stage_option *option = &stage->options[k];
            int64_t resident = from->list[i].resident_bytes;
            add_pair(to, resident + option->saved_bytes,
                     crn_max(from->list[i].peak_bytes, resident + crn_save_bytes(option)));
        }
}

static void go_on(const crn_chain_model *model, int32_t j, const states *from, states *to)
{
    const cairn_stage *stage = crn_stage(model, j);
    to->alone.count = to->saved.count = 0;
    to->pinned_bytes = from->pinned_bytes + pinned_by(stage);
    save_all(stage, &from->alone, &to->saved);
    save_all(stage, &from->saved, &to->saved);
    if (stage->no_recompute)
        return;
    int64_t resident = model->output[j] + to->pinned_bytes;
    int64_t alone_bytes = j == 1 ? crn_keep_bytes(stage) : crn_drop_bytes(model, j);
    for (int32_t i = 0; i < from->alone.count; i++)
        add_pair(&to->alone, resident, crn_max(from->alone.list[i].peak_bytes, alone_bytes + from->pinned_bytes));
    for (int32_t i = 0; i < from->saved.count; i++)
        add_pair(&to->alone, resident,
                 crn_max(from->saved.list[i].peak_bytes, from->saved.list[i].resident_bytes + crn_keep_bytes(stage)));
}

static int64_t least_from(const crn_chain_model *model, int32_t c, const pairs *from, int64_t least_base)
{
    const cairn_stage *stage = crn_stage(model, c);
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < from->count; i++)
        for (int32_t k = 0; k < stage->option_count; k++) {
            const cairn_stage_option *option = &stage->options[k];
            int64_t resident = from->list[i].resident_bytes;
            int64_t save = least_base + crn_max(from->list[i].peak_bytes, resident + crn_save_bytes(option));
            least = crn_min(least, crn_max(save, resident + crn_backward_bytes(model, c, option)));
        }
    return least;
}

/* Beside always_bytes. */
static int64_t find_bound(const crn_chain_model *model, int64_t *least_base)
{
    states both[2] = {{.alone = {.list = {{0, 0}}, .count = 1}}}, *now = &both[0], *next = &both[1];
    int64_t bound = 0;
    least_base[model->n] = model->base[model->n];
    for (int32_t c = model->n - 1; c >= 1; c--)
        least_base[c] = crn_min(model->base[c], least_base[c + 1]);
    for (int32_t c = 1; c <= model->n; c++) {
        int64_t alone = least_from(model, c, &now->alone, least_base[c]);
        bound = crn_max(bound, crn_min(alone, least_from(model, c, &now->saved, least_base[c])));
        go_on(model, c, now, next);
        states *before = now;
        now = next;
        next = before;
    }
    return bound;
}

static cairn_status raise_memory(const crn_task *task, int64_t *bound_bytes, cairn_error *error)
{
    crn_chain_model model;
    if (!cairn_problem_chain(task->problem) || task->machine)
        return CAIRN_OK;
    cairn_status status = crn_chain_model_init(&model, task, error);
    if (status == CAIRN_OK) {
        int64_t *least_base = crn_arena_alloc(&model.arena, (size_t)model.n + 1, sizeof(*least_base));
        if (least_base)
            *bound_bytes = crn_max(*bound_bytes, model.always_bytes + find_bound(&model, least_base));
        else
            status = crn_no_memory(error);
    }
    crn_chain_model_clear(&model);
    return status;
}

const crn_bound_method crn_chain_memory_bound_method = {.name = "chain-memory", .raise_memory = raise_memory};
