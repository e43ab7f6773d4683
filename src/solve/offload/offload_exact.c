/*
 * offload-exact: the optimum of a small chain over all schedules with transfers and without recomputation.
 *
 * Problem   A chain and its link to host memory; every stage saves once. Which saved sets travel, in which order transfers
 *           and computations start: all of it. Least time.
 * Search    Branch and bound over lists of operations, the state of time being the simulator's own: three lanes, and when
 *           each copy can be read and freed. A step issues the next computation (with each option), an offload or a
 *           prefetch; copies are dropped and discarded as soon as they may be, for that only frees memory earlier. A copy
 *           may travel again and again.
 * Bounds    A state's makespan is at least what its lanes still have to do. Of states in which the same copies are in the
 *           same places one that is nowhere later, and never has more memory still to come back, dominates: all that can
 *           follow the other can follow it, no later (docs/reference/formats/schedule.md: operations start as early as
 *           they can). The least bound is looked at first, so the first complete state is the optimum.
 * Start     The best ordered, no-wait schedule (transfer.h) of all sets that may travel and all combinations of options: an
 *           incumbent that the search has to beat.
 * Cost      Exponential. At most STAGES_MAX stages and COMBINATIONS_MAX combinations of options; at LABELS_MAX states the
 *           search gives up and the incumbent is the answer. This is the oracle of the tests of the others.
 */
#include <string.h>

#include "base/queue.h"
#include "solve/offload/offload_plan.h"

enum {
    STAGES_MAX = 6,
    COMBINATIONS_MAX = 64,
    LABELS_MAX = 1 << 18,
    TABLE_SIZE = 1 << 16,
    POLL_EVERY = 4096,
    FIRST_CAPACITY = 1024
};

/* Where A[l] is. LEAVING: also on its way to the host, while the next forward still has to read it. */
enum { NOWHERE, ON_DEVICE, LEAVING, ON_HOST };

typedef struct lane_end {
    int64_t end_ns, device_bytes, host_bytes; /* what comes back then */
} lane_end;

/* A list of operations, reduced to what matters for what may follow it. */
typedef struct label {
    uint64_t key;  /* computations done, places, options: what is where */
    int64_t bound; /* least makespan, or least peak, of all that follows */
    int64_t now_ns, device_bytes, host_bytes;
    lane_end lanes[CAIRN_LANE_COUNT];
    int64_t ready_ns[STAGES_MAX + 1], busy_ns[STAGES_MAX + 1];           /* of a copy on the device */
    int64_t host_ready_ns[STAGES_MAX + 1], host_busy_ns[STAGES_MAX + 1]; /* of one on the host */
    int32_t parent, next_same;                                           /* the next in its place in the table */
    cairn_op op;                                                         /* that led here */
    int8_t place[STAGES_MAX + 1];
    uint8_t option[STAGES_MAX + 1];
    int32_t done; /* computations */
    bool dominated;
} label;

typedef struct search {
    const crn_task *task;
    const cairn_chain *chain;
    const cairn_machine *machine;
    int32_t n;
    int64_t budget_bytes, incumbent; /* what is not below it is of no use */
    bool by_memory;                  /* nothing takes time; the bound is the peak */
    label *labels;
    int32_t label_count, label_capacity;
    int32_t *table;
    crn_queue queue; /* of labels: least bound first, then what has done most, then the oldest */
    bool overflow, no_memory;
    cairn_allocator allocator;
} search;

/* ---- the problem ---- */

static const cairn_stage *stage_of(const search *s, int32_t l)
{
    return &s->chain->stages[l - 1];
}

static int64_t saved_bytes(const search *s, const label *at, int32_t l)
{
    return stage_of(s, l)->options[at->option[l]].saved_bytes;
}

static int64_t grad_bytes(const search *s, int32_t l)
{
    return l > 0 ? stage_of(s, l)->grad_bytes : s->chain->input_grad_bytes;
}

