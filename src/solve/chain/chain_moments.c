#include "solve/chain/chain_moments.h"

#include <string.h>

/* Of what a stage needs to know of the next one: for each moment of the window one of three demands, and one of all before. */
enum {
    NO_DEMAND = 0,
    IT_RUNS = 1,
    IT_IS_SAVED = 2,
    DEMANDS = 3,
    WINDOW = CRN_MOMENTS_WINDOW,
    COMBINATIONS = 81, /* DEMANDS to the power of WINDOW */
    ALL = 2 * COMBINATIONS,
    STATES_MAX = 2 + CRN_MOMENTS_OPTIONS_MAX,
    SAVED = 2, /* the first state with a saved set */
    POLL_EVERY = 64
};

static const int32_t power[WINDOW + 1] = {1, 3, 9, 27, COMBINATIONS};
_Static_assert(WINDOW == 4 && COMBINATIONS == 81, "powers of DEMANDS");

/* Of earlier moments: any states, not all of them saved; a value at all of them, not all saved; a saved set at all. */
enum { ANY, VALUES, SAVES, EARLIER };

/* What made a cost, in a byte: the state before, then the demand or the kind, then whether all before were saved. */
enum { STATE_BITS = 3, STATE_MASK = (1 << STATE_BITS) - 1, KIND_MASK = 3, ALL_BIT = STATE_BITS + 2 };
_Static_assert((int)STATES_MAX <= (int)STATE_MASK && (int)EARLIER <= (int)KIND_MASK && (int)DEMANDS <= (int)KIND_MASK,
               "codes");

/* More than any cost; two of them can be added. */
#define NEVER (INT64_MAX / 4)

typedef struct crn_moments_stage {
    int32_t last;               /* the latest of its moments */
    int64_t again;              /* a forward more; NEVER: it must not run again */
    int64_t bytes[STATES_MAX];  /* of each state */
    int64_t beyond[STATES_MAX]; /* of a state with a saved set: what its option takes beyond the least */
    uint8_t *dropped; /* of demands: the oldest moment's, before another moment came, and whether of all before */
    uint8_t *entered; /* of demands and states: how the window was entered */
    uint8_t *stepped; /* of moments of the window, demands and states: the state and demand before */
    uint8_t *earlier; /* of earlier moments, EARLIER and states: those before */
} crn_moments_stage;

/* Least costs, by demands and the state at a moment. A row is opened when it gets its first cost. */
typedef struct costs {
    int32_t count, rows[ALL]; /* open ones */
    bool is_open[ALL];
    int64_t least[ALL][STATES_MAX];
} costs;

typedef struct crn_moments_work {
    int32_t states; /* of the stage with the most */
    int64_t demand[ALL], shifted[ALL];
    costs tables[2];
    int64_t earlier[EARLIER][STATES_MAX];
} crn_moments_work;

/* ---- sizes and times ---- */

int64_t crn_moments_units(const crn_moments *moments, int64_t bytes)
{
    crn_wide units = ((crn_wide)bytes << CRN_MOMENTS_BYTES_LOG2) / (crn_wide)moments->full_bytes;
    return units < (crn_wide)NEVER ? (int64_t)units : NEVER;
}

static int64_t time_units(const crn_moments *moments, int64_t ns)
{
    crn_wide units = ((crn_wide)ns << CRN_MOMENTS_TIME_LOG2) / (crn_wide)moments->forward_ns;
    return units < (crn_wide)NEVER ? (int64_t)units : NEVER;
}

static void fill_stage(const crn_moments *moments, int32_t l)
{
    crn_moments_stage *made = &moments->stages[l];
    const cairn_stage *stage = crn_stage(moments->model, l);
    int64_t least = crn_option_ns(&stage->options[crn_fastest_option(stage)]);
    made->again = stage->no_recompute ? NEVER : time_units(moments, crn_least_forward_ns(stage));
    for (int32_t r = 0; r < moments->work->states; r++)
        made->bytes[r] = INT64_MAX;
    made->bytes[0] = 0;
    made->bytes[1] = crn_moments_units(moments, stage->output_bytes);
    for (int32_t k = 0; k < stage->option_count; k++) {
        made->bytes[SAVED + k] = crn_moments_units(moments, stage->options[k].saved_bytes);
        made->beyond[SAVED + k] = time_units(moments, crn_option_ns(&stage->options[k]) - least);
    }
}

