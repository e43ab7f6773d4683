/*
 * Random chains, graphs and machines for tests: small numbers, so that ties, zeros and exact fits are common.
 *
 * A shape says what may occur; a zero-initialised member means "does not occur" or the default named beside it. The
 * same random source gives the same problem. Generators abort when the library refuses what they made: a generator
 * that makes invalid problems is a defect of the test.
 */
#ifndef TEST_RANDOM_PROBLEM_H
#define TEST_RANDOM_PROBLEM_H

#include <cairn/problem.h>

#include "support/random_source.h"

/** What a random chain may look like. */
typedef struct test_chain_shape {
    int32_t stages_min, stages_max; /**< default 1 and 6 */
    int32_t options_max;            /**< options of a stage; default 1 */
    int64_t bytes_max;              /**< of every size; default 12 */
    int64_t ns_max;                 /**< of every time; default 12 */
    bool positive;                  /**< no size or time is 0, workspaces excepted */
    bool homogeneous;               /**< all stages alike: sizes, times, options */
    bool equal_forwards;            /**< forward_only_* equal those of the first option */
    bool plain_grads;               /**< grad_bytes = output_bytes, input_grad_bytes = input_bytes */
    bool workspaces;                /**< workspaces of at least 0 */
    bool signed_workspaces;         /**< workspaces of either sign */
    bool weight_grads;
    bool no_recompute; /**< now and then */
    bool fixed;        /**< fixed_bytes */
    bool machine;      /**< always has one */
} test_chain_shape;

/** Everything that the format allows, in a chain of at most stages_max stages. */
test_chain_shape test_chain_of_everything(int32_t stages_max);
/** Free it with cairn_problem_free. */
cairn_problem *test_random_chain(test_random *random, const test_chain_shape *shape);
/** A chain with a machine; of four kinds in turn, from plain ones to those with most of what makes transfers hard. */
cairn_problem *test_random_chain_with_link(uint64_t seed, int32_t stages_max);

/** What a random graph may look like. */
typedef struct test_graph_shape {
    int32_t nodes_min, nodes_max; /**< default 1 and 8 */
    int32_t deps_max;             /**< dependencies of a node; default 3 */
    int64_t bytes_max, ns_max;    /**< default 12 */
    bool positive;                /**< no size or time is 0, aliases' sizes and workspaces excepted */
    bool training;                /**< forward nodes, then a backward node for each, in reverse order */
    bool aliases;
    bool keep;         /**< now and then, and always the last node */
    bool no_recompute; /**< now and then */
    bool workspaces, signed_workspaces;
    bool fixed;
    bool machine;
} test_graph_shape;

test_graph_shape test_graph_of_everything(int32_t nodes_max);
cairn_problem *test_random_graph(test_random *random, const test_graph_shape *shape);

/** A machine whose transfers of about bytes_max take times of the order of ns_max; host memory now and then scarce. */
cairn_machine test_random_machine(test_random *random, int64_t bytes_max, int64_t ns_max);

#endif
