/*
 * periodic, chen-sqrt, chen-greedy, keep-greedy: chains cut into segments.
 *
 * The forward keeps the input of every segment but the last, which is stored; the backward runs each segment once more,
 * storing it, right before its own backward. Who chooses the cuts:
 *
 *   periodic     K segments of equal count, the last takes the rest, as torch.utils.checkpoint.checkpoint_sequential
 *                does; K from --segments, else the best K
 *   chen-sqrt    K = the nearest integer to sqrt(n) (T. Chen, B. Xu, C. Zhang, C. Guestrin 2016, section 3)
 *   chen-greedy  a segment ends where its outputs pass b bytes (same, algorithm 3), for the best b
 *   keep-greedy  segments of 1, 2, 4, ... stages, of which others than the last are stored, too: those that free the
 *                fewest bytes for the time of running them again; the best length and number
 *
 * Optimal      In nothing; baselines. Of the cuts tried, each solver returns the fastest within the budget.
 * Cost         O(n) per set of cuts (cuts.h). All K are tried up to CUTS_ALL stages, beyond that those
 *              of some hundred segment lengths; BOUNDS_MAX values of b; KEPT_MAX numbers for each of log n lengths.
 */
#include <math.h>
#include <stdlib.h>

#include "solve/chain/cuts.h"

enum { CUTS_ALL = 1024, BOUNDS_MAX = 128, KEPT_MAX = 256, KEPT_LEAST = 8 };

typedef enum cut_rule { RULE_PERIODIC, RULE_SQRT, RULE_GREEDY, RULE_KEEP } cut_rule;

/* What running a segment again frees, and what it takes. */
typedef struct exchange {
    int64_t bytes, ns;
    int32_t segment;
} exchange;

typedef struct attempt {
    const crn_task *task;
    const cairn_chain *chain;
    crn_chain_model model;
    crn_cuts cuts;
    exchange *exchanges; /* of the segments but the last; the best ones first */
    int32_t length;      /* stages of a segment, for which they are made */
} attempt;

/* ---- cutting ---- */

static void cut_evenly(attempt *a, int32_t segments)
{
    int32_t n = a->chain->stage_count, length = n / segments;
    for (int32_t i = 0; i < segments; i++)
        a->cuts.ends[i] = i == segments - 1 ? n : (i + 1) * length;
    a->cuts.count = segments;
}

static int64_t output_bytes(const cairn_chain *chain)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < chain->stage_count; i++)
        sum += chain->stages[i].output_bytes;
    return sum;
}

/* The bound is b = share / BOUNDS_MAX of all outputs, compared without rounding: scaling all sizes changes nothing. */
static void cut_by_bytes(attempt *a, int32_t share)
{
    crn_wide bound = (crn_wide)output_bytes(a->chain) * (crn_wide)share;
    int64_t bytes = 0;
    a->cuts.count = 0;
    for (int32_t l = 1; l <= a->chain->stage_count; l++) {
        bytes += a->chain->stages[l - 1].output_bytes;
        if ((crn_wide)bytes * BOUNDS_MAX > bound || l == a->chain->stage_count) {
            a->cuts.ends[a->cuts.count++] = l;
            bytes = 0;
        }
    }
}

/* The number of segments after `segments` to be tried: the next one, or on long chains the next shorter length. */
static int32_t next_count(int32_t n, int32_t segments)
{
    if (n <= CUTS_ALL || segments < CUTS_ALL / 4)
        return segments + 1;
    return segments + segments / 64 + 1;
}

/* The more bytes for its time comes first, of equal ones the earlier. */
static int compare_exchanges(const void *first, const void *second)
{
    const exchange *a = first, *b = second;
    crn_wide left = (crn_wide)a->bytes * (crn_wide)b->ns, right = (crn_wide)b->bytes * (crn_wide)a->ns;
    if (left != right)
        return left > right ? -1 : 1;
    return a->segment < b->segment ? -1 : a->segment > b->segment;
}

