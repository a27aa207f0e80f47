/* Planning of an exchange: sort, group and compare row numbers. Integers only, so the result is unique;
 * tests/support/planning_oracle.py computes it in NumPy. Functions write into the caller's memory and return a count or
 * an error. */

#include <string.h>

#include "planning.h"

const char *fs_sources(void) { return FS_SOURCES; } /* digest of the C code: c_library.py */

#define DIGIT_BITS 11 /* of a value, sorted per pass; also the maximum for the number of parts */
#define ITEMS_OF_PART 4096 /* approximate: both copies of a part stay in one core's cache while sorting */

/* A value and its position, packed in 64 bits: value << position_bits | position. */
typedef u64 item;

/* Scratch memory. Used by one thread at a time. */
struct workspace {
    buffer items, more_items, values, ends, counts, begins, table;
    item *sorted; /* result of grouping: items sorted by value, in one of the two buffers */
    int position_bits;
};

workspace *new_workspace(void) { return calloc(1, sizeof(workspace)); }

void free_workspace(workspace *w) {
    buffer *all[] = {&w->items, &w->more_items, &w->values, &w->ends, &w->counts, &w->begins, &w->table};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) free(all[i]->memory);
    free(w);
}

static int bits_of(u64 largest) {
    int bits = 0;
    for (; largest; largest >>= 1) bits++;
    return bits;
}

/* Counts to start offsets. */
static void begins_of(i64 *counts, i64 n) {
    for (i64 i = 0, begin = 0; i < n; i++) {
        i64 size = counts[i];
        counts[i] = begin;
        begin += size;
    }
}

/* Ids of some features, numbered from `first_rows`, as values of `bits` bits. */
typedef struct {
    const feature_ids *all;
    i64 features, n;
    const i64 *first_rows, *table_sizes;
    int bits, part_bits; /* of a value; the low bits, in which values of one part differ */
} values_of_ids;

/* Run code for each id of a feature. (Fields of `v` are loaded once: the compiler must assume that the code writes to
 * them.) */
#define FOR_EACH_ID(v, f, id, ...)                                                        \
    do {                                                                                  \
        i64 length = (v)->all->lengths[f];                                                \
        const void *ids = (v)->all->ids[f];                                               \
        if ((v)->all->is_int64[f])                                                        \
            for (i64 i = 0; i < length; i++) {                                            \
                i64 id = ((const i64 *)ids)[i];                                           \
                __VA_ARGS__                                                               \
            }                                                                             \
        else                                                                              \
            for (i64 i = 0; i < length; i++) {                                            \
                i64 id = ((const int32_t *)ids)[i];                                       \
                __VA_ARGS__                                                               \
            }                                                                             \
    } while (0)

/* Count the values of each part. Returns 0, or INVALID_ID and the first (feature, id) outside its table. */
static i64 count_parts(const values_of_ids *v, i64 *restrict counts, i64 *invalid) {
    int part_bits = v->part_bits;
    for (i64 f = 0; f < v->features; f++) {
        u64 size = (u64)v->table_sizes[f];
        i64 first_row = v->first_rows[f];
        FOR_EACH_ID(v, f, id, {
            if ((u64)id >= size) {
                invalid[0] = f;
                invalid[1] = id;
                return INVALID_ID;
            }
            counts[(u64)(id + first_row) >> part_bits]++;
        });
    }
    return 0;
}

/* Items of all values, part by part, each in the order of positions. */
static void fill_parts(const values_of_ids *v, int position_bits, i64 *restrict begins, item *restrict items) {
    int part_bits = v->part_bits;
    u64 at = 0;
    for (i64 f = 0; f < v->features; f++) {
        i64 first_row = v->first_rows[f];
        FOR_EACH_ID(v, f, id, {
            u64 value = (u64)(id + first_row);
            items[begins[value >> part_bits]++] = value << position_bits | at;
            at++;
        });
    }
}

static void sort_by_digit(const item *restrict a, item *restrict b, i64 n, int shift, u64 mask, i64 *restrict begins) {
    for (i64 i = 0; i < n; i++) b[begins[a[i] >> shift & mask]++] = a[i];
}

/* Stable LSD radix sort of the n items of `a` by their `bits` bits from `first_bit` on, in digits of equal width. `b`
 * has the same size, and holds the result if the number of `passes` is odd. */
