#define _GNU_SOURCE /* sched_getaffinity */
#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { TEAM_MAX = 256 };

typedef struct member {
    crn_team *team;
    pthread_t thread;
    int worker;
} member;

struct crn_team {
    cairn_allocator allocator;
    int size; /* the caller included */
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    uint64_t round; /* raised for every loop */
    int busy;       /* members still in the current loop */
    bool closing;
    void (*body)(void *context, int64_t i, int worker);
    void *context;
    int64_t count;
    _Atomic int64_t next;
    member members[]; /* size - 1 used */
};

int crn_processor_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count;
}

static void work_through(crn_team *team, int worker)
{
    int64_t i;
    while ((i = atomic_fetch_add(&team->next, 1)) < team->count)
        team->body(team->context, i, worker);
}

static void *member_main(void *argument)
{
    member *self = argument;
    crn_team *team = self->team;
    uint64_t seen = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->round == seen && !team->closing)
            pthread_cond_wait(&team->work, &team->lock);
        if (team->closing)
            break;
        seen = team->round;
        pthread_mutex_unlock(&team->lock);
        work_through(team, self->worker);
        pthread_mutex_lock(&team->lock);
        if (--team->busy == 0)
            pthread_cond_signal(&team->idle);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

static size_t team_bytes(int capacity)
{
    return sizeof(crn_team) + (size_t)(capacity - 1) * sizeof(member);
}

crn_team *crn_team_new(const cairn_allocator *allocator, int threads)
{
    int capacity = threads > 0 ? threads : crn_processor_count();
    if (capacity > TEAM_MAX)
        capacity = TEAM_MAX;
    crn_team *team = crn_alloc_zero(allocator, 1, team_bytes(TEAM_MAX));
    if (!team)
        return NULL;
    team->allocator = *allocator;
    team->size = 1;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->work, NULL);
    pthread_cond_init(&team->idle, NULL);
    while (team->size < capacity) {
        member *next = &team->members[team->size - 1];
        *next = (member){.team = team, .worker = team->size};
        if (pthread_create(&next->thread, NULL, member_main, next) != 0)
            break;
        team->size++;
    }
    return team;
}

void crn_team_free(crn_team *team)
{
    if (!team)
        return;
    pthread_mutex_lock(&team->lock);
    team->closing = true;
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->size - 1; i++)
        pthread_join(team->members[i].thread, NULL);
    pthread_cond_destroy(&team->idle);
    pthread_cond_destroy(&team->work);
    pthread_mutex_destroy(&team->lock);
    crn_free(&team->allocator, team, 1, team_bytes(TEAM_MAX));
}

int crn_team_size(const crn_team *team)
{
    return team ? team->size : 1;
}

void crn_team_run(crn_team *team, int64_t count, void (*body)(void *context, int64_t i, int worker), void *context)
{
    if (!team || team->size == 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++)
            body(context, i, 0);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->body = body;
    team->context = context;
    team->count = count;
    atomic_store(&team->next, 0);
    team->busy = team->size - 1;
    team->round++;
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->lock);
    work_through(team, 0);
    pthread_mutex_lock(&team->lock);
    while (team->busy > 0)
        pthread_cond_wait(&team->idle, &team->lock);
    pthread_mutex_unlock(&team->lock);
}
