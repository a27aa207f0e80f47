/* Planning of an exchange: sort, group and compare row numbers. Integers only, so there is one right answer, and
 * exchange_plan.py says which. Functions write into memory of their caller and return a count, or what went wrong. */

#include <string.h>

#include "planning.h"

#define DIGIT_BITS 11
#define MAX_PASSES 6 /* of 11 bits: 64 and more */

/* What functions need besides. One thread at a time uses it. */
struct workspace {
    buffer items, more_items, values, ends, counts, table;
    /* what grouping has left: n items sorted by value, in one of the two; in `values` and `ends` the distinct ones */
    void *sorted;
    i64 n, distinct;
    int is_narrow;
};

workspace *fs_new_workspace(void) { return calloc(1, sizeof(workspace)); }

void fs_free_workspace(workspace *w) {
    buffer *all[] = {&w->items, &w->more_items, &w->values, &w->ends, &w->counts, &w->table};
    for (int i = 0; i < 6; i++) free(all[i]->memory);
    free(w);
}

/* A value and its position. Narrow ones hold both in 64 bits. */
typedef u64 narrow;
typedef struct {
    u64 value, position;
} wide;

#define NARROW_VALUE(x) ((x) >> 32)
#define NARROW_POSITION(x) ((x) & 0xFFFFFFFFu)
#define WIDE_VALUE(x) ((x).value)
#define WIDE_POSITION(x) ((x).position)

static int bits_of(u64 largest) {
    int bits = 0;
    for (; largest; largest >>= 1) bits++;
    return bits;
}

/* Sort n items of `a` by value, equal ones in their order; `b` is as large. Returns the one of the two that holds the
 * result. Digits from the lowest to the highest, as few as `largest` needs, of equal width. */
#define DEFINE_SORT(NAME, ITEM, VALUE)                                                                  \
    static ITEM *NAME(ITEM *a, ITEM *b, i64 n, u64 largest, i64 *counts) {                              \
        int bits = bits_of(largest), passes = (bits + DIGIT_BITS - 1) / DIGIT_BITS;                     \
        if (passes == 0) return a;                                                                      \
        int width = (bits + passes - 1) / passes;                                                       \
        u64 mask = ((u64)1 << width) - 1;                                                               \
        memset(counts, 0, sizeof(i64) * passes << DIGIT_BITS);                                          \
        for (i64 i = 0; i < n; i++)                                                                     \
            for (int p = 0; p < passes; p++)                                                            \
                counts[((i64)p << DIGIT_BITS) + (VALUE(a[i]) >> (p * width) & mask)]++;                 \
        for (int p = 0; p < passes; p++) {                                                              \
            i64 *count = counts + ((i64)p << DIGIT_BITS), begin = 0;                                    \
            for (u64 digit = 0; digit <= mask; digit++) {                                               \
                i64 size = count[digit];                                                                \
                count[digit] = begin;                                                                   \
                begin += size;                                                                          \
            }                                                                                           \
            for (i64 i = 0; i < n; i++) b[count[VALUE(a[i]) >> (p * width) & mask]++] = a[i];           \
            ITEM *swap = a;                                                                             \
            a = b;                                                                                      \
            b = swap;                                                                                   \
        }                                                                                               \
        return a;                                                                                       \
    }
DEFINE_SORT(sort_narrow, narrow, NARROW_VALUE)
DEFINE_SORT(sort_wide, wide, WIDE_VALUE)

/* Find the distinct values of the sorted items. */
#define DEFINE_GROUP(NAME, ITEM, VALUE)                                          \
    static i64 NAME(const ITEM *sorted, i64 n, i64 *values, i64 *ends) {         \
        i64 distinct = 0;                                                        \
        for (i64 i = 0; i < n; i++) {                                            \
            values[distinct] = (i64)VALUE(sorted[i]);                            \
            ends[distinct] = i + 1;                                              \
            distinct += i + 1 == n || VALUE(sorted[i + 1]) != VALUE(sorted[i]);  \
        }                                                                        \
        return distinct;                                                         \
    }
DEFINE_GROUP(group_narrow, narrow, NARROW_VALUE)
DEFINE_GROUP(group_wide, wide, WIDE_VALUE)