static int32_t combinations(const cairn_chain *chain)
{
    int32_t product = 1;
    for (int32_t l = 1; l <= chain->stage_count && product <= COMBINATIONS_MAX; l++)
        product *= chain->stages[l - 1].option_count;
    return product;
}

/* ---- dominance ---- */

static uint64_t key_of(const search *s, const label *at)
{
    uint64_t key = (uint64_t)at->done;
    for (int32_t l = 1; l <= s->n; l++)
        key = (key << 8) | (uint64_t)at->place[l] << 6 | at->option[l];
    return key;
}

static int64_t pending(const label *at, int64_t from_ns, bool on_host)
{
    int64_t bytes = 0;
    for (int i = 0; i < CAIRN_LANE_COUNT; i++)
        if (at->lanes[i].end_ns >= from_ns)
            bytes += on_host ? at->lanes[i].host_bytes : at->lanes[i].device_bytes;
    return bytes;
}

/* Whether a never has more memory still to come back than b. It changes where a lane of a ends. */
static bool frees_as_early(const label *a, const label *b)
{
    for (int i = 0; i < CAIRN_LANE_COUNT; i++) {
        int64_t end_ns = a->lanes[i].end_ns;
        if (pending(a, end_ns, false) > pending(b, end_ns, false) ||
            pending(a, end_ns, true) > pending(b, end_ns, true))
            return false;
    }
    return true;
}

/* Times before now are all the same to what follows. */
static bool not_later(int64_t a_ns, int64_t b_ns, int64_t b_now_ns)
{
    return a_ns <= crn_max(b_ns, b_now_ns);
}

static bool dominates(const search *s, const label *a, const label *b)
{
    if (a->bound > b->bound || a->now_ns > b->now_ns)
        return false;
    for (int i = 0; i < CAIRN_LANE_COUNT; i++)
        if (!not_later(a->lanes[i].end_ns, b->lanes[i].end_ns, b->now_ns))
            return false;
    for (int32_t l = 1; l <= s->n; l++)
        if (!not_later(a->ready_ns[l], b->ready_ns[l], b->now_ns) ||
            !not_later(a->busy_ns[l], b->busy_ns[l], b->now_ns) ||
            !not_later(a->host_ready_ns[l], b->host_ready_ns[l], b->now_ns) ||
            !not_later(a->host_busy_ns[l], b->host_busy_ns[l], b->now_ns))
            return false;
    return s->by_memory || frees_as_early(a, b);
}

/* Room for one more label, and for its place in the queue. */
static bool make_room(search *s)
{
    if (s->label_count == s->label_capacity) {
        s->overflow |= 2 * s->label_capacity > LABELS_MAX;
        label *labels = s->overflow ? NULL
                                    : crn_realloc(&s->allocator, s->labels, (size_t)s->label_capacity,
                                                  2 * (size_t)s->label_capacity, sizeof(*labels));
        if (!labels) {
            s->no_memory = !s->overflow;
            return false;
        }
        s->labels = labels;
        s->label_capacity *= 2;
    }
    s->no_memory = !crn_queue_make_room(&s->queue);
    return !s->no_memory;
}

/* Takes a label into the search unless it is of no use. */
static void offer(search *s, label *made)
{
    made->key = key_of(s, made);
    made->dominated = false;
    if (made->bound >= s->incumbent || !make_room(s))
        return;
    int32_t *place = &s->table[(made->key * UINT64_C(0x9E3779B97F4A7C15)) >> 48];
    for (int32_t i = *place; i >= 0; i = s->labels[i].next_same) {
        label *other = &s->labels[i];
        if (other->key != made->key || other->dominated)
            continue;
        if (dominates(s, other, made))
            return;
        other->dominated = dominates(s, made, other);
    }
    made->next_same = *place;
    *place = s->label_count;
    s->labels[s->label_count] = *made;
    crn_queue_push(&s->queue, (crn_queue_entry){made->bound, -made->done, s->label_count++});
}

