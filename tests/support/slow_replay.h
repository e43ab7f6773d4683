/*
 * A second simulator, to compare the library's with.
 *
 * It follows docs/reference/formats/schedule.md by definition rather than by state: what is resident before an
 * operation is found by searching the list backwards, every violation is a predicate of its own, the memory in use at
 * an instant is a sum over all that was ever made, and a start is the first of all conceivable instants at which it
 * fits. So it shares neither code nor structure with src/schedule. Cost: about the cube of the number of operations.
 */
#ifndef TEST_SLOW_REPLAY_H
#define TEST_SLOW_REPLAY_H

#include <cairn/schedule.h>

enum { TEST_SLOW_OPS_MAX = 256 };

/** What cairn_simulate says of these operations, messages excepted. machine NULL = none. Aborts on too many. */
cairn_replay test_slow_replay(const cairn_problem *problem, const cairn_machine *machine, const cairn_op *ops,
                              int64_t count, int64_t budget_bytes);

#endif
