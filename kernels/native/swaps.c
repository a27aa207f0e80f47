/* Swaps of samples between heavy and light ranks: what runtime/balance/swaps.py defines, without a memory cap, and to the
 * bit the same. Costs are integers; the few numbers that are not are doubles there and here. */

#include <stdint.h>
#include <stdlib.h>

typedef int64_t i64;

/* As in swaps.py. */
#define CANDIDATES_PER_PAIR 24
#define CANDIDATES_PER_ROUND 1024
#define MAX_PARTNERS 16
#define BULK_SWAPS 8
#define STALE_ROUNDS 8
#define NO_SWAP ((i64)1 << 62)

#define NO_MEMORY (-1)

typedef struct { /* a partition of samples; partition.py */
    i64 ranks, width, index_bits;
    const i64 *counts;       /* samples of each rank */
    const i64 *home, *sizes; /* of each sample: the rank that has it now, its bytes */
    i64 *keys;               /* [ranks][width], each row sorted: cost << index_bits | sample */
    i64 *loads;
} partition;

typedef struct { /* two ranks that swap in a round */
    i64 heavy, light, transfer, max_transfer, share, shares;
    i64 column, other_column; /* that they swap; -1: none */
} pair;

typedef struct {
    i64 *order;     /* ranks by load, equal ones in their order */
    i64 *ends;      /* of what the heavy ranks have to give */
    i64 *n_pairs;   /* of each heavy rank, */
    double *wanted; /* and how much their light ones lack */
    pair *pairs;
    uint8_t *touched;
} scratch;

static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 most(i64 a, i64 b) { return a > b ? a : b; }

static i64 cost_at(const partition *p, i64 rank, i64 column) { return p->keys[rank * p->width + column] >> p->index_bits; }

static i64 largest_of(const i64 *values, i64 n) {
    i64 largest = 0;
    for (i64 i = 0; i < n; i++) largest = most(largest, values[i]);
    return largest;
}

static int spend(i64 *budget, i64 operations) {
    if (*budget < operations) return 0;
    *budget -= operations;
    return 1;
}

/* In a round few loads change, so the order is nearly right. */
static void sort_by_load(const partition *p, i64 *order) {
    for (i64 i = 1; i < p->ranks; i++) {
        i64 rank = order[i], load = p->loads[rank], at = i;
        for (; at > 0; at--) {
            i64 before = order[at - 1];
            if (p->loads[before] < load || (p->loads[before] == load && before < rank)) break;
            order[at] = before;
        }
        order[at] = rank;
    }
}

static void swap_cells(partition *p, scratch *s, i64 rank, i64 column, i64 other_rank, i64 other_column) {
    i64 *mine = p->keys + rank * p->width + column, *theirs = p->keys + other_rank * p->width + other_column;
    i64 gain = (*mine >> p->index_bits) - (*theirs >> p->index_bits), key = *mine;
    *mine = *theirs;
    *theirs = key;
    p->loads[rank] -= gain;
    p->loads[other_rank] += gain;
    s->touched[rank] = s->touched[other_rank] = 1;
}

static void sort_touched(partition *p, scratch *s) {
    for (i64 rank = 0; rank < p->ranks; rank++) {
        i64 *row = p->keys + rank * p->width;
        if (!s->touched[rank]) continue;
        s->touched[rank] = 0;
        for (i64 i = 1; i < p->width; i++) {
            i64 key = row[i], at = i;
            for (; at > 0 && row[at - 1] > key; at--) row[at] = row[at - 1];
            row[at] = key;
        }
    }
}

static void swap_extremes(partition *p, scratch *s, i64 target) {
    i64 half = p->ranks / 2, n_swaps = BULK_SWAPS;
    for (i64 rank = 0; rank < p->ranks; rank++) n_swaps = least(n_swaps, p->counts[rank]);
    if (!half || n_swaps < 2) return;
    sort_by_load(p, s->order);
    for (i64 i = 0; i < half; i++) {
        i64 light = s->order[i], heavy = s->order[p->ranks - 1 - i], last = p->counts[heavy] - 1, given = 0;
        i64 transfer = least(p->loads[heavy] - target, target - p->loads[light]);
        int fits[BULK_SWAPS];
        for (i64 n = 0; n < n_swaps; n++) {
            i64 gain = cost_at(p, heavy, last - n) - cost_at(p, light, n);
            given += gain;
            fits[n] = given <= transfer && gain > 0;
        }
        for (i64 n = 0; n < n_swaps && fits[1]; n++) /* where one is enough, a round finds a better one */
            if (fits[n]) swap_cells(p, s, heavy, last - n, light, n);
    }
    sort_touched(p, s);
}

