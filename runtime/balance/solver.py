"""`balance(costs, ranks)`: which rank gets which sample, so that all ranks have the same work.

Pure NumPy: no process group, no clock, no random numbers. Ranks that call it with the same arguments get the same
answer. It moves nothing; it does not know what a batch is. The methods are in assignment.py, the swaps in swaps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from freescale.runtime.balance import assignment
from freescale.runtime.balance.integer_problem import (
    BalanceError,
    Problem,
    checked_numbers,
    checked_whole,
    make_problem,
    shortened,
    whole_costs,
)
from freescale.runtime.balance.memory_cap import Goal, improved, repaired
from freescale.runtime.balance.swaps import Budget, Groups, improve

METHODS = ("default", "none", "zigzag", "lpt", "kk", "local", "variable")
_SMALL = 10  # samples: so few that all assignments are tried
_TRIES = 50_000  # of them, at most


@dataclass(frozen=True)
class Balanced:
    """Where every sample goes.

    rank           rank of each sample
    step           step of each sample; 0 but for the method `local`
    order          all samples, by rank, then step, then as given: the batches that the ranks should have
    counts         samples of each rank
    loss_weights   per sample. If each rank averages loss * weight over its samples and the ranks' results are averaged
                   (as DDP does), the result is the mean over all samples. All 1 if all ranks have equal counts
    loads          cost of each rank
    straggler      share of the time that the average rank waits for the slowest: 1 - mean load / largest load
    before         the same if every sample stays at home
    bound          the same if the largest load were max(mean load, longest sample): no assignment is better
    moved_bytes    bytes that leave their home rank (samples, if no sizes are given)
    oversized      samples that cost more than the mean load of a rank: nothing can balance these
    method         what made this assignment
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
        """The samples of one rank, in their order."""
        end = int(self.counts[: rank + 1].sum())
        return self.order[end - int(self.counts[rank]) : end]


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
) -> Balanced:
    """Give every sample to a rank.

    costs        of each sample, in any unit; lengths will do where the work grows with the length
    ranks        how many there are
    counts       samples of each rank. None: as equal as can be
    method       `default`: swaps from where the samples are, and the other starting points if that is not enough;
                 `none`, `zigzag`, `lpt`, `kk`: plainly these; `variable`: counts differ, costs ** alpha is balanced;
                 `local`: nothing moves, every rank combines its own base batches into steps
    home         the rank that has each sample now. None: rank 0 has the first ones, and so on
    sizes        bytes of each sample; the fewer of them move the better. None: 1 each
    memory       bytes that each sample needs while it is trained on, and `memory_cap`, what a rank has for them
    base, steps  for `local`: the base batch of each sample on its rank, and how many steps they are to become (None:
                 half as many as there are base batches)
    tolerance    assignments whose largest loads differ by less than this share are equal: the one that moves the fewest
                 bytes is taken
    budget       operations that the default may spend on improving. None: as many as take a few milliseconds
    """
    if method not in METHODS:
        raise BalanceError(f"freescale: balance knows the methods {', '.join(METHODS)}; found {method!r}")
    given = checked_numbers("costs", costs, None)
    problem = make_problem(given, ranks, counts, home, sizes, memory, memory_cap)
    if method == "local":
        return _local(problem, given, base, steps)
    if method == "none":
        if counts is not None and (np.bincount(problem.home, minlength=ranks) != problem.counts).any():
            raise BalanceError(
                "freescale: the method 'none' moves nothing, but the counts asked for are not those at home"
            )
        groups, made_by = Groups(problem, problem.home), "none"
        if not groups.fits():
            raise BalanceError(_over_cap("none", groups.memory.max(), problem.cap))
    elif method == "variable":
        groups, made_by = _variable(problem, given, alpha, Goal(problem, tolerance, budget)), "variable"
    elif method == "default":
        groups, made_by = _default(problem, Goal(problem, tolerance, budget))
    else:
        groups = Groups(problem, _start(method, problem))
        if not groups.fits():
            groups = repaired(groups)
            improve(groups, problem.target(), 0, Goal(problem, tolerance, budget).budget)
        groups, made_by = Groups(problem, assignment.fewest_moves(problem, groups.rank())), method
    return _result(problem, given, groups.rank(), made_by)


def _start(method: str, problem: Problem) -> np.ndarray:
    if method == "kk" and np.ptp(problem.counts) > 1:
        raise BalanceError(f"freescale: the method 'kk' wants equal counts; found {shortened(problem.counts)}")
    return {"zigzag": assignment.zigzag, "lpt": assignment.lpt, "kk": assignment.kk}[method](problem)


