/* Ranks of one host tell each other a few numbers, round after round, through memory that they share: status_board.py.
 *
 * Every rank has two lines, used in turn: the number of the round, then its numbers. A rank begins round r + 2, which
 * writes over its line of round r, when all have begun r + 1, so when all have read round r. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef int64_t i64;

static inline _Atomic i64 *line_of(char *board, i64 line_bytes, i64 rank, i64 round) {
    return (_Atomic i64 *)(board + (2 * rank + (round & 1)) * line_bytes);
}

void fs_post(char *board, i64 line_bytes, i64 rank, i64 round, const i64 *numbers, i64 count) {
    _Atomic i64 *line = line_of(board, line_bytes, rank, round);
    for (i64 i = 0; i < count; i++) atomic_store_explicit(line + 1 + i, numbers[i], memory_order_relaxed);
    atomic_store_explicit(line, round, memory_order_release);
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
        while (atomic_load_explicit(line, memory_order_acquire) != round) {
            if (waited > seconds) return rank;
            if (waited < 1e-4) {
                sched_yield();
            } else {
                struct timespec pause = {0, 20000};
                nanosleep(&pause, 0);
            }
            waited = now() - begin;
        }
        for (i64 i = 0; i < count; i++)
            numbers[rank * count + i] = atomic_load_explicit(line + 1 + i, memory_order_relaxed);
    }
    return world;
}
