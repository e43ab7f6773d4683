/*
 * chain-lagrangian: persistent schedules of long chains, by Lagrangian relaxation of the memory.
 *
 * A plan cuts a chain into pieces that are saved, or passed and recomputed (chain_pieces.h). With the memory priced,
 * the best plan is a shortest path, found in one pass with labels (chain_labels.h). At a low price it takes less time and
 * more memory than there is, so that there is no path; the least price with a path is found by bisection. Plans at that
 * price and somewhat below are found anew with more and more labels a stage: labels that are not the best at a price fill
 * what memory the best one leaves. Recomputed pieces that do not fit have plans of their own, made in the same way.
 *
 * Beside that there is the plan of halving, which needs little memory and always fits from `least` on.
 *
 * Optimal  In nothing: pieces are cut at prices. For long chains the loss is that of one piece among thousands; see
 *          docs/explanation/solvers/chain-lagrangian.md for how far from the lower bound it is.
 * Cost     O(n R) time for each price and label, R the longest recomputed piece, O(n) memory. Limited by the clock, or
 *          without a time limit by work; the best plan so far is the answer.
 */
#include "solve/chain/chain_labels.h"

/*
 * How far plans are nested; of a problem and of those within it, how often a price is halved; how long to go on widening; and
 * with less and less of a recomputed piece that must fit.
 */
enum { DEPTH_MAX = 4, BISECTIONS = 12, INNER_BISECTIONS = 8, INNER_WIDTH = 4, SLACK_MAX = 3 };
#define STEPS_MAX ((int64_t)1 << 29)

static const int32_t widths[] = {4, 16, 64, 256, 1024};
/* Prices below the least one with a path, in 64ths of it: with more labels there may be one there, too. */
static const int64_t price_shares[] = {64, 63, 62, 60};

enum { WIDTHS = sizeof(widths) / sizeof(widths[0]), SHARES = sizeof(price_shares) / sizeof(price_shares[0]) };

/* The last width takes 50 KB a stage: longer chains go without it. */
enum { WIDEST_STAGES_MAX = 5000 };

static int width_count(int64_t stages)
{
    return stages <= WIDEST_STAGES_MAX ? WIDTHS : WIDTHS - 1;
}

typedef struct session {
    crn_chain_model model;
    int64_t full_bytes, halving_bytes; /* beside what is always there */
} session;

