#include "base/utf8.h"

#include <string.h>

/* Length of the UTF-8 sequence that begins here; 0 when there is none. */
static size_t sequence_length(const unsigned char *s)
{
    if (s[0] < 0x80)
        return 1;
    size_t length = s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool outside = (s[0] == 0xed && s[1] >= 0xa0) || (s[0] == 0xf4 && s[1] >= 0x90);
    return overlong || outside ? 0 : length;
}

size_t crn_utf8_sequence(const char *text, size_t left)
{
    char whole[4] = {0};
    memcpy(whole, text, left < sizeof(whole) ? left : sizeof(whole));
    return left > 0 ? sequence_length((const unsigned char *)whole) : 0;
}

bool crn_is_utf8(const char *text)
{
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        size_t length = sequence_length(s);
        if (length == 0)
            return false;
        s += length;
    }
    return true;
}

/* C0 and C1 controls and delete: what could command a terminal. */
static bool is_control(const unsigned char *s)
{
    return s[0] < 0x20 || s[0] == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0);
}

const char *crn_printable(const char *text, char *out, size_t size)
{
    static const char cut[] = "...";
    const unsigned char *s = (const unsigned char *)text;
    size_t used = 0;
    while (*s) {
        size_t length = sequence_length(s), step = length > 0 ? length : 1;
        bool shown = length > 0 && !is_control(s);
        bool near_end =
            used + step + sizeof(cut) > size; /* then all of the rest must fit, or this is where it is cut */
        if (near_end && used + strlen((const char *)s) + 1 > size) {
            memcpy(out + used, cut, sizeof(cut));
            return out;
        }
        if (shown)
            memcpy(out + used, s, length);
        else
            out[used] = '?';
        used += shown ? length : 1;
        s += step;
    }
    out[used] = '\0';
    return out;
}
