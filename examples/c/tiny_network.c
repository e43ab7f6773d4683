/*
 * A small network trained in C under a byte budget, with gradients equal to the bit.
 *
 * Layers of different widths, y = tanh(W x + b), fitted to a function of two variables by gradient descent. The saved
 * set of a layer is its output: the backward of tanh needs nothing else but the layer's input. The network is trained
 * twice, once with everything stored and once near the least memory that will do, both by running a schedule through callbacks; losses
 * and weights must be equal to the bit, and the memory that was counted within the budget.
 */
#include <cairn/cairn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 12, BATCH = 64, EPOCHS = 20, INPUTS = 2 };

static const int widths[LAYERS + 1] = {INPUTS, 48, 24, 64, 16, 40, 32, 56, 12, 48, 20, 32, 1};

typedef struct network {
    double *weight[LAYERS + 1], *bias[LAYERS + 1]; /* of layer l = 1 .. LAYERS */
    double *value[2][LAYERS + 1];                  /* a[l] and A[l], by cairn_value; a[0] is the batch */
    double *gradient;                              /* d[l] of the layer that is next */
    double target[BATCH], loss;
    int64_t used_bytes, peak_bytes;
    int forwards;
} network;

static int64_t size_of(int32_t l)
{
    return (int64_t)BATCH * widths[l] * (int64_t)sizeof(double);
}

static double *take(network *n, int32_t l)
{
    double *memory = malloc((size_t)size_of(l));
    if (!memory)
        exit(1);
    n->used_bytes += size_of(l);
    n->peak_bytes = n->used_bytes > n->peak_bytes ? n->used_bytes : n->peak_bytes;
    return memory;
}

static void give_back(network *n, double **memory, int32_t l)
{
    free(*memory);
    *memory = NULL;
    n->used_bytes -= size_of(l);
}

static const double *input_of(const network *n, int32_t l)
{
    return n->value[CAIRN_VALUE_OUTPUT][l - 1] ? n->value[CAIRN_VALUE_OUTPUT][l - 1]
                                               : n->value[CAIRN_VALUE_SAVED][l - 1];
}

static int on_forward(void *context, int32_t l, int32_t option, bool save, bool drop_input)
{
    network *n = context;
    const double *x = input_of(n, l);
    double *y = take(n, l);
    (void)option;
    for (int b = 0; b < BATCH; b++)
        for (int j = 0; j < widths[l]; j++) {
            double sum = n->bias[l][j];
            for (int i = 0; i < widths[l - 1]; i++)
                sum += n->weight[l][j * widths[l - 1] + i] * x[b * widths[l - 1] + i];
            y[b * widths[l] + j] = l < LAYERS ? tanh(sum) : sum;
        }
    n->value[save ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT][l] = y;
    n->forwards++;
    if (drop_input)
        give_back(n, &n->value[CAIRN_VALUE_OUTPUT][l - 1], l - 1);
    return 0;
}

static void loss_gradient(network *n)
{
    const double *y = n->value[CAIRN_VALUE_SAVED][LAYERS];
    n->loss = 0;
    for (int b = 0; b < BATCH; b++) {
        n->gradient[b] = (y[b] - n->target[b]) / BATCH;
        n->loss += 0.5 * (y[b] - n->target[b]) * (y[b] - n->target[b]) / BATCH;
    }
}

/* The layer's update is made at once: in this chain nothing reads its weights again before the next step. */
static void update(network *n, int32_t l, const double *x, const double *delta)
{
    const double rate = 0.05;
    for (int j = 0; j < widths[l]; j++) {
        double sum = 0;
        for (int b = 0; b < BATCH; b++)
            sum += delta[b * widths[l] + j];
        n->bias[l][j] -= rate * sum;
        for (int i = 0; i < widths[l - 1]; i++) {
            double slope = 0;
            for (int b = 0; b < BATCH; b++)
                slope += delta[b * widths[l] + j] * x[b * widths[l - 1] + i];
            n->weight[l][j * widths[l - 1] + i] -= rate * slope;
        }
    }
}

static int on_backward(void *context, int32_t l, int32_t option, bool free_input)
{
    network *n = context;
    const double *x = input_of(n, l), *y = n->value[CAIRN_VALUE_SAVED][l];
    double *before = take(n, l - 1);
    (void)option;
    if (l == LAYERS)
        loss_gradient(n);
    for (int k = 0; k < BATCH * widths[l]; k++)
        n->gradient[k] *= l < LAYERS ? 1 - y[k] * y[k] : 1;
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < widths[l - 1]; i++) {
            double sum = 0;
            for (int j = 0; j < widths[l]; j++)
                sum += n->gradient[b * widths[l] + j] * n->weight[l][j * widths[l - 1] + i];
            before[b * widths[l - 1] + i] = sum;
        }
    update(n, l, x, n->gradient);
    give_back(n, &n->gradient, l);
    n->gradient = before;
    give_back(n, &n->value[CAIRN_VALUE_SAVED][l], l);
    if (free_input)
        give_back(n, &n->value[CAIRN_VALUE_OUTPUT][l - 1], l - 1);
    return 0;
}

static int on_drop(void *context, int32_t l, cairn_value value)
{
    network *n = context;
    give_back(n, &n->value[value][l], l);
    return 0;
}

static double uniform(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53 * 2 - 1;
}