/* Room for n items with values up to `largest`; NULL without memory. */
static void *begin_group(workspace *w, i64 n, u64 largest) {
    w->n = n;
    w->is_narrow = largest < (u64)1 << 32 && (u64)n < (u64)1 << 32;
    size_t size = n * (w->is_narrow ? sizeof(narrow) : sizeof(wide));
    int ok = room(&w->more_items, size) && room(&w->values, n * sizeof(i64)) && room(&w->ends, n * sizeof(i64)) &&
             room(&w->counts, sizeof(i64) * MAX_PASSES << DIGIT_BITS);
    return ok ? room(&w->items, size) : NULL;
}

static i64 end_group(workspace *w, u64 largest) {
    void *a = w->items.memory, *b = w->more_items.memory;
    i64 *values = w->values.memory, *ends = w->ends.memory, *counts = w->counts.memory;
    if (w->is_narrow) {
        w->sorted = sort_narrow(a, b, w->n, largest, counts);
        return w->distinct = group_narrow(w->sorted, w->n, values, ends);
    }
    w->sorted = sort_wide(a, b, w->n, largest, counts);
    return w->distinct = group_wide(w->sorted, w->n, values, ends);
}

/* The position of a sorted item. */
static inline i64 position(const workspace *w, i64 i) {
    return (i64)(w->is_narrow ? NARROW_POSITION(((narrow *)w->sorted)[i]) : WIDE_POSITION(((wide *)w->sorted)[i]));
}

/* exchange_plan.deduplicate of n values that are not negative. All three have room for n. Returns how many are
 * distinct. */
i64 fs_deduplicate(workspace *w, const i64 *input, i64 n, i64 *values, i64 *order, i64 *ends) {
    i64 largest = 0;
    int ascending = 1;
    for (i64 i = 0; i < n; i++) {
        if (input[i] > largest) largest = input[i];
        ascending &= i == 0 || input[i] > input[i - 1];
    }
    if (ascending) { /* distinct already */
        memcpy(values, input, n * sizeof(i64));
        for (i64 i = 0; i < n; i++) {
            order[i] = i;
            ends[i] = i + 1;
        }
        return n;
    }
    void *items = begin_group(w, n, (u64)largest);
    if (!items) return NO_MEMORY;
    for (i64 i = 0; i < n; i++)
        if (w->is_narrow)
            ((narrow *)items)[i] = (u64)input[i] << 32 | (u64)i;
        else
            ((wide *)items)[i] = (wide){(u64)input[i], (u64)i};
    end_group(w, (u64)largest);
    memcpy(values, w->values.memory, w->distinct * sizeof(i64));
    memcpy(ends, w->ends.memory, w->distinct * sizeof(i64));
    for (i64 i = 0; i < n; i++) order[i] = position(w, i);
    return w->distinct;
}

