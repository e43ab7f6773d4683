#include "solve/chain/chain_unfold.h"

typedef enum todo_kind { SOLVE, BACKWARD, DROP_SAVED } todo_kind;

typedef struct todo {
    todo_kind kind;
    int32_t s, t; /* the stage, for an operation: s */
    int64_t m;
} todo;

typedef struct unfolding {
    cairn_allocator allocator;
    crn_forward forward;
    todo *stack; /* what comes next is on top */
    size_t count, capacity;
    crn_decide *decide;
    const void *context;
    cairn_builder *builder;
    cairn_error *error;
} unfolding;

static cairn_status push(unfolding *u, todo_kind kind, int32_t s, int32_t t, int64_t m)
{
    if (u->count == u->capacity) {
        todo *grown = crn_grow(&u->allocator, u->stack, &u->capacity, u->count + 1, sizeof(*grown));
        if (!grown)
            return crn_no_memory(u->error);
        u->stack = grown;
    }
    u->stack[u->count++] = (todo){kind, s, t, m};
    return CAIRN_OK;
}

static cairn_status emit(unfolding *u, cairn_op_code code, int32_t l, int32_t option, cairn_value value)
{
    return crn_chain_emit(u->builder, code, l, option, value, u->error);
}

static cairn_status begin_save(unfolding *u, int32_t s, int32_t t, const crn_decision *decision)
{
    CRN_TRY(emit(u, CAIRN_OP_FORWARD_SAVE, s, decision->option, 0));
    CRN_TRY(push(u, BACKWARD, s, s, 0));
    return s < t ? push(u, SOLVE, s + 1, t, decision->right) : CAIRN_OK;
}

static cairn_status begin_save_and_drop(unfolding *u, int32_t s, int32_t t, const crn_decision *decision)
{
    CRN_TRY(emit(u, CAIRN_OP_FORWARD_SAVE, s, decision->option, 0));
    CRN_TRY(push(u, SOLVE, s, s, decision->left));
    CRN_TRY(push(u, DROP_SAVED, s, s, 0));
    return push(u, SOLVE, s + 1, t, decision->right);
}

static cairn_status begin_checkpoint(unfolding *u, int32_t s, int32_t t, const crn_decision *decision)
{
    crn_forward_fill(&u->forward, s, decision->split - 1);
    CRN_TRY(crn_forward_emit(&u->forward, decision->split - 1, decision->way, u->builder, u->error));
    CRN_TRY(push(u, SOLVE, s, decision->split - 1, decision->left));
    return push(u, SOLVE, decision->split, t, decision->right);
}

static cairn_status do_next(unfolding *u)
{
    todo next = u->stack[--u->count];
    if (next.kind == BACKWARD)
        return emit(u, CAIRN_OP_BACKWARD, next.s, 0, 0);
    if (next.kind == DROP_SAVED)
        return emit(u, CAIRN_OP_DROP, next.s, 0, CAIRN_VALUE_SAVED);
    crn_decision decision = u->decide(u->context, next.s, next.t, next.m);
    switch (decision.kind) {
    case CRN_DECIDE_SAVE:
        return begin_save(u, next.s, next.t, &decision);
    case CRN_DECIDE_SAVE_AND_DROP:
        return begin_save_and_drop(u, next.s, next.t, &decision);
    case CRN_DECIDE_CHECKPOINT:
        break;
    }
    return begin_checkpoint(u, next.s, next.t, &decision);
}

cairn_status crn_chain_unfold(const crn_task *task, const crn_chain_model *model, crn_decide *decide,
                              const void *context, int64_t m, cairn_builder *builder, cairn_error *error)
{
    unfolding u = {.allocator = crn_allocator(task->env),
                   .decide = decide,
                   .context = context,
                   .builder = builder,
                   .error = error};
    if (!crn_forward_init(&u.forward, &u.allocator, model))
        return crn_no_memory(error);
    cairn_status status = push(&u, SOLVE, 1, model->n, m);
    while (status == CAIRN_OK && u.count > 0)
        status = do_next(&u);
    crn_free(&u.allocator, u.stack, u.capacity, sizeof(*u.stack));
    crn_forward_clear(&u.forward);
    return status;
}
