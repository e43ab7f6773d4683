/*
 * chain-exact: the fastest memory-persistent schedule of a chain, exact in bytes.
 *
 * Source: the program of chain-dp (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, theorem 1, with the terms put
 * right and with options, forwards that save nothing, weight gradients and signed workspaces; the model is in
 * chain_model.h, the ways forward in chain_forward.h). Without slots: C(s,t,.) is a step function of the bytes m that a
 * sub-problem may use, and is kept as the list of its steps. With the thresholds of chain_model.h,
 *
 *   SAVE k           uF_k[s] + uB_k[s] + C(s+1, t, m - A_k[s])       if m >= base[t] + save_k[s], m >= backward_k[s]
 *   CHECKPOINT s'    way(s, s'-1) + C(s', t, m - a[s'-1]) + C(s, s'-1, m)   if m >= base[t] + peak of the way
 *   SAVE_AND_DROP k  uF_k[s] + C(s+1, t, m - A_k[s]) + C(s, s, m)    if m >= base[t] + save_k[s]
 *
 * and C is the lower envelope of them (step_function.h). Nothing is rounded, so the answer is never worse than chain-dp's at any
 * number of slots, and it is optimal among persistent schedules. One set of tables answers all budgets.
 *
 * Two things are done to the numbers. Times are counted beyond what no schedule can avoid, E(s,t,.) = C(s,t,.) - sum of
 * min over k of uF_k[l] + uB_k[l]. And m is counted without the weight gradients that exist at d[t], so that sub-chains
 * whose stages are alike share one table, wherever they stand (subchain.h): C(s,s'-1,.) then moves by the weight
 * gradients of s'..t.
 *
 * Cost: what counts is the number of steps. On chains whose stages are all different it grows about as L^2 in the length L
 * of a sub-chain (some 2,000 at L = 100), so time and memory grow about as n^4 to n^5: fine for hundreds of stages.
 * Of chains of repeated blocks only distinct sub-chains count. Memory is estimated before anything is allocated.
 * Diagonals (t - s) are filled by all threads; the tables do not depend on how many.
 */
#include "solve/chain/chain_exact.h"

#include "solve/chain/step_function.h"
#include "solve/chain/subchain.h"

enum { CELLS_MIN = 256, CELLS_MAX = 4096, CELLS_PER_STAGE = 12 };

typedef struct session {
    crn_chain_table table;
    const crn_chain_model *model;
    crn_subchains subchains;
    crn_steps *steps;   /* of a kind */
    int64_t *floor_ns;  /* of stages 1..l: what no schedule can avoid */
    int64_t full_bytes; /* crn_chain_full_bytes */
    crn_cells cells;
    crn_step_makers makers;
} session;

/* ---- the terms of a sub-problem ---- */

/* Weight gradients that exist while d[t] is the current gradient: tables count without them. */
static int64_t grads_after(const session *p, int32_t t)
{
    return p->model->base[t] - crn_stage(p->model, t)->grad_bytes;
}

static const crn_steps *steps_of(const session *p, int32_t s, int32_t t)
{
    return s > t ? NULL : &p->steps[crn_subchain_kind(&p->subchains, s, t)];
}

static crn_term save_term(const session *p, int32_t s, int32_t t, int32_t k)
{
    const cairn_stage_option *option = &crn_stage(p->model, s)->options[k];
    int64_t save_bytes = p->model->base[t] + crn_save_bytes(option);
    return (crn_term){.first = steps_of(p, s + 1, t),
                      .first_shift = s < t ? option->saved_bytes : 0,
                      .from_bytes = crn_max(save_bytes, crn_backward_bytes(p->model, s, option)) - grads_after(p, t),
                      .ns = crn_option_ns(option) - (p->floor_ns[s] - p->floor_ns[s - 1])};
}

