/*
 * chain-alike: deep chains of blocks that are equal but for their measured times.
 *
 * Problem. chain-exact shares tables between sub-chains that are alike, so that a chain of a thousand equal blocks costs
 * seconds. But times are measured: the same block, twice in a network, has the same sizes and not quite the same times,
 * nothing is shared, and chain-exact is out of reach.
 *
 * Method. Stages with the same sizes, the same number of options, and times that differ by at most a quarter are of one
 * kind. chain-exact solves the chain in which every stage has the median times of its kind. Sizes are as they were, so
 * its schedule is one of the original chain, with the same peak, and its least memory is that of all persistent schedules.
 * Only the time that it minimizes is not quite the true one: of two schedules it may prefer the slower, by no more than
 * what their recomputations differ by between measured and median times. The simulator counts with the measured ones.
 *
 * Medians, not means, so that nothing is rounded: with all times multiplied by a number the answer stays the same.
 *
 * Cost: finding kinds O(n K), medians O(n log n) for each option; then chain-exact's, n^2 sub-chains if kinds repeat.
 */
#include <stdlib.h>

#include "problem/problem.h"
#include "solve/chain/chain_exact.h"

/* Chains with more kinds, or so many stages, are not repetitions of a few blocks that chain-exact could do. */
enum { KINDS_MAX = 64, STAGES_MAX = 1 << 15 };

/* The chain of typical stages, under construction. */
typedef struct typical {
    crn_arena arena;
    cairn_chain chain;
    cairn_stage *stages;
    int32_t *kind;            /* of a stage */
    int32_t first[KINDS_MAX]; /* of a kind: its first stage */
    int32_t kinds;
    bool merges; /* some stages of a kind differ */
    int64_t *times;
} typical;

typedef struct session {
    cairn_problem *problem; /* the chain of typical stages */
    void *exact;
} session;

/* ---- kinds ---- */

/* |a - b| <= b / 4, without rounding. */
static bool are_near(int64_t a, int64_t b)
{
    uint64_t difference = a > b ? (uint64_t)(a - b) : (uint64_t)(b - a);
    return (crn_wide)difference * 4 <= (crn_wide)(uint64_t)b;
}

static bool options_alike(const cairn_stage_option *a, const cairn_stage_option *b)
{
    return a->saved_bytes == b->saved_bytes && a->forward_workspace_bytes == b->forward_workspace_bytes &&
           a->backward_workspace_bytes == b->backward_workspace_bytes && are_near(a->forward_ns, b->forward_ns) &&
           are_near(a->backward_ns, b->backward_ns);
}

static bool stages_alike(const cairn_stage *a, const cairn_stage *b)
{
    bool alike = a->output_bytes == b->output_bytes && a->grad_bytes == b->grad_bytes &&
                 a->weight_grad_bytes == b->weight_grad_bytes &&
                 a->forward_only_workspace_bytes == b->forward_only_workspace_bytes &&
                 a->no_recompute == b->no_recompute && a->option_count == b->option_count &&
                 are_near(a->forward_only_ns, b->forward_only_ns);
    for (int32_t k = 0; alike && k < a->option_count; k++)
        alike = options_alike(&a->options[k], &b->options[k]);
    return alike;
}

/* Numbers the kinds; false when there are too many. */
static bool find_kinds(typical *t, const cairn_chain *chain)
{
    for (int32_t i = 0; i < chain->stage_count; i++) {
        int32_t kind = 0;
        while (kind < t->kinds && !stages_alike(&chain->stages[i], &chain->stages[t->first[kind]]))
            kind++;
        if (kind == KINDS_MAX)
            return false;
        if (kind == t->kinds)
            t->first[t->kinds++] = i;
        t->kind[i] = kind;
    }
    return true;
}

/* ---- typical times ---- */

enum { FIELD_FORWARD_ONLY, FIELD_OPTIONS }; /* then forward and backward of each option */

