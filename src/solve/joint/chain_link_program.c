#include "solve/joint/chain_link_program.h"

#include <assert.h>
#include <math.h>

/*
 * Ways times slots that one price may look at: some hundredths of a second, and what the time that is left allows for all prices.
 * Pieces are shorter where that leaves more slots.
 */
enum { PRICES_USUAL = 16, PRICES_LEAST = 8, MEMORY_MAX = 1 << 26 };
enum { SLOTS_MIN = 40, SLOTS_USUAL = 100, SLOTS_MAX = 300, PIECE_MIN = 16, PIECE_MAX = 40 };
#define WORK_MAX 2e8
#define WORK_LARGEST 5e8
#define WORK_OF_NS 3.0

/* What is still to be emitted: a segment, or the backward of stage s. */
typedef struct crn_link_frame {
    bool is_backward;
    int32_t s, t, m, kind;
    int32_t maker; /* the computation that made the input of stage s; -1 = it was there */
} crn_link_frame;

/* A way to compute a segment. */
typedef struct way {
    float cost;
    int32_t option; /* with which s is saved; -1 = an output is kept instead, */
    int32_t kept;   /* that of this stage */
    bool offloads;  /* the input, meanwhile */
} way;

/* ---- sizes ---- */

static const cairn_stage *stage_of(const crn_link_program *p, int32_t l)
{
    return crn_stage(&p->model, l);
}

static int32_t capped(const crn_link_program *p, int64_t slots)
{
    return (int32_t)crn_min(crn_max(0, slots), (int64_t)p->slots + 1);
}

/* What an operation needs, rounded up. */
static int32_t slots_needed(const crn_link_program *p, int64_t bytes)
{
    return capped(p, bytes / p->slot_bytes + (bytes % p->slot_bytes > 0));
}

/* What the input of stage s takes. */
static int32_t slots_taken(const crn_link_program *p, int32_t s, int32_t kind)
{
    return p->taken[(size_t)kind * (size_t)(p->model.n + 1) + (size_t)s - 1];
}

static int64_t input_bytes(const crn_link_program *p, int32_t s, int32_t kind)
{
    if (s == 1)
        return 0;
    const cairn_stage *before = stage_of(p, s - 1);
    return kind == 0 ? before->output_bytes : before->options[kind - 1].saved_bytes;
}

static bool has_kind(const crn_link_program *p, int32_t s, int32_t kind)
{
    return kind == 0 || (s > 1 && kind <= stage_of(p, s - 1)->option_count);
}

/*
 * Of every output, and of every saved set of an option. Rounded up; or so that those of neighbouring stages together are right:
 * what some have too much others have too little.
 */
static void round_sizes(crn_link_program *p)
{
    int32_t n = p->model.n;
    for (int32_t kind = 0; kind < p->kinds; kind++) {
        int32_t *taken = p->taken + (size_t)kind * (size_t)(n + 1);
        int64_t rest = p->terms.rounds_up ? 0 : p->slot_bytes / 2; /* of the stages before, beyond what they take */
        taken[0] = 0;
        for (int32_t l = 1; l <= n; l++) {
            int64_t bytes = has_kind(p, l + 1, kind) ? input_bytes(p, l + 1, kind) : 0;
            int64_t sum = crn_add_saturating(bytes, p->terms.rounds_up ? p->slot_bytes - 1 : rest);
            taken[l] = capped(p, sum / p->slot_bytes);
            rest = sum % p->slot_bytes;
        }
    }
}

/* Van der Corput's sequence: between 0 and 1, and neighbours are far from each other. */
static double place_of(int32_t s)
{
    double place = 0, digit = 0.5;
    for (int32_t v = s; v > 0; v /= 2) {
        place += v % 2 ? digit : 0;
        digit /= 2;
    }
    return place;
}

