/*
 * Files are read in their plain form and by trees to the same end: the same problem or schedule, or the same refusal at
 * the same place, for texts that were written and for ones with slips.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/io.h>

#include "io/read_problem.h"
#include "io/read_schedule.h"
#include "support/random_problem.h"
#include "support/rounds.h"

enum { SLIPS = 40 };

/* ---- slips ---- */

/* What may stand in the place of a byte: what numbers, texts, lists and objects are made of, and what they are not. */
static const char *const pieces[] = {"",
                                     "0",
                                     "-",
                                     "9",
                                     ".5",
                                     "e3",
                                     " ",
                                     "\t\n",
                                     "\"",
                                     "\\",
                                     "\\u0041",
                                     "{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "null",
                                     "true",
                                     "fals",
                                     "\x01",
                                     "\xc3\xa9",
                                     "\xff",
                                     "\"x\"",
                                     "-0",
                                     "01",
                                     "[]",
                                     "{}",
                                     "\xed\xa0\x80",
                                     "9999999999999999999",
                                     "1.0",
                                     "\"name\": \"a\", ",
                                     "\"bytes\": 3, ",
                                     "999999999999999999"};
enum { PIECES = sizeof(pieces) / sizeof(pieces[0]), PIECE_MAX = 24 };

/* A copy with one stretch of up to three bytes replaced. */
static char *with_slip(test_random *random, const char *text, size_t length, size_t *made_length)
{
    size_t at = (size_t)test_random_between(random, 0, (int64_t)length), left = length - at;
    size_t cut = (size_t)test_random_between(random, 0, left < 3 ? (int64_t)left : 3);
    const char *piece = pieces[test_random_between(random, 0, PIECES - 1)];
    size_t piece_length = strlen(piece);
    char *made = malloc(length + PIECE_MAX);
    assert_non_null(made);
    memcpy(made, text, at);
    memcpy(made + at, piece, piece_length);
    memcpy(made + at + piece_length, text + at + cut, left - cut);
    *made_length = length - cut + piece_length;
    return realloc(made, *made_length + 1);
}

/* ---- the same end ---- */

static void assert_same_error(const char *text, size_t length, const cairn_error *plain, const cairn_error *tree)
{
    bool same = plain->status == tree->status && plain->offset == tree->offset && plain->line == tree->line &&
                plain->column == tree->column && plain->index == tree->index && strcmp(plain->path, tree->path) == 0 &&
                strcmp(plain->message, tree->message) == 0;
    if (!same)
        fail_msg("%s (%s) and %s (%s) in %.*s", plain->message, plain->path, tree->message, tree->path, (int)length,
                 text);
}

static char *written(const cairn_problem *problem, size_t *length)
{
    char *text;
    cairn_error error;
    assert_int_equal(cairn_problem_write(NULL, problem, &text, length, &error), CAIRN_OK);
    return text;
}

static void assert_same_problem(const cairn_problem *plain, const cairn_problem *tree)
{
    size_t plain_length, tree_length;
    char *plain_text = written(plain, &plain_length), *tree_text = written(tree, &tree_length);
    assert_string_equal(plain_text, tree_text); /* names and provenance, too */
    assert_string_equal(cairn_problem_hash(plain), cairn_problem_hash(tree));
    cairn_text_free(NULL, plain_text, plain_length);
    cairn_text_free(NULL, tree_text, tree_length);
}

static bool read_both_ways(const char *text, size_t length)
{
    cairn_problem *plain, *tree;
    cairn_error plain_error, tree_error;
    cairn_status plain_status = crn_problem_read(NULL, text, length, false, &plain, &plain_error);
    cairn_status tree_status = crn_problem_read(NULL, text, length, true, &tree, &tree_error);
    assert_int_equal(plain_status, tree_status);
    if (plain_status == CAIRN_OK)
        assert_same_problem(plain, tree);
    else
        assert_same_error(text, length, &plain_error, &tree_error);
    cairn_problem_free(plain);
    cairn_problem_free(tree);
    return plain_status == CAIRN_OK;
}

