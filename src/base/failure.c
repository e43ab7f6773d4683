#include "base/failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const status_names[CAIRN_STATUS_COUNT] = {
#define CAIRN_X(constant, name, text) name,
    CAIRN_STATUS_MAP(CAIRN_X)
#undef CAIRN_X
};

static const char *const status_texts[CAIRN_STATUS_COUNT] = {
#define CAIRN_X(constant, name, text) text,
    CAIRN_STATUS_MAP(CAIRN_X)
#undef CAIRN_X
};

static bool is_status(cairn_status status)
{
    return (int)status >= 0 && status < CAIRN_STATUS_COUNT;
}

const char *cairn_status_name(cairn_status status)
{
    return is_status(status) ? status_names[status] : "unknown";
}

const char *cairn_status_text(cairn_status status)
{
    return is_status(status) ? status_texts[status] : "not a status";
}

const char *cairn_version(void)
{
    return CAIRN_VERSION_TEXT;
}

void crn_error_reset(cairn_error *error)
{
    if (!error)
        return;
    memset(error, 0, sizeof(*error));
    error->line = error->column = error->offset = error->index = CAIRN_NONE;
}

static cairn_status fail(cairn_error *error, cairn_status status, int64_t index, const char *path, const char *format,
                         va_list arguments)
{
    if (!error)
        return status;
    crn_error_reset(error);
    error->status = status;
    error->index = index;
    if (path)
        snprintf(error->path, sizeof(error->path), "%s", path);
    vsnprintf(error->message, sizeof(error->message), format, arguments);
    return status;
}

cairn_status crn_fail(cairn_error *error, cairn_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, status, CAIRN_NONE, NULL, format, arguments);
    va_end(arguments);
    return status;
}

cairn_status crn_fail_at(cairn_error *error, cairn_status status, int64_t index, const char *path, const char *format,
                         ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, status, index, path, format, arguments);
    va_end(arguments);
    return status;
}

cairn_status crn_no_memory(cairn_error *error)
{
    return crn_fail(error, CAIRN_NO_MEMORY, "out of memory");
}