static i64 pair_one_to_one(const partition *p, scratch *s, i64 target, i64 first, i64 stale) {
    i64 n = least(p->ranks - first, first);
    for (i64 i = 0; i < n; i++) {
        i64 heavy = s->order[p->ranks - 1 - i], light = s->order[(i + stale - 1) % first];
        i64 above = p->loads[heavy] - target, below = target - p->loads[light];
        i64 transfer = below > 0 ? least(above, below) : (above - below) / 2;
        s->pairs[i] = (pair){heavy, light, transfer, most(below, transfer), 0, 1, -1, -1};
    }
    return n;
}

/* Returns how many pairs there are. */
static i64 pair_heavy_with_light(const partition *p, scratch *s, i64 target, i64 slack, i64 stale) {
    i64 first = 0, n_light = 0, n = 0, given = 0, lacking = 0, giver = 0, share = 0;
    sort_by_load(p, s->order);
    while (first < p->ranks && p->loads[s->order[first]] <= target + slack) first++;
    while (n_light < p->ranks && p->loads[s->order[n_light]] < target) n_light++;
    if (stale) return pair_one_to_one(p, s, target, first, stale);
    n_light = most(n_light, 1);
    i64 n_heavy = p->ranks - first;
    for (i64 i = 0; i < n_heavy; i++) {
        s->ends[i] = given += p->loads[s->order[p->ranks - 1 - i]] - target;
        s->n_pairs[i] = 0;
        s->wanted[i] = 0;
    }
    for (i64 i = 0; i < n_light; i++) {
        i64 light = s->order[i], below = most(target - p->loads[light], 1);
        lacking += below;
        i64 middle = lacking - (below + 1) / 2;
        if (i && middle >= given) break;
        i64 before = giver;
        while (giver < n_heavy - 1 && s->ends[giver] <= middle) giver++;
        share = i && giver == before ? share + 1 : 0;
        i64 heavy = s->order[p->ranks - 1 - giver];
        if (share >= least(MAX_PARTNERS, p->counts[heavy])) continue;
        s->pairs[n++] = (pair){giver, light, below, 0, share, 0, -1, -1};
        s->n_pairs[giver]++;
        s->wanted[giver] += (double)below;
    }
    for (i64 i = 0; i < n; i++) {
        pair *x = s->pairs + i;
        giver = x->heavy;
        i64 below = x->transfer;
        x->heavy = s->order[p->ranks - 1 - giver];
        double above = (double)(p->loads[x->heavy] - target);
        x->shares = s->n_pairs[giver];
        x->transfer = least(below, (i64)((double)below * (above / s->wanted[giver])) + 1);
        x->max_transfer = x->shares == 1 ? below : x->transfer;
    }
    return n;
}

