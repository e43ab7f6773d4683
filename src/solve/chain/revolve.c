/*
 * revolve: binomial checkpointing of a chain whose stages are all alike.
 *
 * Source: Griewank and Walther, "Algorithm 799: revolve" (2000). Only outputs are kept, c of them at a time, the chain's
 * input included; a stage is saved right before its backward. Let beta(c, r) = C(c + r, c), the number of steps that can
 * be reversed with c outputs kept and no step run more than r times in vain. To reverse n steps, let r be the number with
 * beta(c, r-1) < n <= beta(c, r). Then
 *
 *   forwards(n, c) = r n - beta(c + 1, r - 1)       forwards that save nothing; n that save come on top
 *
 * is least, and is had by keeping the output after d steps, for any d such that the rest can do with r and the d steps
 * themselves, later, with r - 1:
 *
 *   beta(c-1, r-1) <= n - d <= beta(c-1, r),   beta(c, r-2) <= d <= beta(c, r-1).
 *
 * We take the least such d, which keeps the sub-problem with fewer outputs to spend large and early.
 *
 * Optimal among schedules of this kind with at most c outputs kept beside the input of the stage that is run: so c + 1
 * outputs must fit (for n > 1), and a saved set. Of all c whose schedule fits the budget the largest is taken; the first
 * and last moments of a step may have room for more, which is not used.
 *
 * Where no weight gradients appear during the step, the peak is a formula that does not decrease with c (flat_peak), and
 * c is found in O(log n). Where they do, it need not be monotonic in c: the peak of each c is found by walking through
 * its schedule, O(n). Up to ALL_MAX stages all c are tried; beyond that O(log n) of them, spread, and those that halving
 * leads to between the largest that fits and the next. O(n) memory.
 */
#include "solve/chain/revolve.h"

#include "solve/chain_model.h"

enum { ALL_MAX = 2048 };

/* ---- numbers ---- */

int64_t crn_revolve_beta(int64_t c, int64_t r)
{
    int64_t value = 1, least = c < r ? c : r, sum = c + r;
    if (c < 0 || r < 0)
        return 0;
    for (int64_t i = 1; i <= least; i++) {
        int64_t product;
        if (crn_mul(value, sum - least + i, &product)) { /* nearly always; a wide division is slow */
            value = product / i;
            continue;
        }
        crn_wide next = (crn_wide)value * (crn_wide)(sum - least + i) / (crn_wide)i;
        if (next > INT64_MAX)
            return INT64_MAX;
        value = (int64_t)next;
    }
    return value;
}

static int64_t repetitions(int64_t n, int64_t c)
{
    int64_t high = 1, low = -1; /* beta(c, low) < n <= beta(c, high) */
    while (crn_revolve_beta(c, high) < n)
        high *= 2;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (crn_revolve_beta(c, middle) < n)
            low = middle;
        else
            high = middle;
    }
    return high;
}

int64_t crn_revolve_forwards(int64_t n, int64_t c)
{
    int64_t r = repetitions(n, c), product;
    return crn_mul(r, n, &product) ? product - crn_revolve_beta(c + 1, r - 1) : INT64_MAX;
}

int64_t crn_revolve_split(int64_t n, int64_t c)
{
    if (c >= n - 1) /* r = 1: every output is kept */
        return 1;
    int64_t r = repetitions(n, c);
    return crn_max(crn_max(1, crn_revolve_beta(c, r - 2)), n - crn_revolve_beta(c - 1, r));
}

/* ---- walking through a schedule ---- */

/* Stages s..t to reverse with c outputs kept, X included; kept_bytes: those that are, a[0] excepted. */
typedef struct part {
    int32_t s, t, c;
    int64_t kept_bytes;
} part;

typedef struct walk {
    crn_chain_model model;
    part *stack; /* parts that come later; at most n */
} walk;