static bool read_schedule_both_ways(const cairn_problem *problem, const char *text, size_t length)
{
    cairn_schedule *plain, *tree;
    cairn_error plain_error, tree_error;
    cairn_status plain_status = crn_schedule_read(NULL, problem, text, length, false, &plain, &plain_error);
    cairn_status tree_status = crn_schedule_read(NULL, problem, text, length, true, &tree, &tree_error);
    assert_int_equal(plain_status, tree_status);
    if (plain_status == CAIRN_OK)
        assert_string_equal(cairn_schedule_hash(plain), cairn_schedule_hash(tree));
    else
        assert_same_error(text, length, &plain_error, &tree_error);
    cairn_schedule_free(plain);
    cairn_schedule_free(tree);
    return plain_status == CAIRN_OK;
}

/* ---- tests ---- */

static cairn_problem *random_problem(test_random *random, bool is_chain)
{
    test_chain_shape chain = test_chain_of_everything(4);
    test_graph_shape graph = test_graph_of_everything(6);
    return is_chain ? test_random_chain(random, &chain) : test_random_graph(random, &graph);
}

static void problems_are_read_alike(void **state)
{
    (void)state;
    int read = 0, refused = 0; /* of those with a slip */
    for (uint64_t seed = 0; seed < TEST_ROUNDS(400); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = random_problem(&random, seed % 2);
        size_t length, slipped_length;
        char *text = written(problem, &length);
        assert_true(read_both_ways(text, length));
        for (int i = 0; i < SLIPS; i++) {
            char *slipped = with_slip(&random, text, length, &slipped_length);
            read_both_ways(slipped, slipped_length) ? read++ : refused++;
            free(slipped);
        }
        cairn_text_free(NULL, text, length);
        cairn_problem_free(problem);
    }
    assert_true(read > refused / 100 && refused > read / 100); /* neither is rare */
}

/* Any operations: a file of them is read, whatever they would do. */
static cairn_schedule *random_schedule(test_random *random, const cairn_problem *problem)
{
    bool is_chain = cairn_problem_kind_of(problem) == CAIRN_KIND_CHAIN;
    int32_t least = is_chain ? 1 : 0,
            most = is_chain ? cairn_problem_chain(problem)->stage_count : cairn_problem_graph(problem)->node_count - 1;
    cairn_schedule_info info = CAIRN_SCHEDULE_INFO_INIT;
    cairn_schedule *schedule;
    cairn_builder *builder;
    assert_int_equal(cairn_builder_new(NULL, problem, &builder, NULL), CAIRN_OK);
    for (int i = 0; i < 30; i++) {
        cairn_op op = {.code = (uint8_t)test_random_between(random, 0, 20),
                       .value = (uint8_t)test_random_between(random, 0, 1),
                       .index = (int32_t)test_random_between(random, least, most)};
        (void)cairn_builder_add(builder, op, NULL); /* operations of the other kind are refused */
    }
    assert_int_equal(cairn_builder_finish(builder, &info, &schedule, NULL), CAIRN_OK);
    cairn_builder_free(builder);
    return schedule;
}

static void schedules_are_read_alike(void **state)
{
    (void)state;
    int read = 0, refused = 0; /* of those with a slip */
    for (uint64_t seed = 0; seed < TEST_ROUNDS(200); seed++) {
        test_random random = test_random_seeded(seed);
        cairn_problem *problem = random_problem(&random, seed % 2);
        cairn_schedule *schedule = random_schedule(&random, problem);
        size_t length, slipped_length;
        char *text;
        assert_int_equal(cairn_schedule_write(NULL, schedule, &text, &length, NULL), CAIRN_OK);
        assert_true(read_schedule_both_ways(problem, text, length));
        for (int i = 0; i < SLIPS; i++) {
            char *slipped = with_slip(&random, text, length, &slipped_length);
            read_schedule_both_ways(problem, slipped, slipped_length) ? read++ : refused++;
            free(slipped);
        }
        cairn_text_free(NULL, text, length);
        cairn_schedule_free(schedule);
        cairn_problem_free(problem);
    }
    assert_true(read > refused / 100 && refused > read / 100); /* neither is rare */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(problems_are_read_alike),
        cmocka_unit_test(schedules_are_read_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