static void sort(item *a, item *b, i64 n, int first_bit, int bits, int passes, i64 *counts) {
    int width = passes ? (bits + passes - 1) / passes : 0;
    u64 digits = (u64)1 << width, mask = digits - 1;
    for (int p = 0; p < passes; p++) {
        int shift = first_bit + p * width;
        memset(counts, 0, sizeof(i64) * digits);
        for (i64 i = 0; i < n; i++) counts[a[i] >> shift & mask]++;
        begins_of(counts, digits);
        sort_by_digit(a, b, n, shift, mask, counts);
        item *swap = a;
        a = b;
        b = swap;
    }
}

/* Find the distinct values of sorted items from `begin` to `end`, and where the items of each end. */
static i64 group(const item *restrict sorted, int position_bits, i64 begin, i64 end, i64 *restrict values,
                 i64 *restrict ends) {
    i64 distinct = 0;
    for (i64 i = begin; i < end; i++) {
        values[distinct] = (i64)(sorted[i] >> position_bits);
        ends[distinct] = i + 1;
        distinct += i + 1 == end || sorted[i + 1] >> position_bits != sorted[i] >> position_bits;
    }
    return distinct;
}

/* Sort the values, part by part, and find the distinct ones and where each one's items end. Both outputs have room for
 * all. Returns the number of distinct values, NO_MEMORY, TOO_LARGE, or INVALID_ID and the first (feature, id) outside
 * its table. */
static i64 group_values(workspace *w, values_of_ids *v, u64 largest, i64 *values, i64 *ends, i64 *invalid) {
    v->bits = bits_of(largest);
    w->position_bits = bits_of((u64)v->n);
    if (v->bits + w->position_bits > 64) return TOO_LARGE;
    int high = bits_of((u64)v->n / ITEMS_OF_PART);
    if (high > DIGIT_BITS) high = DIGIT_BITS;
    v->part_bits = v->bits > high ? v->bits - high : 0;
    i64 parts = (i64)1 << (v->bits - v->part_bits);
    size_t size = v->n * sizeof(item);
    item *items = room(&w->items, size), *others = room(&w->more_items, size);
    i64 *part_ends = room(&w->counts, sizeof(i64) * 2 << DIGIT_BITS); /* followed by the counts of digits */
    if (!items || !others || !part_ends) return NO_MEMORY;
    memset(part_ends, 0, sizeof(i64) * parts);
    i64 result = count_parts(v, part_ends, invalid), distinct = 0;
    if (result) return result;
    int passes = (v->part_bits + DIGIT_BITS - 1) / DIGIT_BITS;
    begins_of(part_ends, parts);
    fill_parts(v, w->position_bits, part_ends, items); /* advances each part's begin to its end */
    w->sorted = passes % 2 ? others : items;
    for (i64 part = 0, begin = 0; part < parts; begin = part_ends[part++]) {
        i64 end = part_ends[part];
        if (begin == end) continue;
        sort(items + begin, others + begin, end - begin, w->position_bits, v->part_bits, passes, part_ends + parts);
        distinct += group(w->sorted, w->position_bits, begin, end, values + distinct, ends + distinct);
    }
    return distinct;
}

/* The position of a sorted item. */
static inline i64 position(const workspace *w, i64 i) {
    return (i64)(w->sorted[i] & (((u64)1 << w->position_bits) - 1));
}

/* The distinct values of n nonnegative values, ascending, and the positions of each, ascending: a segment of `order`
 * that ends at `ends`. All three have room for n. Returns the number of distinct values. */
