/*
 * Whether words in memory are what they were.
 *
 * For a caller that has to look at a hundred places far apart, and mostly finds nothing changed. Cost: one read for each
 * place; the reads do not wait for each other, since the processor goes on as if each comparison held.
 */
#include <cairn/base.h>

bool cairn_words_hold(const uint64_t *const *places, const uint64_t *words, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (*places[i] != words[i])
            return false;
    return true;
}
