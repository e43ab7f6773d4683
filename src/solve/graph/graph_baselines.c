/*
 * The published heuristics for graphs, as Checkmate's table 1 lists them, brought to any training graph:
 *
 *   linear-sqrt, linear-greedy   Chen et al. 2016: keep every sqrt(n)-th forward value, or one whenever the values since
 *                                the last one exceed b bytes, for the best b; candidates are all forward values
 *   ap-sqrt, ap-greedy           the same, candidates are the articulation points of the forward graph, those whose
 *                                removal disconnects it
 *   griewank-log                 Griewank & Walther 2000: binomial checkpoints among the articulation points, for the
 *                                best number of slots; what lies between is recomputed on every sweep
 *
 * Model     A rule says which forward values stay. The others go after their last forward reader. When the backward
 *           needs one that is gone, it and what it lacks are recomputed, as little as possible. From then on they
 *           stay until their last reader. Outputs and what must not run twice always stay.
 * Backward  It begins at backward_begins_at, else the node at which storing everything peaks.
 * Cost      O(T + E) for one set of kept values; the greedy ones try up to BOUNDS_MAX bounds, griewank-log up to
 *           SLOTS_MAX slots in O(T log T + E) each. Memory O(T + E).
 * Optimal   In nothing; baselines. Each returns its fastest schedule within the budget.
 */
#include <math.h>
#include <string.h>

#include "solve/graph/graph_binomial.h"

enum { BOUNDS_MAX = 64, SLOTS_MAX = CRN_BINOMIAL_SLOTS_MAX };

typedef enum baseline_rule { RULE_SQRT, RULE_GREEDY, RULE_LOG } baseline_rule;

typedef struct baseline {
    crn_graph_model *model;
    crn_arena arena;
    baseline_rule rule;
    int32_t *candidates, candidate_count; /* storages of forward roots that may be kept, ascending */
    bool *kept;                           /* of a storage */
    crn_replan replan;
    crn_binomial binomial;
    crn_sequence best, smallest;
    crn_sequence_eval eval;
    int64_t best_cost, smallest_peak_bytes, budget_bytes;
    const crn_task *task; /* of the call under way */
    bool is_complete;     /* all that the rule has was tried, whatever the budget, so the smallest is known */
} baseline;

/* ---- a sequence from what is kept ---- */

static void judge(baseline *b)
{
    crn_sequence_judge(&b->eval, &b->replan.sequence);
    if (b->eval.peak < b->smallest_peak_bytes) {
        b->smallest_peak_bytes = b->eval.peak;
        crn_sequence_copy(&b->smallest, &b->replan.sequence);
    }
    if (b->eval.peak <= b->budget_bytes && b->eval.cost < b->best_cost) {
        b->best_cost = b->eval.cost;
        crn_sequence_copy(&b->best, &b->replan.sequence);
    }
}

static void try_kept(baseline *b)
{
    if (crn_replan_make(&b->replan, b->kept))
        judge(b);
}

static void keep_none(baseline *b)
{
    memset(b->kept, 0, (size_t)b->model->node_count * sizeof(*b->kept));
}

/* ---- sqrt and greedy ---- */

static void try_sqrt(baseline *b)
{
    int32_t step = (int32_t)ceil(sqrt((double)b->candidate_count));
    keep_none(b);
    for (int32_t i = step; i < b->candidate_count; i += step)
        b->kept[b->candidates[i - 1]] = true;
    try_kept(b);
}

static void try_greedy(baseline *b, int64_t bound_bytes)
{
    int64_t since = 0;
    keep_none(b);
    for (int32_t i = 0; i < b->candidate_count; i++) {
        since += b->model->bytes[b->candidates[i]];
        if (since > bound_bytes) {
            b->kept[b->candidates[i]] = true;
            since = 0;
        }
    }
    try_kept(b);
}

static void try_all_bounds(baseline *b)
{
    int64_t total = 0;
    for (int32_t i = 0; i < b->candidate_count; i++)
        total += b->model->bytes[b->candidates[i]];
    for (int32_t i = 1; i <= BOUNDS_MAX && !crn_should_stop(b->task, NULL); i++)
        try_greedy(b, (int64_t)((crn_wide)total * (crn_wide)i / BOUNDS_MAX));
}

/* ---- all of a rule ---- */

