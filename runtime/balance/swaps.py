"""Groups of samples, one per rank, and their improvement by swapping samples between heavy and light ranks.

Costs are whole numbers here, so a sum does not depend on its order, and nothing depends on a clock: every rank that
starts from the same numbers ends with the same groups. What is allowed to vary from machine to machine is only how
long it takes. Where the groups come from is in assignment.py, what a user sees in solver.py.

A rank's samples lie in one row of a matrix, sorted by cost; a sample is the key `cost << bits | number`. In one round
the heaviest rank meets the lightest one, the second heaviest the second lightest and so on, and every such pair swaps
the two samples that bring it closest to where it should be. All pairs of a round are searched at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.integer_problem import Ints, Problem

_EMPTY = np.iinfo(np.int64).max  # a cell that can hold no sample
_TRIES = 24  # samples of the heavy rank that one round looks at; each meets its best partner
_LOOKS = 1024  # in all meetings together, if that is more
_SHARES = 16  # light ranks that one heavy rank may meet in a round
_AT_ONCE = 8  # swaps of one pair before the first round
_NEIGHBOURS = (0, -1, 1, -3, 3, -6, 6, -10, 10)
_STALE = 8  # rounds without progress before giving up
_NEVER = 1 << 62  # a score


class Budget:
    """Operations that may still be done. The same on every rank, as seconds would not be."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def spend(self, operations: int) -> bool:
        """Take them if they are there."""
        if self.left < operations:
            return False
        self.left -= operations
        return True


class Groups:
    """Which samples each rank has, while this is being improved."""

    def __init__(self, problem: Problem, rank: Ints) -> None:
        self.problem = problem
        self.counts = np.bincount(rank, minlength=problem.ranks)
        width = max(int(self.counts.max(initial=0)), 1)
        keys = (problem.costs << problem.bits) | np.arange(len(rank))
        self.keys = np.full((problem.ranks, width), _EMPTY)
        if len(rank) == self.keys.size and (rank[:-1] <= rank[1:]).all():
            self.keys[:] = keys.reshape(self.keys.shape)
        else:
            order = np.argsort(rank, kind="stable")
            start = np.cumsum(self.counts) - self.counts
            self.keys[rank[order], np.arange(len(rank)) - start[rank[order]]] = keys[order]
        self.keys.sort(axis=1)
        self.loads = np.where(self.keys == _EMPTY, 0, self.keys >> problem.bits).sum(1)
        self.memory = None if problem.memory is None else self.sums(problem.memory)

    def samples(self) -> tuple[Ints, Ints]:
        """Sample and rank of every filled cell, rank by rank."""
        row = np.repeat(np.arange(len(self.counts)), self.counts)
        keys = self.keys.ravel() if len(row) == self.keys.size else self.keys[self.keys != _EMPTY]
        return keys & ((1 << self.problem.bits) - 1), row

    def rank(self) -> Ints:
        sample, row = self.samples()
        rank = np.empty(len(sample), np.int64)
        rank[sample] = row
        return rank

    def sums(self, values: Ints) -> Ints:
        """Sum of `values` of the samples of each rank."""
        at = np.where(self.keys == _EMPTY, len(values), self.keys & ((1 << self.problem.bits) - 1))
        return np.append(values, 0)[at].sum(1)

    def moved(self) -> int:
        """Bytes that leave their rank."""
        sample, row = self.samples()
        return int(self.problem.sizes[sample][self.problem.home[sample] != row].sum())

    def fits(self) -> bool:
        return self.memory is None or bool((self.memory <= self.problem.cap).all())

    def swap(self, rows: Ints, columns: Ints, other_rows: Ints, other_columns: Ints) -> None:
        """Swap cells, no cell twice."""
        bits, mask = self.problem.bits, (1 << self.problem.bits) - 1
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
        self.keys[touched] = np.sort(self.keys[touched], axis=1, kind="stable")  # nearly sorted: stable is the fast one


def trade(groups: Groups, target: int) -> None:
    """Let the heaviest ranks give their longest samples to the lightest for their shortest, several at once.

    Never more than the one has above `target` or the other below it; swaps one by one would come to the same, slower.
    """
    half, most = groups.problem.ranks // 2, min(_AT_ONCE, int(groups.counts.min()))
    if not half or most < 2 or groups.memory is not None:
        return
    order = np.argsort(groups.loads, kind="stable")
    light, heavy, nth = order[:half], order[::-1][:half], np.arange(most)
    wish = np.minimum(groups.loads[heavy] - target, target - groups.loads[light])
    longest = groups.counts[heavy, None] - 1 - nth
    gain = (groups.keys[heavy[:, None], longest] >> groups.problem.bits) - (
        groups.keys[light, :most] >> groups.problem.bits
    )
    fits = (np.cumsum(gain, 1) <= wish[:, None]) & (gain > 0)
    pair, n = np.nonzero(fits & fits[:, 1:2])  # where one is enough, a round finds a better one
    groups.swap(heavy[pair], longest[pair, n], light[pair], n)


