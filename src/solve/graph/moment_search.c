#include "solve/graph/moment_search.h"

#include <string.h>

#include "solve/graph/graph_bound.h"

/*
 * Work limit without a time limit, in entries that programs look at: some tenths of a second. Small graphs get less,
 * because more is known of them already. Large graphs get none, because programs seldom help there.
 */
#define WORK_MAX ((int64_t)100000000)

/* How large problems are: a graph's size is the number of its nodes and edges. */
enum {
    WORK_OF_TRIPLE = 10,      /* work limit of a small graph, for each cube of its size */
    ENTRIES_OF_SIZE = 240,    /* entries of a program, for each node and edge */
    ENTRIES_MAX = 400000,     /* tens of megabytes */
    NODES_MAX = 20000,        /* of a graph that is looked at with a time limit */
    UNTIMED_NODES_MAX = 2048, /* without one */
};

/* How long the prices of one set are searched: many sets are tried, and the best one is solved for good. */
enum {
    TRIAL_ITERATIONS = 1024,
    LAST_ITERATIONS = 4096,
    TRIAL_ROUNDS = 6,
    LAST_ROUNDS = 24,
};

/* One of so many parts of time and work. */
enum {
    LAST_PARTS = 4,  /* for the best set at the end */
    TIME_PARTS = 2,  /* for all, as long as nothing says that it pays */
    BEGIN_PARTS = 3, /* at the beginning: of the time for the windows' moments, of the work for the even parts */
};

/* The search for sets. */
enum {
    GROWTH = 3,        /* the next set of even parts has a third more */
    WORSE_MAX = 2,     /* so many in a row that are not better end the even parts */
    WORTH_PART = 2000, /* going on with a set pays as long as the bound rises by this part of it */
    FIRST_SHARE = 16,  /* moments begin where one alone says this share of what the best says */
    NEIGHBOURS = 6,    /* a random moment is the best of at most so many in a row */
    CHANGES = 3,       /* fewer than so many moments are dropped at random, and at most so many added */
    IDLE_MAX = 128,    /* random changes in a row that do not help */
};

/* Programs that stay below this share of the known bound are too large to be solved well. */
static const double near = 0.95;

typedef struct moment_set {
    int32_t at[CRN_MOMENTS_MAX];
    int count;
} moment_set;

typedef struct moment_search {
    const crn_graph_model *model;
    crn_moment_program program;
    crn_box_limit limit;
    int32_t from, to; /* where moments may be */
    moment_set best;
    int64_t best_ns; /* of the set, as far as it was looked at */
    uint64_t random;
} moment_search;

static bool has_ended(const moment_search *s)
{
    return s->limit.work <= 0 || crn_should_stop(s->limit.task, NULL);
}

/* Whether the set is better than the best so far, which it then is. */
static bool try_set(moment_search *s, const moment_set *set)
{
    if (set->count == 0 || has_ended(s))
        return false;
    s->limit.iterations = TRIAL_ITERATIONS;
    s->limit.rounds = TRIAL_ROUNDS;
    s->limit.enough = s->best_ns;
    s->limit.remembers = true;
    int64_t found = crn_moment_bound(&s->program, set->at, set->count, &s->limit);
    if (found <= s->best_ns)
        return false;
    s->best = *set;
    s->best_ns = found;
    return true;
}

static bool insert(const moment_set *set, int place, int32_t t, moment_set *with)
{
    *with = *set;
    if (set->count == CRN_MOMENTS_MAX)
        return false;
    memmove(with->at + place + 1, with->at + place, (size_t)(set->count - place) * sizeof(*with->at));
    with->at[place] = t;
    with->count++;
    return true;
}

/* The moments at which the best windows begin that do not overlap. */
static void try_windows(moment_search *s, const crn_graph_windows *all)
{
    int64_t sum[CRN_GRAPH_CUTS_MAX + 1] = {0};
    int from[CRN_GRAPH_CUTS_MAX + 1] = {0};
    moment_set set = {.count = 0}, with;
    for (int j = 1; j <= all->count; j++)
        for (int i = 0; i < j; i++)
            if (crn_add_saturating(sum[i], all->spent[i][j]) > sum[j]) {
                sum[j] = crn_add_saturating(sum[i], all->spent[i][j]);
                from[j] = i;
            }
    for (int j = all->count; j > 0 && sum[j] > 0; j = from[j])
        if (insert(&set, 0, all->cut[from[j]], &with))
            set = with;
    try_set(s, &set);
}

