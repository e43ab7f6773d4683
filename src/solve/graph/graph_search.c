/*
 * graph-search: schedules of any training graph under a byte budget, near-optimal in seconds.
 *
 * Problem   Nodes in a fixed order of first computation; each may be recomputed. Least total time within the budget.
 * Space     A schedule is a sequence of computations; where drops stand follows (graph_sequence.h). Every sequence is
 *           valid but for its peak, and is judged in one pass.
 * Start     Walks with future-aware eviction under fifteen rules (graph_walk.h).
 * Search    From the best distinct walks, islands of ruin, repair and fill (graph_improve.h), each with its own random
 *           numbers, run in parallel; they do not exchange anything, so results do not depend on the number of threads.
 * Stop      When the work limit is reached, the clock says so, or the best answer meets the lower bound (graph_bound.h).
 * Cost      A walk O((T + recomputations) * residents), a round O(events + reads) times a dozen. Memory O(T + E).
 * Machine   Transfers are left to other solvers: with a machine the answers are the same, the bound is weaker.
 * Optimal   Not by construction; the bound says how near. On the traced graphs in tests/data it is within 0.1 % of it.
 *
 * Not searched: schedules that keep one alias while its storage is recomputed, and those that compute a storage with an
 * output more than once. Sources: Belady (1966), Kirisame et al. (DTR, 2021) for the eviction rule; Shaw (1998)
 * for ruin and repair; Jain et al. (Checkmate, 2020) for the problem.
 */
#include "solve/graph/graph_descent.h"
#include "solve/graph/graph_improve.h"
#include "solve/graph/graph_online.h"
#include "solve/graph/graph_sweep.h"
#include "solve/graph/graph_tiny.h"

enum { RULES = 15, ISLANDS = 4, BISECTIONS = 40, CHUNK_EVENTS = 400000 };
/* Computations of a node that sweeps have room for: the more, the less memory they need. */
enum { SWEEP_TIMES = 24 };
enum { FIRST_TRIES = 256, TRIES = 48, WEIGHT_POWER_MAX = 4, LEAST_PARTS = 8, LARGE_NODES = 10000 };

_Static_assert((int)RULES <= (int)CRN_DESCENT_RULES_MAX, "a descent follows every rule");

/*
 * The first island stays near its best; the last crosses the ridges that single values make on small graphs. The last two
 * make excursions.
 */
static const crn_improver_leeway leeway[ISLANDS] = {{2000, 200, 0}, {500, 100, 0}, {200, 50, 50}, {100, 25, 50}};

typedef struct search {
    crn_graph_model *model;
    crn_walk *walk;
    crn_improver *island[ISLANDS];
    bool begun[ISLANDS];
    int64_t begun_bytes; /* the budget that the islands work on; -1 = none yet */
    crn_arena arena;
    crn_sequence start[ISLANDS]; /* best distinct walks, the best first */
    int64_t start_cost[ISLANDS];
    crn_sequence_eval eval; /* of sequences as long as a sweep's */
    crn_sequence scratch;
    int32_t walk_capacity;
    crn_sequence smallest; /* the sequence with the least peak that was found, and that peak */
    int64_t smallest_peak_bytes;
    int64_t lower_bytes, failed_bytes; /* no schedule without transfers is below; no walk succeeded here, so far */
    int bisections;
    crn_sweep *sweep;
    bool has_asked_online; /* for its smallest */
    crn_descent descent;
    float *weight; /* of a use */
    uint64_t random;
} search;

static void search_close(const crn_task *task, void *session)
{
    search *s = session;
    (void)task;
    for (int i = 0; i < ISLANDS; i++)
        crn_improver_free(s->island[i]);
    crn_walk_free(s->walk);
    crn_graph_model_free(s->model);
    crn_arena_clear(&s->arena);
}

static const crn_sequence_eval *judge_scratch(search *s)
{
    crn_sequence_judge(&s->eval, &s->scratch);
    return &s->eval;
}

/* The peak of what was walked, which may be below the budget of the walk; remembered where it is the least so far. */
static void offer_smallest(search *s)
{
    const crn_sequence_eval *eval = judge_scratch(s);
    if (eval->peak >= s->smallest_peak_bytes)
        return;
    s->smallest_peak_bytes = eval->peak;
    crn_sequence_copy(&s->smallest, &s->scratch);
}

static bool is_small(const search *s)
{
    return s->model->node_count <= 1000;
}

