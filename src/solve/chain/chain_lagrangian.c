/*
 * chain-lagrangian: persistent schedules of long chains, by Lagrangian relaxation of the memory.
 *
 * A plan cuts a chain into pieces that are saved, or passed and recomputed (chain_pieces.h). With the memory priced, the
 * best plan is a shortest path, found in one pass with one label a stage (chain_labels.h). At a low price it takes less
 * time and more memory than there is, so that there is no path; the least price with a path is found by bisection.
 *
 * At that price, a table with buckets for what paths keep finds a faster path. The next tables have their buckets closer
 * and closer beside what the fastest path keeps (chain_band.h), down to a part of m in BESIDE_LAST; then the same once more
 * with more buckets. A table may lose the path that is known to a cheaper one that keeps more; the best plan so far stays the
 * answer.
 *
 * Recomputed pieces may be such that not all of their saved sets fit: the path charges an estimate, and then they have
 * plans of their own, made in the same way with one table. As the estimate may be wrong, there are several ways to charge,
 * each with its tables, and also that in which all pieces fit; the plan that truly takes least is the answer.
 *
 * Beside that there is the plan of halving, which needs little memory and always fits from `least` on.
 *
 * Optimal  In nothing: pieces are cut at prices. For long chains the loss is that of one piece among thousands; see
 *          docs/explanation/solvers/chain-lagrangian.md for how far from the lower bound it is.
 * Cost     O(n R) time for each price and for each table and bucket, R the longest recomputed piece that is worth its time;
 *          O(n) memory. Limited by the clock, or without a time limit by work; the best plan so far is the answer.
 */
#include "solve/chain/chain_labels.h"

/*
 * How far plans are nested; of a problem and of those within it, how often a price is halved, and how many buckets the
 * first table has; of a recomputed piece, a share of 1/2^SLACK_MAX fits at least, or half of that.
 */
enum { DEPTH_MAX = 4, BISECTIONS = 12, INNER_BISECTIONS = 8, BUCKETS_FIRST = 64, INNER_BUCKETS = 64, SLACK_MAX = 3 };
/* Tables reach as far to each side of a path as a part of m, one in BESIDE_FIRST and then half as far each time. */
enum { BESIDE_FIRST = 8, BESIDE_LAST = 128, WAYS = 4 };
#define STEPS_MAX ((int64_t)1 << 30)

typedef struct session {
    crn_chain_model model;
    int64_t full_bytes, halving_bytes; /* beside what is always there */
} session;

/* What is known while one budget is answered. */
typedef struct search {
    const crn_task *task;
    const crn_chain_model *model;
    crn_labels labels;
    crn_band bands[WAYS]; /* of the whole problem */
    int64_t steps_max;    /* of the labels */
    bool stopped;
    crn_pieces pieces;
    cairn_error *error;
} search;

/* A problem, and its best plan so far; its pieces, and those within, are the list's last ones. */
typedef struct problem {
    int32_t s, t;
    int64_t m;
    int depth;
    size_t begin;
    crn_plan best;
    int64_t best_ns; /* INT64_MAX: no plan */
} problem;

static cairn_status solve_problem(search *c, problem *p);

/* ---- plans ---- */

/* Pieces after those of the best plan are another one: takes that if it is faster, else forgets it. */
static void consider(search *c, problem *p, crn_plan plan)
{
    int64_t ns = plan.count > 0 ? crn_pieces_extra_ns(c->model, &c->pieces, plan) : INT64_MAX;
    if (ns >= p->best_ns) {
        c->pieces.count = plan.begin;
        return;
    }
    crn_pieces_move_down(&c->pieces, p->begin, plan.begin);
    p->best = (crn_plan){p->begin, plan.count};
    p->best_ns = ns;
}

static cairn_status halve(search *c, problem *p)
{
    crn_plan plan;
    if (crn_halving_bytes(c->model, p->s, p->t) > p->m)
        return CAIRN_OK;
    if (!crn_halving_make(c->model, p->s, p->t, p->m, &c->pieces, &plan))
        return crn_no_memory(c->error);
    consider(c, p, plan);
    return CAIRN_OK;
}

