/*
 * The first byte chooses one of four problems, the rest is the text of a schedule for it, in which every $ stands for
 * the problem's hash. Any text is read or refused; what is read is written and read again as the same schedule, and
 * judged without harm. By trees alone the same comes out.
 */
#include <cairn/io.h>
#include <string.h>

#include "fuzz_check.h"
#include "io/read_schedule.h"
#include "support/random_problem.h"

static cairn_problem *problem_of(uint8_t choice)
{
    test_random random = test_random_seeded(choice & 3);
    if (choice & 1) {
        test_graph_shape shape = test_graph_of_everything(6);
        shape.machine = choice & 2;
        return test_random_graph(&random, &shape);
    }
    test_chain_shape shape = test_chain_of_everything(4);
    shape.machine = choice & 2;
    return test_random_chain(&random, &shape);
}

static void check_round_trip(const cairn_problem *problem, const cairn_schedule *schedule)
{
    char *text, *text_again;
    size_t length, length_again;
    cairn_schedule *again;
    cairn_error error;
    FUZZ_CHECK(cairn_schedule_write(NULL, schedule, &text, &length, &error) == CAIRN_OK);
    FUZZ_CHECK(cairn_schedule_read(NULL, problem, text, length, &again, &error) == CAIRN_OK);
    FUZZ_CHECK(strcmp(cairn_schedule_hash(schedule), cairn_schedule_hash(again)) == 0);
    FUZZ_CHECK(cairn_schedule_write(NULL, again, &text_again, &length_again, &error) == CAIRN_OK);
    FUZZ_CHECK(length == length_again && memcmp(text, text_again, length) == 0);
    cairn_schedule_free(again);
    cairn_text_free(NULL, text, length);
    cairn_text_free(NULL, text_again, length_again);
}

/* What verifies also simulates, to the same numbers; an invalid one has no numbers. */
static void check_judgement(const cairn_problem *problem, const cairn_schedule *schedule)
{
    cairn_replay simulated, verified;
    cairn_verified *proof;
    FUZZ_CHECK(cairn_simulate(NULL, problem, schedule, CAIRN_RECORDED, NULL, &simulated, NULL) == CAIRN_OK);
    FUZZ_CHECK(cairn_verify(NULL, problem, schedule, CAIRN_RECORDED, &proof, &verified, NULL) == CAIRN_OK);
    FUZZ_CHECK((proof != NULL) == verified.valid);
    FUZZ_CHECK(simulated.valid || !verified.valid);
    if (verified.valid) {
        FUZZ_CHECK(simulated.makespan_ns == verified.makespan_ns && simulated.peak_bytes == verified.peak_bytes);
        FUZZ_CHECK(simulated.makespan_ns >= simulated.compute_ns && simulated.stall_ns >= 0);
    } else {
        FUZZ_CHECK(verified.violation.code != CAIRN_VIOLATION_NONE && verified.makespan_ns == CAIRN_NONE);
    }
    cairn_verified_free(proof);
}

/* A copy with the hash in place. */
static char *text_with_hash(const char *from, size_t size, const char *hash, size_t *length)
{
    size_t hash_length = strlen(hash), count = 0;
    for (size_t i = 0; i < size; i++)
        count += from[i] == '$';
    char *text = malloc(size + count * hash_length + 1);
    FUZZ_CHECK(text != NULL);
    *length = 0;
    for (size_t i = 0; i < size; i++) {
        const char *piece = from[i] == '$' ? hash : &from[i];
        size_t piece_length = from[i] == '$' ? hash_length : 1;
        memcpy(text + *length, piece, piece_length);
        *length += piece_length;
    }
    return text;
}

static void check_by_tree(const cairn_problem *problem, const char *text, size_t length, const cairn_schedule *schedule,
                          const cairn_error *error)
{
    cairn_schedule *again;
    cairn_error error_again;
    bool read = crn_schedule_read(NULL, problem, text, length, true, &again, &error_again) == CAIRN_OK;
    FUZZ_CHECK(read == (schedule != NULL));
    if (read)
        FUZZ_CHECK(strcmp(cairn_schedule_hash(schedule), cairn_schedule_hash(again)) == 0);
    else
        FUZZ_CHECK(error->status == error_again.status && error->offset == error_again.offset &&
                   strcmp(error->path, error_again.path) == 0 && strcmp(error->message, error_again.message) == 0);
    cairn_schedule_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    cairn_problem *problem = problem_of(data[0]);
    cairn_schedule *schedule = NULL;
    cairn_error error;
    size_t length;
    char *text = text_with_hash((const char *)data + 1, size - 1, cairn_problem_hash(problem), &length);
    cairn_status status = cairn_schedule_read(NULL, problem, text, length, &schedule, &error);
    check_by_tree(problem, text, length, schedule, &error);
    free(text);
    if (status == CAIRN_OK) {
        check_round_trip(problem, schedule);
        check_judgement(problem, schedule);
    } else {
        FUZZ_CHECK(!schedule && error.message[0] != '\0');
        FUZZ_CHECK(status == CAIRN_PARSE || status == CAIRN_BAD_INPUT || status == CAIRN_OVERFLOW ||
                   status == CAIRN_TOO_LARGE || status == CAIRN_MISMATCH);
    }
    cairn_schedule_free(schedule);
    cairn_problem_free(problem);
    return 0;
}
