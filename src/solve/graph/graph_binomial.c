#include "solve/graph/graph_binomial.h"

enum { POLL_EVERY = 64 };

/* ---- where checkpoints are best ---- */

/* The number of steps that c slots reverse in r sweeps: C(c + r, c), cut off at limit. */
static int64_t binomial_number(int32_t c, int32_t r, int64_t limit)
{
    int64_t value = 1;
    for (int32_t i = 1; i <= c; i++) {
        value = value * (r + i) / i;
        if (value >= limit)
            return limit;
    }
    return value;
}

/* How far the first checkpoint is best placed when n steps are to be reversed with c slots: a treeverse split. */
static int32_t split(int32_t n, int32_t c)
{
    int32_t r = 1;
    while (binomial_number(c, r, (int64_t)n + 1) < n)
        r++;
    int32_t at = (int32_t)crn_min(n - 1, binomial_number(c, r - 1, n));
    return at < 1 ? 1 : at;
}

/* ---- resident storages ---- */

static void enqueue(crn_binomial *b, int32_t s)
{
    if (s >= b->replan->backward_begin || b->is_queued[s] || crn_always_stays(b->replan->model, s))
        return;
    b->is_queued[s] = true;
    crn_queue_push(&b->resident, (crn_queue_entry){.bound = s});
}

/* Queues the storages that were computed since the last call. */
static void enqueue_new(crn_binomial *b)
{
    const crn_sequence *sequence = &b->replan->sequence;
    for (; b->seen_count < sequence->count; b->seen_count++)
        enqueue(b, b->replan->model->root[sequence->node[b->seen_count]]);
}

static int32_t dequeue(crn_binomial *b)
{
    int32_t s = (int32_t)crn_queue_pop(&b->resident).bound;
    b->is_queued[s] = false;
    return s;
}

/* Drops the storages before candidate `before`, except checkpoints: the backward's segment begins with `before`. */
static void forget(crn_binomial *b, int32_t before)
{
    enqueue_new(b);
    while (before >= 0 && b->resident.count > 0 && b->resident.entries[0].bound < b->candidates[before]) {
        int32_t s = dequeue(b);
        b->replan->present[s] = b->kept[s];
    }
}

/* ---- checkpoints ---- */

static void add_checkpoint(crn_binomial *b, int32_t i)
{
    b->kept[b->candidates[i]] = true;
    b->checkpoints[b->checkpoint_count++] = i;
}

/* Checkpoints after candidate i are checkpoints no longer: the backward has passed them. */
static void release_after(crn_binomial *b, int32_t i)
{
    while (b->checkpoint_count > 0 && b->checkpoints[b->checkpoint_count - 1] > i) {
        int32_t s = b->candidates[b->checkpoints[--b->checkpoint_count]];
        b->kept[s] = false;
        if (b->replan->present[s])
            enqueue(b, s);
    }
}

/* Forgets the sequence before. */
static void reset(crn_binomial *b)
{
    release_after(b, -1);
    while (b->resident.count > 0)
        dequeue(b);
}

static void begin_checkpoints(crn_binomial *b, int32_t slots)
{
    int32_t at = 0;
    while (slots > 0 && b->candidate_count - at > 1) {
        at += split(b->candidate_count - at, slots--);
        add_checkpoint(b, at - 1);
    }
}

/* ---- sweeps ---- */

/* The last candidate that is not after what node v lacks: the segment that the backward enters. -1 = none. */
static int32_t segment_of(const crn_binomial *b, int32_t v)
{
    const crn_graph_model *model = b->replan->model;
    int32_t newest = -1, low = 0, high = b->candidate_count;
    for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++) {
        int32_t s = model->root[model->dep[i]];
        if (!b->replan->present[s] && s > newest)
            newest = s;
    }
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (b->candidates[middle] <= newest)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

/* Computes the candidates after `from` (-1 = the inputs), which is present, to just before `to`, leaving checkpoints. */
static bool sweep(crn_binomial *b, int32_t from, int32_t to, int32_t slots)
{
    int32_t checkpoint = slots > 0 ? from + split(to - from, slots) : to;
    for (int32_t i = from + 1; i < to; i++) {
        int32_t s = b->candidates[i];
        if (!b->replan->present[s] && !crn_replan_require(b->replan, s))
            return false;
        if (i == checkpoint) {
            slots--;
            checkpoint = slots > 0 ? i + split(to - i, slots) : to;
            add_checkpoint(b, i);
        }
    }
    return true;
}

/* Sweeps from the newest checkpoint before the segment. A checkpoint at the segment itself takes no slot. */
static bool sweep_to(crn_binomial *b, int32_t segment, int32_t slots)
{
    release_after(b, segment);
    bool is_checkpoint = b->checkpoint_count > 0 && b->checkpoints[b->checkpoint_count - 1] == segment;
    b->checkpoint_count -= is_checkpoint;
    int32_t from = b->checkpoint_count > 0 ? b->checkpoints[b->checkpoint_count - 1] : -1;
    bool fits = sweep(b, from, segment, slots - b->checkpoint_count);
    if (is_checkpoint)
        add_checkpoint(b, segment);
    forget(b, segment - 1);
    return fits;
}

bool crn_binomial_make(crn_binomial *b, const crn_task *task, int32_t slots)
{
    const crn_graph_model *model = b->replan->model;
    reset(b);
    begin_checkpoints(b, slots);
    bool fits = crn_replan_forward(b->replan, b->kept);
    b->seen_count = b->replan->sequence.count;
    for (int32_t v = b->replan->backward_begin; fits && v < model->node_count; v++) {
        if (v % POLL_EVERY == 0 && crn_should_stop(task, NULL))
            return false;
        int32_t segment = segment_of(b, v);
        fits = (segment < 0 || sweep_to(b, segment, slots)) && crn_replan_require(b->replan, v);
    }
    return fits;
}

/* ---- sessions ---- */

cairn_status crn_binomial_new(crn_replan *replan, const int32_t *candidates, int32_t candidate_count, crn_arena *arena,
                              crn_binomial *binomial, cairn_error *error)
{
    size_t n = (size_t)replan->model->node_count;
    *binomial = (crn_binomial){.replan = replan, .candidates = candidates, .candidate_count = candidate_count};
    crn_queue_init(&binomial->resident, arena->allocator);
    binomial->kept = crn_arena_alloc_zero(arena, n, sizeof(*binomial->kept));
    binomial->is_queued = crn_arena_alloc_zero(arena, n, sizeof(*binomial->is_queued));
    bool fits = binomial->kept && binomial->is_queued && crn_queue_reserve(&binomial->resident, replan->backward_begin);
    return fits ? CAIRN_OK : crn_no_memory(error);
}

void crn_binomial_clear(crn_binomial *binomial)
{
    if (binomial->resident.entries)
        crn_queue_clear(&binomial->resident);
}
