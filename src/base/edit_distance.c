/* How far a mistyped word is from one that exists. Cost: the product of their lengths, which are bounded. */
#include <cairn/base.h>

#include <ctype.h>
#include <string.h>
#include <strings.h>

enum { WORD_MAX = 48 };

static int least(int a, int b)
{
    return a < b ? a : b;
}

static bool differ(char a, char b)
{
    return tolower((unsigned char)a) != tolower((unsigned char)b);
}

/*
 * Insertions, deletions, substitutions and swaps of neighbours that make one word of the other, capitals aside; the words
 * are short.
 */
static int distance(const char *a, const char *b)
{
    int rows[3][WORD_MAX + 1];
    int n = (int)strlen(a), m = (int)strlen(b);
    for (int j = 0; j <= m; j++)
        rows[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            now[j] = least(least(last[j], now[j - 1]) + 1, last[j - 1] + differ(a[i - 1], b[j - 1]));
            if (i > 1 && j > 1 && !differ(a[i - 1], b[j - 2]) && !differ(a[i - 2], b[j - 1]))
                now[j] = least(now[j], before[j - 2] + 1);
        }
    }
    return rows[n % 3][m];
}

int32_t cairn_slips(const char *word, const char *other)
{
    size_t length = strlen(word);
    if (length == 0 || length > WORD_MAX || strlen(other) > WORD_MAX)
        return -1;
    if (length >= 3 && strncasecmp(word, other, length) == 0)
        return 0;
    int slips = distance(word, other), likely = length <= 3 ? 1 : length <= 8 ? 2 : 3;
    return slips <= likely ? slips : -1;
}
