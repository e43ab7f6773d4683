/*
 * Sequences that fetch storages from the host: their levels against a slow account of what is on the device when, and what
 * the search over them finds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "solve/graph/graph_improve.h"
#include "solve/graph/link_times.h"
#include "support/ask.h"
#include "support/faulty_allocator.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { NODES = 24, EVENTS = 4 * NODES };

static const crn_settings settings = {.seed = 1};

/* A graph, a link, and room for sequences of it. */
typedef struct fixture {
    uint64_t seed;
    cairn_problem *problem;
    crn_graph_model *model;
    crn_graph_link link;
    int64_t price_ns[NODES], out_ns[NODES], back_ns[NODES];
    crn_sequence sequence;
    crn_sequence_eval eval;
    test_random random;
} fixture;

#define check(f, condition)                                                       \
    do {                                                                          \
        if (!(condition))                                                         \
            fail_msg("seed %llu: %s", (unsigned long long)(f)->seed, #condition); \
    } while (0)

static fixture set_up(uint64_t seed, bool aliases)
{
    static const cairn_env plain;
    fixture f = {.seed = seed, .random = test_random_seeded(seed)};
    test_graph_shape shape = {.nodes_min = 6,
                              .nodes_max = NODES,
                              .training = seed % 2 == 0,
                              .workspaces = seed % 3 == 0,
                              .aliases = aliases,
                              .keep = true,
                              .no_recompute = seed % 4 == 0,
                              .fixed = true};
    f.problem = test_random_graph(&f.random, &shape);
    const crn_task task = {.env = &plain, .problem = f.problem, .settings = &settings, .deadline_ns = CAIRN_NONE};
    assert_int_equal(crn_graph_model_new(&task, &f.model, NULL), CAIRN_OK);
    return f;
}

/* The link's times; what is kept cannot be fetched, nor can an alias. */
static void make_link(fixture *f)
{
    int64_t slowest = test_random_between(&f->random, 1, 40);
    for (int32_t v = 0; v < f->model->node_count; v++) {
        bool goes = f->model->root[v] == v && !f->model->keep[v] && test_random_chance(&f->random, 88);
        f->price_ns[v] = goes ? test_random_between(&f->random, 0, 11) : CAIRN_NONE;
        f->out_ns[v] = test_random_between(&f->random, 0, slowest - 1);
        f->back_ns[v] = test_random_between(&f->random, 0, slowest - 1);
    }
    f->link = (crn_graph_link){f->price_ns, f->out_ns, f->back_ns, INT64_MAX};
    if (f->seed % 5 == 0)
        f->link.host_bytes = test_random_between(&f->random, 0, 39);
    f->model->link = &f->link;
    assert_true(crn_sequence_new(&f->model->arena, EVENTS, &f->sequence));
    assert_int_equal(crn_sequence_eval_new(f->model, &f->model->arena, EVENTS, &f->eval, NULL), CAIRN_OK);
}

static void tear_down(fixture *f)
{
    crn_graph_model_free(f->model);
    cairn_problem_free(f->problem);
}

static int32_t node_of(const fixture *f, int32_t e)
{
    return f->sequence.node[e] % f->model->node_count;
}

static bool fetches(const fixture *f, int32_t e)
{
    return f->sequence.node[e] >= f->model->node_count;
}

/* First computations in order; in between, earlier nodes again, some of them from the host. */
static void draw_sequence(fixture *f)
{
    int32_t n = f->model->node_count, count = 0;
    for (int32_t v = 0; v < n; v++) {
        for (int64_t again = v > 0 ? test_random_between(&f->random, 0, 3) : 0; again > 0; again--) {
            int32_t other = (int32_t)test_random_between(&f->random, 0, v - 1);
            bool fetch = f->price_ns[other] != CAIRN_NONE && test_random_chance(&f->random, 67);
            if (fetch || (f->model->root[other] == other && !f->model->once[other]))
                f->sequence.node[count++] = fetch ? other + n : other;
        }
        f->sequence.node[count++] = v;
    }
    f->sequence.count = count;
}

/* ---- the slow account: of each event, the instance that it makes ---- */

typedef struct account {
    int32_t previous[EVENTS], first[EVENTS], last[EVENTS]; /* readers; -1 = none */
    int32_t begin[EVENTS];                                 /* from which event on an instance takes memory */
    int64_t clock_ns[EVENTS + 1];
    int64_t level[EVENTS], extra[EVENTS];
    int32_t newest[NODES], handle[NODES]; /* of a storage and of a node: its newest instance */
} account;

/* Event e reads a node: the newest instance, and what makes an alias of it that is not there yet. */
static void read_node(const fixture *f, account *a, int32_t v, int32_t e)
{
    int32_t instance = a->newest[f->model->root[v]];
    a->last[instance] = e;
    if (a->first[instance] < 0)
        a->first[instance] = e;
    if (a->handle[v] == instance)
        return;
    for (int32_t i = f->model->dep_begin[v]; i < f->model->dep_begin[v + 1]; i++)
        read_node(f, a, f->model->dep[i], e);
    a->handle[v] = instance;
    a->extra[e] = a->extra[e] > f->model->extra[v] ? a->extra[e] : f->model->extra[v];
}

static void find_readers(const fixture *f, account *a)
{
    memset(a->newest, 0xff, sizeof(a->newest));
    memset(a->handle, 0xff, sizeof(a->handle));
    a->clock_ns[0] = 0;
    for (int32_t e = 0; e < f->sequence.count; e++) {
        int32_t v = node_of(f, e);
        bool is_root = f->model->root[v] == v;
        a->extra[e] = fetches(f, e) ? 0 : f->model->extra[v];
        for (int32_t i = f->model->dep_begin[v]; !fetches(f, e) && i < f->model->dep_begin[v + 1]; i++)
            read_node(f, a, f->model->dep[i], e);
        a->previous[e] = is_root ? a->newest[v] : -1;
        a->first[e] = -1;
        a->begin[e] = e;
        a->last[e] = is_root ? e : -1;
        if (is_root)
            a->newest[v] = e;
        a->handle[v] = a->newest[f->model->root[v]];
        a->clock_ns[e + 1] = a->clock_ns[e] + (fetches(f, e) ? 0 : f->model->cost[v]);
    }
    for (int32_t v = 0; v < f->model->node_count; v++)
        if (f->model->keep[v])
            a->last[a->newest[v]] = f->sequence.count - 1;
}

/* What is fetched later stays until it is on the host: one after the other, by their last readers. */
static void offload(const fixture *f, account *a)
{
    int32_t readers[EVENTS];
    int64_t done_ns = 0;
    memcpy(readers, a->last, sizeof(readers));
    for (int32_t u = 0; u < f->sequence.count; u++)
        for (int32_t e = 0; e < f->sequence.count; e++) {
            if (!fetches(f, e) || readers[a->previous[e]] != u || fetches(f, a->previous[e]))
                continue;
            done_ns = (done_ns > a->clock_ns[u + 1] ? done_ns : a->clock_ns[u + 1]) + f->out_ns[node_of(f, e)];
            while (a->last[a->previous[e]] + 1 < e && a->clock_ns[a->last[a->previous[e]] + 1] < done_ns)
                a->last[a->previous[e]]++;
        }
}

/* They come back one after the other, as late as their first readers allow. */
static void fetch(const fixture *f, account *a)
{
    int64_t free_ns = INT64_MAX;
    for (int32_t q = f->sequence.count - 1; q >= 0; q--)
        for (int32_t e = f->sequence.count - 1; e >= 0; e--) {
            if (!fetches(f, e) || (a->first[e] < 0 ? e : a->first[e]) != q)
                continue;
            free_ns = (free_ns < a->clock_ns[q] ? free_ns : a->clock_ns[q]) - f->back_ns[node_of(f, e)];
            a->begin[e] = a->last[a->previous[e]] + 1;
            while (a->begin[e] + 1 < q && a->clock_ns[a->begin[e] + 1] <= free_ns)
                a->begin[e]++;
        }
}

static void measure(const fixture *f, account *a)
{
    find_readers(f, a);
    offload(f, a);
    fetch(f, a);
    for (int32_t e = 0; e < f->sequence.count; e++) {
        a->level[e] = f->model->fixed_bytes + a->extra[e];
        for (int32_t i = 0; i < f->sequence.count; i++)
            if (a->begin[i] <= e && e <= a->last[i])
                a->level[e] += f->model->bytes[node_of(f, i)];
    }
}

static void levels_are_those_of_the_slow_account(void **state)
{
    int64_t fetched = 0, differ = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(3000); seed++) {
        fixture f = set_up(seed, seed % 3 > 0);
        account a;
        make_link(&f);
        draw_sequence(&f);
        measure(&f, &a);
        crn_sequence_judge(&f.eval, &f.sequence);
        for (int32_t e = 0; e < f.sequence.count; e++) {
            check(&f, f.eval.level[e] == a.level[e]);
            check(&f, f.eval.last[e] == a.last[e] && f.eval.previous[e] == a.previous[e]);
            fetched += fetches(&f, e);
            differ += fetches(&f, e) && a.begin[e] != e;
        }
        tear_down(&f);
    }
    assert_true(fetched > 0 && differ > 0);
}

