#include "support/exhaustive_joint.h"

#include <stdlib.h>
#include <string.h>

enum { STAGES = 4, VALUES = 2 * STAGES + 1, LANES = 3, TABLE = 1 << 18 };

enum { COMPUTE, TO_HOST, TO_DEVICE };

typedef struct copy {
    int8_t option; /* -1 = there is none */
    int64_t ready, busy;
} copy;

/* The release of a copy, or of what a computation had reserved, that is yet to come. */
typedef struct node {
    copy device[VALUES], host[VALUES]; /* a[0..n], A[1..n] */
    int64_t lane[LANES], now;
    int64_t pending[LANES][2]; /* bytes of device and host that come back when the lane ends */
    int64_t used[2];           /* device, host; what is pending included */
    int64_t bound;
    uint64_t key;
    int32_t next;
    uint8_t grad;
    uint8_t saved_before; /* stages whose forward was issued */
    bool beaten;
} node;

typedef struct tree {
    const cairn_chain *chain;
    const cairn_machine *machine;
    int64_t fixed, limit[2];
    test_joint_limits limits;
    int32_t n;
    node *nodes;
    int32_t count, capacity, *table;
    int32_t *heap, heap_count;
    bool gave_up;
} tree;

static int a_of(int32_t l)
{
    return l;
}

static int s_of(const tree *t, int32_t l)
{
    return t->n + l;
}

static int64_t bytes_of(const tree *t, int v, int option)
{
    if (v == 0)
        return t->chain->input_bytes;
    if (v <= t->n)
        return t->chain->stages[v - 1].output_bytes;
    return t->chain->stages[v - t->n - 1].options[option].saved_bytes;
}

static int64_t grad_of(const tree *t, int32_t l)
{
    return l > 0 ? t->chain->stages[l - 1].grad_bytes : t->chain->input_grad_bytes;
}

