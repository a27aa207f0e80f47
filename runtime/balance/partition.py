"""A partition of the samples over ranks, stored as a matrix so that swaps.py can search all ranks at once.

A row holds a rank's samples, sorted by cost; a sample is the key `cost << index_bits | index`. Costs are integers, so
loads do not depend on summation order.
"""

from __future__ import annotations

import numpy as np

from freescale.runtime.balance.integer_problem import IntArray, Problem

EMPTY = np.iinfo(np.int64).max  # an empty cell: row length is the largest count


class Partition:
    """The samples of each rank. Swaps update `keys`, `loads` and `memory`."""

    def __init__(self, problem: Problem, rank: IntArray) -> None:
        self.problem = problem
        self.counts = np.bincount(rank, minlength=problem.ranks)
        width = max(int(self.counts.max(initial=0)), 1)
        keys = (problem.costs << problem.index_bits) | np.arange(len(rank))
        self.keys = np.full((problem.ranks, width), EMPTY)
        if len(rank) == self.keys.size and (rank[:-1] <= rank[1:]).all():
            self.keys[:] = keys.reshape(self.keys.shape)
        else:
            order = np.argsort(rank, kind="stable")
            start = np.cumsum(self.counts) - self.counts
            self.keys[rank[order], np.arange(len(rank)) - start[rank[order]]] = keys[order]
        self.keys.sort(axis=1)
        self.loads = np.where(self.keys == EMPTY, 0, self.keys >> problem.index_bits).sum(1)
        self.memory = None if problem.memory is None else self.sums(problem.memory)

    def _filled_cells(self) -> tuple[IntArray, IntArray]:
        """Sample and rank of every filled cell, ordered by rank."""
        row = np.repeat(np.arange(len(self.counts)), self.counts)
        keys = self.keys.ravel() if len(row) == self.keys.size else self.keys[self.keys != EMPTY]
        return keys & ((1 << self.problem.index_bits) - 1), row

    def sample_ranks(self) -> IntArray:
        """The rank of each sample."""
        sample, row = self._filled_cells()
        rank = np.empty(len(sample), np.int64)
        rank[sample] = row
        return rank

    def sums(self, values: IntArray) -> IntArray:
        """Per-rank sums of per-sample `values`."""
        sample = np.where(self.keys == EMPTY, len(values), self.keys & ((1 << self.problem.index_bits) - 1))
        return np.append(values, 0)[sample].sum(1)

    def moved_bytes(self) -> int:
        """Bytes of the samples that are not on their home rank."""
        sample, row = self._filled_cells()
        return int(self.problem.sizes[sample][self.problem.home[sample] != row].sum())

    def fits_memory(self) -> bool:
        return self.memory is None or bool((self.memory <= self.problem.cap).all())

    def swap(self, rows: IntArray, columns: IntArray, other_rows: IntArray, other_columns: IntArray) -> None:
        """Swap cells; each cell may occur only once."""
        bits, mask = self.problem.index_bits, (1 << self.problem.index_bits) - 1
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
        self.keys[touched] = np.sort(self.keys[touched], axis=1, kind="stable")  # stable is faster: nearly sorted