/* The plan of a recomputed piece that does not fit; *found: there is one. */
static cairn_status solve_piece(search *c, crn_piece *piece, int64_t m, int depth, bool *found)
{
    problem inner = {.s = piece->first, .t = piece->last, .m = m, .depth = depth, .begin = c->pieces.count};
    if (crn_pieces_full_bytes(c->model, piece->first, piece->last) <= m)
        return CAIRN_OK;
    CRN_TRY(solve_problem(c, &inner));
    *found = inner.best.count > 0;
    piece->inner = inner.best;
    return CAIRN_OK;
}

/* Makes the plans within a plan; empties it where one of them cannot be made. */
static cairn_status solve_pieces(search *c, const problem *p, crn_plan *plan)
{
    int64_t m = p->m;
    bool found = true;
    for (int32_t i = 0; found && i < plan->count; i++) {
        crn_piece piece = c->pieces.list[plan->begin + (size_t)i];
        bool is_saved = piece.option != CRN_PIECE_RECOMPUTED;
        if (!is_saved)
            CRN_TRY(solve_piece(c, &piece, m, p->depth + 1, &found));
        c->pieces.list[plan->begin + (size_t)i] = piece;
        m -= is_saved ? crn_stage(c->model, piece.first)->options[piece.option].saved_bytes
                      : c->model->output[piece.last];
    }
    plan->count = found ? plan->count : 0;
    return CAIRN_OK;
}

/* ---- prices ---- */

/* Which recomputed pieces are allowed and what they are charged; the band of tables, and what the fastest path takes. */
typedef struct way {
    crn_priced problem;
    crn_band *band; /* NULL: none */
    int64_t parts;
} way;

/*
 * Adds the fastest path of a table to the pieces, if there is one. Where it is stopped, or the work has ended, the plan is
 * empty.
 */
static cairn_status find_path(search *c, way *w, int32_t buckets, int64_t beside, crn_plan *plan)
{
    crn_label_query query = {w->problem, buckets, w->band};
    crn_label_path path;
    *plan = (crn_plan){c->pieces.count, 0};
    if (c->stopped)
        return CAIRN_OK;
    cairn_status status = crn_labels_cut(&c->labels, c->task, &query, &c->pieces, &path, c->error);
    if (status == CAIRN_CANCELLED) {
        c->stopped = true;
        c->pieces.count = plan->begin;
        return CAIRN_OK;
    }
    CRN_TRY(status);
    *plan = path.plan;
    w->parts = crn_min(w->parts, path.parts);
    if (w->band && plan->count > 0) {
        crn_band_limit(w->band, &c->labels.prices, &w->problem, w->parts);
        crn_labels_narrow(&c->labels, &query, beside, w->band);
    }
    return CAIRN_OK;
}

/* Whether there is a path with one label a stage. Where its pieces fit as they are, it is a plan. */
static cairn_status try_price(search *c, problem *p, way *w, int64_t price, bool *found)
{
    crn_plan plan;
    w->problem.price = price;
    w->parts = INT64_MAX;
    CRN_TRY(find_path(c, w, 1, 0, &plan));
    if (w->problem.slack > 0)
        CRN_TRY(solve_pieces(c, p, &plan));
    *found = plan.count > 0;
    consider(c, p, plan);
    return CAIRN_OK;
}

/* The least price with a path, roughly. */
static cairn_status find_price(search *c, problem *p, way *w, bool *found)
{
    int64_t low = 0, high = (int64_t)1 << CRN_PRICE_UNIT_LOG2;
    int bisections = p->depth > 0 ? INNER_BISECTIONS : BISECTIONS;
    way tried = *w;
    for (*found = false; !c->stopped; low = high, high *= 2) {
        CRN_TRY(try_price(c, p, w, high, found));
        if (*found || high >> CRN_PRICE_LOG2_MAX > 0)
            break;
    }
    for (int i = 0; *found && !c->stopped && i < bisections && high - low > 1; i++) {
        int64_t middle = low + (high - low) / 2;
        bool fits;
        CRN_TRY(try_price(c, p, &tried, middle, &fits));
        low = fits ? low : middle;
        high = fits ? middle : high;
        *w = fits ? tried : *w;
    }
    return CAIRN_OK;
}

/* ---- tables ---- */

