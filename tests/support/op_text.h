/*
 * Schedules in a shorthand, for tests that are worked by hand and for messages of those that are not.
 *
 *     chains  S3 save, S3:1 with option 1, K3 keep, N3 drop (the "none" of the papers), B3 backward
 *             -a3 drop output, -A3 drop saved, >a3 offload, <a3 prefetch, xa3 discard
 *     graphs  C3 compute, -3 drop, >3 offload, <3 prefetch, x3 discard
 *
 * Blanks separate operations.
 */
#ifndef TEST_OP_TEXT_H
#define TEST_OP_TEXT_H

#include <cairn/schedule.h>
#include <stdio.h>

/** The schedule of a problem; aborts when the text or an operation is not valid. Free with cairn_schedule_free. */
cairn_schedule *test_schedule(const cairn_problem *problem, const char *text);
/** The same with something recorded. */
cairn_schedule *test_schedule_with(const cairn_problem *problem, const char *text, const cairn_schedule_info *info);

/** Writes operations in the shorthand. */
void test_print_ops(FILE *file, cairn_problem_kind kind, const cairn_op *ops, int64_t count);

#endif