/* Sums that would pass 2^63 - 1 stay there: they only say in which order to try. */
static exchange exchange_of(const attempt *a, int32_t segment)
{
    int32_t first = crn_cuts_first(&a->cuts, segment), last = a->cuts.ends[segment];
    exchange sum = {0, 0, segment};
    for (int32_t l = first; l <= last; l++) {
        const cairn_stage_option *option = &a->chain->stages[l - 1].options[0];
        sum.bytes = crn_add_saturating(sum.bytes, option->saved_bytes);
        sum.ns = crn_add_saturating(sum.ns, option->forward_ns);
    }
    sum.bytes = crn_max(0, sum.bytes - a->chain->stages[last - 1].output_bytes);
    if (sum.bytes == 0)
        sum.ns = crn_max(sum.ns, 1); /* no bytes for no time are last, as no bytes for some time are */
    return sum;
}

/* Segments of this length, in the order in which they are run again rather than stored. */
static void cut_by_length(attempt *a, int32_t length)
{
    int32_t n = a->chain->stage_count;
    cut_evenly(a, (n + length - 1) / length);
    for (int32_t i = 0; i < a->cuts.count; i++)
        a->cuts.ends[i] = (int32_t)crn_min((int64_t)(i + 1) * length, n);
    for (int32_t i = 0; i < a->cuts.count - 1; i++)
        a->exchanges[i] = exchange_of(a, i);
    qsort(a->exchanges, (size_t)(a->cuts.count - 1), sizeof(*a->exchanges), compare_exchanges);
    a->length = length;
}

/* So many numbers of segments to run again are tried of one length, which is at least 1. */
static int32_t tries_of(int32_t n, int32_t length)
{
    int32_t others = (n - 1) / (int32_t)crn_max(length, 1), most = n <= CUTS_ALL ? KEPT_MAX : KEPT_MAX * CUTS_ALL / n;
    return (int32_t)crn_max(1, crn_min(others, crn_max(most, KEPT_LEAST)));
}

/* A step is a length, 2^power, and which of its tries; the lengths follow each other. */
static int32_t step_of(int32_t power, int32_t try)
{
    return power * (KEPT_MAX + 1) + try;
}

static bool cut_and_keep(attempt *a, int32_t *step)
{
    int32_t n = a->chain->stage_count, power = *step / (KEPT_MAX + 1), try = *step % (KEPT_MAX + 1) + 1;
    if (try > tries_of(n, 1 << power)) {
        power++;
        try = 1;
    }
    if (power >= 30 || 1 << power >= crn_max(2, n)) /* one stage is a segment, too */
        return false;
    if (a->length != 1 << power)
        cut_by_length(a, 1 << power);
    int64_t others = a->cuts.count - 1, tries = tries_of(n, a->length), again = (others * try + tries - 1) / tries;
    for (int32_t i = 0; i < others; i++)
        a->cuts.kept[a->exchanges[i].segment] = i >= again;
    *step = step_of(power, try);
    return true;
}

/* Makes the step-th set of cuts of a rule; false past the last one. */
static bool cut(attempt *a, cut_rule rule, int32_t *step)
{
    const crn_settings *settings = a->task->settings;
    int32_t n = a->chain->stage_count;
    switch (rule) {
    case RULE_PERIODIC:
        if (settings->segments != CAIRN_NONE) {
            cut_evenly(a, (int32_t)settings->segments);
            return (*step)++ == 0;
        }
        *step = *step == 0 ? 1 : next_count(n, *step);
        if (*step <= n)
            cut_evenly(a, *step);
        return *step <= n;
    case RULE_SQRT:
        cut_evenly(a, (int32_t)floor(sqrt((double)n) + 0.5));
        return (*step)++ == 0;
    case RULE_GREEDY:
        if (++*step > BOUNDS_MAX)
            return false;
        cut_by_bytes(a, *step - 1);
        return true;
    case RULE_KEEP:
        return cut_and_keep(a, step);
    }
    return false;
}

static void attempt_end(attempt *a)
{
    crn_chain_model_clear(&a->model);
}