bool crn_moments_init(crn_moments *moments, crn_arena *arena)
{
    int32_t n = moments->model->n;
    int64_t options = 1;
    moments->work = crn_arena_alloc_zero(arena, 1, sizeof(*moments->work));
    moments->stages = crn_arena_alloc(arena, (size_t)n, sizeof(*moments->stages));
    if (!moments->work || !moments->stages)
        return false;
    for (int32_t l = 1; l < n; l++)
        options = crn_max(options, crn_stage(moments->model, l)->option_count);
    moments->work->states = SAVED + (int32_t)options;
    size_t states = (size_t)moments->work->states, table = ALL * states;
    size_t bytes = ALL + table + WINDOW * table + CRN_MOMENTS_MAX * EARLIER * states;
    uint8_t *tables = crn_arena_alloc(arena, (size_t)n, bytes);
    if (!tables)
        return false;
    for (int32_t l = 1; l < n; l++, tables += bytes) {
        crn_moments_stage *made = &moments->stages[l];
        made->dropped = tables;
        made->entered = made->dropped + ALL;
        made->stepped = made->entered + table;
        made->earlier = made->stepped + WINDOW * table;
        fill_stage(moments, l);
    }
    return true;
}

/* ---- one stage ---- */

static int32_t first_of_window(const crn_moments *moments, const crn_moments_stage *stage)
{
    return stage->last < moments->window ? 0 : stage->last - moments->window + 1;
}

static int64_t priced(const crn_moment *moment, int64_t bytes)
{
    return bytes > moment->room ? NEVER : moment->price * bytes >> CRN_MOMENTS_PRICE_SHIFT;
}

static void price_states(const crn_moments *moments, const crn_moments_stage *stage, int32_t j, int64_t *prices)
{
    for (int32_t r = 0; r < moments->work->states; r++)
        prices[r] = priced(&moments->list[j], stage->bytes[r]);
}

/* Whether a state can follow another without a forward. */
static bool stays(int32_t before, int32_t after)
{
    return after == before || after < (before < SAVED ? before : SAVED);
}

static void clear(int64_t *list, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        list[i] = NEVER;
}

/* Of the combinations of demands those that ask no less than a cheaper one are left out. */
static void prune(int64_t *demand)
{
    for (int32_t s = ALL - 1; s > 0; s--) {
        bool beaten = s >= COMBINATIONS && demand[s - COMBINATIONS] <= demand[s];
        for (int32_t k = 0; k < WINDOW && !beaten; k++)
            for (int32_t less = s / power[k] % DEMANDS; less > 0 && !beaten; less--)
                beaten = demand[s - less * power[k]] <= demand[s];
        if (beaten)
            demand[s] = NEVER;
    }
}

/* Another moment begins: its stage has a saved set. The oldest of the window becomes one of those before it. */
static void shift(const crn_moments *moments, crn_moments_stage *stage, int32_t last)
{
    crn_moments_work *w = moments->work;
    int32_t lowest = power[WINDOW - moments->window];
    clear(w->shifted, ALL);
    for (int32_t s = 0; s < ALL; s++) {
        if (w->demand[s] >= NEVER)
            continue;
        int32_t combination = s % COMBINATIONS, oldest = combination / lowest % DEMANDS;
        bool is_first = last == moments->window, were_saved = is_first || s >= COMBINATIONS;
        int32_t to = (combination - oldest * lowest) / DEMANDS + IT_IS_SAVED * power[WINDOW - 1] +
                     (were_saved && oldest == IT_IS_SAVED ? COMBINATIONS : 0);
        if (w->demand[s] < w->shifted[to]) {
            w->shifted[to] = w->demand[s];
            stage->dropped[to] = (uint8_t)(oldest | (s >= COMBINATIONS ? 1 << ALL_BIT : 0));
        }
    }
    memcpy(w->demand, w->shifted, sizeof(w->demand));
}

/* ---- earlier moments ---- */

