#include "solve/milp/frontier_program.h"

#include <math.h>
#include <string.h>

/* An objective of at most this many units is one of integers, each far above HiGHS's tolerances. */
#define EXACT_UNITS 1e6

/* What HiGHS takes for an entry, as measured with room to spare: presolve, cuts, the tree. */
#define ENTRY_BYTES 2000

/*
 * Rows and columns are visited twice: to be counted, then to be written. Coefficients of one row are gathered by column,
 * for residency may be the same decision as another term.
 */
typedef struct making {
    crn_frontier_program *program;
    const crn_frontier_graph *graph;
    const crn_program_goal *goal;
    bool writing;
    int32_t columns, rows;
    int64_t entries;
    double *weight; /* of a column, in the row under construction */
    bool *is_touched;
    int32_t *touched, touched_count;
    int64_t terms;
    double constant;
    int32_t *resident; /* of a reader, as the graph lists them: its residency in this stage */
    int32_t *position; /* of a storage: its first reader that has not run */
} making;

/* ---- columns ---- */

static int32_t compute_of(const making *m, int32_t t, int32_t v)
{
    return v == t ? CRN_REF_ONE : m->program->compute[(ptrdiff_t)t * m->graph->model->node_count + v];
}

static int32_t hold_of(const making *m, int32_t t, int32_t v)
{
    return m->program->hold[(ptrdiff_t)t * m->graph->model->node_count + v];
}

static void number_decisions(making *m)
{
    const crn_frontier_graph *graph = m->graph;
    const crn_graph_model *model = graph->model;
    for (int32_t t = 0; t <= model->node_count; t++)
        for (int32_t v = 0; v < model->node_count; v++) {
            ptrdiff_t at = (ptrdiff_t)t * model->node_count + v;
            bool always = t >= graph->always_from[v];
            m->program->hold[at] = always ? CRN_REF_ONE : crn_may_hold(graph, t, v) ? m->columns++ : CRN_REF_ZERO;
            if (t < model->node_count)
                m->program->compute[at] = crn_may_recompute(graph, t, v) ? m->columns++ : CRN_REF_ZERO;
        }
    m->program->decisions = m->columns;
}

static void write_decisions(const making *m)
{
    crn_frontier_program *program = m->program;
    for (int32_t t = 0; t < m->graph->model->node_count; t++)
        for (int32_t v = 0; v < t; v++) {
            int32_t column = compute_of(m, t, v);
            if (column >= 0 && !m->goal->minimize_peak)
                program->linear.cost[column] = (double)m->graph->model->cost[v] / program->objective_unit;
        }
    for (int32_t column = 0; column < program->decisions; column++)
        program->linear.is_integer[column] = 1;
}

/* The larger of two, each a decision, a maximum or a constant; a column of its own only where it takes one. */
static int32_t add_maximum(making *m, int32_t first, int32_t second)
{
    if (first == CRN_REF_ONE || second == CRN_REF_ONE)
        return CRN_REF_ONE;
    if (first == CRN_REF_ZERO || second == CRN_REF_ZERO)
        return first == CRN_REF_ZERO ? second : first;
    if (m->writing) {
        int32_t *pair = m->program->maximum_of + 2 * (ptrdiff_t)(m->columns - m->program->maxima_begin);
        pair[0] = first;
        pair[1] = second;
    }
    return m->columns++;
}

/* ---- rows ---- */

static void add(making *m, double coefficient, int32_t column)
{
    if (column == CRN_REF_ONE)
        m->constant += coefficient;
    if (column < 0)
        return;
    m->terms++;
    if (!m->writing)
        return;
    if (!m->is_touched[column]) {
        m->is_touched[column] = true;
        m->touched[m->touched_count++] = column;
        m->weight[column] = 0;
    }
    m->weight[column] += coefficient;
}

static void write_entries(making *m)
{
    crn_linear_program *linear = &m->program->linear;
    for (int32_t i = 0; i < m->touched_count; i++) {
        int32_t column = m->touched[i];
        m->is_touched[column] = false;
        if (m->weight[column] == 0)
            continue;
        linear->index[linear->entries] = column;
        linear->value[linear->entries++] = m->weight[column];
    }
    m->touched_count = 0;
}

