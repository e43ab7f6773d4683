/*
 * Up to PAIRS_MAX sums are listed in runs, each a front, which are merged two by two. Of more, a table of BUCKETS ranges
 * of bytes keeps the least bytes and the least ns of each: time proportional to the number of sums, with a small constant.
 */
#include "solve/chain/chain_front.h"

#include <string.h>

#include "base/checked.h"

enum { TERMS_MAX = 8, PAIRS_MAX = 512, BUCKETS_LOG2 = 10, BUCKETS = 1 << BUCKETS_LOG2 };

typedef struct term {
    crn_front a, b;
} term;

struct crn_front_maker {
    cairn_allocator allocator;
    term terms[TERMS_MAX];
    int count;
    int32_t run_end[PAIRS_MAX]; /* where each run ends in the list */
    crn_point *list, *other;    /* of sums, or of buckets */
    crn_point points[2][BUCKETS];
};

_Static_assert((int)PAIRS_MAX <= (int)BUCKETS, "both share a list");

crn_front_maker *crn_front_maker_new(const cairn_allocator *allocator)
{
    crn_front_maker *maker = crn_alloc(allocator, 1, sizeof(*maker));
    if (!maker)
        return NULL;
    maker->allocator = *allocator;
    maker->count = 0;
    maker->list = maker->points[0];
    maker->other = maker->points[1];
    return maker;
}

void crn_front_maker_free(crn_front_maker *maker)
{
    if (!maker)
        return;
    cairn_allocator allocator = maker->allocator;
    crn_free(&allocator, maker, 1, sizeof(*maker));
}

void crn_front_begin(crn_front_maker *maker)
{
    maker->count = 0;
}

void crn_front_add_sums(crn_front_maker *maker, crn_front a, crn_front b)
{
    if (a.count > 0 && b.count > 0)
        maker->terms[maker->count++] = (term){a, b};
}

/* ---- few sums ---- */

static bool is_before(const crn_point *a, const crn_point *b)
{
    return a->bytes < b->bytes || (a->bytes == b->bytes && a->ns < b->ns);
}

/* Unites two fronts; returns how many points are left. */
static int32_t merge(const crn_point *a, int32_t a_count, const crn_point *b, int32_t b_count, crn_point *into)
{
    int64_t least = INT64_MAX;
    int32_t i = 0, j = 0, kept = 0;
    while (i < a_count || j < b_count) {
        const crn_point *next = j == b_count || (i < a_count && is_before(&a[i], &b[j])) ? &a[i++] : &b[j++];
        if (next->ns < least) {
            least = next->ns;
            into[kept++] = *next;
        }
    }
    return kept;
}

/* Each point of a with all of b is a front; returns how many there are. */
static int32_t list_runs(crn_front_maker *maker)
{
    int32_t count = 0, runs = 0;
    for (int i = 0; i < maker->count; i++) {
        const term *t = &maker->terms[i];
        for (int32_t j = 0; j < t->a.count; j++) {
            crn_point p = t->a.points[j];
            for (int32_t k = 0; k < t->b.count; k++)
                maker->list[count++] = (crn_point){p.bytes + t->b.points[k].bytes, p.ns + t->b.points[k].ns};
            maker->run_end[runs++] = count;
        }
    }
    return runs;
}

/* Merges the runs two by two until one is left, at maker->list. */
static int32_t merge_sums(crn_front_maker *maker)
{
    int32_t runs = list_runs(maker);
    while (runs > 1) {
        int32_t begin = 0, count = 0, merged = 0;
        for (int32_t i = 0; i < runs; i += 2) {
            int32_t middle = maker->run_end[i], end = i + 1 < runs ? maker->run_end[i + 1] : middle;
            count +=
                merge(maker->list + begin, middle - begin, maker->list + middle, end - middle, maker->other + count);
            maker->run_end[merged++] = count;
            begin = end;
        }
        runs = merged;
        crn_point *list = maker->list;
        maker->list = maker->other;
        maker->other = list;
    }
    return maker->run_end[0];
}

