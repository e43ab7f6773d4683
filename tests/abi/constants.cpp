// The constants of the headers in C++, where a cast of C may be an error.
#include <cairn/cairn.h>

extern const int64_t constants[];
const int64_t constants[] = {CAIRN_NONE,    CAIRN_RECORDED,  CAIRN_STAGES_MAX,        CAIRN_NODES_MAX,
                             CAIRN_OPS_MAX, CAIRN_EDGES_MAX, CAIRN_STAGE_OPTIONS_MAX, CAIRN_FILE_BYTES_MAX};

cairn_schedule_info nothing_recorded();
cairn_schedule_info nothing_recorded()
{
    return CAIRN_SCHEDULE_INFO_INIT;
}