/* Transfers may take as long as a number can say. */
static void endless_transfers_are_placed(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(100); seed++) {
        fixture f = set_up(seed, false);
        int32_t from, to;
        make_link(&f);
        for (int32_t v = 0; v < f.model->node_count; v++)
            f.out_ns[v] = f.back_ns[v] = INT64_MAX - (int64_t)(seed % 3);
        draw_sequence(&f);
        crn_sequence_judge(&f.eval, &f.sequence);
        for (int32_t e = 0; e < f.sequence.count; e++)
            check(&f, f.eval.level[e] >= f.model->fixed_bytes);
        for (int32_t s = 0; s < f.model->node_count; s++)
            check(&f, !crn_link_times_away(&f.eval, s, s, f.sequence.count - 1, &from, &to));
        tear_down(&f);
    }
}

/* What an instance would leave, and come back for, where no other transfer is in the way. */
static void a_storage_is_away_while_neither_transfer_runs(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(1000); seed++) {
        fixture f = set_up(seed, false);
        make_link(&f);
        f.link.host_bytes = INT64_MAX;
        crn_sequence_store_all(f.model, &f.sequence);
        crn_sequence_judge(&f.eval, &f.sequence);
        int32_t s = (int32_t)test_random_between(&f.random, 0, f.model->node_count - 1), from, to;
        int32_t last = s, next = f.model->node_count - 1;
        int64_t clock_ns[NODES + 1] = {0};
        for (int32_t v = 0; v < f.model->node_count; v++)
            clock_ns[v + 1] = clock_ns[v] + f.model->cost[v];
        if (last < next && crn_link_times_away(&f.eval, s, last, next, &from, &to)) {
            check(&f, f.price_ns[s] != CAIRN_NONE && last < from && from < to && to < next);
            check(&f, clock_ns[from] >= clock_ns[last + 1] + f.out_ns[s]);
            check(&f, clock_ns[to] <= clock_ns[next] - f.back_ns[s]);
            check(&f, from == last + 1 || clock_ns[from - 1] < clock_ns[last + 1] + f.out_ns[s]);
        }
        tear_down(&f);
    }
}

