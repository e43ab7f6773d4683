#include "solve/link_lists.h"

#include <math.h>
#include <string.h>

#include "solve/graph/graph_improve.h"
#include "solve/graph/graph_walk.h"

/*
 * The first price, how much lower the next one is, and how many are tried; so many in a row that are worse end it. Then
 * prices on both sides of the best one, ever nearer to it.
 */
#define PRICE_FIRST 0.3
#define PRICE_STEP 0.6
#define PRICE_NEAR 0.77
enum { PRICES = 12, WORSE_MAX = 2, NEARER = 3 };

/* Budgets are so many even steps from the real one to that of storing everything. */
enum { BUDGETS = 8 };

/* Of the time that is left, one of so many parts: for each price or budget, and for the best price at the end. */
enum { PRICE_PARTS = 24, BEST_PARTS = 4 };

enum { BYTES_OF_EVENT = 240 };

typedef struct link_search {
    const crn_task *task;
    const crn_link_sink *sink;
    int64_t budget_bytes;
    crn_graph_model *model; /* with the link, and room for what follows */
    crn_graph_link link;
    int64_t *link_ns; /* of a storage: what a fetch takes of the link; CAIRN_NONE = it always stays */
    crn_improver *improver;
    crn_sequence_eval eval;
    crn_sequence at, best, list; /* where the search is; the best so far; one without fetches */
    double best_price;
    int64_t best_ns;
    int32_t *made; /* of a storage: its newest instance in the list */
    bool *goes;    /* of an event of the list: what it makes is fetched later */
} link_search;

/* ---- the link ---- */

/* Whether all that an alias reads lies in its own storage, so that it can be computed again when that is back. */
static bool stands_alone(const crn_graph_model *model, int32_t v)
{
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
        if (model->root[model->dep[i]] != model->root[v])
            return false;
    return !model->once_node[v] && model->extra[v] == 0;
}

static void measure_storage(link_search *p, int32_t s)
{
    const crn_graph_model *model = p->model;
    const cairn_machine *machine = p->task->machine;
    int64_t bytes = model->bytes[s], *out_ns = &p->link.out_ns[s], *back_ns = &p->link.back_ns[s];
    *out_ns = cairn_transfer_ns(bytes, machine->to_host_bytes_per_s, machine->latency_ns);
    *back_ns = cairn_transfer_ns(bytes, machine->to_device_bytes_per_s, machine->latency_ns);
    p->link_ns[s] = CAIRN_NONE;
    if (model->root[s] != s || model->keep[s] || bytes == 0 || bytes > machine->host_bytes || *out_ns < 0 ||
        *back_ns < 0)
        return;
    if (machine->shared_link) /* as if each way had half of it */
        *out_ns = *back_ns = crn_add_saturating(*out_ns, *back_ns);
    p->link_ns[s] = crn_max(*out_ns, *back_ns);
}

static void measure_link(link_search *p)
{
    const crn_graph_model *model = p->model;
    int64_t bytes = 0;
    for (int32_t v = 0; v < model->node_count; v++) {
        measure_storage(p, v);
        bytes = crn_add_saturating(bytes, model->bytes[v]);
    }
    p->link.host_bytes = bytes > p->task->machine->host_bytes ? p->task->machine->host_bytes : INT64_MAX;
    for (int32_t v = 0; v < model->node_count; v++)
        if (model->root[v] != v && !stands_alone(model, v))
            p->link_ns[model->root[v]] = CAIRN_NONE;
}

static void set_price(link_search *p, double price)
{
    for (int32_t s = 0; s < p->model->node_count; s++)
        p->link.price_ns[s] = p->link_ns[s] == CAIRN_NONE ? CAIRN_NONE : (int64_t)((double)p->link_ns[s] * price);
}

static void forbid_fetches(link_search *p)
{
    for (int32_t s = 0; s < p->model->node_count; s++)
        p->link.price_ns[s] = CAIRN_NONE;
}

/* ---- lists ---- */

/* Leaves the fetches out. */
static void make_list(link_search *p, const crn_sequence *sequence)
{
    p->list.count = 0;
    for (int32_t e = 0; e < sequence->count; e++) {
        int32_t v = crn_event_node(p->model, sequence->node[e]);
        if (crn_event_is_fetch(p->model, sequence->node[e])) {
            p->goes[p->made[v]] = true;
            continue;
        }
        p->made[v] = p->list.count;
        p->goes[p->list.count] = false;
        p->list.node[p->list.count++] = v;
    }
}

/* By computation: those of a list are the events of its sequence and, in between, aliases that are computed again. */
static void mark_computations(const link_search *p, const cairn_builder *builder, bool *goes)
{
    const cairn_op *ops = cairn_builder_ops(builder);
    for (int64_t i = 0, made = 0, e = 0; i < cairn_builder_count(builder); i++) {
        if (ops[i].code != CAIRN_OP_COMPUTE)
            continue;
        bool is_event = e < p->list.count && p->list.node[e] == ops[i].index;
        goes[made++] = is_event && p->goes[e++];
    }
}