/* Walks get slow on large graphs: fewer rules are tried there, those that do best on smaller ones first. */
static int rule_count(const search *s)
{
    return s->model->node_count <= 4000 ? RULES : s->model->node_count <= 20000 ? 4 : 2;
}

/* The schedule that any budget from its peak on has. */
static void begin_smallest(search *s)
{
    s->failed_bytes = s->lower_bytes - 1;
    crn_descent_init(&s->descent, s->model->node_count, rule_count(s), s->lower_bytes);
    s->smallest_peak_bytes = INT64_MAX;
    crn_sequence_store_all(s->model, &s->scratch);
    offer_smallest(s);
}

static cairn_status search_fill(const crn_task *task, search *s, cairn_error *error)
{
    CRN_TRY(crn_graph_model_new(task, &s->model, error));
    int32_t capacity = crn_sequence_capacity(s->model->node_count, CRN_WALK_TIMES);
    int32_t long_capacity = crn_sequence_capacity(s->model->node_count, SWEEP_TIMES);
    s->walk_capacity = capacity;
    CRN_TRY(crn_sequence_eval_new(s->model, &s->arena, long_capacity, &s->eval, error));
    CRN_TRY(crn_walk_new(s->model, &s->walk, error));
    if (!crn_sequence_new(&s->arena, long_capacity, &s->scratch) ||
        !crn_sequence_new(&s->arena, long_capacity, &s->smallest))
        return crn_no_memory(error);
    for (int i = 0; i < ISLANDS; i++) {
        uint64_t seed = (uint64_t)crn_max(0, task->settings->seed) * ISLANDS + (uint64_t)i;
        if (!crn_sequence_new(&s->arena, long_capacity, &s->start[i]))
            return crn_no_memory(error);
        CRN_TRY(crn_improver_new(s->model, capacity, seed, leeway[i], &s->island[i], error));
    }
    s->weight = crn_arena_alloc(&s->arena, (size_t)s->model->use_begin[s->model->node_count], sizeof(*s->weight));
    if (!s->weight)
        return crn_no_memory(error);
    s->random = (uint64_t)crn_max(0, task->settings->seed) + 1;
    const crn_task alone = crn_task_without_machine(task);
    CRN_TRY(crn_least_lower(&alone, &s->lower_bytes, error));
    begin_smallest(s);
    const cairn_graph *graph = cairn_problem_graph(task->problem);
    int32_t backward_begin = crn_sequence_backward_begin(graph, &s->eval);
    s->sweep = crn_sweep_new(s->model, backward_begin, s->lower_bytes, &s->arena);
    return s->sweep ? CAIRN_OK : crn_no_memory(error);
}

/* A walk takes no more than islands have room for. */
static bool walk_by(const crn_task *task, search *s, int64_t budget_bytes, const crn_walk_rule *how)
{
    crn_sequence walked = {.node = s->scratch.node, .capacity = s->walk_capacity};
    bool succeeds = crn_walk_run(s->walk, task, budget_bytes, how, &walked);
    s->scratch.count = walked.count;
    return succeeds;
}

static bool walk(const crn_task *task, search *s, int64_t budget_bytes, int rule, bool unlocks)
{
    crn_walk_rule how = {.unlocks = unlocks, .half_bytes_power = rule / 5, .half_distance_power = rule % 5};
    return walk_by(task, s, budget_bytes, &how);
}

static int nth_rule(int i)
{
    static const int order[RULES] = {11, 10, 12, 6, 5, 7, 13, 14, 8, 9, 0, 1, 2, 3, 4};
    return order[i];
}

/*
 * Every use of a storage weighs more or less by a random power of two, so that other values go first. Powers of two are
 * exact, so the walk is the same everywhere.
 */
static void draw_weights(search *s)
{
    const crn_graph_model *model = s->model;
    for (int32_t u = 0; u < model->use_begin[model->node_count]; u++) {
        s->random = s->random * 6364136223846793005u + 1442695040888963407u;
        int power = (int)((s->random >> 33) % (2 * WEIGHT_POWER_MAX + 1)) - WEIGHT_POWER_MAX;
        s->weight[u] = power < 0 ? 1.0F / (float)(1 << -power) : (float)(1 << power);
    }
}

static bool walk_at_random(const crn_task *task, search *s, int64_t budget_bytes, int tries)
{
    for (int i = 0; i < tries && !crn_should_stop(task, NULL); i++) {
        int rule = nth_rule(i % RULES);
        crn_walk_rule how = {
            .unlocks = true, .half_bytes_power = rule / 5, .half_distance_power = rule % 5, .weight = s->weight};
        draw_weights(s);
        if (walk_by(task, s, budget_bytes, &how))
            return true;
    }
    return false;
}

