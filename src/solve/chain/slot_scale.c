#include "solve/chain/slot_scale.h"

#include "base/checked.h"

bool crn_slot_scale_init(crn_slot_scale *scale, int64_t available_bytes, int32_t slots, crn_arena *arena)
{
    *scale = (crn_slot_scale){.slots = slots, .available_bytes = available_bytes};
    scale->bytes_of = crn_arena_alloc(arena, (size_t)slots + 1, sizeof(*scale->bytes_of));
    if (!scale->bytes_of)
        return false;
    for (int32_t m = 0; m <= slots; m++)
        scale->bytes_of[m] = (int64_t)((crn_wide)m * (crn_wide)available_bytes / (crn_wide)slots);
    scale->slots_per_byte = available_bytes > 0 ? (double)slots / (double)available_bytes : 0;
    return true;
}

/* The estimate is only where the search begins. */
int32_t crn_slots_of(const crn_slot_scale *scale, int64_t bytes)
{
    if (bytes > scale->available_bytes)
        return scale->slots + 1;
    int32_t m = (int32_t)((double)bytes * scale->slots_per_byte);
    m = m > scale->slots ? scale->slots : m;
    while (m > 0 && scale->bytes_of[m - 1] >= bytes)
        m--;
    while (scale->bytes_of[m] < bytes)
        m++;
    return m;
}

bool crn_slots_are_whole(const crn_slot_scale *scale, int64_t bytes)
{
    crn_wide available = (crn_wide)scale->available_bytes;
    return available == 0 ? bytes == 0 : (crn_wide)bytes * (crn_wide)scale->slots % available == 0;
}
