/*
 * Asking the library, for tests that expect an answer: what is refused fails the test, with what the library said.
 *
 * Include it after cmocka.h: its checks are cmocka assertions.
 */
#ifndef TEST_ASK_H
#define TEST_ASK_H

#include <cairn/cairn.h>

/** Options from "name=value name=value ..." beside solver and budget; none is set where that is negative. The caller's to free. */
cairn_options *test_options(const char *solver, int64_t budget_bytes, const char *settings);

/** Solves, and frees the options. schedule may be NULL. */
cairn_info test_solve(const cairn_problem *problem, cairn_options *options, cairn_schedule **schedule);
/** Solves, keeps nothing of the answer but the status, and frees the options: what test_every_allocation_fails repeats. */
cairn_status test_solve_status(const cairn_env *env, const cairn_problem *problem, cairn_options *options);
/** A poll that says stop after so many times, an int that it counts down. */
int test_stop_after(void *polls, const cairn_progress *progress);
/**
 * Solves with a poll that says stop after 0, 1, 4, 13, ... times: there is an answer all the same, of a solver that has
 * one by its first poll, and only one that was stopped says so.
 */
void test_stops_at_any_poll(const cairn_problem *problem, const cairn_options *options);
/** Asks for the limits, and frees the options. */
cairn_limits test_limits(const cairn_problem *problem, cairn_options *options);

#endif
