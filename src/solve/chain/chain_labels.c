#include "solve/chain/chain_labels.h"

/* With more than BUCKETS_LEAST buckets for each stage, a table has at most LABELS_MAX labels. */
enum { LABELS_MAX = 3 << 18, BUCKETS_MOST = 1 << 14, BUCKETS_LEAST = 128, SCALE_LOG2 = 48 };

/* What a stage takes beside its buckets, its labels and runs. */
enum { STAGE_STEPS = 16 };

/* ---- making and freeing ---- */

int32_t crn_buckets_max(int64_t n)
{
    return (int32_t)crn_max(BUCKETS_LEAST, crn_min(BUCKETS_MOST, LABELS_MAX / n));
}

bool crn_labels_init(crn_labels *labels, const crn_chain_model *model, const crn_task *task)
{
    *labels = (crn_labels){.allocator = crn_allocator(task->env), .steps_max = INT64_MAX};
    return crn_prices_init(&labels->prices, model, labels->allocator);
}

void crn_labels_clear(crn_labels *labels)
{
    crn_prices_clear(&labels->prices);
    crn_free(&labels->allocator, labels->list, labels->capacity, sizeof(*labels->list));
    crn_free(&labels->allocator, labels->buckets, labels->bucket_capacity, sizeof(*labels->buckets));
    crn_free(&labels->allocator, labels->places, labels->place_capacity, sizeof(*labels->places));
}

/* Arrays grow with half as many to spare. */
static int64_t array_memory(int64_t count, size_t size)
{
    return crn_mul_saturating(crn_add_saturating(count, count / 2 + 64), (int64_t)size);
}

int64_t crn_labels_memory(int64_t n)
{
    int64_t labels = array_memory(crn_mul_saturating(n + 1, crn_buckets_max(n)), sizeof(crn_label));
    int64_t buckets = array_memory(BUCKETS_MOST, sizeof(crn_label));
    int64_t stages = array_memory(n + 1, sizeof(crn_label_place) + sizeof(crn_run_stage));
    return crn_add_saturating(crn_add_saturating(labels, buckets), stages);
}

static bool reserve(crn_labels *labels, size_t places, size_t buckets)
{
    if (places > labels->place_capacity) {
        crn_label_place *grown =
            crn_grow(&labels->allocator, labels->places, &labels->place_capacity, places, sizeof(*grown));
        if (!grown)
            return false;
        labels->places = grown;
    }
    if (buckets > labels->bucket_capacity) {
        crn_label *grown =
            crn_grow(&labels->allocator, labels->buckets, &labels->bucket_capacity, buckets, sizeof(*grown));
        if (!grown)
            return false;
        labels->buckets = grown;
    }
    return true;
}

static bool reserve_list(crn_labels *labels, size_t count)
{
    if (count <= labels->capacity)
        return true;
    crn_label *grown = crn_grow(&labels->allocator, labels->list, &labels->capacity, count, sizeof(*grown));
    if (grown)
        labels->list = grown;
    return grown;
}

/* ---- the buckets of a stage ---- */

/* One question, and what is known of the stage whose buckets are filled. */
typedef struct search {
    crn_labels *labels;
    const crn_prices *prices;
    const crn_chain_model *model;
    crn_priced problem;
    int32_t count; /* of buckets */
    const crn_band *band;
    crn_cost bar;       /* labels that cost as much are of no use */
    int64_t low, width; /* shares at which the buckets begin, and that they divide */
    int64_t scale;      /* buckets for each share, in 2^-SCALE_LOG2 */
    int64_t passed_ns;  /* all forwards up to here */
} search;

static void open_stage(search *c, int32_t l)
{
    int32_t place = l - c->problem.s + 1;
    c->bar = c->band ? c->band->limit - c->band->places[place].rest : CRN_COST_MAX;
    c->low = c->band ? c->band->places[place].low : 0;
    c->width = (c->band ? c->band->places[place].high : (int64_t)1 << CRN_SHARE_LOG2) - c->low;
    c->scale = ((int64_t)c->count << SCALE_LOG2) / crn_max(1, c->width);
    c->passed_ns += crn_stage(c->model, l)->forward_only_ns;
    for (int32_t k = 0; k < c->count; k++)
        c->labels->buckets[k].cost = CRN_COST_MAX;
    c->labels->steps += c->count + STAGE_STEPS;
}

/* What a piece adds to a label. */
typedef struct addition {
    crn_cost cost;
    int64_t bytes, share;
    int32_t before, option;
} addition;