static cairn_status walk_begin(walk *w, const crn_task *task, cairn_error *error)
{
    CRN_TRY(crn_chain_model_init(&w->model, task, error));
    w->stack = crn_arena_alloc(&w->model.arena, (size_t)w->model.n + 1, sizeof(*w->stack));
    return w->stack ? CAIRN_OK : crn_no_memory(error);
}

/* Also after walk_begin failed. */
static void walk_end(walk *w)
{
    crn_chain_model_clear(&w->model);
}

/* Splits a part of more than one stage: returns what comes first, and leaves in *p what comes then. */
static part first_of(const walk *w, part *p)
{
    int32_t split = p->s + (int32_t)crn_revolve_split(p->t - p->s + 1, p->c);
    part first = {split, p->t, p->c - 1, p->kept_bytes + w->model.output[split - 1]};
    p->t = split - 1;
    return first;
}

static int64_t pass_peak(const crn_chain_model *model, int32_t s, int32_t to)
{
    int64_t keep = crn_keep_bytes(crn_stage(model, s));
    return to > s ? crn_max(keep, crn_drop_bytes(model, s + 1)) : keep; /* all drops are alike */
}

static int64_t walk_peak(walk *w, int32_t c)
{
    const crn_chain_model *model = &w->model;
    int64_t peak = 0;
    int32_t count = 0;
    w->stack[count++] = (part){1, model->n, c, 0};
    while (count > 0) {
        part now = w->stack[--count];
        while (now.s < now.t) {
            int64_t base = model->base[now.t];
            part first = first_of(w, &now);
            peak = crn_max(peak, now.kept_bytes + base + pass_peak(model, now.s, first.s - 1));
            w->stack[count++] = now;
            now = first;
        }
        const cairn_stage_option *option = &crn_stage(model, now.s)->options[0];
        int64_t save = model->base[now.s] + crn_save_bytes(option);
        peak = crn_max(peak, now.kept_bytes + crn_max(save, crn_backward_bytes(model, now.s, option)));
    }
    return model->always_bytes + peak;
}

static cairn_status emit_pass(int32_t s, int32_t to, cairn_builder *builder, cairn_error *error)
{
    CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_KEEP, s, 0, 0, error));
    for (int32_t l = s + 1; l <= to; l++)
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_DROP, l, 0, 0, error));
    return CAIRN_OK;
}

static cairn_status emit(walk *w, int32_t c, cairn_builder *builder, cairn_error *error)
{
    int32_t count = 0;
    w->stack[count++] = (part){1, w->model.n, c, 0};
    while (count > 0) {
        part now = w->stack[--count];
        while (now.s < now.t) {
            part first = first_of(w, &now);
            CRN_TRY(emit_pass(now.s, first.s - 1, builder, error));
            w->stack[count++] = now;
            now = first;
        }
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_FORWARD_SAVE, now.s, 0, 0, error));
        CRN_TRY(crn_chain_emit(builder, CAIRN_OP_BACKWARD, now.s, 0, 0, error));
    }
    return CAIRN_OK;
}

/* ---- which c ---- */

/* What was found for a budget. */
typedef struct choice {
    int32_t c;           /* the largest that was tried whose schedule fits; 0 = none */
    int64_t least_bytes; /* the least peak of all that were tried; CAIRN_NONE = none was */
    bool stopped;        /* before all were tried */
} choice;

/* From here on nothing changes: every output is kept. */
static int32_t last_c(int32_t n)
{
    return n > 1 ? n - 1 : 1;
}

/* The least c whose schedule is not too long, which gets shorter with c; last_c + 1 where all are. */
static int32_t first_c(int32_t n)
{
    int64_t most = CAIRN_OPS_MAX - 2 * (int64_t)n;
    int32_t low = 0, high = last_c(n) + 1; /* low is too long, high is not or is past the end */
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (crn_revolve_forwards(n, middle) <= most)
            high = middle;
        else
            low = middle;
    }
    return high;
}

