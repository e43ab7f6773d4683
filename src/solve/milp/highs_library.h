/*
 * HiGHS, found at run time: the open MILP solver of Huangfu and Hall (2018) and others, behind one call.
 *
 * The library is looked for when it is asked for. Where the environment variable CAIRN_HIGHS_LIBRARY names a file, it is
 * that file and no other. Else it is the first of these that can be loaded: the file that the build was told of
 * (CAIRN_HIGHS), libhighs.so beside libcairn, that of the Python package highsbox beside an installed Cairn, and what the
 * dynamic linker finds. Nothing is needed to build Cairn, and what is not there is "unavailable". highs_library.c is the
 * only file that names HiGHS's functions.
 */
#ifndef CRN_HIGHS_LIBRARY_H
#define CRN_HIGHS_LIBRARY_H

#include "solve/solver.h"

/** OK, or UNAVAILABLE with what was looked for and how to get it. */
cairn_status crn_highs_available(cairn_error *error);

/** Minimise cost * x, row_lower <= A x <= row_upper, lower <= x <= upper, some x integer. A by rows. */
typedef struct crn_linear_program {
    int32_t columns, rows, entries;
    double *cost, *lower, *upper;
    int32_t *is_integer; /* 0 or 1 */
    double *row_lower, *row_upper;
    int32_t *row_begin, *index;
    double *value;
} crn_linear_program;

/** Simplex iterations to one of option iterations. */
enum { CRN_HIGHS_ITERATIONS_EACH = 100 };
/** Simplex iterations that one program may take: by option iterations, else by the clock or a limit on work. */
int64_t crn_highs_iterations(const crn_task *task, const crn_linear_program *program);

/** How to solve one. */
typedef struct crn_highs_question {
    const crn_linear_program *program;
    bool relax;              /* forget what is integer */
    const double *start;     /* a feasible point, NULL = none */
    double gap;              /* good enough: the objective is this near its bound */
    int64_t iterations_max;  /* of the simplex method, all nodes together */
    cairn_progress progress; /* what to report while it runs; done is filled in with the nodes */
} crn_highs_question;

typedef struct crn_highs_reply {
    bool found;         /* values is a solution */
    bool closed;        /* the objective is within the gap of bound, or there is proved to be no solution */
    bool stopped_early; /* by the deadline or by poll */
    double bound;       /* on the objective of all solutions; -infinity when nothing is known */
    double *values;     /* room for the program's columns, the caller's */
} crn_highs_reply;

/**
 * Solves on the calling thread, one thread, the same way every time. Errors: UNAVAILABLE, NO_MEMORY, INTERNAL (HiGHS
 * refused or failed).
 */
cairn_status crn_highs_solve(const crn_task *task, const crn_highs_question *question, crn_highs_reply *reply,
                             cairn_error *error);

#endif