static crn_term save_and_drop_term(const session *p, int32_t s, int32_t t, int32_t k)
{
    const cairn_stage_option *option = &crn_stage(p->model, s)->options[k];
    return (crn_term){.first = steps_of(p, s + 1, t),
                      .second = steps_of(p, s, s),
                      .first_shift = option->saved_bytes,
                      .second_shift = grads_after(p, s) - grads_after(p, t),
                      .from_bytes = p->model->base[t] + crn_save_bytes(option) - grads_after(p, t),
                      .ns = option->forward_ns};
}

static crn_term checkpoint_term(const session *p, int32_t s, int32_t t, int32_t split, const crn_pass *pass)
{
    return (crn_term){.first = steps_of(p, split, t),
                      .second = steps_of(p, s, split - 1),
                      .first_shift = p->model->output[split - 1],
                      .second_shift = grads_after(p, split - 1) - grads_after(p, t),
                      .from_bytes = p->model->base[t] + pass->peak_bytes - grads_after(p, t),
                      .ns = pass->ns};
}

/* ---- tables ---- */

static bool add_saves(const session *p, crn_envelope *e, int32_t s, int32_t t)
{
    const cairn_stage *stage = crn_stage(p->model, s);
    bool added = true;
    for (int32_t k = 0; added && k < stage->option_count; k++) {
        crn_term term = save_term(p, s, t, k);
        added = crn_envelope_add(e, &term);
        if (!added || s == t || stage->no_recompute)
            continue;
        term = save_and_drop_term(p, s, t, k);
        added = crn_envelope_add(e, &term);
    }
    return added;
}

static bool add_checkpoints(const session *p, crn_envelope *e, int32_t s, int32_t t)
{
    bool added = true;
    for (int32_t split = s + 1; split <= crn_last_split(&p->table, s, t); split++) {
        int32_t count;
        const crn_pass *pass = crn_passes_of(&p->table, s, split - 1, &count);
        for (int32_t i = 0; added && i < count; i++) {
            crn_term term = checkpoint_term(p, s, t, split, &pass[i]);
            added = crn_envelope_add(e, &term);
        }
    }
    return added;
}

typedef struct diagonal {
    session *session;
    int32_t length, first_kind;
} diagonal;

static void fill_kind(void *context, int64_t i, int worker)
{
    const diagonal *d = context;
    session *p = d->session;
    int32_t kind = d->first_kind + (int32_t)i;
    int32_t s = p->subchains.first[kind], t = s + d->length - 1;
    crn_envelope *e = p->makers.envelopes[worker];
    crn_envelope_begin(e);
    if (!add_saves(p, e, s, t) || !add_checkpoints(p, e, s, t) ||
        !crn_envelope_end(e, p->model->output[s - 1], &p->makers.points[worker], &p->steps[kind]))
        atomic_store(&p->makers.failed, true);
}

/* What a split of a sub-chain takes, as measured: so much, and so much more for each stage of the sub-chain. */
enum { SPLIT_NS = 500, SPLIT_STAGE_NS = 14 };

/* Of all distinct sub-chains of a length. */
static int64_t diagonal_work(const crn_subchains *subchains, int32_t length)
{
    int64_t splits = crn_mul_saturating(subchains->begin[length + 1] - subchains->begin[length], length);
    return crn_mul_saturating(splits, SPLIT_NS + SPLIT_STAGE_NS * (int64_t)length);
}

/*
 * The first diagonals, of one part in so many of the work, tell how long the rest takes: as measured, 0.4 to 1.1 times as long
 * as its share of the work says, so at least one part in so many of that.
 */
enum { TELLING_SHARE = 4, REST_SHARE = 2 };

/* Whether the diagonals so far took so long that the tables will not be full in time. */
static bool is_hopeless(const crn_task *task, int64_t begin_ns, double done, double all)
{
    if (task->deadline_ns == CAIRN_NONE || done < all / TELLING_SHARE)
        return false;
    double left = (double)(task->deadline_ns - begin_ns), taken = (double)(crn_clock_ns() - begin_ns);
    return taken + taken * (all - done) / done / REST_SHARE > left;
}