/* What offloading the input costs; below 0 = it stays. */
static float price_of_input(const crn_link_program *p, int32_t s, int32_t kind)
{
    int64_t bytes = input_bytes(p, s, kind);
    int64_t out_ns = cairn_transfer_ns(bytes, p->machine->to_host_bytes_per_s, p->machine->latency_ns);
    int64_t back_ns = cairn_transfer_ns(bytes, p->machine->to_device_bytes_per_s, p->machine->latency_ns);
    if (bytes == 0 || bytes > p->machine->host_bytes || out_ns < 0 || back_ns < 0)
        return -1;
    double price = p->terms.price * (1 + p->terms.spread * (place_of(s) - 0.5));
    return (float)(price *
                   (p->machine->shared_link ? (double)out_ns + (double)back_ns : (double)crn_max(out_ns, back_ns)));
}

/* To save a stage in a segment that ends with t, and to go back. */
static int64_t bytes_to_save(const crn_link_program *p, int32_t s, int32_t t, int32_t k)
{
    const cairn_stage_option *option = &stage_of(p, s)->options[k];
    return crn_max(p->model.base[t] + crn_save_bytes(option), crn_backward_bytes(&p->model, s, option));
}

/* The first forward of a segment keeps its input, the others drop theirs. */
static int64_t bytes_to_forward(const crn_link_program *p, int32_t s, int32_t l, int32_t t)
{
    return p->model.base[t] + (l > s ? crn_drop_bytes(&p->model, l) : crn_keep_bytes(stage_of(p, l)));
}

/* ---- the table ---- */

/* Segments that end with the chain come first, then the pieces, by their last stage. */
static size_t segment_of(const crn_link_program *p, int32_t s, int32_t t)
{
    size_t n = (size_t)p->model.n, longest = (size_t)p->piece_max, before = (size_t)t - 1;
    size_t shorter = before < longest ? before : longest, first = (size_t)t > longest ? (size_t)t - longest : 0;
    if (t == p->model.n)
        return (size_t)s - 1;
    return n + shorter * (shorter + 1) / 2 + (before - shorter) * longest + (size_t)s - 1 - first;
}

static float *row_of(const crn_link_program *p, int32_t kind, int32_t s, int32_t t)
{
    return p->table + ((size_t)kind * p->segments + segment_of(p, s, t)) * ((size_t)p->slots + 1);
}

/* The last stage of the longest piece from s on within a segment that ends with t. */
static int32_t last_of_piece(const crn_link_program *p, int32_t s, int32_t t)
{
    return t - s > p->piece_max ? s + p->piece_max - 1 : t - 1;
}

/* row[m] = min(row[m], cost + inner[m - taken] + rest[m]) from `least` on, which is at least `taken`; rest may be NULL. */
static void take_way(const crn_link_program *p, float *row, int32_t least, int32_t taken, float cost,
                     const float *inner, const float *rest)
{
    for (int32_t m = least; m <= p->slots; m++) {
        float sum = cost + inner[m - taken] + (rest ? rest[m] : 0);
        row[m] = sum < row[m] ? sum : row[m];
    }
}

/* The same, and with the input on the host meanwhile. Without it, m is at most all slots less the input. */
static void take_both(const crn_link_program *p, float *row, int32_t least, int32_t taken, float cost,
                      const float *inner, const float *rest, int32_t input, float price)
{
    take_way(p, row, least, taken, cost, inner, rest);
    if (price < 0)
        return;
    for (int32_t m = least; m <= p->slots - input; m++) {
        float sum = cost + price + inner[m - taken + input] + (rest ? rest[m] : 0);
        row[m] = sum < row[m] ? sum : row[m];
    }
}

static void fill_saves(crn_link_program *p, int32_t s, int32_t t, int32_t kind, float *row)
{
    const cairn_stage *stage = stage_of(p, s);
    float price = price_of_input(p, s, kind);
    int32_t input = slots_taken(p, s, kind);
    for (int32_t k = 0; k < stage->option_count; k++) {
        float cost = (float)stage->options[k].forward_ns + (float)stage->options[k].backward_ns;
        int32_t least = slots_needed(p, bytes_to_save(p, s, t, k)), taken = slots_taken(p, s + 1, 1 + k);
        if (s < t)
            take_both(p, row, least, taken, cost, row_of(p, 1 + k, s + 1, t), NULL, input, price);
        for (int32_t m = least; s == t && m <= p->slots; m++)
            row[m] = cost < row[m] ? cost : row[m];
    }
}