/* Plainly, on small graphs also by sending away what waits, then at random as well: the first that succeeds. */
static bool walk_somehow(const crn_task *task, search *s, int64_t budget_bytes, int tries)
{
    int count = is_small(s) ? RULES : rule_count(s) / 4 + 1;
    for (int i = 0; i < (is_small(s) ? 2 * count : count) && !crn_should_stop(task, NULL); i++)
        if (walk(task, s, budget_bytes, nth_rule(i % count), i >= count))
            return true;
    return is_small(s) && walk_at_random(task, s, budget_bytes, tries);
}

static void sweep(const crn_task *task, search *s)
{
    bool has_room;
    while (!crn_should_stop(task, NULL) && crn_sweep_next(s->sweep, s->smallest_peak_bytes, &s->scratch, &has_room))
        if (has_room)
            offer_smallest(s);
}

/* A budget under which a walk succeeds, by bisection, though none did just below. Goes on where it was stopped. */
static void bisect(const crn_task *task, search *s)
{
    int64_t near = is_small(s) ? 1 : crn_max(1, s->smallest_peak_bytes / 1024);
    crn_walk_limit(s->walk, true);
    for (int *i = &s->bisections; *i < BISECTIONS && s->smallest_peak_bytes - s->failed_bytes > near; ++*i) {
        int64_t middle = s->failed_bytes + (s->smallest_peak_bytes - s->failed_bytes) / 2;
        middle = *i == 0 ? s->lower_bytes : middle;
        if (walk_somehow(task, s, middle, *i == 0 ? FIRST_TRIES : TRIES)) /* the bound itself is worth more of them */
            offer_smallest(s);
        else if (crn_should_stop(task, NULL))
            break;
        else
            s->failed_bytes = middle;
        if (crn_walk_is_spent(s->walk))
            *i = BISECTIONS - 1;
    }
    crn_walk_limit(s->walk, false);
}

/* The walks that an answer begins with, under the budgets below that. Goes on where it was stopped. */
static void descend(const crn_task *task, search *s)
{
    crn_descent_step step;
    while (!crn_should_stop(task, NULL) && crn_descent_next(&s->descent, s->smallest_peak_bytes, &step)) {
        if (walk(task, s, step.budget_bytes, nth_rule(step.rule), false))
            offer_smallest(s);
        else if (crn_should_stop(task, NULL))
            return;
        crn_descent_note(&s->descent, &step, s->walk, &s->scratch);
    }
}

/* Where walks take long, sweeps are first. */
static void find_small(const crn_task *task, search *s)
{
    if (!is_small(s))
        sweep(task, s);
    bisect(task, s);
    descend(task, s);
    sweep(task, s);
}

/* The walks that know no future fail and succeed elsewhere: the smallest of theirs is offered, too. */
static cairn_status ask_online(const crn_task *task, search *s, cairn_error *error)
{
    const crn_sequence *sequence;
    void *online;
    if (s->has_asked_online || s->smallest_peak_bytes == s->lower_bytes || crn_should_stop(task, NULL))
        return CAIRN_OK;
    CRN_TRY(crn_solver_open(&crn_graph_online_solver, task, &online, error));
    cairn_status status = crn_graph_online_smallest(task, online, &sequence, error);
    if (status == CAIRN_OK) {
        crn_sequence_copy(&s->scratch, sequence);
        offer_smallest(s);
        s->has_asked_online = !crn_should_stop(task, NULL);
    }
    crn_solver_close(&crn_graph_online_solver, task, online);
    return status;
}

/*
 * The least budget under which a walk succeeds, to the byte on small graphs, else to a thousandth; the walk found is what
 * answers budgets near it.
 */
static cairn_status find_smallest(const crn_task *task, search *s, cairn_error *error)
{
    find_small(task, s);
    return ask_online(task, s, error);
}

static cairn_status search_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    search *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    s->begun_bytes = -1;
    return search_fill(task, s, error);
}

static cairn_status search_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    search *s = session;
    CRN_TRY(find_smallest(task, s, error));
    CRN_TRY(crn_least_lower(task, &least->lower_bytes, error));
    least->bytes = s->smallest_peak_bytes;
    least->is_exact = least->bytes == least->lower_bytes;
    if (!least->is_exact)
        CRN_TRY(crn_tiny_least(task, least, error));
    least->is_rough = !least->is_exact && crn_should_stop(task, NULL);
    return CAIRN_OK;
}