/* ---- what is still to be done ---- */

static int64_t work_left(const search *s, const label *at)
{
    int64_t sum_ns = 0;
    for (int32_t l = 1; l <= s->n; l++) {
        const cairn_stage *stage = stage_of(s, l);
        int64_t least_ns = INT64_MAX;
        if (at->done >= l) {
            sum_ns += at->done <= 2 * s->n - l ? stage->options[at->option[l]].backward_ns : 0;
            continue;
        }
        for (int32_t k = 0; k < stage->option_count; k++)
            least_ns = crn_min(least_ns, stage->options[k].forward_ns + stage->options[k].backward_ns);
        sum_ns += least_ns;
    }
    return sum_ns;
}

/* The makespan is at least the end of every lane's work; the first prefetched copy is followed by a backward. */
static int64_t bound_of(const search *s, const label *at)
{
    int64_t bound_ns = 0, back_ns = 0;
    for (int i = 0; i < CAIRN_LANE_COUNT; i++)
        bound_ns = crn_max(bound_ns, at->lanes[i].end_ns);
    for (int32_t l = 1; l <= s->n; l++)
        if (at->place[l] == LEAVING || at->place[l] == ON_HOST) {
            int64_t ns =
                cairn_transfer_ns(saved_bytes(s, at, l), s->machine->to_device_bytes_per_s, s->machine->latency_ns);
            if (ns == CAIRN_NONE || !crn_add(back_ns, ns, &back_ns))
                return INT64_MAX;
        }
    int lane = s->machine->shared_link ? CAIRN_LANE_TO_HOST : CAIRN_LANE_TO_DEVICE;
    int64_t work_ns = work_left(s, at), compute_ns, link_ns;
    if (!crn_add(crn_max(at->lanes[CAIRN_LANE_COMPUTE].end_ns, at->now_ns), work_ns, &compute_ns) ||
        !crn_add(crn_max(at->lanes[lane].end_ns, at->now_ns), back_ns, &link_ns))
        return INT64_MAX;
    return crn_max(crn_max(bound_ns, compute_ns), back_ns > 0 ? link_ns : 0);
}

/* ---- the simulator's rules ---- */

/* Moves the start on to where bytes fit, and takes what has come back by then; false when they never fit. */
static bool wait_for(const search *s, label *at, bool on_host, int64_t bytes, int64_t *start_ns)
{
    int64_t limit = on_host ? s->machine->host_bytes : s->budget_bytes;
    for (;;) {
        lane_end *first = NULL;
        for (int i = 0; i < CAIRN_LANE_COUNT; i++) {
            lane_end *lane = &at->lanes[i];
            if ((lane->device_bytes > 0 || lane->host_bytes > 0) && (!first || lane->end_ns < first->end_ns))
                first = lane;
        }
        bool fits = bytes <= limit - (on_host ? at->host_bytes : at->device_bytes);
        if (!first || (fits && first->end_ns > *start_ns))
            return fits;
        *start_ns = crn_max(*start_ns, first->end_ns);
        at->device_bytes -= first->device_bytes;
        at->host_bytes -= first->host_bytes;
        first->device_bytes = first->host_bytes = 0;
    }
}

static void give_back(label *at, bool on_host, int64_t bytes, int64_t busy_ns)
{
    lane_end now = {0}, *lane = &now;
    for (int i = 0; busy_ns > at->now_ns && i < CAIRN_LANE_COUNT; i++)
        if (at->lanes[i].end_ns == busy_ns)
            lane = &at->lanes[i];
    if (lane == &now) {
        at->device_bytes -= on_host ? 0 : bytes;
        at->host_bytes -= on_host ? bytes : 0;
        return;
    }
    lane->device_bytes += on_host ? 0 : bytes;
    lane->host_bytes += on_host ? bytes : 0;
}

