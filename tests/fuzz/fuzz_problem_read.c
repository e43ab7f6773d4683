/*
 * Any text is read or refused, without harm, and alike in its plain form and by trees. What is refused leaves nothing and says why; what is read is written and
 * read again as the same problem, and written the same the second time.
 */
#include <cairn/io.h>
#include <string.h>

#include "fuzz_check.h"
#include "io/read_problem.h"

static void check_refusal(cairn_status status, const cairn_problem *problem, const cairn_error *error)
{
    FUZZ_CHECK(status == CAIRN_PARSE || status == CAIRN_BAD_INPUT || status == CAIRN_OVERFLOW ||
               status == CAIRN_TOO_LARGE);
    FUZZ_CHECK(!problem);
    FUZZ_CHECK(error->status == status);
    FUZZ_CHECK(memchr(error->message, '\0', sizeof(error->message)) != NULL && error->message[0] != '\0');
    FUZZ_CHECK(memchr(error->path, '\0', sizeof(error->path)) != NULL);
}

static void check_round_trip(const cairn_problem *problem)
{
    char *text, *text_again;
    size_t length, length_again;
    cairn_problem *again;
    cairn_error error;
    FUZZ_CHECK(cairn_problem_write(NULL, problem, &text, &length, &error) == CAIRN_OK);
    FUZZ_CHECK(length > 0 && text[length - 1] == '\n' && text[length] == '\0');
    FUZZ_CHECK(cairn_problem_read(NULL, text, length, &again, &error) == CAIRN_OK);
    FUZZ_CHECK(strcmp(cairn_problem_hash(problem), cairn_problem_hash(again)) == 0);
    FUZZ_CHECK(cairn_problem_write(NULL, again, &text_again, &length_again, &error) == CAIRN_OK);
    FUZZ_CHECK(length == length_again && memcmp(text, text_again, length) == 0);
    cairn_problem_free(again);
    cairn_text_free(NULL, text, length);
    cairn_text_free(NULL, text_again, length_again);
}

/* By trees alone the same comes out. */
static void check_by_tree(const char *text, size_t length, const cairn_problem *problem, const cairn_error *error)
{
    cairn_problem *again;
    cairn_error error_again;
    bool read = crn_problem_read(NULL, text, length, true, &again, &error_again) == CAIRN_OK;
    FUZZ_CHECK(read == (problem != NULL));
    if (read)
        FUZZ_CHECK(strcmp(cairn_problem_hash(problem), cairn_problem_hash(again)) == 0);
    else
        FUZZ_CHECK(error->status == error_again.status && error->offset == error_again.offset &&
                   strcmp(error->path, error_again.path) == 0 && strcmp(error->message, error_again.message) == 0);
    cairn_problem_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cairn_problem *problem = NULL;
    cairn_error error;
    cairn_status status = cairn_problem_read(NULL, (const char *)data, size, &problem, &error);
    if (status == CAIRN_OK)
        check_round_trip(problem);
    else
        check_refusal(status, problem, &error);
    check_by_tree((const char *)data, size, problem, &error);
    cairn_problem_free(problem);
    return 0;
}