static cairn_status fill(session *p, const crn_task *task, cairn_error *error)
{
    const int64_t begin_ns = crn_clock_ns();
    double done = 0, all = 0;
    for (int32_t length = 1; length <= p->model->n; length++)
        all += (double)diagonal_work(&p->subchains, length);
    for (int32_t length = 1; length <= p->model->n; length++) {
        diagonal d = {p, length, p->subchains.begin[length]};
        crn_team_run(task->team, p->subchains.begin[length + 1] - d.first_kind, fill_kind, &d);
        if (atomic_load(&p->makers.failed))
            return crn_no_memory(error);
        cairn_progress progress = {"chain-exact", length, p->model->n, CAIRN_NONE, CAIRN_NONE};
        done += (double)diagonal_work(&p->subchains, length);
        if (crn_should_stop(task, &progress) || is_hopeless(task, begin_ns, done, all))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %d of %d diagonals", length, p->model->n);
    }
    return CAIRN_OK;
}

/* ---- the way back ---- */

static bool is_checkpoint(const session *p, int32_t s, int32_t t, int64_t bytes, int64_t ns, crn_decision *decision)
{
    for (int32_t split = s + 1; split <= crn_last_split(&p->table, s, t); split++) {
        int32_t count;
        const crn_pass *pass = crn_passes_of(&p->table, s, split - 1, &count);
        for (int32_t i = 0; i < count; i++) {
            crn_term term = checkpoint_term(p, s, t, split, &pass[i]);
            decision->split = split;
            decision->way = i;
            if (crn_term_at(&term, &p->cells, bytes) == ns)
                return true;
        }
    }
    return false;
}

/* The decision that gives the value: the first of SAVE, CHECKPOINT, SAVE_AND_DROP, in increasing order of k and s'. */
static crn_decision decide(const void *context, int32_t s, int32_t t, int64_t m)
{
    const session *p = context;
    const cairn_stage *stage = crn_stage(p->model, s);
    int64_t bytes = m - grads_after(p, t), ns = crn_steps_at(steps_of(p, s, t), &p->cells, bytes);
    crn_decision decision = {.left = m};
    for (int32_t k = 0; k < stage->option_count; k++) {
        crn_term term = save_term(p, s, t, k);
        if (crn_term_at(&term, &p->cells, bytes) == ns)
            return (crn_decision){.kind = CRN_DECIDE_SAVE, .option = k, .right = m - stage->options[k].saved_bytes};
    }
    if (is_checkpoint(p, s, t, bytes, ns, &decision)) {
        decision.kind = CRN_DECIDE_CHECKPOINT;
        decision.right = m - p->model->output[decision.split - 1];
        return decision;
    }
    decision.kind = CRN_DECIDE_SAVE_AND_DROP;
    for (; decision.option + 1 < stage->option_count; decision.option++) {
        crn_term term = save_and_drop_term(p, s, t, decision.option);
        if (crn_term_at(&term, &p->cells, bytes) == ns)
            break;
    }
    decision.right = m - stage->options[decision.option].saved_bytes;
    return decision;
}

/* ---- opening ---- */

static int64_t least_bytes(const session *p)
{
    return crn_chain_table_least(&p->table);
}

static bool is_too_little(const session *p, int64_t budget_bytes)
{
    return budget_bytes != CAIRN_NONE && budget_bytes < least_bytes(p);
}

static void find_cells(session *p, const crn_task *task)
{
    int64_t top = p->full_bytes = crn_chain_full_bytes(p->model);
    if (task->budget_max_bytes != CAIRN_NONE)
        top = crn_min(top, task->budget_max_bytes - p->model->always_bytes);
    p->cells = crn_cells_for(top, (int32_t)crn_min(CELLS_MAX, crn_max(CELLS_MIN, CELLS_PER_STAGE * p->model->n)));
}