static void try_all(baseline *b)
{
    switch (b->rule) {
    case RULE_SQRT:
        try_sqrt(b);
        return;
    case RULE_GREEDY:
        try_all_bounds(b);
        return;
    case RULE_LOG:
        for (int32_t slots = 1; slots <= SLOTS_MAX && !crn_should_stop(b->task, NULL); slots++)
            if (crn_binomial_make(&b->binomial, b->task, slots))
                judge(b);
        return;
    }
}

/* The fastest schedule within a budget, into best, and the smallest of all. */
static void try_rule(const crn_task *task, baseline *b, int64_t budget_bytes)
{
    b->task = task;
    b->budget_bytes = budget_bytes;
    b->best_cost = INT64_MAX;
    try_all(b);
    b->is_complete |= !crn_should_stop(task, NULL);
}

/* ---- candidates ---- */

/*
 * Articulation points of the forward graph by Tarjan's lowpoints (1972), iteratively, over storages and undirected
 * edges. The neighbours of a storage are what its root reads, and the storages of the nodes that read it.
 */
typedef struct tarjan {
    const crn_graph_model *model;
    int32_t backward_begin, clock;
    int32_t *found, *low, *parent, *stack, *step;
    bool *cuts;
} tarjan;

/* The step-th neighbour of storage s, -1 past the end. */
static int32_t neighbour(const tarjan *t, int32_t s, int32_t step)
{
    const crn_graph_model *model = t->model;
    int32_t reads = model->dep_begin[s + 1] - model->dep_begin[s];
    if (step < reads)
        return model->root[model->dep[model->dep_begin[s] + step]];
    int32_t use = model->use_begin[s] + step - reads;
    if (use >= model->use_begin[s + 1] || model->use[use] >= t->backward_begin)
        return -1;
    return model->root[model->use[use]];
}

static void tarjan_from(tarjan *t, int32_t start)
{
    int32_t depth = 0, children = 0;
    t->stack[depth++] = start;
    t->found[start] = t->low[start] = ++t->clock;
    while (depth > 0) {
        int32_t s = t->stack[depth - 1], other = neighbour(t, s, t->step[s]++);
        if (other < 0) {
            int32_t above = --depth > 0 ? t->stack[depth - 1] : -1;
            if (above >= 0)
                t->low[above] = (int32_t)crn_min(t->low[above], t->low[s]);
            if (above == start)
                children++;
            else if (above >= 0 && t->low[s] >= t->found[above])
                t->cuts[above] = true;
        } else if (t->found[other] == 0) {
            t->parent[other] = s;
            t->found[other] = t->low[other] = ++t->clock;
            t->stack[depth++] = other;
        } else if (other != t->parent[s]) {
            t->low[s] = (int32_t)crn_min(t->low[s], t->found[other]);
        }
    }
    t->cuts[start] = children > 1;
}

static bool list_articulation_points(baseline *b)
{
    size_t n = (size_t)b->model->node_count;
    tarjan t = {.model = b->model, .backward_begin = b->replan.backward_begin};
    int32_t *table = crn_arena_alloc_zero(&b->arena, n, 5 * sizeof(*table));
    t.cuts = crn_arena_alloc_zero(&b->arena, n, sizeof(*t.cuts));
    if (!table || !t.cuts)
        return false;
    t.found = table;
    t.low = table + n;
    t.parent = table + 2 * n;
    t.stack = table + 3 * n;
    t.step = table + 4 * n;
    for (int32_t s = 0; s < b->replan.backward_begin; s++) {
        if (b->model->root[s] != s)
            continue;
        t.parent[s] = t.found[s] == 0 ? -1 : t.parent[s];
        if (t.found[s] == 0)
            tarjan_from(&t, s);
    }
    for (int32_t s = 0; s < b->replan.backward_begin; s++)
        if (t.cuts[s])
            b->candidates[b->candidate_count++] = s;
    return true;
}

static void list_forward_values(baseline *b)
{
    for (int32_t s = 0; s < b->replan.backward_begin; s++)
        if (b->model->root[s] == s)
            b->candidates[b->candidate_count++] = s;
}

/* ---- sessions ---- */

static void baseline_close(const crn_task *task, void *session)
{
    baseline *b = session;
    (void)task;
    crn_binomial_clear(&b->binomial);
    crn_graph_model_free(b->model);
    crn_arena_clear(&b->arena);
}