/* Even parts, of each the moment at which most is taken. */
static void try_parts(moment_search *s)
{
    int worse = 0;
    for (int parts = 1; parts <= CRN_MOMENTS_MAX && worse < WORSE_MAX && !has_ended(s); parts += 1 + parts / GROWTH) {
        moment_set set = {.count = 0};
        int64_t span = s->to - s->from;
        for (int i = 0; i < parts && span >= parts; i++) {
            int32_t begin = s->from + (int32_t)(span * i / parts), end = s->from + (int32_t)(span * (i + 1) / parts);
            set.at[set.count++] = crn_graph_largest_taker(s->model, begin, end - begin);
        }
        worse = try_set(s, &set) ? 0 : worse + 1;
    }
}

static moment_set without(const moment_set *set, int place)
{
    moment_set rest = *set;
    rest.count--;
    memmove(rest.at + place, rest.at + place + 1, (size_t)(rest.count - place) * sizeof(*rest.at));
    return rest;
}

/* Between a moment and the one before, or the ends; -1 = nothing is. */
static int32_t taker_before(const moment_search *s, const moment_set *set, int place)
{
    int32_t begin = place > 0 ? set->at[place - 1] + 1 : s->from, end = place < set->count ? set->at[place] : s->to;
    return begin < end ? crn_graph_largest_taker(s->model, begin, end - begin) : -1;
}

/* One moment more, or less, or elsewhere: the first change at a place that helps. */
static bool try_place(moment_search *s, int place)
{
    const moment_set set = s->best;
    moment_set changed;
    int32_t before = taker_before(s, &set, place);
    if (before >= 0 && insert(&set, place, before, &changed) && try_set(s, &changed))
        return true;
    if (place == set.count)
        return false;
    int32_t after = taker_before(s, &set, place + 1);
    for (int i = 0; i < 2; i++) {
        int32_t other = i == 0 ? before : after;
        changed = set;
        changed.at[place] = other;
        if (other >= 0 && try_set(s, &changed))
            return true;
    }
    changed = without(&set, place);
    return try_set(s, &changed);
}

static void improve(moment_search *s)
{
    for (int idle = 0, place = 0; idle <= s->best.count && !has_ended(s); place++) {
        place = place > s->best.count ? 0 : place;
        idle = try_place(s, place) ? 0 : idle + 1;
    }
}

/* Goes on with the best set from where it ended, as long as that raises much. */
static void deepen(moment_search *s)
{
    int64_t before = -1;
    while (s->best_ns - before > s->best_ns / WORTH_PART && !has_ended(s)) {
        const moment_set set = s->best;
        before = s->best_ns;
        try_set(s, &set);
    }
}

/* A moment more in every gap: windows become two windows together, which start where those ended. */
static void refine(moment_search *s)
{
    bool better = true;
    deepen(s);
    while (better && !has_ended(s)) {
        moment_set set = s->best, with;
        for (int place = s->best.count; place >= 0; place--) {
            int32_t t = taker_before(s, &s->best, place);
            if (t >= 0 && insert(&set, place, t, &with))
                set = with;
        }
        better = set.count > s->best.count && try_set(s, &set);
        if (better)
            deepen(s);
    }
}

/* A linear congruential generator with the constants of Knuth's MMIX; its high bits are the random ones. */
static int32_t draw(moment_search *s, int32_t count)
{
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((s->random >> 33) % (uint64_t)count);
}

/* Somewhere, of a few neighbours the one at which most is taken. */
static int32_t draw_moment(moment_search *s)
{
    int32_t t = s->from + draw(s, s->to - s->from), span = 1 + draw(s, NEIGHBOURS);
    return crn_graph_largest_taker(s->model, t, (int32_t)crn_min(span, s->to - t));
}

/* Drops some moments and adds others. */
static void change_at_random(moment_search *s, moment_set *set)
{
    for (int i = draw(s, CHANGES); i > 0 && set->count > 1; i--)
        *set = without(set, draw(s, set->count));
    for (int i = draw(s, CHANGES); i >= 0; i--) {
        const moment_set before = *set;
        int32_t t = draw_moment(s);
        int place = 0;
        while (place < set->count && set->at[place] < t)
            place++;
        if (place == set->count || set->at[place] != t)
            insert(&before, place, t, set);
    }
}

