/*
 * States of a short chain; see chain_states.h.
 *
 * The least remaining time is that of all backwards, with the forward that each needs, and of forwards that run twice.
 * Stages of which nothing is resident lie in runs between those of which something is. Before the backward of the stage
 * that a run leads to, all stages of the run go forward. Those whose saved set is not resident when that backward runs go
 * forward again. The memory beside that backward, and beside the saved sets that wait for theirs, limits how many can be
 * resident: a knapsack, of which those that spare most time for their bytes are an upper bound, with one that fits in part.
 */
#include "solve/chain/chain_states.h"

#include "schedule/schedule.h"

/*
 * What is resident of a stage: nothing; a[l]; A_k[l], which waits for its backward; or A_k[l] in the place of a[l], which
 * is dropped before its backward.
 */
enum { NONE, OUTPUT, SAVED, PASSING = SAVED + CRN_STATES_OPTIONS_MAX };

enum { CODE_BITS = 3, CODE_MASK = (1 << CODE_BITS) - 1, NEXT_SHIFT = CODE_BITS * CRN_STATES_STAGES_MAX };

_Static_assert(PASSING + CRN_STATES_OPTIONS_MAX <= CODE_MASK + 1, "a code fits");
_Static_assert(CRN_STATES_STAGES_MAX >> (64 - NEXT_SHIFT) == 0, "so does the next backward");

/* ---- places ---- */

int32_t crn_chain_states_next_backward(crn_place at)
{
    return (int32_t)(at >> NEXT_SHIFT);
}

static crn_place with_next_backward(crn_place at, int32_t c)
{
    return (at & (((crn_place)1 << NEXT_SHIFT) - 1)) | (crn_place)c << NEXT_SHIFT;
}

static int32_t code_of(crn_place at, int32_t l)
{
    return (int32_t)(at >> CODE_BITS * (l - 1) & CODE_MASK);
}

static crn_place with_code(crn_place at, int32_t l, int32_t code)
{
    const int shift = CODE_BITS * (l - 1);
    return (at & ~((crn_place)CODE_MASK << shift)) | (crn_place)code << shift;
}

/* Whether A_k[l] waits for its backward. */
static bool is_saved(crn_place at, int32_t l)
{
    return code_of(at, l) >= SAVED && code_of(at, l) < PASSING;
}

static bool has_input(crn_place at, int32_t l)
{
    return l == 1 || code_of(at, l - 1) != NONE;
}

static const cairn_stage *stage_at(const crn_chain_states *s, int32_t l)
{
    return &s->chain->stages[l - 1];
}

static const cairn_stage_option *option_of(const crn_chain_states *s, int32_t l, int32_t code)
{
    return &stage_at(s, l)->options[code < PASSING ? code - SAVED : code - PASSING];
}

/* The bytes of a value of stage l, by its code. */
static int64_t bytes_of(const crn_chain_states *s, int32_t l, int32_t code)
{
    if (code >= SAVED)
        return option_of(s, l, code)->saved_bytes;
    return code == OUTPUT ? stage_at(s, l)->output_bytes : 0;
}

static int64_t grad_bytes(const crn_chain_states *s, int32_t l)
{
    return l > 0 ? stage_at(s, l)->grad_bytes : s->chain->input_grad_bytes;
}

/* ---- the least remaining time ---- */

/*
 * The most time that saving some of the stages first..c-1 spares, within so many bytes. The last one counts as a whole:
 * a part of its time would be rounded, and times in another unit would be searched in another order.
 */
static int64_t spared_ns(const crn_chain_states *s, int32_t first, int32_t c, int64_t room_bytes)
{
    int64_t spared = 0, left_bytes = room_bytes;
    for (int32_t i = 0; i < s->gain_count; i++) {
        const crn_stage_gain *gain = &s->gains[i];
        if (gain->l < first || gain->l >= c || gain->least_bytes > room_bytes)
            continue;
        if (gain->bytes > left_bytes)
            return left_bytes > 0 ? spared + gain->ns : spared;
        left_bytes -= gain->bytes;
        spared += gain->ns;
    }
    return spared;
}

/*
 * The same before backward l, beside a[l-1], which it reads. That is there in any case, or A[l-1] instead, which spares
 * the second forward of l-1.
 */
static int64_t spared_before_ns(const crn_chain_states *s, int32_t first, int32_t l, int64_t room_bytes)
{
    const crn_stage_least *input = &s->least[l - 1];
    int64_t ns = spared_ns(s, first, l - 1, room_bytes);
    int64_t less_bytes = room_bytes + stage_at(s, l - 1)->output_bytes - input->kept_bytes;
    return less_bytes < 0 ? ns : crn_max(ns, input->again_ns + spared_ns(s, first, l - 1, less_bytes));
}

