/* Ranks of one host tell each other a few numbers, round after round, through memory that they share: status_board.py.
 *
 * Every rank has two lines, used in turn: the number of the round, then its numbers. A rank begins round r + 2, which
 * writes over its line of round r, when all have begun r + 1, so when all have read round r. */

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define YIELD_SECONDS 1e-4 /* before a rank sleeps */
#define SLEEP_SECONDS 0.05 /* at most, without a look at the clock */

typedef int64_t i64;

/* A futex has 32 bits: the lower ones of a round's number, which come first. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half of a number must come first");

static inline _Atomic i64 *line_of(char *board, i64 line_bytes, i64 rank, i64 round) {
    return (_Atomic i64 *)(board + (2 * rank + (round & 1)) * line_bytes);
}

void fs_post(char *board, i64 line_bytes, i64 rank, i64 round, const i64 *numbers, i64 count) {
    _Atomic i64 *line = line_of(board, line_bytes, rank, round);
    for (i64 i = 0; i < count; i++) atomic_store_explicit(line + 1 + i, numbers[i], memory_order_relaxed);
    atomic_store_explicit(line, round, memory_order_release);
    syscall(SYS_futex, line, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Read what every rank has posted for `round`. Returns how many ranks are read when all are, or `seconds` have passed:
 * so the first rank that has not come is the one with that number. */
i64 fs_read(char *board, i64 line_bytes, i64 world, i64 round, i64 *numbers, i64 count, double seconds) {
    double begin = now(), waited = 0;
    for (i64 rank = 0; rank < world; rank++) {
        _Atomic i64 *line = line_of(board, line_bytes, rank, round);
        i64 seen;
        while ((seen = atomic_load_explicit(line, memory_order_acquire)) != round) {
            if (waited > seconds) return rank;
            if (waited < YIELD_SECONDS) {
                sched_yield();
            } else {
                double most = seconds - waited < SLEEP_SECONDS ? seconds - waited : SLEEP_SECONDS;
                struct timespec pause = {0, (long)(most * 1e9)};
                syscall(SYS_futex, line, FUTEX_WAIT, (uint32_t)seen, &pause, 0, 0); /* back at once if it is not `seen` */
            }
            waited = now() - begin;
        }
        for (i64 i = 0; i < count; i++)
            numbers[rank * count + i] = atomic_load_explicit(line + 1 + i, memory_order_relaxed);
    }
    return world;
}

/* Both in one call: Python's lock is given away once. */
i64 fs_post_and_read(char *board, i64 line_bytes, i64 rank, i64 world, i64 round, const i64 *own, i64 *numbers, i64 count,
                     double seconds) {
    fs_post(board, line_bytes, rank, round, own, count);
    return fs_read(board, line_bytes, world, round, numbers, count, seconds);
}
