/* Planning of an exchange: sort, group and compare row numbers. Integers only, so there is one right answer, and
 * exchange_plan.py says which. Functions write into memory of their caller and return a count, or what went wrong.
 *
 * A workspace keeps the memory that they need besides from one batch to the next: fresh memory costs more than the work,
 * since the kernel has to clear it page by page. One thread at a time uses it. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_MEMORY (-1)
#define INVALID_ID (-2)
#define DIGIT_BITS 11
#define MAX_PASSES 6 /* of 11 bits: 64 and more */

typedef int64_t i64;
typedef uint64_t u64;

enum { ITEMS, MORE_ITEMS, VALUES, ENDS, COUNTS, TABLE, MASKS, BUFFERS };

typedef struct {
    void *memory[BUFFERS];
    size_t sizes[BUFFERS];
    /* what grouping has left: n items sorted by value, in ITEMS or MORE_ITEMS; in VALUES and ENDS the distinct ones */
    void *sorted;
    i64 n, distinct;
    int is_narrow;
} workspace;

workspace *fs_new_workspace(void) { return calloc(1, sizeof(workspace)); }

void fs_free_workspace(workspace *w) {
    for (int i = 0; i < BUFFERS; i++) free(w->memory[i]);
    free(w);
}

static void *room(workspace *w, int buffer, size_t size) {
    if (w->sizes[buffer] < size) {
        free(w->memory[buffer]);
        size += size / 4;
        w->memory[buffer] = malloc(size);
        w->sizes[buffer] = w->memory[buffer] ? size : 0;
    }
    return w->memory[buffer];
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
    int ok = room(w, MORE_ITEMS, size) && room(w, VALUES, n * sizeof(i64)) && room(w, ENDS, n * sizeof(i64)) &&
             room(w, COUNTS, sizeof(i64) * MAX_PASSES << DIGIT_BITS);
    return ok ? room(w, ITEMS, size) : NULL;
}

