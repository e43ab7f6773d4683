/* Text, digests, bits and words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/sha256.h"
#include "base/textbuf.h"

static void sha256_is_the_same_on_every_processor(void **state)
{
    enum { BLOCKS = 5 };
    uint8_t data[64 * BLOCKS];
    uint64_t random = 1;
    crn_sha256_blocks *native = crn_sha256_native();
    (void)state;
    if (!native)
        skip();
    for (int round = 0; round < 1000; round++) {
        uint32_t a[8], b[8];
        for (size_t i = 0; i < sizeof(data); i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            data[i] = (uint8_t)(random >> 56);
        }
        memcpy(a, data + round % 64, sizeof(a));
        memcpy(b, a, sizeof(b));
        size_t count = (size_t)round % BLOCKS;
        crn_sha256_portable(a, data + round % 64, count);
        native(b, data + round % 64, count);
        assert_memory_equal(a, b, sizeof(a));
    }
}

/* The examples of FIPS 180-4, fed in pieces of every length. */
static void sha256_matches_published_digests(void **state)
{
    (void)state;
    static const char text[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    char digest[CRN_HASH_TEXT_MAX];
    crn_sha256 hash;
    for (size_t piece = 1; piece <= sizeof(text); piece++) {
        crn_sha256_init(&hash);
        for (size_t at = 0; at < sizeof(text) - 1; at += piece) {
            size_t left = sizeof(text) - 1 - at;
            crn_sha256_add(&hash, text + at, left < piece ? left : piece);
        }
        crn_sha256_text(&hash, digest);
        assert_string_equal(digest, "sha256:248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    }
    crn_sha256_init(&hash);
    crn_sha256_text(&hash, digest);
    assert_string_equal(digest, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    crn_sha256_init(&hash);
    for (int i = 0; i < 1000000; i++)
        crn_sha256_add(&hash, "a", 1);
    crn_sha256_text(&hash, digest);
    assert_string_equal(digest, "sha256:cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void text_grows_escapes_and_is_handed_over(void **state)
{
    (void)state;
    crn_textbuf buffer;
    size_t length;
    crn_textbuf_init(&buffer, crn_allocator(NULL));
    crn_textbuf_json(&buffer, "a\"b\\c\n\x01");
    char *text = crn_textbuf_take(&buffer, &length);
    assert_string_equal(text, "\"a\\\"b\\\\c\\u000a\\u0001\"");
    assert_int_equal(length, strlen(text));
    crn_free(&buffer.allocator, text, length + 1, 1);
    for (int i = 0; i < 1000; i++)
        crn_textbuf_print(&buffer, "%d,", i);
    text = crn_textbuf_take(&buffer, &length);
    assert_int_equal(length, 10 * 2 + 90 * 3 + 900 * 4);
    crn_free(&buffer.allocator, text, length + 1, 1);
}

static void text_that_runs_out_of_memory_says_so_once(void **state)
{
    (void)state;
    crn_meter meter;
    size_t length;
    crn_meter_init(&meter, crn_allocator(NULL), 300);
    crn_textbuf buffer;
    crn_textbuf_init(&buffer, crn_meter_allocator(&meter));
    for (int i = 0; i < 100; i++)
        crn_textbuf_print(&buffer, "%d and more, ", i);
    assert_true(buffer.failed);
    assert_null(crn_textbuf_take(&buffer, &length));
    assert_int_equal(atomic_load(&meter.used_bytes), 0);
}

/* Numbers of each width, at addresses that are not theirs. */
static void numbers_survive_as_bits(void **state)
{
    (void)state;
    enum { MOST = 2100, GUARD = 0xa5 };
    static unsigned char given[8 * MOST + 2], back[8 * MOST + 2], bits[MOST / 8 + 2];
    for (int32_t width = 2; width <= 8; width *= 2)
        for (int64_t count = 1; count <= MOST; count = count * 3 / 2 + 1) {
            unsigned char pair[16], *number = given + 1;
            memset(pair, 7, sizeof(pair) / 2);
            memset(pair + width, 9, (size_t)width);
            memset(back, GUARD, sizeof(back));
            memset(given, 0, sizeof(given));
            for (int64_t i = 0; i < count; i++, number += width) { /* 0, a number, minus zero, its negative */
                number[i % width] = (unsigned char)((i % 2) << (i % 7));
                number[width - 1] = (unsigned char)(number[width - 1] + (i % 4 >= 2 ? 128 : 0));
            }
            cairn_bits_pack(given + 1, width, count, bits);
            cairn_bits_unpack(bits, count, pair, width, back + 1);
            for (int64_t i = 0; i < count; i++)
                assert_memory_equal(back + 1 + i * width, pair + (i % 2) * width, (size_t)width);
            assert_int_equal(back[0], GUARD);
            assert_int_equal(back[1 + count * width], GUARD);
        }
}

/* ---- words in memory ---- */

static void words_hold_until_one_differs(void **state)
{
    (void)state;
    enum { COUNT = 5 };
    uint64_t memory[COUNT] = {1, UINT64_MAX, 0, 4, 5}, words[COUNT];
    const uint64_t *places[COUNT];
    for (int i = 0; i < COUNT; i++)
        places[i] = &memory[COUNT - 1 - i];
    for (int i = 0; i < COUNT; i++)
        words[i] = *places[i];
    assert_true(cairn_words_hold(places, words, COUNT));
    for (int i = 0; i < COUNT; i++)
        for (int bit = 0; bit < 64; bit++) {
            memory[COUNT - 1 - i] ^= UINT64_C(1) << bit;
            assert_false(cairn_words_hold(places, words, COUNT));
            assert_true(cairn_words_hold(places, words, i));
            memory[COUNT - 1 - i] ^= UINT64_C(1) << bit;
        }
    assert_true(cairn_words_hold(NULL, NULL, 0));
}

/* What lies behind a word that differs may be gone. */
static void nothing_is_read_behind_a_word_that_differs(void **state)
{
    (void)state;
    const uint64_t first = 1, words[2] = {2, 0}, *const places[2] = {&first, NULL};
    assert_false(cairn_words_hold(places, words, 2));
}

/* ---- words of text ---- */

static void slips_are_counted_as_people_make_them(void **state)
{
    (void)state;
    static const struct {
        const char *word, *other;
        int32_t slips;
    } cases[] = {
        {"name", "name", 0},    {"Name", "name", 0}, {"save", "saved_bytes", 0}, {"nmae", "name", 1},
        {"naame", "name", 1},   {"nme", "name", 1},  {"nane", "name", 1},        {"forwrad_n", "forward_ns", 2},
        {"colour", "name", -1}, {"", "name", -1},    {"xy", "name", -1},         {"na", "name", -1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(cairn_slips(cases[i].word, cases[i].other), cases[i].slips);
}

static void words_of_any_length_and_bytes_can_be_compared(void **state)
{
    (void)state;
    char word[200];
    for (int length = 0; length < (int)sizeof(word); length++) {
        memset(word, 'a' + length % 26, (size_t)length);
        word[length] = 0;
        assert_int_equal(cairn_slips(word, "\xff\xfe\x80"), -1);
        assert_int_equal(cairn_slips(word, word), length > 0 && length <= 48 ? 0 : -1);
    }
    assert_int_equal(cairn_slips("\xff\xfe\x80", "\xff\x80\xfe"), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_is_the_same_on_every_processor),
        cmocka_unit_test(sha256_matches_published_digests),
        cmocka_unit_test(text_grows_escapes_and_is_handed_over),
        cmocka_unit_test(text_that_runs_out_of_memory_says_so_once),
        cmocka_unit_test(numbers_survive_as_bits),
        cmocka_unit_test(words_hold_until_one_differs),
        cmocka_unit_test(nothing_is_read_behind_a_word_that_differs),
        cmocka_unit_test(slips_are_counted_as_people_make_them),
        cmocka_unit_test(words_of_any_length_and_bytes_can_be_compared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
