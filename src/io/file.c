/*
 * Whole files. Writing makes a new file in the target's folder and renames it to the target, so that a reader sees the
 * old file or the new one, never a part. Devices and pipes are written directly.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE 700 /* realpath */
#include <cairn/io.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/failure.h"
#include "base/memory.h"

static cairn_status io_fail(cairn_error *error, const char *what)
{
    char reason[128];
    int code = errno;
    if (strerror_r(code, reason, sizeof(reason)) != 0)
        snprintf(reason, sizeof(reason), "error %d", code);
    return crn_fail(error, CAIRN_IO, "%s: %s", what, reason);
}

static bool is_dash(const char *path)
{
    return strcmp(path, "-") == 0;
}

/* ---- reading ---- */

/* A block that grows while the file is read; text[capacity] is there too, for the terminating zero. */
typedef struct intake {
    cairn_allocator allocator;
    char *text;
    size_t length, capacity;
} intake;

static cairn_status intake_grow(intake *in, size_t capacity, cairn_error *error)
{
    char *text = crn_realloc(&in->allocator, in->text, in->text ? in->capacity + 1 : 0, capacity + 1, 1);
    if (!text)
        return crn_no_memory(error);
    in->text = text;
    in->capacity = capacity;
    return CAIRN_OK;
}

static cairn_status too_large(cairn_error *error)
{
    return crn_fail(error, CAIRN_TOO_LARGE, "more than %lld bytes", (long long)CAIRN_FILE_BYTES_MAX);
}

static cairn_status read_all(intake *in, int fd, cairn_error *error)
{
    for (;;) {
        if (in->length == in->capacity)
            CRN_TRY(intake_grow(in, 2 * in->capacity, error));
        ssize_t got = read(fd, in->text + in->length, in->capacity - in->length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return io_fail(error, "cannot be read");
        if (got == 0)
            return CAIRN_OK;
        in->length += (size_t)got;
        if ((int64_t)in->length > CAIRN_FILE_BYTES_MAX)
            return too_large(error);
    }
}

/* The size of a regular file plus one, so that its end is seen without growing; a guess for the rest. */
static cairn_status first_capacity(int fd, size_t *capacity, cairn_error *error)
{
    struct stat info;
    *capacity = 1 << 16;
    if (fstat(fd, &info) != 0)
        return io_fail(error, "cannot be read");
    if (S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        return io_fail(error, "cannot be read");
    }
    if (S_ISREG(info.st_mode) && info.st_size > CAIRN_FILE_BYTES_MAX)
        return too_large(error);
    if (S_ISREG(info.st_mode))
        *capacity = (size_t)info.st_size + 1;
    return CAIRN_OK;
}

static cairn_status read_descriptor(intake *in, int fd, cairn_error *error)
{
    size_t capacity;
    CRN_TRY(first_capacity(fd, &capacity, error));
    CRN_TRY(intake_grow(in, capacity, error));
    CRN_TRY(read_all(in, fd, error));
    CRN_TRY(intake_grow(in, in->length, error));
    in->text[in->length] = '\0';
    return CAIRN_OK;
}

cairn_status cairn_file_read(const cairn_env *env, const char *path, char **text, size_t *length, cairn_error *error)
{
    intake in = {crn_allocator(env), NULL, 0, 0};
    *text = NULL;
    *length = 0;
    int fd = is_dash(path) ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return io_fail(error, "cannot be opened");
    cairn_status status = read_descriptor(&in, fd, error);
    if (!is_dash(path))
        close(fd);
    if (status != CAIRN_OK) {
        crn_free(&in.allocator, in.text, in.capacity + 1, 1);
        return status;
    }
    *text = in.text;
    *length = in.length;
    return CAIRN_OK;
}

/* ---- writing ---- */

static cairn_status write_all(int fd, const char *text, size_t length, cairn_error *error)
{
    while (length > 0) {
        ssize_t put = write(fd, text, length);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return io_fail(error, "cannot be written");
        text += put;
        length -= (size_t)put;
    }
    return CAIRN_OK;
}

static cairn_status write_in_place(const char *path, const char *text, size_t length, cairn_error *error)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return io_fail(error, "cannot be opened for writing");
    cairn_status status = write_all(fd, text, length, error);
    if (close(fd) != 0 && status == CAIRN_OK)
        status = io_fail(error, "cannot be written");
    return status;
}

/* A new file beside the target. Its name is short, for the target's may be as long as names can be. */
static int open_beside(const char *target, char *name, size_t size)
{
    const char *slash = strrchr(target, '/');
    int folder = slash ? (int)(slash - target) + 1 : 0;
    for (unsigned attempt = 0; attempt < 1000; attempt++) {
        int used = snprintf(name, size, "%.*s.cairn-%ld-%u.tmp", folder, target, (long)getpid(), attempt);
        if (used < 0 || (size_t)used >= size) {
            errno = ENAMETOOLONG;
            return -1;
        }
        int fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST)
            return fd;
    }
    return -1;
}

static cairn_status fill_and_close(int fd, const struct stat *old, const char *text, size_t length, cairn_error *error)
{
    cairn_status status = CAIRN_OK;
    if (old && fchmod(fd, old->st_mode & 07777) != 0)
        status = io_fail(error, "cannot be given the permissions of the file that it replaces");
    if (status == CAIRN_OK)
        status = write_all(fd, text, length, error);
    if (status == CAIRN_OK && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        status = io_fail(error, "cannot be written");
    if (close(fd) != 0 && status == CAIRN_OK)
        status = io_fail(error, "cannot be written");
    return status;
}

static cairn_status write_beside(const char *target, const struct stat *old, const char *text, size_t length,
                                 cairn_error *error)
{
    char name[PATH_MAX + 32];
    int fd = open_beside(target, name, sizeof(name));
    if (fd < 0)
        return io_fail(error, "cannot be opened for writing");
    cairn_status status = fill_and_close(fd, old, text, length, error);
    if (status == CAIRN_OK && rename(name, target) != 0)
        status = io_fail(error, "cannot be replaced");
    if (status != CAIRN_OK)
        unlink(name);
    return status;
}

/*
 * Through symbolic links: the file is replaced, not the link. old NULL: the file was made for the link to lead somewhere. A
 * rename asks the folder alone, so whether the file itself may be written is asked first.
 */
static cairn_status write_through(const char *path, const struct stat *old, const char *text, size_t length,
                                  cairn_error *error)
{
    char *target = realpath(path, NULL);
    if (!target)
        return io_fail(error, "cannot be opened for writing");
    bool may_write = faccessat(AT_FDCWD, target, W_OK, AT_EACCESS) == 0;
    cairn_status status =
        may_write ? write_beside(target, old, text, length, error) : io_fail(error, "cannot be opened for writing");
    if (status != CAIRN_OK && !old)
        unlink(target);
    free(target);
    return status;
}

static cairn_status write_new(const char *path, const char *text, size_t length, cairn_error *error)
{
    struct stat link;
    if (lstat(path, &link) != 0)
        return write_beside(path, NULL, text, length, error);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return io_fail(error, "cannot be opened for writing");
    close(fd);
    return write_through(path, NULL, text, length, error);
}

cairn_status cairn_file_write(const char *path, const char *text, size_t length, cairn_error *error)
{
    struct stat old;
    if (is_dash(path))
        return write_all(STDOUT_FILENO, text, length, error);
    if (stat(path, &old) != 0)
        return errno == ENOENT ? write_new(path, text, length, error) : io_fail(error, "cannot be opened for writing");
    return S_ISREG(old.st_mode) ? write_through(path, &old, text, length, error)
                                : write_in_place(path, text, length, error);
}