/* ---- the search ---- */

static void check_found(const fixture *f, const crn_sequence *found, int64_t cost)
{
    int32_t n = f->model->node_count, times[NODES] = {0};
    for (int32_t e = 0; e < found->count; e++) {
        int32_t v = crn_event_node(f->model, found->node[e]);
        bool is_fetch = crn_event_is_fetch(f->model, found->node[e]);
        check(f, !is_fetch || (f->price_ns[v] != CAIRN_NONE && times[v] > 0));
        check(f, is_fetch || !f->model->once[v] || times[v] == 0);
        cost -= is_fetch ? f->price_ns[v] : f->model->cost[v];
        times[v] += !is_fetch;
    }
    check(f, cost == 0);
    for (int32_t v = 0; v < n; v++)
        check(f, times[v] > 0);
}

static void the_search_fetches_what_it_may(void **state)
{
    static const crn_improver_leeway leeway = {500, 100, 0};
    const uint64_t rounds = TEST_ROUNDS(600);
    uint64_t found = 0, fetched = 0;
    (void)state;
    for (uint64_t seed = 0; seed < rounds; seed++) {
        fixture f = set_up(seed, false);
        static const cairn_env plain;
        const crn_task task = {.env = &plain, .problem = f.problem, .settings = &settings, .deadline_ns = CAIRN_NONE};
        crn_improver_stop stop = {.task = &task};
        crn_improver *improver;
        int64_t cost;
        make_link(&f);
        crn_sequence_store_all(f.model, &f.sequence);
        crn_sequence_judge(&f.eval, &f.sequence);
        int64_t budget = f.eval.peak - f.eval.peak * (int64_t)(seed % 6) / 12;
        assert_int_equal(crn_improver_new(f.model, EVENTS, seed, leeway, &improver, NULL), CAIRN_OK);
        crn_improver_heed(improver, &stop, true);
        if (crn_improver_begin(improver, &f.sequence, budget)) {
            crn_improver_run(improver, 40);
            const crn_sequence *best = crn_improver_best(improver, &cost);
            check_found(&f, best, cost);
            crn_sequence_judge(&f.eval, best);
            check(&f, f.eval.peak <= budget && f.eval.cost == cost);
            found++;
            for (int32_t e = 0; e < best->count; e++)
                fetched += crn_event_is_fetch(f.model, best->node[e]);
        }
        crn_improver_free(improver);
        tear_down(&f);
    }
    assert_true(found > 0);
    if (rounds > 70) /* a share needs many of them */
        assert_true(found > rounds / 3 && fetched > 0);
}

