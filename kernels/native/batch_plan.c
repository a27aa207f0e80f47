/* Plans a batch with the other ranks, without Python. tests/support/planning_oracle.py is the oracle in NumPy.
 *
 * A batch is planned in two steps. request_batch groups its ids and tells every rank how many rows this rank requests
 * from it, or why it stops. If all ranks proceed, fs_plan_batch exchanges the rows and plans this batch's rows and the
 * previous batch's gradients. fs_request_and_plan does both if the caller already has room for the plans. fs_plan_last
 * plans the gradients of the last batch.
 *
 * In self-contained plans (`whole`) nothing is early or late: a batch's gradients are planned with its rows. */

#include <string.h>

#include "planning.h"

#define ALIGNMENT 16 /* elements: 128 bytes; device allocations are at least 16-byte aligned */

/* Arrays of a plan, in this order, each with an extent in `layout`. The first six plan the rows of a batch. */
enum { IDS, INVERSE, ORDER, ENDS, EARLY_ROWS, URGENT_ROWS, ROWS_ARRAYS };
/* The other eight plan gradients: which keys, then the owner's distinct rows, their order and ends. */
enum { URGENT_GRADIENTS = ROWS_ARRAYS, LATE_GRADIENTS = ROWS_ARRAYS + 4, ARRAYS = ROWS_ARRAYS + 8 };
/* Counts of a plan, [world] each: rows, gradients. */
enum { URGENT_RECV, URGENT_SEND, OTHER_RECV, OTHER_SEND, COUNTS };

/* A rank's header to another rank: status, TOLD numbers of the caller, and per exchange the number of rows it requests
 * from that rank, and the feature and value of an invalid id (feature -1: none). */
#define TOLD 2
#define EXCHANGES (1 + TOLD) /* offset in a header of the exchanges' numbers */
#define HEADER_WIDTH(exchanges) (EXCHANGES + 3 * (exchanges))

typedef struct {
    i64 offset, size;
} extent;

typedef struct { /* one exchange's part of what fs_plan_batch returns */
    extent layout[ARRAYS];
    i64 urgent_entries; /* positions with urgent rows */
    i64 *counts; /* [2][COUNTS][world], owned by the caller */
} plan_result;

typedef struct { /* a batch, as requester and as owner */
    i64 n, n_keys, n_rows;
    i64 *recv_counts, *send_counts;  /* [world] keys per owner; rows per requester */
    buffer rows; /* [n_rows] owned by this rank, by requester */
    buffer key_mask, row_mask;       /* which of them are urgent */
} requests;

typedef struct {
    const row_owners *owners;
    workspace *workspace;
    requests of[2]; /* the batch being planned and the previous one, alternating */
    buffer ends, own_rows; /* of the batch being planned */
    buffer message, told, places;
    i64 *message_counts, *told_counts; /* [world]; the first allocation also holds those of `of` */
} exchange;

typedef struct {
    mesh *mesh;
    i64 world, exchanges, whole, turn, has_before;
    exchange *each;
    messages *messages;
    i64 *header, *ones; /* [world][HEADER_WIDTH], [world] */
} batch_plan;

void fs_free_batch_plan(batch_plan *p) {
    for (i64 e = 0; p->each && e < p->exchanges; e++) {
        exchange *x = p->each + e;
        requests *a = x->of, *b = x->of + 1;
        buffer *all[] = {&x->ends, &x->own_rows, &x->message, &x->told, &x->places, &a->rows, &a->key_mask, &a->row_mask,
                         &b->rows, &b->key_mask, &b->row_mask};
        for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) free(all[i]->memory);
        free(x->message_counts);
        if (x->workspace) free_workspace(x->workspace);
    }
    free(p->each);
    free(p->messages);
    free(p->header);
    free(p->ones);
    free(p);
}

