/* What was probably meant: the nearest of the words that exist. */
#include "cli.h"

const char *cli_nearest(const char *word, const char *(*candidate)(const void *context, int index), const void *context)
{
    const char *best = NULL, *other;
    int32_t least = INT32_MAX;
    for (int i = 0; (other = candidate(context, i)); i++) {
        int32_t slips = cairn_slips(word, other);
        if (slips >= 0 && slips < least) {
            best = other;
            least = slips;
        }
    }
    return best;
}