/* ---- joint-graph ---- */

static cairn_problem *training_graph(uint64_t seed, int32_t nodes)
{
    test_random random = test_random_seeded(seed);
    test_graph_shape shape = {.nodes_min = nodes,
                              .nodes_max = nodes,
                              .deps_max = 2,
                              .bytes_max = 100000,
                              .ns_max = 20000,
                              .positive = true,
                              .training = true};
    return test_random_graph(&random, &shape);
}

static int64_t makespan_of(const cairn_problem *problem, const char *solver, int64_t budget, const char *settings_text)
{
    cairn_info info = test_solve(problem, test_options(solver, budget, settings_text), NULL);
    int64_t makespan_ns = info.makespan_ns;
    cairn_info_clear(&info);
    return makespan_ns;
}

/* A link that carries a tenth of all values in the time of the step spares some hundredths of it; a fast one, all. */
static void a_link_spares_recomputation(void **state)
{
    static const char slow[] = "threads=1 iterations=1000 host-budget=1GB to-host=500MB/s to-device=500MB/s";
    static const char fast[] = "threads=1 iterations=1000 host-budget=1GB to-host=50GB/s to-device=50GB/s";
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(4); seed++) {
        cairn_problem *problem = training_graph(seed, 60);
        cairn_limits limits = test_limits(problem, test_options("store-all", -1, ""));
        int64_t budget = limits.least_lower_bytes + (limits.store_all_bytes - limits.least_lower_bytes) * 2 / 5;
        int64_t alone_ns = makespan_of(problem, "graph-search", budget, "threads=1 iterations=5000");
        int64_t slow_ns = makespan_of(problem, "joint-graph", budget, slow);
        int64_t fast_ns = makespan_of(problem, "joint-graph", budget, fast);
        if (slow_ns > alone_ns - alone_ns / 100 || fast_ns > limits.store_all_ns + limits.store_all_ns / 1000)
            fail_msg("seed %llu: %lld alone, %lld slow, %lld fast, %lld at least", (unsigned long long)seed,
                     (long long)alone_ns, (long long)slow_ns, (long long)fast_ns, (long long)limits.store_all_ns);
        cairn_problem_free(problem);
    }
}

static cairn_status solve_small(const cairn_env *env, void *problem)
{
    return test_solve_status(
        env, problem,
        test_options("joint-graph", 350000, "threads=1 iterations=3 host-budget=1MB to-host=5GB/s to-device=5GB/s"));
}

static void every_allocation_may_fail(void **state)
{
    cairn_problem *problem = training_graph(1, 16);
    (void)state;
    test_every_allocation_fails(solve_small, problem);
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels_are_those_of_the_slow_account),
        cmocka_unit_test(endless_transfers_are_placed),
        cmocka_unit_test(a_storage_is_away_while_neither_transfer_runs),
        cmocka_unit_test(the_search_fetches_what_it_may),
        cmocka_unit_test(a_link_spares_recomputation),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
