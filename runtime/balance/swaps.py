"""Improve a partition of the samples by swapping samples between heavy and light ranks. Costs are integers and nothing
depends on a clock, so every rank with the same input gets the same partition.

A partition is a matrix, so that all ranks are searched at once: a row holds a rank's samples, sorted by cost; a sample
is the key `cost << index_bits | index`. A round pairs the heaviest rank with the lightest, the second heaviest with the
second lightest and so on. Each pair swaps the two samples that bring it closest to its target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.integer_problem import IntArray, Problem

EMPTY = np.iinfo(np.int64).max  # an empty cell: row length is the largest count


class Partition:
    """The samples of each rank. Swaps update `keys`, `loads` and `memory`."""

    def __init__(self, problem: Problem, rank: IntArray) -> None:
        self.problem = problem
        self.counts = np.bincount(rank, minlength=problem.ranks)
        width = max(int(self.counts.max(initial=0)), 1)
        keys = (problem.costs << problem.index_bits) | np.arange(len(rank))
        self.keys = np.full((problem.ranks, width), EMPTY)
        if len(rank) == self.keys.size and (rank[:-1] <= rank[1:]).all():
            self.keys[:] = keys.reshape(self.keys.shape)
        else:
            order = np.argsort(rank, kind="stable")
            start = np.cumsum(self.counts) - self.counts
            self.keys[rank[order], np.arange(len(rank)) - start[rank[order]]] = keys[order]
        self.keys.sort(axis=1)
        self.loads = np.where(self.keys == EMPTY, 0, self.keys >> problem.index_bits).sum(1)
        self.memory = None if problem.memory is None else self.sums(problem.memory)

    def _filled_cells(self) -> tuple[IntArray, IntArray]:
        """Sample and rank of every filled cell, ordered by rank."""
        row = np.repeat(np.arange(len(self.counts)), self.counts)
        keys = self.keys.ravel() if len(row) == self.keys.size else self.keys[self.keys != EMPTY]
        return keys & ((1 << self.problem.index_bits) - 1), row

    def sample_ranks(self) -> IntArray:
        sample, row = self._filled_cells()
        rank = np.empty(len(sample), np.int64)
        rank[sample] = row
        return rank

    def sums(self, values: IntArray) -> IntArray:
        sample = np.where(self.keys == EMPTY, len(values), self.keys & ((1 << self.problem.index_bits) - 1))
        return np.append(values, 0)[sample].sum(1)

    def moved_bytes(self) -> int:
        sample, row = self._filled_cells()
        return int(self.problem.sizes[sample][self.problem.home[sample] != row].sum())

    def fits_memory(self) -> bool:
        return self.memory is None or bool((self.memory <= self.problem.cap).all())

    def swap(self, rows: IntArray, columns: IntArray, other_rows: IntArray, other_columns: IntArray) -> None:
        """Swap cells; each cell may occur only once."""
        bits, mask = self.problem.index_bits, (1 << self.problem.index_bits) - 1
        mine, theirs = self.keys[rows, columns], self.keys[other_rows, other_columns]
        self.keys[rows, columns], self.keys[other_rows, other_columns] = theirs, mine
        gain = (mine >> bits) - (theirs >> bits)
        np.subtract.at(self.loads, rows, gain)
        np.add.at(self.loads, other_rows, gain)
        if self.memory is not None and self.problem.memory is not None:
            gain = self.problem.memory[mine & mask] - self.problem.memory[theirs & mask]
            np.subtract.at(self.memory, rows, gain)
            np.add.at(self.memory, other_rows, gain)
        touched = np.zeros(len(self.loads), bool)
        touched[rows] = touched[other_rows] = True
        self.keys[touched] = np.sort(self.keys[touched], axis=1, kind="stable")  # stable is faster: nearly sorted


_CANDIDATES_PER_PAIR = 24  # samples per heavy rank to try in a round, each with its best counterpart
_CANDIDATES_PER_ROUND = 1024  # over all pairs, if that is more
_MAX_PARTNERS = 16  # max light ranks per heavy rank in a round
_BULK_SWAPS = 8  # swaps of one pair before the first round
_NEIGHBOUR_OFFSETS = (0, -1, 1, -3, 3, -6, 6, -10, 10)  # under a memory cap: counterparts to try around the best one
_STALE_ROUNDS = 8  # rounds without progress before giving up
_NO_SWAP = 1 << 62  # score of a disallowed swap


class OperationBudget:
    """Remaining operations. Deterministic across ranks, unlike a time limit."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def spend(self, operations: int) -> bool:
        """False if it has fewer left."""
        if self.left < operations:
            return False
        self.left -= operations
        return True


