"""Improve an assignment by swaps within a memory cap per rank, which always holds: if the starting assignment exceeds
it, memory is balanced first, from several starting points, and by exhaustive search for small problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freescale.runtime.balance import assignment
from freescale.runtime.balance.integer_problem import KEY_BITS, BalanceError, Problem
from freescale.runtime.balance.swaps import OperationBudget, Partition, improve

_MAX_TRIES = 50_000  # of an exhaustive search, about 0.2 seconds


class StopCriteria:
    """The largest load that is good enough (`target` + `slack`), and the operations to spend on it (`budget`)."""

    def __init__(self, problem: Problem, tolerance: float, budget: int | None) -> None:
        if not 0 <= tolerance < 1:
            raise BalanceError(
                f"freescale: tolerance must be a share of the load, at least 0 and below 1; found {tolerance}"
            )
        if budget is not None and budget < 0:
            raise BalanceError(f"freescale: budget must be a number of operations, at least 0; found {budget}")
        self.target = problem.load_lower_bound()
        self.slack = int(self.target * tolerance)
        default = max(250_000, 40 * len(problem.costs)) * (1 if problem.memory is None else 4)
        self.budget = OperationBudget(default if budget is None else budget)


def improve_within_cap(
    problem: Problem, rank: np.ndarray, stop: StopCriteria, budget: OperationBudget
) -> tuple[Partition, bool]:
    """Improve the assignment `rank` by swaps within the memory cap. Also return whether it is good enough."""
    if problem.memory is None:
        partition = Partition(problem, rank)
        return partition, improve(partition, stop.target, stop.slack, budget)
    partition = fit_to_cap(Partition(problem, rank))
    half = OperationBudget(budget.left // 2)
    budget.left -= half.left
    done = improve(partition, stop.target, stop.slack, half)
    budget.left += half.left
    if done:
        return partition, True
    uncapped = Partition(replace(problem, memory=None), rank)
    improve(uncapped, stop.target, stop.slack, budget)
    lowered = _lower_memory(Partition(problem, uncapped.sample_ranks()), stop, budget)
    if lowered is None:
        return partition, False
    done = improve(lowered, stop.target, stop.slack, budget)
    return (lowered, done) if lowered.loads.max() < partition.loads.max() else (partition, False)


def _lower_memory(partition: Partition, stop: StopCriteria, budget: OperationBudget) -> Partition | None:
    """Bring a balanced partition below the memory cap with swaps that cost little balance; None on failure. (If cost
    grows faster than memory, long samples determine the cost and short ones can still even out memory.)"""
    problem = partition.problem
    by_memory, _ = _memory_problem(problem)
    for allowance in (0.02, 0.1, 0.3):
        if partition.fits_memory():
            return partition
        cost_cap = max(int(stop.target * (1 + allowance)) + stop.slack, int(partition.loads.max()))
        tried = Partition(replace(by_memory, memory=problem.costs, cap=cost_cap), partition.sample_ranks())
        improve(tried, by_memory.cap, 0, budget)
        partition = Partition(problem, tried.sample_ranks())
    return partition if partition.fits_memory() else None


def _memory_problem(problem: Problem) -> tuple[Problem, int]:
    """The problem of balancing memory instead of cost, and its unit in bytes."""
    assert problem.memory is not None
    scale = max(0, int(problem.memory.sum()).bit_length() - (KEY_BITS - problem.index_bits))
    return replace(problem, costs=-(-problem.memory >> scale), memory=None, cap=problem.cap >> scale), 1 << scale


def fit_to_cap(partition: Partition, *, any_count: bool = False) -> Partition:
    """A partition within the memory cap, close to the given one. Raises if there is none."""
    problem = partition.problem
    if partition.fits_memory():
        return partition
    assert problem.memory is not None and partition.memory is not None
    by_memory, unit = _memory_problem(problem)
    if any_count:
        by_memory = replace(by_memory, counts=np.ones_like(problem.counts))  # the largest sample may be alone
    least = by_memory.load_lower_bound()
    held = int(partition.memory.max())
    numbers = f"all samples need {int(problem.memory.sum())} bytes, the largest {int(problem.memory.max())}"
    if least > by_memory.cap:
        raise BalanceError(
            f"freescale: no assignment keeps {problem.ranks} ranks within the memory cap of {problem.cap} bytes each: "
            f"{numbers}, and these counts require at least {least * unit} on one rank"
        )
    starts = [
        lambda: partition.sample_ranks(),
        lambda: problem.home if any_count else assignment.stay_home(problem),
        lambda: assignment.lpt(by_memory, any_count=any_count),
    ]
    if not any_count and np.ptp(problem.counts) <= 1:
        starts.append(lambda: assignment.kk(by_memory))
    for start in starts:
        tried = Partition(by_memory, start())
        if improve(tried, by_memory.cap, 0, OperationBudget(max(1_000_000, 100 * len(problem.costs)))):
            return Partition(_with_counts_of(problem, tried.sample_ranks()), tried.sample_ranks())
        held = min(held, int(tried.loads.max()) * unit)
    tries = OperationBudget(_MAX_TRIES)
    rank = assignment.exact(by_memory, by_memory.cap + 1, tries, any_count=any_count, any_below=True)
    if rank is not None:
        return Partition(_with_counts_of(problem, rank), rank)
    outcome = "no assignment keeps" if tries.left else f"found no assignment in {_MAX_TRIES} tries that keeps"
    raise BalanceError(
        f"freescale: {outcome} {problem.ranks} ranks within the memory cap of {problem.cap} bytes each: {numbers}; "
        f"the best found needs {held} on one rank"
    )


def _with_counts_of(problem: Problem, rank: np.ndarray) -> Problem:
    return replace(problem, counts=np.bincount(rank, minlength=problem.ranks))
