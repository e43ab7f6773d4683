#include "solve/chain/subchain.h"

#include <string.h>

/* ---- stages ---- */

static bool options_alike(const cairn_stage_option *a, const cairn_stage_option *b)
{
    return a->saved_bytes == b->saved_bytes && a->forward_ns == b->forward_ns && a->backward_ns == b->backward_ns &&
           a->forward_workspace_bytes == b->forward_workspace_bytes &&
           a->backward_workspace_bytes == b->backward_workspace_bytes;
}

static bool stages_alike(const crn_chain_model *model, int32_t i, int32_t j)
{
    const cairn_stage *a = crn_stage(model, i), *b = crn_stage(model, j);
    if (i == 1 || j == 1)
        return i == j;
    bool alike = a->output_bytes == b->output_bytes && a->grad_bytes == b->grad_bytes &&
                 a->weight_grad_bytes == b->weight_grad_bytes && a->forward_only_ns == b->forward_only_ns &&
                 a->forward_only_workspace_bytes == b->forward_only_workspace_bytes &&
                 a->no_recompute == b->no_recompute && a->option_count == b->option_count &&
                 crn_stage(model, i - 1)->grad_bytes == crn_stage(model, j - 1)->grad_bytes;
    for (int32_t k = 0; alike && k < a->option_count; k++)
        alike = options_alike(&a->options[k], &b->options[k]);
    return alike;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

static uint64_t stage_hash(const crn_chain_model *model, int32_t l)
{
    const cairn_stage *stage = crn_stage(model, l);
    uint64_t hash = mix((uint64_t)stage->option_count, (uint64_t)stage->output_bytes);
    hash = mix(hash, (uint64_t)stage->forward_only_ns);
    for (int32_t k = 0; k < stage->option_count; k++) {
        hash = mix(hash, (uint64_t)stage->options[k].saved_bytes);
        hash = mix(hash, (uint64_t)stage->options[k].forward_ns);
        hash = mix(hash, (uint64_t)stage->options[k].backward_ns);
    }
    return hash;
}

/* ---- a table of what was seen: open addressing, at most half full ---- */

typedef struct seen {
    int32_t *slot; /* place of the first of a kind, 0 = free */
    size_t mask;
} seen;

static size_t slot_count(int32_t n)
{
    size_t count = 4;
    while (count < 2 * ((size_t)n + 1))
        count *= 2;
    return count;
}

/* Numbers the stages: alike[l] is the first stage that is like l. */
static int32_t number_stages(const crn_chain_model *model, seen *table, int32_t *alike)
{
    int32_t distinct = 0;
    memset(table->slot, 0, (table->mask + 1) * sizeof(*table->slot));
    for (int32_t l = 1; l <= model->n; l++) {
        size_t at = (size_t)stage_hash(model, l) & table->mask;
        while (table->slot[at] != 0 && !stages_alike(model, table->slot[at], l))
            at = (at + 1) & table->mask;
        if (table->slot[at] == 0) {
            table->slot[at] = l;
            distinct++;
        }
        alike[l] = table->slot[at];
    }
    return distinct;
}

static int32_t *kind_at(crn_subchains *subchains, int32_t s, int32_t t)
{
    return &subchains->kind[crn_column_at(s, t)];
}

/* (s, t) is what (s, t-1) and stage t are. */
static void number_length(crn_subchains *subchains, int32_t length, seen *table, const int32_t *alike)
{
    int32_t next = subchains->begin[length];
    memset(table->slot, 0, (table->mask + 1) * sizeof(*table->slot));
    for (int32_t s = 1; s + length - 1 <= subchains->n; s++) {
        int32_t t = s + length - 1, before = length > 1 ? crn_subchain_kind(subchains, s, t - 1) : 0;
        size_t at = (size_t)mix(mix(1, (uint64_t)before), (uint64_t)alike[t]) & table->mask;
        for (;; at = (at + 1) & table->mask) {
            int32_t other = table->slot[at];
            if (other == 0)
                break;
            if (alike[other + length - 1] == alike[t] &&
                (length == 1 || crn_subchain_kind(subchains, other, other + length - 2) == before))
                break;
        }
        if (table->slot[at] == 0) {
            table->slot[at] = s;
            subchains->first[next] = s;
            *kind_at(subchains, s, t) = next++;
        } else {
            *kind_at(subchains, s, t) = crn_subchain_kind(subchains, table->slot[at], table->slot[at] + length - 1);
        }
    }
    subchains->begin[length + 1] = next;
}

int64_t crn_subchains_memory(int32_t n)
{
    return (int64_t)(2 * crn_pair_count(n) + 2 * (size_t)n + 4 + slot_count(n)) * (int64_t)sizeof(int32_t);
}

/* Which stages are alike; begin[1] = 0. */
static cairn_status begin(crn_subchains *subchains, const crn_chain_model *model, crn_arena *arena, seen *table,
                          int32_t **alike, cairn_error *error)
{
    int32_t n = model->n;
    size_t slots = slot_count(n);
    *subchains = (crn_subchains){.n = n};
    subchains->begin = crn_arena_alloc(arena, (size_t)n + 2, sizeof(*subchains->begin));
    *alike = crn_arena_alloc(arena, (size_t)n + 1, sizeof(**alike));
    *table = (seen){crn_arena_alloc(arena, slots, sizeof(*table->slot)), slots - 1};
    if (!subchains->begin || !*alike || !table->slot)
        return crn_no_memory(error);
    subchains->distinct_count = number_stages(model, table, *alike);
    subchains->begin[0] = subchains->begin[1] = 0;
    return CAIRN_OK;
}

cairn_status crn_subchains_init(crn_subchains *subchains, const crn_chain_model *model, crn_arena *arena,
                                cairn_error *error)
{
    seen table;
    int32_t *alike, n = model->n;
    CRN_TRY(begin(subchains, model, arena, &table, &alike, error));
    subchains->kind = crn_arena_alloc(arena, crn_pair_count(n), sizeof(*subchains->kind));
    subchains->first = crn_arena_alloc(arena, crn_pair_count(n), sizeof(*subchains->first));
    if (!subchains->kind || !subchains->first)
        return crn_no_memory(error);
    for (int32_t length = 1; length <= n; length++)
        number_length(subchains, length, &table, alike);
    return CAIRN_OK;
}

cairn_status crn_subchains_count_least(crn_subchains *subchains, const crn_chain_model *model, crn_arena *arena,
                                       cairn_error *error)
{
    seen table;
    int32_t *alike;
    CRN_TRY(begin(subchains, model, arena, &table, &alike, error));
    for (int32_t length = 1; length <= model->n; length++) {
        int32_t firsts = subchains->distinct_count - length + 1;
        subchains->begin[length + 1] = subchains->begin[length] + (firsts > 1 ? firsts : 1);
    }
    return CAIRN_OK;
}
