/* Runs a fuzz target on files, and on all files of folders: replay FILE-OR-FOLDER... An empty input comes first. */
#define _DEFAULT_SOURCE /* readdir */
#include <dirent.h>
#include <string.h>

#include "fuzz_check.h"

enum { INPUT_MAX = 1 << 20, PATH_BYTES = 4096 };

static int replay_file(const char *path)
{
    static uint8_t buffer[INPUT_MAX];
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(2);
    }
    size_t size = fread(buffer, 1, sizeof(buffer), file);
    (void)fclose(file);
    /* A block of exactly that size, so that a sanitizer sees a read past its end. */
    uint8_t *data = malloc(size ? size : 1);
    if (!data)
        abort();
    memcpy(data, buffer, size);
    fprintf(stderr, "%s: %zu bytes\n", path, size);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

static int replay_folder(const char *path, DIR *folder)
{
    int count = 0;
    struct dirent *entry;
    char name[PATH_BYTES];
    while ((entry = readdir(folder)))
        if (entry->d_name[0] != '.' && snprintf(name, sizeof(name), "%s/%s", path, entry->d_name) < PATH_BYTES)
            count += replay_file(name);
    return count;
}

int main(int argument_count, char **arguments)
{
    int count = 0;
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 1; i < argument_count; i++) {
        DIR *folder = opendir(arguments[i]);
        count += folder ? replay_folder(arguments[i], folder) : replay_file(arguments[i]);
        if (folder)
            closedir(folder);
    }
    printf("%d inputs replayed\n", count);
    return count > 0 ? 0 : 1;
}