/* What backward l takes with an option beside the gradients that are there. */
static int64_t backward_bytes(const crn_chain_states *s, int32_t l, const cairn_stage_option *option)
{
    int64_t result = grad_bytes(s, l - 1) + stage_at(s, l)->weight_grad_bytes;
    return option->saved_bytes + crn_max(0, result + option->backward_workspace_bytes);
}

int64_t crn_chain_states_remaining_ns(const crn_chain_states *s, crn_place at)
{
    const int32_t c = crn_chain_states_next_backward(at);
    int64_t ns = 0, run_ns = 0; /* of the forwards of the run so far */
    int64_t held_bytes = 0;     /* until backward l: saved sets of stages before l, and what these need */
    int32_t first = 1;          /* of the run */
    for (int32_t l = 1; l <= c; l++) {
        const crn_stage_least *t = &s->least[l];
        const cairn_stage_option *option = is_saved(at, l) ? option_of(s, l, code_of(at, l)) : NULL;
        const int64_t input_bytes = l > 1 && !is_saved(at, l - 1) ? stage_at(s, l - 1)->output_bytes : 0;
        int64_t needed_bytes = option ? backward_bytes(s, l, option) : t->backward_bytes;
        int64_t room_bytes = s->budget_bytes - s->gradients_bytes[l] - needed_bytes - input_bytes - held_bytes;
        if (room_bytes < 0)
            return INT64_MAX;
        ns = crn_add_saturating(ns, option ? option->backward_ns : t->once_ns);
        if (code_of(at, l) == NONE && l < c) {
            run_ns = crn_add_saturating(run_ns, t->again_ns);
            continue;
        }
        if (run_ns > 0)
            ns = crn_add_saturating(ns, run_ns - crn_min(run_ns, spared_before_ns(s, first, l, room_bytes)));
        run_ns = 0;
        first = l + 1;
        held_bytes += option ? option->saved_bytes + input_bytes : 0;
    }
    return ns;
}

/* ---- steps ---- */

typedef struct expansion {
    const crn_chain_states *s;
    crn_state from;
    crn_chain_states_reach reach;
    void *context;
} expansion;

/* Whether so many bytes fit beside the gradients while d[c] is at hand. */
static bool fits(const expansion *w, int32_t c, int64_t bytes)
{
    return bytes + w->s->gradients_bytes[c] <= w->s->budget_bytes;
}

static void arrive(const expansion *w, crn_place at, int64_t more_ns, int64_t bytes)
{
    const crn_state to = {at, crn_add_saturating(w->from.ns, more_ns), bytes};
    w->reach(w->context, &to);
}

/*
 * Arrives at a state, and at those in which the value of stage l, which was read, is dropped as well. With a saved set goes
 * the need for its input.
 */
static void arrive_and_drop(const expansion *w, crn_place at, int64_t more_ns, int64_t bytes, int32_t l)
{
    arrive(w, at, more_ns, bytes);
    for (bool again = true; again && l >= 1; l--) {
        int32_t code = code_of(at, l);
        bool is_needed = l < crn_chain_states_next_backward(at) && code_of(at, l + 1) >= SAVED;
        if (code == NONE || is_saved(at, l) || is_needed)
            return;
        at = with_code(at, l, NONE);
        bytes -= bytes_of(w->s, l, code);
        arrive(w, at, more_ns, bytes);
        again = code >= PASSING;
    }
}

/* Stage l forward, saving with an option. What there was of the stage goes. */
static void save(const expansion *w, int32_t l, int32_t code)
{
    const cairn_stage_option *option = option_of(w->s, l, code);
    int64_t bytes = w->from.bytes + option->saved_bytes;
    if (fits(w, crn_chain_states_next_backward(w->from.at), bytes + crn_max(0, option->forward_workspace_bytes)))
        arrive(w, with_code(w->from.at, l, code), option->forward_ns,
               bytes - bytes_of(w->s, l, code_of(w->from.at, l)));
}

/* Stage l forward, keeping the output; by forward_drop where that alone fits. What there was of the stage goes. */
static void keep(const expansion *w, int32_t l)
{
    const cairn_stage *stage = stage_at(w->s, l);
    const int32_t c = crn_chain_states_next_backward(w->from.at), old = code_of(w->from.at, l);
    int64_t bytes = w->from.bytes + stage->output_bytes, during = bytes + stage->forward_only_workspace_bytes;
    crn_place to = with_code(w->from.at, l, OUTPUT);
    if (fits(w, c, crn_max(bytes, during))) {
        arrive_and_drop(w, to, stage->forward_only_ns, bytes - bytes_of(w->s, l, old), l - 1);
        return;
    }
    if (l == 1 || old != NONE || code_of(to, l - 1) != OUTPUT)
        return;
    bytes -= stage_at(w->s, l - 1)->output_bytes;
    if (fits(w, c, crn_max(bytes, during)))
        arrive(w, with_code(to, l - 1, NONE), stage->forward_only_ns, bytes);
}

