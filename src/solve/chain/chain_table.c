#include "solve/chain/chain_table.h"

#include "base/vector.h"

/* Whether a saving forward is nowhere faster than the plain one, nor needs less: then the plain way beats all others. */
static bool has_plain_ways_only(const cairn_chain *chain)
{
    for (int32_t i = 0; i < chain->stage_count; i++) {
        const cairn_stage *stage = &chain->stages[i];
        for (int32_t k = 0; k < stage->option_count; k++)
            if (stage->options[k].forward_ns < stage->forward_only_ns ||
                crn_save_bytes(&stage->options[k]) < crn_keep_bytes(stage))
                return false;
    }
    return true;
}

/* Passes grow by half. */
int64_t crn_chain_table_memory(const cairn_chain *chain)
{
    int32_t n = chain->stage_count;
    int64_t pairs = (int64_t)crn_pair_count(n), ways = has_plain_ways_only(chain) ? 1 : CRN_WAYS_MAX;
    int64_t per_pair = 2 * 8 + 8 + 8 + ways * (int64_t)sizeof(crn_pass) * 3 / 2;
    return pairs * per_pair + crn_forward_memory(n) + 64 * (int64_t)n + 4096;
}

/* ---- passes ---- */

static bool add_pass(crn_chain_table *table, const crn_way *way)
{
    if (table->pass_count == table->pass_capacity) {
        crn_pass *grown =
            crn_grow(&table->allocator, table->passes, &table->pass_capacity, table->pass_count + 1, sizeof(*grown));
        if (!grown)
            return false;
        table->passes = grown;
    }
    table->passes[table->pass_count++] = (crn_pass){way->peak_bytes, way->ns};
    return true;
}

static bool store_row(crn_chain_table *table, const crn_forward *forward)
{
    int32_t n = table->model.n, s = forward->s;
    for (int32_t j = s; j <= n; j++) {
        const crn_ways *ways = &forward->row[j];
        size_t at = crn_row_at(n, s, j);
        table->pass_begin[at] = table->pass_count;
        table->pass_peak[at] = INT64_MAX;
        if (j > forward->end)
            continue;
        table->pass_peak[at] = ways->alone_count > 0 ? ways->alone[0].peak_bytes : INT64_MAX;
        for (int32_t i = 0; i < ways->alone_count; i++)
            if (!add_pass(table, &ways->alone[i]))
                return false;
    }
    return true;
}

static cairn_status fill_passes(crn_chain_table *table, const crn_task *task, cairn_error *error)
{
    int32_t n = table->model.n;
    crn_forward forward;
    bool filled = crn_forward_init(&forward, &table->allocator, &table->model), stopped = false;
    for (int32_t s = 1; filled && !stopped && s <= n; s++) {
        crn_forward_fill(&forward, s, n - 1);
        table->gave_up |= forward.row[crn_max(s - 1, forward.end)].gave_up;
        filled = store_row(table, &forward);
        stopped = crn_should_stop(task, NULL);
    }
    table->pass_begin[crn_pair_count(n)] = table->pass_count;
    crn_forward_clear(&forward);
    if (!filled)
        return crn_no_memory(error);
    return stopped ? crn_fail(error, CAIRN_CANCELLED, "stopped while listing the ways forward") : CAIRN_OK;
}

/* ---- least memory ---- */

/*
 * The least over s' of max(peak + base, a + right, left), each array from s' = s+1 on. A row of passes whose times all
 * pass 2^63 has no way; its peak is 2^63 - 1, and so is the sum then.
 */
CRN_VECTOR static int64_t least_split(const int64_t *peak, int64_t base, const int64_t *output, const int64_t *right,
                                      const int64_t *left, int32_t count)
{
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < count; i++) {
        int64_t way = peak[i] > INT64_MAX - base ? INT64_MAX : peak[i] + base;
        int64_t kept = output[i] + right[i];
        int64_t needed = way > kept ? way : kept;
        needed = needed > left[i] ? needed : left[i];
        least = needed < least ? needed : least;
    }
    return least;
}

