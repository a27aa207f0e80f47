"""Count the rows that ranks share with the previous and the next batch, for all ranks in one process. Only rows of some
owners are drawn, see workload.py; a rank's counts are scaled to all of its ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freescale.runtime.samples.sample_columns import spans
from freescale.simulate.workload import Batch


class Counts(NamedTuple):
    """One batch on every rank, [ranks] each; rows and values over all owners."""

    values: np.ndarray  # looked up
    unique: np.ndarray  # rows
    urgent: np.ndarray  # rows that are also in the previous batch
    urgent_values: np.ndarray  # values of these rows
    urgent_gradients: np.ndarray  # rows that are also in the next batch
    urgent_gradient_values: np.ndarray


class _Requests(NamedTuple):
    """One batch: all pairs of a row and a requesting rank, in ascending order."""

    row: np.ndarray
    rank: np.ndarray
    values: np.ndarray  # number of the rank's values that have this row
    scale: np.ndarray  # [ranks] all ids / drawn ids

    def totals(self, chosen: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Rows and values per rank among the chosen pairs."""
        rank, ranks = self.rank[chosen], len(self.scale)
        rows, values = (np.bincount(rank, of_each, ranks) for of_each in (None, self.values[chosen]))
        return rows * self.scale, values * self.scale

    def also_in(self, other: _Requests) -> np.ndarray:
        """Whether any rank requests the row in the other batch."""
        return np.append(other.row, -1)[np.searchsorted(other.row, self.row)] == self.row


class CollisionCounter:
    def __init__(self) -> None:
        self._batch: _Requests | None = None  # the last batch, and its counts so far
        self._known: tuple[np.ndarray, ...] = ()

    def count(self, batch: Batch, order: np.ndarray, per_rank: np.ndarray) -> Counts | None:
        """`order`: samples by rank, `per_rank` each. Returns the counts of the previous batch, now complete."""
        before, self._batch = self._batch, (now := _requests(batch, order, per_rank))
        complete = None if before is None else Counts._make((*self._known, *before.totals(before.also_in(now))))
        rows, values = now.totals()
        self._known = values, rows, *((rows, values) if before is None else now.totals(now.also_in(before)))
        return complete

    def last(self) -> Counts:
        """Counts of the last batch: all of its gradients are urgent."""
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
