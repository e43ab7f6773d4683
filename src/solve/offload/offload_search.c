#include "solve/offload/offload_search.h"

#include <string.h>

enum { POLL_EVERY = 4096, FIRST_CAPACITY = 1024 };

/* Where A[l] is. LEAVING: also on its way to the host, while the next forward still has to read it. */
enum { NOWHERE, ON_DEVICE, LEAVING, ON_HOST };

/* ---- the problem ---- */

static const cairn_stage *stage_of(const crn_offload_search *s, int32_t l)
{
    return &s->chain->stages[l - 1];
}

static int64_t saved_bytes(const crn_offload_search *s, const crn_offload_label *at, int32_t l)
{
    return stage_of(s, l)->options[at->option[l]].saved_bytes;
}

static int64_t grad_bytes(const crn_offload_search *s, int32_t l)
{
    return l > 0 ? stage_of(s, l)->grad_bytes : s->chain->input_grad_bytes;
}

/* ---- dominance ---- */

static uint64_t key_of(const crn_offload_search *s, const crn_offload_label *at)
{
    uint64_t key = (uint64_t)at->done;
    for (int32_t l = 1; l <= s->n; l++)
        key = (key << 8) | (uint64_t)at->place[l] << 6 | at->option[l];
    return key;
}

static int64_t pending(const crn_offload_label *at, int64_t from_ns, bool on_host)
{
    int64_t bytes = 0;
    for (int i = 0; i < CAIRN_LANE_COUNT; i++)
        if (at->lanes[i].end_ns >= from_ns)
            bytes += on_host ? at->lanes[i].host_bytes : at->lanes[i].device_bytes;
    return bytes;
}

/* Whether a never has more memory still to come back than b. It changes where a lane of a ends. */
static bool frees_as_early(const crn_offload_label *a, const crn_offload_label *b)
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

static bool dominates(const crn_offload_search *s, const crn_offload_label *a, const crn_offload_label *b)
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
static bool make_room(crn_offload_search *s)
{
    if (s->label_count == s->label_capacity) {
        s->overflow |= 2 * s->label_capacity > CRN_OFFLOAD_LABELS_MAX;
        crn_offload_label *labels = s->overflow ? NULL
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
static void offer(crn_offload_search *s, crn_offload_label *made)
{
    made->key = key_of(s, made);
    made->dominated = false;
    if (made->bound >= s->incumbent || !make_room(s))
        return;
    int32_t *place = &s->table[(made->key * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - CRN_OFFLOAD_TABLE_LOG2)];
    for (int32_t i = *place; i >= 0; i = s->labels[i].next_same) {
        crn_offload_label *other = &s->labels[i];
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

static int64_t work_left(const crn_offload_search *s, const crn_offload_label *at)
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
static int64_t bound_of(const crn_offload_search *s, const crn_offload_label *at)
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
static bool wait_for(const crn_offload_search *s, crn_offload_label *at, bool on_host, int64_t bytes, int64_t *start_ns)
{
    int64_t limit = on_host ? s->machine->host_bytes : s->budget_bytes;
    for (;;) {
        crn_offload_lane_end *first = NULL;
        for (int i = 0; i < CAIRN_LANE_COUNT; i++) {
            crn_offload_lane_end *lane = &at->lanes[i];
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

static void give_back(crn_offload_label *at, bool on_host, int64_t bytes, int64_t busy_ns)
{
    crn_offload_lane_end now = {0}, *lane = &now;
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
static bool start(const crn_offload_search *s, crn_offload_label *at, cairn_lane lane, int64_t start_ns, int64_t ns,
                  bool on_host, int64_t bytes, int64_t *end_ns)
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

static void leave(const crn_offload_search *s, crn_offload_label *at, int32_t l)
{
    at->place[l] = ON_HOST;
    give_back(at, false, saved_bytes(s, at, l), at->busy_ns[l]);
    at->ready_ns[l] = at->busy_ns[l] = 0;
}

static void finish(crn_offload_search *s, crn_offload_label *made, int32_t parent, cairn_op op)
{
    made->parent = parent;
    made->op = op;
    if (!s->by_memory)
        made->bound = crn_max(made->bound, bound_of(s, made));
    offer(s, made);
}

/* Whether backwards or the next forward still read A[l]. */
static bool is_forward_next(const crn_offload_label *at, int32_t l)
{
    return at->done == l;
}

static void forward(crn_offload_search *s, int32_t from, int32_t l, int32_t k)
{
    crn_offload_label made = s->labels[from];
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

static void backward(crn_offload_search *s, int32_t from, int32_t l)
{
    crn_offload_label made = s->labels[from];
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

static void offload(crn_offload_search *s, int32_t from, int32_t l)
{
    crn_offload_label made = s->labels[from];
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

static void prefetch(crn_offload_search *s, int32_t from, int32_t l)
{
    crn_offload_label made = s->labels[from];
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

static void expand(crn_offload_search *s, int32_t from)
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

cairn_status crn_offload_search_begin(crn_offload_search *s, const crn_task *task, int64_t budget_bytes, bool by_memory,
                                      int64_t incumbent, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    *s = (crn_offload_search){.task = task,
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
    s->table = crn_alloc(&s->allocator, CRN_OFFLOAD_TABLE_SIZE, sizeof(*s->table));
    if (!s->labels || !s->table)
        return crn_no_memory(error);
    memset(s->table, 0xff, CRN_OFFLOAD_TABLE_SIZE * sizeof(*s->table));
    return CAIRN_OK;
}

void crn_offload_search_end(crn_offload_search *s)
{
    if (!s->task)
        return;
    crn_free(&s->allocator, s->labels, (size_t)s->label_capacity, sizeof(*s->labels));
    crn_queue_clear(&s->queue);
    crn_free(&s->allocator, s->table, CRN_OFFLOAD_TABLE_SIZE, sizeof(*s->table));
}

cairn_status crn_offload_search_run(crn_offload_search *s, int32_t *goal, cairn_error *error)
{
    crn_offload_label first = {.parent = -1};
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
static cairn_status emit_step(const crn_offload_search *s, const crn_offload_label *at, cairn_builder *builder,
                              cairn_error *error)
{
    const crn_offload_label *before = &s->labels[at->parent];
    CRN_TRY(cairn_builder_add(builder, at->op, error));
    if (at->op.code == CAIRN_OP_PREFETCH)
        CRN_TRY(cairn_builder_add(builder, on_saved(CAIRN_OP_DISCARD, at->op.index), error));
    for (int32_t l = 1; l <= s->n; l++)
        if (at->place[l] == ON_HOST && before->place[l] != ON_HOST)
            CRN_TRY(cairn_builder_add(builder, on_saved(CAIRN_OP_DROP, l), error));
    return CAIRN_OK;
}

cairn_status crn_offload_search_emit(const crn_offload_search *s, int32_t goal, cairn_builder *builder,
                                     cairn_error *error)
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
