/* The random choices of a search: a xorshift generator (Marsaglia, 2003), whose state is one number other than 0. */
#ifndef CRN_JOINT_RANDOM_H
#define CRN_JOINT_RANDOM_H

#include <stdint.h>

/** The next number in [0, below); 0 where that is empty. */
static inline int64_t crn_joint_random_below(uint64_t *state, int64_t below)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return below > 0 ? (int64_t)(*state % (uint64_t)below) : 0;
}

#endif
