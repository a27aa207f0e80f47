/* Enqueues a whole message on streams in one call: the same driver calls, in the same order, as
 * tests/support/issue_python.py makes one by one from Python.
 *
 * No CUDA header is needed: driver functions are passed as addresses (`struct driver_calls`, filled by issue.py), which
 * also lets tests run this file without a GPU. Structures match slot_rings.py and issue.py.
 *
 * The first failing driver call ends the message. Its number, counted from 1 in the order of driver_calls, and the
 * driver's code are returned as number << 32 | code. */

#include <stddef.h>
#include <stdint.h>

#define WORD_STRIDE 64 /* bytes; as in slot_rings.py */
#define MAX_STREAMS 8 /* per priority: outbound, then inbound */
#define COUNTS_DIFFER -1

struct driver_calls {
    int (*get_context)(void **context);
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
    int (*record_event)(void *event, void *stream);
    int (*wait_for_event)(void *stream, void *event, unsigned flags);
    int (*copy_to_host)(void *to, uint64_t from, size_t nbytes, void *stream);
    int (*copy_to_device)(uint64_t to, const void *from, size_t nbytes, void *stream);
    int (*write_word)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*wait_for_word)(void *stream, uint64_t address, uint32_t value, unsigned flags);
};

/* CALL(record_event, event, stream): returns from the enclosing function if the driver fails. */
#define NUMBER_OF(call) ((int64_t)(offsetof(struct driver_calls, call) / sizeof(void *)) + 1)
#define CALL(call, ...)                                               \
    do {                                                              \
        int code = calls->call(__VA_ARGS__);                          \
        if (code) return NUMBER_OF(call) << 32 | (uint32_t)code;      \
    } while (0)

struct lane { /* slot_rings.Lane */
    int64_t peer, sends, slots, piece_bytes;
    uint64_t data_address, wait_address, signal_address;
    uint64_t host_words; /* host address of the words that this side waits for */
    int64_t next_piece;
};

struct channel { /* one priority of a transport; issue.py */
    const struct driver_calls *calls;
    void *context;
    int64_t rank, world, piece_bytes;
    struct lane **lanes_out, **lanes_in; /* by peer */
    int64_t *starts; /* room for 2 * world numbers */
    int64_t ways;                        /* streams in each direction */
    void *streams[MAX_STREAMS];
    void *ready, *finished[MAX_STREAMS];
};

struct message {
    struct channel *channel;
    uint64_t x, out;
    int64_t turns[2]; /* pieces so far, out and in */
    unsigned is_used; /* a bit per stream */
    int last;         /* stream of the last receive, else of the last send, else -1 */
};

static int64_t enter(const struct driver_calls *calls, void *context, int *pushed)
{
    void *current = NULL;
    *pushed = 0;
    if (!context) return 0;
    CALL(get_context, &current);
    if (current == context) return 0;
    CALL(push_context, context);
    *pushed = 1;
    return 0;
}

static int64_t leave(const struct driver_calls *calls, int pushed, int64_t status)
{
    void *popped;
    if (pushed) {
        int code = calls->pop_context(&popped);
        if (code && !status) return NUMBER_OF(pop_context) << 32 | (uint32_t)code;
    }
    return status;
}

/* Whether the host can see that a piece may move; then its stream need not wait. */
static int is_reached(const struct lane *lane, int64_t slot, int64_t round)
{
    const uint32_t *word = (const uint32_t *)(uintptr_t)(lane->host_words + slot * WORD_STRIDE);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - (uint32_t)round < 0x80000000u;
}