/* How many of n ascending `values` are less than `bound`. */
static i64 below(const i64 *values, i64 n, i64 bound) {
    i64 low = 0, high = n;
    while (low < high) {
        i64 middle = low + (high - low) / 2;
        if (values[middle] < bound)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The items of all features' ids. Rows are numbered table after table, and `bound` is above all numbers. Returns how many
 * distinct rows there are; or INVALID_ID, with the first (feature, id) that its table does not have. */
static i64 group_ids(workspace *w, const feature_ids *all, const row_owners *owners, i64 *invalid) {
    i64 n = 0, at = 0;
    for (i64 f = 0; f < owners->features; f++) n += all->lengths[f];
    void *items = begin_group(w, n, (u64)owners->bound);
    if (!items) return NO_MEMORY;
    for (i64 f = 0; f < owners->features; f++) {
        for (i64 i = 0; i < all->lengths[f]; i++, at++) {
            i64 id = all->is_int64[f] ? ((const i64 *)all->ids[f])[i] : ((const int32_t *)all->ids[f])[i];
            if (id < 0 || id >= owners->table_sizes[f]) {
                invalid[0] = f;
                invalid[1] = id;
                return INVALID_ID;
            }
            u64 number = (u64)(id + owners->first_rows[f]);
            if (w->is_narrow)
                ((narrow *)items)[at] = number << 32 | (u64)at;
            else
                ((wide *)items)[at] = (wide){number, (u64)at};
        }
    }
    return n ? end_group(w, (u64)owners->bound) : (w->distinct = 0);
}

/* What a rank requests: the distinct keys of its ids, ascending, with `order` and `ends` as in
 * exchange_plan.Deduplicated, for each position its key (`inverse`), for each key its row at the owner (`rows`), and how
 * many keys each owner has (`counts`). Shards are consecutive row numbers from `bounds` on; `shard_order` has them in
 * the order of their keys. All but `counts` have room for each id. Returns what group_ids does. */
i64 fs_request(workspace *w, const feature_ids *all, const row_owners *owners, i64 *order, i64 *ends, i64 *inverse,
               i64 *keys, i64 *rows, i64 *counts, i64 *invalid) {
    i64 distinct = group_ids(w, all, owners, invalid);
    const i64 *values = w->values.memory, *value_ends = w->ends.memory;
    i64 key = 0, entry = 0, owner = 0;
    memset(counts, 0, owners->world * sizeof(i64));
    for (i64 k = 0; k < owners->shards && distinct > 0; k++) {
        i64 s = owners->shard_order[k];
        i64 first = below(values, distinct, owners->bounds[s]);
        i64 last = s + 1 < owners->shards ? below(values, distinct, owners->bounds[s + 1]) : distinct;
        for (i64 v = first; v < last; v++, key++) {
            for (i64 i = v ? value_ends[v - 1] : 0; i < value_ends[v]; i++) {
                i64 at = position(w, i);
                order[entry++] = at;
                inverse[at] = key;
            }
            ends[key] = entry;
            keys[key] = values[v] + owners->shifts[s];
            while (keys[key] >= owners->starts[owner + 1]) owner++;
            rows[key] = keys[key] - owners->starts[owner];
            counts[owner]++;
        }
    }
    return distinct;
}

/* Which of `a` are among `b`, and which of `b` among `a`. None is negative; both may hold duplicates. */
i64 intersect(workspace *w, const i64 *a, i64 size_a, const i64 *b, i64 size_b, uint8_t *in_b, uint8_t *in_a) {
    i64 largest = 0;
    for (i64 i = 0; i < size_a; i++) largest = a[i] > largest ? a[i] : largest;
    for (i64 i = 0; i < size_b; i++) largest = b[i] > largest ? b[i] : largest;
    if (largest / 512 <= size_a + size_b) { /* a bit for each, in two sets: in a; in both */
        size_t words = largest / 64 + 1;
        u64 *first = room(&w->table, 2 * words * sizeof(u64)), *both = first + words;
        if (!first) return NO_MEMORY;
        memset(first, 0, 2 * words * sizeof(u64));
        for (i64 i = 0; i < size_a; i++) first[a[i] >> 6] |= (u64)1 << (a[i] & 63);
        for (i64 i = 0; i < size_b; i++) {
            u64 hit = first[b[i] >> 6] >> (b[i] & 63) & 1;
            in_a[i] = (uint8_t)hit;
            both[b[i] >> 6] |= hit << (b[i] & 63);
        }
        for (i64 i = 0; i < size_a; i++) in_b[i] = both[a[i] >> 6] >> (a[i] & 63) & 1;
        return 0;
    }
    /* few of many: an open hash table of numbers, in which -1 is an empty place, and a mark for each place */
    int bits = bits_of((u64)size_a) + 1;
    u64 mask = ((u64)1 << bits) - 1;
    i64 *table = room(&w->table, (sizeof(i64) + 1) << bits);
    if (!table) return NO_MEMORY;
    uint8_t *hit = (uint8_t *)(table + mask + 1);
    memset(table, 0xFF, sizeof(i64) << bits);
    memset(hit, 0, mask + 1);
#define FIND(x, place)                                                  \
    u64 place = (u64)(x)*0x9E3779B97F4A7C15u >> (64 - bits);            \
    while (table[place] != -1 && table[place] != (x)) place = (place + 1) & mask
    for (i64 i = 0; i < size_a; i++) {
        FIND(a[i], place);
        table[place] = a[i];
    }
    for (i64 i = 0; i < size_b; i++) {
        FIND(b[i], place);
        in_a[i] = table[place] != -1;
        hit[place] |= in_a[i];
    }
    for (i64 i = 0; i < size_a; i++) {
        FIND(a[i], place);
        in_b[i] = hit[place];
    }
    return 0;
}
