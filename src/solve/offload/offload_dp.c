/*
 * offload-dp: which saved sets are offloaded, by a dynamic program over transfers that may be interrupted.
 *
 * Problem   A chain and its link to host memory; every stage saves once, with one of its options, and nothing is computed
 *           again. Each A[l] is offloaded whole or not at all. Least time.
 * Program   Beaumont, Eyraud-Dubois, Shilova: Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training, 2019,
 *           algorithm 1, with its misprints corrected (docs/explanation/solvers/offload.md). Transfers may be
 *           interrupted there, and memory comes back piece by piece. Then values leave in the order in which they are
 *           made and return in the opposite one, and what the future needs to know of the stages 1..l is
 *               kept   bytes of those that stay          out    bytes that still have to leave; negative: how long the
 *               last   bytes of A[l]                            link has been idle, in bytes that it could have sent
 *               host   bytes of those that go            back   the same for the return, seen backwards in time
 *           together with the time lost so far. Stage l + 1 decides whether A[l] goes: forward l + 1 waits until as much
 *           has left as it needs, and backward l + 1, seen backwards, until as much has come.
 * States    Exact, no slots: a state that is nowhere better than another one is dropped (dominance), so rounding never
 *           accumulates over long chains. At most STATES_MAX / (number of options) are kept for a stage, with a time
 *           limit as few that the run ends in time, spread over the kept bytes; only beyond that is the program no longer
 *           exact for its relaxation.
 * Answer    The decisions of the FINALS best final states become no-wait, ordered schedules with whole, uninterrupted
 *           transfers (transfer.h); the simulator's time decides between them.
 * Host      Sets that the host cannot hold are left out; so is nothing that needs more device memory than there is.
 * Optimal   For the relaxation; not for whole transfers (strongly NP-hard). offload-exact is, on small chains.
 * Cost      O(n S^2) for S states, a few hundred at most; memory O(n S).
 */
#include <stdlib.h>
#include <string.h>

#include "solve/offload/offload_least.h"
#include "solve/offload/offload_link.h"

enum { STATES_MAX = 512, STATES_MIN = 64, FINALS = 24, BUCKET = 4 };

typedef struct state {
    int64_t kept, last, out, back, host, ns;
    int32_t parent;
    uint16_t option; /* of the stage */
    bool goes;       /* A of the stage before is offloaded */
} state;

typedef struct trace {
    int32_t parent;
    uint16_t option;
    bool goes;
} trace;

typedef struct program {
    const crn_task *task; /* of the call under way */
    const cairn_chain *chain;
    const cairn_machine *machine;
    int32_t n, states_max, kept_max; /* states of a stage; fewer are kept where time is short */
    int64_t always_bytes;            /* fixed_bytes and a[0] */
    int64_t budget_bytes;
    state *now, *next;
    int32_t now_count, next_count, next_capacity;
    trace *traces; /* states_max of each stage */
    crn_arena arena;
} program;

typedef struct dp {
    crn_offload_least least;
    program program;
    int32_t *option;
    bool *goes, *best;
    crn_arena arena;
} dp;

/* ---- bytes and times ---- */

static int64_t limited_sum(int64_t a, int64_t b)
{
    int64_t sum;
    if (!crn_add(a, b, &sum))
        return a > 0 ? CRN_LINK_LIMIT : -CRN_LINK_LIMIT;
    return crn_max(-CRN_LINK_LIMIT, crn_min(CRN_LINK_LIMIT, sum));
}

static int64_t positive(int64_t bytes)
{
    return crn_max(0, bytes);
}

/* ---- one stage ---- */

static int64_t base_bytes(const program *p, int32_t l)
{
    int64_t bytes = l > 0 ? p->chain->stages[l - 1].grad_bytes : p->chain->input_grad_bytes;
    return p->always_bytes + bytes;
}

/* Waits of a phase: over bytes must have gone of what is on its way; false when that is not enough. */
static bool wait_for(int64_t used_bytes, int64_t pending, int64_t budget_bytes, int64_t rate, int64_t *ns)
{
    int64_t over = limited_sum(limited_sum(used_bytes, positive(pending)), -budget_bytes);
    *ns = crn_link_ns(over, rate);
    return over <= positive(pending);
}

