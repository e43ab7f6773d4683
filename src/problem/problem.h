/* Inside of a problem. Everything hangs on the arena, the structure itself included. */
#ifndef CRN_PROBLEM_H
#define CRN_PROBLEM_H

#include <cairn/problem.h>

#include "base/memory.h"
#include "base/sha256.h"

struct cairn_problem {
    crn_arena arena;
    cairn_problem_kind kind;
    cairn_problem_info info;
    cairn_machine machine; /* info.machine points here, or is NULL */
    cairn_chain chain;     /* of its kind, the other one is zero */
    cairn_graph graph;
    int64_t work_ns; /* what no schedule can avoid: the least forward + backward of each stage, the cost of each node */
    char hash[CRN_HASH_TEXT_MAX];
};

/**
 * Allocates an empty problem with its info checked. own: the arena with the texts of the info, which the problem is about
 * to take over; NULL: they are copied.
 */
cairn_status crn_problem_begin(const cairn_env *env, cairn_problem_kind kind, const cairn_problem_info *info,
                               const crn_arena *own, cairn_problem **problem, cairn_error *error);

/**
 * As cairn_problem_new_chain and _graph. own: the arena in which the chain or graph lies, its names and lists and the
 * texts of the info too, which the problem takes over when it can be made; NULL: all is copied.
 */
cairn_status crn_problem_make_chain(const cairn_env *env, const cairn_chain *chain, const cairn_problem_info *info,
                                    crn_arena *own, cairn_problem **problem, cairn_error *error);
cairn_status crn_problem_make_graph(const cairn_env *env, const cairn_graph *graph, const cairn_problem_info *info,
                                    crn_arena *own, cairn_problem **problem, cairn_error *error);

/** Fills in the hash from the canonical form. Cannot fail: the form is streamed. */
void crn_problem_hash_fill(cairn_problem *problem);

/** Storage that a node's output lives in: the root of its aliases, itself for one that is none. Takes a step an alias. */
int32_t crn_graph_root(const cairn_graph *graph, int32_t node);

#endif
