#include "base/textbuf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/digits.h"

enum { CAPACITY_MIN = 256 };

void crn_textbuf_init(crn_textbuf *buffer, cairn_allocator allocator)
{
    *buffer = (crn_textbuf){.allocator = allocator};
}

static bool reserve(crn_textbuf *buffer, size_t extra)
{
    size_t wanted = buffer->length + extra + 1;
    if (buffer->failed)
        return false;
    if (wanted <= buffer->capacity)
        return true;
    size_t grown = buffer->capacity ? buffer->capacity + buffer->capacity / 2 : CAPACITY_MIN;
    if (grown < wanted)
        grown = wanted;
    char *text = crn_realloc(&buffer->allocator, buffer->text, buffer->capacity, grown, 1);
    if (!text) {
        buffer->failed = true;
        return false;
    }
    buffer->text = text;
    buffer->capacity = grown;
    return true;
}

void crn_textbuf_add(crn_textbuf *buffer, const char *text, size_t length)
{
    if (!reserve(buffer, length))
        return;
    memcpy(buffer->text + buffer->length, text, length);
    buffer->length += length;
    buffer->text[buffer->length] = '\0';
}

void crn_textbuf_print(crn_textbuf *buffer, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    if (length >= 0 && reserve(buffer, (size_t)length)) {
        vsnprintf(buffer->text + buffer->length, (size_t)length + 1, format, again);
        buffer->length += (size_t)length;
    }
    va_end(again);
    va_end(arguments);
}

void crn_textbuf_int(crn_textbuf *buffer, int64_t value)
{
    char text[CRN_DIGITS_MAX], *end = text + sizeof(text), *begin = crn_digits_before(end, value);
    crn_textbuf_add(buffer, begin, (size_t)(end - begin));
}

void crn_textbuf_json(crn_textbuf *buffer, const char *text)
{
    crn_textbuf_add(buffer, "\"", 1);
    for (const char *p = text; *p;) {
        size_t plain = 0;
        while ((unsigned char)p[plain] >= 0x20 && p[plain] != '"' && p[plain] != '\\')
            plain++;
        crn_textbuf_add(buffer, p, plain);
        p += plain;
        if (*p == '"' || *p == '\\')
            crn_textbuf_print(buffer, "\\%c", *p++);
        else if (*p)
            crn_textbuf_print(buffer, "\\u%04x", (unsigned char)*p++);
    }
    crn_textbuf_add(buffer, "\"", 1);
}

void crn_textbuf_free(crn_textbuf *buffer)
{
    crn_free(&buffer->allocator, buffer->text, buffer->capacity, 1);
    crn_textbuf_init(buffer, buffer->allocator);
}

char *crn_textbuf_take(crn_textbuf *buffer, size_t *length)
{
    char *text = NULL;
    if (reserve(buffer, 0) && buffer->text) {
        buffer->text[buffer->length] = '\0';
        text = crn_realloc(&buffer->allocator, buffer->text, buffer->capacity, buffer->length + 1, 1);
    }
    if (!text) {
        crn_textbuf_free(buffer);
        return NULL;
    }
    *length = buffer->length;
    crn_textbuf_init(buffer, buffer->allocator);
    return text;
}