/* The column of a rank whose cost is closest to the wanted one, the later one of two. */
static i64 closest(const partition *p, i64 rank, i64 wanted) {
    i64 low = 0, high = p->counts[rank], last = most(high - 1, 0);
    while (low < high) {
        i64 middle = low + (high - low) / 2;
        if (cost_at(p, rank, middle) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    i64 after = least(low, last), before = most(after - 1, 0);
    return wanted - cost_at(p, rank, before) < cost_at(p, rank, after) - wanted ? before : after;
}

/* Bytes that a swap makes travel, less those that it brings home. */
static i64 bytes_moved(const partition *p, const pair *x, i64 mine, i64 theirs) {
    i64 mask = ((i64)1 << p->index_bits) - 1;
    mine &= mask;
    theirs &= mask;
    i64 out = ((p->home[mine] != x->light) - (p->home[mine] != x->heavy)) * p->sizes[mine];
    return out + ((p->home[theirs] != x->heavy) - (p->home[theirs] != x->light)) * p->sizes[theirs];
}

/* Which of `tries` samples of the heavy rank to swap, and for which one. */
static void choose_swap(const partition *p, pair *x, i64 tries, double offset, i64 slack) {
    i64 own = (p->counts[x->heavy] - x->share + x->shares - 1) / x->shares, best = NO_SWAP;
    i64 largest_gain = p->loads[x->heavy] - p->loads[x->light] - 1, near = least(slack / 2, x->transfer / 4);
    if (x->shares != 1) largest_gain = least(largest_gain, (3 * x->transfer + slack) / 2);
    for (i64 i = 0; i < tries; i++) {
        double place = ((double)i + offset) / (double)tries;
        i64 column = (own - 1 - (i64)((double)own * (place * place))) * x->shares + x->share;
        i64 mine = p->keys[x->heavy * p->width + column], cost = mine >> p->index_bits;
        i64 other = closest(p, x->light, most(cost - x->transfer, 0));
        i64 theirs = p->keys[x->light * p->width + other], gain = cost - (theirs >> p->index_bits);
        if (gain <= 0 || gain > largest_gain) continue;
        i64 score = most(x->transfer - gain, gain - x->max_transfer);
        if (score <= near) score = bytes_moved(p, x, mine, theirs) - NO_SWAP;
        if (score < best) {
            best = score;
            x->column = column;
            x->other_column = other;
        }
    }
}

static void swap_pairs(partition *p, scratch *s, i64 n, i64 slack, i64 round) {
    i64 most_own = 0;
    for (i64 i = 0; i < n; i++) {
        const pair *x = s->pairs + i;
        most_own = most(most_own, (p->counts[x->heavy] - x->share + x->shares - 1) / x->shares);
    }
    i64 tries = least(most(CANDIDATES_PER_PAIR, CANDIDATES_PER_ROUND / n), most_own);
    double offset = (double)round * 0.6180339887498949;
    offset -= (double)(i64)offset;
    for (i64 i = 0; i < n; i++) choose_swap(p, s->pairs + i, tries, offset, slack);
    for (i64 i = 0; i < n; i++) {
        const pair *x = s->pairs + i;
        if (x->column >= 0) swap_cells(p, s, x->heavy, x->column, x->light, x->other_column);
    }
    sort_touched(p, s);
}

static i64 improve(partition *p, scratch *s, i64 target, i64 slack, i64 *budget) {
    i64 round = 0, stale = 0, largest = largest_of(p->loads, p->ranks);
    if (largest > target + slack && spend(budget, p->ranks * BULK_SWAPS + 5000)) {
        swap_extremes(p, s, target);
        largest = largest_of(p->loads, p->ranks);
    }
    for (; largest > target + slack; round++) {
        i64 n = pair_heavy_with_light(p, s, target, slack, stale);
        if (stale >= STALE_ROUNDS || !spend(budget, n * (3 * p->width + 20 * CANDIDATES_PER_PAIR) + 5000)) return 0;
        swap_pairs(p, s, n, slack, round);
        i64 now = largest_of(p->loads, p->ranks);
        stale = now < largest ? 0 : stale + 1;
        largest = now;
    }
    return 1;
}

/* swaps.improve. `budget`: operations, less those that were spent. Returns whether no load is above target + slack. */
i64 fs_improve(partition *p, i64 target, i64 slack, i64 *budget) {
    scratch s = {
        .order = malloc(p->ranks * sizeof(i64)),
        .ends = malloc(p->ranks * sizeof(i64)),
        .n_pairs = malloc(p->ranks * sizeof(i64)),
        .wanted = malloc(p->ranks * sizeof(double)),
        .pairs = malloc(p->ranks * sizeof(pair)),
        .touched = calloc(p->ranks, 1),
    };
    i64 result = NO_MEMORY;
    if (s.order && s.ends && s.n_pairs && s.wanted && s.pairs && s.touched) {
        for (i64 rank = 0; rank < p->ranks; rank++) s.order[rank] = rank;
        result = improve(p, &s, target, slack, budget);
    }
    free(s.order);
    free(s.ends);
    free(s.n_pairs);
    free(s.wanted);
    free(s.pairs);
    free(s.touched);
    return result;
}