def _default(problem: Problem, good: Goal) -> tuple[Groups, str]:
    """From home by swaps; if that is not good enough, from the other starting points too; the best of them all."""
    candidates: list[tuple[Groups, str]] = []
    uneven = np.bincount(problem.home, minlength=problem.ranks) != problem.counts
    rank = assignment.at_home(problem) if uneven.any() else problem.home
    large = bool(problem.costs.max(initial=0) * problem.ranks > problem.costs.sum())
    for method in ("home", "lpt", "kk"):
        if method == "kk" and np.ptp(problem.counts) > 1:
            continue
        if method != "home":
            if not good.budget.spend(20 * len(rank)):
                break
            rank = assignment.fewest_moves(problem, _start(method, problem))
        share = Budget(good.budget.left // 2)
        good.budget.left -= share.left
        room = assignment.with_room(problem, rank, good.target + good.slack) if large and method == "home" else rank
        groups, done = improved(problem, room, good, share)
        good.budget.left += share.left
        candidates.append((groups, method))
        if large and method == "home" and (groups := Groups(problem, rank)).fits():
            candidates.append((groups, "none"))  # making room may have cost more than it brought
        if done:
            break
    if len(problem.costs) <= _SMALL:
        least = min(int(g.loads.max(initial=0)) for g, _ in candidates)
        best = assignment.exact(problem, least, Budget(_TRIES))
        if best is not None:
            candidates.append((Groups(problem, assignment.fewest_moves(problem, best)), "exact"))
    if len(candidates) == 1:
        return candidates[0][0], f"default ({candidates[0][1]})"
    largest = [int(g.loads.max(initial=0)) for g, _ in candidates]
    as_good = min(largest) + good.slack
    if not uneven.any():  # never above what no balancing gives
        as_good = min(as_good, max(min(largest), int(Groups(problem, problem.home).loads.max(initial=0))))
    equal = [c for c, load in zip(candidates, largest, strict=True) if load <= as_good]
    groups, method = min(equal, key=lambda c: c[0].moved())
    return groups, f"default ({method})"


def _variable(problem: Problem, given: np.ndarray, alpha: float, good: Goal) -> Groups:
    """Least loaded first with any counts, for costs ** alpha."""
    if not np.isfinite(alpha):
        raise BalanceError(f"freescale: alpha must be a finite number, found {alpha}")
    if alpha != 1.0:
        powers = checked_numbers(
            f"costs ** {alpha}", np.power(given, alpha, where=given > 0, out=np.zeros_like(given)), len(given)
        )
        problem = replace(problem, costs=whole_costs(powers, problem.bits))
    rank = assignment.lpt(problem, any_count=True)
    if not Groups(problem, rank).fits():
        rank = repaired(Groups(problem, rank), any_count=True).rank()
    problem = replace(problem, counts=np.bincount(rank, minlength=problem.ranks))
    groups = Groups(problem, assignment.fewest_moves(problem, rank))
    improve(groups, problem.target(), good.slack, good.budget)
    return groups


def _local(problem: Problem, given: np.ndarray, base: Any, steps: int | None) -> Balanced:
    if base is None:
        raise BalanceError("freescale: the method 'local' wants the base batch of each sample (base=...)")
    batch = checked_whole("base", base, len(given), None)
    batches = int(batch.max(initial=0)) + 1
    steps = -(-batches // 2) if steps is None else steps
    if not 1 <= steps <= batches:
        raise BalanceError(f"freescale: {batches} base batches make between 1 and {batches} steps; found steps={steps}")
    at = problem.home * batches + batch
    loads = np.bincount(at, problem.costs.astype(np.float64), minlength=problem.ranks * batches)
    step = assignment.local(loads.reshape(problem.ranks, batches), steps)[problem.home, batch]
    if problem.memory is not None:
        held = np.bincount(problem.home * steps + step, problem.memory.astype(np.float64))
        if held.max(initial=0) > problem.cap:
            raise BalanceError(_over_cap("local", held.max(), problem.cap))
    return _result(problem, given, problem.home, "local", step, batch * steps // batches, steps)


def _over_cap(method: str, held: float, cap: int) -> str:
    return f"freescale: the method {method!r} leaves {int(held)} bytes of memory on a rank, above the cap of {cap}"


def _result(
    problem: Problem,
    given: np.ndarray,
    rank: np.ndarray,
    method: str,
    step: np.ndarray | None = None,
    was: np.ndarray | None = None,
    steps: int = 1,
) -> Balanced:
    """`step` of each sample, and what it `was` before; None: all in one."""
    ranks, samples = problem.ranks, len(given)
    now = np.zeros(samples, np.int64) if step is None else step
    total = float(given.sum())
    loads, straggler = _straggler(given, rank, now, ranks, steps)
    before = _straggler(given, problem.home, now if was is None else was, ranks, steps)[1]
    bound = max(total / ranks, float(given.max(initial=0.0)))
    at = rank if step is None else now * ranks + rank
    members = np.bincount(at, minlength=steps * ranks)
    weights = (members * np.repeat(ranks / np.maximum(members.reshape(steps, ranks).sum(1), 1), ranks))[at]
    order = np.argsort(rank if step is None else rank * steps + step, kind="stable")
    return Balanced(
        rank=rank, step=now, order=order, counts=np.bincount(rank, minlength=ranks), loss_weights=weights, loads=loads,
        straggler=straggler, before=before, bound=1 - total / ranks / bound if bound else 0.0,
        moved_bytes=int(problem.sizes[rank != problem.home].sum()),
        oversized=np.flatnonzero(given > total / ranks) if ranks > 1 else np.zeros(0, np.int64), method=method,
    )  # fmt: skip


def _straggler(
    costs: np.ndarray, rank: np.ndarray, step: np.ndarray, ranks: int, steps: int
) -> tuple[np.ndarray, float]:
    """Load of each rank, and the share of the time that the average rank waits for the slowest, step by step."""
    loads = np.bincount(step * ranks + rank, costs, minlength=steps * ranks).reshape(steps, ranks)
    longest = float(loads.max(1).sum())
    return loads.sum(0), max(0.0, 1 - float(loads.sum()) / ranks / longest) if longest else 0.0
