"""Improve a start by swaps within a cap on the memory of every rank.

The cap is never broken: if a start breaks it, memory is balanced first, from several starting points, and by trying all
assignments where there are few. If nothing helps, the error says what is missing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freescale.runtime.balance import assignment
from freescale.runtime.balance.integer_problem import ROOM, BalanceError, Problem
from freescale.runtime.balance.swaps import Budget, Groups, improve

_TRIES = 50_000  # of an exhaustive search, about 0.2 seconds


class Goal:
    """What is good enough, and what may be spent to get there."""

    def __init__(self, problem: Problem, tolerance: float, budget: int | None) -> None:
        if not 0 <= tolerance < 1:
            raise BalanceError(
                f"freescale: the tolerance is a share of the load, at least 0 and below 1; found {tolerance}"
            )
        if budget is not None and budget < 0:
            raise BalanceError(f"freescale: the budget is a number of operations, at least 0; found {budget}")
        self.target = problem.target()
        self.slack = int(self.target * tolerance)
        usual = max(250_000, 40 * len(problem.costs)) * (1 if problem.memory is None else 4)
        self.budget = Budget(usual if budget is None else budget)


def improved(problem: Problem, rank: np.ndarray, good: Goal, budget: Budget) -> tuple[Groups, bool]:
    """The start after swaps, within the memory cap, and whether that is good enough."""
    if problem.memory is None:
        groups = Groups(problem, rank)
        return groups, improve(groups, good.target, good.slack, budget)
    groups = repaired(Groups(problem, rank))
    half = Budget(budget.left // 2)
    budget.left -= half.left
    done = improve(groups, good.target, good.slack, half)
    budget.left += half.left
    if done:
        return groups, True
    free = Groups(replace(problem, memory=None), rank)
    improve(free, good.target, good.slack, budget)
    trimmed = _trimmed(Groups(problem, free.rank()), good, budget)
    if trimmed is None:
        return groups, False
    done = improve(trimmed, good.target, good.slack, budget)
    return (trimmed, done) if trimmed.loads.max() < groups.loads.max() else (groups, False)


def _trimmed(groups: Groups, good: Goal, budget: Budget) -> Groups | None:
    """Bring balanced groups below the memory cap, with swaps that cost little balance; None if that does not succeed.

    Where cost grows faster than memory, long samples decide the cost and short ones can still even out the memory.
    """
    problem = groups.problem
    by_memory, _ = _by_memory(problem)
    for more in (0.02, 0.1, 0.3):
        if groups.fits():
            return groups
        cost_cap = max(int(good.target * (1 + more)) + good.slack, int(groups.loads.max()))
        tried = Groups(replace(by_memory, memory=problem.costs, cap=cost_cap), groups.rank())
        improve(tried, by_memory.cap, 0, budget)
        groups = Groups(problem, tried.rank())
    return groups if groups.fits() else None


def _by_memory(problem: Problem) -> tuple[Problem, int]:
    """The problem of balancing memory instead of cost, in units of so many bytes."""
    assert problem.memory is not None
    scale = max(0, int(problem.memory.sum()).bit_length() - (ROOM - problem.bits))
    return replace(problem, costs=-(-problem.memory >> scale), memory=None, cap=problem.cap >> scale), 1 << scale


def repaired(groups: Groups, *, any_count: bool = False) -> Groups:
    """Groups that keep the memory cap, near the given ones; an error with the numbers if there are none."""
    problem = groups.problem
    if groups.fits():
        return groups
    assert problem.memory is not None
    by_memory, unit = _by_memory(problem)
    if any_count:
        by_memory = replace(by_memory, counts=np.ones_like(problem.counts))  # no company that the largest must have
    least = by_memory.target()
    held = int(groups.memory.max())
    numbers = f"all samples need {int(problem.memory.sum())} bytes, the largest {int(problem.memory.max())}"
    if least > by_memory.cap:
        raise BalanceError(
            f"freescale: no assignment keeps {problem.ranks} ranks within the memory cap of {problem.cap} bytes each: "
            f"{numbers}, and with these counts some rank needs at least {least * unit}"
        )
    starts = [
        lambda: groups.rank(),
        lambda: problem.home if any_count else assignment.at_home(problem),
        lambda: assignment.lpt(by_memory, any_count=any_count),
    ]
    if not any_count and np.ptp(problem.counts) <= 1:
        starts.append(lambda: assignment.kk(by_memory))
    for start in starts:
        tried = Groups(by_memory, start())
        if improve(tried, by_memory.cap, 0, Budget(max(1_000_000, 100 * len(problem.costs)))):
            return Groups(_counted(problem, tried.rank()), tried.rank())
        held = min(held, int(tried.loads.max()) * unit)
    search = Budget(_TRIES)
    found = assignment.exact(by_memory, by_memory.cap + 1, search, any_count=any_count, first=True)
    if found is not None:
        return Groups(_counted(problem, found), found)
    what = "no assignment keeps" if search.left else f"found no assignment in {_TRIES} tries that keeps"
    raise BalanceError(
        f"freescale: {what} {problem.ranks} ranks within the memory cap of {problem.cap} bytes each: {numbers}; "
        f"the best one needs {held} on a rank"
    )


def _counted(problem: Problem, rank: np.ndarray) -> Problem:
    return replace(problem, counts=np.bincount(rank, minlength=problem.ranks))
