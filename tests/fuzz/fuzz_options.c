/*
 * Two texts: the name of an option and a value. Both are taken or refused with a reason; a size, rate or duration that
 * is taken is not negative, and plain digits are a number of bytes.
 */
#include <cairn/solve.h>
#include <string.h>

#include "fuzz_check.h"

typedef cairn_status (*parser)(const char *text, int64_t *value, cairn_error *error);

static void check_parser(parser parse, const char *text)
{
    int64_t value = CAIRN_NONE, again = CAIRN_NONE;
    cairn_error error;
    cairn_status status = parse(text, &value, &error);
    FUZZ_CHECK(status == parse(text, &again, NULL));
    if (status == CAIRN_OK)
        FUZZ_CHECK(value >= 0 && value == again);
    else
        FUZZ_CHECK(status == CAIRN_BAD_INPUT && error.message[0] != '\0');
}

static bool is_digits(const char *text)
{
    return strspn(text, "0123456789") == strlen(text);
}

/* "12" is twelve bytes or a refusal, and so is any other plain integer. */
static void check_plain_integer(const char *text)
{
    int64_t value;
    if (!is_digits(text) || strlen(text) == 0 || strlen(text) > 18)
        return;
    FUZZ_CHECK(cairn_parse_size(text, &value, NULL) == CAIRN_OK);
    FUZZ_CHECK(value == strtoll(text, NULL, 10));
}

static void check_option(const char *name, const char *value)
{
    cairn_options *options;
    cairn_error error;
    FUZZ_CHECK(cairn_options_new(NULL, &options, NULL) == CAIRN_OK);
    cairn_status status = cairn_options_set(options, name, value, &error);
    FUZZ_CHECK(status == CAIRN_OK || (status == CAIRN_BAD_INPUT && error.message[0] != '\0'));
    for (int i = 0; cairn_option_at(i); i++) {
        status = cairn_options_set(options, cairn_option_at(i)->name, value, &error);
        FUZZ_CHECK(status == CAIRN_OK || (status == CAIRN_BAD_INPUT && error.message[0] != '\0'));
    }
    cairn_options_free(options);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 2);
    FUZZ_CHECK(text != NULL);
    memcpy(text, data, size);
    text[size] = text[size + 1] = '\0';
    const char *name = text, *value = text + strlen(text) + (strlen(text) < size ? 1 : 0);
    check_parser(cairn_parse_size, value);
    check_parser(cairn_parse_rate, value);
    check_parser(cairn_parse_duration, value);
    check_plain_integer(value);
    check_option(name, value);
    free(text);
    return 0;
}
