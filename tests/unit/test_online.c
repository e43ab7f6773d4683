/* Online checkpointing of loops whose length is not known. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/cairn.h>

enum { STEPS_MAX = 1500, SLOTS_MAX = 8 };

typedef struct loop {
    int64_t steps, current, next_reverse;
    int64_t slot_step[SLOTS_MAX];
    int32_t slots, times[STEPS_MAX + 1];
    int64_t calls, fail_at;
} loop;

static int may_fail(loop *l)
{
    return ++l->calls == l->fail_at ? -1 : 0;
}

static int step_advance(void *context, int64_t step, bool *last)
{
    loop *l = context;
    assert_int_equal(step, l->current);
    l->times[step]++;
    l->current++;
    *last = l->current == l->steps;
    return may_fail(l);
}

static int step_store(void *context, int64_t step, int32_t slot)
{
    loop *l = context;
    assert_int_equal(step, l->current);
    assert_true(slot >= 0 && slot < l->slots);
    assert_true(slot > 0 || step == 0);
    l->slot_step[slot] = step;
    return may_fail(l);
}

static int step_restore(void *context, int64_t step, int32_t slot)
{
    loop *l = context;
    assert_int_equal(l->slot_step[slot], step);
    l->current = step;
    return may_fail(l);
}

static int step_reverse(void *context, int64_t step)
{
    loop *l = context;
    assert_int_equal(step, l->current);
    assert_int_equal(step, --l->next_reverse);
    l->current = -1;
    return may_fail(l);
}

static cairn_status run_loop(loop *l, int64_t steps, int32_t slots, cairn_online_report *report, cairn_error *error)
{
    cairn_online_callbacks callbacks = {l, step_advance, step_store, step_restore, step_reverse};
    int64_t fail_at = l->fail_at;
    memset(l, 0, sizeof(*l));
    l->fail_at = fail_at;
    l->steps = l->next_reverse = steps;
    l->slots = slots;
    return cairn_exec_online(NULL, slots, &callbacks, report, error);
}

/* The least r with C(s + r, r) >= n. */
static int32_t repetitions_allowed(int32_t s, int64_t n)
{
    int32_t r = 0;
    for (double reach = 1; reach < (double)n; r++)
        reach = reach * (s + r + 1) / (r + 1);
    return r;
}

static void online_runs_keep_their_guarantee(void **state)
{
    (void)state;
    static loop l;
    for (int32_t slots = 1; slots <= SLOTS_MAX; slots++)
        for (int64_t steps = 1; steps <= STEPS_MAX; steps += 1 + steps / 40) {
            cairn_online_report report;
            l.fail_at = 0;
            if (slots == 1 && steps > 300)
                break;
            assert_int_equal(run_loop(&l, steps, slots, &report, NULL), CAIRN_OK);
            assert_int_equal(l.next_reverse, 0);
            assert_int_equal(report.steps, steps);
            int64_t total = 0;
            for (int64_t i = 0; i < steps; i++) {
                total += l.times[i];
                if (l.times[i] - 1 > repetitions_allowed(slots, steps))
                    fail_msg("%d slots, %d steps: step %d advanced %d times more", slots, (int)steps, (int)i,
                             l.times[i] - 1);
            }
            assert_int_equal(report.advances, total);
        }
}

static void online_failures_end_the_run(void **state)
{
    (void)state;
    static loop l;
    cairn_error error;
    l.fail_at = 0;
    assert_int_equal(run_loop(&l, 20, 3, NULL, &error), CAIRN_OK);
    int64_t calls = l.calls;
    for (int64_t at = 1; at <= calls; at++) {
        l.fail_at = at;
        assert_int_equal(run_loop(&l, 20, 3, NULL, &error), CAIRN_CALLBACK);
        assert_int_equal(l.calls, at);
    }
    assert_int_equal(run_loop(&l, 20, 0, NULL, &error), CAIRN_BAD_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(online_runs_keep_their_guarantee),
        cmocka_unit_test(online_failures_end_the_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