def swap_extremes(partition: Partition, target: int) -> None:
    """Swap the longest samples of the heaviest ranks with the shortest of the lightest, several at once, but transfer
    no more than one has above `target` and the other below it. (Single swaps would do the same, slower.)"""
    half, n_swaps = partition.problem.ranks // 2, min(_BULK_SWAPS, int(partition.counts.min()))
    if not half or n_swaps < 2 or partition.memory is not None:
        return
    order = np.argsort(partition.loads, kind="stable")
    light, heavy, nth = order[:half], order[::-1][:half], np.arange(n_swaps)
    transfer = np.minimum(partition.loads[heavy] - target, target - partition.loads[light])
    longest = partition.counts[heavy, None] - 1 - nth
    gain = (partition.keys[heavy[:, None], longest] >> partition.problem.index_bits) - (
        partition.keys[light, :n_swaps] >> partition.problem.index_bits
    )
    fits = (np.cumsum(gain, 1) <= transfer[:, None]) & (gain > 0)
    pair, n = np.nonzero(fits & fits[:, 1:2])  # if one is enough, a round finds a better one
    partition.swap(heavy[pair], longest[pair, n], light[pair], n)


def improve(partition: Partition, target: int, slack: int, budget: OperationBudget) -> bool:
    """Swap until no load is above `target + slack` (True), or until no swap helps or the budget is spent (False). Of
    swaps that bring a pair to its target within `slack`, the one that moves the fewest bytes wins. A cap is kept."""
    round_, stale, largest = 0, 0, int(partition.loads.max(initial=0))
    width = partition.keys.shape[1]
    if largest > target + slack and budget.spend(len(partition.loads) * _BULK_SWAPS + 5000):
        swap_extremes(partition, target)
        largest = int(partition.loads.max())
    while largest > target + slack:
        pairing = _pair_heavy_with_light(partition, target, slack, stale)
        size = len(pairing.heavy)
        if stale >= _STALE_ROUNDS or not budget.spend(size * (3 * width + 20 * _CANDIDATES_PER_PAIR) + 5000):
            return False
        _swap_pairs(partition, pairing, slack, round_)
        now = int(partition.loads.max())
        stale = 0 if now < largest else stale + 1
        largest, round_ = now, round_ + 1
    return True


@dataclass(frozen=True)
class _Pairing:
    """Which ranks swap in a round, one entry per pair. A light rank is in one pair; a heavy one may be in several, each
    with a share of its samples: share 0, 1, ... of `shares`."""

    heavy: IntArray
    light: IntArray
    transfer: IntArray  # load to move from heavy to light,
    max_transfer: IntArray  # and the largest load that is as good
    share: IntArray
    shares: IntArray


def _pair_heavy_with_light(partition: Partition, target: int, slack: int, stale: int) -> _Pairing:
    """Distribute the load above `target` of heavy ranks over the ranks below it, in proportion to what they lack."""
    order = np.argsort(partition.loads, kind="stable")
    loads = partition.loads[order]
    first = int(np.searchsorted(loads, target + slack, side="right"))
    heavy, light = order[first:][::-1], order[: max(int(np.searchsorted(loads, target)), 1)]
    if stale:
        return _pair_one_to_one(partition, target, heavy, order[:first], stale)
    above, below = partition.loads[heavy] - target, np.maximum(target - partition.loads[light], 1)
    ends, middle = np.cumsum(above), np.cumsum(below) - (below + 1) // 2
    near = max(int(np.searchsorted(middle, ends[-1])), 1)
    giver = np.minimum(np.searchsorted(ends, middle[:near], side="right"), len(heavy) - 1)  # for each light rank
    share = np.arange(near) - np.searchsorted(giver, giver)
    keep = np.flatnonzero(share < np.minimum(_MAX_PARTNERS, partition.counts[heavy])[giver])  # at most one per sample
    light, below, giver, share = light[keep], below[keep], giver[keep], share[keep]
    shares = np.bincount(giver)[giver]
    wanted = np.bincount(giver, below.astype(np.float64))[giver]
    transfer = np.minimum(below, (below * (above[giver] / wanted)).astype(np.int64) + 1)
    return _Pairing(heavy[giver], light, transfer, np.where(shares == 1, below, transfer), share, shares)


