/* Messages over connections between ranks (rank_mesh.py opens them). With connections to all ranks, each sends each a
 * message whose size both sides know. With connections to a few, all ranks compare some numbers. Without connections,
 * the caller carries the messages. */

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "planning.h"

#define MOST_NUMBERS 15 /* compared at once */
#define GAVE_UP (-1) /* instead of whether all are equal */
#define MAX_PIECES 512 /* per system call; the kernel's limit is 1024 */

typedef struct { /* what remains to be sent to a rank or received from it */
    struct iovec *pieces;
    i64 left;
} stream;

struct mesh {
    i64 world, rank;
    int *connections; /* [world] */
    buffer pieces, streams, polls;
    carrier carry; /* used instead of connections, or null */
};

/* With `carry`, which is called for each exchange, all connections may be -1. */
mesh *fs_new_mesh(i64 world, i64 rank, const int *connections, carrier carry) {
    mesh *m = calloc(1, sizeof(mesh));
    int *copy = malloc(world * sizeof(int));
    if (!m || !copy) {
        free(m);
        free(copy);
        return 0;
    }
    m->world = world;
    m->rank = rank;
    m->carry = carry;
    m->connections = memcpy(copy, connections, world * sizeof(int));
    return m;
}

void fs_free_mesh(mesh *m) {
    free(m->connections);
    free(m->pieces.memory);
    free(m->streams.memory);
    free(m->polls.memory);
    free(m);
}

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void add_piece(stream *s, const char *begin, size_t size) {
    if (size) s->pieces[s->left++] = (struct iovec){(void *)begin, size};
}

static void advance(stream *s, size_t bytes) {
    while (s->left && bytes >= s->pieces->iov_len) {
        bytes -= s->pieces->iov_len;
        s->pieces++;
        s->left--;
    }
    if (bytes) {
        s->pieces->iov_base = (char *)s->pieces->iov_base + bytes;
        s->pieces->iov_len -= bytes;
    }
}

/* Move as much as possible without blocking. */
static i64 move_bytes(int connection, stream *s, int sends) {
    while (s->left) {
        struct msghdr message = {.msg_iov = s->pieces, .msg_iovlen = s->left < MAX_PIECES ? s->left : MAX_PIECES};
        ssize_t bytes = sends ? sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : recvmsg(connection, &message, MSG_DONTWAIT);
        if (bytes > 0)
            advance(s, bytes);
        else if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        else if (bytes == 0 || errno != EINTR)
            return RANK_LEFT;
    }
    return 0;
}

/* Cut messages into streams, [2][world]: send, receive. This rank's own messages are copied. */
static stream *begin_exchange(mesh *m, const messages *all, i64 kinds) {
    stream *streams = room(&m->streams, 2 * m->world * sizeof(stream));
    struct iovec *pieces = room(&m->pieces, 2 * m->world * kinds * sizeof(struct iovec) + 1);
    if (!streams || !pieces || !room(&m->polls, m->world * sizeof(struct pollfd))) return 0;
    for (i64 i = 0; i < 2 * m->world; i++) streams[i] = (stream){pieces + i * kinds, 0};
    for (i64 k = 0; k < kinds; k++) {
        const char *send = all[k].send;
        char *recv = all[k].recv;
        for (i64 rank = 0; rank < m->world; rank++) {
            size_t send_size = all[k].send_counts[rank] * all[k].width, recv_size = all[k].recv_counts[rank] * all[k].width;
            if (rank == m->rank) {
                memcpy(recv, send, recv_size);
            } else {
                add_piece(streams + rank, send, send_size);
                add_piece(streams + m->world + rank, recv, recv_size);
            }
            send += send_size;
            recv += recv_size;
        }
    }
    return streams;
}

