#include "problem/problem.h"

#include <string.h>

#include "base/checked.h"
#include "base/failure.h"

cairn_status cairn_machine_check(const cairn_machine *machine, cairn_error *error)
{
    if (machine->host_bytes < 0)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "machine.host_bytes", "host_bytes is %lld; at least 0",
                           (long long)machine->host_bytes);
    if (machine->latency_ns < 0)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "machine.latency_ns", "latency_ns is %lld; at least 0",
                           (long long)machine->latency_ns);
    if (machine->to_host_bytes_per_s < 1)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "machine.to_host_bytes_per_s",
                           "to_host_bytes_per_s is %lld; at least 1", (long long)machine->to_host_bytes_per_s);
    if (machine->to_device_bytes_per_s < 1)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "machine.to_device_bytes_per_s",
                           "to_device_bytes_per_s is %lld; at least 1", (long long)machine->to_device_bytes_per_s);
    return CAIRN_OK;
}

int64_t cairn_transfer_ns(int64_t bytes, int64_t bytes_per_s, int64_t latency_ns)
{
    /* bytes * 1e9 / rate, rounded up, without passing 64 bits: whole seconds first, then the rest in 128 bits. */
    if (bytes < 0 || bytes_per_s < 1)
        return CAIRN_NONE;
    int64_t seconds = bytes / bytes_per_s, rest = bytes % bytes_per_s, ns;
    crn_wide part = (crn_wide)(uint64_t)rest * 1000000000u;
    part += (uint64_t)bytes_per_s - 1;
    if (!crn_mul(seconds, 1000000000, &ns) || !crn_add(ns, (int64_t)(part / (uint64_t)bytes_per_s), &ns) ||
        !crn_add(ns, latency_ns, &ns))
        return CAIRN_NONE;
    return ns;
}

/* A text of the info: a copy in the problem's arena, or the text itself. NULL when there is no memory for it. */
static const char *info_text(cairn_problem *problem, const char *text, const char *otherwise, bool copied)
{
    if (!text)
        text = otherwise;
    return copied ? crn_arena_text(&problem->arena, text) : text;
}

static cairn_status take_info(cairn_problem *problem, const cairn_problem_info *info, bool copied, cairn_error *error)
{
    static const cairn_problem_info defaults;
    if (!info)
        info = &defaults;
    if (info->fixed_bytes < 0)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "fixed_bytes", "fixed_bytes is %lld; at least 0",
                           (long long)info->fixed_bytes);
    problem->info.fixed_bytes = info->fixed_bytes;
    problem->info.name = info_text(problem, info->name, "", copied);
    problem->info.provenance = info_text(problem, info->provenance, "{}", copied);
    if (!problem->info.name || !problem->info.provenance)
        return crn_no_memory(error);
    if (info->machine) {
        CRN_TRY(cairn_machine_check(info->machine, error));
        problem->machine = *info->machine;
        problem->info.machine = &problem->machine;
    }
    return CAIRN_OK;
}

cairn_status crn_problem_begin(const cairn_env *env, cairn_problem_kind kind, const cairn_problem_info *info,
                               const crn_arena *own, cairn_problem **problem, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(env));
    cairn_problem *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made) {
        crn_arena_clear(&arena);
        return crn_no_memory(error);
    }
    made->arena = arena;
    made->kind = kind;
    cairn_status status = take_info(made, info, own == NULL, error);
    if (status != CAIRN_OK) {
        cairn_problem_free(made);
        return status;
    }
    *problem = made;
    return CAIRN_OK;
}

void cairn_problem_free(cairn_problem *problem)
{
    if (!problem)
        return;
    crn_arena_clear(&problem->arena);
}

cairn_problem_kind cairn_problem_kind_of(const cairn_problem *problem)
{
    return problem->kind;
}

const cairn_chain *cairn_problem_chain(const cairn_problem *problem)
{
    return problem->kind == CAIRN_KIND_CHAIN ? &problem->chain : NULL;
}

const cairn_graph *cairn_problem_graph(const cairn_problem *problem)
{
    return problem->kind == CAIRN_KIND_GRAPH ? &problem->graph : NULL;
}

const cairn_problem_info *cairn_problem_info_of(const cairn_problem *problem)
{
    return &problem->info;
}

const char *cairn_problem_hash(const cairn_problem *problem)
{
    return problem->hash;
}
