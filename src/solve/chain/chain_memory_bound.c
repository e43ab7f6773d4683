/*
 * How little memory any schedule of a chain can do with. What follows is about schedules without transfers; of those with
 * them it is only known that a backward needs what it reads and makes.
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
 * All ways to alone(j) leave the same, so the least peak is all that counts there. saved(j) leaves no less than alone(j),
 * so its pairs are of use only below alone(j)'s peak. Lists of pairs that grow too long are thinned by merging two into
 * one that beats both: the bound gets lower, and still holds. O(n) time for a bounded number of options.
 */
#include "solve/chain_model.h"

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
    pair alone; /* a[j] and what is pinned: all ways there leave the same, so one pair is the best */
    bool has_alone;
    pairs saved;
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

/* The least peak of getting to stage j's output alone. */
static int64_t alone_peak(const crn_chain_model *model, int32_t j, const states *from)
{
    int64_t least = INT64_MAX, keep_bytes = crn_keep_bytes(crn_stage(model, j));
    if (from->has_alone)
        least = crn_max(from->alone.peak_bytes, from->pinned_bytes + (j == 1 ? keep_bytes : crn_drop_bytes(model, j)));
    for (int32_t i = 0; i < from->saved.count; i++)
        least =
            crn_min(least, crn_max(from->saved.list[i].peak_bytes, from->saved.list[i].resident_bytes + keep_bytes));
    return least;
}

static void save(const cairn_stage *stage, pair from, states *to)
{
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t peak = crn_max(from.peak_bytes, from.resident_bytes + crn_save_bytes(option));
        if (!to->has_alone || peak < to->alone.peak_bytes)
            add_pair(&to->saved, from.resident_bytes + option->saved_bytes, peak);
    }
}

static void go_on(const crn_chain_model *model, int32_t j, const states *from, states *to)
{
    const cairn_stage *stage = crn_stage(model, j);
    to->saved.count = 0;
    to->pinned_bytes = from->pinned_bytes + pinned_by(stage);
    to->has_alone = !stage->no_recompute;
    to->alone = (pair){model->output[j] + to->pinned_bytes, alone_peak(model, j, from)};
    if (from->has_alone)
        save(stage, from->alone, to);
    for (int32_t i = 0; i < from->saved.count; i++)
        save(stage, from->saved.list[i], to);
}

static int64_t least_from(const crn_chain_model *model, int32_t c, pair from, int64_t least_base)
{
    const cairn_stage *stage = crn_stage(model, c);
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t save_bytes = least_base + crn_max(from.peak_bytes, from.resident_bytes + crn_save_bytes(option));
        least = crn_min(least, crn_max(save_bytes, from.resident_bytes + crn_backward_bytes(model, c, option)));
    }
    return least;
}

/* What backward c needs; no more than enough is as good as the least. */
static int64_t needed_by(const crn_chain_model *model, int32_t c, const states *from, int64_t least_base,
                         int64_t enough)
{
    int64_t least = from->has_alone ? least_from(model, c, from->alone, least_base) : INT64_MAX;
    for (int32_t i = 0; i < from->saved.count && least > enough; i++)
        least = crn_min(least, least_from(model, c, from->saved.list[i], least_base));
    return least;
}

/* Beside always_bytes. */
static int64_t find_bound(const crn_chain_model *model, int64_t *least_base)
{
    states both[2] = {{.has_alone = true}}, *now = &both[0], *next = &both[1];
    int64_t bound = 0;
    least_base[model->n] = model->base[model->n];
    for (int32_t c = model->n - 1; c >= 1; c--)
        least_base[c] = crn_min(model->base[c], least_base[c + 1]);
    for (int32_t c = 1; c <= model->n; c++) {
        bound = crn_max(bound, needed_by(model, c, now, least_base[c], bound));
        go_on(model, c, now, next);
        states *before = now;
        now = next;
        next = before;
    }
    return bound;
}

/*
 * Of schedules with transfers, beside fixed bytes: one of the options' backwards runs with everything that it reads
 * beside it.
 */
static int64_t bound_with_transfers(const cairn_chain *chain)
{
    int64_t needed = 0, grads = 0;
    for (int32_t l = chain->stage_count; l >= 1; l--) {
        const cairn_stage *stage = &chain->stages[l - 1];
        const cairn_stage *before = l > 1 ? &chain->stages[l - 2] : NULL;
        int64_t input = before ? before->output_bytes : 0; /* a[0] is always resident */
        int64_t made = (before ? before->grad_bytes : chain->input_grad_bytes) + stage->weight_grad_bytes;
        int64_t least = INT64_MAX;
        for (int32_t k = 0; k < stage->option_count; k++) {
            const cairn_stage_option *option = &stage->options[k];
            int64_t resident = grads + stage->grad_bytes + option->saved_bytes + input;
            least = crn_min(least, resident + crn_max(0, made + option->backward_workspace_bytes));
        }
        needed = crn_max(needed, least);
        grads += stage->weight_grad_bytes;
    }
    return needed + chain->input_bytes;
}

static cairn_status raise_memory(const crn_task *task, int64_t *bound_bytes, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    crn_chain_model model;
    if (!chain)
        return CAIRN_OK;
    if (task->machine) {
        int64_t fixed_bytes = cairn_problem_info_of(task->problem)->fixed_bytes;
        *bound_bytes = crn_max(*bound_bytes, fixed_bytes + bound_with_transfers(chain));
        return CAIRN_OK;
    }
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
