/*
 * The gradient of a time-dependent PDE with few stored states.
 *
 * Burgers' equation u_t + u u_x = nu u_xx on a periodic grid, explicit steps; J = 1/2 |u(T) - target|^2. The gradient of
 * J with respect to the initial state needs all states in reverse order. Part one knows the number of steps, asks
 * Cairn for a schedule within a byte budget, and runs it through callbacks. Part two does not know it (it steps until
 * the wave has decayed) and uses the online mode with a fixed number of slots. The gradients are compared with finite
 * differences and with each other, bit by bit; the memory is counted.
 */
#include <cairn/cairn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POINTS = 256, STEPS = 300, STATES_IN_BUDGET = 12 };

#define STATE_BYTES ((int64_t)(POINTS * sizeof(double)))

static const double dx = 1.0 / POINTS, dt = 2e-4, nu = 5e-3;

/* One time step, and its adjoint: lambda becomes the gradient with respect to the state before the step. */
static void step_forward(const double *u, double *next)
{
    for (int i = 0; i < POINTS; i++) {
        double left = u[(i + POINTS - 1) % POINTS], right = u[(i + 1) % POINTS];
        next[i] = u[i] + dt * (nu * (left - 2 * u[i] + right) / (dx * dx) - u[i] * (right - left) / (2 * dx));
    }
}

static void step_adjoint(const double *u, double *lambda)
{
    double before[POINTS] = {0};
    for (int i = 0; i < POINTS; i++) {
        int l = (i + POINTS - 1) % POINTS, r = (i + 1) % POINTS;
        double diffusion = dt * nu / (dx * dx), advection = dt / (2 * dx);
        before[i] += lambda[i] * (1 - 2 * diffusion - advection * (u[r] - u[l]));
        before[l] += lambda[i] * (diffusion + advection * u[i]);
        before[r] += lambda[i] * (diffusion - advection * u[i]);
    }
    memcpy(lambda, before, sizeof(before));
}

static void initial_state(double *u)
{
    for (int i = 0; i < POINTS; i++)
        u[i] = 1 + 0.5 * sin(2 * acos(-1.0) * i * dx);
}

static double objective(const double *u)
{
    double sum = 0;
    for (int i = 0; i < POINTS; i++)
        sum += 0.5 * (u[i] - 1) * (u[i] - 1);
    return sum;
}

static void objective_gradient(const double *u, double *lambda)
{
    for (int i = 0; i < POINTS; i++)
        lambda[i] = u[i] - 1;
}

static _Noreturn void fail(const char *what, const cairn_error *error)
{
    fprintf(stderr, "pde_adjoint: %s: %s\n", what, error->message);
    exit(1);
}

/* ---- part one: a schedule for a known number of steps ---- */

/* State l is a[l], or A[l], which is the same: a step's adjoint needs the state before it and nothing else. */
typedef struct solver_memory {
    double *state[2][STEPS + 1]; /* by cairn_value */
    double lambda[POINTS];
    int64_t used_bytes, peak_bytes;
    int forwards;
} solver_memory;

static void hold(solver_memory *m, int value, int32_t l)
{
    m->state[value][l] = malloc(sizeof(double[POINTS]));
    if (!m->state[value][l])
        exit(1);
    m->used_bytes += STATE_BYTES;
    m->peak_bytes = m->used_bytes > m->peak_bytes ? m->used_bytes : m->peak_bytes;
}

static void let_go(solver_memory *m, int value, int32_t l)
{
    free(m->state[value][l]);
    m->state[value][l] = NULL;
    m->used_bytes -= STATE_BYTES;
}

static const double *state_before(const solver_memory *m, int32_t l)
{
    const double *output = m->state[CAIRN_VALUE_OUTPUT][l - 1];
    return output ? output : m->state[CAIRN_VALUE_SAVED][l - 1];
}

static int on_forward(void *context, int32_t l, int32_t option, bool save, bool drop_input)
{
    solver_memory *m = context;
    int value = save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT;
    (void)option;
    hold(m, value, l);
    step_forward(state_before(m, l), m->state[value][l]);
    m->forwards++;
    if (drop_input)
        let_go(m, CAIRN_VALUE_OUTPUT, l - 1);
    return 0;
}

static int on_backward(void *context, int32_t l, int32_t option, bool free_input)
{
    solver_memory *m = context;
    (void)option;
    if (l == STEPS)
        objective_gradient(m->state[CAIRN_VALUE_SAVED][l], m->lambda);
    step_adjoint(state_before(m, l), m->lambda);
    let_go(m, CAIRN_VALUE_SAVED, l);
    if (free_input)
        let_go(m, CAIRN_VALUE_OUTPUT, l - 1);
    return 0;
}

static int on_drop(void *context, int32_t l, cairn_value value)
{
    let_go(context, (int)value, l);
    return 0;
}

static cairn_problem *make_problem(void)
{
    static cairn_stage_option option = {"step", STATE_BYTES, 1000, 1500, 0, 0};
    static cairn_stage stages[STEPS];
    cairn_problem *problem;
    cairn_error error;
    for (int i = 0; i < STEPS; i++)
        stages[i] = (cairn_stage){.name = "step",
                                  .output_bytes = STATE_BYTES,
                                  .forward_only_ns = 1000,
                                  .option_count = 1,
                                  .options = &option};
    cairn_chain chain = {.input_bytes = STATE_BYTES, .stage_count = STEPS, .stages = stages};
    if (cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error) != CAIRN_OK)
        fail("problem", &error);
    return problem;
}