/* ---- many sums ---- */

/* The bytes of all sums lie in [low, high]. */
static void find_range(const crn_front_maker *maker, int64_t *low, int64_t *high)
{
    *low = CRN_FRONT_BYTES_MAX;
    *high = 0;
    for (int i = 0; i < maker->count; i++) {
        const term *t = &maker->terms[i];
        *low = crn_min(*low, t->a.points[0].bytes + t->b.points[0].bytes);
        *high = crn_max(*high, t->a.points[t->a.count - 1].bytes + t->b.points[t->b.count - 1].bytes);
    }
    *high = crn_min(*high, CRN_FRONT_BYTES_MAX);
}

/* Of the sums with one point of a, those after the first that reaches the floor take more bytes for nothing. */
static void put_sums(crn_point *bucket, const term *t, int64_t low, int64_t high, int64_t floor_ns, int shift)
{
    for (int32_t j = 0; j < t->a.count; j++) {
        crn_point p = t->a.points[j];
        for (int32_t k = 0; k < t->b.count; k++) {
            int64_t bytes = p.bytes + t->b.points[k].bytes, ns = p.ns + t->b.points[k].ns;
            if (bytes > high)
                break;
            crn_point *into = &bucket[(bytes - low) >> shift];
            into->bytes = crn_min(into->bytes, bytes);
            into->ns = crn_min(into->ns, ns);
            if (ns <= floor_ns)
                break;
        }
    }
}

static int32_t collect_sums(crn_front_maker *maker, int64_t floor_ns)
{
    int64_t low, high;
    int shift = 0;
    find_range(maker, &low, &high);
    while ((high - low) >> shift >= BUCKETS)
        shift++;
    for (int32_t i = 0; i < BUCKETS; i++)
        maker->list[i] = (crn_point){INT64_MAX, CRN_FRONT_NEVER};
    for (int i = 0; i < maker->count; i++)
        put_sums(maker->list, &maker->terms[i], low, high, floor_ns, shift);
    return BUCKETS;
}

/* ---- the front ---- */

/* Of points sorted by bytes, those that are worth their bytes. */
static int32_t prune(crn_point *list, int32_t count, int64_t floor_ns)
{
    int64_t least = CRN_FRONT_NEVER;
    int32_t kept = 0;
    for (int32_t i = 0; i < count && least > floor_ns; i++) {
        int64_t ns = crn_max(list[i].ns, floor_ns);
        if (list[i].bytes > CRN_FRONT_BYTES_MAX || ns >= least)
            continue;
        least = ns;
        list[kept++] = (crn_point){list[i].bytes, ns};
    }
    return kept;
}

/* Merges neighbours in each of most ranges of bytes. */
static int32_t thin(const crn_point *list, int32_t count, crn_point *points, int32_t most)
{
    int64_t low = list[0].bytes, width = (list[count - 1].bytes - low) / most + 1, range = -1;
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        if ((list[i].bytes - low) / width != range) {
            range = (list[i].bytes - low) / width;
            points[kept++] = list[i];
        }
        points[kept - 1].ns = list[i].ns;
    }
    return kept;
}

int32_t crn_front_end(crn_front_maker *maker, int64_t floor_ns, crn_point *points, int32_t most)
{
    int64_t sums = 0;
    for (int i = 0; i < maker->count; i++)
        sums += (int64_t)maker->terms[i].a.count * maker->terms[i].b.count;
    if (sums == 0)
        return 0;
    int32_t count = sums <= PAIRS_MAX ? merge_sums(maker) : collect_sums(maker, floor_ns);
    count = prune(maker->list, count, floor_ns);
    if (count > most)
        return thin(maker->list, count, points, most);
    memcpy(points, maker->list, (size_t)count * sizeof(*points));
    return count;
}
