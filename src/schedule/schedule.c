/*
 * The immutable schedule and its hash.
 *
 * The hash is SHA-256 over bytes: the text "cairn-schedule 1\n", the problem's hash as text and a newline, the machine,
 * then eight bytes an operation. The machine is one byte 0 where the schedule has none of its own, else one byte 1 and
 * host_bytes, to_host_bytes_per_s, to_device_bytes_per_s, latency_ns and shared_link. An operation is its code, value,
 * option (2 bytes) and index (4 bytes). Numbers are little-endian, 8 bytes where nothing else is said. What a schedule
 * merely records (solver, budget, times) does not count: two solvers that find the same operations agree.
 */
#include <string.h>

#include "base/failure.h"
#include "schedule/schedule.h"

/* ---- hash ---- */

static uint8_t *put(uint8_t *bytes, uint64_t number, int width)
{
    for (int i = 0; i < width; i++)
        *bytes++ = (uint8_t)(number >> 8 * i);
    return bytes;
}

static void hash_text(crn_sha256 *hash, const char *text)
{
    crn_sha256_add(hash, text, strlen(text));
}

static void hash_machine(crn_sha256 *hash, const cairn_machine *machine)
{
    uint8_t bytes[1 + 5 * 8], *end = bytes;
    end = put(end, machine != NULL, 1);
    if (machine) {
        end = put(end, (uint64_t)machine->host_bytes, 8);
        end = put(end, (uint64_t)machine->to_host_bytes_per_s, 8);
        end = put(end, (uint64_t)machine->to_device_bytes_per_s, 8);
        end = put(end, (uint64_t)machine->latency_ns, 8);
        end = put(end, machine->shared_link, 8);
    }
    crn_sha256_add(hash, bytes, (size_t)(end - bytes));
}

static void hash_ops(crn_sha256 *hash, const cairn_op *ops, int64_t count)
{
    enum { BATCH = 256 };
    uint8_t bytes[BATCH * 8];
    for (int64_t i = 0; i < count;) {
        uint8_t *end = bytes;
        for (; i < count && end < bytes + sizeof(bytes); i++) {
            end = put(end, ops[i].code, 1);
            end = put(end, ops[i].value, 1);
            end = put(end, ops[i].option, 2);
            end = put(end, (uint32_t)ops[i].index, 4);
        }
        crn_sha256_add(hash, bytes, (size_t)(end - bytes));
    }
}

static void fill_hash(cairn_schedule *schedule)
{
    crn_sha256 hash;
    crn_sha256_init(&hash);
    hash_text(&hash, "cairn-schedule 1\n");
    hash_text(&hash, schedule->problem_hash);
    hash_text(&hash, "\n");
    hash_machine(&hash, schedule->info.machine);
    hash_ops(&hash, schedule->ops, schedule->count);
    crn_sha256_text(&hash, schedule->hash);
}

/* ---- making one ---- */

static cairn_status check_recorded(const char *field, int64_t value, cairn_error *error)
{
    if (value >= 0 || value == CAIRN_NONE)
        return CAIRN_OK;
    return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, field, "%s is %lld; at least 0", field, (long long)value);
}

static cairn_status check_info(const cairn_schedule_info *info, cairn_error *error)
{
    CRN_TRY(check_recorded("budget_bytes", info->budget_bytes, error));
    CRN_TRY(check_recorded("makespan_ns", info->makespan_ns, error));
    CRN_TRY(check_recorded("peak_bytes", info->peak_bytes, error));
    CRN_TRY(check_recorded("lower_bound_ns", info->lower_bound_ns, error));
    return info->machine ? cairn_machine_check(info->machine, error) : CAIRN_OK;
}

static bool same_machine(const cairn_machine *a, const cairn_machine *b)
{
    return a && b && a->host_bytes == b->host_bytes && a->latency_ns == b->latency_ns &&
           a->to_host_bytes_per_s == b->to_host_bytes_per_s && a->to_device_bytes_per_s == b->to_device_bytes_per_s &&
           a->shared_link == b->shared_link;
}

static bool copy_info(cairn_schedule *schedule, const cairn_schedule_info *info, const cairn_problem *problem)
{
    schedule->info = *info;
    schedule->info.machine = NULL;
    if (info->machine && !same_machine(info->machine, cairn_problem_info_of(problem)->machine)) {
        schedule->machine = *info->machine;
        schedule->info.machine = &schedule->machine;
    }
    if (info->solver)
        schedule->info.solver = crn_arena_text(&schedule->arena, info->solver);
    return !info->solver || schedule->info.solver;
}

static bool copy_ops(cairn_schedule *schedule, const cairn_op *ops, int64_t count)
{
    cairn_op *copy = crn_arena_alloc(&schedule->arena, (size_t)count, sizeof(*ops));
    schedule->ops = copy;
    schedule->count = count;
    if (copy && count > 0)
        memcpy(copy, ops, (size_t)count * sizeof(*ops));
    return copy != NULL;
}

cairn_status crn_schedule_new(cairn_allocator allocator, const cairn_problem *problem, const cairn_op *ops,
                              int64_t count, const cairn_schedule_info *info, cairn_schedule **schedule,
                              cairn_error *error)
{
    static const cairn_schedule_info nothing = CAIRN_SCHEDULE_INFO_INIT;
    crn_arena arena;
    *schedule = NULL;
    info = info ? info : &nothing;
    CRN_TRY(check_info(info, error));
    crn_arena_init(&arena, allocator);
    cairn_schedule *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    made->kind = cairn_problem_kind_of(problem);
    memcpy(made->problem_hash, cairn_problem_hash(problem), sizeof(made->problem_hash));
    if (!copy_info(made, info, problem) || !copy_ops(made, ops, count)) {
        cairn_schedule_free(made);
        return crn_no_memory(error);
    }
    fill_hash(made);
    *schedule = made;
    return CAIRN_OK;
}

void crn_schedule_borrow(const cairn_problem *problem, const cairn_op *ops, int64_t count, const cairn_machine *machine,
                         cairn_schedule *schedule)
{
    const cairn_schedule_info info = {NULL, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, CAIRN_NONE, machine};
    *schedule = (cairn_schedule){.kind = cairn_problem_kind_of(problem), .count = count, .ops = ops};
    memcpy(schedule->problem_hash, cairn_problem_hash(problem), sizeof(schedule->problem_hash));
    copy_info(schedule, &info, problem); /* allocates nothing where there is no name to copy */
}

void cairn_schedule_free(cairn_schedule *schedule)
{
    if (!schedule)
        return;
    crn_arena_clear(&schedule->arena);
}

/* ---- looking at one ---- */

int64_t cairn_schedule_count(const cairn_schedule *schedule)
{
    return schedule->count;
}

const cairn_op *cairn_schedule_ops(const cairn_schedule *schedule)
{
    return schedule->ops;
}

const cairn_schedule_info *cairn_schedule_info_of(const cairn_schedule *schedule)
{
    return &schedule->info;
}

cairn_problem_kind cairn_schedule_kind(const cairn_schedule *schedule)
{
    return schedule->kind;
}

const char *cairn_schedule_problem_hash(const cairn_schedule *schedule)
{
    return schedule->problem_hash;
}

const char *cairn_schedule_hash(const cairn_schedule *schedule)
{
    return schedule->hash;
}