static int64_t share_of(const search *c, int64_t bytes)
{
    return (int64_t)(((crn_wide)bytes << CRN_SHARE_LOG2) / (crn_wide)crn_max(1, c->problem.m));
}

/* Label `index` and a piece after it. */
static inline void put(search *c, const addition *add, int32_t index, crn_cost cost)
{
    if (cost >= c->bar)
        return;
    const crn_label *from = &c->labels->list[index];
    int64_t share = from->share + add->share, at = crn_max(0, crn_min(share - c->low, c->width));
    crn_label *bucket = &c->labels->buckets[crn_min((at * c->scale) >> SCALE_LOG2, c->count - 1)];
    if (cost < bucket->cost)
        *bucket = (crn_label){cost, from->bytes + add->bytes, share, add->before, index, add->option};
}

/* All labels before the piece that leave enough for it, from `index` on; returns the first that does not. */
static int32_t put_all(search *c, const addition *add, int32_t index, int64_t needed)
{
    int32_t end = c->labels->places[add->before].end;
    int64_t most = c->problem.m - needed;
    for (; index < end && c->labels->list[index].bytes <= most; index++)
        put(c, add, index, c->labels->list[index].cost + add->cost);
    return index;
}

/* Of labels in the order of their bytes: those that another beats in time, too, are left out. False: no memory. */
static bool close_stage(search *c, int32_t place)
{
    crn_labels *labels = c->labels;
    crn_label_place *at = &labels->places[place];
    crn_cost least_time = CRN_COST_MAX;
    if (!reserve_list(labels, labels->count + (size_t)c->count))
        return false;
    *at = (crn_label_place){.least = CRN_COST_MAX, .begin = (int32_t)labels->count};
    for (int32_t k = 0; k < c->count; k++) {
        const crn_label *made = &labels->buckets[k];
        if (made->cost == CRN_COST_MAX)
            continue;
        crn_cost time = made->cost - crn_memory_cost(c->prices, c->problem.price, made->bytes);
        if (time >= least_time)
            continue;
        least_time = time;
        at->least = made->cost < at->least ? made->cost : at->least;
        labels->list[labels->count++] = *made;
    }
    at->end = (int32_t)labels->count;
    at->ahead = at->least - crn_time_cost(c->prices, c->passed_ns * CRN_TIME_PARTS);
    if (place > 0 && at[-1].ahead < at->ahead)
        at->ahead = at[-1].ahead;
    return true;
}

/* ---- pieces ---- */

static void add_saved(search *c, int32_t l)
{
    const cairn_stage *stage = crn_stage(c->model, l);
    int32_t before = l - c->problem.s, begin = c->labels->places[before].begin;
    int64_t least_ns = crn_option_ns(&stage->options[crn_fastest_option(stage)]);
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t bytes = option->saved_bytes, ns = crn_option_ns(option) - least_ns;
        int64_t needed = crn_piece_save_bytes(c->model, l, c->problem.t, option);
        if (needed > c->problem.m)
            continue;
        addition add = {crn_piece_cost(c->prices, c->problem.price, bytes, ns), bytes, share_of(c, bytes), before, k};
        put_all(c, &add, begin, needed);
    }
    c->labels->steps += (int64_t)(c->labels->places[before].end - begin) * stage->option_count;
}

/* Labels after which the run's saved sets do not fit, but the share of them that must: they are charged an estimate. */
static void put_missing(search *c, const addition *add, const crn_run *run, int32_t index, int64_t needed)
{
    int32_t end = c->labels->places[add->before].end, missing = 1;
    crn_cost each = crn_time_cost(c->prices, run->ns) / 2 * c->problem.charge; /* exact: costs of time are even */
    for (; index < end; index++) {
        crn_wide available = (crn_wide)(c->problem.m - c->labels->list[index].bytes);
        if (available < (crn_wide)needed || available << c->problem.slack < (crn_wide)run->full_bytes)
            return;
        while (available * CRN_TIME_PARTS < (crn_wide)(CRN_TIME_PARTS - missing) * (crn_wide)run->full_bytes)
            missing++;
        put(c, add, index, c->labels->list[index].cost + add->cost + missing * each);
    }
}

static void add_run(search *c, const crn_run *run, addition *add, crn_cost memory)
{
    add->before = run->first - c->problem.s;
    const crn_label_place *before = &c->labels->places[add->before];
    add->cost = memory + crn_time_cost(c->prices, run->ns * CRN_TIME_PARTS);
    if (before->least + add->cost >= c->bar)
        return;
    int64_t passing = crn_run_pass_bytes(c->prices, &c->problem, run);
    int32_t index = put_all(c, add, before->begin, crn_max(passing, run->full_bytes));
    if (c->problem.slack > 0)
        put_missing(c, add, run, index, crn_max(passing, crn_run_solve_bytes(c->prices, run)));
    c->labels->steps += before->end - before->begin;
}

