/* Statuses, errors, arithmetic, memory and threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/failure.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "base/queue.h"

static void statuses_have_names_and_texts(void **state)
{
    (void)state;
    for (int s = 0; s < CAIRN_STATUS_COUNT; s++) {
        assert_true(strlen(cairn_status_name((cairn_status)s)) > 1);
        assert_true(strlen(cairn_status_text((cairn_status)s)) > 10);
        for (int other = 0; other < s; other++)
            assert_string_not_equal(cairn_status_name((cairn_status)s), cairn_status_name((cairn_status)other));
    }
    assert_string_equal(cairn_status_name((cairn_status)-1), "unknown");
    assert_string_equal(cairn_status_name(CAIRN_STATUS_COUNT), "unknown");
    assert_string_equal(cairn_version(), "0.1.0");
}

static void errors_carry_positions_and_cut_long_texts(void **state)
{
    (void)state;
    cairn_error error;
    char longer[2 * CAIRN_ERROR_MESSAGE_MAX];
    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    assert_int_equal(crn_fail_at(&error, CAIRN_BAD_INPUT, 7, "stages[6].name", "%s", longer), CAIRN_BAD_INPUT);
    assert_int_equal(error.status, CAIRN_BAD_INPUT);
    assert_int_equal(error.index, 7);
    assert_int_equal(error.line, CAIRN_NONE);
    assert_string_equal(error.path, "stages[6].name");
    assert_int_equal(strlen(error.message), CAIRN_ERROR_MESSAGE_MAX - 1);
    assert_int_equal(crn_fail(NULL, CAIRN_IO, "nobody reads this"), CAIRN_IO);
    assert_int_equal(crn_no_memory(&error), CAIRN_NO_MEMORY);
    assert_string_equal(error.path, "");
}

static void arithmetic_reports_overflow(void **state)
{
    (void)state;
    int64_t result;
    assert_true(crn_add(INT64_MAX - 1, 1, &result) && result == INT64_MAX);
    assert_false(crn_add(INT64_MAX, 1, &result));
    assert_false(crn_sub(INT64_MIN, 1, &result));
    assert_false(crn_mul(INT64_MAX / 2 + 1, 2, &result));
    assert_true(crn_mul(-3, 4, &result) && result == -12);
}

static void arrays_of_impossible_size_are_refused(void **state)
{
    (void)state;
    cairn_allocator allocator = crn_allocator(NULL);
    assert_null(crn_alloc(&allocator, SIZE_MAX / 2, 3));
    assert_null(crn_alloc(&allocator, SIZE_MAX, 1));
    void *empty = crn_alloc(&allocator, 0, 8);
    assert_non_null(empty);
    crn_free(&allocator, empty, 0, 8);
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static int64_t process_peak_bytes(void)
{
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return (int64_t)usage.ru_maxrss * 1024;
}

/* The pages of a large block move when it grows; a copy would be half of it again. */
static void a_large_block_grows_without_a_copy(void **state)
{
    (void)state;
    enum { BYTES = 64 << 20 };
    cairn_allocator allocator = crn_allocator(NULL);
    int64_t before = process_peak_bytes();
    char *block = crn_alloc(&allocator, BYTES, 1);
    assert_non_null(block);
    memset(block, 1, BYTES);
    block = crn_realloc(&allocator, block, BYTES, 2 * (size_t)BYTES, 1);
    assert_non_null(block);
    assert_int_equal(block[BYTES - 1], 1);
    assert_true(process_peak_bytes() - before < BYTES + BYTES / 4);
    crn_free(&allocator, block, 2 * (size_t)BYTES, 1);
}
#endif

static crn_arena metered_arena(crn_meter *meter)
{
    crn_arena arena;
    crn_meter_init(meter, crn_allocator(NULL), CAIRN_NONE);
    crn_arena_init(&arena, crn_meter_allocator(meter));
    return arena;
}

static void an_arena_aligns_and_frees_everything(void **state)
{
    (void)state;
    crn_meter meter;
    crn_arena arena = metered_arena(&meter);
    long long asked = 0;
    for (size_t size = 1; size < 20000; size = size * 3 + 1) {
        unsigned char *memory = crn_arena_alloc_zero(&arena, size, 1);
        asked += (long long)size;
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % _Alignof(max_align_t), 0);
        for (size_t i = 0; i < size; i++)
            assert_int_equal(memory[i], 0);
        memset(memory, 0xff, size);
    }
    assert_string_equal(crn_arena_text(&arena, "a cairn"), "a cairn");
    assert_null(crn_arena_alloc(&arena, SIZE_MAX / 2, 2));
    crn_arena_clear(&arena);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
    assert_in_range(atomic_load(&meter.peak_bytes), asked, 2 * asked);
}

static void a_large_arena_wastes_little(void **state)
{
    (void)state;
    crn_meter meter;
    crn_arena arena = metered_arena(&meter);
    long long asked = 0;
    for (size_t i = 0; i < 20000; i++) {
        size_t size = 16 * (1 + i * 7919 % 1000); /* 160 MB of up to 16 kB: huge pages, too */
        unsigned char *memory = crn_arena_alloc(&arena, size, 1);
        assert_non_null(memory);
        memory[0] = memory[size - 1] = 1;
        asked += (long long)size;
    }
    assert_in_range(atomic_load(&meter.used_bytes), asked, asked + asked / 8);
    crn_arena_clear(&arena);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
}

