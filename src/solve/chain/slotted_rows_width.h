/*
 * The operations of slotted_rows.h for one width; slotted_rows.c includes it once for each. VALUE is the type, INFINITE
 * the value that counts as infinite, NAME(word) the name of a function in this width.
 *
 * The kernels compute current[i] = min(current[i], ns + x[i] + y[i]) for whole lines, but for the first `head` values. None
 * of the three increases with i, so a block is left out where even its last values are not less than its first.
 */

/* What is added to a first line: from LINE - head on. */
static const VALUE NAME(skip)[2 * LINE] = {INFINITE, INFINITE, INFINITE, INFINITE,
                                           INFINITE, INFINITE, INFINITE, INFINITE};

CRN_VECTOR static void NAME(relax_two)(VALUE *restrict current, const VALUE *restrict x, const VALUE *restrict y,
                                       VALUE ns, int32_t head, int32_t count)
{
    const VALUE *restrict skip = NAME(skip) + LINE - head;
    int32_t i = LINE;
    for (int32_t j = 0; j < LINE; j++) {
        VALUE value = ns + x[j] + y[j] + skip[j];
        current[j] = value < current[j] ? value : current[j];
    }
    for (; i + BLOCK <= count; i += BLOCK) {
        if (ns + x[i + BLOCK - 1] + y[i + BLOCK - 1] >= current[i])
            continue;
        for (int32_t j = i; j < i + BLOCK; j++) {
            VALUE value = ns + x[j] + y[j];
            current[j] = value < current[j] ? value : current[j];
        }
    }
    for (; i < count; i += LINE)
        for (int32_t j = i; j < i + LINE; j++) {
            VALUE value = ns + x[j] + y[j];
            current[j] = value < current[j] ? value : current[j];
        }
}

/* The same where y is constant, and a part of ns. */
CRN_VECTOR static void NAME(relax_one)(VALUE *restrict current, const VALUE *restrict x, VALUE ns, int32_t head,
                                       int32_t count)
{
    const VALUE *restrict skip = NAME(skip) + LINE - head;
    int32_t i = LINE;
    for (int32_t j = 0; j < LINE; j++) {
        VALUE value = ns + x[j] + skip[j];
        current[j] = value < current[j] ? value : current[j];
    }
    for (; i + BLOCK <= count; i += BLOCK) {
        if (ns + x[i + BLOCK - 1] >= current[i])
            continue;
        for (int32_t j = i; j < i + BLOCK; j++) {
            VALUE value = ns + x[j];
            current[j] = value < current[j] ? value : current[j];
        }
    }
    for (; i < count; i += LINE)
        for (int32_t j = i; j < i + LINE; j++) {
            VALUE value = ns + x[j];
            current[j] = value < current[j] ? value : current[j];
        }
}

/* The same where x is constant, too: only the first values can be greater. */
static void NAME(relax_none)(VALUE *current, VALUE ns, int32_t count)
{
    for (int32_t i = 0; i < count && current[i] > ns; i++)
        current[i] = ns;
}

/* Where both operands vary, where one does, where none does. Each part goes on to the end of its line. */
static void NAME(relax)(void *memory, const crn_row *to, const crn_row *x, int32_t kept, const crn_row *y, int64_t ns,
                        int32_t from)
{
    VALUE *values = memory;
    size_t origin = x->origin - (size_t)kept;
    int32_t x_high = x->high + kept;
    from = larger(larger(from, to->low), larger(x->low + kept, y->low));
    if (ns >= INFINITE || from > to->high ||
        ns + x->floor_ns + y->floor_ns >= (int64_t)values[to->origin + (size_t)from])
        return;
    VALUE time = (VALUE)ns, x_floor = (VALUE)x->floor_ns, y_floor = (VALUE)y->floor_ns;
    int32_t head = from % LINE, end = smaller(to->high, smaller(x_high, y->high)) | (LINE - 1);
    size_t line = (size_t)(from - head);
    if (from <= end) {
        NAME(relax_two)
        (&values[to->origin + line], &values[origin + line], &values[y->origin + line], time, head,
         end + 1 - (int32_t)line);
        head = 0;
        line = (size_t)end + 1;
        from = end + 1;
    }
    bool x_ends = x_high < y->high;
    end = smaller(to->high, x_ends ? y->high : x_high) | (LINE - 1);
    if (from <= end) {
        NAME(relax_one)
        (&values[to->origin + line], &values[(x_ends ? y->origin : origin) + line], time + (x_ends ? x_floor : y_floor),
         head, end + 1 - (int32_t)line);
        from = end + 1;
    }
    if (from <= to->high)
        NAME(relax_none)(&values[to->origin + (size_t)from], time + x_floor + y_floor, to->high - from + 1);
}

static void NAME(clear)(void *memory, const crn_row *row, int64_t most_ns)
{
    if (row->low > row->high)
        return;
    VALUE more = most_ns < INFINITE ? (VALUE)most_ns + 1 : INFINITE;
    VALUE *values = (VALUE *)memory + (row->origin + (size_t)row->low - (LINE - 1));
    for (int32_t i = 0; i < row->high - row->low + 2 * LINE - 1; i++)
        values[i] = more;
}

static void NAME(finish)(void *memory, crn_row *row, int64_t most_ns)
{
    if (row->low > row->high)
        return;
    VALUE *values = memory, *last = values + (row->origin + (size_t)row->high);
    VALUE most = most_ns < INFINITE ? (VALUE)most_ns : INFINITE - 1;
    int32_t low = row->low, above = row->high + 1; /* the first value of at most most is in low..above */
    while (low < above) {
        int32_t middle = low + (above - low) / 2;
        if (values[row->origin + (size_t)middle] > most)
            low = middle + 1;
        else
            above = middle;
    }
    row->low = low;
    if (low > row->high)
        return;
    for (int32_t i = 1; i < LINE; i++)
        last[i] = *last;
    row->floor_ns = (int64_t)*last;
}

static int64_t NAME(value)(const void *memory, const crn_row *row, int32_t m)
{
    const VALUE *values = memory;
    if (m < row->low || row->low > row->high)
        return CRN_ROW_INFINITE;
    VALUE value = values[row->origin + (size_t)smaller(m, row->high)];
    return value >= INFINITE ? CRN_ROW_INFINITE : (int64_t)value;
}
