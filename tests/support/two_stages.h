/*
 * A chain of two stages, and options by solver and budget.
 */
#ifndef TEST_TWO_STAGES_H
#define TEST_TWO_STAGES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "solve/session.h"

/* Two stages: storing everything takes 10 + 20 + 30 bytes at the turn, and 1 + 2 + 3 + 4 ns. */
static inline cairn_problem *two_stages(const cairn_machine *machine)
{
    static const cairn_stage_option first = {"keep", 20, 1, 4, 0, 0}, second = {"keep", 30, 2, 3, 0, 0};
    static const cairn_stage stages[] = {
        {"one", 10, 0, 0, 1, 0, false, 1, &first},
        {"two", 10, 0, 0, 2, 0, false, 1, &second},
    };
    cairn_chain chain = {10, 0, 2, stages};
    cairn_problem_info info = {.name = "two", .machine = machine};
    cairn_problem *problem;
    assert_int_equal(cairn_problem_new_chain(NULL, &chain, &info, &problem, NULL), CAIRN_OK);
    return problem;
}

static inline cairn_options *options_of(const char *solver, const char *budget)
{
    cairn_options *options;
    assert_int_equal(cairn_options_new(NULL, &options, NULL), CAIRN_OK);
    if (solver)
        assert_int_equal(cairn_options_set(options, "solver", solver, NULL), CAIRN_OK);
    if (budget)
        assert_int_equal(cairn_options_set(options, "budget", budget, NULL), CAIRN_OK);
    return options;
}

#endif