static void network_init(network *n, uint64_t *random)
{
    memset(n, 0, sizeof(*n));
    for (int l = 1; l <= LAYERS; l++) {
        n->weight[l] = malloc(sizeof(double) * (size_t)(widths[l] * widths[l - 1]));
        n->bias[l] = calloc((size_t)widths[l], sizeof(double));
        if (!n->weight[l] || !n->bias[l])
            exit(1);
        for (int k = 0; k < widths[l] * widths[l - 1]; k++)
            n->weight[l][k] = uniform(random) * sqrt(3.0 / widths[l - 1]);
    }
    n->value[CAIRN_VALUE_OUTPUT][0] = take(n, 0);
}

static void network_free(network *n)
{
    for (int l = 1; l <= LAYERS; l++) {
        free(n->weight[l]);
        free(n->bias[l]);
    }
    give_back(n, &n->value[CAIRN_VALUE_OUTPUT][0], 0);
}

static void new_batch(network *n, uint64_t *random)
{
    double *x = n->value[CAIRN_VALUE_OUTPUT][0];
    for (int b = 0; b < BATCH; b++) {
        x[2 * b] = uniform(random);
        x[2 * b + 1] = uniform(random);
        n->target[b] = sin(3 * x[2 * b]) * x[2 * b + 1];
    }
}

static void check(cairn_status status, const char *what, const cairn_error *error)
{
    if (status == CAIRN_OK)
        return;
    fprintf(stderr, "tiny_network: %s: %s\n", what, error->message);
    exit(1);
}

/* The chain: sizes are known, times are taken to be the number of multiplications. */
static cairn_problem *make_problem(void)
{
    cairn_stage_option options[LAYERS];
    cairn_stage stages[LAYERS];
    cairn_problem *problem;
    cairn_error error;
    for (int l = 1; l <= LAYERS; l++) {
        int64_t work = (int64_t)BATCH * widths[l] * widths[l - 1];
        options[l - 1] = (cairn_stage_option){"keep", size_of(l), work, 2 * work, 0, 0};
        stages[l - 1] = (cairn_stage){.name = "layer",
                                      .output_bytes = size_of(l),
                                      .grad_bytes = size_of(l),
                                      .forward_only_ns = work,
                                      .option_count = 1,
                                      .options = &options[l - 1]};
    }
    cairn_chain chain = {size_of(0), size_of(0), LAYERS, stages};
    check(cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error), "problem", &error);
    return problem;
}

static cairn_verified *plan(const cairn_problem *problem, int64_t budget_bytes, cairn_schedule **schedule,
                            cairn_info *info)
{
    cairn_options *options;
    cairn_verified *verified;
    cairn_replay replay;
    cairn_error error;
    check(cairn_options_new(NULL, &options, &error), "options", &error);
    check(cairn_options_set_int(options, "budget", budget_bytes, &error), "budget", &error);
    check(cairn_solve(NULL, problem, options, schedule, info, &error), "solve", &error);
    cairn_options_free(options);
    if (!*schedule) {
        fprintf(stderr, "tiny_network: at least %lld bytes are needed\n", (long long)info->least_bytes);
        exit(1);
    }
    check(cairn_verify(NULL, problem, *schedule, CAIRN_RECORDED, &verified, &replay, &error), "verify", &error);
    return verified;
}

static void train(network *n, const cairn_problem *problem, int64_t budget_bytes)
{
    uint64_t random = 1;
    cairn_exec_callbacks callbacks = {.context = n, .forward = on_forward, .backward = on_backward, .drop = on_drop};
    cairn_schedule *schedule;
    cairn_info info;
    cairn_error error;
    cairn_verified *verified = plan(problem, budget_bytes, &schedule, &info);
    network_init(n, &random);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        new_batch(n, &random);
        n->gradient = take(n, LAYERS);
        check(cairn_exec_run(NULL, verified, &callbacks, &error), "step", &error);
        give_back(n, &n->gradient, 0);
    }
    printf("budget %7lld bytes: peak %7lld measured, %7lld predicted; %3d forwards a step; loss %.17g\n",
           (long long)budget_bytes, (long long)n->peak_bytes, (long long)info.peak_bytes, n->forwards / EPOCHS,
           n->loss);
    cairn_verified_free(verified);
    cairn_schedule_free(schedule);
}

static bool equal(const network *a, const network *b)
{
    bool same = a->loss == b->loss;
    for (int l = 1; l <= LAYERS; l++)
        same = same && memcmp(a->weight[l], b->weight[l], sizeof(double) * (size_t)(widths[l] * widths[l - 1])) == 0;
    return same;
}

int main(void)
{
    static network plain, within;
    cairn_limits limits;
    cairn_error error;
    cairn_problem *problem = make_problem();
    check(cairn_limits_of(NULL, problem, NULL, &limits, &error), "limits", &error);
    int64_t budget = limits.least_bytes + (limits.store_all_bytes - limits.least_bytes) / 4;
    train(&plain, problem, limits.store_all_bytes);
    train(&within, problem, budget);
    bool good = equal(&plain, &within) && within.peak_bytes <= budget;
    printf("%s\n", good ? "losses and weights are equal to the bit, and the budget was kept" : "something is wrong");
    network_free(&plain);
    network_free(&within);
    cairn_problem_free(problem);
    return good ? 0 : 1;
}