/* Keeps the sequence among the best distinct starts. */
static void offer_start(search *s, const crn_sequence *sequence, int64_t cost)
{
    int at = ISLANDS;
    cost = crn_min(cost, INT64_MAX - 1); /* INT64_MAX = no start */
    while (at > 0 && s->start_cost[at - 1] > cost)
        at--;
    if (at == ISLANDS || (at > 0 && s->start_cost[at - 1] == cost))
        return;
    crn_sequence spare = s->start[ISLANDS - 1];
    for (int i = ISLANDS - 1; i > at; i--) {
        s->start[i] = s->start[i - 1];
        s->start_cost[i] = s->start_cost[i - 1];
    }
    s->start[at] = spare;
    s->start_cost[at] = cost;
    crn_sequence_copy(&s->start[at], sequence);
}

/* The shortest sweep that fits, for budgets under which walks fail. */
static void sweep_under(const crn_task *task, search *s, int64_t budget_bytes)
{
    for (int i = 0; !crn_should_stop(task, NULL) && crn_sweep_nth(s->sweep, i, budget_bytes, &s->scratch); i++) {
        const crn_sequence_eval *eval = judge_scratch(s);
        if (eval->peak <= budget_bytes) {
            offer_start(s, &s->scratch, eval->cost);
            return;
        }
    }
}

static cairn_status find_starts(const crn_task *task, search *s, int64_t budget_bytes, cairn_error *error)
{
    for (int i = 0; i < ISLANDS; i++)
        s->start_cost[i] = INT64_MAX;
    const crn_task half = crn_task_part(task, 2); /* of short limits, for the bound and the search need some, too */
    for (int i = 0; i < rule_count(s); i++) {
        bool has_start = s->start_cost[0] < INT64_MAX;
        if (i > 0 && crn_should_stop(has_start ? &half : task, NULL))
            break;
        if (!walk(has_start ? &half : task, s, budget_bytes, nth_rule(i), false))
            continue;
        const crn_sequence_eval *eval = judge_scratch(s);
        if (eval->peak <= budget_bytes) /* not so where an alias is computed earlier than the sequence implies */
            offer_start(s, &s->scratch, eval->cost);
    }
    bool has_walk = s->start_cost[0] < INT64_MAX;
    if (!has_walk && !is_small(s))
        sweep_under(task, s, budget_bytes);
    const crn_task part = crn_task_part(task, s->start_cost[0] == INT64_MAX ? 1 : LEAST_PARTS);
    if (has_walk)
        find_small(&part, s);
    else
        CRN_TRY(find_smallest(&part, s, error));
    if (!has_walk && s->smallest_peak_bytes <= budget_bytes) {
        crn_sequence_copy(&s->scratch, &s->smallest);
        offer_start(s, &s->smallest, judge_scratch(s)->cost);
    }
    return CAIRN_OK;
}

typedef struct islands {
    search *search;
    int64_t budget_bytes, rounds;
    crn_improver_stop stop;
} islands;

static void begin_island(void *context, int64_t i, int worker)
{
    islands *all = context;
    search *s = all->search;
    const crn_sequence *start = s->start_cost[i] < INT64_MAX ? &s->start[i] : &s->start[0];
    crn_improver_heed(s->island[i], &all->stop, worker == 0);
    s->begun[i] = crn_improver_begin(s->island[i], start, all->budget_bytes);
}

static void run_island(void *context, int64_t i, int worker)
{
    islands *all = context;
    crn_improver_heed(all->search->island[i], &all->stop, worker == 0);
    if (all->search->begun[i])
        crn_improver_run(all->search->island[i], all->rounds);
}

static const crn_sequence *best_of_islands(const islands *all, int64_t *cost)
{
    const crn_sequence *best = NULL;
    *cost = INT64_MAX;
    for (int i = 0; i < ISLANDS; i++) {
        int64_t its_cost;
        const crn_sequence *its = crn_improver_best(all->search->island[i], &its_cost);
        if (all->search->begun[i] && its_cost < *cost) {
            *cost = its_cost;
            best = its;
        }
    }
    return best;
}

/*
 * Rounds for all islands together: some seconds' worth on one core. On large graphs walks take seconds, too, and a round
 * changes little of the whole.
 */