static i64 end_group(workspace *w, u64 largest) {
    void *a = w->memory[ITEMS], *b = w->memory[MORE_ITEMS];
    i64 *values = w->memory[VALUES], *ends = w->memory[ENDS], *counts = w->memory[COUNTS];
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
    memcpy(values, w->memory[VALUES], w->distinct * sizeof(i64));
    memcpy(ends, w->memory[ENDS], w->distinct * sizeof(i64));
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

/* The items of all features' ids, n together; rows are numbered table after table and `bound` is above all numbers.
 * Returns how many distinct rows there are; or INVALID_ID, with the first (feature, id) that its table does not have. */
static i64 group_ids(workspace *w, const void *const *ids, const i64 *lengths, const i64 *is_int64,
                     const i64 *first_rows, const i64 *table_sizes, i64 features, i64 n, i64 bound, i64 *invalid) {
    void *items = begin_group(w, n, (u64)bound);
    if (!items && n) return NO_MEMORY;
    for (i64 f = 0, at = 0; f < features; f++) {
        for (i64 i = 0; i < lengths[f]; i++, at++) {
            i64 id = is_int64[f] ? ((const i64 *)ids[f])[i] : ((const int32_t *)ids[f])[i];
            if (id < 0 || id >= table_sizes[f]) {
                invalid[0] = f;
                invalid[1] = id;
                return INVALID_ID;
            }
            u64 number = (u64)(id + first_rows[f]);
            if (w->is_narrow)
                ((narrow *)items)[at] = number << 32 | (u64)at;
            else
                ((wide *)items)[at] = (wide){number, (u64)at};
        }
    }
    return n ? end_group(w, (u64)bound) : (w->distinct = 0);
}

/* What a rank requests: the distinct keys of its ids, ascending, with `order` and `ends` as in
 * exchange_plan.Deduplicated, for each position its key (`inverse`), for each key its row at the owner (`rows`), and how
 * many keys each owner has (`counts`). Shards are consecutive row numbers from `bounds` on; `shard_order` has them in
 * the order of their keys. All but `counts` have room for n. Returns what group_ids does. */
i64 fs_request(workspace *w, const void *const *ids, const i64 *lengths, const i64 *is_int64, const i64 *first_rows,
               const i64 *table_sizes, i64 features, i64 n, i64 bound, const i64 *bounds, const i64 *shifts,
               const i64 *shard_order, i64 shards, const i64 *starts, i64 world, i64 *keys, i64 *order, i64 *ends,
               i64 *inverse, i64 *rows, i64 *counts, i64 *invalid) {
    i64 distinct = group_ids(w, ids, lengths, is_int64, first_rows, table_sizes, features, n, bound, invalid);
    const i64 *values = w->memory[VALUES], *value_ends = w->memory[ENDS];
    i64 key = 0, entry = 0, owner = 0;
    memset(counts, 0, world * sizeof(i64));
    for (i64 k = 0; k < shards && distinct > 0; k++) {
        i64 s = shard_order[k];
        i64 first = below(values, distinct, bounds[s]);
        i64 last = s + 1 < shards ? below(values, distinct, bounds[s + 1]) : distinct;
        for (i64 v = first; v < last; v++, key++) {
            for (i64 i = v ? value_ends[v - 1] : 0; i < value_ends[v]; i++) {
                i64 at = position(w, i);
                order[entry++] = at;
                inverse[at] = key;
            }
            ends[key] = entry;
            keys[key] = values[v] + shifts[s];
            while (keys[key] >= starts[owner + 1]) owner++;
            rows[key] = keys[key] - starts[owner];
            counts[owner]++;
        }
    }
    return distinct;
}

/* Which of `a` are among `b`, and which of `b` among `a`. None is negative; both may hold duplicates. */
static i64 intersect(workspace *w, const i64 *a, i64 size_a, const i64 *b, i64 size_b, uint8_t *in_b, uint8_t *in_a) {
    i64 largest = 0;
    for (i64 i = 0; i < size_a; i++) largest = a[i] > largest ? a[i] : largest;
    for (i64 i = 0; i < size_b; i++) largest = b[i] > largest ? b[i] : largest;
    if (largest / 64 <= size_a + size_b) { /* a byte for each */
        uint8_t *seen = room(w, TABLE, largest + 1);
        if (!seen) return NO_MEMORY;
        memset(seen, 0, largest + 1);
        for (i64 i = 0; i < size_a; i++) seen[a[i]] = 1;
        for (i64 i = 0; i < size_b; i++) in_a[i] = seen[b[i]] != 0;
        for (i64 i = 0; i < size_b; i++)
            if (in_a[i]) seen[b[i]] = 2;
        for (i64 i = 0; i < size_a; i++) in_b[i] = seen[a[i]] == 2;
        return 0;
    }
    /* few of many: an open hash table of numbers, in which -1 is an empty place, and a mark for each place */
    int bits = bits_of((u64)size_a) + 1;
    u64 mask = ((u64)1 << bits) - 1;
    i64 *table = room(w, TABLE, (sizeof(i64) + 1) << bits);
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

/* Split values by a mask, in their order, and count both kinds in consecutive parts of `counts` values. Without
 * `values`: their indices. Returns how many are chosen; both have room for all. */
static i64 split(const uint8_t *mask, const i64 *values, const i64 *counts, i64 parts, i64 *chosen, i64 *others,
                 i64 *chosen_counts, i64 *other_counts) {
    i64 i = 0, *first = chosen;
    for (i64 part = 0; part < parts; part++) {
        i64 *chosen_before = chosen, *others_before = others;
        for (i64 end = i + counts[part]; i < end; i++) {
            i64 value = values ? values[i] : i;
            if (mask[i])
                *chosen++ = value;
            else
                *others++ = value;
        }
        chosen_counts[part] = chosen - chosen_before;
        other_counts[part] = others - others_before;
    }
    return chosen - first;
}

/* exchange_plan.split_requests: the requester's keys and the owner's rows. `sizes` gets how many of each are urgent. */
void fs_split_requests(const uint8_t *urgent_keys, const i64 *recv_counts, i64 *urgent_index, i64 *other_index,
                       const uint8_t *urgent_rows, const i64 *rows, const i64 *send_counts, i64 *urgent_out,
                       i64 *other_out, i64 world, i64 *counts, i64 *sizes) {
    sizes[0] = split(urgent_keys, 0, recv_counts, world, urgent_index, other_index, counts, counts + world);
    sizes[1] =
        split(urgent_rows, rows, send_counts, world, urgent_out, other_out, counts + 2 * world, counts + 3 * world);
}

/* For each of n positions its place in (early keys, urgent keys), which are together all keys. */
i64 fs_merge_inverse(workspace *w, const i64 *inverse, i64 n, const i64 *early, i64 n_early, const i64 *urgent,
                     i64 n_urgent, i64 *merged) {
    i64 *place = room(w, TABLE, (n_early + n_urgent) * sizeof(i64) + 1);
    if (!place) return NO_MEMORY;
    for (i64 i = 0; i < n_early; i++) place[early[i]] = i;
    for (i64 i = 0; i < n_urgent; i++) place[urgent[i]] = n_early + i;
    for (i64 i = 0; i < n; i++) merged[i] = place[inverse[i]];
    return 0;
}

/* The entries of the segments with these indices. */
i64 fs_segment_entries(const i64 *ends, const i64 *indices, i64 n) {
    i64 total = 0;
    for (i64 i = 0; i < n; i++) total += ends[indices[i]] - (indices[i] ? ends[indices[i] - 1] : 0);
    return total;
}

/* One message per peer out of two: for each, a part of `first` and then a part of `second`. */
static void interleave(const uint8_t *first, const uint8_t *second, const i64 *first_counts, const i64 *second_counts,
                   i64 peers, uint8_t *message) {
    for (i64 p = 0; p < peers; p++) {
        memcpy(message, first, first_counts[p]);
        memcpy(message + first_counts[p], second, second_counts[p]);
        message += first_counts[p] + second_counts[p];
        first += first_counts[p];
        second += second_counts[p];
    }
}

static void deinterleave(const uint8_t *message, const i64 *first_counts, const i64 *second_counts, i64 peers,
                     uint8_t *first, uint8_t *second) {
    for (i64 p = 0; p < peers; p++) {
        memcpy(first, message, first_counts[p]);
        memcpy(second, message + first_counts[p], second_counts[p]);
        message += first_counts[p] + second_counts[p];
        first += first_counts[p];
        second += second_counts[p];
    }
}

/* exchange_plan.collide: masks of the rows that both batches need, and what to tell the requesters. */
i64 fs_collide(workspace *w, const i64 *before, i64 n_before, const i64 *before_counts, const i64 *after, i64 n_after,
               const i64 *after_counts, i64 world, uint8_t *mask_before, uint8_t *mask_after, uint8_t *message) {
    i64 result = intersect(w, before, n_before, after, n_after, mask_before, mask_after);
    if (result == 0) interleave(mask_after, mask_before, after_counts, before_counts, world, message);
    return result;
}

typedef struct { /* one batch: its keys as a requester, its rows as an owner */
    const i64 *recv_counts, *rows, *send_counts;
    const uint8_t *row_mask;
    i64 n_keys, n_rows;
    i64 *urgent_index, *other_index, *urgent_rows, *other_rows, *counts; /* counts: [4][world] */
    i64 n_urgent_keys, n_urgent_rows;
} batch;

static void split_batch(batch *b, const uint8_t *key_mask, i64 world) {
    i64 sizes[2];
    fs_split_requests(key_mask, b->recv_counts, b->urgent_index, b->other_index, b->row_mask, b->rows, b->send_counts,
                      b->urgent_rows, b->other_rows, world, b->counts, sizes);
    b->n_urgent_keys = sizes[0];
    b->n_urgent_rows = sizes[1];
}

typedef struct { /* distinct values, as exchange_plan.Deduplicated */
    i64 *values, *order, *ends, distinct;
} grouped;

/* exchange_plan.split_batches, from what the owners have told: which keys of two consecutive batches both need. Of the
 * batch after: `inverse` becomes places in (early rows, urgent rows), and `entries` counts positions with urgent rows.
 * Of the batch before: the owner's distinct rows in urgent and in late gradients. */
i64 fs_split_batches(workspace *w, const uint8_t *message, i64 world, batch *before, batch *after, const i64 *inverse,
                     i64 n, const i64 *ends, i64 *merged, i64 *entries, grouped *urgent, grouped *late) {
    uint8_t *keys_after = room(w, MASKS, after->n_keys + before->n_keys + 1);
    if (!keys_after) return NO_MEMORY;
    uint8_t *keys_before = keys_after + after->n_keys;
    deinterleave(message, after->recv_counts, before->recv_counts, world, keys_after, keys_before);
    split_batch(before, keys_before, world);
    split_batch(after, keys_after, world);
    i64 n_early = after->n_keys - after->n_urgent_keys;
    if (fs_merge_inverse(w, inverse, n, after->other_index, n_early, after->urgent_index, after->n_urgent_keys, merged))
        return NO_MEMORY;
    *entries = fs_segment_entries(ends, after->urgent_index, after->n_urgent_keys);
    urgent->distinct =
        fs_deduplicate(w, before->urgent_rows, before->n_urgent_rows, urgent->values, urgent->order, urgent->ends);
    late->distinct = fs_deduplicate(w, before->other_rows, before->n_rows - before->n_urgent_rows, late->values,
                                    late->order, late->ends);
    return urgent->distinct < 0 || late->distinct < 0 ? NO_MEMORY : 0;
}

/* Arrays one after the other, each at the beginning of its room. */
void fs_pack(const i64 *const *arrays, const i64 *sizes, const i64 *rooms, i64 count, i64 *out) {
    for (i64 k = 0; k < count; out += rooms[k++]) memcpy(out, arrays[k], sizes[k] * sizeof(i64));
}
