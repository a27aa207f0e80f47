"""`balance(costs, ranks)`: assign samples to ranks so that all ranks have the same amount of work. No process group,
clock or random numbers: ranks with the same arguments get the same result. It moves no data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from freescale.runtime.balance import assignment, integer_problem
from freescale.runtime.balance.assignment import BalanceResult, make_result
from freescale.runtime.balance.integer_problem import BalanceError, Problem
from freescale.runtime.balance.memory_cap import StopCriteria, fit_to_cap, improve_within_cap
from freescale.runtime.balance.swaps import OperationBudget, Partition, improve

log = logging.getLogger(__name__)

METHODS = ("default", "none", "zigzag", "lpt", "kk", "variable")
_SMALL = 10  # max samples for exhaustive search,
_MAX_TRIES = 50_000  # and its max number of tries


def balance(
    costs: Any,
    ranks: int,
    counts: Sequence[int] | np.ndarray | None = None,
    method: str = "default",
    *,
    home: Any = None,
    sizes: Any = None,
    memory: Any = None,
    memory_cap: float | None = None,
    alpha: float = 1.0,
    base: Any = None,
    steps: int | None = None,
    tolerance: float = 2e-4,
    budget: int | None = None,
) -> BalanceResult:
    """Assign every sample to a rank.

    costs        per sample, in any unit; use lengths if work is proportional to length
    ranks        number of ranks
    counts       samples per rank. None: as even as possible
    method       `default`: swaps from the current placement, and from other starting points if that is not enough;
                 `none`, `zigzag`, `lpt`, `kk`: only that method; `variable`: counts may differ, balances costs ** alpha
    home         current rank of each sample. None: contiguous blocks, rank 0 first
    sizes        bytes per sample; moving fewer is better. None: 1 each
    memory       bytes that each sample needs during training; requires `memory_cap`, the limit per rank
    base, steps  ignored: they belong to the deprecated method `local`, which is now the same as the default
    tolerance    assignments whose largest loads differ by less than this share are equal; the one that moves the fewest
                 bytes wins
    budget       number of operations for the default's swaps. None: as many as take a few milliseconds
    """
    if method == "local":
        _say_that_local_is_deprecated()
        method = "default"
    if method not in METHODS:
        raise BalanceError(f"freescale: balance method must be one of {', '.join(METHODS)}; found {method!r}")
    costs = integer_problem.checked_numbers("costs", costs, None)
    problem = integer_problem.make_problem(costs, ranks, counts, home, sizes, memory, memory_cap)
    if method == "none":
        partition = _unmoved(problem, counts_given=counts is not None)
    elif method == "variable":
        partition = _variable(problem, costs, alpha, StopCriteria(problem, tolerance, budget))
    elif method == "default":
        partition, start = _default(problem, StopCriteria(problem, tolerance, budget))
        method = f"default ({start})"
    else:
        partition = _plain(method, problem, tolerance, budget)
    return make_result(problem, costs, partition.sample_ranks(), method)


@cache
def _say_that_local_is_deprecated() -> None:
    log.warning("the balance method 'local' is deprecated, and will be an error in the next release; using 'default'")


def _unmoved(problem: Problem, counts_given: bool) -> Partition:
    if counts_given and (np.bincount(problem.home, minlength=problem.ranks) != problem.counts).any():
        raise BalanceError("freescale: the method 'none' moves nothing, but counts differ from the current ones")
    partition = Partition(problem, problem.home)
    if not partition.fits_memory():
        assert partition.memory is not None
        raise BalanceError(
            f"freescale: the method 'none' leaves {int(partition.memory.max())} bytes of memory on a rank, above the "
            f"cap of {problem.cap}"
        )
    return partition


def _plain(method: str, problem: Problem, tolerance: float, budget: int | None) -> Partition:
    """Apply one method; swaps only if the result exceeds the memory cap."""
    partition = Partition(problem, _start(method, problem))
    if not partition.fits_memory():
        partition = fit_to_cap(partition)
        improve(partition, problem.load_lower_bound(), 0, StopCriteria(problem, tolerance, budget).budget)
    return Partition(problem, assignment.fewest_moves(problem, partition.sample_ranks()))


def _start(method: str, problem: Problem) -> np.ndarray:
    if method == "kk" and np.ptp(problem.counts) > 1:
        found = integer_problem.short_text(problem.counts)
        raise BalanceError(f"freescale: the method 'kk' requires equal counts; found {found}")
    return {"zigzag": assignment.zigzag, "lpt": assignment.lpt, "kk": assignment.kk}[method](problem)


def _default(problem: Problem, stop: StopCriteria) -> tuple[Partition, str]:
    """Swaps from the current placement; if not good enough, also from other starts. Return the best and its start."""
    candidates = _candidates(problem, stop)
    if len(problem.costs) <= _SMALL:
        least = min(int(p.loads.max(initial=0)) for p, _ in candidates)
        rank = assignment.exact(problem, least, OperationBudget(_MAX_TRIES))
        if rank is not None:
            candidates.append((Partition(problem, assignment.fewest_moves(problem, rank)), "exact"))
    if len(candidates) == 1:
        return candidates[0]
    largest = [int(p.loads.max(initial=0)) for p, _ in candidates]
    good_enough = min(largest) + stop.slack
    if not _counts_differ_at_home(problem):  # never worse than without balancing
        unbalanced = int(Partition(problem, problem.home).loads.max(initial=0))
        good_enough = min(good_enough, max(min(largest), unbalanced))
    equal = [c for c, load in zip(candidates, largest, strict=True) if load <= good_enough]
    return min(equal, key=lambda c: c[0].moved_bytes())


def _candidates(problem: Problem, stop: StopCriteria) -> list[tuple[Partition, str]]:
    """Partitions improved by swaps, each with its start's name, up to the first that is good enough."""
    candidates: list[tuple[Partition, str]] = []
    rank = assignment.stay_home(problem) if _counts_differ_at_home(problem) else problem.home
    oversized = bool(problem.costs.max(initial=0) * problem.ranks > problem.costs.sum())
    for start in ("home", "lpt", "kk"):
        if start == "kk" and np.ptp(problem.counts) > 1:
            continue
        if start != "home":
            if not stop.budget.spend(20 * len(rank)):
                break
            rank = assignment.fewest_moves(problem, _start(start, problem))
        half = OperationBudget(stop.budget.left // 2)
        stop.budget.left -= half.left
        make_room = oversized and start == "home"
        improved = assignment.make_room(problem, rank, stop.target + stop.slack) if make_room else rank
        partition, done = improve_within_cap(problem, improved, stop, half)
        stop.budget.left += half.left
        candidates.append((partition, start))
        if make_room and (partition := Partition(problem, rank)).fits_memory():
            candidates.append((partition, "none"))  # making room may have cost more than it gained
        if done:
            break
    return candidates


def _counts_differ_at_home(problem: Problem) -> bool:
    return bool((np.bincount(problem.home, minlength=problem.ranks) != problem.counts).any())


def _variable(problem: Problem, costs: np.ndarray, alpha: float, stop: StopCriteria) -> Partition:
    if not np.isfinite(alpha):
        raise BalanceError(f"freescale: alpha must be a finite number, found {alpha}")
    if alpha != 1.0:
        powers = integer_problem.checked_numbers(
            f"costs ** {alpha}", np.power(costs, alpha, where=costs > 0, out=np.zeros_like(costs)), len(costs)
        )
        problem = replace(problem, costs=integer_problem.integer_costs(powers, problem.index_bits))
    rank = assignment.lpt(problem, any_count=True)
    if not Partition(problem, rank).fits_memory():
        rank = fit_to_cap(Partition(problem, rank), any_count=True).sample_ranks()
    problem = replace(problem, counts=np.bincount(rank, minlength=problem.ranks))
    partition = Partition(problem, assignment.fewest_moves(problem, rank))
    improve(partition, problem.load_lower_bound(), stop.slack, stop.budget)
    return partition