static cairn_status attempt_begin(const crn_task *task, attempt *a, cairn_error *error)
{
    *a = (attempt){.task = task, .chain = cairn_problem_chain(task->problem)};
    size_t count = (size_t)a->chain->stage_count;
    CRN_TRY(crn_chain_model_init(&a->model, task, error));
    a->cuts.model = &a->model;
    a->cuts.ends = crn_arena_alloc(&a->model.arena, count, sizeof(*a->cuts.ends));
    a->cuts.kept = crn_arena_alloc_zero(&a->model.arena, count, sizeof(*a->cuts.kept));
    a->exchanges = crn_arena_alloc(&a->model.arena, count, sizeof(*a->exchanges));
    return a->cuts.ends && a->cuts.kept && a->exchanges ? CAIRN_OK : crn_no_memory(error);
}

/* What all cuts, or those before it was stopped, came to. */
typedef struct outcome {
    int32_t step;       /* of the fastest within the budget; 0 = none */
    int64_t fastest_ns; /* its time; INT64_MAX = none */
    int64_t peak_bytes; /* the least of any; INT64_MAX = none */
    bool stopped_early;
} outcome;

/* Judges the cuts of a step: whether they fit, and their time. Of equally fast ones the first step counts. */
static bool try_step(attempt *a, int32_t step, int64_t budget_bytes, outcome *found, int64_t *makespan_ns)
{
    int64_t peak_bytes;
    crn_cuts_judge(&a->cuts, &peak_bytes, makespan_ns);
    bool fits = budget_bytes == CAIRN_NONE || peak_bytes <= budget_bytes;
    bool is_first = *makespan_ns == found->fastest_ns && step < found->step;
    found->peak_bytes = crn_min(found->peak_bytes, peak_bytes);
    if (fits && (*makespan_ns < found->fastest_ns || is_first)) {
        found->fastest_ns = *makespan_ns;
        found->step = step;
    }
    found->stopped_early = crn_should_stop(a->task, NULL);
    return fits;
}

static void try_all(attempt *a, cut_rule rule, int64_t budget_bytes, outcome *found)
{
    int64_t makespan_ns;
    *found = (outcome){.peak_bytes = INT64_MAX, .fastest_ns = INT64_MAX};
    for (int32_t step = 0; !found->stopped_early && cut(a, rule, &step);)
        try_step(a, step, budget_bytes, found, &makespan_ns);
}

/* Of each length, by bisection, the fewest segments run again that fit, as if those with more fitted, too. */
static void bisect_lengths(attempt *a, int64_t budget_bytes, outcome *found)
{
    int32_t n = a->chain->stage_count;
    int64_t makespan_ns;
    for (int32_t power = 0; power < 30 && 1 << power < crn_max(2, n); power++) {
        int32_t low = 0, high = tries_of(n, 1 << power) + 1;
        while (high - low > 1 && !found->stopped_early) {
            int32_t middle = low + (high - low) / 2, step = step_of(power, middle - 1);
            cut_and_keep(a, &step);
            *(try_step(a, step, budget_bytes, found, &makespan_ns) ? &high : &low) = middle;
        }
    }
}

/*
 * The best of all lengths and numbers. Those of a length get slower one by one, so that of each only those before the
 * first that fits matter, and before the first that is slower than the fastest; bisection finds that soon.
 */
static void try_lengths(attempt *a, int64_t budget_bytes, outcome *found)
{
    *found = (outcome){.peak_bytes = INT64_MAX, .fastest_ns = INT64_MAX};
    bisect_lengths(a, budget_bytes, found);
    int32_t n = a->chain->stage_count;
    int64_t makespan_ns;
    for (int32_t power = 0; power < 30 && 1 << power < crn_max(2, n); power++) {
        bool matters = true;
        for (int32_t try = 1; try <= tries_of(n, 1 << power) && matters && !found->stopped_early; try++) {
            int32_t step = step_of(power, try - 1);
            cut_and_keep(a, &step);
            bool fits = try_step(a, step, budget_bytes, found, &makespan_ns);
            matters = !fits && makespan_ns <= found->fastest_ns;
        }
    }
}

/* ---- the solvers ---- */