static void forwards(const expansion *w, int32_t l)
{
    const cairn_stage *stage = stage_at(w->s, l);
    const int32_t code = code_of(w->from.at, l);
    const bool is_read = l < crn_chain_states_next_backward(w->from.at) && !stage->no_recompute;
    if (!has_input(w->from.at, l) || is_saved(w->from.at, l))
        return;
    for (int32_t k = 0; code < SAVED && k < stage->option_count; k++) {
        save(w, l, SAVED + k);
        if (is_read && w->s->least[l].passes[k])
            save(w, l, PASSING + k);
    }
    if (is_read && code != OUTPUT)
        keep(w, l);
}

static void backward(const expansion *w)
{
    const crn_place at = w->from.at;
    const int32_t c = crn_chain_states_next_backward(at);
    if (!is_saved(at, c) || !has_input(at, c))
        return;
    const cairn_stage_option *option = option_of(w->s, c, code_of(at, c));
    int64_t result = grad_bytes(w->s, c - 1) + stage_at(w->s, c)->weight_grad_bytes;
    int64_t bytes = w->from.bytes - option->saved_bytes;
    crn_place to = with_next_backward(with_code(at, c, NONE), c - 1);
    if (c > 1 && code_of(to, c - 1) == OUTPUT) {
        to = with_code(to, c - 1, NONE);
        bytes -= stage_at(w->s, c - 1)->output_bytes;
    }
    if (fits(w, c, w->from.bytes + result + option->backward_workspace_bytes) && fits(w, c - 1, bytes))
        arrive_and_drop(w, to, option->backward_ns, bytes, c - 1);
}

void crn_chain_states_expand(const crn_chain_states *states, const crn_state *from, crn_chain_states_reach reach,
                             void *context)
{
    const expansion w = {states, *from, reach, context};
    for (int32_t l = 1; l <= crn_chain_states_next_backward(from->at); l++)
        forwards(&w, l);
    backward(&w);
}

/* ---- operations ---- */

/* The operation of a step: what was made tells. */
static cairn_op op_of(const crn_chain_states *s, crn_place from, crn_place to)
{
    const int32_t c = crn_chain_states_next_backward(from);
    if (crn_chain_states_next_backward(to) < c)
        return (cairn_op){.code = CAIRN_OP_BACKWARD, .index = c};
    int32_t l = 1;
    while (l < s->n && (code_of(to, l) == NONE || code_of(to, l) == code_of(from, l)))
        l++;
    const int32_t code = code_of(to, l);
    if (code >= SAVED)
        return (cairn_op){.code = CAIRN_OP_FORWARD_SAVE,
                          .option = (uint16_t)(option_of(s, l, code) - stage_at(s, l)->options),
                          .index = l};
    bool drops = l > 1 && code_of(from, l) == NONE && code_of(from, l - 1) == OUTPUT && code_of(to, l - 1) == NONE;
    return (cairn_op){.code = drops ? CAIRN_OP_FORWARD_DROP : CAIRN_OP_FORWARD_KEEP, .index = l};
}

/* Whether an operation removes what was resident of a stage. */
static bool removes(const cairn_op *op, int32_t l, int32_t code)
{
    if (op->code == CAIRN_OP_BACKWARD)
        return l == op->index || (l == op->index - 1 && code == OUTPUT);
    return op->code == CAIRN_OP_FORWARD_DROP && l == op->index - 1;
}

cairn_status crn_chain_states_add_step(const crn_chain_states *states, crn_place from, crn_place to,
                                       cairn_builder *builder, cairn_error *error)
{
    const cairn_op op = op_of(states, from, to);
    CRN_TRY(cairn_builder_add(builder, op, error));
    for (int32_t l = states->n; l >= 1; l--) { /* a saved set before what it needs */
        const int32_t code = code_of(from, l);
        if (code == NONE || code == code_of(to, l) || removes(&op, l, code))
            continue;
        const cairn_op drop = {
            .code = CAIRN_OP_DROP, .value = code == OUTPUT ? CAIRN_VALUE_OUTPUT : CAIRN_VALUE_SAVED, .index = l};
        CRN_TRY(cairn_builder_add(builder, drop, error));
    }
    return CAIRN_OK;
}

/* ---- beginning ---- */

cairn_status crn_chain_states_accept(const cairn_chain *chain, cairn_error *error)
{
    if (chain->stage_count > CRN_STATES_STAGES_MAX)
        return crn_fail(error, CAIRN_UNSUPPORTED, "chain-states takes at most %d stages, and the chain has %d",
                        CRN_STATES_STAGES_MAX, chain->stage_count);
    for (int32_t l = 1; l <= chain->stage_count; l++)
        if (chain->stages[l - 1].option_count > CRN_STATES_OPTIONS_MAX)
            return crn_fail(error, CAIRN_UNSUPPORTED, "chain-states takes at most %d options, and stage %d has %d",
                            CRN_STATES_OPTIONS_MAX, l, chain->stages[l - 1].option_count);
    return CAIRN_OK;
}

