/*
 * The best lists of a chain where the link has a price: without transfers against chain-exact, with them against the memory
 * that the list takes while what it offloads is away.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "schedule/schedule.h"
#include "solve/joint/chain_link_program.h"
#include "solve/transfer.h"
#include "support/ask.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { STAGES = 9, BUDGETS = 4, LONG = 100 };

#define TOO_DEAR 1e9

static const crn_settings settings = {.seed = 1};
static const cairn_env plain;

/* A question, and the list that answers it. */
typedef struct fixture {
    uint64_t seed;
    int64_t budget_bytes;
    crn_task task;
    crn_link_program program;
    cairn_builder *list;
    bool found;
} fixture;

#define check(f, condition)                                                       \
    do {                                                                          \
        if (!(condition))                                                         \
            fail_msg("seed %llu: %s", (unsigned long long)(f)->seed, #condition); \
    } while (0)

static void solve(fixture *f, crn_link_extent extent, crn_link_terms terms)
{
    assert_int_equal(crn_link_program_new(&f->task, f->budget_bytes, extent, &f->program, NULL), CAIRN_OK);
    assert_int_equal(cairn_builder_new(&plain, f->task.problem, &f->list, NULL), CAIRN_OK);
    assert_int_equal(crn_link_program_solve(&f->program, &f->task, terms, f->list, &f->found, NULL), CAIRN_OK);
    check(f, f->found == (cairn_builder_count(f->list) > 0));
}

static void clear(fixture *f)
{
    cairn_builder_free(f->list);
    crn_link_program_free(&f->program);
}

/* One option, and forwards that take the same whether they save or not: there are no ways but those of the program. */
static cairn_problem *simple_chain(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    const test_chain_shape shape = {.stages_max = STAGES,
                                    .equal_forwards = true,
                                    .signed_workspaces = seed % 2 == 0,
                                    .weight_grads = seed % 3 == 0,
                                    .no_recompute = seed % 5 == 0,
                                    .fixed = true,
                                    .machine = true};
    return test_random_chain(&random, &shape);
}

static cairn_problem *any_chain(uint64_t seed)
{
    return test_random_chain_with_link(seed, STAGES);
}

/* Sizes that take several slots of several bytes. */
static cairn_problem *large_chain(uint64_t seed)
{
    test_random random = test_random_seeded(seed);
    const test_chain_shape shape = {.stages_max = STAGES,
                                    .bytes_max = 5000,
                                    .options_max = 3,
                                    .homogeneous = seed % 4 == 0,
                                    .signed_workspaces = true,
                                    .weight_grads = true,
                                    .machine = true};
    return test_random_chain(&random, &shape);
}

/* Questions about a chain, at budgets from below the least to storing everything; how many have an answer. */
static int for_each_budget(uint64_t seed, cairn_problem *problem, void (*answer)(fixture *f))
{
    cairn_limits limits = test_limits(problem, test_options("chain-exact", CAIRN_NONE, ""));
    int found = 0;
    for (int i = -1; i <= BUDGETS && limits.least_bytes >= 0; i++) {
        fixture f = {.seed = seed, .budget_bytes = limits.least_bytes};
        f.budget_bytes += i < 0 ? -1 : (limits.store_all_bytes - limits.least_bytes) * i / BUDGETS;
        f.task = (crn_task){.env = &plain,
                            .problem = problem,
                            .machine = cairn_problem_info_of(problem)->machine,
                            .settings = &settings,
                            .deadline_ns = CAIRN_NONE};
        answer(&f);
        found += f.found;
        clear(&f);
    }
    cairn_problem_free(problem);
    return found;
}

static bool offloads(const fixture *f)
{
    for (int32_t i = 0; i < f->program.made; i++)
        if (f->program.goes[i])
            return true;
    return false;
}

/* Sizes are small, so a slot is a byte, and nothing is rounded. Something is offloaded only where nothing else fits. */
static void compare_with_chain_exact(fixture *f)
{
    cairn_replay replay;
    cairn_options *options = test_options("chain-exact", f->budget_bytes, "");
    cairn_info exact = test_solve(f->task.problem, options, NULL);
    solve(f, crn_link_extent_of(&f->task, f->seed % 2 == 0),
          (crn_link_terms){.price = TOO_DEAR, .rounds_up = f->seed % 2 == 0});
    check(f, f->found || exact.makespan_ns < 0);
    if (!f->found)
        return;
    check(f, offloads(f) == (exact.makespan_ns < 0));
    assert_int_equal(
        crn_replay(&f->task, cairn_builder_ops(f->list), cairn_builder_count(f->list), f->budget_bytes, &replay, NULL),
        CAIRN_OK);
    check(f, offloads(f) || (replay.valid && replay.makespan_ns == exact.makespan_ns));
}

static void a_link_that_is_too_dear_leaves_chain_exact(void **state)
{
    int found = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(600); seed++)
        found += for_each_budget(seed, simple_chain(seed), compare_with_chain_exact);
    assert_true(found > 0);
}