/* Starts an operation on a lane; false when it does not fit, or on overflow. Memory: see wait_for. */
static bool start(const search *s, label *at, cairn_lane lane, int64_t start_ns, int64_t ns, bool on_host,
                  int64_t bytes, int64_t *end_ns)
{
    cairn_lane at_lane = lane == CAIRN_LANE_TO_DEVICE && s->machine->shared_link ? CAIRN_LANE_TO_HOST : lane;
    start_ns = crn_max(crn_max(start_ns, at->now_ns), at->lanes[at_lane].end_ns);
    if (ns == CAIRN_NONE || !wait_for(s, at, on_host, bytes, &start_ns))
        return false;
    if (s->by_memory)
        ns = 0;
    if (!crn_add(start_ns, ns, end_ns))
        return false;
    at->now_ns = start_ns;
    at->lanes[at_lane].end_ns = *end_ns;
    at->device_bytes += on_host ? 0 : bytes;
    at->host_bytes += on_host ? bytes : 0;
    if (s->by_memory)
        at->bound = crn_max(at->bound, at->device_bytes);
    return true;
}

/* ---- the steps ---- */

static void leave(const search *s, label *at, int32_t l)
{
    at->place[l] = ON_HOST;
    give_back(at, false, saved_bytes(s, at, l), at->busy_ns[l]);
    at->ready_ns[l] = at->busy_ns[l] = 0;
}

static void finish(search *s, label *made, int32_t parent, cairn_op op)
{
    made->parent = parent;
    made->op = op;
    if (!s->by_memory)
        made->bound = crn_max(made->bound, bound_of(s, made));
    offer(s, made);
}

/* Whether backwards or the next forward still read A[l]. */
static bool is_forward_next(const label *at, int32_t l)
{
    return at->done == l;
}

static void forward(search *s, int32_t from, int32_t l, int32_t k)
{
    label made = s->labels[from];
    const cairn_stage_option *option = &stage_of(s, l)->options[k];
    int64_t end_ns, bytes = option->saved_bytes + crn_max(0, option->forward_workspace_bytes);
    if (!start(s, &made, CAIRN_LANE_COMPUTE, l > 1 ? made.ready_ns[l - 1] : 0, option->forward_ns, false, bytes,
               &end_ns))
        return;
    made.lanes[CAIRN_LANE_COMPUTE].device_bytes = bytes - option->saved_bytes;
    made.place[l] = ON_DEVICE;
    made.option[l] = (uint8_t)k;
    made.ready_ns[l] = made.busy_ns[l] = end_ns;
    made.done++;
    if (l > 1) {
        made.busy_ns[l - 1] = crn_max(made.busy_ns[l - 1], end_ns);
        if (made.place[l - 1] == LEAVING)
            leave(s, &made, l - 1);
    }
    finish(s, &made, from, (cairn_op){.code = CAIRN_OP_FORWARD_SAVE, .option = (uint16_t)k, .index = l});
}

static void backward(search *s, int32_t from, int32_t l)
{
    label made = s->labels[from];
    const cairn_stage *stage = stage_of(s, l);
    const cairn_stage_option *option = &stage->options[made.option[l]];
    int64_t result = grad_bytes(s, l - 1) + stage->weight_grad_bytes, end_ns;
    int64_t grow = result - grad_bytes(s, l) - option->saved_bytes;
    int64_t bytes = crn_max(0, crn_max(grow, result + option->backward_workspace_bytes));
    int64_t since_ns = crn_max(made.busy_ns[l], l > 1 ? made.ready_ns[l - 1] : 0);
    if (made.place[l] != ON_DEVICE || (l > 1 && made.place[l - 1] != ON_DEVICE))
        return;
    if (!start(s, &made, CAIRN_LANE_COMPUTE, since_ns, option->backward_ns, false, bytes, &end_ns))
        return;
    made.lanes[CAIRN_LANE_COMPUTE].device_bytes = bytes - grow;
    made.place[l] = NOWHERE;
    made.ready_ns[l] = made.busy_ns[l] = 0;
    made.option[l] = 0;
    if (l > 1)
        made.busy_ns[l - 1] = crn_max(made.busy_ns[l - 1], end_ns);
    made.done++;
    finish(s, &made, from, (cairn_op){.code = CAIRN_OP_BACKWARD, .index = l});
}