static int64_t rounds_of(const crn_task *task, const search *s)
{
    if (task->settings->iterations >= 0)
        return task->settings->iterations;
    if (task->deadline_ns != CAIRN_NONE)
        return INT64_MAX / 8; /* until the clock says so */
    int64_t nodes = s->model->node_count, rounds = INT64_C(30000000) / (nodes + 100);
    return crn_max(4 * ISLANDS, nodes <= LARGE_NODES ? rounds : rounds * LARGE_NODES / nodes);
}

/* Asked again about a budget by the clock, it goes on where it was stopped. Else the same question has the same answer. */
static bool goes_on(const crn_task *task, const search *s, int64_t budget_bytes)
{
    return task->deadline_ns != CAIRN_NONE && budget_bytes == s->begun_bytes;
}

static const crn_sequence *improve(const crn_task *task, search *s, int64_t budget_bytes, int64_t bound_ns,
                                   crn_answer *answer)
{
    islands all = {.search = s, .budget_bytes = budget_bytes, .stop.task = task};
    int64_t rounds = rounds_of(task, s), left = rounds, limit = crn_work_limit(task, rounds), cost;
    int64_t chunk = crn_max(1, CHUNK_EVENTS / (s->model->node_count + 1));
    if (!goes_on(task, s, budget_bytes))
        crn_team_run(task->team, ISLANDS, begin_island, &all);
    s->begun_bytes = budget_bytes;
    const crn_sequence *best = best_of_islands(&all, &cost);
    while (left > 0 && cost > bound_ns) {
        cairn_progress progress = {"search", rounds - left, limit > 0 ? limit : CAIRN_NONE, cost, bound_ns};
        if (crn_should_stop(task, &progress)) {
            answer->stopped_early = true;
            break;
        }
        all.rounds = crn_min(chunk, left / ISLANDS + (left % ISLANDS > 0));
        left -= all.rounds * ISLANDS;
        crn_team_run(task->team, ISLANDS, run_island, &all);
        best = best_of_islands(&all, &cost);
    }
    return best;
}

static cairn_status search_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                 cairn_error *error)
{
    search *s = session;
    int64_t budget = crn_min(crn_limit_of(budget_bytes), INT64_MAX - 1);
    const char *method;
    if (!goes_on(task, s, budget))
        CRN_TRY(find_starts(task, s, budget, error)); /* first: whoever interrupts the rest gets these */
    CRN_TRY(crn_lower_bound(task, budget_bytes, &answer->lower_bound_ns, &method, error));
    answer->stopped_early = crn_should_stop(task, NULL);
    if (s->start_cost[0] == INT64_MAX)
        return crn_tiny_solve(task, budget_bytes, answer, error);
    answer->iterations = crn_work_limit(task, rounds_of(task, s));
    const crn_sequence *best = improve(task, s, budget, answer->lower_bound_ns, answer);
    if (!best) /* a sweep that islands have no room for is the answer as it is */
        best = &s->start[0];
    answer->found = true;
    return crn_sequence_emit(&s->eval, best, answer->builder, error);
}

/* Without the programs of the bound (moment_search.h), which are left out where they do not fit beside the rest. */
static int64_t search_memory(const crn_task *task)
{
    const cairn_graph *graph = cairn_problem_graph(task->problem);
    int64_t edges = 0, nodes = graph->node_count, events = crn_sequence_capacity(graph->node_count, CRN_WALK_TIMES);
    int64_t long_events = crn_sequence_capacity(graph->node_count, SWEEP_TIMES);
    for (int32_t v = 0; v < graph->node_count; v++)
        edges += graph->nodes[v].dep_count + 1;
    return (ISLANDS + 2) * 80 * events + 48 * long_events + nodes * 800 + edges * 128 + (1 << 20);
}

const crn_solver crn_graph_search_solver = {
    .info =
        {
            .name = "graph-search",
            .takes_graphs = true,
            .available = true,
            .optimal_in = "",
            .summary = "future-aware eviction, then ruin, repair and fill; any size, with a proved gap",
            .source = "Cairn; eviction after Belady 1966 and Kirisame et al. 2021",
            .cost = "seconds at T = 400; memory O(T + E)",
        },
    .options = "iterations seed",
    .rank = 20,
    .memory = search_memory,
    .is_anytime = true,
    .has_own_bound = true,
    .open = search_open,
    .close = search_close,
    .least = search_least,
    .has_least_of = "graph-online",
    .solve = search_solve,
};