static uint8_t *earlier_at(const crn_moments *moments, const crn_moments_stage *stage, int32_t j, int kind, int32_t r)
{
    return stage->earlier + ((size_t)j * EARLIER + (size_t)kind) * (size_t)moments->work->states + (size_t)r;
}

/* From which kind and state at one moment a kind and state at the next is cheapest. */
static int64_t cheapest_before(const crn_moments *moments, const crn_moments_stage *stage,
                               int64_t (*before)[STATES_MAX], int kind, int32_t r, uint8_t *from)
{
    static const int32_t least_state[EARLIER] = {0, 1, SAVED};
    int64_t best = NEVER;
    for (int32_t b = least_state[kind]; b < moments->work->states; b++) {
        int64_t cost = before[kind][b] + (stays(b, r) ? 0 : stage->again);
        if (cost < best) {
            best = cost;
            *from = (uint8_t)(b | kind << STATE_BITS);
        }
        if (kind != SAVES && r < SAVED && b >= SAVED && before[SAVES][b] < best) {
            best = before[SAVES][b];
            *from = (uint8_t)(b | SAVES << STATE_BITS);
        }
    }
    return best;
}

static bool is_of_kind(int kind, int32_t r)
{
    return kind == ANY || (kind == VALUES && r > 0) || (kind == SAVES && r >= SAVED);
}

/* The least costs of the moments 0..first - 1, by kind and the state at the last of them. */
static void pass_earlier(crn_moments *moments, const crn_moments_stage *stage, int32_t first)
{
    crn_moments_work *w = moments->work;
    int64_t before[EARLIER][STATES_MAX], prices[STATES_MAX];
    price_states(moments, stage, 0, prices);
    for (int kind = 0; kind < EARLIER; kind++)
        for (int32_t r = 0; r < w->states; r++)
            w->earlier[kind][r] = is_of_kind(kind, r) && (kind == SAVES) == (r >= SAVED) ? prices[r] : NEVER;
    for (int32_t j = 1; j < first; j++) {
        memcpy(before, w->earlier, sizeof(before));
        price_states(moments, stage, j, prices);
        for (int kind = 0; kind < EARLIER; kind++)
            for (int32_t r = 0; r < w->states; r++) {
                uint8_t *from = earlier_at(moments, stage, j, kind, r);
                int64_t cost = is_of_kind(kind, r) && prices[r] < NEVER
                                   ? cheapest_before(moments, stage, before, kind, r, from) + prices[r]
                                   : NEVER;
                w->earlier[kind][r] = crn_min(cost, NEVER);
            }
    }
}

/* ---- the window ---- */

static void close_rows(costs *table)
{
    for (int32_t i = 0; i < table->count; i++)
        table->is_open[table->rows[i]] = false;
    table->count = 0;
}

/* The least costs of demands s. */
static int64_t *row(costs *table, int32_t s)
{
    if (!table->is_open[s]) {
        table->is_open[s] = true;
        table->rows[table->count++] = s;
        clear(table->least[s], STATES_MAX);
    }
    return table->least[s];
}

static void improve(int64_t *cost, uint8_t *code, int64_t with, int32_t made_by)
{
    if (with < *cost) {
        *cost = with;
        *code = (uint8_t)made_by;
    }
}

/* All states at moment 0, where no moment is earlier. */
static void begin(const crn_moments *moments, crn_moments_stage *stage, costs *made)
{
    const crn_moments_work *w = moments->work;
    int64_t prices[STATES_MAX];
    price_states(moments, stage, 0, prices);
    for (int32_t s = 0; s < COMBINATIONS; s++)
        for (int32_t r = 0; r < w->states && w->demand[s] < NEVER; r++)
            if (prices[r] < NEVER)
                improve(&row(made, s)[r], &stage->entered[s * w->states + r], w->demand[s] + prices[r], 0);
}

/* The least cost of each state at the first moment of the window, by the kind of the earlier ones, and the state before. */
static void price_first(const crn_moments *moments, const crn_moments_stage *stage, int32_t first,
                        int64_t (*best)[STATES_MAX], uint8_t (*from)[STATES_MAX])
{
    const crn_moments_work *w = moments->work;
    int64_t prices[STATES_MAX];
    price_states(moments, stage, first, prices);
    for (int kind = 0; kind < EARLIER; kind++) {
        clear(best[kind], STATES_MAX);
        for (int32_t r = 0; r < w->states; r++)
            for (int32_t b = 0; b < w->states && prices[r] < NEVER; b++)
                if (w->earlier[kind][b] < NEVER)
                    improve(&best[kind][r], &from[kind][r],
                            w->earlier[kind][b] + (stays(b, r) ? 0 : stage->again) + prices[r], b);
    }
}

