/* Binomial checkpointing as numbers: see revolve.c. */
#ifndef CRN_REVOLVE_H
#define CRN_REVOLVE_H

#include <stdint.h>

/** beta(c, r) = C(c + r, c); 0 for r < 0; INT64_MAX where it is larger. */
int64_t crn_revolve_beta(int64_t c, int64_t r);
/** The least number of forwards that save nothing, to reverse n >= 1 steps with c >= 1 outputs kept; INT64_MAX as above. */
int64_t crn_revolve_forwards(int64_t n, int64_t c);
/** How many of n >= 2 steps to go before the next output is kept. */
int64_t crn_revolve_split(int64_t n, int64_t c);

#endif
