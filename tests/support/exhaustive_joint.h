/*
 * The optimum of a tiny chain with a link over all lists of operations: to compare the library's solvers with.
 *
 * Branch and bound over the format's operations, one after the other, with the simulator's time written down anew: every
 * value has a copy on the device, on the host, on both or nowhere. Of two lists that leave the same copies, the one that is
 * nowhere later is enough. It shares nothing with src/. Stages: at most 4; options: at most 3 of each.
 */
#ifndef TEST_EXHAUSTIVE_JOINT_H
#define TEST_EXHAUSTIVE_JOINT_H

#include <cairn/problem.h>

typedef struct test_joint_limits {
    bool no_recompute; /* every stage's forward is issued once, as forward_save */
    bool no_transfers;
    int64_t incumbent_ns; /* only what is faster is looked for; INT64_MAX */
    int64_t states_max;   /* then it gives up; 0 = 400,000 */
} test_joint_limits;

/** The least makespan; the incumbent where nothing is faster; -1 where it gave up. */
int64_t test_exhaustive_joint(const cairn_problem *problem, const cairn_machine *machine, int64_t budget_bytes,
                              test_joint_limits limits);

#endif