static void check_levels(const fixture *f, const crn_transfer *transfer)
{
    bool *away = calloc((size_t)transfer->wait_count + 1, sizeof(*away));
    int64_t *levels = calloc((size_t)transfer->event_count + 1, sizeof(*levels));
    assert_true(away && levels);
    for (int32_t w = 0; w < transfer->wait_count; w++) {
        int32_t birth = transfer->copies[transfer->waits[w].copy].birth;
        away[w] = birth >= 0 && f->program.goes[birth];
    }
    crn_transfer_levels(transfer, away, levels);
    for (int32_t e = 0; e < transfer->event_count; e++)
        check(f, levels[e] <= f->budget_bytes);
    free(away);
    free(levels);
}

/* A piece is a forward that keeps its input, and those that follow it without saving. */
static void check_pieces(const fixture *f, int32_t longest)
{
    int32_t length = 0;
    for (int64_t i = 0; i < cairn_builder_count(f->list); i++) {
        cairn_op op = cairn_builder_ops(f->list)[i];
        length = op.code == CAIRN_OP_FORWARD_KEEP ? 1 : op.code == CAIRN_OP_FORWARD_DROP ? length + 1 : 0;
        check(f, length <= longest);
    }
}

static void fits_with_what_it_offloads(fixture *f)
{
    crn_transfer *transfer;
    crn_link_extent extent = crn_link_extent_of(&f->task, false);
    int32_t stages = extent.piece_max; /* short chains have all pieces */
    extent.piece_max = 1 + (int32_t)f->seed % stages;
    solve(f, extent, (crn_link_terms){(double)(f->seed % 5) / 4, (double)(f->seed % 3) / 2, true});
    if (!f->found)
        return;
    check_pieces(f, extent.piece_max);
    check(f, f->program.made <= cairn_builder_count(f->list));
    assert_int_equal(
        crn_transfer_new(&f->task, cairn_builder_ops(f->list), cairn_builder_count(f->list), &transfer, NULL),
        CAIRN_OK);
    check(f, transfer->event_count == f->program.made);
    check_levels(f, transfer);
    crn_transfer_free(transfer);
}

static void lists_fit_with_what_they_offload(void **state)
{
    int found = 0;
    (void)state;
    for (uint64_t seed = 0; seed < TEST_ROUNDS(600); seed++)
        found += for_each_budget(seed, seed % 2 ? any_chain(seed) : large_chain(seed), fits_with_what_it_offloads);
    assert_true(found > 0);
}

/* At the least budget, lists with short pieces have to offload, and those with long pieces need not. */
static void long_pieces_need_less_memory(void **state)
{
    test_random random = test_random_seeded(1);
    const test_chain_shape shape = {.stages_min = LONG,
                                    .stages_max = LONG,
                                    .bytes_max = 12,
                                    .positive = true,
                                    .homogeneous = true,
                                    .machine = true};
    cairn_problem *problem = test_random_chain(&random, &shape);
    cairn_limits limits = test_limits(problem, test_options("chain-exact", CAIRN_NONE, ""));
    fixture f = {.budget_bytes = limits.least_bytes};
    (void)state;
    f.task = (crn_task){.env = &plain,
                        .problem = problem,
                        .machine = cairn_problem_info_of(problem)->machine,
                        .settings = &settings,
                        .deadline_ns = CAIRN_NONE};
    for (int is_long = 0; is_long < 2; is_long++) {
        crn_link_extent extent = crn_link_extent_of(&f.task, is_long);
        check(&f, (extent.piece_max == LONG) == is_long);
        solve(&f, extent, (crn_link_terms){.price = TOO_DEAR});
        check(&f, f.found && offloads(&f) == !is_long);
        clear(&f);
    }
    cairn_problem_free(problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_link_that_is_too_dear_leaves_chain_exact),
        cmocka_unit_test(lists_fit_with_what_they_offload),
        cmocka_unit_test(long_pieces_need_less_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
