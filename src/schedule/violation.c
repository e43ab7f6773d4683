#include "schedule/violation.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const violation_names[CAIRN_VIOLATION_COUNT] = {NULL, /* of CAIRN_VIOLATION_NONE */
#define CAIRN_X(constant, name, text) name,
                                                                   CAIRN_VIOLATION_MAP(CAIRN_X)
#undef CAIRN_X
};

static const char *const violation_texts[CAIRN_VIOLATION_COUNT] = {"",
#define CAIRN_X(constant, name, text) text,
                                                                   CAIRN_VIOLATION_MAP(CAIRN_X)
#undef CAIRN_X
};

const char *cairn_violation_name(cairn_violation_code code)
{
    return (int)code >= 0 && code < CAIRN_VIOLATION_COUNT ? violation_names[code] : NULL;
}

const char *crn_violation_text(cairn_violation_code code)
{
    return violation_texts[code];
}

void crn_replay_clear(cairn_replay *replay)
{
    memset(replay, 0, sizeof(*replay));
    replay->violation.op = replay->violation.needed_bytes = replay->violation.free_bytes = CAIRN_NONE;
    replay->makespan_ns = replay->peak_bytes = replay->host_peak_bytes = CAIRN_NONE;
    replay->compute_ns = replay->recompute_ns = replay->stall_ns = CAIRN_NONE;
}

void crn_replay_violate(cairn_replay *replay, cairn_violation_code code, int64_t position, const char *format, ...)
{
    va_list arguments;
    crn_replay_clear(replay);
    replay->violation.code = code;
    replay->violation.op = position;
    va_start(arguments, format);
    vsnprintf(replay->violation.message, sizeof(replay->violation.message), format, arguments);
    va_end(arguments);
}