static void fill_floor(session *p)
{
    p->floor_ns[0] = 0;
    for (int32_t l = 1; l <= p->model->n; l++) {
        const cairn_stage *stage = crn_stage(p->model, l);
        p->floor_ns[l] = p->floor_ns[l - 1] + crn_option_ns(&stage->options[crn_fastest_option(stage)]);
    }
}

static void chain_exact_close(const crn_task *task, void *state)
{
    session *p = state;
    cairn_allocator allocator = crn_allocator(task->env);
    crn_step_makers_clear(&p->makers);
    crn_chain_table_clear(&p->table);
    crn_free(&allocator, p, 1, sizeof(*p));
}

static cairn_status prepare(session *p, const crn_task *task, cairn_error *error)
{
    CRN_TRY(crn_chain_table_init(&p->table, task, false, error));
    crn_arena *arena = &p->table.model.arena;
    if (is_too_little(p, task->budget_max_bytes)) /* the least is known, and nothing else will be asked for */
        return CAIRN_OK;
    CRN_TRY(crn_subchains_init(&p->subchains, p->model, arena, error));
    size_t kinds = (size_t)p->subchains.begin[p->model->n + 1];
    p->steps = crn_arena_alloc_zero(arena, kinds, sizeof(*p->steps));
    p->floor_ns = crn_arena_alloc(arena, (size_t)p->model->n + 1, sizeof(*p->floor_ns));
    if (!p->steps || !p->floor_ns)
        return crn_no_memory(error);
    fill_floor(p);
    find_cells(p, task);
    if (!crn_step_makers_init(&p->makers, crn_team_size(task->team), &p->cells, arena))
        return crn_no_memory(error);
    cairn_status status = fill(p, task, error);
    crn_step_makers_rest(&p->makers);
    return status;
}

static cairn_status chain_exact_open(const crn_task *task, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    session *p = crn_alloc_zero(&allocator, 1, sizeof(*p));
    *state = p;
    if (!p)
        return crn_no_memory(error);
    p->model = &p->table.model;
    return prepare(p, task, error);
}

const crn_chain_table *crn_chain_exact_table(const void *state)
{
    const session *p = state;
    return &p->table;
}

static cairn_status chain_exact_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    (void)task;
    (void)error;
    least->bytes = least_bytes(state);
    return CAIRN_OK;
}

/*
 * With what to ask the tables: the least memory that gives the time which the budget gives, for a smaller peak at no
 * cost; but where everything can be saved, as much as that takes. CAIRN_NONE = the budget does not do.
 */
static int64_t useful_bytes(const session *p, int64_t budget_bytes)
{
    const crn_steps *steps = steps_of(p, 1, p->model->n);
    int64_t useful = CAIRN_NONE, available = p->full_bytes;
    if (budget_bytes != CAIRN_NONE)
        available = crn_min(available, budget_bytes - p->model->always_bytes);
    if (available == p->full_bytes)
        return available;
    for (int32_t i = 0; i < steps->count && steps->points[i].bytes <= available; i++)
        useful = steps->points[i].bytes;
    return useful;
}

static cairn_status chain_exact_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                                      cairn_error *error)
{
    const session *p = state;
    if (is_too_little(p, budget_bytes))
        return CAIRN_OK;
    int64_t bytes = useful_bytes(p, budget_bytes);
    if (bytes == CAIRN_NONE)
        return CAIRN_OK;
    answer->found = true;
    answer->optimal_in_class = bytes == p->full_bytes || !p->table.gave_up;
    return crn_chain_unfold(task, p->model, decide, p, bytes, answer->builder, error);
}

/* ---- estimates ---- */

/* Past this, n^2 numbers are refused without a closer look. */
enum { STAGES_MAX = 1 << 15 };

static int64_t steps_estimate(int64_t length)
{
    return length * length / 4 + 8;
}

