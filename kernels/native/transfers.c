/* One call puts a whole message on streams, another makes a stream wait for it: what issue_python.py does with some tens
 * of calls from Python, in the same order, with the same driver calls.
 *
 * No CUDA header: the driver's functions come as addresses (`struct driver_calls`, filled by issue_native.py), which is
 * also how the tests run this file without a GPU. Structures are laid out as in slot_rings.py and issue_native.py.
 *
 * A call that the driver refuses ends the message at once: its number, counted from 1 in the order of driver_calls, and
 * the driver's code come back as number << 32 | code. */

#include <stddef.h>
#include <stdint.h>

#define MAX_STREAMS 8 /* of one priority: outwards, then inwards */
#define NOT_READY 600

struct driver_calls {
    int (*get_context)(void **context);
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
    int (*record_event)(void *event, void *stream);
    int (*wait_for_event)(void *stream, void *event, unsigned flags);
    int (*query_event)(void *event);
    int (*elapsed_time)(float *milliseconds, void *began, void *ended);
    int (*copy_to_host)(void *to, uint64_t from, size_t nbytes, void *stream);
    int (*copy_to_device)(uint64_t to, const void *from, size_t nbytes, void *stream);
    int (*copy_device_to_device)(uint64_t to, uint64_t from, size_t nbytes, void *stream);
    int (*write_word)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*wait_for_word)(void *stream, uint64_t address, uint32_t value, unsigned flags);
};

/* CALL(record_event, event, stream): returns from the function it stands in where the driver refuses. */
#define NUMBER_OF(call) ((int64_t)(offsetof(struct driver_calls, call) / sizeof(void *)) + 1)
#define CALL(call, ...)                                               \
    do {                                                              \
        int code = calls->call(__VA_ARGS__);                          \
        if (code) return NUMBER_OF(call) << 32 | (uint32_t)code;      \
    } while (0)

struct lane { /* slot_rings.Lane */
    int64_t peer, sends, slots, piece_bytes;
    uint64_t data_address, wait_address, signal_address;
    uint64_t host_words; /* where the host can read the words that this side waits for, else 0 */
    int64_t word_stride, next_piece;
};

struct channel { /* one priority of a transport; issue_native.py */
    const struct driver_calls *calls;
    void *context;
    int64_t rank, world, piece_bytes;
    struct lane **lanes_out, **lanes_in; /* by peer */
    int64_t *starts;                     /* room for 2 * world numbers */
    int64_t ways;                        /* streams in each direction */
    void *streams[MAX_STREAMS];
    void *ready, *finished[MAX_STREAMS];
    uint64_t scratch[MAX_STREAMS]; /* of each stream, for a flag that is copied; 0: flags are written */
    int64_t between_devices;
};

struct piece {
    struct lane *lane;
    int64_t offset, nbytes;
};

struct message {
    struct channel *channel;
    uint64_t x, out;
    int64_t turns[2];  /* pieces so far, out and in */
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
        if (code && status <= 0) return NUMBER_OF(pop_context) << 32 | (uint32_t)code;
    }
    return status;
}

/* Whether the host can see that a piece may move; then its stream need not wait. */
static int is_reached(const struct lane *lane, int64_t slot, int64_t round)
{
    if (!lane->host_words) return 0;
    const uint32_t *word = (const uint32_t *)(uintptr_t)(lane->host_words + slot * lane->word_stride);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - (uint32_t)round < 0x80000000u;
}

static int64_t copy(const struct message *m, const struct lane *lane, uint64_t slot, int64_t offset, int64_t nbytes,
                    void *stream)
{
    const struct driver_calls *calls = m->channel->calls;
    if (m->channel->between_devices) {
        uint64_t to = lane->sends ? slot : m->out + offset, from = lane->sends ? m->x + offset : slot;
        CALL(copy_device_to_device, to, from, nbytes, stream);
    } else if (lane->sends) {
        CALL(copy_to_host, (void *)(uintptr_t)slot, m->x + offset, nbytes, stream);
    } else {
        CALL(copy_to_device, m->out + offset, (const void *)(uintptr_t)slot, nbytes, stream);
    }
    return 0;
}

static int64_t move(struct message *m, struct lane *lane, int64_t offset, int64_t nbytes)
{
    struct channel *channel = m->channel;
    const struct driver_calls *calls = channel->calls;
    int way = !lane->sends;
    int s = way * channel->ways + m->turns[way]++ % channel->ways;
    void *stream = channel->streams[s];
    int64_t piece = lane->next_piece, slot = piece % lane->slots, round = piece / lane->slots + 1;
    int64_t awaited_round = lane->sends ? round - 1 : round, status;
    uint64_t signal = lane->signal_address + slot * lane->word_stride;

    if (!(m->is_used & 1u << s)) {
        CALL(wait_for_event, stream, channel->ready, 0);
        m->is_used |= 1u << s;
    }
    if (awaited_round && !is_reached(lane, slot, awaited_round))
        CALL(wait_for_word, stream, lane->wait_address + slot * lane->word_stride, (uint32_t)awaited_round, 0);
    status = copy(m, lane, lane->data_address + slot * lane->piece_bytes, offset, nbytes, stream);
    if (status) return status;
    if (channel->scratch[s]) {
        CALL(write_word, stream, channel->scratch[s], (uint32_t)round, 0);
        CALL(copy_device_to_device, signal, channel->scratch[s], 4, stream);
    } else {
        CALL(write_word, stream, signal, (uint32_t)round, 0);
    }
    if (way || !m->turns[1]) m->last = s;
    lane->next_piece++;
    return 0;
}