static int64_t move(struct message *m, struct lane *lane, int64_t offset, int64_t nbytes)
{
    struct channel *channel = m->channel;
    const struct driver_calls *calls = channel->calls;
    int way = !lane->sends;
    int s = way * channel->ways + m->turns[way]++ % channel->ways;
    void *stream = channel->streams[s];
    int64_t piece = lane->next_piece, slot = piece % lane->slots, round = piece / lane->slots + 1;
    int64_t awaited_round = lane->sends ? round - 1 : round;
    uint64_t data, signal = lane->signal_address + slot * WORD_STRIDE;

    if (!(m->is_used & 1u << s)) {
        CALL(wait_for_event, stream, channel->ready, 0);
        m->is_used |= 1u << s;
    }
    if (awaited_round && !is_reached(lane, slot, awaited_round))
        CALL(wait_for_word, stream, lane->wait_address + slot * WORD_STRIDE, (uint32_t)awaited_round, 0);
    data = lane->data_address + slot * lane->piece_bytes;
    if (lane->sends)
        CALL(copy_to_host, (void *)(uintptr_t)data, m->x + offset, nbytes, stream);
    else
        CALL(copy_to_device, m->out + offset, (const void *)(uintptr_t)data, nbytes, stream);
    CALL(write_word, stream, signal, (uint32_t)round, 0);
    if (way || !m->turns[1]) m->last = s;
    lane->next_piece++;
    return 0;
}

/* Join the used streams in that of the last receive, and record `done` there. */
static int64_t finish(const struct message *m, void *compute, void *done)
{
    struct channel *channel = m->channel;
    const struct driver_calls *calls = channel->calls;
    for (int s = 0; s < 2 * channel->ways; s++)
        if (m->is_used & 1u << s && s != m->last) {
            CALL(record_event, channel->finished[s], channel->streams[s]);
            CALL(wait_for_event, channel->streams[m->last], channel->finished[s], 0);
        }
    CALL(record_event, done, m->last < 0 ? compute : channel->streams[m->last]);
    return 0;
}

/* slot_rings.transfers_in_order; `send` and `recv` are rows per peer. */
static int64_t move_in_order(struct message *m, const int64_t *send, const int64_t *recv, int64_t row_bytes)
{
    struct channel *channel = m->channel;
    int64_t world = channel->world, rank = channel->rank, most = 0, status;
    int64_t *starts_out = channel->starts, *starts_in = channel->starts + world, sent = 0, received = 0;
    for (int64_t peer = 0; peer < world; peer++) {
        starts_out[peer] = sent, starts_in[peer] = received;
        sent += send[peer] * row_bytes, received += recv[peer] * row_bytes;
        if (send[peer] * row_bytes > most) most = send[peer] * row_bytes;
        if (recv[peer] * row_bytes > most) most = recv[peer] * row_bytes;
    }
    for (int64_t begin = 0; begin < most; begin += channel->piece_bytes)
        for (int64_t i = 1; i <= world; i++) { /* distances 1, 2, ..., then 0: the rank itself */
            int64_t to = (rank + i) % world, source = (rank + world - i % world) % world;
            for (int way = 0; way < 2; way++) {
                int64_t peer = way ? source : to;
                int64_t left = (way ? recv : send)[peer] * row_bytes - begin;
                if (left <= 0) continue;
                struct lane *lane = (way ? channel->lanes_in : channel->lanes_out)[peer];
                int64_t offset = (way ? starts_in : starts_out)[peer] + begin;
                status = move(m, lane, offset, left < channel->piece_bytes ? left : channel->piece_bytes);
                if (status) return status;
            }
        }
    return 0;
}

/* Issue the whole message. `done` is recorded after the last piece. */
int64_t freescale_launch(struct channel *channel, void *compute, void *done, uint64_t x, uint64_t out,
                         const int64_t *send, const int64_t *recv, int64_t row_bytes, int64_t n_send, int64_t n_recv)
{
    const struct driver_calls *calls = channel->calls;
    struct message m = {.channel = channel, .x = x, .out = out, .last = -1};
    int pushed, code;
    int64_t status;
    for (int64_t peer = 0; peer < channel->world; peer++)
        n_send -= send[peer], n_recv -= recv[peer];
    if (n_send || n_recv) return COUNTS_DIFFER;
    status = enter(calls, channel->context, &pushed);
    if (status) return status;
    code = calls->record_event(channel->ready, compute); /* x readable, out writable */
    if (code) status = NUMBER_OF(record_event) << 32 | (uint32_t)code;
    if (!status) status = move_in_order(&m, send, recv, row_bytes);
    if (!status) status = finish(&m, compute, done);
    return leave(calls, pushed, status);
}