static cairn_op on_saved(cairn_op_code code, int32_t l)
{
    return (cairn_op){.code = (uint8_t)code, .value = CAIRN_VALUE_SAVED, .index = l};
}

static void offload(search *s, int32_t from, int32_t l)
{
    label made = s->labels[from];
    int64_t bytes = saved_bytes(s, &made, l), end_ns;
    int64_t ns = cairn_transfer_ns(bytes, s->machine->to_host_bytes_per_s, s->machine->latency_ns);
    if (!start(s, &made, CAIRN_LANE_TO_HOST, made.ready_ns[l], ns, true, bytes, &end_ns))
        return;
    made.place[l] = LEAVING;
    made.busy_ns[l] = crn_max(made.busy_ns[l], end_ns);
    made.host_ready_ns[l] = made.host_busy_ns[l] = end_ns;
    if (!is_forward_next(&made, l) || l == s->n)
        leave(s, &made, l);
    finish(s, &made, from, on_saved(CAIRN_OP_OFFLOAD, l));
}

static void prefetch(search *s, int32_t from, int32_t l)
{
    label made = s->labels[from];
    int64_t bytes = saved_bytes(s, &made, l), end_ns;
    int64_t ns = cairn_transfer_ns(bytes, s->machine->to_device_bytes_per_s, s->machine->latency_ns);
    if (!start(s, &made, CAIRN_LANE_TO_DEVICE, made.host_ready_ns[l], ns, false, bytes, &end_ns))
        return;
    made.place[l] = ON_DEVICE;
    made.ready_ns[l] = made.busy_ns[l] = end_ns;
    give_back(&made, true, bytes, crn_max(made.host_busy_ns[l], end_ns));
    made.host_ready_ns[l] = made.host_busy_ns[l] = 0;
    finish(s, &made, from, on_saved(CAIRN_OP_PREFETCH, l));
}

static void expand(search *s, int32_t from)
{
    int32_t done = s->labels[from].done, n = s->n;
    if (done < n)
        for (int32_t k = 0; k < stage_of(s, done + 1)->option_count; k++)
            forward(s, from, done + 1, k);
    else
        backward(s, from, 2 * n - done);
    for (int32_t l = 1; l <= n; l++) {
        if (s->labels[from].place[l] == ON_DEVICE)
            offload(s, from, l);
        else if (s->labels[from].place[l] == ON_HOST)
            prefetch(s, from, l);
    }
}

/* ---- the search ---- */

static cairn_status search_begin(search *s, const crn_task *task, int64_t budget_bytes, bool by_memory,
                                 int64_t incumbent, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    *s = (search){.task = task,
                  .chain = chain,
                  .machine = task->machine,
                  .n = chain->stage_count,
                  .budget_bytes = budget_bytes,
                  .incumbent = incumbent,
                  .by_memory = by_memory,
                  .label_capacity = FIRST_CAPACITY,
                  .allocator = crn_allocator(task->env)};
    s->labels = crn_alloc(&s->allocator, (size_t)s->label_capacity, sizeof(*s->labels));
    crn_queue_init(&s->queue, s->allocator);
    s->table = crn_alloc(&s->allocator, TABLE_SIZE, sizeof(*s->table));
    if (!s->labels || !s->table)
        return crn_no_memory(error);
    memset(s->table, 0xff, TABLE_SIZE * sizeof(*s->table));
    return CAIRN_OK;
}

static void search_end(search *s)
{
    if (!s->task)
        return;
    crn_free(&s->allocator, s->labels, (size_t)s->label_capacity, sizeof(*s->labels));
    crn_queue_clear(&s->queue);
    crn_free(&s->allocator, s->table, TABLE_SIZE, sizeof(*s->table));
}

