#include "solve/chain/cuts.h"

static bool is_stored(const crn_cuts *c, int32_t i)
{
    return i == c->count - 1 || c->kept[i] || c->model->fence[crn_cuts_first(c, i)] <= c->ends[i];
}

/* ---- emission ---- */

static cairn_status save_segment(const crn_cuts *c, int32_t i, cairn_builder *builder, cairn_error *error)
{
    for (int32_t l = crn_cuts_first(c, i); l <= c->ends[i]; l++)
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, l, 0, 0, error));
    return CAIRN_OK;
}

static cairn_status pass_segment(const crn_cuts *c, int32_t i, cairn_builder *builder, cairn_error *error)
{
    int32_t first = crn_cuts_first(c, i);
    for (int32_t l = first; l <= c->ends[i]; l++)
        CRN_TRY(crn_chain_emit(builder, l == first ? CAIRN_OP_FORWARD_KEEP : CAIRN_OP_FORWARD_DROP, l, 0, 0, error));
    return CAIRN_OK;
}

cairn_status crn_cuts_emit(const crn_cuts *cuts, cairn_builder *builder, cairn_error *error)
{
    cairn_builder_truncate(builder, 0);
    for (int32_t i = 0; i < cuts->count; i++)
        CRN_TRY(is_stored(cuts, i) ? save_segment(cuts, i, builder, error) : pass_segment(cuts, i, builder, error));
    for (int32_t i = cuts->count - 1; i >= 0; i--) {
        if (!is_stored(cuts, i))
            CRN_TRY(save_segment(cuts, i, builder, error));
        for (int32_t l = cuts->ends[i]; l >= crn_cuts_first(cuts, i); l--)
            CRN_TRY(crn_chain_emit(builder, CAIRN_OP_BACKWARD, l, 0, 0, error));
    }
    return CAIRN_OK;
}

/* ---- judgement ---- */

/* What operations need beside always_bytes, by the formulas of chain_model.h, and how long they take. */
typedef struct walk {
    const crn_chain_model *model;
    int64_t kept_bytes; /* what the segments before the one under way left for their backward */
    int64_t peak_bytes, ns;
} walk;

static void step(walk *w, int64_t needed_bytes, int64_t ns)
{
    w->peak_bytes = crn_max(w->peak_bytes, w->kept_bytes + needed_bytes);
    w->ns += ns;
}

/* The forward of a segment that is stored, beside a gradient; all that it saves is kept. */
static void save_stages(walk *w, int32_t first, int32_t last, int64_t base_bytes)
{
    for (int32_t l = first; l <= last; l++) {
        const cairn_stage_option *option = &crn_stage(w->model, l)->options[0];
        step(w, base_bytes + crn_save_bytes(option), option->forward_ns);
        w->kept_bytes += option->saved_bytes;
    }
}

/* The first forward of a segment that runs again; its last output is kept. */
static void pass_stages(walk *w, int32_t first, int32_t last)
{
    int64_t base_bytes = w->model->base[w->model->n];
    for (int32_t l = first; l <= last; l++) {
        const cairn_stage *stage = crn_stage(w->model, l);
        step(w, base_bytes + (l == first ? crn_keep_bytes(stage) : crn_drop_bytes(w->model, l)),
             stage->forward_only_ns);
    }
    w->kept_bytes += w->model->output[last];
}

/* The backwards of a segment that has been stored. */
static void go_back(walk *w, int32_t first, int32_t last)
{
    for (int32_t l = last; l >= first; l--) {
        const cairn_stage_option *option = &crn_stage(w->model, l)->options[0];
        w->kept_bytes -= option->saved_bytes;
        step(w, crn_backward_bytes(w->model, l, option), option->backward_ns);
    }
}

void crn_cuts_judge(const crn_cuts *cuts, int64_t *peak_bytes, int64_t *makespan_ns)
{
    const crn_chain_model *model = cuts->model;
    walk w = {.model = model, .peak_bytes = model->base[model->n]};
    for (int32_t i = 0; i < cuts->count; i++) {
        int32_t first = crn_cuts_first(cuts, i);
        if (is_stored(cuts, i))
            save_stages(&w, first, cuts->ends[i], model->base[model->n]);
        else
            pass_stages(&w, first, cuts->ends[i]);
    }
    for (int32_t i = cuts->count - 1; i >= 0; i--) {
        int32_t first = crn_cuts_first(cuts, i), last = cuts->ends[i];
        if (!is_stored(cuts, i)) {
            w.kept_bytes -= model->output[last];
            save_stages(&w, first, last, model->base[last]);
        }
        go_back(&w, first, last);
    }
    *peak_bytes = model->always_bytes + w.peak_bytes;
    *makespan_ns = w.ns;
}