i64 mesh_exchange(mesh *m, const messages *all, i64 kinds, double seconds, i64 *failed) {
    if (m->carry) return m->carry(all, kinds);
    stream *streams = begin_exchange(m, all, kinds);
    if (!streams) return NO_MEMORY;
    struct pollfd *polls = m->polls.memory;
    double end = seconds_now() + seconds;
    for (i64 rank = 0; rank < m->world; rank++) polls[rank].revents = POLLIN | POLLOUT; /* try each once */
    while (1) {
        i64 waiting = 0;
        for (i64 rank = 0; rank < m->world; rank++) {
            stream *to = streams + rank, *from = streams + m->world + rank;
            int connection = m->connections[rank];
            /* Only those reported by poll: otherwise every message would cost a system call per rank. */
            if (polls[rank].revents && (move_bytes(connection, to, 1) || move_bytes(connection, from, 0))) {
                *failed = rank;
                return RANK_LEFT;
            }
            short events = (to->left ? POLLOUT : 0) | (from->left ? POLLIN : 0);
            polls[rank] = (struct pollfd){events ? connection : -1, events, 0}; /* poll ignores -1 */
            if (events && waiting++ == 0) *failed = rank; /* named if nothing arrives */
        }
        double left = end - seconds_now();
        if (waiting == 0) return 0;
        if (left <= 0) return RANK_TOO_SLOW;
        poll(polls, m->world, left > 1 ? 1000 : (int)(left * 1000) + 1);
    }
}

/* Move all bytes, waiting for the other side if necessary. */
static i64 move_all(int connection, void *bytes, size_t size, int sends, double end) {
    struct iovec piece = {bytes, size};
    stream s = {&piece, 1};
    while (1) {
        if (move_bytes(connection, &s, sends)) return RANK_LEFT;
        double left = end - seconds_now();
        if (!s.left) return 0;
        if (left <= 0) return RANK_TOO_SLOW;
        struct pollfd wait = {connection, sends ? POLLOUT : POLLIN, 0};
        poll(&wait, 1, left > 1 ? 1000 : (int)(left * 1000) + 1);
    }
}

/* Whether all ranks give the same numbers, or an error and the rank it is about. Each rank tells the rank 1, 2, 4, ...
 * ahead whether all numbers it has heard of are equal; after log2(world) messages it has heard of all ranks. So if two
 * ranks differ, every rank finds out.
 *
 * A rank that timed out reports it (fs_give_up). Otherwise a late rank would read that rank's earlier message and take
 * it for agreement. */
i64 fs_all_same(mesh *m, const i64 *numbers, i64 count, double seconds, i64 *failed) {
    i64 sent[1 + MOST_NUMBERS], came[1 + MOST_NUMBERS];
    size_t size = (1 + count) * sizeof(i64);
    double end = seconds_now() + seconds;
    sent[0] = 1;
    memcpy(sent + 1, numbers, count * sizeof(i64));
    for (i64 distance = 1; distance < m->world; distance *= 2) {
        i64 to = (m->rank + distance) % m->world, from = (m->rank - distance + m->world) % m->world;
        i64 status = move_all(m->connections[*failed = to], sent, size, 1, end);
        if (!status) status = move_all(m->connections[*failed = from], came, size, 0, end);
        if (status) return status;
        if (came[0] == GAVE_UP) return RANK_LEFT;
        sent[0] = sent[0] && came[0] && !memcmp(sent + 1, came + 1, count * sizeof(i64));
    }
    for (i64 distance = 1; distance < m->world; distance *= 2) {
        i64 from = *failed = (m->rank - distance + m->world) % m->world, next = 0;
        i64 got = recv(m->connections[from], &next, sizeof(next), MSG_PEEK | MSG_DONTWAIT);
        if (got == sizeof(next) && next == GAVE_UP) return RANK_LEFT;
        if (got < 0 && errno == ECONNRESET) return RANK_LEFT;
    }
    return sent[0];
}

/* This rank stops waiting for the others. */
void fs_give_up(mesh *m) {
    i64 word[1 + MOST_NUMBERS] = {GAVE_UP};
    for (i64 rank = 0; rank < m->world; rank++)
        if (m->connections[rank] >= 0) send(m->connections[rank], word, sizeof(word), MSG_DONTWAIT | MSG_NOSIGNAL);
}