/* While the cheapest label before can make up for the forwards of a longer run. */
static void add_runs(search *c, int32_t last)
{
    int64_t kept = c->model->output[last];
    if (last == c->problem.t || kept > c->problem.m)
        return;
    crn_run run = {.first = last + 1, .last = last};
    addition add = {.bytes = kept, .share = share_of(c, kept), .option = CRN_PIECE_RECOMPUTED};
    crn_cost memory = crn_memory_cost(c->prices, c->problem.price, kept);
    crn_cost least = memory + crn_time_cost(c->prices, c->passed_ns * CRN_TIME_PARTS);
    while (run.first > c->problem.s) {
        if (c->count == 1 && c->labels->buckets[0].cost < c->bar)
            c->bar = c->labels->buckets[0].cost;
        if (c->labels->places[run.first - 1 - c->problem.s].ahead + least >= c->bar ||
            !crn_run_lengthen(c->prices, &c->problem, &run))
            break;
        add_run(c, &run, &add, memory);
    }
    c->labels->steps += last + 1 - run.first;
}

/* ---- the path ---- */

static void reverse(crn_piece *first, crn_piece *last)
{
    for (; first < last; first++, last--) {
        crn_piece other = *first;
        *first = *last;
        *last = other;
    }
}

static bool trace(const search *c, crn_pieces *pieces, crn_label_path *path)
{
    int32_t place = c->problem.t - c->problem.s + 1;
    const crn_label_place *at = &c->labels->places[place];
    if (at->begin == at->end)
        return true;
    const crn_label *label = &c->labels->list[at->end - 1]; /* that of most bytes and least time */
    crn_cost time = label->cost - crn_memory_cost(c->prices, c->problem.price, label->bytes);
    path->parts = (int64_t)(time / crn_time_cost(c->prices, 1));
    while (place > 0) {
        crn_piece piece = {c->problem.s + label->before, c->problem.s + place - 1, label->option, {0, 0}};
        if (!crn_pieces_add(pieces, piece))
            return false;
        path->plan.count++;
        place = label->before;
        label = &c->labels->list[label->index];
    }
    reverse(pieces->list + path->plan.begin, pieces->list + pieces->count - 1);
    return true;
}

cairn_status crn_labels_cut(crn_labels *labels, const crn_task *task, const crn_label_query *query, crn_pieces *pieces,
                            crn_label_path *path, cairn_error *error)
{
    const crn_priced *problem = &query->problem;
    search c = {labels, &labels->prices, labels->prices.model, *problem, query->buckets, query->band, 0, 0, 0, 0, 0};
    *path = (crn_label_path){{pieces->count, 0}, INT64_MAX};
    labels->count = 0;
    if (!reserve(labels, (size_t)(problem->t - problem->s) + 2, (size_t)query->buckets) || !reserve_list(labels, 1))
        return crn_no_memory(error);
    labels->list[labels->count++] = (crn_label){0};
    labels->places[0] = (crn_label_place){.end = 1};
    for (int32_t l = problem->s; l <= problem->t; l++) {
        if (labels->steps >= labels->steps_max)
            return CAIRN_OK;
        open_stage(&c, l);
        add_saved(&c, l);
        add_runs(&c, l);
        if (!close_stage(&c, l - problem->s + 1))
            return crn_no_memory(error);
        if (crn_should_stop(task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped while cutting the chain");
    }
    return trace(&c, pieces, path) ? CAIRN_OK : crn_no_memory(error);
}

/* ---- the band ---- */

static int64_t part_of_the_way(int64_t from, int64_t to, int32_t part, int32_t parts)
{
    return from + (to - from) * part / parts; /* at most 2^36 times 2^24 */
}

void crn_labels_narrow(const crn_labels *labels, const crn_label_query *query, int64_t beside, crn_band *band)
{
    int32_t place = query->problem.t - query->problem.s + 1;
    const crn_label *label = &labels->list[labels->places[place].end - 1];
    while (place > 0) {
        const crn_label *before = &labels->list[label->index];
        for (int32_t i = label->before + 1; i <= place; i++) {
            int64_t share = part_of_the_way(before->share, label->share, i - label->before, place - label->before);
            band->places[i].low = crn_max(0, share - beside);
            band->places[i].high = crn_min((int64_t)1 << CRN_SHARE_LOG2, share + beside);
        }
        place = label->before;
        label = before;
    }
}