/* Ends the row of what was added: at least low and at most high. A row of constants is only checked. */
static void end_row(making *m, double low, double high)
{
    crn_linear_program *linear = &m->program->linear;
    if (m->terms == 0) {
        m->program->impossible |= m->constant < low - 1e-9 || m->constant > high + 1e-9;
    } else {
        if (m->writing) {
            linear->row_begin[m->rows] = linear->entries;
            linear->row_lower[m->rows] = low - m->constant;
            linear->row_upper[m->rows] = high - m->constant;
            write_entries(m);
        }
        m->rows++;
        m->entries += m->terms;
    }
    m->terms = 0;
    m->constant = 0;
}

/* first + second >= third */
static void add_cover(making *m, int32_t first, int32_t second, int32_t third)
{
    if (third == CRN_REF_ZERO || first == CRN_REF_ONE || second == CRN_REF_ONE)
        return;
    add(m, 1, first);
    add(m, 1, second);
    add(m, -1, third);
    end_row(m, 0, INFINITY);
}

static void add_decision_rows(making *m, int32_t t)
{
    const crn_graph_model *model = m->graph->model;
    for (int32_t v = 0; v <= t; v++) {
        int32_t compute = compute_of(m, t, v), hold = hold_of(m, t, v);
        if (compute != CRN_REF_ZERO)
            for (int32_t i = model->dep_begin[v]; i < model->dep_begin[v + 1]; i++)
                add_cover(m, compute_of(m, t, model->dep[i]), hold_of(m, t, model->dep[i]), compute);
        add_cover(m, compute, hold, hold_of(m, t + 1, v));
        if (model->root[v] != v)
            add_cover(m, hold_of(m, t, model->root[v]), CRN_REF_ZERO, hold);
        if (compute >= 0 && hold >= 0) {
            add(m, 1, compute);
            add(m, 1, hold);
            end_row(m, -INFINITY, 1);
        }
    }
}

/* How long storage s stays in stage t, from the end backwards. */
static void add_residency(making *m, int32_t t, int32_t s)
{
    const crn_graph_model *model = m->graph->model;
    int32_t next = hold_of(m, t + 1, s);
    for (int32_t i = model->use_begin[s + 1] - 1; i >= model->use_begin[s]; i--) {
        if (model->use[i] > t) {
            m->resident[i] = CRN_REF_ZERO;
            continue;
        }
        int32_t compute = compute_of(m, t, model->use[i]), before = m->columns;
        m->resident[i] = add_maximum(m, next, compute);
        if (m->columns > before) {
            add_cover(m, m->resident[i], CRN_REF_ZERO, next);
            add_cover(m, m->resident[i], CRN_REF_ZERO, compute);
        }
        next = m->resident[i];
    }
}

/* Whether storage s stays until node k > s of stage t has run. */
static int32_t resident_at(making *m, int32_t t, int32_t s, int32_t k)
{
    const crn_graph_model *model = m->graph->model;
    int32_t *at = &m->position[s];
    while (*at < model->use_begin[s + 1] && model->use[*at] < k)
        ++*at;
    bool read = *at < model->use_begin[s + 1] && model->use[*at] <= t;
    return read ? m->resident[*at] : hold_of(m, t + 1, s);
}

static double in_rows(const making *m, int64_t bytes)
{
    int64_t units = bytes / m->graph->bytes_unit; /* a whole number */
    return (double)units / m->program->row_unit;
}

/* Memory while node k runs in stage t; storage k itself is either there or being made. */
static void add_memory_row(making *m, int32_t t, int32_t k)
{
    const crn_graph_model *model = m->graph->model;
    for (int32_t s = 0; s < t; s++)
        if (model->bytes[s] > 0 && s != k)
            add(m, in_rows(m, model->bytes[s]), s < k ? resident_at(m, t, s, k) : hold_of(m, t, s));
    add(m, in_rows(m, model->bytes[k]) + in_rows(m, model->extra[k]), compute_of(m, t, k));
    add(m, in_rows(m, model->bytes[k]), hold_of(m, t, k));
    add(m, -1, m->program->peak);
    end_row(m, -INFINITY, m->program->row_limit);
}

static void add_stage(making *m, int32_t t)
{
    const crn_graph_model *model = m->graph->model;
    add_decision_rows(m, t);
    for (int32_t s = 0; s <= t; s++) {
        m->position[s] = model->use_begin[s];
        if (model->bytes[s] > 0)
            add_residency(m, t, s);
    }
    for (int32_t k = 0; k <= t; k++)
        if (compute_of(m, t, k) != CRN_REF_ZERO)
            add_memory_row(m, t, k);
}