/* Gives the list to the sink. */
static cairn_status give(const link_search *p, const cairn_builder *builder, bool improve, int64_t *makespan_ns,
                         cairn_error *error)
{
    const cairn_allocator allocator = crn_allocator(p->task->env);
    size_t count = (size_t)cairn_builder_count(builder);
    bool *goes = crn_alloc(&allocator, count, sizeof(*goes));
    if (!goes)
        return crn_no_memory(error);
    mark_computations(p, builder, goes);
    cairn_status status = p->sink->take(p->sink->context, builder, goes, improve, makespan_ns, error);
    crn_free(&allocator, goes, count, sizeof(*goes));
    return status;
}

static cairn_status offer(link_search *p, const crn_sequence *sequence, bool improve, int64_t *makespan_ns,
                          cairn_error *error)
{
    cairn_builder *builder;
    make_list(p, sequence);
    CRN_TRY(cairn_builder_new(p->task->env, p->task->problem, &builder, error));
    cairn_status status = crn_sequence_emit(&p->eval, &p->list, builder, error);
    if (status == CAIRN_OK)
        status = give(p, builder, improve, makespan_ns, error);
    cairn_builder_free(builder);
    return status;
}

/* ---- one search ---- */

static bool is_over(const link_search *p)
{
    return p->sink->is_done(p->sink->context) || crn_should_stop(p->task, NULL);
}

/* The best sequence under a budget that follows from p->at, within one of so many parts of the time; NULL: none fits. */
static const crn_sequence *search_from(link_search *p, int64_t budget_bytes, int64_t parts, int64_t rounds)
{
    const crn_task part = crn_task_part(p->task, parts);
    crn_improver_stop stop = {.task = &part};
    int64_t cost;
    crn_improver_heed(p->improver, &stop, true);
    if (!crn_improver_begin(p->improver, &p->at, budget_bytes))
        return NULL;
    crn_improver_run(p->improver, rounds);
    return crn_improver_best(p->improver, &cost);
}

/* ---- prices ---- */

/* Goes on from p->at, and leaves there the sequence of this price. */
static cairn_status try_price(link_search *p, double price, int64_t parts, int64_t rounds, bool improve,
                              int64_t *makespan_ns, cairn_error *error)
{
    *makespan_ns = INT64_MAX;
    set_price(p, price);
    const crn_sequence *sequence = search_from(p, p->budget_bytes, parts, rounds);
    if (!sequence)
        return CAIRN_OK;
    crn_sequence_copy(&p->at, sequence);
    CRN_TRY(offer(p, &p->at, improve, makespan_ns, error));
    if (*makespan_ns > p->best_ns)
        return CAIRN_OK;
    p->best_ns = *makespan_ns;
    p->best_price = price;
    crn_sequence_copy(&p->best, &p->at);
    return CAIRN_OK;
}

static cairn_status try_from_best(link_search *p, double price, int64_t parts, int64_t rounds, cairn_error *error)
{
    int64_t makespan_ns;
    if (is_over(p))
        return CAIRN_OK;
    crn_sequence_copy(&p->at, &p->best);
    return try_price(p, price, parts, rounds, false, &makespan_ns, error);
}

/* From the first price down, each from the sequence of the one before. Their lists are improved. */
static cairn_status try_falling(link_search *p, int64_t rounds, cairn_error *error)
{
    double price = PRICE_FIRST;
    for (int i = 0, worse = 0; i < PRICES && worse < WORSE_MAX; i++) {
        int64_t before_ns = p->best_ns, makespan_ns;
        if (is_over(p))
            break;
        CRN_TRY(try_price(p, price, PRICE_PARTS, rounds, true, &makespan_ns, error));
        price *= PRICE_STEP;
        worse = makespan_ns < before_ns ? 0 : worse + (makespan_ns > before_ns || makespan_ns == INT64_MAX);
    }
    return CAIRN_OK;
}

static cairn_status try_near(link_search *p, int64_t rounds, cairn_error *error)
{
    double step = PRICE_NEAR;
    for (int i = 0; i < NEARER; i++) {
        double price = p->best_price;
        CRN_TRY(try_from_best(p, price * step, PRICE_PARTS, rounds, error));
        CRN_TRY(try_from_best(p, price / step, PRICE_PARTS, rounds, error));
        step = sqrt(step);
    }
    return CAIRN_OK;
}

/* ---- larger budgets ---- */