/* Whether x spares no less time for its bytes than y. What takes no bytes comes first, even if it spares no time. */
static bool is_no_dearer(const crn_stage_gain *x, const crn_stage_gain *y)
{
    if (x->bytes == 0 || y->bytes == 0)
        return x->bytes == 0;
    return (crn_wide)x->ns * (crn_wide)y->bytes >= (crn_wide)y->ns * (crn_wide)x->bytes;
}

/* Puts a gain where it belongs; those of a stage come one after the other, each dearer than the last. */
static void sort_in(crn_chain_states *s, const crn_stage_gain *gain)
{
    int32_t i = s->gain_count++;
    for (; i > 0 && !is_no_dearer(&s->gains[i - 1], gain); i--)
        s->gains[i] = s->gains[i - 1];
    s->gains[i] = *gain;
}

/*
 * The option that spares most for its bytes beyond an option with so many bytes and so much time spared. What saving
 * spares is a second forward, less what the option takes beyond the fastest one. False: none spares more.
 */
static bool find_gain(const crn_chain_states *s, int32_t l, int64_t bytes, int64_t ns, crn_stage_gain *best)
{
    const cairn_stage *stage = stage_at(s, l);
    const crn_stage_least *least = &s->least[l];
    bool is_found = false;
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        int64_t more_ns = crn_add_saturating(option->forward_ns, option->backward_ns) - least->once_ns;
        const crn_stage_gain gain = {l, least->kept_bytes, option->saved_bytes - bytes, least->again_ns - more_ns - ns};
        if (gain.ns <= 0 || gain.bytes < 0 || (is_found && is_no_dearer(best, &gain)))
            continue;
        *best = gain;
        is_found = true;
    }
    return is_found;
}

/* From one option to the next that spares most for its bytes: together they are no less than any option. */
static void list_gains(crn_chain_states *s, int32_t l)
{
    crn_stage_gain gain;
    for (int64_t bytes = 0, ns = 0; find_gain(s, l, bytes, ns, &gain); bytes += gain.bytes, ns += gain.ns)
        sort_in(s, &gain);
}

/* Whether saving takes less time than keeping, or less memory while it runs. What stays is no less: A_k[l] includes a[l]. */
static bool passes(const cairn_stage *stage, const cairn_stage_option *option)
{
    int64_t keeping = stage->output_bytes + crn_max(0, stage->forward_only_workspace_bytes);
    int64_t saving = option->saved_bytes + crn_max(0, option->forward_workspace_bytes);
    return option->forward_ns < stage->forward_only_ns || saving < keeping;
}

static void fill_stage(crn_chain_states *s, int32_t l)
{
    const cairn_stage *stage = stage_at(s, l);
    crn_stage_least *t = &s->least[l];
    *t = (crn_stage_least){
        .once_ns = INT64_MAX, .again_ns = stage->forward_only_ns, .kept_bytes = INT64_MAX, .backward_bytes = INT64_MAX};
    for (int32_t k = 0; k < stage->option_count; k++) {
        const cairn_stage_option *option = &stage->options[k];
        t->once_ns = crn_min(t->once_ns, crn_add_saturating(option->forward_ns, option->backward_ns));
        t->again_ns = crn_min(t->again_ns, option->forward_ns);
        t->kept_bytes = crn_min(t->kept_bytes, option->saved_bytes);
        t->backward_bytes = crn_min(t->backward_bytes, backward_bytes(s, l, option));
        t->passes[k] = passes(stage, option);
    }
}

void crn_chain_states_init(crn_chain_states *s, const cairn_problem *problem, int64_t budget_bytes)
{
    const cairn_chain *chain = cairn_problem_chain(problem);
    int64_t weights = cairn_problem_info_of(problem)->fixed_bytes + chain->input_bytes;
    *s = (crn_chain_states){.chain = chain, .n = chain->stage_count, .budget_bytes = budget_bytes};
    for (int32_t c = s->n; c >= 0; c--) {
        s->gradients_bytes[c] = weights + grad_bytes(s, c);
        weights += c > 0 ? stage_at(s, c)->weight_grad_bytes : 0;
    }
    for (int32_t l = 1; l <= s->n; l++) {
        fill_stage(s, l);
        list_gains(s, l);
    }
}

bool crn_chain_states_first(const crn_chain_states *s, crn_state *first)
{
    *first = (crn_state){.at = with_next_backward(0, s->n)};
    return s->gradients_bytes[s->n] <= s->budget_bytes;
}