/* The first complete label, or -1: then there is none below the incumbent, unless the search overflowed. */
static cairn_status search_run(search *s, int32_t *goal, cairn_error *error)
{
    label first = {.parent = -1};
    int64_t popped = 0;
    *goal = -1;
    first.device_bytes =
        cairn_problem_info_of(s->task->problem)->fixed_bytes + s->chain->input_bytes + grad_bytes(s, s->n);
    first.bound = s->by_memory ? first.device_bytes : work_left(s, &first);
    if (first.device_bytes <= s->budget_bytes)
        offer(s, &first);
    while (s->queue.count > 0 && !s->overflow && !s->no_memory) {
        int32_t top = crn_queue_pop(&s->queue).item;
        if (s->labels[top].dominated)
            continue;
        if (s->labels[top].done == 2 * s->n) {
            *goal = top;
            return CAIRN_OK;
        }
        if (++popped % POLL_EVERY == 0 && crn_should_stop(s->task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped after %lld states", (long long)popped);
        expand(s, top);
    }
    return s->no_memory ? crn_no_memory(error) : CAIRN_OK;
}

/* Drops and discards stand right after what makes them possible. */
static cairn_status emit_step(const search *s, const label *at, cairn_builder *builder, cairn_error *error)
{
    const label *before = &s->labels[at->parent];
    CRN_TRY(cairn_builder_add(builder, at->op, error));
    if (at->op.code == CAIRN_OP_PREFETCH)
        CRN_TRY(cairn_builder_add(builder, on_saved(CAIRN_OP_DISCARD, at->op.index), error));
    for (int32_t l = 1; l <= s->n; l++)
        if (at->place[l] == ON_HOST && before->place[l] != ON_HOST)
            CRN_TRY(cairn_builder_add(builder, on_saved(CAIRN_OP_DROP, l), error));
    return CAIRN_OK;
}

static cairn_status emit(const search *s, int32_t goal, cairn_builder *builder, cairn_error *error)
{
    int32_t count = 0;
    cairn_status status = CAIRN_OK;
    for (int32_t at = goal; s->labels[at].parent >= 0; at = s->labels[at].parent)
        count++;
    int32_t *path = crn_alloc(&s->allocator, (size_t)count, sizeof(*path));
    if (!path)
        return crn_no_memory(error);
    int32_t i = count;
    for (int32_t at = goal; s->labels[at].parent >= 0; at = s->labels[at].parent)
        path[--i] = at;
    for (i = 0; status == CAIRN_OK && i < count; i++)
        status = emit_step(s, &s->labels[path[i]], builder, error);
    crn_free(&s->allocator, path, (size_t)count, sizeof(*path));
    return status;
}

/* ---- the solver ---- */

static cairn_status exact_accepts(const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    if (chain->stage_count > STAGES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "offload-exact takes at most %d stages, and the chain has %d",
                        STAGES_MAX, chain->stage_count);
    if (combinations(chain) > COMBINATIONS_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED,
                        "offload-exact takes at most %d combinations of options, and the chain has more",
                        COMBINATIONS_MAX);
    return CAIRN_OK;
}

/* The incumbent: every combination of options, every set of stages. */
typedef struct start_of {
    crn_offload_plan *plan; /* of the best */
    crn_offload_best best;
    bool best_goes[STAGES_MAX + 1];
    int64_t need_bytes; /* the least of all */
} start_of;

static cairn_status try_sets(start_of *start, crn_offload_plan *plan, int64_t budget_bytes, cairn_error *error)
{
    for (uint32_t set = 0; set < 1u << plan->n; set++) {
        bool goes[STAGES_MAX + 1] = {false}, may_go = true;
        for (int32_t l = 1; l <= plan->n; l++) {
            goes[l] = (set >> (l - 1) & 1) != 0;
            may_go &= !goes[l] || crn_offload_may_go(plan, l);
        }
        if (!may_go)
            continue;
        int64_t need_bytes = crn_offload_need(plan, goes);
        start->need_bytes = crn_min(start->need_bytes, need_bytes);
        if (need_bytes <= budget_bytes && need_bytes < INT64_MAX)
            CRN_TRY(crn_offload_try(plan, goes, budget_bytes, &start->best, error));
    }
    return CAIRN_OK;
}

static bool next_combination(const cairn_chain *chain, int32_t *option)
{
    for (int32_t l = 1; l <= chain->stage_count; l++) {
        if (++option[l] < chain->stages[l - 1].option_count)
            return true;
        option[l] = 0;
    }
    return false;
}

static cairn_status find_start(start_of *start, const crn_task *task, int64_t budget_bytes, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int32_t option[STAGES_MAX + 1] = {0};
    *start = (start_of){.best = {.makespan_ns = INT64_MAX}, .need_bytes = INT64_MAX};
    start->best.goes = start->best_goes;
    do {
        crn_offload_plan *plan;
        CRN_TRY(crn_offload_plan_new(task, option, &plan, error));
        cairn_status status = try_sets(start, plan, budget_bytes, error);
        crn_offload_plan *old = start->best.plan == plan ? start->plan : plan;
        start->plan = start->best.plan == plan ? plan : start->plan;
        crn_offload_plan_free(old);
        CRN_TRY(status);
    } while (next_combination(chain, option));
    return CAIRN_OK;
}

static cairn_status exact_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    search s = {0};
    start_of start;
    int32_t goal = -1;
    (void)session;
    cairn_status status = find_start(&start, task, -1, error);
    least->bytes = start.need_bytes;
    if (status == CAIRN_OK)
        status = search_begin(&s, task, INT64_MAX, true, start.need_bytes, error);
    if (status == CAIRN_OK)
        status = search_run(&s, &goal, error);
    if (status == CAIRN_OK && goal >= 0)
        least->bytes = s.labels[goal].bound;
    search_end(&s);
    crn_offload_plan_free(start.plan);
    return status;
}

static cairn_status answer_with(const search *s, int32_t goal, const start_of *start, crn_answer *answer,
                                cairn_error *error)
{
    answer->optimal_in_class = !s->overflow;
    answer->stopped_early = s->overflow && goal < 0 && start->best.makespan_ns == INT64_MAX;
    if (goal < 0)
        return crn_offload_answer(&start->best, s->budget_bytes, answer, error);
    answer->found = true;
    crn_offload_explain(s->task, s->budget_bytes, answer);
    return emit(s, goal, answer->builder, error);
}

static cairn_status exact_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                                cairn_error *error)
{
    search s = {0};
    start_of start;
    int32_t goal = -1;
    int64_t budget = crn_offload_budget(budget_bytes);
    (void)session;
    cairn_status status = find_start(&start, task, budget, error);
    if (status == CAIRN_OK)
        status = search_begin(&s, task, budget, false, start.best.makespan_ns, error);
    if (status == CAIRN_OK)
        status = search_run(&s, &goal, error);
    if (status == CAIRN_OK)
        status = answer_with(&s, goal, &start, answer, error);
    search_end(&s);
    crn_offload_plan_free(start.plan);
    return status;
}

static int64_t exact_memory(const crn_task *task)
{
    (void)task;
    return 2 * LABELS_MAX * (int64_t)(sizeof(label) + sizeof(crn_queue_entry)) + TABLE_SIZE * 4;
}

const crn_solver crn_offload_exact_solver = {
    .info = {.name = "offload-exact",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "offload",
             .summary = "the optimum of a small chain over all schedules that compute nothing again",
             .source = "branch and bound over lists of operations, with dominance",
             .cost = "exponential; at most 6 stages"},
    .accepts = exact_accepts,
    .memory = exact_memory,
    .least = exact_least,
    .solve = exact_solve,
};