/* At least what every schedule needs, at most what one is known to need. */
static void add_peak(making *m)
{
    crn_frontier_program *program = m->program;
    if (!m->goal->minimize_peak)
        return;
    program->peak = m->columns++;
    if (!m->writing)
        return;
    int64_t unit = m->graph->bytes_unit, least = crn_max(0, m->goal->lower_bytes - m->graph->model->fixed_bytes) / unit;
    program->linear.cost[program->peak] = (double)unit * program->row_unit / program->objective_unit;
    program->linear.lower[program->peak] = fmin(1, (double)least / program->row_unit);
}

static void visit(making *m, bool writing)
{
    m->writing = writing;
    m->columns = m->program->decisions;
    m->rows = 0;
    m->entries = 0;
    add_peak(m);
    m->program->maxima_begin = m->columns;
    for (int32_t t = 0; t < m->graph->model->node_count; t++)
        add_stage(m, t);
}

/* ---- making ---- */

static void choose_units(making *m)
{
    crn_frontier_program *program = m->program;
    const crn_frontier_graph *graph = m->graph;
    int64_t room = crn_max(0, m->goal->budget_bytes - graph->model->fixed_bytes) / graph->bytes_unit;
    bool by_peak = m->goal->minimize_peak;
    int64_t costs = graph->model->total_cost / graph->cost_unit;
    double whole = (double)(by_peak ? room : costs);
    program->row_unit = fmax(1, (double)room);
    program->row_limit = by_peak || room == 0 ? 0 : 1 - m->goal->margin;
    program->is_exact = whole <= EXACT_UNITS;
    program->objective_gap = program->is_exact ? 0.99 : 0.1;
    program->objective_unit = (double)(by_peak ? graph->bytes_unit : graph->cost_unit) * fmax(1, whole / EXACT_UNITS);
}

static bool reserve_tables(making *m, crn_arena *arena)
{
    crn_frontier_program *program = m->program;
    size_t n = (size_t)m->graph->model->node_count, readers = (size_t)m->graph->model->use_begin[n];
    return (program->compute = crn_arena_alloc(arena, n * n, sizeof(int32_t))) &&
           (program->hold = crn_arena_alloc(arena, (n + 1) * n, sizeof(int32_t))) &&
           (m->resident = crn_arena_alloc(arena, readers, sizeof(int32_t))) &&
           (m->position = crn_arena_alloc(arena, n, sizeof(int32_t)));
}

static bool reserve_columns(making *m, crn_arena *arena)
{
    crn_linear_program *linear = &m->program->linear;
    size_t n = (size_t)m->columns, maxima = (size_t)(m->columns - m->program->maxima_begin);
    return (linear->cost = crn_arena_alloc_zero(arena, n, sizeof(double))) &&
           (linear->lower = crn_arena_alloc_zero(arena, n, sizeof(double))) &&
           (linear->upper = crn_arena_alloc(arena, n, sizeof(double))) &&
           (linear->is_integer = crn_arena_alloc_zero(arena, n, sizeof(int32_t))) &&
           (m->program->maximum_of = crn_arena_alloc(arena, 2 * maxima, sizeof(int32_t))) &&
           (m->weight = crn_arena_alloc(arena, n, sizeof(double))) &&
           (m->touched = crn_arena_alloc(arena, n, sizeof(int32_t))) &&
           (m->is_touched = crn_arena_alloc_zero(arena, n, sizeof(bool)));
}

static bool reserve_rows(making *m, crn_arena *arena)
{
    crn_linear_program *linear = &m->program->linear;
    size_t rows = (size_t)m->rows, entries = (size_t)m->entries;
    return (linear->row_begin = crn_arena_alloc(arena, rows + 1, sizeof(int32_t))) &&
           (linear->row_lower = crn_arena_alloc(arena, rows, sizeof(double))) &&
           (linear->row_upper = crn_arena_alloc(arena, rows, sizeof(double))) &&
           (linear->index = crn_arena_alloc(arena, entries, sizeof(int32_t))) &&
           (linear->value = crn_arena_alloc(arena, entries, sizeof(double)));
}

static void write(making *m)
{
    crn_linear_program *linear = &m->program->linear;
    linear->columns = m->columns;
    for (int32_t column = 0; column < m->columns; column++)
        linear->upper[column] = 1;
    write_decisions(m);
    visit(m, true);
    linear->rows = m->rows;
    linear->row_begin[m->rows] = linear->entries;
}

