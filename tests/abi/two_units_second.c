#include <cairn/cairn.h>

const char *second_version(void);
const char *second_name(cairn_status status);

const char *second_version(void)
{
    return cairn_version();
}

const char *second_name(cairn_status status)
{
    return cairn_status_name(status);
}