/* Streams that were used come together in the one of the last receive, where `done` is recorded. */
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
        for (int64_t i = 1; i <= world; i++) { /* distances 1, 2, ..., and 0 last: what a rank sends to itself */
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

static int64_t move_pieces(struct message *m, const struct piece *pieces, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t status = move(m, pieces[i].lane, pieces[i].offset, pieces[i].nbytes);
        if (status) return status;
    }
    return 0;
}

/* Everything of a message: the given pieces, or, without, those of slot_rings.transfers_in_order.
 * `done` is recorded after the last of them. */
int64_t freescale_launch(struct channel *channel, void *compute, void *done, uint64_t x, uint64_t out,
                         const int64_t *send, const int64_t *recv, int64_t row_bytes, const struct piece *pieces,
                         int64_t n_pieces)
{
    const struct driver_calls *calls = channel->calls;
    struct message m = {.channel = channel, .x = x, .out = out, .last = -1};
    int pushed, code;
    int64_t status = enter(calls, channel->context, &pushed);
    if (status) return status;
    code = calls->record_event(channel->ready, compute); /* x can be read and out can be written */
    if (code) status = NUMBER_OF(record_event) << 32 | (uint32_t)code;
    if (!status)
        status = pieces ? move_pieces(&m, pieces, n_pieces) : move_in_order(&m, send, recv, row_bytes);
    if (!status) status = finish(&m, compute, done);
    return leave(calls, pushed, status);
}

/* The two events of a wait that is over tell how long it took; else `milliseconds` stays as it is. */
static int64_t read_time(const struct driver_calls *calls, void *began, void *ended, float *milliseconds)
{
    if (ended) {
        int code = calls->query_event(ended);
        if (code == NOT_READY) return 0;
        if (code) return NUMBER_OF(query_event) << 32 | (uint32_t)code;
        CALL(elapsed_time, milliseconds, began, ended);
    }
    return 0;
}

static int64_t wait_between(const struct driver_calls *calls, void *stream, void *done, void *began, void *ended)
{
    int code = calls->query_event(done);
    if (!code) return -1;
    if (code != NOT_READY) return NUMBER_OF(query_event) << 32 | (uint32_t)code;
    if (began) CALL(record_event, began, stream);
    CALL(wait_for_event, stream, done, 0);
    if (ended) CALL(record_event, ended, stream);
    return 0;
}

/* `stream` goes on when `done` is reached. -1: it was reached already, and nothing was put on the stream.
 * `began` and `ended` are recorded around the wait; those of an earlier wait are read, if it is over. */
int64_t freescale_wait(const struct driver_calls *calls, void *context, void *stream, void *done, void *began,
                       void *ended, void *earlier_began, void *earlier_ended, float *milliseconds)
{
    int pushed;
    int64_t status = enter(calls, context, &pushed), time_status;
    if (status) return status;
    status = wait_between(calls, stream, done, began, ended);
    if (status <= 0) {
        time_status = read_time(calls, earlier_began, earlier_ended, milliseconds);
        if (time_status) status = time_status;
    }
    return leave(calls, pushed, status);
}

/* Bit i of `answers[i / 64]` says whether event i is reached. */
int64_t freescale_query(const struct driver_calls *calls, void *context, void *const *events, int64_t n,
                        uint64_t *answers)
{
    int pushed;
    int64_t status = enter(calls, context, &pushed);
    if (status) return status;
    for (int64_t i = 0; i < n && !status; i++) {
        int code = calls->query_event(events[i]);
        if (!code)
            answers[i / 64] |= (uint64_t)1 << i % 64;
        else if (code != NOT_READY)
            status = NUMBER_OF(query_event) << 32 | (uint32_t)code;
    }
    return leave(calls, pushed, status);
}

/* The largest of the counts, or -1 where they do not add up to `n_send` and `n_recv`. */
int64_t freescale_largest_count(const int64_t *send, const int64_t *recv, int64_t world, int64_t n_send,
                                int64_t n_recv)
{
    int64_t sent = 0, received = 0, largest = 0;
    for (int64_t peer = 0; peer < world; peer++) {
        sent += send[peer], received += recv[peer];
        if (send[peer] > largest) largest = send[peer];
        if (recv[peer] > largest) largest = recv[peer];
    }
    return sent == n_send && received == n_recv ? largest : -1;
}
