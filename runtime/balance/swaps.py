"""Improve a partition by swapping samples between heavy and light ranks.

Costs are integers here, and nothing depends on a clock: every rank that starts from the same numbers ends with the same
partition. Only the time that it takes varies from machine to machine. Where the first partition comes from is in
assignment.py, what a user sees in solver.py.

In one round the heaviest rank is paired with the lightest one, the second heaviest with the second lightest and so on,
and every such pair swaps the two samples that bring it closest to where it should be. All pairs of a round are searched
at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.integer_problem import IntArray, Problem
from freescale.runtime.balance.partition import EMPTY, Partition

_CANDIDATES_PER_PAIR = 24  # samples of the heavy rank that a round tries, each with its best counterpart
_CANDIDATES_PER_ROUND = 1024  # of all pairs together, if that is more
_MAX_PARTNERS = 16  # light ranks that one heavy rank is paired with in a round
_BULK_SWAPS = 8  # swaps of one pair before the first round
_NEIGHBOUR_OFFSETS = (0, -1, 1, -3, 3, -6, 6, -10, 10)  # counterparts tried under a memory cap, around the best one
_STALE_ROUNDS = 8  # rounds without progress before giving up
_NO_SWAP = 1 << 62  # the score of a swap that is not allowed


class OperationBudget:
    """Operations that may still be done. The same on every rank, as seconds would not be."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def spend(self, operations: int) -> bool:
        """Take them if they are there."""
        if self.left < operations:
            return False
        self.left -= operations
        return True


def swap_extremes(partition: Partition, target: int) -> None:
    """Let the heaviest ranks give their longest samples to the lightest for their shortest, several at once.

    Never more than the one has above `target` or the other below it; swaps one by one would come to the same, slower.
    """
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
    pair, n = np.nonzero(fits & fits[:, 1:2])  # where one is enough, a round finds a better one
    partition.swap(heavy[pair], longest[pair, n], light[pair], n)


def improve(partition: Partition, target: int, slack: int, budget: OperationBudget) -> bool:
    """Swap until no load is above `target + slack`: True, or until nothing helps or the budget is spent: False.

    The largest load never grows. Where a pair can be brought to its place within `slack` in several ways, the one
    that moves the fewest bytes is taken. A memory cap that holds is kept.
    """
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
    """Which ranks swap in a round, one entry per pair.

    A light rank is in one pair. A heavy one may be in several, each with a share of its samples: share 0, 1, ... of
    `shares`.
    """

    heavy: IntArray
    light: IntArray
    transfer: IntArray  # load that should go from heavy to light,
    max_transfer: IntArray  # and the most that would do as well
    share: IntArray
    shares: IntArray


def _pair_heavy_with_light(partition: Partition, target: int, slack: int, stale: int) -> _Pairing:
    """Give what the heavy ranks have above `target` to the ranks below it, much to where much is missing."""
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
    keep = np.flatnonzero(share < np.minimum(_MAX_PARTNERS, partition.counts[heavy])[giver])  # none without a sample
    light, below, giver, share = light[keep], below[keep], giver[keep], share[keep]
    shares = np.bincount(giver)[giver]
    wanted = np.bincount(giver, below.astype(np.float64))[giver]
    transfer = np.minimum(below, (below * (above[giver] / wanted)).astype(np.int64) + 1)
    return _Pairing(heavy[giver], light, transfer, np.where(shares == 1, below, transfer), share, shares)


def _pair_one_to_one(partition: Partition, target: int, heavy: IntArray, other: IntArray, stale: int) -> _Pairing:
    """Every heavy rank with one that is not, another one each time that this is tried."""
    light = np.roll(other, 1 - stale)[: len(heavy)]
    heavy = heavy[: len(light)]
    above, below = partition.loads[heavy] - target, target - partition.loads[light]
    transfer = np.where(below > 0, np.minimum(above, below), (above - below) // 2)
    return _Pairing(heavy, light, transfer, np.maximum(below, transfer), np.zeros_like(heavy), np.ones_like(heavy))


def _swap_pairs(partition: Partition, pairing: _Pairing, slack: int, round_: int) -> None:
    """In every pair swap one sample of each side, where that helps."""
    bits, width, n_pairs = partition.problem.index_bits, partition.keys.shape[1], len(pairing.heavy)
    transfer, only_partner = pairing.transfer[:, None], (pairing.shares == 1)[:, None]
    load_gap = (partition.loads[pairing.heavy] - partition.loads[pairing.light])[:, None]
    columns = _candidate_columns(partition, pairing, round_)
    mine = partition.keys.ravel()[columns + (pairing.heavy * width)[:, None]]
    cost = mine >> bits
    partners = partition.keys[pairing.light]
    where = _closest(partners >> bits, cost - transfer, partition.counts[pairing.light])
    if partition.memory is not None:  # the closest one may not be allowed: also others near it
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
    """Samples of each share of a heavy rank, most of them long ones, not the same in every round."""
    own = ((partition.counts[pairing.heavy] - pairing.share + pairing.shares - 1) // pairing.shares)[:, None]
    tries = min(max(_CANDIDATES_PER_PAIR, _CANDIDATES_PER_ROUND // len(own)), int(own.max()))
    place = (np.arange(tries) + (round_ * 0.6180339887498949) % 1.0) / tries
    return (own - 1 - (own * (place * place)).astype(np.int64)) * pairing.shares[:, None] + pairing.share[:, None]


def _closest(rows: IntArray, wanted: IntArray, filled: IntArray) -> IntArray:
    """Flat position, in each sorted row, of the element closest to each wanted value of that row."""
    n_pairs, width = rows.shape
    first = (np.arange(n_pairs) * width)[:, None]
    last = first + np.maximum(filled - 1, 0)[:, None]
    lines = (np.arange(n_pairs) * (int(rows.max()) + 1))[:, None]  # makes one sorted array out of all rows
    flat = (rows + lines).ravel()
    wanted = np.maximum(wanted, 0) + lines
    after = np.minimum(np.maximum(flat.searchsorted(wanted), first), last)
    before = np.maximum(after - 1, first)
    return np.where(wanted - flat[before] < flat[after] - wanted, before, after)


def _keeps_cap(
    partition: Partition, pairing: _Pairing, mine: IntArray, theirs: IntArray, allowed: np.ndarray
) -> np.ndarray:
    """Which swaps leave both ranks within the memory cap, whatever else the heavy rank swaps in this round."""
    problem, mask = partition.problem, (1 << partition.problem.index_bits) - 1
    assert problem.memory is not None and partition.memory is not None
    mine, theirs = np.where(allowed, mine & mask, 0), np.where(allowed, theirs & mask, 0)
    more = problem.memory[mine] - problem.memory[theirs]
    heavy = (partition.memory[pairing.heavy] - problem.cap)[:, None] <= more
    light = (problem.cap - partition.memory[pairing.light])[:, None] >= more
    return light & ((more >= 0) | (heavy & (pairing.shares == 1)[:, None]))


def _bytes_moved(problem: Problem, mine: IntArray, theirs: IntArray, heavy: IntArray, light: IntArray) -> IntArray:
    """Bytes that a swap makes travel, less those that it brings home."""
    mask = (1 << problem.index_bits) - 1
    home, size = problem.home[mine & mask], problem.sizes[mine & mask]
    other_home, other_size = problem.home[theirs & mask], problem.sizes[theirs & mask]
    out = ((home != light).astype(np.int64) - (home != heavy)) * size
    return out + ((other_home != heavy).astype(np.int64) - (other_home != light)) * other_size