static int64_t tables_estimate(const crn_subchains *subchains, int64_t n)
{
    int64_t bytes = 0;
    for (int32_t length = 1; length <= n; length++) {
        int64_t kinds = subchains->begin[length + 1] - subchains->begin[length];
        int64_t cells = crn_min(CELLS_MAX, CELLS_PER_STAGE * n) * length / n + 4 * CRN_STEPS_BLOCK;
        int64_t table = steps_estimate(length) * (int64_t)sizeof(crn_step) + cells * 14 + (int64_t)sizeof(crn_steps);
        bytes = crn_add_saturating(bytes, crn_mul_saturating(kinds, table + CELLS_MAX / CRN_STEPS_BLOCK * 8));
    }
    return bytes;
}

static int64_t work_estimate(const crn_subchains *subchains, int64_t n)
{
    int64_t work = 0;
    for (int32_t length = 1; length <= n; length++)
        work = crn_add_saturating(work, diagonal_work(subchains, length));
    return work;
}

/*
 * What the sub-chains of the problem say; otherwise where there is no memory to look at them. Not looked at are those of
 * which there are so many at least that it passes enough anyway.
 */
static int64_t estimate(const crn_task *task, int64_t (*of)(const crn_subchains *, int64_t), int64_t enough,
                        int64_t otherwise)
{
    crn_chain_model model;
    crn_subchains subchains;
    bool known = crn_chain_model_init(&model, task, NULL) == CAIRN_OK &&
                 crn_subchains_count_least(&subchains, &model, &model.arena, NULL) == CAIRN_OK;
    int64_t found = known ? of(&subchains, model.n) : otherwise;
    if (known && found <= enough) {
        known = crn_subchains_init(&subchains, &model, &model.arena, NULL) == CAIRN_OK;
        found = known ? of(&subchains, model.n) : otherwise;
    }
    crn_chain_model_clear(&model);
    return found;
}

/* Whatever repeats; where this is too much, there is no need to look at the sub-chains. */
static int64_t fixed_memory(const crn_task *task)
{
    int32_t n = cairn_problem_chain(task->problem)->stage_count;
    return n > STAGES_MAX ? INT64_MAX
                          : crn_chain_table_memory(cairn_problem_chain(task->problem)) + crn_subchains_memory(n);
}

static int64_t chain_exact_memory(const crn_task *task)
{
    int64_t fixed = fixed_memory(task), limit = crn_memory_limit(task->settings);
    return fixed > limit ? fixed : crn_add_saturating(fixed, estimate(task, tables_estimate, limit, 0));
}

/* An hour: how much longer it takes need not be known. */
#define WORK_ENOUGH ((int64_t)3600000000000)

/* Looking at a sub-chain takes about so long; of a time limit, no more than one of so many parts is for that. */
enum { LOOK_NS = 10, LOOK_SHARE = 64 };

static bool has_time_to_look(const crn_task *task)
{
    int64_t n = cairn_problem_chain(task->problem)->stage_count;
    return task->deadline_ns == CAIRN_NONE || n * n / 2 * LOOK_NS <= (task->deadline_ns - crn_clock_ns()) / LOOK_SHARE;
}

static int64_t chain_exact_work(const crn_task *task)
{
    bool affordable = fixed_memory(task) <= crn_memory_limit(task->settings);
    return affordable && has_time_to_look(task) ? estimate(task, work_estimate, WORK_ENOUGH, INT64_MAX) : INT64_MAX;
}

const crn_solver crn_chain_exact_solver = {
    .info = {.name = "chain-exact",
             .takes_chains = true,
             .available = true,
             .optimal_in = "persistent",
             .summary = "fastest memory-persistent schedule, exact in bytes",
             .source = "Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, theorem 1, on step functions",
             .cost = "about n^4 to n^5 time and n^4 memory, n the number of distinct stages; the same at every budget"},
    .rank = 20,
    .memory = chain_exact_memory,
    .work = chain_exact_work,
    .open = chain_exact_open,
    .close = chain_exact_close,
    .least = chain_exact_least,
    .solve = chain_exact_solve,
};