static cairn_status baseline_fill(const crn_task *task, baseline *b, bool articulation, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &b->model, error));
    size_t n = (size_t)b->model->node_count;
    int32_t times = b->rule == RULE_LOG ? CRN_BINOMIAL_TIMES : CRN_REPLAN_TIMES;
    int32_t capacity = crn_sequence_capacity(b->model->node_count, times);
    CRN_TRY(crn_sequence_eval_new(b->model, &b->arena, capacity, &b->eval, error));
    CRN_TRY(crn_replan_new(b->model, &b->arena, capacity, &b->replan, error));
    bool fits = (b->candidates = crn_arena_alloc(&b->arena, n, sizeof(int32_t))) &&
                (b->kept = crn_arena_alloc_zero(&b->arena, n, sizeof(bool))) &&
                crn_sequence_new(&b->arena, capacity, &b->best) && crn_sequence_new(&b->arena, capacity, &b->smallest);
    if (!fits)
        return crn_no_memory(error);
    crn_replan_find_backward(&b->replan, cairn_problem_graph(task->problem), &b->eval);
    if (!articulation)
        list_forward_values(b);
    else if (!list_articulation_points(b))
        return crn_no_memory(error);
    if (b->rule != RULE_LOG)
        return CAIRN_OK;
    return crn_binomial_new(&b->replan, b->candidates, b->candidate_count, &b->arena, &b->binomial, error);
}

static cairn_status baseline_open(const crn_task *task, baseline_rule rule, bool articulation, void **session,
                                  cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    baseline *b = crn_arena_alloc_zero(&arena, 1, sizeof(*b));
    *session = b;
    if (!b)
        return crn_no_memory(error);
    b->arena = arena;
    b->rule = rule;
    b->smallest_peak_bytes = INT64_MAX;
    return baseline_fill(task, b, articulation, error);
}

static cairn_status baseline_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    baseline *b = session;
    CRN_TRY(crn_least_lower(task, &least->lower_bytes, error));
    if (!b->is_complete)
        try_rule(task, b, -1);
    if (b->smallest_peak_bytes < INT64_MAX)
        least->bytes = b->smallest_peak_bytes;
    least->is_exact = least->bytes == least->lower_bytes;
    least->is_rough = !least->is_exact && !b->is_complete;
    return CAIRN_OK;
}

static cairn_status baseline_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                   cairn_error *error)
{
    baseline *b = session;
    try_rule(task, b, crn_limit_of(budget_bytes));
    answer->stopped_early = crn_should_stop(task, NULL);
    if (b->best_cost == INT64_MAX)
        return CAIRN_OK;
    answer->found = true;
    return crn_sequence_emit(&b->eval, &b->best, answer->builder, error);
}

#define BASELINE(symbol, solver_name, rule, articulation, what, whence, how_long)               \
    static cairn_status symbol##_open(const crn_task *task, void **session, cairn_error *error) \
    {                                                                                           \
        return baseline_open(task, rule, articulation, session, error);                         \
    }                                                                                           \
    const crn_solver crn_##symbol##_solver = {                                                  \
        .info = {.name = solver_name,                                                           \
                 .takes_graphs = true,                                                          \
                 .available = true,                                                             \
                 .optimal_in = "",                                                              \
                 .summary = what,                                                               \
                 .source = whence,                                                              \
                 .cost = how_long},                                                             \
        .is_quick = (rule) == RULE_SQRT,                                                        \
        .open = symbol##_open,                                                                  \
        .close = baseline_close,                                                                \
        .least = baseline_least,                                                                \
        .solve = baseline_solve,                                                                \
    }

BASELINE(ap_sqrt, "ap-sqrt", RULE_SQRT, true, "keeps every sqrt(n)-th articulation point of the forward graph",
         "Chen et al. 2016; Jain et al. 2020, table 1", "O(T + E)");
BASELINE(ap_greedy, "ap-greedy", RULE_GREEDY, true, "keeps an articulation point every b bytes, for the best b",
         "Chen et al. 2016; Jain et al. 2020, table 1", "O(T + E) times 64 bounds");
BASELINE(linear_sqrt, "linear-sqrt", RULE_SQRT, false, "keeps every sqrt(n)-th forward value",
         "Chen et al. 2016; Jain et al. 2020, table 1", "O(T + E)");
BASELINE(linear_greedy, "linear-greedy", RULE_GREEDY, false, "keeps a forward value every b bytes, for the best b",
         "Chen et al. 2016; Jain et al. 2020, table 1", "O(T + E) times 64 bounds");
BASELINE(griewank_log, "griewank-log", RULE_LOG, true, "binomial checkpoints among articulation points",
         "Griewank & Walther 2000; Jain et al. 2020, table 1", "O(T log T + E) times 16 slot counts");