static bool is_flat(const crn_chain_model *model)
{
    return crn_stage(model, 1)->weight_grad_bytes == 0;
}

static int64_t leaf_bytes(const crn_chain_model *model, int32_t l)
{
    const cairn_stage_option *option = &crn_stage(model, l)->options[0];
    return crn_max(model->base[l] + crn_save_bytes(option), crn_backward_bytes(model, l, option));
}

/*
 * The peak where no weight gradients appear, so that all moments but the last backward are alike. On the way to stage n
 * as many outputs are kept as ever: min(c, n-1), when n is saved. For c < n - 1 the part before the last that is
 * kept, with c = 1 left, has three stages or more, and so drops while c - 1 are kept: parts of more than c + 1 stages
 * leave parts of more than c, as beta(c-1, r-1) > c for r > 2. Does not decrease with c.
 */
static int64_t flat_peak(const crn_chain_model *model, int32_t c)
{
    int32_t n = model->n;
    int64_t kept = crn_min(c, n - 1), output = model->output[n];
    if (n == 1)
        return model->always_bytes + leaf_bytes(model, 1);
    int64_t pass = model->base[n] + pass_peak(model, 1, c < n - 1 ? 2 : 1);
    int64_t peak = crn_max(leaf_bytes(model, 1), kept * output + leaf_bytes(model, n));
    return model->always_bytes + crn_max(peak, (kept - 1) * output + pass);
}

static bool fits(int64_t peak_bytes, int64_t budget_bytes)
{
    return budget_bytes == CAIRN_NONE || peak_bytes <= budget_bytes;
}

static choice choose_flat(const crn_chain_model *model, int64_t budget_bytes)
{
    int32_t low = first_c(model->n), high = last_c(model->n) + 1; /* low fits, high does not or is past the end */
    if (low == high)
        return (choice){0, CAIRN_NONE, false};
    choice made = {0, flat_peak(model, low), false};
    if (!fits(made.least_bytes, budget_bytes))
        return made;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (fits(flat_peak(model, middle), budget_bytes))
            low = middle;
        else
            high = middle;
    }
    made.c = low;
    return made;
}

/* The c that is tried after c, whatever the budget: the last one always is. */
static int32_t next_c(int32_t n, int32_t c)
{
    int32_t last = last_c(n), step = n <= ALL_MAX ? 1 : 1 + c / 16;
    return c < last && step > last - c ? last : c + step;
}

static choice choose_walking(walk *w, const crn_task *task, int64_t budget_bytes)
{
    int32_t n = w->model.n;
    choice made = {0, CAIRN_NONE, false};
    for (int32_t c = first_c(n); c <= last_c(n) && !made.stopped; c = next_c(n, c)) {
        int64_t peak = walk_peak(w, c);
        if (fits(peak, budget_bytes))
            made.c = c;
        if (made.least_bytes == CAIRN_NONE || peak < made.least_bytes)
            made.least_bytes = peak;
        made.stopped = c < last_c(n) && crn_should_stop(task, NULL);
    }
    return made;
}

/* Looks between what was found and what is tried after it; more budget never finds less. */
static void refine(walk *w, int64_t budget_bytes, choice *made)
{
    int32_t high = next_c(w->model.n, made->c);
    while (high - made->c > 1) {
        int32_t middle = made->c + (high - made->c) / 2;
        if (fits(walk_peak(w, middle), budget_bytes))
            made->c = middle;
        else
            high = middle;
    }
}

static choice choose(walk *w, const crn_task *task, int64_t budget_bytes)
{
    if (is_flat(&w->model))
        return choose_flat(&w->model, budget_bytes);
    choice made = choose_walking(w, task, budget_bytes);
    if (made.c > 0 && !made.stopped)
        refine(w, budget_bytes, &made);
    return made;
}

/* ---- the solver ---- */

