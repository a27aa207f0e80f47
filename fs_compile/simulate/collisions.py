"""Which rows the ranks share with the batch before and the batch after, counted for all ranks in one process.

tests/simulate/test_collisions.py compares the counts with those of the planner. Only some owners' rows are drawn
(workload.py says which); the counts of a rank are scaled to all of its ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freescale.simulate.workload import Batch, spans


class Counts(NamedTuple):
    """One batch on every rank, [ranks] each; rows and values of all owners."""

    values: np.ndarray  # looked up
    unique: np.ndarray  # rows
    urgent: np.ndarray  # rows that the batch before has, too
    urgent_values: np.ndarray  # values of these
    urgent_gradients: np.ndarray  # rows that the batch after has, too
    urgent_gradient_values: np.ndarray


class _Requests(NamedTuple):
    """One batch: each pair of a row and a rank that requests it, in ascending order."""

    row: np.ndarray
    rank: np.ndarray
    values: np.ndarray  # of the rank that have this row
    scale: np.ndarray  # [ranks] all ids over those that are drawn

    def totals(self, chosen: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Rows and values of each rank among the chosen pairs."""
        rank, ranks = self.rank[chosen], len(self.scale)
        rows, values = (np.bincount(rank, of_each, ranks) for of_each in (None, self.values[chosen]))
        return rows * self.scale, values * self.scale

    def also_in(self, other: _Requests) -> np.ndarray:
        """Whether any rank requests the row in the other batch."""
        return np.append(other.row, -1)[np.searchsorted(other.row, self.row)] == self.row


class CollisionCounter:
    """Counts batch after batch."""

    def __init__(self) -> None:
        self._batch: _Requests | None = None  # the last one, and what is known of it
        self._known: tuple[np.ndarray, ...] = ()

    def count(self, batch: Batch, order: np.ndarray, per_rank: np.ndarray) -> Counts | None:
        """`order`: samples rank by rank, `per_rank` of them each. Returns the batch before, which is complete now."""
        before, self._batch = self._batch, (now := _requests(batch, order, per_rank))
        complete = None if before is None else Counts._make((*self._known, *before.totals(before.also_in(now))))
        rows, values = now.totals()
        self._known = values, rows, *((rows, values) if before is None else now.totals(now.also_in(before)))
        return complete

    def last(self) -> Counts:
        """The last batch: all of its gradients are urgent."""
        assert self._batch is not None
        return Counts._make((*self._known, *self._batch.totals()))


def _requests(batch: Batch, order: np.ndarray, per_rank: np.ndarray) -> _Requests:
    def sum_per_rank(of_samples: np.ndarray) -> np.ndarray:
        rank = np.repeat(np.arange(len(per_rank)), per_rank)
        return np.bincount(rank, of_samples[order], len(per_rank)).astype(np.int64)

    drawn, bits = sum_per_rank(batch.counts), len(per_rank).bit_length()
    pairs = batch.ids[spans((np.cumsum(batch.counts) - batch.counts)[order], batch.counts[order])] << bits
    pairs |= np.repeat(np.arange(len(per_rank)), drawn)
    pairs.sort()
    first = np.flatnonzero(np.diff(pairs, prepend=-1))
    values, pairs = np.diff(first, append=len(pairs)), pairs[first]
    scale = sum_per_rank(batch.values) / np.maximum(drawn, 1)
    return _Requests(pairs >> bits, pairs & ((1 << bits) - 1), values, scale)
