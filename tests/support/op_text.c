#include "support/op_text.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const char letters[] = "SKNBC-><x"; /* in the order of cairn_op_code */

static int32_t parse_index(const char **text)
{
    char *end;
    long value = strtol(*text, &end, 10);
    if (end == *text)
        abort();
    *text = end;
    return (int32_t)value;
}

static cairn_op parse_op(const char **text)
{
    cairn_op op = {0, 0, 0, 0};
    const char *letter = strchr(letters, **text);
    if (!letter || !*letter)
        abort();
    op.code = (uint8_t)(letter - letters);
    ++*text;
    if (**text == 'a' || **text == 'A')
        op.value = *(*text)++ == 'A' ? CAIRN_VALUE_SAVED : CAIRN_VALUE_OUTPUT;
    op.index = parse_index(text);
    if (**text == ':') {
        ++*text;
        op.option = (uint16_t)parse_index(text);
    }
    return op;
}

cairn_schedule *test_schedule_with(const cairn_problem *problem, const char *text, const cairn_schedule_info *info)
{
    cairn_builder *builder;
    cairn_schedule *schedule;
    if (cairn_builder_new(NULL, problem, &builder, NULL) != CAIRN_OK)
        abort();
    while (*text) {
        if (isspace((unsigned char)*text))
            text++;
        else if (cairn_builder_add(builder, parse_op(&text), NULL) != CAIRN_OK)
            abort();
    }
    if (cairn_builder_finish(builder, info, &schedule, NULL) != CAIRN_OK)
        abort();
    cairn_builder_free(builder);
    return schedule;
}

cairn_schedule *test_schedule(const cairn_problem *problem, const char *text)
{
    return test_schedule_with(problem, text, NULL);
}

void test_print_ops(FILE *file, cairn_problem_kind kind, const cairn_op *ops, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        bool on_value = kind == CAIRN_KIND_CHAIN && ops[i].code >= CAIRN_OP_DROP;
        fprintf(file, "%s%c%s%d", i > 0 ? " " : "", letters[ops[i].code],
                !on_value                           ? ""
                : ops[i].value == CAIRN_VALUE_SAVED ? "A"
                                                    : "a",
                (int)ops[i].index);
        if (ops[i].option > 0)
            fprintf(file, ":%u", (unsigned)ops[i].option);
    }
}