/* What is on its way after the link was free for ns, when A[l-1], of so many bytes, joins it or not. */
static int64_t forward_pending(const program *p, int64_t pending, int64_t joins, int64_t ns)
{
    int64_t rate = p->machine->to_host_bytes_per_s;
    if (joins > 0)
        pending = limited_sum(limited_sum(positive(pending), joins), crn_link_bytes(p->machine->latency_ns, rate));
    return limited_sum(pending, -crn_link_bytes(ns, rate));
}

static int64_t backward_pending(const program *p, int64_t pending, int64_t joins, int64_t ns)
{
    int64_t rate = p->machine->to_device_bytes_per_s, left = limited_sum(pending, -crn_link_bytes(ns, rate));
    if (joins == 0)
        return left;
    return limited_sum(limited_sum(positive(left), joins), crn_link_bytes(p->machine->latency_ns, rate));
}

/* Appends the state in which stage l runs with option k after `from`; nothing where that does not fit. */
static void extend(program *p, int32_t parent, int32_t l, int32_t k, bool goes, int64_t grads_bytes)
{
    const state *from = &p->now[parent];
    const cairn_stage_option *option = &p->chain->stages[l - 1].options[k];
    int64_t joins = goes ? from->last : 0, wait_forward_ns, wait_back_ns;
    int64_t made = positive(base_bytes(p, l - 1) - p->always_bytes + p->chain->stages[l - 1].weight_grad_bytes +
                            option->backward_workspace_bytes);
    int64_t resident = from->kept + from->last + option->saved_bytes;
    if (!wait_for(base_bytes(p, p->n) + resident + positive(option->forward_workspace_bytes), from->out,
                  p->budget_bytes, p->machine->to_host_bytes_per_s, &wait_forward_ns) ||
        !wait_for(base_bytes(p, l) + grads_bytes + resident + made, from->back, p->budget_bytes,
                  p->machine->to_device_bytes_per_s, &wait_back_ns) ||
        limited_sum(from->host, joins) > p->machine->host_bytes)
        return;
    int64_t forward_ns = limited_sum(wait_forward_ns, option->forward_ns);
    int64_t backward_ns = limited_sum(wait_back_ns, option->backward_ns);
    state *to = &p->next[p->next_count];
    *to = (state){.kept = from->kept + (goes ? 0 : from->last),
                  .last = option->saved_bytes,
                  .out = forward_pending(p, from->out, joins, forward_ns),
                  .back = backward_pending(p, from->back, joins, backward_ns),
                  .host = from->host + joins,
                  .ns = limited_sum(from->ns, limited_sum(forward_ns, backward_ns)),
                  .parent = parent,
                  .option = (uint16_t)k,
                  .goes = goes};
    p->next_count += to->ns < CRN_LINK_LIMIT;
}

/* ---- pruning ---- */

/* Negative where the first of two states comes before the second, by the first number in which they differ. */
static int compare_states(const void *left, const void *right)
{
    const state *a = left, *b = right;
    const int64_t of_a[] = {a->ns, a->kept, a->out, a->back, a->last, a->host, a->goes, a->option, a->parent};
    const int64_t of_b[] = {b->ns, b->kept, b->out, b->back, b->last, b->host, b->goes, b->option, b->parent};
    for (size_t i = 0; i < sizeof(of_a) / sizeof(of_a[0]); i++)
        if (of_a[i] != of_b[i])
            return of_a[i] < of_b[i] ? -1 : 1;
    return 0;
}

static int compare_kept(const void *left, const void *right)
{
    const state *a = left, *b = right;
    if (a->kept != b->kept)
        return a->kept < b->kept ? -1 : 1;
    return compare_states(left, right);
}

/* Host memory is no reason to keep a state where it can never run out. */
static bool dominates(const state *a, const state *b, bool host_is_scarce)
{
    return a->kept <= b->kept && a->out <= b->out && a->back <= b->back && a->last <= b->last &&
           (!host_is_scarce || a->host <= b->host);
}