/* What single changes do not reach, as long as it may last. */
static void wander(moment_search *s)
{
    for (int idle = 0; idle < IDLE_MAX && !has_ended(s); idle++) {
        moment_set set = s->best;
        change_at_random(s, &set);
        if (!try_set(s, &set))
            continue;
        improve(s);
        idle = -1;
    }
}

/* Where one moment alone says something of what the best does, and whatever comes after. */
static void find_range(moment_search *s, const int64_t *to_end)
{
    int32_t n = s->model->node_count;
    int64_t most = 0;
    for (int32_t t = 0; t < n; t++)
        most = crn_max(most, to_end[t]);
    s->from = n;
    for (int32_t t = n - 1; t > 0; t--) {
        s->to = s->to == 0 && to_end[t] > 0 ? t + 1 : s->to;
        s->from = to_end[t] > most / FIRST_SHARE ? t : s->from;
    }
}

/* From the windows' moments, and from even parts: on some graphs one is far better, on others the other. */
static void begin(moment_search *s, const crn_graph_windows *windows)
{
    const crn_task *task = s->limit.task;
    const crn_task part = crn_task_part(task, BEGIN_PARTS);
    int64_t work = s->limit.work / BEGIN_PARTS;
    s->limit.work -= work;
    s->limit.task = &part;
    try_windows(s, windows);
    refine(s);
    const moment_set by_windows = s->best;
    int64_t by_windows_ns = s->best_ns;
    s->limit.work += work;
    s->limit.task = task;
    s->best_ns = 0;
    try_parts(s);
    if (s->best_ns < by_windows_ns) {
        s->best = by_windows;
        s->best_ns = by_windows_ns;
    }
    refine(s);
}

static int64_t size_of(int64_t node_count, int64_t edge_count)
{
    return crn_add_saturating(node_count, edge_count);
}

static int32_t entries_of(int64_t size)
{
    return (int32_t)crn_min(ENTRIES_MAX, crn_mul_saturating(size, ENTRIES_OF_SIZE));
}

/* With a part of the time, and with all of it where that soon says more than is known. */
static void search(const crn_task *all, moment_search *s, const crn_graph_windows *windows, int64_t known_ns)
{
    const crn_task part = crn_task_part(all, TIME_PARTS), *task = &part;
    crn_task most = crn_task_but_part(task, LAST_PARTS);
    int64_t last = s->limit.work / LAST_PARTS;
    s->limit.work -= last;
    s->limit.task = &most;
    begin(s, windows);
    if (s->best_ns > known_ns) {
        task = all;
        most = crn_task_but_part(task, LAST_PARTS);
    }
    improve(s);
    bool is_near = (double)s->best_ns >= near * (double)known_ns;
    if (is_near)
        wander(s);
    if (is_near) {
        int64_t work = crn_max(0, s->limit.work) + last;
        s->limit = (crn_box_limit){.task = task, .iterations = LAST_ITERATIONS, .rounds = LAST_ROUNDS, .work = work};
        s->best_ns = crn_max(s->best_ns, crn_moment_bound(&s->program, s->best.at, s->best.count, &s->limit));
    }
    s->limit.task = all;
}

cairn_status crn_moments_raise(const crn_task *task, const crn_graph_bounder *bounder, int64_t *again_ns,
                               cairn_error *error)
{
    const crn_graph_model *model = bounder->model;
    int64_t size = size_of(model->node_count, model->dep_begin[model->node_count]);
    int64_t work = crn_mul_saturating(WORK_OF_TRIPLE * size, crn_mul_saturating(size, size));
    bool by_work = task->deadline_ns == CAIRN_NONE;
    moment_search s = {.model = model,
                       .limit = {.task = task, .work = by_work ? crn_min(WORK_MAX, work) : INT64_MAX / 2}};
    crn_arena arena;
    if (*again_ns == INT64_MAX || *again_ns == 0 || model->node_count > (by_work ? UNTIMED_NODES_MAX : NODES_MAX))
        return CAIRN_OK;
    find_range(&s, bounder->to_end);
    if (s.from >= s.to)
        return CAIRN_OK;
    crn_arena_init(&arena, crn_allocator(task->env));
    bool made = crn_moment_program_new(&arena, model, bounder->budget_bytes, entries_of(size), &s.program);
    if (made)
        search(task, &s, &bounder->windows, *again_ns);
    *again_ns = crn_max(*again_ns, s.best_ns);
    crn_arena_clear(&arena);
    return made ? CAIRN_OK : crn_no_memory(error);
}