/* `owners`: one per exchange. The caller owns these and `mesh`, and keeps them alive. */
batch_plan *fs_new_batch_plan(mesh *mesh, i64 world, i64 exchanges, const row_owners *owners, i64 whole) {
    batch_plan *p = calloc(1, sizeof(batch_plan));
    if (!p) return 0;
    *p = (batch_plan){.mesh = mesh, .world = world, .exchanges = exchanges, .whole = whole};
    p->each = calloc(exchanges, sizeof(exchange));
    p->messages = calloc(exchanges, sizeof(messages));
    p->header = calloc(world * HEADER_WIDTH(exchanges), sizeof(i64));
    p->ones = calloc(world, sizeof(i64));
    int ok = p->each && p->messages && p->header && p->ones;
    for (i64 e = 0; ok && e < exchanges; e++) {
        exchange *x = p->each + e;
        x->owners = owners + e;
        x->workspace = new_workspace();
        i64 *counts = x->message_counts = calloc(6 * world, sizeof(i64));
        ok = x->workspace && counts;
        if (!ok) break;
        x->told_counts = counts + world;
        for (int b = 0; b < 2; b++) {
            x->of[b].recv_counts = counts + (2 + 2 * b) * world;
            x->of[b].send_counts = counts + (3 + 2 * b) * world;
        }
    }
    if (!ok) {
        fs_free_batch_plan(p);
        return 0;
    }
    for (i64 r = 0; r < world; r++) p->ones[r] = 1;
    return p;
}