static int lane_of(const tree *t, int lane)
{
    return lane == TO_DEVICE && t->machine->shared_link ? TO_HOST : lane;
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- the frontier ---- */

static bool before(const tree *t, int32_t a, int32_t b)
{
    const node *x = &t->nodes[a], *y = &t->nodes[b];
    return x->bound != y->bound ? x->bound < y->bound : x->grad != y->grad ? x->grad < y->grad : a > b;
}

static void push(tree *t, int32_t pushed)
{
    int32_t i = t->heap_count++;
    for (; i > 0 && before(t, pushed, t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = pushed;
}

static int32_t pop(tree *t)
{
    int32_t top = t->heap[0], last = t->heap[--t->heap_count], i = 0, child;
    while ((child = 2 * i + 1) < t->heap_count) {
        if (child + 1 < t->heap_count && before(t, t->heap[child + 1], t->heap[child]))
            child++;
        if (!before(t, t->heap[child], last))
            break;
        t->heap[i] = t->heap[child];
        i = child;
    }
    t->heap[i] = last;
    return top;
}

/* ---- dominance ---- */

static int64_t still_pending(const node *x, int64_t from, int tier)
{
    int64_t bytes = 0;
    for (int i = 0; i < LANES; i++)
        bytes += x->lane[i] >= from ? x->pending[i][tier] : 0;
    return bytes;
}

static bool copy_not_later(const copy *a, const copy *b, int64_t now)
{
    return a->ready <= later(b->ready, now) && a->busy <= later(b->busy, now);
}

static bool beats(const tree *t, const node *a, const node *b)
{
    if (a->now > b->now)
        return false;
    for (int i = 0; i < LANES; i++) {
        if (a->lane[i] > later(b->lane[i], b->now))
            return false;
        for (int tier = 0; tier < 2; tier++)
            if (still_pending(a, a->lane[i], tier) > still_pending(b, a->lane[i], tier))
                return false;
    }
    for (int v = 0; v <= 2 * t->n; v++)
        if (!copy_not_later(&a->device[v], &b->device[v], b->now) || !copy_not_later(&a->host[v], &b->host[v], b->now))
            return false;
    int64_t a_end = 0, b_end = 0;
    for (int i = 0; i < LANES; i++) {
        a_end = later(a_end, a->lane[i]);
        b_end = later(b_end, b->lane[i]);
    }
    return a_end <= b_end || a_end <= b->now;
}

static uint64_t key_of(const tree *t, const node *x)
{
    uint64_t key = (uint64_t)x->grad << 4 | x->saved_before;
    for (int v = 1; v <= 2 * t->n; v++)
        key = key * 25 + (uint64_t)(x->device[v].option + 1) * 5 + (uint64_t)(x->host[v].option + 1);
    return key;
}

/* Every stage l <= grad still goes back, and those without a saved set anywhere run forward again. */
static int64_t bound_of(const tree *t, const node *x)
{
    int64_t end = 0, work = 0;
    for (int i = 0; i < LANES; i++)
        end = later(end, x->lane[i]);
    for (int32_t l = 1; l <= x->grad; l++) {
        const cairn_stage *stage = &t->chain->stages[l - 1];
        bool there = x->device[s_of(t, l)].option >= 0 || x->host[s_of(t, l)].option >= 0;
        int64_t least = INT64_MAX;
        for (int32_t k = 0; k < stage->option_count; k++) {
            int64_t ns = stage->options[k].backward_ns + (there ? 0 : stage->options[k].forward_ns);
            least = ns < least ? ns : least;
        }
        work += least;
    }
    return later(end, later(x->lane[COMPUTE], x->now) + work);
}

static void offer(tree *t, node *x)
{
    x->bound = bound_of(t, x);
    x->key = key_of(t, x);
    x->beaten = false;
    if (x->bound >= t->limits.incumbent_ns || t->gave_up)
        return;
    int32_t *place = &t->table[(x->key * UINT64_C(0x9E3779B97F4A7C15)) >> 46];
    for (int32_t i = *place; i >= 0; i = t->nodes[i].next) {
        node *other = &t->nodes[i];
        if (other->key != x->key || other->beaten)
            continue;
        if (beats(t, other, x))
            return;
        other->beaten = beats(t, x, other);
    }
    if (t->count == t->capacity) {
        t->gave_up = true;
        return;
    }
    x->next = *place;
    *place = t->count;
    t->nodes[t->count] = *x;
    push(t, t->count++);
}

/* ---- rules ---- */

static bool exists(const node *x, int v)
{
    return x->device[v].option >= 0 || x->host[v].option >= 0;
}

static bool inputs_are_there(const tree *t, const node *x)
{
    for (int32_t l = 2; l <= x->grad; l++)
        if (exists(x, s_of(t, l)) && !exists(x, a_of(l - 1)) && !exists(x, s_of(t, l - 1)))
            return false;
    return true;
}

/* Starts something on a lane no earlier than since; false when it does not fit. */
static bool begin(const tree *t, node *x, int lane, int64_t since, int64_t ns, int tier, int64_t bytes, int64_t *end)
{
    int at = lane_of(t, lane);
    int64_t start = later(later(x->now, x->lane[at]), since);
    for (;;) {
        int first = -1;
        for (int i = 0; i < LANES; i++)
            if ((x->pending[i][0] > 0 || x->pending[i][1] > 0) && (first < 0 || x->lane[i] < x->lane[first]))
                first = i;
        bool fits = x->used[tier] + bytes <= t->limit[tier];
        if (first < 0 && !fits)
            return false;
        if (first < 0 || (fits && x->lane[first] > start))
            break;
        start = later(start, x->lane[first]);
        for (int i = 0; i < 2; i++) {
            x->used[i] -= x->pending[first][i];
            x->pending[first][i] = 0;
        }
    }
    x->now = start;
    x->lane[at] = *end = start + ns;
    x->used[tier] += bytes;
    return true;
}

static void release(node *x, copy *gone, int tier, int64_t bytes)
{
    int64_t busy = gone->busy;
    *gone = (copy){.option = -1};
    if (busy <= x->now) {
        x->used[tier] -= bytes;
        return;
    }
    for (int i = 0; i < LANES; i++)
        if (x->lane[i] == busy) {
            x->pending[i][tier] += bytes;
            return;
        }
    abort();
}

/* What stage l reads its input from, or -1. */
static int input_of(const tree *t, const node *x, int32_t l)
{
    if (x->device[a_of(l - 1)].option >= 0)
        return a_of(l - 1);
    return l > 1 && x->device[s_of(t, l - 1)].option >= 0 ? s_of(t, l - 1) : -1;
}

static int64_t reserved(int64_t grow, int64_t result, int64_t workspace)
{
    return later(0, later(grow, result + workspace));
}

/* A forward that makes value v with an option, and takes a[l-1] with it where it drops. */
static void forward(tree *t, const node *from, int32_t l, int v, int option, bool drops, int64_t ns, int64_t workspace)
{
    node x = *from;
    int input = drops ? a_of(l - 1) : input_of(t, &x, l);
    if (input < 0 || x.device[input].option < 0 || x.device[v].option >= 0)
        return;
    int64_t result = bytes_of(t, v, option), gone = drops ? bytes_of(t, input, 0) : 0, end;
    int64_t bytes = reserved(result - gone, result, workspace);
    if (!begin(t, &x, COMPUTE, drops ? x.device[input].busy : x.device[input].ready, ns, 0, bytes, &end))
        return;
    x.pending[COMPUTE][0] = bytes - (result - gone);
    x.device[input].busy = later(x.device[input].busy, end);
    if (drops)
        x.device[input] = (copy){.option = -1};
    x.device[v] = (copy){(int8_t)option, end, end};
    x.saved_before |= (uint8_t)(t->chain->stages[l - 1].no_recompute || t->limits.no_recompute ? 1u << (l - 1) : 0);
    if (inputs_are_there(t, &x))
        offer(t, &x);
}

static void forwards(tree *t, const node *x, int32_t l)
{
    const cairn_stage *stage = &t->chain->stages[l - 1];
    bool once = stage->no_recompute || t->limits.no_recompute;
    if (once && (x->saved_before >> (l - 1) & 1))
        return;
    for (int k = 0; k < stage->option_count; k++)
        forward(t, x, l, s_of(t, l), k, false, stage->options[k].forward_ns, stage->options[k].forward_workspace_bytes);
    if (once || l >= x->grad) /* nobody reads a[l] any more */
        return;
    forward(t, x, l, a_of(l), 0, false, stage->forward_only_ns, stage->forward_only_workspace_bytes);
    if (l > 1)
        forward(t, x, l, a_of(l), 0, true, stage->forward_only_ns, stage->forward_only_workspace_bytes);
}

static void backward(tree *t, const node *from)
{
    node x = *from;
    int32_t l = x.grad;
    const cairn_stage *stage = &t->chain->stages[l - 1];
    int saved = s_of(t, l), input = input_of(t, &x, l);
    if (x.device[saved].option < 0 || input < 0)
        return;
    const cairn_stage_option *option = &stage->options[x.device[saved].option];
    int64_t result = grad_of(t, l - 1) + stage->weight_grad_bytes, gone = grad_of(t, l) + option->saved_bytes, end;
    bool takes = l > 1 && input == a_of(l - 1);
    gone += takes ? bytes_of(t, input, 0) : 0;
    int64_t bytes = reserved(result - gone, result, option->backward_workspace_bytes);
    int64_t since = later(x.device[saved].busy, takes ? x.device[input].busy : x.device[input].ready);
    if (!begin(t, &x, COMPUTE, since, option->backward_ns, 0, bytes, &end))
        return;
    x.pending[COMPUTE][0] = bytes - (result - gone);
    x.device[input].busy = later(x.device[input].busy, end);
    x.device[saved] = (copy){.option = -1};
    if (takes)
        x.device[input] = (copy){.option = -1};
    x.grad--;
    offer(t, &x);
}

static void transfers(tree *t, const node *from, int v)
{
    int64_t end;
    node x = *from;
    if (x.device[v].option >= 0 && x.host[v].option < 0) {
        int64_t bytes = bytes_of(t, v, x.device[v].option);
        int64_t ns = cairn_transfer_ns(bytes, t->machine->to_host_bytes_per_s, t->machine->latency_ns);
        if (!begin(t, &x, TO_HOST, x.device[v].ready, ns, 1, bytes, &end))
            return;
        x.device[v].busy = later(x.device[v].busy, end);
        x.host[v] = (copy){x.device[v].option, end, end};
        offer(t, &x);
    } else if (x.host[v].option >= 0 && x.device[v].option < 0) {
        int64_t bytes = bytes_of(t, v, x.host[v].option);
        int64_t ns = cairn_transfer_ns(bytes, t->machine->to_device_bytes_per_s, t->machine->latency_ns);
        if (!begin(t, &x, TO_DEVICE, x.host[v].ready, ns, 0, bytes, &end))
            return;
        x.host[v].busy = later(x.host[v].busy, end);
        x.device[v] = (copy){x.host[v].option, end, end};
        offer(t, &x);
    }
}

static void releases(tree *t, const node *from, int v)
{
    for (int tier = 0; tier < 2; tier++) {
        node x = *from;
        copy *gone = tier == 0 ? &x.device[v] : &x.host[v];
        if (gone->option < 0)
            continue;
        release(&x, gone, tier, bytes_of(t, v, gone->option));
        if (inputs_are_there(t, &x))
            offer(t, &x);
    }
}

static int64_t search(tree *t)
{
    while (t->heap_count > 0 && !t->gave_up) {
        int32_t top = pop(t);
        if (t->nodes[top].beaten)
            continue;
        node x = t->nodes[top];
        if (x.grad == 0)
            return x.bound;
        for (int32_t l = 1; l <= x.grad; l++)
            forwards(t, &x, l);
        backward(t, &x);
        for (int v = 1; v <= 2 * t->n; v++) {
            if (v == t->n || (v <= t->n ? v : v - t->n) > x.grad)
                continue;
            if (!t->limits.no_transfers)
                transfers(t, &x, v);
            releases(t, &x, v);
        }
    }
    return t->gave_up ? -1 : t->limits.incumbent_ns;
}

int64_t test_exhaustive_joint(const cairn_problem *problem, const cairn_machine *machine, int64_t budget_bytes,
                              test_joint_limits limits)
{
    tree t = {.chain = cairn_problem_chain(problem), .machine = machine, .limits = limits};
    node first = {.now = 0};
    t.n = t.chain->stage_count;
    if (t.n > STAGES)
        abort();
    t.limit[0] = budget_bytes;
    t.limit[1] = machine->host_bytes;
    t.capacity = (int32_t)(limits.states_max > 0 ? limits.states_max : 400000);
    t.nodes = malloc((size_t)t.capacity * sizeof(*t.nodes));
    t.heap = malloc((size_t)t.capacity * sizeof(*t.heap));
    t.table = malloc(TABLE * sizeof(*t.table));
    if (!t.nodes || !t.heap || !t.table)
        abort();
    memset(t.table, 0xff, TABLE * sizeof(*t.table));
    for (int v = 0; v < VALUES; v++)
        first.device[v].option = first.host[v].option = -1;
    first.device[0].option = 0;
    first.grad = (uint8_t)t.n;
    first.used[0] = cairn_problem_info_of(problem)->fixed_bytes + t.chain->input_bytes + grad_of(&t, t.n);
    if (first.used[0] <= budget_bytes)
        offer(&t, &first);
    int64_t makespan = search(&t);
    free(t.nodes);
    free(t.heap);
    free(t.table);
    return makespan;
}
