/* Everything that is printed or written: errors, tables, JSON, files. Results go to standard output, the rest does not. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

const char *cli_clean(const char *text, char *out, size_t size)
{
    size_t length = strlen(text);
    if (length >= size)
        length = size - 1;
    memcpy(out, text, length);
    out[length] = '\0';
    json_t *utf8 = json_string(out);
    for (char *c = out; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f || (!utf8 && (unsigned char)*c >= 0x80))
            *c = '?';
    json_decref(utf8);
    return out;
}

void cli_note(const char *format, ...)
{
    char text[1024], clean[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "cairn: %s\n", cli_clean(text, clean, sizeof(clean)));
}

/* ---- errors ---- */

static cli_exit exit_of(cairn_status status)
{
    switch (status) {
    case CAIRN_OK:
        return CLI_FOUND;
    case CAIRN_CANCELLED:
        return CLI_INTERRUPTED;
    case CAIRN_NO_MEMORY:
    case CAIRN_BAD_ARGUMENT:
    case CAIRN_CALLBACK:
    case CAIRN_INTERNAL:
        return CLI_INTERNAL;
    default:
        return CLI_BAD_INPUT;
    }
}

static void print_error_json(const char *code, const char *message, const char *file, int64_t line, int64_t column)
{
    char clean[1024];
    cli_object fields = cli_object_new(), error = cli_object_new();
    cli_add_text(&fields, "code", code);
    cli_add_text(&fields, "message", cli_clean(message, clean, sizeof(clean)));
    cli_add_text(&fields, "file", file ? cli_clean(file, clean, sizeof(clean)) : NULL);
    cli_add_int(&fields, "line", line);
    cli_add_int(&fields, "column", column);
    cli_add(&error, "error", cli_object_take(&fields));
    json_t *object = cli_object_take(&error);
    if (object && json_dumpf(object, stdout, 0) == 0)
        putchar('\n');
    json_decref(object);
}

cli_exit cli_fail(const cli_call *call, const char *file, const cairn_error *error)
{
    char message[CAIRN_ERROR_PATH_MAX + CAIRN_ERROR_MESSAGE_MAX + 4], position[64] = "";
    bool in_text = file && error->path[0] != '\0';
    snprintf(message, sizeof(message), "%s%s%s", in_text ? error->path : "", in_text ? ": " : "", error->message);
    if (error->line != CAIRN_NONE)
        snprintf(position, sizeof(position), ":%lld:%lld", (long long)error->line, (long long)error->column);
    if (file)
        cli_note("%s%s: %s", strcmp(file, "-") == 0 ? "<standard input>" : file, position, message);
    else
        cli_note("%s", message);
    if (call->json)
        print_error_json(cairn_status_name(error->status), message, file, error->line, error->column);
    return exit_of(error->status);
}

cli_exit cli_fail_plainly(const cli_call *call, cairn_status status, const char *message)
{
    cairn_error error = {.status = status, .line = CAIRN_NONE, .column = CAIRN_NONE};
    snprintf(error.message, sizeof(error.message), "%s", message);
    return cli_fail(call, NULL, &error);
}

cli_exit cli_misuse(const cli_call *call, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    cli_note("%s", message);
    if (call->json)
        print_error_json("usage", message, NULL, CAIRN_NONE, CAIRN_NONE);
    return CLI_BAD_INPUT;
}

/* ---- files ---- */

static bool is_dash(const char *path)
{
    return path && strcmp(path, "-") == 0;
}

cli_exit cli_fail_to_write(const cli_call *call, const char *path, const cairn_error *error)
{
    cli_fail(call, is_dash(path) ? "<standard output>" : path, error);
    return CLI_INTERNAL;
}

bool cli_stdout_is_taken(const cli_call *call)
{
    return is_dash(call->output) || is_dash(call->trace);
}

/* The folder of a path, "." where it names none. */
static void folder_of(const char *path, char *out, size_t size)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) + 1 : 0;
    snprintf(out, size, "%.*s", length < size ? (int)length : (int)size - 1, slash ? path : "");
    if (!slash)
        snprintf(out, size, ".");
}

/* The folder in which a file that is not there would be made; that of where a link leads, if it is one. */
static void folder_to_write(const char *path, char *out, size_t size)
{
    char target[4096];
    folder_of(path, out, size);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    if (length <= 0)
        return;
    target[length] = '\0';
    size_t begun = target[0] == '/' ? 0 : strlen(out);
    snprintf(out + begun, size - begun, "/");
    folder_of(target, out + begun + (begun > 0), size - begun - (begun > 0));
}

/* 0, or the errno that writing a file would end in, and whether that is its folder's. */
static int write_obstacle(const char *path, bool *of_folder)
{
    char folder[4096];
    struct stat info;
    bool exists = stat(path, &info) == 0;
    *of_folder = false;
    if (!exists && errno != ENOENT)
        return errno;
    if (exists && S_ISDIR(info.st_mode))
        return EISDIR;
    if (exists && access(path, W_OK) != 0)
        return errno;
    if (exists && !S_ISREG(info.st_mode))
        return 0;
    *of_folder = true;
    folder_to_write(path, folder, sizeof(folder));
    return access(folder, W_OK | X_OK) == 0 ? 0 : errno;
}

