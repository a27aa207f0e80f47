"""The result of `balance`: the rank of every sample, and how even the loads are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.integer_problem import Problem


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
        """The samples of one rank, in order."""
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
    """Load of each rank, and the share of time that the average rank waits for the slowest."""
    loads = np.bincount(rank, costs, minlength=ranks)
    longest = float(loads.max())
    return loads, max(0.0, 1 - float(loads.sum()) / ranks / longest) if longest else 0.0