static cairn_status try_budget(link_search *p, int64_t budget_bytes, int64_t rounds, cairn_error *error)
{
    const crn_sequence *sequence = search_from(p, budget_bytes, PRICE_PARTS, rounds);
    int64_t makespan_ns;
    return sequence ? offer(p, sequence, true, &makespan_ns, error) : CAIRN_OK;
}

/*
 * Lists without fetches that fit a larger budget. What of them is offloaded is left to the search that they are given to,
 * which may let the processor wait for a transfer.
 */
static cairn_status try_budgets(link_search *p, int64_t rounds, cairn_error *error)
{
    int64_t budget_bytes = p->budget_bytes;
    forbid_fetches(p);
    crn_sequence_store_all(p->model, &p->list);
    crn_sequence_judge(&p->eval, &p->list);
    int64_t span = p->eval.peak - budget_bytes;
    for (int i = 1; i < BUDGETS && span > 0; i++)
        if (!is_over(p))
            CRN_TRY(try_budget(p, budget_bytes + span / BUDGETS * i, rounds, error));
    return CAIRN_OK;
}

static cairn_status try_all(link_search *p, int64_t rounds, cairn_error *error)
{
    int64_t few = crn_min(rounds, p->model->node_count), makespan_ns;
    CRN_TRY(try_budgets(p, few, error));
    CRN_TRY(try_falling(p, few, error));
    if (p->best_ns == INT64_MAX)
        return CAIRN_OK;
    CRN_TRY(try_near(p, few, error));
    CRN_TRY(try_from_best(p, p->best_price, BEST_PARTS, rounds, error));
    return offer(p, &p->best, true, &makespan_ns, error);
}

/* ---- beginning ---- */

/* False: it has transfers, or is too long. */
static bool read_start(link_search *p, const cairn_builder *start)
{
    const cairn_op *ops = cairn_builder_ops(start);
    memset(p->made, 0, (size_t)p->model->node_count * sizeof(*p->made));
    for (int64_t i = 0; i < cairn_builder_count(start); i++) {
        int32_t v = ops[i].index;
        if (ops[i].code == CAIRN_OP_DROP || (p->model->root[v] != v && p->made[v]++ > 0))
            continue; /* aliases that are computed again follow from the others */
        if (ops[i].code != CAIRN_OP_COMPUTE || p->at.count == p->at.capacity)
            return false;
        p->at.node[p->at.count++] = v;
    }
    return p->at.count > 0;
}

static cairn_status fill(link_search *p, const cairn_builder *start, cairn_error *error)
{
    static const crn_improver_leeway leeway = {500, 100, 0};
    crn_arena *arena = &p->model->arena;
    size_t nodes = (size_t)p->model->node_count;
    int32_t capacity = crn_sequence_capacity(p->model->node_count, CRN_WALK_TIMES);
    bool fits = (p->link.price_ns = crn_arena_alloc(arena, nodes, sizeof(int64_t))) &&
                (p->link.out_ns = crn_arena_alloc(arena, nodes, sizeof(int64_t))) &&
                (p->link.back_ns = crn_arena_alloc(arena, nodes, sizeof(int64_t))) &&
                (p->link_ns = crn_arena_alloc(arena, nodes, sizeof(int64_t))) &&
                (p->made = crn_arena_alloc(arena, nodes, sizeof(int32_t))) &&
                (p->goes = crn_arena_alloc(arena, (size_t)capacity, sizeof(bool))) &&
                crn_sequence_new(arena, capacity, &p->at) && crn_sequence_new(arena, capacity, &p->best) &&
                crn_sequence_new(arena, capacity, &p->list);
    if (!fits)
        return crn_no_memory(error);
    CRN_TRY(crn_sequence_eval_new(p->model, arena, capacity, &p->eval, error)); /* of lists, so without a link */
    measure_link(p);
    p->model->link = &p->link;
    if (!read_start(p, start))
        crn_sequence_store_all(p->model, &p->at);
    uint64_t seed = (uint64_t)crn_max(0, p->task->settings->seed);
    return crn_improver_new(p->model, capacity, seed, leeway, &p->improver, error);
}

cairn_status crn_link_lists(const crn_task *task, int64_t budget_bytes, const cairn_builder *start, int64_t rounds,
                            const crn_link_sink *sink, cairn_error *error)
{
    link_search p = {.task = task, .sink = sink, .budget_bytes = budget_bytes, .best_ns = INT64_MAX};
    CRN_TRY(crn_graph_model_new(task, &p.model, error));
    cairn_status status = fill(&p, start, error);
    if (status == CAIRN_OK)
        status = try_all(&p, rounds, error);
    crn_improver_free(p.improver);
    crn_graph_model_free(p.model);
    return status;
}

int64_t crn_link_lists_memory(int32_t node_count)
{
    return (int64_t)BYTES_OF_EVENT * crn_sequence_capacity(node_count, CRN_WALK_TIMES) + 200 * (int64_t)node_count;
}