static void an_arena_may_lie_in_its_own_memory(void **state)
{
    (void)state;
    crn_meter meter;
    crn_arena arena = metered_arena(&meter);
    crn_arena *inside = crn_arena_alloc(&arena, 1, sizeof(*inside));
    assert_non_null(inside);
    *inside = arena;
    for (int i = 0; i < 100; i++)
        assert_non_null(crn_arena_alloc(inside, 1000, 1));
    crn_arena_clear(inside);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
}

static void a_meter_refuses_what_passes_its_limit(void **state)
{
    (void)state;
    crn_meter meter;
    crn_meter_init(&meter, crn_allocator(NULL), 100);
    cairn_allocator allocator = crn_meter_allocator(&meter);
    char *block = crn_alloc(&allocator, 60, 1);
    assert_non_null(block);
    assert_null(crn_alloc(&allocator, 60, 1));
    assert_true(atomic_load(&meter.refused));
    block = crn_realloc(&allocator, block, 60, 100, 1);
    assert_non_null(block);
    assert_null(crn_realloc(&allocator, block, 100, 101, 1));
    crn_free(&allocator, block, 100, 1);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
    assert_int_equal(atomic_load(&meter.peak_bytes), 100);
}

static void an_array_grows_by_more_than_is_asked_for(void **state)
{
    (void)state;
    crn_meter meter;
    crn_meter_init(&meter, crn_allocator(NULL), 4000);
    cairn_allocator allocator = crn_meter_allocator(&meter);
    size_t capacity = 0, growths = 0;
    int32_t *numbers = NULL;
    for (size_t count = 1; count <= 500; count++) {
        if (count > capacity) {
            numbers = crn_grow(&allocator, numbers, &capacity, count, sizeof(*numbers));
            assert_true(numbers && capacity >= count);
            growths++;
        }
        numbers[count - 1] = (int32_t)count;
    }
    assert_true(growths < 10 && numbers[0] == 1 && numbers[499] == 500);
    size_t before = capacity;
    assert_null(crn_grow(&allocator, numbers, &capacity, 1000, sizeof(*numbers)));
    assert_true(capacity == before && numbers[499] == 500);
    crn_free(&allocator, numbers, capacity, sizeof(*numbers));
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
}

/* The processor's instructions, where it has them, and the portable text make the same of any blocks. */
/* In turn small blocks that fit together, and one that never does. */
typedef struct crowd {
    cairn_allocator allocator;
    atomic_int wrong;
} crowd;

enum { CROWD_MEMBERS = 4, CROWD_BYTES = 16, CROWD_ROUNDS = 200000 };

static void join_crowd(void *context, int64_t i, int worker)
{
    crowd *c = context;
    (void)worker;
    for (int round = 0; round < CROWD_ROUNDS; round++) {
        void *block = crn_alloc(&c->allocator, 1, i % 2 == 0 ? CROWD_BYTES : (size_t)1 << 40);
        atomic_fetch_add(&c->wrong, (block != NULL) != (i % 2 == 0));
        crn_free(&c->allocator, block, 1, CROWD_BYTES);
    }
}

static void what_a_meter_refuses_is_not_counted(void **state)
{
    (void)state;
    crn_meter meter;
    cairn_allocator plain = crn_allocator(NULL);
    crn_team *team = crn_team_new(&plain, CROWD_MEMBERS);
    crn_meter_init(&meter, plain, (int64_t)CROWD_MEMBERS * CROWD_BYTES);
    crowd c = {.allocator = crn_meter_allocator(&meter)};
    assert_non_null(team);
    crn_team_run(team, CROWD_MEMBERS, join_crowd, &c);
    crn_team_free(team);
    assert_int_equal(atomic_load(&c.wrong), 0);
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
    assert_true(atomic_load(&meter.peak_bytes) <= meter.limit_bytes);
}

typedef struct marks {
    int times[5000];
    int team_size;
    atomic_int bad_worker;
} marks;

/* Numbers below 1000 in a scattered order, with many equal bounds and ranks. */
static crn_queue_entry scattered_entry(int32_t i)
{
    int32_t item = (i * 389) % 1000;
    return (crn_queue_entry){item % 7 - 3, item % 5 - 2, item};
}

static bool is_in_order(const crn_queue_entry *a, const crn_queue_entry *b)
{
    if (a->bound != b->bound)
        return a->bound < b->bound;
    return a->rank != b->rank ? a->rank < b->rank : a->item < b->item;
}

