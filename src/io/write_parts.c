#include "io/write_parts.h"

#include <cairn/io.h>
#include <inttypes.h>
#include <string.h>

#include "base/failure.h"
#include "base/utf8.h"

void crn_put(crn_textbuf *out, const char *text)
{
    crn_textbuf_add(out, text, strlen(text));
}

void crn_put_int(crn_textbuf *out, const char *key, int64_t value)
{
    crn_put(out, ", \"");
    crn_put(out, key);
    crn_put(out, "\": ");
    crn_textbuf_int(out, value);
}

void crn_put_optional(crn_textbuf *out, const char *key, int64_t value)
{
    if (value == CAIRN_NONE)
        crn_textbuf_print(out, ", \"%s\": null", key);
    else
        crn_put_int(out, key, value);
}

void crn_put_machine(crn_textbuf *out, const cairn_machine *machine)
{
    if (!machine) {
        crn_put(out, "\"machine\": null");
        return;
    }
    crn_textbuf_print(out, "\"machine\": {\"host_bytes\": %" PRId64, machine->host_bytes);
    crn_put_int(out, "to_host_bytes_per_s", machine->to_host_bytes_per_s);
    crn_put_int(out, "to_device_bytes_per_s", machine->to_device_bytes_per_s);
    crn_textbuf_print(out, ", \"shared_link\": %s", machine->shared_link ? "true" : "false");
    crn_put_int(out, "latency_ns", machine->latency_ns);
    crn_put(out, "}");
}

cairn_status crn_check_text(const char *text, const char *what, int64_t index, cairn_error *error)
{
    if (crn_is_utf8(text))
        return CAIRN_OK;
    return crn_fail_at(error, CAIRN_BAD_INPUT, index, NULL, "the name of %s is not UTF-8", what);
}

cairn_status crn_take_text(crn_textbuf *out, char **text, size_t *length, cairn_error *error)
{
    *text = crn_textbuf_take(out, length);
    return *text ? CAIRN_OK : crn_no_memory(error);
}

void cairn_text_free(const cairn_env *env, char *text, size_t length)
{
    cairn_allocator allocator = crn_allocator(env);
    crn_free(&allocator, text, length + 1, 1);
}
