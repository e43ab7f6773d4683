/*
 * A chain as its dynamic programs see it, and what each operation needs.
 *
 * A sub-problem (s, t) starts with its input X (a[s-1] or A[s-1]) and the gradient d[t] resident and ends when d[s-1]
 * has been computed. The memory that it may use, m, is what the budget leaves beside what is always there (fixed_bytes
 * and a[0]), beside what the outer problems keep, and beside X. So m holds d[t], the weight gradients that exist by
 * then, and whatever the sub-problem makes.
 *
 *   base[t] = d[t] + G(t), G(t) = sum of g[l] over l > t: resident while d[t] is the current gradient.
 *
 * The simulator charges an operation max(before, after, before + result + workspace). With what is resident besides the
 * operation's own values taken out, that is
 *
 *   forward_save l with option k      A_k[l] + max(0, oF_k[l])
 *   forward_keep l                    a[l] + max(0, oN[l])
 *   forward_drop l, replacing a[l-1]  max(a[l-1], a[l], a[l-1] + a[l] + oN[l])
 *   backward l of option k            base[l] + A_k[l] + max(0, d[l-1] + g[l] + oB_k[l]); for l = 1 at least base[0]
 *
 * After backward l > 1 there are base[l-1] and what the outer problems keep. That is no part of the formula, because
 * whatever comes next needs at least as much: the next backward does. After backward 1 nothing comes.
 */
#ifndef CRN_CHAIN_MODEL_H
#define CRN_CHAIN_MODEL_H

#include "solve/solver.h"

typedef struct crn_chain_model {
    const cairn_chain *chain;
    int32_t n;
    int64_t always_bytes; /* fixed_bytes + a[0] */
    int64_t *output;      /* a[0..n] */
    int64_t *base;        /* base[0..n] */
    int32_t *fence;       /* fence[s]: the first stage >= s that must not be recomputed, n + 1 where there is none */
    bool outputs_only;    /* a stage is saved only when its backward is next */
    int64_t work_ns;      /* sum of the least forward + backward of each stage: what no schedule can avoid */
    crn_arena arena;
} crn_chain_model;

/** Sub-problems (s, t), 1 <= s <= t <= n. */
static inline size_t crn_pair_count(int32_t n)
{
    return (size_t)n * ((size_t)n + 1) / 2;
}

/** Place of (s, t) in rows of s, one after the other: contiguous in t. */
static inline size_t crn_row_at(int32_t n, int32_t s, int32_t t)
{
    size_t i = (size_t)(s - 1);
    return i * (size_t)n - i * (i + 1) / 2 + (size_t)t - 1;
}

/** Place of (s, t) in columns of t, one after the other: contiguous in s, and the same for every n. */
static inline size_t crn_column_at(int32_t s, int32_t t)
{
    return (size_t)t * (size_t)(t - 1) / 2 + (size_t)s - 1;
}

/** Free with crn_chain_model_clear, also after a failure. */
cairn_status crn_chain_model_init(crn_chain_model *model, const crn_task *task, cairn_error *error);
void crn_chain_model_clear(crn_chain_model *model);

static inline const cairn_stage *crn_stage(const crn_chain_model *model, int32_t l)
{
    return &model->chain->stages[l - 1];
}

static inline int64_t crn_save_bytes(const cairn_stage_option *option)
{
    return option->saved_bytes + crn_max(0, option->forward_workspace_bytes);
}

static inline int64_t crn_keep_bytes(const cairn_stage *stage)
{
    return stage->output_bytes + crn_max(0, stage->forward_only_workspace_bytes);
}

static inline int64_t crn_drop_bytes(const crn_chain_model *model, int32_t l)
{
    int64_t before = model->output[l - 1], result = model->output[l];
    int64_t workspace = crn_stage(model, l)->forward_only_workspace_bytes;
    return crn_max(crn_max(before, result), before + result + workspace);
}

static inline int64_t crn_backward_bytes(const crn_chain_model *model, int32_t l, const cairn_stage_option *option)
{
    const cairn_chain *chain = model->chain;
    const cairn_stage *stage = crn_stage(model, l);
    int64_t grad = l > 1 ? chain->stages[l - 2].grad_bytes : chain->input_grad_bytes;
    int64_t made = grad + stage->weight_grad_bytes + option->backward_workspace_bytes;
    int64_t needed = model->base[l] + option->saved_bytes + crn_max(0, made);
    return l > 1 ? needed : crn_max(needed, model->base[0]);
}

/** Forward and backward. */
static inline int64_t crn_option_ns(const cairn_stage_option *option)
{
    return option->forward_ns + option->backward_ns;
}

/** Saving or not. */
static inline int64_t crn_least_forward_ns(const cairn_stage *stage)
{
    int64_t least = stage->forward_only_ns;
    for (int32_t k = 0; k < stage->option_count; k++)
        least = crn_min(least, stage->options[k].forward_ns);
    return least;
}

/** The option of least forward and backward; of several the first. */
int32_t crn_fastest_option(const cairn_stage *stage);
/** What backward l needs beside always_bytes with the option of which it needs least. */
int64_t crn_least_backward_bytes(const crn_chain_model *model, int32_t l);
/** How many options all stages have together. */
size_t crn_option_total(const crn_chain_model *model);
/** What it takes, beside always_bytes, to save everything, each stage with that of its fastest options that needs least. */
int64_t crn_chain_full_bytes(const crn_chain_model *model);

/** Appends an operation on stage l; option of forward_save, value of drop. */
cairn_status crn_chain_emit(cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option, cairn_value value,
                            cairn_error *error);

#endif
