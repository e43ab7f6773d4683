#include "solve/chain/slotted_cuts.h"

#include "base/checked.h"

/* min(q, r b), without a product that wraps. */
static int64_t paid(int64_t q, int64_t price, int32_t b)
{
    return b > 0 && price > q / b ? q : price * b;
}

/* What all stages but the last take at a price. */
static int64_t bound_at(const crn_slotted_cuts *cuts, const int64_t *q, const int32_t *b, int64_t price)
{
    int64_t sum = -price * cuts->slots;
    for (int32_t l = 1; l < cuts->n; l++)
        sum += paid(q[l], price, b[l]);
    return sum;
}

/* The bound is concave in the price: where it begins to fall. */
static int64_t best_price(const crn_slotted_cuts *cuts, const int64_t *q, const int32_t *b)
{
    int64_t low = 0, high = 0;
    for (int32_t l = 1; l < cuts->n; l++)
        high = crn_max(high, q[l]);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (bound_at(cuts, q, b, middle + 1) > bound_at(cuts, q, b, middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool crn_slotted_cuts_init(crn_slotted_cuts *cuts, int32_t n, int32_t slots, int64_t most_ns, int64_t *q,
                           const int32_t *b, crn_arena *arena)
{
    *cuts = (crn_slotted_cuts){.n = n, .slots = slots, .most_ns = -1};
    if (most_ns >= INT64_MAX / 4 / ((int64_t)n + slots + 2))
        return true; /* sums could wrap */
    cuts->passed_ns = crn_arena_alloc(arena, (size_t)n + 1, sizeof(*cuts->passed_ns));
    cuts->paid_ns = crn_arena_alloc(arena, (size_t)n + 1, sizeof(*cuts->paid_ns));
    if (!cuts->passed_ns || !cuts->paid_ns)
        return false;
    cuts->most_ns = most_ns;
    for (int32_t l = 1; l <= n; l++) /* more than the answer's is too much, however much */
        q[l] = crn_min(q[l], most_ns + 1);
    cuts->price_ns = best_price(cuts, q, b);
    cuts->passed_ns[0] = cuts->paid_ns[0] = 0;
    for (int32_t l = 1; l <= n; l++) {
        cuts->passed_ns[l] = cuts->passed_ns[l - 1] + q[l];
        cuts->paid_ns[l] = cuts->paid_ns[l - 1] + (l < n ? paid(q[l], cuts->price_ns, b[l]) : 0);
    }
    return true;
}

int64_t crn_slotted_cuts_ns(const crn_slotted_cuts *cuts, int32_t s, int32_t t)
{
    if (cuts->most_ns < 0)
        return INT64_MAX;
    int64_t passed = t < cuts->n ? cuts->passed_ns[t] - cuts->passed_ns[s - 1] : 0;
    int64_t outside = cuts->paid_ns[s - 1] + cuts->paid_ns[cuts->n] - cuts->paid_ns[t];
    return cuts->most_ns - passed - crn_max(0, outside - cuts->price_ns * cuts->slots);
}

int32_t crn_slotted_cuts_slots(const crn_slotted_cuts *cuts, int32_t s, int32_t t)
{
    if (cuts->most_ns < 0 || cuts->price_ns == 0)
        return cuts->slots;
    int64_t passed = t < cuts->n ? cuts->passed_ns[t] - cuts->passed_ns[s - 1] : 0;
    int64_t spare = cuts->most_ns - passed - cuts->paid_ns[s - 1];
    int64_t most = cuts->slots + (spare >= 0 ? spare / cuts->price_ns : -1 - (-1 - spare) / cuts->price_ns);
    return most < 0 ? -1 : (int32_t)crn_min(most, cuts->slots);
}