/* From the earlier moments to all states at the first moment of the window. What made it: the state, kind and demand. */
static void enter(const crn_moments *moments, crn_moments_stage *stage, int32_t first, costs *made)
{
    const crn_moments_work *w = moments->work;
    int64_t best[EARLIER][STATES_MAX];
    uint8_t from[EARLIER][STATES_MAX] = {{0}};
    price_first(moments, stage, first, best, from);
    for (int32_t s = 0; s < ALL; s++)
        for (int kind = s < COMBINATIONS ? ANY : VALUES; kind < EARLIER && w->demand[s] < NEVER; kind++) {
            int32_t to = s % COMBINATIONS + (kind == SAVES ? COMBINATIONS : 0);
            for (int32_t r = 0; r < w->states; r++)
                if (best[kind][r] < NEVER)
                    improve(&row(made, to)[r], &stage->entered[to * w->states + r], w->demand[s] + best[kind][r],
                            from[kind][r] | kind << STATE_BITS | (s >= COMBINATIONS ? 1 << ALL_BIT : 0));
        }
}

/* A moment, a state there, and the demand on it; the next moment's prices. */
typedef struct place {
    int32_t slot, demand, rest, state;
    int64_t cost;
    const int64_t *prices;
} place;

/* To all states at the next moment, with a forward in the interval or without. The demand becomes that on the stage before. */
static void go_on(const crn_moments *moments, crn_moments_stage *stage, const place *at, bool runs, costs *made)
{
    int32_t states = moments->work->states, asks = at->state >= SAVED ? IT_IS_SAVED : runs ? IT_RUNS : NO_DEMAND;
    int32_t to = at->rest + asks * power[at->slot];
    int64_t cost = at->cost + (runs ? stage->again : 0), *least = row(made, to);
    uint8_t *codes = stage->stepped + (size_t)((at->slot * ALL + to) * states);
    for (int32_t next = 0; next < states; next++)
        if (at->prices[next] < NEVER && (runs || stays(at->state, next)))
            improve(&least[next], &codes[next], cost + at->prices[next], at->state | at->demand << STATE_BITS);
}

/* The interval of backward l. */
static void end(const crn_moments *moments, crn_moments_stage *stage, const place *at, costs *made)
{
    bool saved = at->state >= SAVED;
    int64_t takes = saved ? crn_min(stage->beyond[at->state], stage->again) : stage->again;
    int32_t to = at->rest + (saved ? IT_IS_SAVED : IT_RUNS) * power[at->slot];
    if (takes < NEVER)
        improve(&row(made, to)[0], &stage->stepped[(at->slot * ALL + to) * moments->work->states], at->cost + takes,
                at->state | at->demand << STATE_BITS);
}

static void step(const crn_moments *moments, crn_moments_stage *stage, int32_t j, const costs *from, costs *made)
{
    int64_t prices[STATES_MAX];
    place at = {.slot = WINDOW - 1 - (stage->last - j), .prices = prices};
    if (j < stage->last)
        price_states(moments, stage, j + 1, prices);
    for (int32_t i = 0; i < from->count; i++) {
        int32_t s = from->rows[i];
        at.demand = s / power[at.slot] % DEMANDS;
        at.rest = s - at.demand * power[at.slot];
        for (at.state = at.demand == IT_IS_SAVED ? 1 : 0; at.state < moments->work->states; at.state++) {
            at.cost = from->least[s][at.state];
            if (at.cost >= NEVER)
                continue;
            if (j == stage->last) {
                end(moments, stage, &at, made);
                continue;
            }
            if (at.demand != IT_RUNS || at.state > 0)
                go_on(moments, stage, &at, false, made);
            if (stage->again < NEVER)
                go_on(moments, stage, &at, true, made);
        }
    }
}

