#include "solve/chain/chain_labels.h"

/* W stays below 2^WEIGHT_LOG2, W * B below 2^PRODUCT_LOG2: times and costs then fit. */
enum { WEIGHT_LOG2 = 58, PRODUCT_LOG2 = 92, EIGHTHS = 8 };

/* Recomputed pieces of more than RUN_STEPS / n stages are not tried, unless that is less than RUN_MIN. */
enum { RUN_MIN = 16, RUN_STEPS = 1 << 26 };

int32_t crn_labels_run_max(int64_t n)
{
    return (int32_t)crn_max(RUN_MIN, RUN_STEPS / n);
}

/* ---- making and freeing ---- */

static int64_t weight_of(const crn_chain_model *model)
{
    int64_t sum = 0;
    for (int32_t l = 1; l <= model->n; l++) {
        const cairn_stage *stage = crn_stage(model, l);
        int64_t longest = stage->forward_only_ns;
        for (int32_t k = 0; k < stage->option_count; k++)
            longest = crn_max(longest, crn_option_ns(&stage->options[k]));
        sum = crn_add_saturating(sum, longest);
    }
    return sum;
}

bool crn_labels_init(crn_labels *labels, const crn_chain_model *model, const crn_task *task)
{
    *labels = (crn_labels){.model = model,
                           .weight_ns = weight_of(model),
                           .full_bytes = crn_pieces_full_bytes(model, 1, model->n),
                           .run_max = crn_labels_run_max(model->n),
                           .allocator = crn_allocator(task->env)};
    return labels->weight_ns >> WEIGHT_LOG2 == 0 &&
           (crn_wide)labels->weight_ns * (crn_wide)labels->full_bytes >> PRODUCT_LOG2 == 0;
}

void crn_labels_clear(crn_labels *labels)
{
    crn_free(&labels->allocator, labels->list, labels->list_capacity, sizeof(*labels->list));
    crn_free(&labels->allocator, labels->counts, labels->count_capacity, sizeof(*labels->counts));
}

int64_t crn_labels_memory(int64_t n, int32_t width)
{
    int64_t per_stage = width * (int64_t)sizeof(crn_label) + (int64_t)sizeof(int32_t);
    return crn_mul_saturating(n + 1, per_stage + per_stage / 2); /* arrays grow with half as many to spare */
}

static bool reserve(crn_labels *labels, size_t stages, size_t width)
{
    if (stages * width > labels->list_capacity) {
        crn_label *list =
            crn_grow(&labels->allocator, labels->list, &labels->list_capacity, stages * width, sizeof(*list));
        if (!list)
            return false;
        labels->list = list;
    }
    if (stages > labels->count_capacity) {
        int32_t *counts =
            crn_grow(&labels->allocator, labels->counts, &labels->count_capacity, stages, sizeof(*counts));
        if (!counts)
            return false;
        labels->counts = counts;
    }
    return true;
}

/* ---- labels of a stage ---- */

/* One question, and where its labels lie: those of stage l at place l - s + 1, those of the beginning at 0. */
typedef struct search {
    crn_labels *labels;
    const crn_chain_model *model;
    crn_label_query query;
} search;

static crn_label *labels_at(const search *c, int32_t place)
{
    return c->labels->list + (size_t)place * (size_t)c->query.width;
}

static crn_wide cost_of(const search *c, int64_t bytes, int64_t eighths)
{
    crn_wide time = ((crn_wide)eighths * (crn_wide)c->labels->full_bytes) << CRN_PRICE_UNIT_LOG2;
    crn_wide memory = (crn_wide)bytes * (crn_wide)c->labels->weight_ns * (crn_wide)c->query.price;
    return time + EIGHTHS * memory;
}

/* By cost; of equal ones the one that came first is before. */
static void insert(const search *c, int32_t place, crn_label made)
{
    crn_label *list = labels_at(c, place);
    int32_t count = c->labels->counts[place], kept = 0;
    if (count == c->query.width && made.cost >= list[count - 1].cost)
        return;
    for (int32_t i = 0; i < count; i++)
        if (list[i].bytes <= made.bytes && list[i].eighths <= made.eighths)
            return;
    for (int32_t i = 0; i < count; i++)
        if (list[i].bytes < made.bytes || list[i].eighths < made.eighths)
            list[kept++] = list[i];
    int32_t at = kept < c->query.width ? kept++ : kept - 1;
    for (; at > 0 && made.cost < list[at - 1].cost; at--)
        list[at] = list[at - 1];
    list[at] = made;
    c->labels->counts[place] = kept;
}

/* The label `index` of a place and a piece after it. */
static crn_label after(const search *c, int32_t place, int32_t index, int64_t bytes, int64_t eighths, int32_t option)
{
    const crn_label *before = labels_at(c, place) + index;
    return (crn_label){before->cost + cost_of(c, bytes, eighths),
                       before->bytes + bytes,
                       before->eighths + eighths,
                       place,
                       index,
                       option};
}

/* ---- pieces ---- */