static cairn_schedule *make_schedule(const cairn_problem *problem, cairn_info *info)
{
    cairn_schedule *schedule;
    cairn_options *options;
    cairn_error error;
    if (cairn_options_new(NULL, &options, &error) != CAIRN_OK ||
        cairn_options_set_int(options, "budget", STATES_IN_BUDGET * STATE_BYTES, &error) != CAIRN_OK ||
        cairn_solve(NULL, problem, options, &schedule, info, &error) != CAIRN_OK)
        fail("solve", &error);
    cairn_options_free(options);
    if (!schedule) {
        fprintf(stderr, "pde_adjoint: at least %lld bytes are needed\n", (long long)info->least_bytes);
        exit(1);
    }
    return schedule;
}

static void run_scheduled(double gradient[POINTS])
{
    static solver_memory memory;
    cairn_exec_callbacks callbacks = {
        .context = &memory, .forward = on_forward, .backward = on_backward, .drop = on_drop};
    cairn_verified *verified;
    cairn_replay replay;
    cairn_info info;
    cairn_error error;
    cairn_problem *problem = make_problem();
    cairn_schedule *schedule = make_schedule(problem, &info);
    hold(&memory, CAIRN_VALUE_OUTPUT, 0);
    initial_state(memory.state[CAIRN_VALUE_OUTPUT][0]);
    if (cairn_verify(NULL, problem, schedule, CAIRN_RECORDED, &verified, &replay, &error) != CAIRN_OK ||
        cairn_exec_run(NULL, verified, &callbacks, &error) != CAIRN_OK)
        fail("run", &error);
    memcpy(gradient, memory.lambda, sizeof(memory.lambda));
    printf("%d steps with %d states (%lld bytes): %s, %d forward steps, peak %lld bytes measured, %lld predicted\n",
           STEPS, STATES_IN_BUDGET, (long long)info.budget_bytes, info.solver, memory.forwards,
           (long long)memory.peak_bytes, (long long)info.peak_bytes);
    if (memory.peak_bytes > info.budget_bytes)
        exit(1);
    let_go(&memory, CAIRN_VALUE_OUTPUT, 0);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
}

/* ---- part two: steps until the wave has decayed ---- */

typedef struct decaying {
    double current[POINTS], lambda[POINTS], slots[STATES_IN_BUDGET - 1][POINTS];
    double threshold;
    bool reversing;
} decaying;

static int online_advance(void *context, int64_t step, bool *last)
{
    decaying *d = context;
    double next[POINTS];
    (void)step;
    step_forward(d->current, next);
    memcpy(d->current, next, sizeof(next));
    *last = objective(d->current) <= d->threshold;
    if (*last && !d->reversing)
        objective_gradient(d->current, d->lambda);
    d->reversing = d->reversing || *last;
    return 0;
}

static int online_store(void *context, int64_t step, int32_t slot)
{
    decaying *d = context;
    (void)step;
    memcpy(d->slots[slot], d->current, sizeof(d->current));
    return 0;
}

static int online_restore(void *context, int64_t step, int32_t slot)
{
    decaying *d = context;
    (void)step;
    memcpy(d->current, d->slots[slot], sizeof(d->current));
    return 0;
}

static int online_reverse(void *context, int64_t step)
{
    decaying *d = context;
    (void)step;
    step_adjoint(d->current, d->lambda);
    return 0;
}

static void run_online(double threshold, double gradient[POINTS])
{
    static decaying d;
    cairn_online_callbacks callbacks = {&d, online_advance, online_store, online_restore, online_reverse};
    cairn_online_report report;
    cairn_error error;
    d.threshold = threshold;
    initial_state(d.current);
    if (cairn_exec_online(NULL, STATES_IN_BUDGET - 1, &callbacks, &report, &error) != CAIRN_OK)
        fail("online", &error);
    memcpy(gradient, d.lambda, sizeof(d.lambda));
    printf("online, %d slots: stopped after %lld steps, %lld forward steps in total\n", STATES_IN_BUDGET - 1,
           (long long)report.steps, (long long)report.advances);
}

/* ---- checks ---- */

static double objective_after(const double *start)
{
    double u[POINTS], next[POINTS];
    memcpy(u, start, sizeof(u));
    for (int i = 0; i < STEPS; i++) {
        step_forward(u, next);
        memcpy(u, next, sizeof(u));
    }
    return objective(u);
}

static double finite_difference_error(const double *gradient)
{
    double worst = 0, u[POINTS];
    for (int i = 0; i < POINTS; i += 17) {
        initial_state(u);
        u[i] += 1e-5;
        double above = objective_after(u);
        u[i] -= 2e-5;
        double difference = (above - objective_after(u)) / 2e-5;
        worst = fmax(worst, fabs(difference - gradient[i]) / (1e-12 + fabs(gradient[i])));
    }
    return worst;
}

int main(void)
{
    double scheduled[POINTS], online[POINTS], start[POINTS];
    run_scheduled(scheduled);
    initial_state(start);
    run_online(objective_after(start), online);
    double error = finite_difference_error(scheduled);
    bool equal = memcmp(scheduled, online, sizeof(online)) == 0;
    printf("gradient: relative error against finite differences %.1e; scheduled and online %s\n", error,
           equal ? "equal to the bit" : "differ");
    return error < 1e-5 && equal ? 0 : 1;
}