static i64 total(const i64 *counts, i64 n) {
    i64 sum = 0;
    for (i64 i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* The ids of exchange e; `all` holds those of all exchanges in order. */
static feature_ids ids_of(const batch_plan *p, const feature_ids *all, i64 e) {
    i64 first = 0;
    for (i64 i = 0; i < e; i++) first += p->each[i].owners->features;
    return (feature_ids){all->ids + first, all->lengths + first, all->is_int64 + first};
}

/* Group an exchange's ids. Returns the result of request_keys. */
static i64 request_rows(exchange *x, requests *r, const feature_ids *ids, i64 *invalid) {
    r->n = total(ids->lengths, x->owners->features);
    i64 *ends = room(&x->ends, r->n * sizeof(i64)), *rows = room(&x->own_rows, r->n * sizeof(i64));
    if (!ends || !rows) return NO_MEMORY;
    return request_keys(x->workspace, ids, x->owners, ends, rows, r->recv_counts, invalid);
}

/* The batch whose gradients are planned with the current batch's rows; 0 if there is none. */
static requests *with_gradients(const batch_plan *p, i64 e) {
    requests *of = p->each[e].of;
    return p->whole ? of + p->turn : p->has_before ? of + 1 - p->turn : 0;
}

/* Upper bound on the elements of an exchange's plan. `other`: with_gradients. */
static i64 room_of_plan(const requests *r, const requests *other) {
    i64 rows = 3 * r->n + r->n_keys + r->n_rows;
    i64 gradients = other ? other->n_keys + 3 * other->n_rows : 0;
    return rows + gradients + ARRAYS * ALIGNMENT;
}

/* Whether all ranks proceed (status 0) with valid ids. */
static i64 all_go_on(const i64 *headers, i64 world, i64 exchanges) {
    for (i64 rank = 0; rank < world; rank++, headers += HEADER_WIDTH(exchanges)) {
        if (headers[0]) return 0;
        for (i64 e = 0; e < exchanges; e++)
            if (headers[EXCHANGES + 1 + 3 * e] >= 0) return 0;
    }
    return 1;
}

/* A rank that stops gives no ids. Writes all ranks' headers, [world][HEADER_WIDTH], and how many elements fs_plan_batch
 * needs. Returns whether all ranks proceed, or an error. */
static i64 request_batch(batch_plan *p, i64 status, const i64 *told, const feature_ids *ids, double seconds, i64 *headers,
                         i64 *needed, i64 *failed) {
    i64 width = HEADER_WIDTH(p->exchanges), *own = p->header;
    for (i64 e = 0; e < p->exchanges; e++) {
        requests *r = p->each[e].of + p->turn;
        i64 invalid[2] = {-1, 0};
        if (ids) {
            feature_ids of_exchange = ids_of(p, ids, e);
            r->n_keys = request_rows(p->each + e, r, &of_exchange, invalid);
            if (r->n_keys < 0 && r->n_keys != INVALID_ID) return r->n_keys;
        }
        for (i64 rank = 0; rank < p->world; rank++) {
            i64 *header = own + rank * width + EXCHANGES + 3 * e;
            header[0] = ids && invalid[0] < 0 ? r->recv_counts[rank] : 0;
            header[1] = invalid[0];
            header[2] = invalid[1];
        }
    }
    for (i64 rank = 0; rank < p->world; rank++) {
        own[rank * width] = status;
        memcpy(own + rank * width + 1, told, TOLD * sizeof(i64));
    }
    messages all = {own, headers, p->ones, p->ones, width * sizeof(i64)};
    i64 result = mesh_exchange(p->mesh, &all, 1, seconds, failed);
    *needed = 0;
    for (i64 e = 0; e < p->exchanges && result == 0; e++) {
        requests *r = p->each[e].of + p->turn;
        for (i64 rank = 0; rank < p->world; rank++) r->send_counts[rank] = headers[rank * width + EXCHANGES + 3 * e];
        r->n_rows = total(r->send_counts, p->world);
        *needed += room_of_plan(r, with_gradients(p, e));
    }
    return result ? result : all_go_on(headers, p->world, p->exchanges);
}

/* Tell the owners which rows this rank requests. */
static i64 exchange_rows(batch_plan *p, double seconds, i64 *failed) {
    for (i64 e = 0; e < p->exchanges; e++) {
        requests *r = p->each[e].of + p->turn;
        if (!room(&r->rows, r->n_rows * sizeof(i64))) return NO_MEMORY;
        p->messages[e] = (messages){p->each[e].own_rows.memory, r->rows.memory, r->recv_counts,
                                    r->send_counts, sizeof(i64)};
    }
    return mesh_exchange(p->mesh, p->messages, p->exchanges, seconds, failed);
}

static int room_for_masks(requests *r) { return room(&r->key_mask, r->n_keys) && room(&r->row_mask, r->n_rows); }

/* Mark everything urgent. */
static i64 mark_all(requests *r) {
    if (!room_for_masks(r)) return NO_MEMORY;
    memset(r->key_mask.memory, 1, r->n_keys);
    memset(r->row_mask.memory, 1, r->n_rows);
    return 0;
}

/* As owner: find the rows that both batches need. The message to each rank: a byte per row of the later batch, then one
 * per row of the earlier batch. */
static i64 collide(exchange *x, requests *before, requests *after, i64 world, messages *message) {
    uint8_t *out = room(&x->message, before->n_rows + after->n_rows);
    if (!out || !room(&x->told, before->n_keys + after->n_keys) || !room_for_masks(before) || !room_for_masks(after))
        return NO_MEMORY;
    const uint8_t *mask_before = before->row_mask.memory, *mask_after = after->row_mask.memory;
    i64 result = intersect(x->workspace, before->rows.memory, before->n_rows, after->rows.memory, after->n_rows,
                           before->row_mask.memory, after->row_mask.memory);
    if (result) return result;
    for (i64 rank = 0; rank < world; rank++) {
        i64 n_before = before->send_counts[rank], n_after = after->send_counts[rank];
        memcpy(out, mask_after, n_after);
        memcpy(out + n_after, mask_before, n_before);
        mask_after += n_after;
        mask_before += n_before;
        out += x->message_counts[rank] = n_before + n_after;
        x->told_counts[rank] = before->recv_counts[rank] + after->recv_counts[rank];
    }
    *message = (messages){x->message.memory, x->told.memory, x->message_counts, x->told_counts, 1};
    return 0;
}

/* As requester: read the owners' masks. */
static void read_told(const exchange *x, requests *before, requests *after, i64 world) {
    const uint8_t *told = x->told.memory;
    uint8_t *mask_before = before->key_mask.memory, *mask_after = after->key_mask.memory;
    for (i64 rank = 0; rank < world; rank++) {
        i64 n_before = before->recv_counts[rank], n_after = after->recv_counts[rank];
        memcpy(mask_after, told, n_after);
        memcpy(mask_before, told + n_after, n_before);
        mask_after += n_after;
        mask_before += n_before;
        told += n_before + n_after;
    }
}

/* Fill the masks of both batches. */
static i64 find_collisions(batch_plan *p, double seconds, i64 *failed) {
    for (i64 e = 0; e < p->exchanges; e++) {
        exchange *x = p->each + e;
        requests *after = x->of + p->turn, *before = x->of + 1 - p->turn;
        i64 result = p->has_before ? collide(x, before, after, p->world, p->messages + e) : mark_all(after);
        if (result) return result;
    }
    if (!p->has_before) return 0;
    i64 result = mesh_exchange(p->mesh, p->messages, p->exchanges, seconds, failed);
    for (i64 e = 0; e < p->exchanges && result == 0; e++)
        read_told(p->each + e, p->each[e].of + 1 - p->turn, p->each[e].of + p->turn, p->world);
    return result;
}

/* Writes the arrays of a plan. */
typedef struct {
    i64 *out, used;
} writer;

static i64 *place_array(writer *w, extent *where, i64 size) {
    *where = (extent){w->used, size};
    w->used += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return w->out + where->offset;
}

static i64 count_marked(const uint8_t *mask, i64 n) {
    i64 marked = 0;
    for (i64 i = 0; i < n; i++) marked += mask[i];
    return marked;
}

/* Split values by a mask, keeping their order, and count both kinds in consecutive parts of `counts` values. Without
 * `values`: split their indices. Branchless, since the mask is unpredictable. */
static void split(const uint8_t *mask, const i64 *values, const i64 *counts, i64 parts, i64 *chosen, i64 *others,
                  i64 *chosen_counts, i64 *other_counts) {
    for (i64 part = 0, i = 0; part < parts; part++) {
        i64 *chosen_before = chosen, *others_before = others;
        for (i64 end = i + counts[part]; i < end; i++) {
            uintptr_t differs = ((uintptr_t)chosen ^ (uintptr_t)others) & -(uintptr_t)mask[i];
            *(i64 *)((uintptr_t)others ^ differs) = values ? values[i] : i;
            chosen += mask[i];
            others += 1 - mask[i];
        }
        chosen_counts[part] = chosen - chosen_before;
        other_counts[part] = others - others_before;
    }
}

/* The position of each key in (early keys, urgent keys). */
static i64 *merged_places(exchange *x, const requests *r, i64 n_early, i64 *urgent_entries) {
    const uint8_t *urgent = r->key_mask.memory;
    const i64 *ends = x->ends.memory;
    i64 *places = room(&x->places, r->n_keys * sizeof(i64)), early_before = 0, entries = 0, end_before = 0;
    for (i64 key = 0; places && key < r->n_keys; key++) {
        i64 all_if_urgent = -(i64)urgent[key]; /* all bits set if urgent; branchless, as above */
        places[key] = early_before + (all_if_urgent & (n_early + key - 2 * early_before));
        early_before += 1 + all_if_urgent;
        entries += all_if_urgent & (ends[key] - end_before);
        end_before = ends[key];
    }
    *urgent_entries = entries;
    return places;
}

static i64 plan_rows(const batch_plan *p, i64 e, const feature_ids *all, writer *w, plan_result *result) {
    exchange *x = p->each + e;
    const requests *r = x->of + p->turn;
    extent *layout = result->layout;
    feature_ids ids = ids_of(p, all, e);
    i64 *copy = place_array(w, layout + IDS, r->n);
    for (i64 f = 0; f < x->owners->features; copy += ids.lengths[f++]) {
        if (ids.is_int64[f])
            memcpy(copy, ids.ids[f], ids.lengths[f] * sizeof(i64));
        else
            for (i64 i = 0; i < ids.lengths[f]; i++) copy[i] = ((const int32_t *)ids.ids[f])[i];
    }
    i64 n_early = r->n_keys - count_marked(r->key_mask.memory, r->n_keys);
    const i64 *places = merged_places(x, r, n_early, &result->urgent_entries);
    if (!places) return NO_MEMORY;
    i64 *inverse = place_array(w, layout + INVERSE, r->n), *order = place_array(w, layout + ORDER, r->n);
    place_positions(x->workspace, x->owners, places, order, inverse);
    memcpy(place_array(w, layout + ENDS, r->n_keys), x->ends.memory, r->n_keys * sizeof(i64));
    i64 n_urgent = count_marked(r->row_mask.memory, r->n_rows);
    i64 *early = place_array(w, layout + EARLY_ROWS, r->n_rows - n_urgent);
    i64 *urgent = place_array(w, layout + URGENT_ROWS, n_urgent);
    i64 *counts = result->counts, world = p->world;
    split(r->row_mask.memory, r->rows.memory, r->send_counts, world, urgent, early, counts + URGENT_SEND * world,
          counts + OTHER_SEND * world);
    const uint8_t *mask = r->key_mask.memory;
    for (i64 rank = 0; rank < world; rank++) {
        i64 n = r->recv_counts[rank], marked = count_marked(mask, n);
        counts[URGENT_RECV * world + rank] = marked;
        counts[OTHER_RECV * world + rank] = n - marked;
        mask += n;
    }
    return 0;
}

/* The owner's distinct rows, their order and ends. */
static i64 plan_update(exchange *x, const i64 *rows, i64 n, writer *w, extent *layout) {
    i64 *values = place_array(w, layout, n), *order = place_array(w, layout + 1, n), *ends = place_array(w, layout + 2, n);
    i64 distinct = deduplicate(x->workspace, rows, n, values, order, ends);
    layout[0].size = layout[2].size = distinct;
    return distinct < 0 ? distinct : 0;
}

/* Gradients go the reverse way: to the owners of keys, from the requesters of rows. */
static i64 plan_gradients(exchange *x, requests *r, i64 world, writer *w, plan_result *result) {
    extent *urgent = result->layout + URGENT_GRADIENTS, *late = result->layout + LATE_GRADIENTS;
    i64 n_keys = count_marked(r->key_mask.memory, r->n_keys), n_rows = count_marked(r->row_mask.memory, r->n_rows);
    i64 *counts = result->counts + COUNTS * world;
    i64 *urgent_keys = place_array(w, urgent, n_keys), *late_keys = place_array(w, late, r->n_keys - n_keys);
    split(r->key_mask.memory, 0, r->recv_counts, world, urgent_keys, late_keys, counts + URGENT_RECV * world,
          counts + OTHER_RECV * world);
    i64 *rows = room(&x->places, r->n_rows * sizeof(i64));
    if (!rows) return NO_MEMORY;
    split(r->row_mask.memory, r->rows.memory, r->send_counts, world, rows, rows + n_rows,
          counts + URGENT_SEND * world, counts + OTHER_SEND * world);
    i64 failed = plan_update(x, rows, n_rows, w, urgent + 1);
    return failed ? failed : plan_update(x, rows + n_rows, r->n_rows - n_rows, w, late + 1);
}

typedef struct {
    void *to;
    const void *from;
    i64 size;
} copy;

/* Called if all ranks proceed and no id is invalid. `out` has the room that request_batch asked for; `used`: the
 * elements written. Gradients are those of the previous batch (none for the first), or of this batch in self-contained
 * plans. Also performs the caller's other copies. */
i64 fs_plan_batch(batch_plan *p, const feature_ids *ids, double seconds, i64 *out, i64 *used, plan_result *results,
                  i64 *failed, const copy *copies, i64 n_copies) {
    for (i64 i = 0; i < n_copies; i++) memcpy(copies[i].to, copies[i].from, copies[i].size);
    i64 result = exchange_rows(p, seconds, failed);
    if (result == 0) result = find_collisions(p, seconds, failed);
    writer w = {out, 0};
    for (i64 e = 0; e < p->exchanges && result == 0; e++) {
        result = plan_rows(p, e, ids, &w, results + e);
        requests *r = with_gradients(p, e);
        if (result == 0 && r) result = plan_gradients(p->each + e, r, p->world, &w, results + e);
    }
    p->turn = 1 - p->turn;
    p->has_before = !p->whole;
    *used = w.used;
    return result;
}

/* request_batch, then fs_plan_batch if all ranks proceed and there is room for `elements`. Returns request_batch's
 * result, or 2 if the batch is planned. */
i64 fs_request_and_plan(batch_plan *p, i64 status, const i64 *told, const feature_ids *ids, double seconds, i64 *headers,
                        i64 *needed, i64 *failed, i64 *out, i64 elements, i64 *used, plan_result *results,
                        const copy *copies, i64 n_copies) {
    i64 result = request_batch(p, status, told, ids, seconds, headers, needed, failed);
    if (result != 1 || *needed > elements) return result;
    result = fs_plan_batch(p, ids, seconds, out, used, results, failed, copies, n_copies);
    return result ? result : 2;
}

/* Upper bound on the elements that fs_plan_last writes. */
i64 fs_room_of_last(const batch_plan *p) {
    i64 needed = 0;
    for (i64 e = 0; e < p->exchanges; e++) {
        const requests *r = p->each[e].of + 1 - p->turn;
        needed += r->n_keys + 3 * r->n_rows + ARRAYS * ALIGNMENT;
    }
    return needed;
}

/* Plan the gradients of the last batch: all are urgent. */
i64 fs_plan_last(batch_plan *p, i64 *out, i64 *used, plan_result *results) {
    writer w = {out, 0};
    i64 result = 0;
    for (i64 e = 0; e < p->exchanges && result == 0; e++) {
        requests *r = p->each[e].of + 1 - p->turn;
        result = mark_all(r);
        if (result == 0) result = plan_gradients(p->each + e, r, p->world, &w, results + e);
    }
    *used = w.used;
    return result;
}