def _pair_one_to_one(partition: Partition, target: int, heavy: IntArray, other: IntArray, stale: int) -> _Pairing:
    """Pair every heavy rank with one that is not heavy; a different one for each value of `stale`."""
    light = np.roll(other, 1 - stale)[: len(heavy)]
    heavy = heavy[: len(light)]
    above, below = partition.loads[heavy] - target, target - partition.loads[light]
    transfer = np.where(below > 0, np.minimum(above, below), (above - below) // 2)
    return _Pairing(heavy, light, transfer, np.maximum(below, transfer), np.zeros_like(heavy), np.ones_like(heavy))


def _swap_pairs(partition: Partition, pairing: _Pairing, slack: int, round_: int) -> None:
    bits, width, n_pairs = partition.problem.index_bits, partition.keys.shape[1], len(pairing.heavy)
    transfer, only_partner = pairing.transfer[:, None], (pairing.shares == 1)[:, None]
    load_gap = (partition.loads[pairing.heavy] - partition.loads[pairing.light])[:, None]
    columns = _candidate_columns(partition, pairing, round_)
    mine = partition.keys.ravel()[columns + (pairing.heavy * width)[:, None]]
    cost = mine >> bits
    partners = partition.keys[pairing.light]
    where = _closest(partners >> bits, cost - transfer, partition.counts[pairing.light])
    if partition.memory is not None:  # the closest one may exceed the cap: also try its neighbors
        first = (np.arange(n_pairs) * width)[:, None]
        last = first + np.maximum(partition.counts[pairing.light] - 1, 0)[:, None]
        where = np.concatenate([np.clip(where + n, first, last) for n in _NEIGHBOUR_OFFSETS], 1)
        mine, cost, columns = (np.tile(x, (1, len(_NEIGHBOUR_OFFSETS))) for x in (mine, cost, columns))
    theirs = partners.ravel()[where]
    gain = cost - (theirs >> bits)
    largest_gain = np.where(only_partner, load_gap - 1, np.minimum(load_gap - 1, (3 * transfer + slack) // 2))
    allowed = (gain > 0) & (gain <= largest_gain)
    if partition.counts.min() < width:
        allowed &= (mine != EMPTY) & (theirs != EMPTY)
    if partition.memory is not None:
        allowed &= _keeps_cap(partition, pairing, mine, theirs, allowed)
    miss = np.maximum(transfer - gain, gain - pairing.max_transfer[:, None])
    score = np.where(allowed, miss, _NO_SWAP)
    near = np.nonzero(allowed & (miss <= np.minimum(slack // 2, transfer // 4)))
    heavy, light = pairing.heavy[near[0]], pairing.light[near[0]]
    score[near] = _bytes_moved(partition.problem, mine[near], theirs[near], heavy, light) - _NO_SWAP
    best = score.argmin(1)
    swapping = np.flatnonzero(score[np.arange(n_pairs), best] < _NO_SWAP)
    best = best[swapping]
    heavy, light = pairing.heavy[swapping], pairing.light[swapping]
    partition.swap(heavy, columns[swapping, best], light, where[swapping, best] - swapping * width)


def _candidate_columns(partition: Partition, pairing: _Pairing, round_: int) -> IntArray:
    """Samples of each share of a heavy rank, mostly long ones, varied by round."""
    own = ((partition.counts[pairing.heavy] - pairing.share + pairing.shares - 1) // pairing.shares)[:, None]
    tries = min(max(_CANDIDATES_PER_PAIR, _CANDIDATES_PER_ROUND // len(own)), int(own.max()))
    place = (np.arange(tries) + (round_ * 0.6180339887498949) % 1.0) / tries
    return (own - 1 - (own * (place * place)).astype(np.int64)) * pairing.shares[:, None] + pairing.share[:, None]


def _closest(rows: IntArray, wanted: IntArray, filled: IntArray) -> IntArray:
    """For each sorted row, the flat position of the element closest to each wanted value."""
    n_pairs, width = rows.shape
    first = (np.arange(n_pairs) * width)[:, None]
    last = first + np.maximum(filled - 1, 0)[:, None]
    lines = (np.arange(n_pairs) * (int(rows.max()) + 1))[:, None]  # makes all rows one sorted array
    flat = (rows + lines).ravel()
    wanted = np.maximum(wanted, 0) + lines
    after = np.minimum(np.maximum(flat.searchsorted(wanted), first), last)
    before = np.maximum(after - 1, first)
    return np.where(wanted - flat[before] < flat[after] - wanted, before, after)


def _keeps_cap(
    partition: Partition, pairing: _Pairing, mine: IntArray, theirs: IntArray, allowed: np.ndarray
) -> np.ndarray:
    """Which swaps keep both ranks within the memory cap, regardless of the heavy rank's other swaps in this round."""
    problem, mask = partition.problem, (1 << partition.problem.index_bits) - 1
    assert problem.memory is not None and partition.memory is not None
    mine, theirs = np.where(allowed, mine & mask, 0), np.where(allowed, theirs & mask, 0)
    more = problem.memory[mine] - problem.memory[theirs]
    heavy = (partition.memory[pairing.heavy] - problem.cap)[:, None] <= more
    light = (problem.cap - partition.memory[pairing.light])[:, None] >= more
    return light & ((more >= 0) | (heavy & (pairing.shares == 1)[:, None]))


def _bytes_moved(problem: Problem, mine: IntArray, theirs: IntArray, heavy: IntArray, light: IntArray) -> IntArray:
    """Bytes that a swap moves away from home, minus those that it moves home."""
    mask = (1 << problem.index_bits) - 1
    home, size = problem.home[mine & mask], problem.sizes[mine & mask]
    other_home, other_size = problem.home[theirs & mask], problem.sizes[theirs & mask]
    out = ((home != light).astype(np.int64) - (home != heavy)) * size
    return out + ((other_home != heavy).astype(np.int64) - (other_home != light)) * other_size
