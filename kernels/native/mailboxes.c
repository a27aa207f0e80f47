/* Ranks of one host leave messages for each other in memory that they share, instead of sending them: no call of the
 * kernel for each pair of ranks.
 *
 * Every rank has a box that it alone writes: the number of the last round that it has posted, and two pages, used in
 * turn, each with the place of the message for every rank and then the messages. A rank waits in each round for the posts
 * of all others. So when it begins round r + 2, which writes over its page of round r, all have posted r + 1, and have
 * read round r before that. */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "planning.h"

#define LOOK_SECONDS 0.02 /* between two looks after a rank that does not come */
#define NOT_HERE (-1)     /* in place of an offset: the message goes over the connection */

typedef struct {
    _Atomic uint32_t posted; /* the last round; a futex */
    char separate_lines[60];
    _Atomic uint32_t waiting; /* ranks that sleep until it changes */
    char rest_of_line[60];
} box;

static box *box_of(const mailboxes *m, i64 rank) { return (box *)(m->memory + rank * m->box_bytes); }

/* Offsets [world], then messages. */
static i64 *page_of(const mailboxes *m, i64 rank, uint32_t round) {
    return (i64 *)((char *)(box_of(m, rank) + 1) + (round & 1) * m->page_bytes);
}

i64 fs_box_bytes(i64 world, i64 message_bytes) {
    i64 bytes = sizeof(box) + 2 * (world * sizeof(i64) + message_bytes);
    return (bytes + sizeof(box) - 1) / sizeof(box) * sizeof(box);
}

int mailboxes_open(mailboxes *m, void *memory, i64 box_bytes, i64 world) {
    m->memory = memory;
    m->box_bytes = box_bytes;
    m->page_bytes = (box_bytes - (i64)sizeof(box)) / 2 & ~(i64)7;
    m->room = m->page_bytes - world * (i64)sizeof(i64);
    m->round = 0;
    return m->room >= 0;
}

/* Those messages that find room are posted, and nothing is left of their streams. */
void mailboxes_post(mailboxes *m, i64 world, i64 own, stream *to) {
    uint32_t round = ++m->round;
    i64 *offsets = page_of(m, own, round), used = 0;
    char *text = (char *)(offsets + world);
    for (i64 rank = 0; rank < world; rank++) {
        stream *s = to + rank;
        i64 bytes = 0;
        for (i64 i = 0; i < s->left; i++) bytes += s->pieces[i].iov_len;
        offsets[rank] = bytes <= m->room - used ? used : NOT_HERE;
        if (offsets[rank] == NOT_HERE) continue;
        for (i64 i = 0; i < s->left; used += s->pieces[i++].iov_len)
            memcpy(text + used, s->pieces[i].iov_base, s->pieces[i].iov_len);
        s->left = 0;
    }
    box *b = box_of(m, own);
    atomic_store(&b->posted, round);
    if (atomic_load(&b->waiting)) syscall(SYS_futex, &b->posted, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

static int has_posted(box *b, uint32_t round) { return (int32_t)(atomic_load(&b->posted) - round) >= 0; }

static int is_closed(int connection) {
    char byte;
    ssize_t bytes = recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static i64 wait_for_post(box *b, uint32_t round, int connection, double end) {
    while (!has_posted(b, round)) {
        double left = end - seconds_now();
        if (left <= 0) return RANK_TOO_SLOW;
        double pause = left < LOOK_SECONDS ? left : LOOK_SECONDS;
        struct timespec most = {0, (long)(pause * 1e9)};
        atomic_fetch_add(&b->waiting, 1);
        uint32_t seen = atomic_load(&b->posted);
        long woken = (int32_t)(seen - round) >= 0 ? 0 : syscall(SYS_futex, &b->posted, FUTEX_WAIT, seen, &most, 0, 0);
        int slept_in_vain = woken < 0 && errno == ETIMEDOUT;
        atomic_fetch_sub(&b->waiting, 1);
        if (slept_in_vain && is_closed(connection) && !has_posted(b, round)) return RANK_LEFT;
    }
    return 0;
}

/* Wait for the posts of all other ranks. Nothing is left of the streams of messages that were in them. */
i64 mailboxes_read(mailboxes *m, i64 world, i64 own, stream *from, const int *connections, double end, i64 *failed) {
    for (i64 i = 1; i < world; i++) {
        i64 rank = *failed = (own + i) % world;
        i64 result = wait_for_post(box_of(m, rank), m->round, connections[rank], end);
        if (result) return result;
        const i64 *offsets = page_of(m, rank, m->round);
        const char *text = (const char *)(offsets + world) + offsets[own];
        stream *s = from + rank;
        if (offsets[own] == NOT_HERE) continue;
        for (i64 piece = 0; piece < s->left; text += s->pieces[piece++].iov_len)
            memcpy(s->pieces[piece].iov_base, text, s->pieces[piece].iov_len);
        s->left = 0;
    }
    return 0;
}
