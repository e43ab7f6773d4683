/* The builder: a growing array of checked operations. */
#include <string.h>

#include "base/checked.h"
#include "base/failure.h"
#include "schedule/schedule.h"

struct cairn_builder {
    cairn_allocator allocator;
    const cairn_problem *problem;
    cairn_op *ops; /* NULL until the first add */
    int64_t count, capacity;
};

enum { FIRST_CAPACITY = 64 };

cairn_status cairn_builder_new(const cairn_env *env, const cairn_problem *problem, cairn_builder **builder,
                               cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    *builder = crn_alloc_zero(&allocator, 1, sizeof(**builder));
    if (!*builder)
        return crn_no_memory(error);
    (*builder)->allocator = allocator;
    (*builder)->problem = problem;
    return CAIRN_OK;
}

cairn_status crn_builder_reserve(cairn_builder *builder, int64_t count, cairn_error *error)
{
    count = crn_min(count, CAIRN_OPS_MAX);
    if (count <= builder->capacity)
        return CAIRN_OK;
    cairn_op *ops =
        crn_realloc(&builder->allocator, builder->ops, (size_t)builder->capacity, (size_t)count, sizeof(*ops));
    if (!ops)
        return crn_no_memory(error);
    builder->ops = ops;
    builder->capacity = count;
    return CAIRN_OK;
}

cairn_status crn_builder_add_all(cairn_builder *builder, const cairn_op *ops, int64_t count, cairn_error *error)
{
    int64_t wanted = builder->count + count;
    CRN_TRY(crn_ops_check(builder->problem, ops, count, builder->count, error));
    if (wanted > CAIRN_OPS_MAX)
        return crn_fail_at(error, CAIRN_TOO_LARGE, CAIRN_OPS_MAX, "ops", "more than %lld operations",
                           (long long)CAIRN_OPS_MAX);
    if (wanted > builder->capacity)
        CRN_TRY(crn_builder_reserve(builder, crn_max(wanted, crn_max(builder->count * 2, FIRST_CAPACITY)), error));
    memcpy(builder->ops + builder->count, ops, (size_t)count * sizeof(*ops));
    builder->count = wanted;
    return CAIRN_OK;
}

cairn_status cairn_builder_add(cairn_builder *builder, cairn_op op, cairn_error *error)
{
    return crn_builder_add_all(builder, &op, 1, error);
}

int64_t cairn_builder_count(const cairn_builder *builder)
{
    return builder->count;
}

const cairn_op *cairn_builder_ops(const cairn_builder *builder)
{
    return builder->ops;
}

void cairn_builder_truncate(cairn_builder *builder, int64_t count)
{
    if (count >= 0 && count < builder->count)
        builder->count = count;
}

cairn_status cairn_builder_finish(cairn_builder *builder, const cairn_schedule_info *info, cairn_schedule **schedule,
                                  cairn_error *error)
{
    *schedule = NULL;
    CRN_TRY(
        crn_schedule_new(builder->allocator, builder->problem, builder->ops, builder->count, info, schedule, error));
    builder->count = 0;
    return CAIRN_OK;
}

void cairn_builder_free(cairn_builder *builder)
{
    if (!builder)
        return;
    cairn_allocator allocator = builder->allocator;
    crn_free(&allocator, builder->ops, (size_t)builder->capacity, sizeof(*builder->ops));
    crn_free(&allocator, builder, 1, sizeof(*builder));
}
