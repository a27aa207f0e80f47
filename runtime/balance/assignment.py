"""Assignment methods: each takes a Problem and returns the rank of every sample; and the result of `balance`. All are
deterministic and ignore memory and bytes. swaps.py improves their results, solver.py chooses among them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.integer_problem import IntArray, Problem, bits_for_index
from freescale.runtime.balance.swaps import OperationBudget


@dataclass(frozen=True)
class BalanceResult:
    """The rank of every sample, and statistics.

    rank           rank of each sample
    step           0 for each sample (only the deprecated method `local` had several)
    order          all samples, ordered by rank, then by index: the batches that the ranks should get
    counts         samples per rank
    loss_weights   per sample. If each rank averages loss * weight over its samples, and ranks are averaged (as in DDP),
                   the result is the mean over all samples. All 1 if counts are equal
    loads          cost per rank
    straggler      share of time that the average rank waits for the slowest: 1 - mean load / largest load
    before         the same if every sample stays on its rank
    bound          the same if the largest load were max(mean load, longest sample): no assignment is better
    moved_bytes    bytes that leave their rank (number of samples if no sizes are given)
    oversized      samples that cost more than the mean load of a rank: no assignment can balance them
    method         the method that produced this assignment
    """

    rank: np.ndarray
    step: np.ndarray
    order: np.ndarray
    counts: np.ndarray
    loss_weights: np.ndarray
    loads: np.ndarray
    straggler: float
    before: float
    bound: float
    moved_bytes: int
    oversized: np.ndarray
    method: str

    def samples_of(self, rank: int) -> np.ndarray:
        end = int(self.counts[: rank + 1].sum())
        return self.order[end - int(self.counts[rank]) : end]


def make_result(problem: Problem, costs: np.ndarray, rank: np.ndarray, method: str) -> BalanceResult:
    ranks = problem.ranks
    total = float(costs.sum())
    loads, straggler = _loads_and_straggler(costs, rank, ranks)
    _, before = _loads_and_straggler(costs, problem.home, ranks)
    largest = max(total / ranks, float(costs.max(initial=0.0)))
    counts = np.bincount(rank, minlength=ranks)
    return BalanceResult(
        rank=rank,
        step=np.zeros(len(costs), np.int64),
        order=np.argsort(rank, kind="stable"),
        counts=counts,
        loss_weights=(counts * (ranks / max(len(costs), 1)))[rank],
        loads=loads,
        straggler=straggler,
        before=before,
        bound=1 - total / ranks / largest if largest else 0.0,
        moved_bytes=int(problem.sizes[rank != problem.home].sum()),
        oversized=np.flatnonzero(costs > total / ranks) if ranks > 1 else np.zeros(0, np.int64),
        method=method,
    )


def _loads_and_straggler(costs: np.ndarray, rank: np.ndarray, ranks: int) -> tuple[np.ndarray, float]:
    loads = np.bincount(rank, costs, minlength=ranks)
    longest = float(loads.max())
    return loads, max(0.0, 1 - float(loads.sum()) / ranks / longest) if longest else 0.0


def descending(problem: Problem) -> IntArray:
    bits = problem.index_bits
    keys = ((int(problem.costs.max(initial=0)) - problem.costs) << bits) | np.arange(len(problem.costs))
    return np.sort(keys) & ((1 << bits) - 1)  # keys are unique, so the faster unstable sort is fine


def stay_home(problem: Problem) -> IntArray:
    """Every sample stays on its rank; a rank above its count gives away its smallest samples."""
    rank, samples = problem.home.copy(), np.arange(len(problem.home))
    order = np.lexsort((samples, -problem.sizes, rank))
    have = np.bincount(rank, minlength=problem.ranks)
    place = samples - (np.cumsum(have) - have)[rank[order]]
    leaving = order[place >= problem.counts[rank[order]]]
    leaving = leaving[np.lexsort((leaving, -problem.costs[leaving]))]
    rank[leaving] = np.repeat(np.arange(problem.ranks), np.maximum(problem.counts - have, 0))
    return rank


def make_room(problem: Problem, rank: IntArray, target: int) -> IntArray:
    """If a sample costs more than the mean load, give its rank the cheapest other samples, until the load is `target`.
    (Single swaps would do the same, slower.)"""
    costs, rank = problem.costs, rank.copy()
    loads = np.zeros(problem.ranks, np.int64)
    np.add.at(loads, rank, costs)
    large = np.flatnonzero(costs * problem.ranks > int(costs.sum()))
    settled = np.zeros(problem.ranks, bool)
    for sample in large[np.lexsort((large, -costs[large]))]:
        here = rank[sample]
        if loads[here] <= target or settled[here]:
            continue
        settled[here] = True
        mine = np.flatnonzero(rank == here)
        mine = mine[mine != sample]
        mine = mine[np.argsort(-costs[mine], kind="stable")]
        other = np.flatnonzero(~settled[rank])
        other = other[np.argsort(costs[other], kind="stable")][: len(mine)]
        mine = mine[: len(other)]
        gain = costs[mine] - costs[other]
        needed = int(np.searchsorted(np.cumsum(np.maximum(gain, 0)), loads[here] - target)) + 1
        mine, other = mine[:needed][gain[:needed] > 0], other[:needed][gain[:needed] > 0]
        other = other[np.argsort(loads[rank[other]], kind="stable")]
        np.add.at(loads, rank[other], costs[mine] - costs[other])
        loads[here] -= int(costs[mine].sum() - costs[other].sum())
        rank[mine], rank[other] = rank[other], here
    return rank


def zigzag(problem: Problem) -> IntArray:
    """In descending order of cost, to ranks 0, 1, ..., n, n, ..., 1, 0, 0, 1, ...; full ranks are skipped."""
    ranks, rounds = problem.ranks, int(problem.counts.max(initial=0))
    turns = np.tile(np.arange(ranks), (rounds, 1))
    turns[1::2] = turns[1::2, ::-1]
    open_ranks = problem.counts[turns] > np.arange(rounds)[:, None]
    rank = np.empty(len(problem.costs), np.int64)
    rank[descending(problem)] = turns[open_ranks]
    return rank


def lpt(problem: Problem, *, any_count: bool = False) -> IntArray:
    """Longest processing time first: in descending order of cost, each to the least loaded rank that is not full. In
    runs: the least loaded ranks take one sample each, as long as no rank in the run, with its new sample, has a lower
    load than the next rank without one."""
    order, ranks = descending(problem), problem.ranks
    costs, rank = problem.costs[order], np.empty(len(order), np.int64)
    loads, room = np.zeros(ranks, np.int64), np.full(ranks, len(order)) if any_count else problem.counts.copy()
    open_ranks = np.flatnonzero(room)
    done = 0
    while done < len(order):
        by_load = open_ranks[np.argsort(loads[open_ranks], kind="stable")][: len(order) - done]
        before = loads[by_load]
        after = before + costs[done : done + len(by_load)]
        overtaken = np.flatnonzero(before[1:] > np.minimum.accumulate(after[:-1]))
        run = by_load[: int(overtaken[0]) + 1] if len(overtaken) else by_load
        rank[order[done : done + len(run)]] = run
        loads[run] = after[: len(run)]
        room[run] -= 1
        if not room[run].all():
            open_ranks = open_ranks[room[open_ranks] > 0]
        done += len(run)
    return rank


def kk(problem: Problem) -> IntArray:
    """Karmarkar-Karp with equal counts: from sets of one sample per rank, repeatedly merge the two most uneven ones,
    the heaviest part of one with the lightest of the other. Counts differ by at most one; larger groups go to the ranks
    with larger counts."""
    ranks, order = problem.ranks, descending(problem)
    sets = -(-len(order) // ranks)
    if not sets:
        return order
    padded = np.full(sets * ranks, -1)
    padded[: len(order)] = order
    loads = [row for row in np.append(problem.costs, 0)[padded].reshape(sets, ranks)]  # each descending
    heap = [(int(row[-1] - row[0]), number) for number, row in enumerate(loads)]
    heapq.heapify(heap)
    joined: list[tuple[int, int, IntArray]] = []  # set, set, new order of the parts
    while len(heap) > 1:
        (_, first), (_, second) = heapq.heappop(heap), heapq.heappop(heap)
        together = loads[first] + loads[second][::-1]
        new = np.argsort(-together, kind="stable")
        joined.append((first, second, new))
        loads.append(together[new])
        heapq.heappush(heap, (int(loads[-1][-1] - loads[-1][0]), len(loads) - 1))
    part: list[IntArray] = [np.arange(ranks)] * len(loads)  # final group of each part of each set
    for number, (first, second, new) in reversed(list(enumerate(joined, sets))):
        place = np.empty(ranks, np.int64)
        place[new] = part[number]
        part[first], part[second] = place, place[::-1]
    group = np.concatenate(part[:sets])[padded >= 0]
    rank = np.empty(len(order), np.int64)
    rank[order] = group
    return _with_counts(problem, rank)


def _with_counts(problem: Problem, group: IntArray) -> IntArray:
    """Number the groups so that each rank gets its count of samples."""
    have = np.bincount(group, minlength=problem.ranks)
    rank_of_group = np.empty(problem.ranks, np.int64)
    rank_of_group[np.argsort(have, kind="stable")] = np.argsort(problem.counts, kind="stable")
    return rank_of_group[group]


def fewest_moves(problem: Problem, rank: IntArray) -> IntArray:
    """Permute the groups over ranks, and exchange samples of equal cost, so that more bytes stay on their rank."""
    ranks = problem.ranks
    stays = np.bincount(rank * ranks + problem.home, problem.sizes.astype(np.float64), minlength=ranks * ranks)
    stays = stays.reshape(ranks, ranks)
    stays[np.bincount(rank, minlength=ranks)[:, None] != problem.counts] = -1  # other count
    rank_of_group = np.full(ranks, -1)
    groups, free = np.arange(ranks), np.arange(ranks)
    while len(groups):  # every group requests its best rank, every requested rank accepts one
        best = stays[np.ix_(groups, free)]
        asked = best.argmax(1)
        value = best[np.arange(len(groups)), asked]
        by_value = np.lexsort((groups, -value))
        taken, first = np.unique(asked[by_value], return_index=True)
        rank_of_group[groups[by_value[first]]] = free[taken]
        groups, free = np.delete(groups, by_value[first]), np.delete(free, taken)
    return _bring_equals_home(problem, rank_of_group[rank])


def _bring_equals_home(problem: Problem, rank: IntArray) -> IntArray:
    """Among moved samples of equal cost and memory, send those home for which there is a place there."""
    away, bits = np.flatnonzero(rank != problem.home), bits_for_index(len(rank), problem.ranks)
    if 3 * bits + 1 > 63:  # a million samples: keys would not fit into 64 bits
        return rank
    number, side = np.arange(len(away)), 1 << bits
    kind = _dense_ids((problem.costs[away] << problem.index_bits) | number, problem.index_bits)
    if problem.memory is not None:
        other = np.unique(problem.memory[away], return_inverse=True)[1]
        kind = _dense_ids((((kind << bits) | other) << bits) | number, bits)
    # Sorted by kind and rank: first the samples whose home it is, then the places taken there.
    wanted = (((kind << bits) | problem.home[away]) << (bits + 1)) | number
    offered = (((kind << bits) | rank[away]) << (bits + 1)) | side | number
    keys = np.sort(np.concatenate((wanted, offered)))
    place, sample = (keys & side).astype(bool), keys & (side - 1)
    start = np.flatnonzero(np.concatenate(([True], np.diff(keys >> (bits + 1)) != 0)))
    places = np.add.reduceat(place.astype(np.int64), start) if len(keys) else start
    lengths = np.diff(start, append=len(keys))
    samples = lengths - places
    nth = np.arange(len(keys)) - np.repeat(start, lengths) - place * np.repeat(samples, lengths)
    matched = nth < np.repeat(np.minimum(places, samples), lengths)
    new = rank.copy()
    goes_home = away[sample[matched & ~place]]
    new[goes_home] = problem.home[goes_home]
    new[away[sample[~matched & ~place]]] = rank[away[sample[~matched & place]]]  # sorted by kind, equal counts per kind
    return new


def _dense_ids(keys: IntArray, bits: int) -> IntArray:
    """0, 1, ... for distinct `keys >> bits` in ascending order; result i is for the key whose lower bits are i."""
    ordered = np.sort(keys)
    new = np.empty(len(keys), np.int64)
    new[ordered & ((1 << bits) - 1)] = np.cumsum(np.diff(ordered >> bits, prepend=ordered[:1] >> bits) != 0)
    return new


def exact(
    problem: Problem, below: int, budget: OperationBudget, *, any_count: bool = False, any_below: bool = False
) -> IntArray | None:
    """The assignment with the smallest largest load, if that is below `below`, by exhaustive search; with `any_below`,
    the first. The budget is one unit per try; if it runs out, the result may not be the best."""
    order = descending(problem)
    costs = problem.costs[order].tolist()
    memory = [0] * len(costs) if problem.memory is None else problem.memory[order].tolist()
    room = [len(costs)] * problem.ranks if any_count else problem.counts.tolist()
    loads, held, path = [0] * problem.ranks, [0] * problem.ranks, [0] * len(costs)
    smallest_sum = np.concatenate(([0], np.cumsum(costs[::-1]))).tolist()  # sum of the n cheapest samples
    best: list[int] | None = None

    def place(n: int) -> bool:
        """Place sample n and those after it. Return True if the search is over."""
        nonlocal below, best
        if n == len(costs):
            below, best = max(loads), path.copy()
            return any_below
        if not any_count and any(load + smallest_sum[r] >= below for load, r in zip(loads, room, strict=True)):
            return False
        seen = set()
        for r in sorted(range(problem.ranks), key=loads.__getitem__):
            state = (loads[r], held[r], room[r])
            fits = (
                room[r]
                and loads[r] + costs[n] < below
                and (problem.memory is None or held[r] + memory[n] <= problem.cap)
            )
            if not fits or state in seen:
                continue
            if not budget.spend(1):
                budget.left = 0
                return True
            seen.add(state)
            loads[r], held[r], room[r], path[n] = loads[r] + costs[n], held[r] + memory[n], room[r] - 1, r
            stop = place(n + 1)
            loads[r], held[r], room[r] = state
            if stop:
                return True
        return False

    place(0)
    if best is None:
        return None
    rank = np.empty(len(costs), np.int64)
    rank[order] = best
    return rank
