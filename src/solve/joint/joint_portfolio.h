/*
 * The portfolio that a joint search starts from: other solvers are asked, one by one or all that know no link, each with
 * what is left of the time, and their answers go to the search as schedules and as lists (joint_search.h).
 */
#ifndef CRN_JOINT_PORTFOLIO_H
#define CRN_JOINT_PORTFOLIO_H

#include "solve/joint/joint_search.h"

/** Takes an answer; see crn_joint_ask. */
typedef cairn_status (*crn_joint_take)(void *context, int64_t budget_bytes, const crn_answer *own, cairn_error *error);
/**
 * Asks a solver by name at some budgets (CAIRN_NONE = no budget) in one session and gives each answer to take; solvers that
 * do not take the task, or lack memory, or were stopped, are passed over. least_bytes (may be NULL): lowered to the solver's.
 * *cut_short: set where memory or the end of its time kept a solver from saying all that it knows.
 */
cairn_status crn_joint_ask(const crn_task *task, const char *name, const int64_t *budgets, int32_t count,
                           crn_joint_take take, void *context, int64_t *least_bytes, bool *cut_short,
                           cairn_error *error);

/** The same of the shared session of the task, if it has one. */
cairn_status crn_joint_ask_shared(const crn_task *task, const int64_t *budgets, int32_t count, crn_joint_take take,
                                  void *context, bool *cut_short, cairn_error *error);

/**
 * Asks every solver without transfers that auto would ask, those that others cover aside, at the search's budget, and one of them
 * (its name, NULL = none) in the same session at more budgets, whose answers are taken as lists.
 */
cairn_status crn_joint_ask_alone(crn_joint_search *search, const char *lists_of, const int64_t *budgets, int32_t count,
                                 cairn_error *error);

#endif
