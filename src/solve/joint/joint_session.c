/* Opening, asking and closing; see joint_session.h. */
#include "solve/joint/joint_session.h"

/* Of the time, one of so many parts is for the least budget. */
enum { LEAST_SHARE = 4 };

void crn_joint_close(const crn_task *task, void *session)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_free(&allocator, session, 1, sizeof(crn_joint));
}

/* Looks for the least, once; again where that failed. */
static cairn_status find_least(const crn_task *task, crn_joint *s, cairn_error *error)
{
    const crn_task part = crn_task_part(task, LEAST_SHARE);
    if (!s->lower)
        return CAIRN_OK;
    CRN_TRY(s->lower(&part, s, error));
    s->lower = NULL;
    s->is_rough = s->is_rough || crn_should_stop(&part, NULL);
    return CAIRN_OK;
}

/*
 * What one call of solve starts from. A schedule that is known makes the search for the least needless. That holds for
 * this budget alone.
 */
static cairn_status view_for(const crn_task *task, crn_joint *s, crn_joint *view, cairn_error *error)
{
    cairn_replay replay;
    if (!task->known) {
        CRN_TRY(find_least(task, s, error));
        *view = *s;
        return CAIRN_OK;
    }
    CRN_TRY(
        crn_replay(task, cairn_builder_ops(task->known), cairn_builder_count(task->known), CAIRN_NONE, &replay, error));
    *view = *s;
    view->least_bytes = view->lists_bytes = replay.peak_bytes;
    view->is_rough = true;
    return CAIRN_OK;
}

cairn_status crn_joint_offer_known(crn_joint_search *search, cairn_error *error)
{
    const cairn_builder *known = search->task->known;
    if (!known)
        return CAIRN_OK;
    CRN_TRY(crn_joint_offer(search, known, "the answers of others", error));
    if (!crn_joint_is_done(search))
        CRN_TRY(crn_joint_offer_list(search, known, NULL, error));
    if (!crn_joint_is_done(search) && search->task->known_list)
        return crn_joint_offer_list(search, search->task->known_list, NULL, error);
    return CAIRN_OK;
}

cairn_status crn_joint_open(const crn_task *task, crn_joint_lower lower, void **session, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(task->env);
    crn_joint *s = crn_alloc_zero(&allocator, 1, sizeof(*s));
    *session = s;
    if (!s)
        return crn_no_memory(error);
    s->lower = lower;
    s->least_bytes = s->lists_bytes = INT64_MAX;
    CRN_TRY(crn_store_all(task, &s->store_all_bytes, &s->store_all_ns, error));
    return task->known ? CAIRN_OK : find_least(task, s, error);
}

cairn_status crn_joint_least(const crn_task *task, void *session, crn_least *least, cairn_error *error)
{
    crn_joint *s = session;
    CRN_TRY(find_least(task, s, error));
    least->bytes = s->least_bytes == INT64_MAX ? CAIRN_NONE : s->least_bytes;
    least->is_rough = s->is_rough;
    return CAIRN_OK;
}

int64_t crn_joint_rounds(const crn_task *task, int64_t usual)
{
    if (task->settings->iterations >= 0)
        return task->settings->iterations;
    if (task->deadline_ns != CAIRN_NONE)
        return INT64_MAX / 8; /* until the clock says so */
    return crn_max(16, usual);
}

cairn_status crn_joint_solve(const crn_task *task, crn_joint *s, int64_t budget_bytes, crn_joint_fill fill,
                             crn_answer *answer, cairn_error *error)
{
    crn_joint_search search;
    crn_joint view;
    CRN_TRY(view_for(task, s, &view, error));
    if (budget_bytes != CAIRN_NONE && budget_bytes < view.least_bytes && !view.is_rough)
        return CAIRN_OK;
    cairn_status status = crn_joint_begin(&search, task, budget_bytes, error);
    if (status == CAIRN_OK)
        status = fill(&view, &search, budget_bytes, answer, error);
    answer->stopped_early |= crn_should_stop(task, NULL);
    if (status == CAIRN_OK)
        status = crn_joint_answer(&search, answer, error);
    crn_joint_end(&search);
    return status;
}
