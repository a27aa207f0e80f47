/* Shared by the C files of planning. */

#ifndef FREESCALE_PLANNING_H
#define FREESCALE_PLANNING_H

#include <stdint.h>
#include <stdlib.h>

#define NO_MEMORY (-1)
#define INVALID_ID (-2)
#define RANK_LEFT (-3)
#define RANK_TOO_SLOW (-4)
#define TOO_LARGE (-5) /* a value and its position do not fit in 64 bits */

typedef int64_t i64;
typedef uint64_t u64;

/* Memory kept from one batch to the next: fresh memory costs more than the work done in it, since the kernel clears
 * every new page. */
typedef struct {
    void *memory;
    size_t size;
} buffer;

/* At least `size` bytes, contents undefined; NULL if out of memory. */
static inline void *room(buffer *b, size_t size) {
    if (!b->memory || b->size < size) {
        free(b->memory);
        size += size / 4 + 1;
        b->memory = malloc(size);
        b->size = b->memory ? size : 0;
    }
    return b->memory;
}

/* planning.c: one batch of one exchange on one rank. */
typedef struct workspace workspace;
workspace *new_workspace(void);
void free_workspace(workspace *);
i64 deduplicate(workspace *, const i64 *input, i64 n, i64 *values, i64 *order, i64 *ends);

typedef struct { /* ids of some features */
    const void *const *ids;
    const i64 *lengths, *is_int64;
} feature_ids;

typedef struct { /* where the rows of an exchange are; owners.OwnerMap */
    i64 features, shards, world, bound;
    const i64 *first_rows, *table_sizes; /* per feature */
    const i64 *bounds, *shifts, *shard_order, *starts;
} row_owners;

i64 request_keys(workspace *, const feature_ids *, const row_owners *, i64 *ends, i64 *rows, i64 *counts, i64 *invalid);
void place_positions(const workspace *, const row_owners *, const i64 *places, i64 *order, i64 *inverse);
i64 intersect(workspace *, const i64 *a, i64 size_a, const i64 *b, i64 size_b, uint8_t *in_b, uint8_t *in_a);

/* mesh.c: messages between ranks. */
typedef struct mesh mesh;
typedef struct { /* consecutive messages of one kind, one per rank */
    const void *send;
    void *recv;
    const i64 *send_counts, *recv_counts; /* [world] elements */
    i64 width;                            /* bytes of an element */
} messages;

typedef i64 (*carrier)(const messages *, i64 kinds); /* the caller's; returns 0 or RANK_LEFT */

/* Returns 0, or an error and the rank it is about. */
i64 mesh_exchange(mesh *, const messages *, i64 kinds, double seconds, i64 *rank);

#endif