/* Whether two paths lead to one file or folder; devices may be named twice. */
static bool are_one(const char *a, const char *b)
{
    struct stat first, second;
    return stat(a, &first) == 0 && stat(b, &second) == 0 && (S_ISREG(first.st_mode) || S_ISDIR(first.st_mode)) &&
           first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

static const char *last_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Of files that need not be there yet: then it is one name in one folder. */
static bool is_same_file(const char *a, const char *b)
{
    char first[4096], second[4096];
    if (are_one(a, b))
        return true;
    folder_of(a, first, sizeof(first));
    folder_of(b, second, sizeof(second));
    return strcmp(last_name(a), last_name(b)) == 0 && are_one(first, second);
}

static cli_exit check_file(const cli_call *call, const char *path)
{
    if (!path || is_dash(path))
        return CLI_FOUND;
    if (!*path)
        return cli_misuse(call, "the name of a file to write is empty");
    for (int i = 0; i < call->operand_count; i++)
        if (is_same_file(path, call->operands[i]))
            return cli_misuse(call, "\"%s\" is read; it is not to be overwritten", path);
    bool of_folder;
    int obstacle = write_obstacle(path, &of_folder);
    if (obstacle == 0)
        return CLI_FOUND;
    cairn_error error = {.status = CAIRN_IO, .line = CAIRN_NONE, .column = CAIRN_NONE};
    snprintf(error.message, sizeof(error.message), "cannot be written%s: %s", of_folder ? " in its folder" : "",
             strerror(obstacle));
    return cli_fail(call, path, &error);
}

cli_exit cli_check_outputs(const cli_call *call)
{
    if (is_dash(call->output) + is_dash(call->trace) + call->json > 1)
        return cli_misuse(call, "standard output has room for one only of -o -, --trace - and --json");
    if (call->csv && call->json)
        return cli_misuse(call, "--csv and --json do not go together");
    if (call->output && call->trace && !is_dash(call->output) && !is_dash(call->trace) &&
        is_same_file(call->output, call->trace))
        return cli_misuse(call, "-o and --trace name the same file");
    cli_exit result = check_file(call, call->output);
    return result == CLI_FOUND ? check_file(call, call->trace) : result;
}

/* A pipe or a device may keep a writer waiting, so nothing is held back from it. */
static bool is_written_beside(const char *path)
{
    struct stat info;
    return !is_dash(path) && (stat(path, &info) != 0 || S_ISREG(info.st_mode));
}

cairn_status cli_write_file(const char *path, const char *text, size_t length, cairn_error *error)
{
    sigset_t ending, before;
    if (!is_written_beside(path))
        return cairn_file_write(path, text, length, error);
    sigemptyset(&ending);
    sigaddset(&ending, SIGHUP);
    sigaddset(&ending, SIGINT);
    sigaddset(&ending, SIGTERM);
    sigprocmask(SIG_BLOCK, &ending, &before);
    cairn_status status = cairn_file_write(path, text, length, error);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return status;
}

/* A text that grows; the CLI's own, with malloc. */
typedef struct gathered {
    char *text;
    size_t length, capacity;
} gathered;

static int gather(void *context, const char *text, size_t length)
{
    gathered *out = context;
    if (out->capacity - out->length < length) {
        size_t capacity = 2 * out->capacity + length;
        char *grown = realloc(out->text, capacity);
        if (!grown)
            return 1;
        out->text = grown;
        out->capacity = capacity;
    }
    memcpy(out->text + out->length, text, length);
    out->length += length;
    return 0;
}

cli_exit cli_write_trace(const cli_call *call, const cairn_schedule *schedule, int64_t budget_bytes)
{
    gathered out = {NULL, 0, 0};
    cairn_error error;
    if (!call->trace)
        return CLI_FOUND;
    cairn_status status =
        cairn_report_trace(NULL, call->problem, schedule, budget_bytes, (cairn_sink){&out, gather}, &error);
    if (status == CAIRN_OK)
        status = cli_write_file(call->trace, out.text, out.length, &error);
    free(out.text);
    return status == CAIRN_OK ? CLI_FOUND : cli_fail_to_write(call, call->trace, &error);
}

/* ---- standard output ---- */

/* Why standard output took no more. The stream itself knows only that it did not: a later write may seem to succeed. */
static int stdout_obstacle;

/* What fails to be written is told by cli_close_stdout, whoever wrote it. */
static bool was_written(bool success)
{
    if (!success && stdout_obstacle == 0)
        stdout_obstacle = errno;
    return success;
}

static int write_stdout(void *context, const char *text, size_t length)
{
    (void)context;
    (void)was_written(fwrite(text, 1, length, stdout) == length);
    return 0;
}

cairn_sink cli_stdout_sink(void)
{
    return (cairn_sink){NULL, write_stdout};
}

void cli_row(const char *label, const char *value, const char *note)
{
    if (note && *note)
        printf("%-13s %-12s %s\n", label, value, note);
    else
        printf("%-13s %s\n", label, value);
}

cli_exit cli_print_json(const cli_call *call, json_t *value)
{
    if (!value)
        return cli_fail_plainly(call, CAIRN_NO_MEMORY, "out of memory");
    bool written = was_written(json_dumpf(value, stdout, JSON_REAL_PRECISION(15)) == 0 && putchar('\n') != EOF &&
                               fflush(stdout) == 0);
    json_decref(value);
    return written ? CLI_FOUND : CLI_INTERNAL;
}

cli_exit cli_close_stdout(cli_exit result)
{
    bool failed = ferror(stdout) != 0;
    (void)was_written(fclose(stdout) == 0);
    if (failed || stdout_obstacle != 0) {
        cli_note("standard output cannot be written: %s", stdout_obstacle ? strerror(stdout_obstacle) : "write error");
        return CLI_INTERNAL;
    }
    return result;
}