static void pass_stage(crn_moments *moments, crn_moments_stage *stage)
{
    crn_moments_work *w = moments->work;
    int32_t first = first_of_window(moments, stage);
    costs *from = &w->tables[0], *made = &w->tables[1];
    close_rows(made);
    if (first == 0) {
        begin(moments, stage, made);
    } else {
        pass_earlier(moments, stage, first);
        enter(moments, stage, first, made);
    }
    for (int32_t j = first; j <= stage->last; j++) {
        costs *other = from;
        from = made;
        made = other;
        close_rows(made);
        step(moments, stage, j, from, made);
    }
    clear(w->demand, ALL);
    for (int32_t i = 0; i < made->count; i++)
        w->demand[made->rows[i]] = made->least[made->rows[i]][0];
    prune(w->demand);
}

/* ---- what the cheapest states use ---- */

static void count_earlier(crn_moments *moments, const crn_moments_stage *stage, int32_t j, int kind, int32_t r)
{
    for (; j >= 0; j--) {
        moments->list[j].used += stage->bytes[r];
        uint8_t from = j > 0 ? *earlier_at(moments, stage, j, kind, r) : 0;
        kind = from >> STATE_BITS;
        r = from & STATE_MASK;
    }
}

/* Follows the demands that stage l leaves back to those that it met. */
static int32_t count_stage(crn_moments *moments, const crn_moments_stage *stage, int32_t s)
{
    int32_t states = moments->work->states, r = 0, first = first_of_window(moments, stage);
    for (int32_t j = stage->last; j >= first; j--) {
        int32_t slot = WINDOW - 1 - (stage->last - j);
        uint8_t code = stage->stepped[(slot * ALL + s) * states + r];
        r = code & STATE_MASK;
        s += ((code >> STATE_BITS) - s / power[slot] % DEMANDS) * power[slot];
        moments->list[j].used += stage->bytes[r];
    }
    if (first == 0)
        return s;
    uint8_t code = stage->entered[s * states + r];
    count_earlier(moments, stage, first - 1, code >> STATE_BITS & KIND_MASK, code & STATE_MASK);
    return s % COMBINATIONS + (code >> ALL_BIT) * COMBINATIONS;
}

static void count_used(crn_moments *moments, int32_t s)
{
    int32_t n = moments->model->n;
    for (int32_t l = 1; l < n; l++) {
        const crn_moments_stage *stage = &moments->stages[l];
        s = count_stage(moments, stage, s);
        if (l + 1 < n && stage->last > moments->stages[l + 1].last) {
            int32_t before = stage->dropped[s];
            s = s % power[WINDOW - 1] * DEMANDS + (before & KIND_MASK) * power[WINDOW - moments->window] +
                (before >> ALL_BIT) * COMBINATIONS;
        }
    }
}

/* ---- all stages ---- */

static int64_t price_of_room(const crn_moments *moments)
{
    crn_wide sum = 0;
    for (int32_t j = 0; j < moments->count; j++)
        sum += (((crn_wide)moments->list[j].price * (crn_wide)moments->list[j].room) >> CRN_MOMENTS_PRICE_SHIFT) + 1;
    return (int64_t)sum;
}

bool crn_moments_evaluate(crn_moments *moments, int64_t *units)
{
    crn_moments_work *w = moments->work;
    int32_t best = 0, last = 0;
    clear(w->demand, ALL);
    w->demand[IT_IS_SAVED * power[WINDOW - 1]] = 0;
    for (int32_t l = moments->model->n - 1, polled = 0; l > 0; l--, polled++) {
        crn_moments_stage *stage = &moments->stages[l];
        if (polled % POLL_EVERY == 0 && crn_should_stop(moments->task, NULL))
            return false;
        if (last + 1 < moments->count && moments->list[last + 1].stage > l)
            shift(moments, stage, ++last);
        stage->last = last;
        pass_stage(moments, stage);
    }
    for (int32_t s = 1; s < ALL; s++)
        best = w->demand[s] < w->demand[best] ? s : best;
    for (int32_t j = 0; j < moments->count; j++)
        moments->list[j].used = 0;
    bool found = w->demand[best] < NEVER;
    *units = found ? w->demand[best] - price_of_room(moments) : 0;
    if (found)
        count_used(moments, best);
    return true;
}