static void add_saved(search *c, int32_t l)
{
    const cairn_stage *stage = crn_stage(c->model, l);
    int32_t place = l - c->query.s;
    int64_t least_ns = crn_option_ns(&stage->options[crn_fastest_option(stage)]);
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t needed = crn_piece_save_bytes(c->model, l, c->query.t, option);
        int64_t eighths = EIGHTHS * (crn_option_ns(option) - least_ns);
        for (int32_t i = 0; i < c->labels->counts[place]; i++)
            if (needed <= c->query.m - labels_at(c, place)[i].bytes)
                insert(c, place + 1, after(c, place, i, option->saved_bytes, eighths, k));
    }
}

/* Recomputed stages first..last, while `first` moves down. */
typedef struct run {
    int32_t first, last;
    int64_t full_bytes, dropped_bytes; /* to save all of them; the most that a forward_drop of them needs */
    int64_t ns;
} run;

static void lengthen(const crn_chain_model *model, run *r)
{
    const cairn_stage *stage = crn_stage(model, --r->first);
    const cairn_stage_option *option = &stage->options[crn_fastest_option(stage)];
    int64_t here = crn_piece_save_bytes(model, r->first, r->last, option);
    if (r->first < r->last) {
        here = crn_max(here, option->saved_bytes + r->full_bytes);
        r->dropped_bytes = crn_max(r->dropped_bytes, crn_drop_bytes(model, r->first + 1));
    }
    r->full_bytes = here;
    r->ns += stage->forward_only_ns;
}

/* How many eighths of the saved sets do not fit; -1: too many. */
static int32_t missing_eighths(const search *c, const run *r, int64_t available_bytes)
{
    if (available_bytes >= r->full_bytes)
        return 0;
    if ((crn_wide)available_bytes << c->query.slack < (crn_wide)r->full_bytes)
        return -1;
    return EIGHTHS - (int32_t)((crn_wide)available_bytes * EIGHTHS / (crn_wide)r->full_bytes);
}

static void add_run(search *c, const run *r)
{
    int32_t place = r->first - c->query.s, to = r->last - c->query.s + 1;
    int64_t kept = c->model->output[r->last];
    int64_t passing =
        crn_max(crn_keep_bytes(crn_stage(c->model, r->first)), r->dropped_bytes) + c->model->base[c->query.t];
    const crn_label *list = labels_at(c, place), *made = labels_at(c, to);
    crn_wide added = cost_of(c, kept, EIGHTHS * r->ns);
    for (int32_t i = 0; i < c->labels->counts[place]; i++) {
        int64_t available = c->query.m - list[i].bytes;
        if (c->labels->counts[to] == c->query.width && list[i].cost + added >= made[c->query.width - 1].cost)
            return; /* and so are those after it */
        int32_t missing = available >= passing ? missing_eighths(c, r, available) : -1;
        if (missing >= 0)
            insert(c, to, after(c, place, i, kept, (EIGHTHS + missing) * r->ns, CRN_PIECE_RECOMPUTED));
    }
}

static void add_runs(search *c, int32_t last)
{
    run r = {.first = last + 1, .last = last};
    int32_t lowest = (int32_t)crn_max(c->query.s, last - c->labels->run_max + 1);
    while (r.first > lowest && c->model->fence[r.first - 1] > last) {
        lengthen(c->model, &r);
        if ((crn_wide)c->query.m << c->query.slack < (crn_wide)r.full_bytes)
            break;
        add_run(c, &r);
    }
    c->labels->steps += (int64_t)(last + 1 - r.first) * c->query.width;
}

/* ---- the path ---- */

static bool trace(const search *c, crn_pieces *pieces, crn_plan *plan)
{
    int32_t place = c->query.t - c->query.s + 1, best = 0;
    const crn_label *list = labels_at(c, place);
    *plan = (crn_plan){pieces->count, 0};
    if (c->labels->counts[place] == 0)
        return true;
    for (int32_t i = 1; i < c->labels->counts[place]; i++)
        if (list[i].eighths < list[best].eighths)
            best = i;
    while (place > 0) {
        const crn_label *label = labels_at(c, place) + best;
        crn_piece piece = {c->query.s + label->before, c->query.s + place - 1, label->option, {0, 0}};
        if (!crn_pieces_add(pieces, piece))
            return false;
        plan->count++;
        place = label->before;
        best = label->index;
    }
    crn_piece *first = pieces->list + plan->begin, *last = pieces->list + pieces->count - 1;
    for (; first < last; first++, last--) {
        crn_piece other = *first;
        *first = *last;
        *last = other;
    }
    return true;
}

cairn_status crn_labels_cut(crn_labels *labels, const crn_task *task, const crn_label_query *query, crn_pieces *pieces,
                            crn_plan *plan, cairn_error *error)
{
    search c = {labels, labels->model, *query};
    if (!reserve(labels, (size_t)(query->t - query->s) + 2, (size_t)query->width))
        return crn_no_memory(error);
    labels->list[0] = (crn_label){0};
    labels->counts[0] = 1;
    for (int32_t l = query->s; l <= query->t; l++) {
        labels->counts[l - query->s + 1] = 0;
        add_saved(&c, l);
        if (l < query->t)
            add_runs(&c, l);
        if (crn_should_stop(task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped while cutting the chain");
    }
    return trace(&c, pieces, plan) ? CAIRN_OK : crn_no_memory(error);
}