static cairn_status make(making *m, cairn_error *error)
{
    crn_arena *arena = &m->program->arena;
    choose_units(m);
    if (!reserve_tables(m, arena))
        return crn_no_memory(error);
    number_decisions(m);
    visit(m, false);
    if (m->entries > INT32_MAX)
        return crn_fail(error, CAIRN_TOO_LARGE, "the integer program would have %lld entries, more than 2^31 - 1",
                        (long long)m->entries);
    if (!reserve_columns(m, arena) || !reserve_rows(m, arena))
        return crn_no_memory(error);
    write(m);
    return CAIRN_OK;
}

cairn_status crn_frontier_program_new(const crn_task *task, const crn_frontier_graph *graph,
                                      const crn_program_goal *goal, crn_frontier_program **program, cairn_error *error)
{
    crn_arena arena;
    crn_arena_init(&arena, crn_allocator(task->env));
    *program = NULL;
    crn_frontier_program *made = crn_arena_alloc_zero(&arena, 1, sizeof(*made));
    if (!made)
        return crn_no_memory(error);
    made->arena = arena;
    made->graph = graph;
    made->peak = CRN_REF_ZERO;
    making m = {.program = made, .graph = graph, .goal = goal};
    cairn_status status = make(&m, error);
    if (status != CAIRN_OK) {
        crn_frontier_program_free(made);
        return status;
    }
    *program = made;
    return CAIRN_OK;
}

void crn_frontier_program_free(crn_frontier_program *program)
{
    if (!program)
        return;
    crn_arena_clear(&program->arena);
}

/* ---- points ---- */

static double value_of(const double *values, int32_t column)
{
    return column == CRN_REF_ONE ? 1 : column == CRN_REF_ZERO ? 0 : values[column];
}

void crn_frontier_program_point(const crn_frontier_program *program, const crn_frontier_plan *plan, int64_t peak_bytes,
                                double *values)
{
    const crn_frontier_graph *graph = program->graph;
    const crn_graph_model *model = graph->model;
    int64_t peak = (peak_bytes - model->fixed_bytes) / graph->bytes_unit;
    for (int32_t t = 0; t < model->node_count; t++)
        for (int32_t v = 0; v < model->node_count; v++) {
            ptrdiff_t at = (ptrdiff_t)t * model->node_count + v;
            if (program->hold[at] >= 0)
                values[program->hold[at]] = plan->held[at];
            if (program->compute[at] >= 0)
                values[program->compute[at]] = plan->computed[at];
        }
    if (program->peak >= 0)
        values[program->peak] = fmin(1, (double)peak / program->row_unit);
    for (int32_t column = program->maxima_begin; column < program->linear.columns; column++) {
        const int32_t *pair = program->maximum_of + 2 * (ptrdiff_t)(column - program->maxima_begin);
        values[column] = fmax(value_of(values, pair[0]), value_of(values, pair[1]));
    }
}

void crn_frontier_program_plan(const crn_frontier_program *program, const double *values, double threshold,
                               crn_frontier_plan *plan)
{
    ptrdiff_t n = program->graph->model->node_count;
    for (ptrdiff_t at = 0; at < n * (n + 1); at++)
        plan->held[at] = value_of(values, program->hold[at]) >= threshold;
}

int64_t crn_frontier_program_bound(const crn_frontier_program *program, double bound)
{
    double units = program->is_exact ? ceil(bound - 1e-3) : bound;
    double value = fmax(0, floor(units * program->objective_unit));
    return isfinite(bound) && value < 0x1p62 ? (int64_t)value : CAIRN_NONE;
}

bool crn_frontier_program_closes(const crn_frontier_program *program, int64_t objective, double bound)
{
    return (double)objective / program->objective_unit - bound <= program->objective_gap + 1e-3;
}

int64_t crn_frontier_program_bytes(const cairn_graph *graph)
{
    double n = graph->node_count, edges = 0;
    for (int32_t v = 0; v < graph->node_count; v++)
        edges += graph->nodes[v].dep_count + 1;
    double entries = n * n * n / 3 + 3 * n * n + 6 * n * edges;
    double bytes = entries * ENTRY_BYTES + n * edges * 40 + n * n * 80 + (1 << 20);
    return bytes < 0x1p62 ? (int64_t)bytes : INT64_MAX;
}
