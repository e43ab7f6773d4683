/* One of two translation units that include everything: headers define nothing twice. */
#include <cairn/cairn.h>
#include <string.h>

const char *second_version(void);
const char *second_name(cairn_status status);

int main(void)
{
    if (strcmp(second_version(), CAIRN_VERSION_TEXT) != 0 || strcmp(second_version(), cairn_version()) != 0)
        return 1;
    return strcmp(second_name(CAIRN_OK), "ok") != 0;
}
