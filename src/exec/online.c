/*
 * Checkpointing for adjoint loops whose number of steps is not known beforehand.
 *
 * First sweep   Minimal repetition dynamic checkpointing (Q. Wang, P. Moin, G. Iaccarino, SIAM J. Sci. Comput. 31(4),
 *               2009, algorithm 1). Every checkpoint has a level, the initial state an infinite one. While there is a
 *               free slot, the state is stored with level 0. Else a checkpoint is dispensable when a later one has a
 *               higher level: the latest such one makes room for a new one of level 0. Where none is, the newest
 *               checkpoint moves to the current state, one level up.
 * Other sweeps  Backwards from segment to segment. A segment of n steps behind a checkpoint, with c slots that are free
 *               by then, is reversed by binomial checkpointing (A. Griewank, A. Walther, ACM TOMS 26(1), 2000), which is
 *               optimal for its n and c.
 * Guarantee     With n <= C(s + r, r) steps and s slots, the initial state's included, no step is advanced more than r
 *               times after the first sweep. Tested for all s up to 8 and n up to 1,500.
 * Cost          O(s) memory, O(s) work per step of the first sweep.
 */
#include <cairn/exec.h>

#include "base/checked.h"
#include "base/failure.h"
#include "base/memory.h"

typedef struct checkpoint {
    int64_t step; /* it holds the state before this step */
    int32_t level, slot;
} checkpoint;

typedef struct online {
    const cairn_online_callbacks *call;
    checkpoint *checkpoints; /* ascending in step; the first one is the initial state */
    int32_t count, slots;
    int32_t *free_slots; /* slots - count of them */
    int64_t current;     /* the step that the current state is the one before of; CAIRN_NONE = destroyed */
    int64_t advances;
    int64_t failed_step;
} online;

enum { LEVEL_INITIAL = INT32_MAX };

static bool succeeds(online *o, int result, int64_t step)
{
    if (result != 0)
        o->failed_step = step;
    return result == 0;
}

static bool advance(online *o, bool *last)
{
    if (!succeeds(o, o->call->advance(o->call->context, o->current, last), o->current))
        return false;
    o->current++;
    o->advances++;
    return true;
}

static bool advance_to(online *o, int64_t step)
{
    bool ignored = false;
    while (o->current < step)
        if (!advance(o, &ignored))
            return false;
    return true;
}

/* Stores the current state in a slot that is free, as the newest checkpoint. */
static bool push(online *o, int32_t level)
{
    int32_t slot = o->free_slots[o->slots - o->count - 1];
    o->checkpoints[o->count++] = (checkpoint){o->current, level, slot};
    return succeeds(o, o->call->store(o->call->context, o->current, slot), o->current);
}

static void discard(online *o, int32_t at)
{
    o->free_slots[o->slots - o->count] = o->checkpoints[at].slot;
    o->count--;
    for (int32_t i = at; i < o->count; i++)
        o->checkpoints[i] = o->checkpoints[i + 1];
}

/* The latest checkpoint that a later one surpasses in level; -1 when there is none. */
static int32_t find_dispensable(const online *o)
{
    int32_t highest = -1;
    for (int32_t i = o->count - 1; i > 0; i--) {
        if (o->checkpoints[i].level < highest)
            return i;
        highest = (int32_t)crn_max(highest, o->checkpoints[i].level);
    }
    return -1;
}

/* Stores the current state, making room as the rule says. */
static bool checkpoint_online(online *o)
{
    if (o->count < o->slots)
        return push(o, 0);
    int32_t dispensable = find_dispensable(o), newest = o->count - 1;
    if (dispensable > 0) {
        discard(o, dispensable);
        return push(o, 0);
    }
    if (newest == 0) /* the initial state alone: it stays */
        return true;
    int32_t level = o->checkpoints[newest].level + 1;
    discard(o, newest);
    return push(o, level);
}

static bool sweep_forward(online *o)
{
    bool last = false;
    if (!push(o, LEVEL_INITIAL))
        return false;
    while (!last)
        if ((o->current > 0 && !checkpoint_online(o)) || !advance(o, &last))
            return false;
    return true;
}

/* C(s + r, s), the number of steps that s slots reverse when no step is advanced more than r times; cut off at limit. */
static int64_t binomial(int32_t s, int64_t r, int64_t limit)
{
    int64_t value = 1;
    if (r < 0)
        return 0;
    for (int64_t i = 1; i <= s; i++) {
        crn_wide next = (crn_wide)value * (crn_wide)(r + i) / (crn_wide)i;
        if (next >= (crn_wide)limit)
            return limit;
        value = (int64_t)next;
    }
    return value;
}

/* Where the first checkpoint of n > 1 steps stands when s slots, that of the segment's start included, reverse them. */
static int64_t split(int64_t n, int32_t s)
{
    int64_t r = 1;
    while (binomial(s, r, n) < n)
        r++;
    return crn_max(1, crn_min(binomial(s, r - 1, n), n - binomial(s - 1, r - 1, n)));
}

static bool go_to(online *o, const checkpoint *from)
{
    if (o->current == from->step)
        return true;
    o->current = from->step;
    return succeeds(o, o->call->restore(o->call->context, from->step, from->slot), from->step);
}

/* Reverses the last step before `end`, or leaves a checkpoint on the way to it. */
static bool reverse_some(online *o, int64_t *end)
{
    const checkpoint *newest = &o->checkpoints[o->count - 1];
    int64_t steps = *end - newest->step;
    int32_t free_count = o->slots - o->count;
    if (steps == 0) {
        discard(o, o->count - 1);
        return true;
    }
    if (!go_to(o, newest))
        return false;
    if (steps > 1 && free_count > 0)
        return advance_to(o, newest->step + split(steps, free_count + 1)) && push(o, 0);
    if (!advance_to(o, *end - 1))
        return false;
    --*end;
    o->current = CAIRN_NONE;
    return succeeds(o, o->call->reverse(o->call->context, *end), *end);
}

static bool run_online(online *o, cairn_online_report *report)
{
    if (!sweep_forward(o))
        return false;
    int64_t end = o->current;
    report->steps = end;
    while (end > 0)
        if (!reverse_some(o, &end))
            return false;
    report->advances = o->advances;
    return true;
}

cairn_status cairn_exec_online(const cairn_env *env, int32_t slots, const cairn_online_callbacks *callbacks,
                               cairn_online_report *report, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    cairn_online_report ignored;
    if (slots < 1)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "%d slots; at least 1, for the initial state", slots);
    if (!callbacks->advance || !callbacks->store || !callbacks->restore || !callbacks->reverse)
        return crn_fail(error, CAIRN_BAD_ARGUMENT, "a callback is NULL");
    online o = {.call = callbacks, .slots = slots};
    o.checkpoints = crn_alloc(&allocator, (size_t)slots, sizeof(*o.checkpoints));
    o.free_slots = crn_alloc(&allocator, (size_t)slots, sizeof(*o.free_slots));
    cairn_status status = CAIRN_OK;
    if (!o.checkpoints || !o.free_slots) {
        status = crn_no_memory(error);
    } else {
        for (int32_t i = 0; i < slots; i++)
            o.free_slots[i] = slots - 1 - i;
        if (!run_online(&o, report ? report : &ignored))
            status = crn_fail_at(error, CAIRN_CALLBACK, o.failed_step, NULL, "a callback failed at step %lld",
                                 (long long)o.failed_step);
    }
    crn_free(&allocator, o.checkpoints, (size_t)slots, sizeof(*o.checkpoints));
    crn_free(&allocator, o.free_slots, (size_t)slots, sizeof(*o.free_slots));
    return status;
}