static int64_t time_of(const cairn_stage *stage, int32_t field)
{
    if (field == FIELD_FORWARD_ONLY)
        return stage->forward_only_ns;
    const cairn_stage_option *option = &stage->options[(field - FIELD_OPTIONS) / 2];
    return (field - FIELD_OPTIONS) % 2 == 0 ? option->forward_ns : option->backward_ns;
}

static void set_time(cairn_stage *stage, cairn_stage_option *options, int32_t field, int64_t ns)
{
    if (field == FIELD_FORWARD_ONLY)
        stage->forward_only_ns = ns;
    else if ((field - FIELD_OPTIONS) % 2 == 0)
        options[(field - FIELD_OPTIONS) / 2].forward_ns = ns;
    else
        options[(field - FIELD_OPTIONS) / 2].backward_ns = ns;
}

static int compare_times(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The median of a time over the stages of a kind; of an even number, the lower one. */
static int64_t median(typical *t, const cairn_chain *chain, int32_t kind, int32_t field)
{
    int32_t count = 0;
    for (int32_t i = t->first[kind]; i < chain->stage_count; i++)
        if (t->kind[i] == kind)
            t->times[count++] = time_of(&chain->stages[i], field);
    qsort(t->times, (size_t)count, sizeof(*t->times), compare_times);
    t->merges = t->merges || t->times[0] != t->times[count - 1];
    return t->times[(count - 1) / 2];
}

/* The stage that stands for all of a kind. */
static bool make_stage(typical *t, const cairn_chain *chain, int32_t kind, cairn_stage *stage)
{
    *stage = chain->stages[t->first[kind]];
    cairn_stage_option *options = crn_arena_alloc(&t->arena, (size_t)stage->option_count, sizeof(*options));
    if (!options)
        return false;
    for (int32_t k = 0; k < stage->option_count; k++)
        options[k] = stage->options[k];
    for (int32_t field = 0; field < FIELD_OPTIONS + 2 * stage->option_count; field++)
        set_time(stage, options, field, median(t, chain, kind, field));
    stage->options = options;
    return true;
}

static bool make_stages(typical *t, const cairn_chain *chain)
{
    cairn_stage of_kind[KINDS_MAX];
    for (int32_t kind = 0; kind < t->kinds; kind++)
        if (!make_stage(t, chain, kind, &of_kind[kind]))
            return false;
    for (int32_t i = 0; i < chain->stage_count; i++)
        t->stages[i] = of_kind[t->kind[i]];
    t->chain = *chain;
    t->chain.stages = t->stages;
    return true;
}

static cairn_status make_chain(typical *t, const cairn_chain *chain, cairn_error *error)
{
    size_t count = (size_t)chain->stage_count;
    t->stages = crn_arena_alloc(&t->arena, count, sizeof(*t->stages));
    t->kind = crn_arena_alloc(&t->arena, count, sizeof(*t->kind));
    t->times = crn_arena_alloc(&t->arena, count, sizeof(*t->times));
    if (!t->stages || !t->kind || !t->times)
        return crn_no_memory(error);
    if (!find_kinds(t, chain))
        return crn_fail(error, CAIRN_UNSUPPORTED, "chain-alike: the stages are of more than %d kinds", KINDS_MAX);
    if (!make_stages(t, chain))
        return crn_no_memory(error);
    if (!t->merges)
        return crn_fail(error, CAIRN_UNSUPPORTED,
                        "chain-alike: no two stages differ in nothing but their times; chain-exact does the same");
    return CAIRN_OK;
}

/* The problem with typical stages. To be freed. */
static cairn_status make_problem(const crn_task *task, cairn_problem **problem, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    typical t = {.kinds = 0};
    *problem = NULL;
    if (chain->stage_count > STAGES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "chain-alike: more than %d stages", STAGES_MAX);
    crn_arena_init(&t.arena, crn_allocator(task->env));
    cairn_status status = make_chain(&t, chain, error);
    if (status == CAIRN_OK)
        status = cairn_problem_new_chain(task->env, &t.chain, cairn_problem_info_of(task->problem), problem, error);
    crn_arena_clear(&t.arena);
    if (status != CAIRN_OVERFLOW)
        return status;
    return crn_fail(error, CAIRN_UNSUPPORTED, "chain-alike: the sum of typical times passes 2^63 - 1");
}

static cairn_status chain_alike_accepts(const crn_task *task, cairn_error *error)
{
    cairn_problem *problem;
    cairn_status status = make_problem(task, &problem, error);
    cairn_problem_free(problem);
    return status;
}

/* ---- a session ---- */

/* The caller's task, but of the chain of typical stages. */
static crn_task task_of(const session *p, const crn_task *task)
{
    crn_task inner = *task;
    inner.problem = p->problem;
    inner.bounds = NULL;
    return inner;
}

static void chain_alike_close(const crn_task *task, void *state)
{
    session *p = state;
    cairn_allocator allocator = crn_allocator(task->env);
    const crn_task inner = task_of(p, task);
    crn_solver_close(&crn_chain_exact_solver, &inner, p->exact);
    cairn_problem_free(p->problem);
    crn_free(&allocator, p, 1, sizeof(*p));
}

static cairn_status prepare(session *p, const crn_task *task, cairn_error *error)
{
    CRN_TRY(make_problem(task, &p->problem, error));
    const crn_task inner = task_of(p, task);
    return crn_solver_open(&crn_chain_exact_solver, &inner, &p->exact, error);
}

static cairn_status chain_alike_open(const crn_task *task, void **state, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    session *p = crn_alloc_zero(&allocator, 1, sizeof(*p));
    *state = p;
    if (!p)
        return crn_no_memory(error);
    return prepare(p, task, error);
}

static cairn_status chain_alike_least(const crn_task *task, void *state, crn_least *least, cairn_error *error)
{
    session *p = state;
    const crn_task inner = task_of(p, task);
    return crn_chain_exact_solver.least(&inner, p->exact, least, error);
}

static cairn_status chain_alike_solve(const crn_task *task, void *state, int64_t budget_bytes, crn_answer *answer,
                                      cairn_error *error)
{
    session *p = state;
    const crn_task inner = task_of(p, task);
    cairn_status status = crn_chain_exact_solver.solve(&inner, p->exact, budget_bytes, answer, error);
    answer->optimal_in_class = false; /* for typical times only */
    return status;
}

/* ---- estimates ---- */

/* What chain-exact says of the chain with typical stages; otherwise where that cannot be made. */
static int64_t estimate(const crn_task *task, int64_t (*of)(const crn_task *task), int64_t otherwise)
{
    crn_task inner = *task;
    cairn_problem *problem;
    if (make_problem(task, &problem, NULL) != CAIRN_OK)
        return otherwise;
    inner.problem = problem;
    int64_t found = of(&inner);
    cairn_problem_free(problem);
    return found;
}

static int64_t chain_alike_memory(const crn_task *task)
{
    int64_t own = crn_mul_saturating(cairn_problem_chain(task->problem)->stage_count, 512);
    return crn_add_saturating(own, estimate(task, crn_chain_exact_solver.memory, 0));
}

static int64_t chain_alike_work(const crn_task *task)
{
    return estimate(task, crn_chain_exact_solver.work, INT64_MAX);
}

const crn_solver crn_chain_alike_solver = {
    .info = {.name = "chain-alike",
             .takes_chains = true,
             .available = true,
             .optimal_in = "",
             .summary = "chain-exact with typical times for blocks that differ in nothing but measured times",
             .source = "Cairn",
             .cost = "chain-exact's, with stages counted as alike that differ in their times alone"},
    .rank = 10,
    .accepts = chain_alike_accepts,
    .memory = chain_alike_memory,
    .work = chain_alike_work,
    .open = chain_alike_open,
    .close = chain_alike_close,
    .least = chain_alike_least,
    .solve = chain_alike_solve,
};