static void drop_dominated(program *p, bool host_is_scarce)
{
    int32_t count = 0;
    qsort(p->next, (size_t)p->next_count, sizeof(*p->next), compare_states);
    for (int32_t i = 0; i < p->next_count; i++) {
        int32_t j = 0;
        while (j < count && !dominates(&p->next[j], &p->next[i], host_is_scarce))
            j++;
        if (j == count)
            p->next[count++] = p->next[i];
    }
    p->next_count = count;
}

/* The time lost so far, and what is on its way as if it all had to be waited for. */
static int64_t debt_ns(const program *p, const state *s)
{
    return limited_sum(s->ns, limited_sum(crn_link_ns(s->out, p->machine->to_host_bytes_per_s),
                                          crn_link_ns(s->back, p->machine->to_device_bytes_per_s)));
}

/* The best few of each of equally many ranges of kept bytes, and the one that keeps least. */
static void thin_out(program *p)
{
    int32_t buckets = p->kept_max / BUCKET, count = 1;
    qsort(p->next, (size_t)p->next_count, sizeof(*p->next), compare_kept);
    for (int32_t b = 0; b < buckets; b++) {
        int32_t from = (int32_t)crn_max(1, (int64_t)p->next_count * b / buckets); /* 0 stays */
        int32_t to = (int32_t)((int64_t)p->next_count * (b + 1) / buckets);
        for (int32_t place = from; place < to && place < from + BUCKET; place++) {
            int32_t least = place;
            for (int32_t i = place + 1; i < to; i++)
                least = debt_ns(p, &p->next[i]) < debt_ns(p, &p->next[least]) ? i : least;
            state moved = p->next[least];
            p->next[least] = p->next[place];
            p->next[place] = moved;
            p->next[count++] = moved;
        }
    }
    p->next_count = (int32_t)crn_min(count, p->kept_max);
}

static void take_stage(program *p, int32_t l)
{
    state *old = p->now;
    for (int32_t i = 0; i < p->next_count; i++)
        p->traces[(ptrdiff_t)l * p->states_max + i] = (trace){p->next[i].parent, p->next[i].option, p->next[i].goes};
    p->now = p->next;
    p->now_count = p->next_count;
    p->next = old;
}

/* ---- the program ---- */

static bool may_go(const program *p, int32_t l)
{
    return l >= 1 && l <= p->n - 2;
}

static int32_t most_options(const cairn_chain *chain)
{
    int32_t most = 1;
    for (int32_t l = 1; l <= chain->stage_count; l++)
        most = (int32_t)crn_max(most, chain->stages[l - 1].option_count);
    return most;
}

static int32_t states_of(const cairn_chain *chain)
{
    return (int32_t)crn_max(STATES_MIN, STATES_MAX / most_options(chain));
}

static cairn_status program_init(program *p, const crn_task *task, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int32_t states = states_of(chain), options = most_options(chain);
    *p = (program){.chain = chain,
                   .machine = task->machine,
                   .n = chain->stage_count,
                   .states_max = states,
                   .next_capacity = 2 * options * states,
                   .always_bytes = cairn_problem_info_of(task->problem)->fixed_bytes + chain->input_bytes};
    crn_arena_init(&p->arena, crn_allocator(task->env));
    p->now = crn_arena_alloc(&p->arena, (size_t)p->next_capacity, sizeof(*p->now));
    p->next = crn_arena_alloc(&p->arena, (size_t)p->next_capacity, sizeof(*p->next));
    p->traces = crn_arena_alloc(&p->arena, ((size_t)p->n + 1) * (size_t)states, sizeof(*p->traces));
    return p->now && p->next && p->traces ? CAIRN_OK : crn_no_memory(error);
}

/* Measured where no state dominates another: a third of a nanosecond for each pair. */
static int64_t work_of(const cairn_chain *chain, int64_t states)
{
    int64_t made = 2 * states * most_options(chain);
    return chain->stage_count * made * made / 3;
}

/* How many states of a stage may be kept so that the run ends in three quarters of the time that is left. */
static int32_t affordable_states(const program *p)
{
    int64_t deadline_ns = p->task->deadline_ns, states = p->states_max;
    if (deadline_ns == CAIRN_NONE)
        return p->states_max;
    const int64_t time_ns = crn_max(0, deadline_ns - crn_clock_ns()) / 4 * 3;
    while (states > STATES_MIN && work_of(p->chain, states) > time_ns)
        states -= crn_max(1, states / 16);
    return (int32_t)states;
}