def improve(groups: Groups, target: int, slack: int, budget: Budget) -> bool:
    """Swap until no load is above `target + slack`: True, or until nothing helps or the budget is spent: False.

    The largest load never grows. Where a pair can be brought to its place within `slack` in several ways, the one
    that moves the fewest bytes is taken. A memory cap that holds is kept.
    """
    round_, stale, largest = 0, 0, int(groups.loads.max(initial=0))
    width = groups.keys.shape[1]
    if largest > target + slack and budget.spend(len(groups.loads) * _AT_ONCE + 5000):
        trade(groups, target)
        largest = int(groups.loads.max())
    while largest > target + slack:
        meetings = _meetings(groups, target, slack, stale)
        size = len(meetings.heavy)
        if stale >= _STALE or not budget.spend(size * (3 * width + 20 * _TRIES) + 5000):
            return False
        _swap(groups, meetings, slack, round_)
        now = int(groups.loads.max())
        stale = 0 if now < largest else stale + 1
        largest, round_ = now, round_ + 1
    return True


@dataclass(frozen=True)
class _Meetings:
    """Who swaps with whom in a round. A light rank comes once; a heavy one each time with a share of its samples."""

    heavy: Ints
    light: Ints
    wish: Ints  # load that should go from heavy to light,
    most: Ints  # and how much more than that would do as well
    share: Ints  # the how-many-eth meeting of the heavy rank,
    shares: Ints  # of how many


def _meetings(groups: Groups, target: int, slack: int, stale: int) -> _Meetings:
    """Give what the heavy ranks have above `target` to the ranks below it, much to where much is missing."""
    order = np.argsort(groups.loads, kind="stable")
    loads = groups.loads[order]
    first = int(np.searchsorted(loads, target + slack, side="right"))
    heavy, light = order[first:][::-1], order[: max(int(np.searchsorted(loads, target)), 1)]
    if stale:
        return _one_to_one(groups, target, heavy, order[:first], stale)
    above, below = groups.loads[heavy] - target, np.maximum(target - groups.loads[light], 1)
    ends, middle = np.cumsum(above), np.cumsum(below) - (below + 1) // 2
    near = max(int(np.searchsorted(middle, ends[-1])), 1)
    of = np.minimum(np.searchsorted(ends, middle[:near], side="right"), len(heavy) - 1)
    share = np.arange(near) - np.searchsorted(of, of)
    keep = np.flatnonzero(share < np.minimum(_SHARES, groups.counts[heavy])[of])  # no share without a sample
    light, below, of, share = light[keep], below[keep], of[keep], share[keep]
    shares = np.bincount(of)[of]
    given = np.bincount(of, below.astype(np.float64))[of]
    wish = np.minimum(below, (below * (above[of] / given)).astype(np.int64) + 1)
    return _Meetings(heavy[of], light, wish, np.where(shares == 1, below, wish), share, shares)


