/*
 * The integer program of frontier schedules: Checkmate's equation 8, stated so that its relaxation is tight.
 *
 * Variables, all 0 or 1, and those that are decided beforehand are left out (lower triangle; what is of no use any
 * more; what must not run twice; outputs):
 *   compute[t][v]    node v < t is computed again in stage t; node t always is
 *   hold[t][v]       the handle of v is there when stage t begins
 *   resident[t][s,u] storage s stays until its reader u in stage t has run, or longer
 *
 * Rows, for every stage t:
 *   compute[t][u] <= compute[t][d] + hold[t][d]          for every d that u reads
 *   hold[t+1][v]  <= compute[t][v] + hold[t][v] <= 1     nothing is computed that is there
 *   hold[t][a]    <= hold[t][s]                          for an alias a in storage s
 *   resident[t][s,u] >= compute[t][u], resident[t][s,next reader], and hold[t+1][s] for the last one
 *   memory while k <= t runs:  sum over s < k of bytes[s] resident[t][s, first reader >= k]
 *                            + sum over k < s < t of bytes[s] hold[t][s]
 *                            + bytes[k] (compute[t][k] + hold[t][k]) + extra[k] compute[t][k]  <=  budget - fixed
 *
 * Checkmate writes memory as a recurrence in which FREE[t][i,k], tied to a count of hazards by a large constant, gives
 * bytes back. Here residency is a maximum of decisions, which needs no constant for fractions to hide in, and need
 * not be declared integer. Memory is a row for each (t, k), not a difference of two: three times the entries, and two to
 * four times faster to solve. A memory row holds whether node k runs or not, for what is resident then is resident
 * as well when the next node runs.
 *
 * Objective: the time of all recomputations, or the peak. Sizes and times are divided by their greatest common divisors
 * first, so scaling a problem changes no coefficient. Numbers are doubles, so a solution is a proposal: the plan read
 * from it is completed, written as operations, and judged by the simulator.
 */
#ifndef CRN_FRONTIER_PROGRAM_H
#define CRN_FRONTIER_PROGRAM_H

#include "solve/milp/frontier_plan.h"
#include "solve/milp/highs_library.h"

typedef struct crn_frontier_program {
    const crn_frontier_graph *graph;
    crn_linear_program linear;
    int32_t *compute, *hold; /* [stage][node] -> column, or one of the constants below; hold has count + 1 stages */
    int32_t decisions;       /* columns that are one of those; then comes the peak, then maxima */
    int32_t peak;            /* its column, CRN_REF_ZERO where it is not asked for */
    int32_t maxima_begin;    /* the first of them */
    int32_t *maximum_of;     /* two columns for each maximum */
    bool impossible;         /* a row of constants does not hold */
    double objective_unit;   /* ns, or bytes, that 1 in the objective stands for */
    double objective_gap;    /* what is nearer to a bound on the objective is optimal */
    bool is_exact;           /* 1 in the objective is the unit of which all costs, or sizes, are multiples */
    double row_unit;         /* sizes' common units that 1 in a memory row stands for */
    double row_limit;        /* of memory rows without a peak */
    crn_arena arena;
} crn_frontier_program;

enum { CRN_REF_ZERO = -1, CRN_REF_ONE = -2 };

typedef struct crn_program_goal {
    bool minimize_peak;
    int64_t budget_bytes; /* of every schedule that counts; at least the fixed bytes */
    int64_t lower_bytes;  /* that every schedule needs: where the peak begins */
    double margin;        /* of the budget, relative: what memory rows leave free */
} crn_program_goal;

/** Builds the program. Errors: NO_MEMORY, TOO_LARGE. Cost and size: O(T^3 + T E) at most. */
cairn_status crn_frontier_program_new(const crn_task *task, const crn_frontier_graph *graph,
                                      const crn_program_goal *goal, crn_frontier_program **program, cairn_error *error);
void crn_frontier_program_free(crn_frontier_program *program);

/** An upper estimate of the bytes that building and solving such a program take, HiGHS's own included. */
int64_t crn_frontier_program_bytes(const cairn_graph *graph);

/** The point that stands for a complete plan; peak_bytes is the plan's. */
void crn_frontier_program_point(const crn_frontier_program *program, const crn_frontier_plan *plan, int64_t peak_bytes,
                                double *values);
/** Fills in plan->held: what a point holds to at least threshold. */
void crn_frontier_program_plan(const crn_frontier_program *program, const double *values, double threshold,
                               crn_frontier_plan *plan);

/**
 * HiGHS's bound as ns of recomputation, or as bytes of peak without the fixed ones; CAIRN_NONE when it knows none.
 * Where the objective is exact no frontier schedule is below it; else HiGHS's tolerances count, some 10^-7 of the whole.
 */
int64_t crn_frontier_program_bound(const crn_frontier_program *program, double bound);
/** Whether an objective, in ns or bytes, is the least: nothing can lie between it and the bound. */
bool crn_frontier_program_closes(const crn_frontier_program *program, int64_t objective, double bound);

#endif