static void a_queue_gives_the_least_first(void **state)
{
    (void)state;
    crn_queue queue;
    crn_queue_init(&queue, crn_allocator(NULL));
    for (int32_t i = 0; i < 1000; i++) {
        assert_true(crn_queue_make_room(&queue));
        crn_queue_push(&queue, scattered_entry(i));
        if (i % 10 == 9) /* pops between the pushes: what is taken out comes back */
            crn_queue_push(&queue, crn_queue_pop(&queue));
    }
    crn_queue_entry before = crn_queue_pop(&queue);
    for (int32_t i = 1; i < 1000; i++) {
        crn_queue_entry next = crn_queue_pop(&queue);
        assert_true(is_in_order(&before, &next));
        before = next;
    }
    assert_int_equal(queue.count, 0);
    crn_queue_clear(&queue);
}

static void a_queue_without_memory_stays_as_it_is(void **state)
{
    (void)state;
    crn_meter meter;
    crn_queue queue;
    crn_meter_init(&meter, crn_allocator(NULL), 1024 * (int64_t)sizeof(crn_queue_entry));
    crn_queue_init(&queue, crn_meter_allocator(&meter));
    for (int32_t i = 0; i < 1000; i++) {
        assert_true(crn_queue_make_room(&queue));
        crn_queue_push(&queue, scattered_entry(i));
    }
    while (queue.count < queue.capacity)
        crn_queue_push(&queue, (crn_queue_entry){9, 0, queue.count});
    assert_false(crn_queue_make_room(&queue));
    assert_int_equal(queue.count, queue.capacity);
    crn_queue_entry first = crn_queue_pop(&queue);
    assert_true(first.bound == -3 && first.rank == -2 && first.item == 0);
    crn_queue_clear(&queue);
    assert_true(atomic_load(&meter.used_bytes) == 0);
}

static void mark(void *context, int64_t i, int worker)
{
    marks *m = context;
    m->times[i]++;
    if (worker < 0 || worker >= m->team_size)
        atomic_store(&m->bad_worker, 1);
}

static void a_team_runs_every_iteration_once(void **state)
{
    (void)state;
    cairn_allocator allocator = crn_allocator(NULL);
    for (int threads = 0; threads <= 4; threads++) {
        crn_team *team = crn_team_new(&allocator, threads);
        assert_non_null(team);
        for (int64_t count = 0; count <= 5000; count = count * 7 + 1) {
            marks m = {.team_size = crn_team_size(team)};
            crn_team_run(team, count, mark, &m);
            for (int64_t i = 0; i < 5000; i++)
                assert_int_equal(m.times[i], i < count ? 1 : 0);
            assert_int_equal(atomic_load(&m.bad_worker), 0);
        }
        crn_team_free(team);
    }
    marks alone = {.team_size = 1};
    crn_team_run(NULL, 10, mark, &alone);
    assert_int_equal(alone.times[9], 1);
    crn_team_free(NULL);
}

/* Every length up to 200, from and to addresses that are not aligned, with nothing read or written beside it. */
static void truth_values_survive_as_bits(void **state)
{
    (void)state;
    enum { MOST = 200, GUARD = 0xa5 };
    for (int64_t count = 0; count <= MOST; count++)
        for (int offset = 0; offset < 9; offset++) {
            unsigned char given[MOST + 10], bits[MOST / 8 + 12], back[MOST + 12];
            memset(bits, GUARD, sizeof(bits));
            memset(back, GUARD, sizeof(back));
            for (int64_t i = 0; i < count; i++) /* what is not zero is true: 1, 2, 128, ... */
                given[offset + i] = (unsigned char)((i * 7 + count) % 3 == 0 ? 0 : 1 << ((i * 5 + offset) % 8));
            const unsigned char pair[2] = {0, 1};
            cairn_bits_pack(given + offset, 1, count, bits + offset);
            int64_t bytes = (count + 7) / 8;
            for (int64_t i = 0; i < 8 * bytes; i++)
                assert_int_equal((bits[offset + i / 8] >> (i % 8)) & 1, i < count && given[offset + i] != 0);
            assert_int_equal(bits[offset + bytes], GUARD);
            cairn_bits_unpack(bits + offset, count, pair, 1, back + offset);
            for (int64_t i = 0; i < count; i++)
                assert_int_equal(back[offset + i], given[offset + i] != 0);
            assert_int_equal(back[offset + count], GUARD);
            assert_true(offset == 0 || (bits[offset - 1] == GUARD && back[offset - 1] == GUARD));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statuses_have_names_and_texts),
        cmocka_unit_test(errors_carry_positions_and_cut_long_texts),
        cmocka_unit_test(arithmetic_reports_overflow),
        cmocka_unit_test(arrays_of_impossible_size_are_refused),
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(a_large_block_grows_without_a_copy),
#endif
        cmocka_unit_test(an_arena_aligns_and_frees_everything),
        cmocka_unit_test(a_large_arena_wastes_little),
        cmocka_unit_test(an_arena_may_lie_in_its_own_memory),
        cmocka_unit_test(a_meter_refuses_what_passes_its_limit),
        cmocka_unit_test(an_array_grows_by_more_than_is_asked_for),
        cmocka_unit_test(what_a_meter_refuses_is_not_counted),
        cmocka_unit_test(a_queue_gives_the_least_first),
        cmocka_unit_test(a_queue_without_memory_stays_as_it_is),
        cmocka_unit_test(a_team_runs_every_iteration_once),
        cmocka_unit_test(truth_values_survive_as_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
