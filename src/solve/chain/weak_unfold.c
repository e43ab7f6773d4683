#include "solve/chain/weak_unfold.h"

typedef enum todo_kind { SOLVE, BACKWARD, DROP_SAVED, DROP_OUTPUT } todo_kind;

typedef struct todo {
    todo_kind kind;
    int32_t l;          /* the stage, for an operation */
    crn_weak_part part; /* of SOLVE, with m */
    int64_t m;
} todo;

typedef struct unfolding {
    const crn_weak_model *model;
    cairn_allocator allocator;
    crn_forward forward;
    todo *stack; /* what comes next is on top */
    size_t count, capacity;
    crn_weak_decide *decide;
    const void *context;
    cairn_builder *builder;
    cairn_error *error;
} unfolding;

static cairn_status push(unfolding *u, todo pushed)
{
    if (u->count == u->capacity) {
        todo *grown = crn_grow(&u->allocator, u->stack, &u->capacity, u->count + 1, sizeof(*grown));
        if (!grown)
            return crn_no_memory(u->error);
        u->stack = grown;
    }
    u->stack[u->count++] = pushed;
    return CAIRN_OK;
}

static cairn_status push_part(unfolding *u, crn_weak_part part, int64_t m)
{
    return part.kind == CRN_WEAK_DONE ? CAIRN_OK : push(u, (todo){.kind = SOLVE, .part = part, .m = m});
}

static cairn_status emit(unfolding *u, cairn_op_code code, int32_t l, int32_t option, cairn_value value)
{
    return crn_chain_emit(u->builder, code, l, option, value, u->error);
}

static bool gives_up_input(const crn_weak_part *part)
{
    return part->kind == CRN_WEAK_ALONE && part->s > 1;
}

static cairn_status leap(unfolding *u, const crn_weak_part *part, const crn_weak_term *term)
{
    crn_forward_fill(&u->forward, part->s, term->end);
    CRN_TRY(crn_forward_emit(&u->forward, term->end, term->way, u->builder, u->error));
    return gives_up_input(part) ? emit(u, CAIRN_OP_DROP, part->s - 1, 0, CAIRN_VALUE_OUTPUT) : CAIRN_OK;
}

/* The operations that a term begins with. */
static cairn_status begin(unfolding *u, const crn_weak_part *part, const crn_weak_term *term)
{
    switch (term->move) {
    case CRN_WEAK_SAVE:
    case CRN_WEAK_SAVE_DROP:
        return emit(u, CAIRN_OP_FORWARD_SAVE, part->s, term->option, 0);
    case CRN_WEAK_STEP:
        return emit(u, gives_up_input(part) ? CAIRN_OP_FORWARD_DROP : CAIRN_OP_FORWARD_KEEP, part->s, 0, 0);
    case CRN_WEAK_LEAP:
        return leap(u, part, term);
    case CRN_WEAK_SPLIT:
    case CRN_WEAK_LAST:
        break;
    }
    return term->steps ? emit(u, CAIRN_OP_FORWARD_KEEP, part->s, 0, 0) : CAIRN_OK;
}

/* What a term owes at its end. */
static cairn_status push_end(unfolding *u, const crn_weak_part *part, const crn_weak_term *term)
{
    if (term->move == CRN_WEAK_SAVE)
        return push(u, (todo){.kind = BACKWARD, .l = part->s});
    if (term->move == CRN_WEAK_SAVE_DROP)
        return push(u, (todo){.kind = DROP_SAVED, .l = part->s});
    if (term->move == CRN_WEAK_LAST && gives_up_input(part))
        return push(u, (todo){.kind = DROP_OUTPUT, .l = part->s - 1});
    return CAIRN_OK;
}

static cairn_status solve_part(unfolding *u, const todo *next)
{
    crn_weak_term term = u->decide(u->context, next->part, next->m);
    CRN_TRY(begin(u, &next->part, &term));
    CRN_TRY(push_end(u, &next->part, &term));
    CRN_TRY(push_part(u, term.second, next->m));
    return push_part(u, term.first, next->m - term.first_shift);
}

static cairn_status do_next(unfolding *u)
{
    todo next = u->stack[--u->count];
    switch (next.kind) {
    case BACKWARD:
        return emit(u, CAIRN_OP_BACKWARD, next.l, 0, 0);
    case DROP_SAVED:
        return emit(u, CAIRN_OP_DROP, next.l, 0, CAIRN_VALUE_SAVED);
    case DROP_OUTPUT:
        return emit(u, CAIRN_OP_DROP, next.l, 0, CAIRN_VALUE_OUTPUT);
    case SOLVE:
        break;
    }
    return solve_part(u, &next);
}

cairn_status crn_weak_unfold(const crn_task *task, const crn_weak_model *model, crn_weak_decide *decide,
                             const void *context, int64_t m, cairn_builder *builder, cairn_error *error)
{
    unfolding u = {.model = model,
                   .allocator = crn_allocator(task->env),
                   .decide = decide,
                   .context = context,
                   .builder = builder,
                   .error = error};
    if (!crn_forward_init(&u.forward, &u.allocator, model->chain))
        return crn_no_memory(error);
    cairn_status status = push_part(&u, crn_weak_whole(model), m);
    while (status == CAIRN_OK && u.count > 0)
        status = do_next(&u);
    crn_free(&u.allocator, u.stack, u.capacity, sizeof(*u.stack));
    crn_forward_clear(&u.forward);
    return status;
}