static bool host_is_scarce(const program *p)
{
    int64_t bytes = 0;
    for (int32_t l = 1; l <= p->n - 2; l++) {
        int64_t most = 0;
        for (int32_t k = 0; k < p->chain->stages[l - 1].option_count; k++)
            most = crn_max(most, p->chain->stages[l - 1].options[k].saved_bytes);
        bytes = limited_sum(bytes, most);
    }
    return bytes > p->machine->host_bytes;
}

/* Runs over all stages; now_count is 0 where nothing fits. */
static cairn_status run(program *p, int64_t budget_bytes, cairn_error *error)
{
    bool scarce = host_is_scarce(p);
    int64_t grads_bytes = 0; /* of the weights of later stages */
    for (int32_t l = 2; l <= p->n; l++)
        grads_bytes += p->chain->stages[l - 1].weight_grad_bytes;
    p->budget_bytes = budget_bytes;
    p->kept_max = affordable_states(p);
    p->now[0] = (state){.parent = -1};
    p->now_count = 1;
    for (int32_t l = 1; l <= p->n && p->now_count > 0; l++) {
        p->next_count = 0;
        for (int32_t i = 0; i < p->now_count; i++)
            for (int32_t k = 0; k < p->chain->stages[l - 1].option_count; k++) {
                extend(p, i, l, k, false, grads_bytes);
                if (may_go(p, l - 1) && p->now[i].last > 0)
                    extend(p, i, l, k, true, grads_bytes);
            }
        drop_dominated(p, scarce);
        if (p->next_count > p->kept_max)
            thin_out(p);
        take_stage(p, l);
        grads_bytes -= l < p->n ? p->chain->stages[l].weight_grad_bytes : 0;
        if (crn_should_stop(p->task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped");
    }
    return CAIRN_OK;
}

/* ---- final states ---- */

/* A lower bound on the time between the phases: equations 9 and 10, but for the operations that memory holds up. */
static int64_t between_ns(const program *p, const state *s)
{
    int64_t out_ns = crn_link_ns(s->out, p->machine->to_host_bytes_per_s);
    int64_t back_ns = crn_link_ns(s->back, p->machine->to_device_bytes_per_s);
    if (s->out > 0 && s->back > 0)
        return p->machine->shared_link ? limited_sum(out_ns, back_ns) : crn_max(out_ns, back_ns);
    if (s->out > 0)
        return positive(out_ns - crn_link_ns(-s->back, p->machine->to_device_bytes_per_s));
    return s->back > 0 ? positive(back_ns - crn_link_ns(-s->out, p->machine->to_host_bytes_per_s)) : 0;
}

static void follow(const program *p, int32_t final, int32_t *option, bool *goes)
{
    int32_t at = final;
    goes[0] = goes[p->n] = false;
    for (int32_t l = p->n; l >= 1; l--) {
        const trace *t = &p->traces[(ptrdiff_t)l * p->states_max + at];
        option[l] = t->option;
        goes[l - 1] = t->goes;
        at = t->parent;
    }
}

/* The best remaining final state, or -1; it is marked as taken. */
static int32_t next_final(program *p)
{
    int32_t best = -1;
    int64_t best_ns = INT64_MAX;
    for (int32_t i = 0; i < p->now_count; i++) {
        int64_t ns = p->now[i].parent < 0 ? INT64_MAX : limited_sum(p->now[i].ns, between_ns(p, &p->now[i]));
        if (ns < best_ns) {
            best = i;
            best_ns = ns;
        }
    }
    if (best >= 0)
        p->now[best].parent = -1;
    return best;
}

/* ---- the solver ---- */

static void dp_close(const crn_task *task, void *session)
{
    dp *s = session;
    (void)task;
    crn_arena_clear(&s->program.arena);
    crn_offload_least_clear(&s->least);
    crn_arena_clear(&s->arena);
}

static cairn_status dp_fill(dp *s, const crn_task *task, size_t count, cairn_error *error)
{
    s->option = crn_arena_alloc_zero(&s->arena, count, sizeof(*s->option));
    s->goes = crn_arena_alloc_zero(&s->arena, count, sizeof(bool));
    s->best = crn_arena_alloc_zero(&s->arena, count, sizeof(bool));
    if (!s->option || !s->goes || !s->best)
        return crn_no_memory(error);
    CRN_TRY(crn_offload_least_find(&s->least, task, error));
    return program_init(&s->program, task, error);
}

static cairn_status dp_open(const crn_task *task, void **session, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    dp *s = crn_arena_alloc_zero(&arena, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->arena = arena;
    return dp_fill(s, task, (size_t)cairn_problem_chain(task->problem)->stage_count + 1, error);
}

static cairn_status dp_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    const dp *s = session;
    (void)task;
    (void)error;
    least->bytes = s->least.need_bytes;
    return CAIRN_OK;
}

/* Schedules the decisions of a final state. The plan that was the best before is freed when a better one is found. */
static cairn_status try_final(dp *s, int32_t final, int64_t budget_bytes, crn_offload_plan **owned,
                              crn_offload_best *best, cairn_error *error)
{
    crn_offload_plan *plan;
    follow(&s->program, final, s->option, s->goes);
    CRN_TRY(crn_offload_plan_new(s->program.task, s->option, &plan, error));
    cairn_status status = crn_offload_try(plan, s->goes, budget_bytes, best, error);
    if (best->plan != plan) {
        crn_offload_plan_free(plan);
        return status;
    }
    crn_offload_plan_free(*owned);
    *owned = plan;
    return status;
}

static cairn_status try_finals(dp *s, int64_t budget_bytes, crn_offload_plan **owned, crn_offload_best *best,
                               cairn_error *error)
{
    CRN_TRY(run(&s->program, budget_bytes, error));
    for (int i = 0; i < FINALS; i++) {
        int32_t final = next_final(&s->program);
        if (final < 0)
            break;
        CRN_TRY(try_final(s, final, budget_bytes, owned, best, error));
    }
    if (best->makespan_ns < INT64_MAX)
        return CAIRN_OK;
    return crn_offload_try(s->least.plan, s->least.goes, budget_bytes, best, error);
}

static cairn_status dp_solve(const crn_task *task, void *session, int64_t budget_bytes, crn_answer *answer,
                             cairn_error *error)
{
    dp *s = session;
    int64_t budget = crn_limit_of(budget_bytes);
    crn_offload_best best = {.makespan_ns = INT64_MAX, .goes = s->best};
    crn_offload_plan *owned = NULL;
    s->program.task = task;
    if (budget < s->least.need_bytes)
        return CAIRN_OK;
    cairn_status status = try_finals(s, budget, &owned, &best, error);
    if (status == CAIRN_CANCELLED && best.makespan_ns < INT64_MAX) {
        answer->stopped_early = true;
        status = CAIRN_OK;
    }
    answer->stopped_early |= s->program.kept_max < s->program.states_max;
    if (status == CAIRN_OK)
        status = crn_offload_answer(&best, budget, answer, error);
    crn_offload_plan_free(owned);
    return status;
}

static int64_t dp_memory(const crn_task *task)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t states = states_of(chain), options = most_options(chain);
    return 4 * options * states * (int64_t)sizeof(state) +
           ((int64_t)chain->stage_count + 1) * states * (int64_t)sizeof(trace) + crn_offload_least_memory(task) +
           2 * crn_offload_plan_memory(task);
}

static int64_t dp_work(const crn_task *task)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    return work_of(chain, states_of(chain));
}

const crn_solver crn_offload_dp_solver = {
    .info = {.name = "offload-dp",
             .takes_chains = true,
             .needs_machine = true,
             .available = true,
             .optimal_in = "",
             .summary =
                 "dynamic program over what is offloaded, exact states with dominance; whole transfers in the answer",
             .source = "Beaumont, Eyraud-Dubois, Shilova 2019, section 5",
             .cost = "O(n S^2), S at most 512 states"},
    .memory = dp_memory,
    .work = dp_work,
    .open = dp_open,
    .close = dp_close,
    .least = dp_least,
    .solve = dp_solve,
};