static int64_t save_least(const crn_chain_table *table, int32_t s, int32_t t, int32_t k)
{
    const crn_chain_model *model = &table->model;
    const cairn_stage_option *option = &crn_stage(model, s)->options[k];
    int64_t needed = crn_max(model->base[t] + crn_save_bytes(option), crn_backward_bytes(model, s, option));
    return s < t ? crn_max(needed, option->saved_bytes + crn_least_of(table, s + 1, t)) : needed;
}

static int64_t save_and_drop_least(const crn_chain_table *table, int32_t s, int32_t t, int32_t k)
{
    const crn_chain_model *model = &table->model;
    const cairn_stage_option *option = &crn_stage(model, s)->options[k];
    int64_t needed = crn_max(model->base[t] + crn_save_bytes(option), crn_least_of(table, s, s));
    return crn_max(needed, option->saved_bytes + crn_least_of(table, s + 1, t));
}

static int64_t find_least(const crn_chain_table *table, int32_t s, int32_t t)
{
    const crn_chain_model *model = &table->model;
    const cairn_stage *stage = crn_stage(model, s);
    int32_t last = crn_last_split(table, s, t);
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < stage->option_count && (s == t || !model->outputs_only); k++) {
        least = crn_min(least, save_least(table, s, t, k));
        if (s < t && !stage->no_recompute)
            least = crn_min(least, save_and_drop_least(table, s, t, k));
    }
    if (last <= s)
        return least;
    size_t row = crn_row_at(model->n, s, s), column = crn_column_at(s + 1, t);
    return crn_min(least, least_split(table->pass_peak + row, model->base[t], model->output + s, table->column + column,
                                      table->row + row, last - s));
}

/* One diagonal: all sub-problems of a length. */
typedef struct diagonal {
    crn_chain_table *table;
    int32_t length; /* t - s */
} diagonal;

static void fill_one(void *context, int64_t i, int worker)
{
    const diagonal *d = context;
    int32_t s = (int32_t)i + 1, t = s + d->length;
    int64_t least = find_least(d->table, s, t);
    (void)worker;
    d->table->row[crn_row_at(d->table->model.n, s, t)] = least;
    d->table->column[crn_column_at(s, t)] = least;
}

static cairn_status fill_least(crn_chain_table *table, const crn_task *task, cairn_error *error)
{
    int32_t n = table->model.n;
    for (int32_t length = 0; length < n; length++) {
        diagonal d = {table, length};
        crn_team_run(task->team, n - length, fill_one, &d);
        if (crn_should_stop(task, NULL))
            return crn_fail(error, CAIRN_CANCELLED, "stopped while finding the least memory");
    }
    return CAIRN_OK;
}

/* ---- making and freeing ---- */

static cairn_status allocate(crn_chain_table *table, cairn_error *error)
{
    size_t pairs = crn_pair_count(table->model.n);
    crn_arena *arena = &table->model.arena;
    table->pass_begin = crn_arena_alloc(arena, pairs + 1, sizeof(*table->pass_begin));
    table->pass_peak = crn_arena_alloc(arena, pairs, sizeof(*table->pass_peak));
    table->row = crn_arena_alloc(arena, pairs, sizeof(*table->row));
    table->column = crn_arena_alloc(arena, pairs, sizeof(*table->column));
    bool made = table->pass_begin && table->pass_peak && table->row && table->column;
    return made ? CAIRN_OK : crn_no_memory(error);
}

/* ---- the least without tables ---- */

/* What it takes to start again from a[0] for every backward: a schedule of the programs, if a slow one. */
static int64_t restart_bytes(const crn_chain_table *table)
{
    const crn_chain_model *model = &table->model;
    crn_forward_walk walk;
    int64_t needed = save_least(table, 1, 1, 0);
    for (int32_t k = 1; k < crn_stage(model, 1)->option_count; k++)
        needed = crn_min(needed, save_least(table, 1, 1, k));
    crn_forward_walk_begin(&walk, model);
    for (int32_t t = 2; t <= model->n; t++) {
        int64_t least = INT64_MAX, peak = crn_forward_walk_on(&walk);
        if (peak == INT64_MAX)
            return INT64_MAX;
        for (int32_t k = 0; k < crn_stage(model, t)->option_count; k++)
            least = crn_min(least, save_least(table, t, t, k));
        needed = crn_max(needed, model->output[t - 1] + least);
        needed = crn_max(needed, model->base[t] + peak);
    }
    return needed;
}