static cairn_status try_table(search *c, problem *p, way *w, int32_t buckets, int64_t beside)
{
    crn_plan plan;
    CRN_TRY(find_path(c, w, buckets, beside, &plan));
    if (w->problem.slack > 0)
        CRN_TRY(solve_pieces(c, p, &plan));
    consider(c, p, plan);
    return CAIRN_OK;
}

/* The first tables: of all that may be kept. The path of a small one leaves less for the next to look at. */
static cairn_status first_tables(search *c, problem *p, way *w, crn_band *band)
{
    int64_t all = (int64_t)1 << CRN_SHARE_LOG2;
    cairn_status status = crn_band_make(band, c->task, &c->labels.prices, &w->problem, w->parts, c->error);
    c->stopped |= status == CAIRN_CANCELLED;
    if (c->stopped)
        return CAIRN_OK;
    CRN_TRY(status);
    w->band = band;
    CRN_TRY(try_table(c, p, w, BUCKETS_FIRST / 4, all));
    return try_table(c, p, w, BUCKETS_FIRST, all / BESIDE_FIRST);
}

/* Tables of what lies closer and closer beside what the best path keeps. */
static cairn_status close_in(search *c, problem *p, way *w, int32_t buckets)
{
    for (int part = BESIDE_FIRST; part <= BESIDE_LAST; part *= 2) {
        int next = part < BESIDE_LAST ? 2 * part : BESIDE_FIRST;
        CRN_TRY(try_table(c, p, w, buckets, ((int64_t)1 << CRN_SHARE_LOG2) / next));
    }
    return CAIRN_OK;
}

/* Closes in again and again with more buckets, if the work allows that, as far as can be told from the time before. */
static cairn_status refine(search *c, problem *p, way *ways, int count)
{
    int32_t buckets_max = crn_buckets_max(c->model->n), buckets = BUCKETS_FIRST;
    for (int64_t steps = 0;
         !c->stopped && buckets < buckets_max && c->labels.steps + 4 * steps <= c->labels.steps_max;) {
        int64_t before = c->labels.steps;
        buckets = (int32_t)crn_min(4 * buckets, buckets_max);
        for (int i = 0; i < count; i++) {
            if (!ways[i].band)
                CRN_TRY(first_tables(c, p, &ways[i], &c->bands[i]));
            CRN_TRY(close_in(c, p, &ways[i], buckets));
        }
        steps = c->labels.steps - before;
    }
    return CAIRN_OK;
}

/*
 * From the way that has a path: others with half of what must fit there, and with higher charges. Their price is the same.
 * Where every piece of that path fits, it takes the same in all ways; else no more than twice its time.
 */
static int more_ways(way *ways)
{
    static const int less[WAYS] = {0, 1, 1, 0}, charges[WAYS] = {2, 2, 4, 3};
    bool fits = ways[0].problem.slack == 0;
    for (int i = 1; i < WAYS; i++) {
        ways[i] = ways[0];
        ways[i].problem.slack += less[i];
        ways[i].problem.charge = charges[i];
        ways[i].parts *= fits ? 1 : 2;
    }
    return fits ? WAYS - 1 : WAYS;
}

static cairn_status solve_problem(search *c, problem *p)
{
    way ways[WAYS];
    bool found = false;
    p->best = (crn_plan){p->begin, 0};
    p->best_ns = INT64_MAX;
    CRN_TRY(halve(c, p));
    if (!c->labels.prices.are_exact || p->depth > DEPTH_MAX)
        return CAIRN_OK;
    for (int slack = 0; slack <= SLACK_MAX && !found && !c->stopped; slack++) {
        ways[0] = (way){{p->s, p->t, p->m, 0, slack, 2}, NULL, INT64_MAX};
        CRN_TRY(find_price(c, p, &ways[0], &found));
    }
    if (!found)
        return CAIRN_OK;
    int count = more_ways(ways);
    if (p->depth == 0)
        return refine(c, p, ways, count);
    count = p->depth > 1 ? 1 : count;
    for (int i = 0; i < count; i++)
        CRN_TRY(try_table(c, p, &ways[i], INNER_BUCKETS, 0));
    return CAIRN_OK;
}

/* ---- the solver ---- */

