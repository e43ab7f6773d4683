/*
 * What the benchmark programs share: the command line, clocks, allocation and calls that must succeed, and numbers that are
 * the same on all machines.
 */
#ifndef CAIRN_BENCH_SUPPORT_H
#define CAIRN_BENCH_SUPPORT_H

#include <cairn/base.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/*
 * Takes --quick out of the arguments, which asks for a run of seconds that shows that the program works. Any other option,
 * and more than the given number of operands, end the program.
 */
static inline bool take_quick(int *argc, char **argv, int operands_max)
{
    bool quick = false;
    int count = 1;
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (argv[i][0] == '-' || count > operands_max) {
            fprintf(stderr, "%s: unexpected argument '%s'\n", argv[0], argv[i]);
            exit(2);
        } else {
            argv[count++] = argv[i];
        }
    }
    *argc = count;
    return quick;
}

/* Of all threads. */
static inline double processor_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

static inline double clock_seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void must(cairn_status status, const cairn_error *error)
{
    if (status == CAIRN_OK)
        return;
    fprintf(stderr, "%s: %s\n", cairn_status_name(status), error->message);
    exit(3);
}

static inline void *must_allocate(size_t count, size_t size)
{
    void *block = calloc(count, size);
    if (!block)
        exit(3);
    return block;
}

/* Of a linear congruential generator. */
static inline int64_t next_number(uint64_t *state, int64_t low, int64_t high)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return low + (int64_t)((*state >> 33) % (uint64_t)(high - low + 1));
}

#endif