/* The first field in which two stages with one option differ; NULL where they are alike. */
static const char *difference(const cairn_stage *a, const cairn_stage *b)
{
    const cairn_stage_option *x = &a->options[0], *y = &b->options[0];
    const struct {
        const char *name;
        int64_t of_a, of_b;
    } fields[] = {
        {"output_bytes", a->output_bytes, b->output_bytes},
        {"saved_bytes", x->saved_bytes, y->saved_bytes},
        {"forward_ns", x->forward_ns, y->forward_ns},
        {"backward_ns", x->backward_ns, y->backward_ns},
        {"grad_bytes", a->grad_bytes, b->grad_bytes},
        {"weight_grad_bytes", a->weight_grad_bytes, b->weight_grad_bytes},
        {"forward_only_ns", a->forward_only_ns, b->forward_only_ns},
        {"forward_workspace_bytes", x->forward_workspace_bytes, y->forward_workspace_bytes},
        {"backward_workspace_bytes", x->backward_workspace_bytes, y->backward_workspace_bytes},
        {"forward_only_workspace_bytes", a->forward_only_workspace_bytes, b->forward_only_workspace_bytes},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].of_a != fields[i].of_b)
            return fields[i].name;
    return NULL;
}

static cairn_status revolve_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    for (int32_t l = 1; l <= chain->stage_count; l++) {
        const cairn_stage *stage = &chain->stages[l - 1];
        if (stage->option_count > 1)
            return crn_fail_at(error, CAIRN_UNSUPPORTED, l, NULL,
                               "revolve takes stages with one option; stage %d has %d", l, stage->option_count);
        const char *field = difference(stage, &chain->stages[0]);
        if (field)
            return crn_fail_at(error, CAIRN_UNSUPPORTED, l, NULL,
                               "revolve takes stages that are all alike; stage %d differs from stage 1 in %s "
                               "(revolve-hetero takes such chains)",
                               l, field);
        if (stage->no_recompute && l < chain->stage_count)
            return crn_fail_at(error, CAIRN_UNSUPPORTED, l, NULL,
                               "revolve runs all stages but the last twice, and stage %d must not be", l);
    }
    return CAIRN_OK;
}

static int64_t revolve_work(const crn_task *task)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t n = chain->stage_count;
    return chain->stages[0].weight_grad_bytes == 0 ? 100 * n : 32 * n * (n <= ALL_MAX ? n : 256);
}

static cairn_status stopped(cairn_error *error)
{
    return crn_fail(error, CAIRN_CANCELLED, "stopped while trying numbers of outputs to keep");
}

static cairn_status revolve_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    walk w;
    (void)session;
    cairn_status status = walk_begin(&w, task, error);
    if (status == CAIRN_OK) {
        choice made = choose(&w, task, CAIRN_NONE);
        least->bytes = made.least_bytes;
        status = made.stopped ? stopped(error) : CAIRN_OK;
    }
    walk_end(&w);
    return status;
}

static cairn_status revolve_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                  cairn_error *error)
{
    walk w;
    (void)session;
    cairn_status status = walk_begin(&w, task, error);
    if (status == CAIRN_OK) {
        choice made = choose(&w, task, budget_bytes);
        answer->found = made.c > 0;
        answer->stopped_early = made.stopped && answer->found;
        if (answer->found)
            status = emit(&w, made.c, answer->builder, error);
        else if (made.stopped)
            status = stopped(error);
    }
    walk_end(&w);
    return status;
}

const crn_solver crn_revolve_solver = {
    .info = {.name = "revolve",
             .takes_chains = true,
             .available = true,
             .optimal_in = "",
             .summary = "binomial checkpointing of stages that are all alike; only outputs are kept",
             .source = "Griewank, Walther 2000, algorithm 799",
             .cost = "that of writing the schedule; with weight gradients O(n) for each number of outputs tried"},
    .rank = 10,
    .accepts = revolve_accepts,
    .work = revolve_work,
    .least = revolve_least,
    .solve = revolve_solve,
};