/* What is known while one budget is answered. */
typedef struct search {
    const crn_task *task;
    const crn_chain_model *model;
    crn_labels labels;
    bool has_prices, stopped;
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

/* A plan at a price, if there is one, is considered. What stops it keeps what there is. */
static cairn_status try_price(search *c, problem *p, int64_t price, int32_t width, int slack, bool *found)
{
    crn_label_query query = {p->s, p->t, p->m, price, width, slack};
    crn_plan plan = {c->pieces.count, 0};
    *found = false;
    if (c->stopped)
        return CAIRN_OK;
    cairn_status status = crn_labels_cut(&c->labels, c->task, &query, &c->pieces, &plan, c->error);
    if (status == CAIRN_CANCELLED) {
        c->stopped = true;
        return CAIRN_OK;
    }
    CRN_TRY(status);
    if (plan.count > 0 && slack > 0)
        CRN_TRY(solve_pieces(c, p, &plan));
    *found = plan.count > 0;
    consider(c, p, plan);
    return CAIRN_OK;
}

/* The least price with a plan of one label a stage, roughly; CAIRN_NONE: there is none. */
static cairn_status find_price(search *c, problem *p, int slack, int64_t *price)
{
    int64_t low = 0, high = (int64_t)1 << CRN_PRICE_UNIT_LOG2;
    int bisections = p->depth > 0 ? INNER_BISECTIONS : BISECTIONS;
    bool found = false;
    for (*price = CAIRN_NONE; !c->stopped; high *= 2) {
        CRN_TRY(try_price(c, p, high, 1, slack, &found));
        if (found || high >> CRN_PRICE_LOG2_MAX > 0)
            break;
        low = high;
    }
    if (!found)
        return CAIRN_OK;
    for (int i = 0; i < bisections && high - low > 1; i++) {
        int64_t middle = low + (high - low) / 2;
        CRN_TRY(try_price(c, p, middle, 1, slack, &found));
        if (found)
            high = middle;
        else
            low = middle;
    }
    *price = high;
    return CAIRN_OK;
}

/* More labels, at prices of which some may have had no plan with fewer. */
static cairn_status widen(search *c, problem *p, int64_t price, int32_t width, int slack)
{
    for (int i = 0; i < SHARES; i++) {
        bool found;
        CRN_TRY(try_price(c, p, price * price_shares[i] / price_shares[0], width, slack, &found));
    }
    return CAIRN_OK;
}

/* All widths that the clock allows, or the work, as far as can be told from the width before. */
static cairn_status widen_all(search *c, problem *p, int64_t price, int slack)
{
    if (p->depth > 0)
        return widen(c, p, price, INNER_WIDTH, slack);
    int count = width_count(c->model->n);
    int64_t most = c->task->deadline_ns == CAIRN_NONE ? STEPS_MAX : INT64_MAX / 2;
    for (int i = 0; i < count; i++) {
        int64_t before = c->labels.steps;
        CRN_TRY(widen(c, p, price, widths[i], slack));
        int64_t next = i + 1 < count ? (c->labels.steps - before) / widths[i] * widths[i + 1] : 0;
        if (c->stopped || c->labels.steps + next > most)
            break;
    }
    return CAIRN_OK;
}

/* Pieces that fit as they are are tried first; where there is no such plan, more and more of them may not. */
static cairn_status solve_problem(search *c, problem *p)
{
    p->best = (crn_plan){p->begin, 0};
    p->best_ns = INT64_MAX;
    CRN_TRY(halve(c, p));
    if (!c->has_prices || p->depth > DEPTH_MAX)
        return CAIRN_OK;
    for (int slack = 0; slack <= SLACK_MAX && !c->stopped && c->labels.steps < STEPS_MAX; slack++) {
        int64_t price;
        CRN_TRY(find_price(c, p, slack, &price));
        if (price == CAIRN_NONE)
            continue;
        return widen_all(c, p, price, slack);
    }
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
    c.has_prices = crn_labels_init(&c.labels, &open->model, task);
    cairn_status status = p.m >= open->full_bytes ? save_all(&c, &p) : solve_problem(&c, &p);
    answer->stopped_early = c.stopped;
    answer->found = status == CAIRN_OK && p.best.count > 0;
    if (answer->found)
        status = crn_pieces_emit(&open->model, &c.pieces, p.best, answer->builder, error);
    crn_labels_clear(&c.labels);
    crn_pieces_clear(&c.pieces);
    return status;
}

/* ---- estimates ---- */

static int64_t chain_lagrangian_memory(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    int64_t plans = crn_mul_saturating(n, 2 * (DEPTH_MAX + 2) * (int64_t)sizeof(crn_piece));
    return crn_add_saturating(crn_labels_memory(n, widths[width_count(n) - 1]), crn_add_saturating(plans, 1 << 16));
}

/* As measured: bisection tries some 30 prices with one label each; widening takes up to STEPS_MAX steps. */
static int64_t chain_lagrangian_work(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count, run = crn_min(n, crn_labels_run_max(n));
    int64_t once = crn_mul_saturating(n, run);
    return crn_add_saturating(crn_mul_saturating(once, 60), crn_min(STEPS_MAX, crn_mul_saturating(once, 1000)) * 4);
}

const crn_solver crn_chain_lagrangian_solver = {
    .info = {.name = "chain-lagrangian",
             .takes_chains = true,
             .available = true,
             .optimal_in = "",
             .summary = "persistent schedules of thousands of different stages, by pricing memory",
             .source = "Cairn",
             .cost = "O(n R) for each price and label, R the longest recomputed piece; O(n) memory"},
    .rank = 10,
    .memory = chain_lagrangian_memory,
    .work = chain_lagrangian_work,
    .is_anytime = true,
    .open = chain_lagrangian_open,
    .close = chain_lagrangian_close,
    .least = chain_lagrangian_least,
    .solve = chain_lagrangian_solve,
};