static void fill_keeps(crn_link_program *p, int32_t s, int32_t t, int32_t kind, float *row)
{
    float price = price_of_input(p, s, kind), cost = 0;
    int32_t input = slots_taken(p, s, kind);
    int64_t needed = 0;
    for (int32_t l = s; l <= last_of_piece(p, s, t) && !stage_of(p, l)->no_recompute; l++) {
        cost += (float)stage_of(p, l)->forward_only_ns;
        needed = crn_max(needed, bytes_to_forward(p, s, l, t));
        take_both(p, row, slots_needed(p, needed), slots_taken(p, l + 1, 0), cost, row_of(p, 0, l + 1, t),
                  row_of(p, kind, s, l), input, price);
    }
}

static void fill_segment(crn_link_program *p, int32_t s, int32_t t)
{
    for (int32_t kind = 0; kind < p->kinds; kind++) {
        float *row = row_of(p, kind, s, t);
        for (int32_t m = 0; m <= p->slots; m++)
            row[m] = INFINITY;
        if (!has_kind(p, s, kind))
            continue;
        fill_saves(p, s, t, kind, row);
        fill_keeps(p, s, t, kind, row);
    }
}

/* ---- the list ---- */

static void try_way(const crn_link_program *p, const crn_link_frame *f, way tried, int32_t least, int32_t taken,
                    const float *inner, const float *rest, way *best)
{
    float price = price_of_input(p, f->s, f->kind);
    int32_t input = slots_taken(p, f->s, f->kind), m = f->m;
    float cost = tried.cost;
    if (m < least)
        return;
    if ((tried.cost = cost + inner[m - taken] + (rest ? rest[m] : 0)) < best->cost)
        *best = tried;
    tried.offloads = true;
    if (price >= 0 && m <= p->slots - input &&
        (tried.cost = cost + price + inner[m - taken + input] + (rest ? rest[m] : 0)) < best->cost)
        *best = tried;
}

/* The best way of a segment with more than one stage. */
static way find_way(const crn_link_program *p, const crn_link_frame *f)
{
    way best = {.cost = INFINITY, .option = -1};
    const cairn_stage *stage = stage_of(p, f->s);
    for (int32_t k = 0; k < stage->option_count; k++) {
        way tried = {.cost = (float)stage->options[k].forward_ns + (float)stage->options[k].backward_ns, .option = k};
        try_way(p, f, tried, slots_needed(p, bytes_to_save(p, f->s, f->t, k)), slots_taken(p, f->s + 1, 1 + k),
                row_of(p, 1 + k, f->s + 1, f->t), NULL, &best);
    }
    int64_t needed = 0;
    way tried = {.option = -1};
    for (int32_t l = f->s; l <= last_of_piece(p, f->s, f->t) && !stage_of(p, l)->no_recompute; l++) {
        tried.cost += (float)stage_of(p, l)->forward_only_ns;
        tried.kept = l;
        needed = crn_max(needed, bytes_to_forward(p, f->s, l, f->t));
        try_way(p, f, tried, slots_needed(p, needed), slots_taken(p, l + 1, 0), row_of(p, 0, l + 1, f->t),
                row_of(p, f->kind, f->s, l), &best);
    }
    assert(best.cost < INFINITY);
    return best;
}

static int32_t fastest_option(const crn_link_program *p, const crn_link_frame *f)
{
    const cairn_stage *stage = stage_of(p, f->s);
    int32_t best = -1;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k], *other = &stage->options[best < 0 ? k : best];
        if (f->m >= slots_needed(p, bytes_to_save(p, f->s, f->t, k)) &&
            (best < 0 || (double)option->forward_ns + (double)option->backward_ns <
                             (double)other->forward_ns + (double)other->backward_ns))
            best = k;
    }
    return best;
}

static cairn_status add(crn_link_program *p, cairn_builder *builder, cairn_op_code code, int32_t l, int32_t option,
                        cairn_error *error)
{
    const cairn_op op = {.code = (uint8_t)code, .option = (uint16_t)option, .index = l};
    if ((size_t)p->made == p->goes_capacity) {
        bool *goes = crn_grow(&p->allocator, p->goes, &p->goes_capacity, (size_t)p->made + 1, sizeof(*goes));
        if (!goes)
            return crn_no_memory(error);
        p->goes = goes;
    }
    p->goes[p->made++] = false;
    return cairn_builder_add(builder, op, error);
}