def _one_to_one(groups: Groups, target: int, heavy: Ints, other: Ints, stale: int) -> _Meetings:
    """Every heavy rank with one that is not, another one each time that this is tried."""
    light = np.roll(other, 1 - stale)[: len(heavy)]
    heavy = heavy[: len(light)]
    above, below = groups.loads[heavy] - target, target - groups.loads[light]
    wish = np.where(below > 0, np.minimum(above, below), (above - below) // 2)
    return _Meetings(heavy, light, wish, np.maximum(below, wish), np.zeros_like(heavy), np.ones_like(heavy))


def _swap(groups: Groups, meet: _Meetings, slack: int, round_: int) -> None:
    """In every meeting swap one sample of each side, where that helps."""
    bits, width, pairs = groups.problem.bits, groups.keys.shape[1], len(meet.heavy)
    wish, alone = meet.wish[:, None], (meet.shares == 1)[:, None]
    apart = (groups.loads[meet.heavy] - groups.loads[meet.light])[:, None]
    columns = _columns(groups, meet, round_)
    mine = groups.keys.ravel()[columns + (meet.heavy * width)[:, None]]
    cost = mine >> bits
    partners = groups.keys[meet.light]
    where = _closest(partners >> bits, cost - wish, groups.counts[meet.light])
    if groups.memory is not None:  # the closest one may not be allowed: also others near it
        first = (np.arange(pairs) * width)[:, None]
        last = first + np.maximum(groups.counts[meet.light] - 1, 0)[:, None]
        where = np.concatenate([np.clip(where + n, first, last) for n in _NEIGHBOURS], 1)
        mine, cost, columns = (np.tile(x, (1, len(_NEIGHBOURS))) for x in (mine, cost, columns))
    theirs = partners.ravel()[where]
    gain = cost - (theirs >> bits)
    most = np.where(alone, apart - 1, np.minimum(apart - 1, (3 * wish + slack) // 2))
    allowed = (gain > 0) & (gain <= most)
    if groups.counts.min() < width:
        allowed &= (mine != _EMPTY) & (theirs != _EMPTY)
    if groups.memory is not None:
        allowed &= _keeps_cap(groups, meet, mine, theirs, allowed)
    miss = np.maximum(wish - gain, gain - meet.most[:, None])
    score = np.where(allowed, miss, _NEVER)
    near = np.nonzero(allowed & (miss <= np.minimum(slack // 2, wish // 4)))
    score[near] = (
        _bytes_moved(groups.problem, mine[near], theirs[near], meet.heavy[near[0]], meet.light[near[0]]) - _NEVER
    )
    best = score.argmin(1)
    does = np.flatnonzero(score[np.arange(pairs), best] < _NEVER)
    best = best[does]
    groups.swap(meet.heavy[does], columns[does, best], meet.light[does], where[does, best] - does * width)


def _columns(groups: Groups, meet: _Meetings, round_: int) -> Ints:
    """Samples of each share of a heavy rank, most of them long ones, not the same in every round."""
    own = ((groups.counts[meet.heavy] - meet.share + meet.shares - 1) // meet.shares)[:, None]
    tries = min(max(_TRIES, _LOOKS // len(own)), int(own.max()))
    place = (np.arange(tries) + (round_ * 0.6180339887498949) % 1.0) / tries
    return (own - 1 - (own * (place * place)).astype(np.int64)) * meet.shares[:, None] + meet.share[:, None]


def _closest(rows: Ints, wanted: Ints, filled: Ints) -> Ints:
    """Flat position, in each sorted row, of the element closest to each wanted value of that row."""
    pairs, width = rows.shape
    first = (np.arange(pairs) * width)[:, None]
    last = first + np.maximum(filled - 1, 0)[:, None]
    lines = (np.arange(pairs) * (int(rows.max()) + 1))[:, None]  # makes one sorted array out of all rows
    flat = (rows + lines).ravel()
    wanted = np.maximum(wanted, 0) + lines
    after = np.minimum(np.maximum(flat.searchsorted(wanted), first), last)
    before = np.maximum(after - 1, first)
    return np.where(wanted - flat[before] < flat[after] - wanted, before, after)


def _keeps_cap(groups: Groups, meet: _Meetings, mine: Ints, theirs: Ints, allowed: np.ndarray) -> np.ndarray:
    """Which swaps leave both ranks within the memory cap, whatever else the heavy rank swaps in this round."""
    problem, mask = groups.problem, (1 << groups.problem.bits) - 1
    assert problem.memory is not None and groups.memory is not None
    mine, theirs = np.where(allowed, mine & mask, 0), np.where(allowed, theirs & mask, 0)
    more = problem.memory[mine] - problem.memory[theirs]
    heavy = (groups.memory[meet.heavy] - problem.cap)[:, None] <= more
    light = (problem.cap - groups.memory[meet.light])[:, None] >= more
    return light & ((more >= 0) | (heavy & (meet.shares == 1)[:, None]))


def _bytes_moved(problem: Problem, mine: Ints, theirs: Ints, heavy: Ints, light: Ints) -> Ints:
    """Bytes that a swap makes travel, less those that it brings home."""
    mask = (1 << problem.bits) - 1
    home, size = problem.home[mine & mask], problem.sizes[mine & mask]
    other_home, other_size = problem.home[theirs & mask], problem.sizes[theirs & mask]
    out = ((home != light).astype(np.int64) - (home != heavy)) * size
    return out + ((other_home != heavy).astype(np.int64) - (other_home != light)) * other_size