/* Whether no budget is enough: a schedule meets the lower bound of all schedules, and so does L. */
static cairn_status is_hopeless(crn_chain_table *table, const crn_task *task, bool *hopeless, cairn_error *error)
{
    int64_t lower_bytes;
    *hopeless = false;
    if (task->budget_max_bytes == CAIRN_NONE)
        return CAIRN_OK;
    CRN_TRY(crn_least_lower(task, &lower_bytes, error));
    if (task->budget_max_bytes >= lower_bytes)
        return CAIRN_OK;
    table->least_bytes = restart_bytes(table);
    *hopeless = table->least_bytes < INT64_MAX && table->model.always_bytes + table->least_bytes == lower_bytes;
    table->least_bytes = lower_bytes;
    return CAIRN_OK;
}

cairn_status crn_chain_table_init(crn_chain_table *table, const crn_task *task, bool outputs_only, cairn_error *error)
{
    bool hopeless;
    *table = (crn_chain_table){.allocator = crn_allocator(task->env)};
    CRN_TRY(crn_chain_model_init(&table->model, task, error));
    table->model.outputs_only = outputs_only;
    CRN_TRY(is_hopeless(table, task, &hopeless, error));
    if (hopeless)
        return CAIRN_OK;
    CRN_TRY(allocate(table, error));
    CRN_TRY(fill_passes(table, task, error));
    CRN_TRY(fill_least(table, task, error));
    table->least_bytes = table->model.always_bytes + crn_least_of(table, 1, table->model.n);
    return CAIRN_OK;
}

void crn_chain_table_clear(crn_chain_table *table)
{
    crn_free(&table->allocator, table->passes, table->pass_capacity, sizeof(*table->passes));
    crn_chain_model_clear(&table->model);
}

/* ---- a schedule of least memory ---- */

static int64_t split_least(const crn_chain_table *table, int32_t s, int32_t t, int32_t split)
{
    const crn_chain_model *model = &table->model;
    int64_t peak = table->pass_peak[crn_row_at(model->n, s, split - 1)];
    if (peak == INT64_MAX)
        return INT64_MAX;
    int64_t right = model->output[split - 1] + crn_least_of(table, split, t);
    return crn_max(crn_max(peak + model->base[t], right), crn_least_of(table, s, split - 1));
}

static int32_t distance(int32_t a, int32_t b)
{
    return a > b ? a - b : b - a;
}

/* Saves where that fits, for it costs no time; else splits as near to the middle as fits, which costs the least. */
static crn_decision decide(const void *context, int32_t s, int32_t t, int64_t m)
{
    const crn_chain_table *table = context;
    const cairn_stage *stage = crn_stage(&table->model, s);
    int32_t middle = s + (t - s + 1) / 2, best = 0;
    for (int32_t k = 0; k < stage->option_count && (s == t || !table->model.outputs_only); k++)
        if (save_least(table, s, t, k) <= m)
            return (crn_decision){.kind = CRN_DECIDE_SAVE, .option = k, .right = m - stage->options[k].saved_bytes};
    for (int32_t split = s + 1; split <= crn_last_split(table, s, t); split++)
        if (split_least(table, s, t, split) <= m && (best == 0 || distance(split, middle) < distance(best, middle)))
            best = split;
    if (best > 0)
        return (crn_decision){
            .kind = CRN_DECIDE_CHECKPOINT, .split = best, .right = m - table->model.output[best - 1], .left = m};
    int32_t k = 0;
    while (k + 1 < stage->option_count && save_and_drop_least(table, s, t, k) > m)
        k++;
    return (crn_decision){
        .kind = CRN_DECIDE_SAVE_AND_DROP, .option = k, .right = m - stage->options[k].saved_bytes, .left = m};
}

cairn_status crn_chain_table_emit(const crn_chain_table *table, const crn_task *task, cairn_builder *builder,
                                  cairn_error *error)
{
    return crn_chain_unfold(task, &table->model, decide, table, crn_least_of(table, 1, table->model.n), builder, error);
}