/* Emits the way, but for its inner segments, which it pushes: the one that comes first last. */
static cairn_status emit_way(crn_link_program *p, crn_link_frame f, const way *w, int32_t *depth,
                             cairn_builder *builder, cairn_error *error)
{
    int32_t freed = w->offloads ? slots_taken(p, f.s, f.kind) : 0;
    if (w->offloads)
        p->goes[f.maker] = true;
    if (w->option >= 0) {
        int32_t taken = slots_taken(p, f.s + 1, 1 + w->option);
        CRN_TRY(add(p, builder, CAIRN_OP_FORWARD_SAVE, f.s, w->option, error));
        p->stack[(*depth)++] = (crn_link_frame){.is_backward = true, .s = f.s};
        p->stack[(*depth)++] = (crn_link_frame){false, f.s + 1, f.t, f.m - taken + freed, 1 + w->option, p->made - 1};
        return CAIRN_OK;
    }
    for (int32_t l = f.s; l <= w->kept; l++)
        CRN_TRY(add(p, builder, l == f.s ? CAIRN_OP_FORWARD_KEEP : CAIRN_OP_FORWARD_DROP, l, 0, error));
    int32_t taken = slots_taken(p, w->kept + 1, 0), end = f.t;
    f.t = w->kept;
    p->stack[(*depth)++] = f;
    p->stack[(*depth)++] = (crn_link_frame){false, w->kept + 1, end, f.m - taken + freed, 0, p->made - 1};
    return CAIRN_OK;
}

static cairn_status emit_frame(crn_link_program *p, crn_link_frame f, int32_t *depth, cairn_builder *builder,
                               cairn_error *error)
{
    if (f.is_backward)
        return add(p, builder, CAIRN_OP_BACKWARD, f.s, 0, error);
    if (f.s < f.t) {
        way w = find_way(p, &f);
        return emit_way(p, f, &w, depth, builder, error);
    }
    CRN_TRY(add(p, builder, CAIRN_OP_FORWARD_SAVE, f.s, fastest_option(p, &f), error));
    return add(p, builder, CAIRN_OP_BACKWARD, f.s, 0, error);
}

static cairn_status emit(crn_link_program *p, cairn_builder *builder, cairn_error *error)
{
    int32_t depth = 0;
    p->made = 0;
    p->stack[depth++] = (crn_link_frame){false, 1, p->model.n, p->room, 0, -1};
    while (depth > 0) {
        crn_link_frame f = p->stack[--depth];
        CRN_TRY(emit_frame(p, f, &depth, builder, error));
    }
    return CAIRN_OK;
}

/* ---- from beginning to end ---- */

static int32_t kinds_of(const cairn_chain *chain)
{
    int32_t most = 1;
    for (int32_t i = 0; i < chain->stage_count; i++)
        most = chain->stages[i].option_count > most ? chain->stages[i].option_count : most;
    return 1 + most;
}

/* Of pieces up to that length, and of what ends with the chain: ways to cut them, with the input here or away. */
static double ways_of(const cairn_chain *chain, double longest)
{
    double n = chain->stage_count, of_pieces = n * longest * longest - longest * longest * longest * 2 / 3;
    double of_rest = 2 * (n - longest) * longest, of_saves = n * longest * kinds_of(chain);
    return (of_pieces + of_rest + of_saves) * kinds_of(chain);
}

static double segments_of(const cairn_chain *chain, double longest)
{
    double n = chain->stage_count;
    return n + (n - 1) * longest - longest * (longest - 1) / 2;
}

static double table_bytes(const cairn_chain *chain, double longest, double slots)
{
    return segments_of(chain, longest) * kinds_of(chain) * (slots + 1) * sizeof(float);
}

/* What there is time for, where so many prices are tried. */
static double work_of(const crn_task *task, double prices)
{
    if (task->deadline_ns == CAIRN_NONE)
        return INFINITY;
    return (double)crn_max(0, task->deadline_ns - crn_clock_ns()) * WORK_OF_NS / prices;
}