static cairn_status least_of(const crn_task *task, cut_rule rule, crn_least *least, cairn_error *error)
{
    attempt a;
    outcome found;
    cairn_status status = attempt_begin(task, &a, error);
    if (status == CAIRN_OK) {
        try_all(&a, rule, CAIRN_NONE, &found);
        if (found.stopped_early)
            status = crn_fail(error, CAIRN_CANCELLED, "stopped");
        least->bytes = status != CAIRN_OK || found.peak_bytes == INT64_MAX ? CAIRN_NONE : found.peak_bytes;
    }
    attempt_end(&a);
    return status;
}

/* The schedule of the fastest step. */
static cairn_status emit(attempt *a, cut_rule rule, const outcome *found, crn_answer *answer, cairn_error *error)
{
    int32_t step = rule == RULE_KEEP && found->step > 0 ? found->step - 1 : 0;
    while (found->step > 0 && cut(a, rule, &step))
        if (step == found->step) {
            CRN_TRY(crn_cuts_emit(&a->cuts, answer->builder, error));
            answer->found = true;
            break;
        }
    return CAIRN_OK;
}

static cairn_status solve_by(const crn_task *task, cut_rule rule, int64_t budget_bytes, crn_answer *answer,
                             cairn_error *error)
{
    attempt a;
    outcome found;
    cairn_status status = attempt_begin(task, &a, error);
    if (status == CAIRN_OK) {
        if (rule == RULE_KEEP)
            try_lengths(&a, budget_bytes, &found);
        else
            try_all(&a, rule, budget_bytes, &found);
        answer->stopped_early = found.stopped_early;
        status = emit(&a, rule, &found, answer, error);
    }
    attempt_end(&a);
    return status;
}

static cairn_status periodic_accepts(const crn_task *task, cairn_error *error)
{
    int32_t n = cairn_problem_chain(task->problem)->stage_count;
    if (task->settings->segments <= n)
        return CAIRN_OK;
    return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "segments",
                       "%lld segments of a chain of %d stages; option segments goes from 1 to %d",
                       (long long)task->settings->segments, n, n);
}

#define SEGMENT_SOLVER(symbol, solver_name, rule, refuses, own_options, what, whence)                                 \
    static cairn_status symbol##_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)     \
    {                                                                                                                 \
        (void)session;                                                                                                \
        return least_of(task, rule, least, error);                                                                    \
    }                                                                                                                 \
    static cairn_status symbol##_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer, \
                                       cairn_error *error)                                                            \
    {                                                                                                                 \
        (void)session;                                                                                                \
        return solve_by(task, rule, budget_bytes, answer, error);                                                     \
    }                                                                                                                 \
    const crn_solver crn_##symbol##_solver = {                                                                        \
        .info = {.name = solver_name,                                                                                 \
                 .takes_chains = true,                                                                                \
                 .available = true,                                                                                   \
                 .optimal_in = "",                                                                                    \
                 .summary = what,                                                                                     \
                 .source = whence,                                                                                    \
                 .cost = "O(n) for each set of cuts that is tried"},                                                  \
        .options = own_options,                                                                                       \
        .is_quick = (rule) == RULE_SQRT,                                                                              \
        .accepts = refuses,                                                                                           \
        .least = symbol##_least,                                                                                      \
        .solve = symbol##_solve,                                                                                      \
    }

SEGMENT_SOLVER(periodic, "periodic", RULE_PERIODIC, periodic_accepts, "segments",
               "segments of equal count, the last one stored", "torch.utils.checkpoint.checkpoint_sequential");
SEGMENT_SOLVER(chen_sqrt, "chen-sqrt", RULE_SQRT, NULL, NULL, "sqrt(n) segments of equal count",
               "Chen et al. 2016, section 3");
SEGMENT_SOLVER(chen_greedy, "chen-greedy", RULE_GREEDY, NULL, NULL, "segments of b bytes of outputs, for the best b",
               "Chen et al. 2016, algorithm 3");
SEGMENT_SOLVER(keep_greedy, "keep-greedy", RULE_KEEP, NULL, NULL,
               "segments of equal count; those that free most for their time run again, the others are stored",
               "Cairn");
