"""Which rank trains which samples, with and without the package's balancer, and how long each rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.runtime.balance.sample_cost import FittedCost
from freescale.runtime.balance.solver import balance
from freescale.simulate.cluster import Cluster
from freescale.simulate.workload import Source

FITTING_STEPS = 12  # steps before the first simulated one, to fit the balancer's cost
PLANNED_AHEAD = 2  # a batch is balanced this many steps before its own times are known
ID_BYTES = 8


@dataclass(frozen=True)
class Assignment:
    """One batch of all ranks."""

    order: np.ndarray  # samples, ordered by rank
    per_rank: np.ndarray  # samples per rank
    seconds: np.ndarray  # [ranks, 2] of compute: proportional to tokens, and to squared tokens
    moved_bytes: float  # moved to another rank, over all ranks


class Assigner:
    def __init__(self, source: Source, cluster: Cluster, balanced: bool) -> None:
        self.source, self.cluster, self.balanced = source, cluster, balanced
        self._cost = FittedCost()
        self._measured: list[tuple[np.ndarray, np.ndarray]] = []
        for step in range(-FITTING_STEPS, 0) if balanced else ():
            self.assign(step)

    def assign(self, step: int) -> Assignment:
        w, lengths, moved = self.source.workload, self.source.lengths(_seed_of(step)), 0.0
        order, per_rank = np.arange(len(lengths)), np.full(w.ranks, w.batch)
        if self.balanced:
            if len(self._measured) >= PLANNED_AHEAD:
                self._cost.observe(*self._measured.pop(0))
            sizes = lengths * ID_BYTES
            found = balance(self._cost(lengths), w.ranks, home=np.repeat(np.arange(w.ranks), w.batch), sizes=sizes)
            order, per_rank, moved = found.order, found.counts, float(found.moved_bytes)
        tokens, squares = self._sums(lengths[order], per_rank)
        seconds = self._seconds(tokens, squares, step)
        if self.balanced:
            self._measured.append((np.column_stack([tokens, squares]), seconds.sum(1)))
        return Assignment(order, per_rank, seconds, moved)

    def _sums(self, lengths: np.ndarray, per_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of_rank = np.repeat(np.arange(len(per_rank)), per_rank)
        length = lengths.astype(np.float64)
        tokens, squares = (np.bincount(of_rank, x, minlength=len(per_rank)) for x in (length, length * length))
        return tokens, squares

    def _seconds(self, tokens: np.ndarray, squares: np.ndarray, step: int) -> np.ndarray:
        c = self.cluster
        random = np.random.default_rng([self.source.workload.seed, _seed_of(step), 2])
        slower = np.maximum(1 + c.jitter * random.standard_normal(len(tokens)), 0.1)
        return np.column_stack([tokens * c.seconds_per_token, squares * c.seconds_per_token_squared]) * slower[:, None]


def _seed_of(step: int) -> int:
    """A seed per step; fitting steps do not share seeds with simulated ones."""
    return step if step >= 0 else 1_000_000 - step


def with_host_time(seconds: np.ndarray, host_seconds: float) -> np.ndarray:
    """Scale up compute that takes less time than the host needs for its launches."""
    total = np.maximum(seconds.sum(-1, keepdims=True), 1e-12)
    return seconds * np.maximum(host_seconds / total, 1.0)