crn_link_extent crn_link_extent_of(const crn_task *task, bool is_long)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    double most = fmin(WORK_LARGEST, work_of(task, PRICES_LEAST)), usual = fmin(WORK_MAX, work_of(task, PRICES_USUAL));
    int32_t longest = is_long || chain->stage_count < PIECE_MAX ? chain->stage_count : PIECE_MAX;
    while (longest > PIECE_MIN && !is_long && ways_of(chain, longest) * SLOTS_USUAL > usual)
        longest--;
    while (longest > 0 &&
           (ways_of(chain, longest) * SLOTS_MIN > most || table_bytes(chain, longest, SLOTS_MIN) > MEMORY_MAX))
        longest -= 1 + longest / 16;
    double slots = fmin(usual / ways_of(chain, longest), MEMORY_MAX / table_bytes(chain, longest, 0) - 1);
    bool is_enough = longest >= PIECE_MIN || longest == chain->stage_count;
    return (crn_link_extent){is_enough ? longest : 0, (int32_t)fmax(SLOTS_MIN, fmin(SLOTS_MAX, slots))};
}

int64_t crn_link_program_memory(const crn_task *task, crn_link_extent extent)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    int64_t stage_bytes = (int64_t)sizeof(crn_link_frame) + kinds_of(chain) * (int64_t)sizeof(int32_t) + 32;
    return (int64_t)table_bytes(chain, extent.piece_max, extent.slots) + (chain->stage_count + 2) * stage_bytes + 8192;
}

cairn_status crn_link_program_new(const crn_task *task, int64_t budget_bytes, crn_link_extent extent,
                                  crn_link_program *program, cairn_error *error)
{
    const cairn_chain *chain = cairn_problem_chain(task->problem);
    size_t n = (size_t)chain->stage_count;
    crn_link_program *p = program;
    *p = (crn_link_program){.machine = task->machine,
                            .piece_max = extent.piece_max,
                            .slots = extent.slots,
                            .segments = (size_t)segments_of(chain, extent.piece_max),
                            .kinds = kinds_of(chain),
                            .allocator = crn_allocator(task->env)};
    crn_arena_init(&p->arena, p->allocator);
    CRN_TRY(crn_chain_model_init(&p->model, task, error));
    p->room_bytes = budget_bytes - p->model.always_bytes;
    p->fits = p->room_bytes >= 0;
    p->slot_bytes = crn_max(1, p->room_bytes / p->slots + (p->room_bytes % p->slots > 0));
    p->slots = slots_needed(p, p->room_bytes) < p->slots ? slots_needed(p, p->room_bytes) : p->slots;
    p->stack = crn_arena_alloc(&p->arena, n + 2, sizeof(*p->stack));
    p->taken = crn_arena_alloc(&p->arena, (size_t)p->kinds * (n + 1), sizeof(*p->taken));
    p->table = crn_arena_alloc(&p->arena, (size_t)p->kinds * p->segments * ((size_t)p->slots + 1), sizeof(*p->table));
    return p->stack && p->taken && p->table ? CAIRN_OK : crn_no_memory(error);
}

void crn_link_program_free(crn_link_program *program)
{
    crn_free(&program->allocator, program->goes, program->goes_capacity, sizeof(*program->goes));
    crn_chain_model_clear(&program->model);
    crn_arena_clear(&program->arena);
}

cairn_status crn_link_program_solve(crn_link_program *program, const crn_task *task, crn_link_terms terms,
                                    cairn_builder *builder, bool *found, cairn_error *error)
{
    int32_t n = program->model.n;
    *found = false;
    if (!program->fits)
        return CAIRN_OK;
    program->terms = terms;
    program->room = terms.rounds_up ? (int32_t)(program->room_bytes / program->slot_bytes) : program->slots;
    round_sizes(program);
    for (int32_t length = 1; length <= n; length++)
        for (int32_t s = length > program->piece_max ? n - length + 1 : 1; s + length - 1 <= n; s++) {
            if (crn_should_stop(task, NULL))
                return CAIRN_OK;
            fill_segment(program, s, s + length - 1);
        }
    *found = row_of(program, 0, 1, n)[program->room] < INFINITY;
    return *found ? emit(program, builder, error) : CAIRN_OK;
}
