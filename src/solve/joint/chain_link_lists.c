#include "solve/joint/chain_link_lists.h"

#include <math.h>

#include "solve/joint/chain_link_program.h"
#include "solve/joint/joint_session.h"

/*
 * The first price, how much lower the next one is, and how many are tried; so many in a row that are worse end it. Then
 * prices on both sides of the best one, ever nearer to it: each once for all stages, and once spread by the stage.
 */
#define PRICE_FIRST 2.0
#define PRICE_STEP 0.5
#define PRICE_NEAR 0.7
#define SPREAD 0.5
enum { PRICES = 10, WORSE_MAX = 2, NEARER = 2 };

/* With a time limit: of the time that is left, one of so many parts. */
enum { TIME_PARTS = 4 };

typedef struct pricing {
    crn_joint_search *search;
    crn_task task;
    crn_link_program program;
    crn_link_terms best;
    bool fits_none; /* whatever the price is */
    int64_t best_ns;
} pricing;

static bool is_over(const pricing *p)
{
    return crn_joint_is_done(p->search) || crn_should_stop(&p->task, NULL);
}

static cairn_status give(pricing *p, crn_link_terms terms, cairn_builder *list, int64_t *makespan_ns,
                         cairn_error *error)
{
    bool found;
    CRN_TRY(crn_link_program_solve(&p->program, &p->task, terms, list, &found, error));
    p->fits_none = !found;
    if (!found)
        return CAIRN_OK;
    CRN_TRY(crn_joint_try_list(p->search, list, p->program.goes, true, makespan_ns, error));
    if (*makespan_ns < p->best_ns) {
        p->best_ns = *makespan_ns;
        p->best = terms;
    }
    return CAIRN_OK;
}

/* *makespan_ns: INT64_MAX where no list fits. */
static cairn_status try_terms(pricing *p, crn_link_terms terms, int64_t *makespan_ns, cairn_error *error)
{
    cairn_builder *list;
    *makespan_ns = INT64_MAX;
    if (is_over(p))
        return CAIRN_OK;
    CRN_TRY(cairn_builder_new(p->task.env, p->task.problem, &list, error));
    cairn_status status = give(p, terms, list, makespan_ns, error);
    cairn_builder_free(list);
    return status;
}

static cairn_status try_falling(pricing *p, bool rounds_up, cairn_error *error)
{
    crn_link_terms terms = {PRICE_FIRST, 0, rounds_up};
    int64_t best_ns = INT64_MAX, makespan_ns;
    p->fits_none = false;
    for (int i = 0, worse = 0; i < PRICES && worse < WORSE_MAX && !p->fits_none; i++) {
        CRN_TRY(try_terms(p, terms, &makespan_ns, error));
        worse = makespan_ns <= best_ns && makespan_ns < INT64_MAX ? 0 : worse + 1;
        best_ns = crn_min(best_ns, makespan_ns);
        terms.price *= PRICE_STEP;
    }
    return CAIRN_OK;
}

/* A single price for all stages may be too low for the link, and the next one too high for it to be busy. */
static cairn_status try_near(pricing *p, double price, cairn_error *error)
{
    int64_t makespan_ns;
    CRN_TRY(try_terms(p, (crn_link_terms){price, 0, p->best.rounds_up}, &makespan_ns, error));
    return try_terms(p, (crn_link_terms){price, SPREAD, p->best.rounds_up}, &makespan_ns, error);
}

static cairn_status try_all(pricing *p, cairn_error *error)
{
    double step = PRICE_NEAR;
    CRN_TRY(try_falling(p, false, error));
    /* Some may need more than the budget, and take long when they are made to fit. */
    if (p->best_ns > p->search->best_ns)
        CRN_TRY(try_falling(p, true, error));
    for (int i = 0; i < NEARER && p->best_ns < INT64_MAX; i++) {
        double middle = p->best.price;
        CRN_TRY(try_near(p, middle * step, error));
        CRN_TRY(try_near(p, middle / step, error));
        step = sqrt(step);
    }
    return CAIRN_OK;
}

/* With pieces that are usual, or all. */
static cairn_status try_pieces(pricing *p, bool is_long, cairn_error *error)
{
    const crn_link_extent extent = crn_link_extent_of(&p->task, is_long);
    if (extent.piece_max == 0)
        return CAIRN_OK;
    if (crn_link_program_memory(&p->task, extent) > crn_memory_limit(p->task.settings))
        return CAIRN_NO_MEMORY;
    cairn_status status = crn_link_program_new(&p->task, p->search->budget_bytes, extent, &p->program, error);
    if (status == CAIRN_OK)
        status = try_all(p, error);
    crn_link_program_free(&p->program);
    return status;
}

cairn_status crn_chain_link_lists(crn_joint_search *search, cairn_error *error)
{
    pricing p = {.search = search, .task = crn_task_part(search->task, TIME_PARTS), .best_ns = INT64_MAX};
    if (search->budget_bytes == INT64_MAX)
        return CAIRN_OK;
    cairn_status status = try_pieces(&p, false, error);
    if (status == CAIRN_OK && p.best_ns == INT64_MAX && !is_over(&p))
        status = try_pieces(&p, true, error);
    search->cut_short = search->cut_short || status == CAIRN_NO_MEMORY;
    return status == CAIRN_NO_MEMORY ? CAIRN_OK : status;
}
