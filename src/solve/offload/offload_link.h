/* Bytes and times on a link, latency aside, saturated at CRN_LINK_LIMIT. */
#ifndef CRN_OFFLOAD_LINK_H
#define CRN_OFFLOAD_LINK_H

#include "base/checked.h"

#define CRN_LINK_LIMIT (INT64_C(1) << 62)

/** How long a link takes for bytes; rounded up. */
static inline int64_t crn_link_ns(int64_t bytes, int64_t bytes_per_s)
{
    if (bytes <= 0)
        return 0;
    crn_wide ns = ((crn_wide)bytes * 1000000000u + (crn_wide)bytes_per_s - 1) / (crn_wide)bytes_per_s;
    return ns > (crn_wide)CRN_LINK_LIMIT ? CRN_LINK_LIMIT : (int64_t)ns;
}

/** What it moves in a time; rounded down. */
static inline int64_t crn_link_bytes(int64_t ns, int64_t bytes_per_s)
{
    crn_wide bytes = (crn_wide)ns * (crn_wide)bytes_per_s / 1000000000u;
    return bytes > (crn_wide)CRN_LINK_LIMIT ? CRN_LINK_LIMIT : (int64_t)bytes;
}

#endif