i64 deduplicate(workspace *w, const i64 *input, i64 n, i64 *values, i64 *order, i64 *ends) {
    i64 largest = 0;
    int ascending = 1;
    for (i64 i = 0; i < n; i++) largest = input[i] > largest ? input[i] : largest;
    for (i64 i = 1; i < n && ascending; i++) ascending = input[i] > input[i - 1];
    if (ascending) { /* already distinct */
        memcpy(values, input, n * sizeof(i64));
        for (i64 i = 0; i < n; i++) {
            order[i] = i;
            ends[i] = i + 1;
        }
        return n;
    }
    const void *ids = input;
    i64 is_int64 = 1, first_row = 0, table_size = -1 /* any */, invalid[2];
    feature_ids all = {&ids, &n, &is_int64};
    values_of_ids v = {.all = &all, .features = 1, .n = n, .first_rows = &first_row, .table_sizes = &table_size};
    i64 distinct = group_values(w, &v, (u64)largest, values, ends, invalid);
    if (distinct < 0) return distinct;
    for (i64 i = 0; i < n; i++) order[i] = position(w, i);
    return distinct;
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

/* The distinct keys of a batch's ids, ascending: where each key's positions end (`ends`), its row at the owner
 * (`rows`), and the number of keys per owner (`counts`). Row numbers continue from table to table; `bound` is above all
 * of them. Shards are consecutive row numbers starting at `bounds`; `shard_order` sorts them by key. All but `counts`
 * have room for every id. Returns the number of keys, or INVALID_ID and the first (feature, id) outside its table. */
i64 request_keys(workspace *w, const feature_ids *all, const row_owners *owners, i64 *ends, i64 *rows, i64 *counts,
                 i64 *invalid) {
    values_of_ids v = {.all = all, .features = owners->features, .first_rows = owners->first_rows,
                       .table_sizes = owners->table_sizes};
    for (i64 f = 0; f < owners->features; f++) v.n += all->lengths[f];
    i64 *values = room(&w->values, v.n * sizeof(i64)), *value_ends = room(&w->ends, v.n * sizeof(i64));
    i64 *begins = room(&w->begins, (owners->shards + 1) * sizeof(i64)); /* start of each shard among the values */
    if (!values || !value_ends || !begins) return NO_MEMORY;
    i64 distinct = group_values(w, &v, (u64)owners->bound, values, value_ends, invalid);
    if (distinct < 0) return distinct;
    begins[0] = 0;
    for (i64 s = 1; s < owners->shards; s++)
        begins[s] = begins[s - 1] + below(values + begins[s - 1], distinct - begins[s - 1], owners->bounds[s]);
    begins[owners->shards] = distinct;
    i64 key = 0, entries = 0, owner = 0;
    memset(counts, 0, owners->world * sizeof(i64));
    for (i64 k = 0; k < owners->shards; k++) {
        i64 s = owners->shard_order[k], first = begins[s], last = begins[s + 1], size = last - first;
        if (!size) continue;
        while (values[first] + owners->shifts[s] >= owners->starts[owner + 1]) owner++;
        i64 to_row = owners->shifts[s] - owners->starts[owner], moved = entries - (first ? value_ends[first - 1] : 0);
        for (i64 i = 0; i < size; i++) {
            rows[key + i] = values[first + i] + to_row;
            ends[key + i] = value_ends[first + i] + moved;
        }
        counts[owner] += size;
        key += size;
        entries = ends[key - 1];
    }
    return distinct;
}

/* Call right after request_keys: the positions in the order of their keys, ascending within a key, and for each
 * position the place of its key. */
void place_positions(const workspace *w, const row_owners *owners, const i64 *places, i64 *restrict order,
                     i64 *restrict inverse) {
    const i64 *value_ends = w->ends.memory, *begins = w->begins.memory;
    for (i64 k = 0; k < owners->shards; k++) {
        i64 s = owners->shard_order[k], v = begins[s], last = begins[s + 1];
        for (i64 i = v ? value_ends[v - 1] : 0; v < last; v++) {
            i64 place = *places++;
            for (i64 end = value_ends[v]; i < end; i++) {
                i64 at = position(w, i);
                *order++ = at;
                inverse[at] = place;
            }
        }
    }
}

/* Which of `a` are in `b`, and which of `b` in `a`. Values are nonnegative; both may hold duplicates. */
i64 intersect(workspace *w, const i64 *a, i64 size_a, const i64 *b, i64 size_b, uint8_t *in_b, uint8_t *in_a) {
    i64 largest = 0;
    for (i64 i = 0; i < size_a; i++) largest = a[i] > largest ? a[i] : largest;
    for (i64 i = 0; i < size_b; i++) largest = b[i] > largest ? b[i] : largest;
    if (largest / 512 <= size_a + size_b) { /* two bitmaps: in a; in both */
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
    /* few of many: an open-addressing hash table of numbers, in which -1 is an empty slot, and a mark per slot */
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