static cairn_status chain_lagrangian_open(const crn_task *task, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    session *p = crn_alloc_zero(&allocator, 1, sizeof(*p));
    *state = p;
    if (!p)
        return crn_no_memory(error);
    CRN_TRY(crn_chain_model_init(&p->model, task, error));
    p->full_bytes = crn_pieces_full_bytes(&p->model, 1, p->model.n);
    p->halving_bytes = crn_halving_bytes(&p->model, 1, p->model.n);
    return CAIRN_OK;
}

static void chain_lagrangian_close(const crn_task *task, void *state)
{
    session *p = state;
    cairn_allocator allocator = crn_allocator(task->env);
    crn_chain_model_clear(&p->model);
    crn_free(&allocator, p, 1, sizeof(*p));
}

static cairn_status chain_lagrangian_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    const session *p = state;
    (void)task;
    (void)error;
    least->bytes = p->model.always_bytes + crn_min(p->full_bytes, p->halving_bytes);
    return CAIRN_OK;
}

/* Everything is saved: a plan of one saved piece for each stage. */
static cairn_status save_all(search *c, problem *p)
{
    for (int32_t l = p->s; l <= p->t; l++)
        if (!crn_pieces_add(&c->pieces, (crn_piece){l, l, crn_fastest_option(crn_stage(c->model, l)), {0, 0}}))
            return crn_no_memory(c->error);
    p->best = (crn_plan){p->begin, p->t - p->s + 1};
    p->best_ns = 0;
    return CAIRN_OK;
}

static cairn_status chain_lagrangian_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                                           cairn_error *error)
{
    const session *open = state;
    search c = {.task = task, .model = &open->model, .error = error};
    problem p = {.s = 1, .t = open->model.n};
    p.m = budget_bytes == CAIRN_NONE ? INT64_MAX : budget_bytes - open->model.always_bytes;
    if (p.m < crn_min(open->full_bytes, open->halving_bytes))
        return CAIRN_OK;
    c.pieces.allocator = crn_allocator(task->env);
    cairn_status status = CAIRN_OK;
    if (!crn_labels_init(&c.labels, &open->model, task))
        status = crn_no_memory(error);
    c.labels.steps_max = task->deadline_ns == CAIRN_NONE ? STEPS_MAX : INT64_MAX;
    if (status == CAIRN_OK)
        status = p.m >= open->full_bytes ? save_all(&c, &p) : solve_problem(&c, &p);
    answer->stopped_early = c.stopped;
    answer->found = status == CAIRN_OK && p.best.count > 0;
    if (answer->found)
        status = crn_pieces_emit(&open->model, &c.pieces, p.best, answer->builder, error);
    for (int i = 0; i < WAYS; i++)
        crn_band_clear(&c.bands[i], &c.pieces.allocator);
    crn_labels_clear(&c.labels);
    crn_pieces_clear(&c.pieces);
    return status;
}

/* ---- estimates ---- */

static int64_t chain_lagrangian_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    int64_t pieces = 2 * (DEPTH_MAX + 2) * (int64_t)sizeof(crn_piece),
            bands = 2 * WAYS * (int64_t)sizeof(crn_band_place);
    int64_t plans = crn_mul_saturating(n, pieces + bands);
    return crn_add_saturating(crn_labels_memory(n), crn_add_saturating(plans, 1 << 17));
}

/* As measured, from 150 to 5,000 stages: the search for a price, and tables of up to STEPS_MAX steps. */
static int64_t chain_lagrangian_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count, run = crn_min(n, crn_prices_run_max(n));
    int64_t once = crn_mul_saturating(n, run);
    return crn_add_saturating(crn_mul_saturating(once, 20), crn_min(STEPS_MAX, crn_mul_saturating(once, 2000)) * 3);
}

const crn_solver crn_chain_lagrangian_solver = {
    .info = {.name = "chain-lagrangian",
             .takes_chains = true,
             .available = true,
             .optimal_in = "",
             .summary = "persistent schedules of thousands of different stages, by pricing memory",
             .source = "Cairn",
             .cost = "O(n R) for each price, table and bucket, R the longest recomputed piece; O(n) memory"},
    .rank = 10,
    .memory = chain_lagrangian_memory,
    .work = chain_lagrangian_work,
    .is_anytime = true,
    .open = chain_lagrangian_open,
    .close = chain_lagrangian_close,
    .least = chain_lagrangian_least,
    .solve = chain_lagrangian_solve,
};
