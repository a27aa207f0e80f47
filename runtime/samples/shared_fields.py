"""Decide which fields of a batch are per sample. The first dimension alone is ambiguous: class weights have one too.

- Always split: KeyedJaggedTensors, values with lengths, features that the model looks up, `per_sample` fields, and a
  field that has differed between two ranks.
- A field that is bit-identical on all ranks may be either. While undecided, no sample moves, which is correct for both.
  After ENOUGH such batches that differ in other fields, it is shared. If it differs later, that is an error.
- A field with identical rows may be split: this changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples.sample_columns import Column, as_bytes
from freescale.runtime.samples.split_batch import SplitBatch

log = logging.getLogger(__name__)

ENOUGH = 3
_warn_once = cache(log.warning)


class SharedFields:
    """State for the batches of one loop. Derived from data known to all ranks, so it is the same on all."""

    def __init__(self, certain: Sequence[str], says: bool = False) -> None:
        """`certain`: names of fields and features that are split. `says`: log the decisions."""
        self._certain, self._says = set(certain), says
        self._cut: set[str] = set()  # differed between ranks
        self._alike: Counter[str] = Counter()  # in how many batches they were identical while other fields differed

    def is_shared(self, name: str) -> bool:
        return self._alike[name] >= ENOUGH

    def digests(self, split: SplitBatch) -> list[float]:
        """Digests of the columns that are not known to be split. Each fits exactly into a float64."""
        columns = self._open_columns(split)
        rows = iter(batch_structure.to_host([r for c in columns for r in c.rows]))
        found = []
        for c in columns:
            hashed = hashlib.blake2b(c.counts().tobytes(), digest_size=6)
            for _ in c.rows:
                hashed.update(as_bytes(next(rows)).numpy().data)
            found.append(float(int.from_bytes(hashed.digest(), "big")))
        return found

    def may_move(self, number: int, split: SplitBatch, digests: np.ndarray) -> bool:
        """Whether samples of this batch may move. `digests`: of all ranks, [ranks, columns]."""
        columns = self._open_columns(split)
        differ = dict(zip((c.name for c in columns), (digests != digests[0]).any(0).tolist(), strict=True))
        if changed := [name for name, d in differ.items() if d and self.is_shared(name)]:
            raise BalanceError(
                f"freescale: field {changed[0]!r} was the same on every rank in the first batches, so it was not split "
                f"by sample, but it differs in batch {number}. Specify "
                f"BalanceOptions(per_sample=[{changed[0]!r}]) or BalanceOptions(shared=[{changed[0]!r}])"
            )
        self._cut.update(name for name, d in differ.items() if d)
        candidates = [c for c in columns if not (differ[c.name] or self._is_certain(c) or _rows_are_alike(c))]
        if self._cut:
            self._alike.update(c.name for c in candidates)
        if self._says:
            self._say_once([c for c in columns if differ[c.name]], candidates)
        return all(self.is_shared(c.name) for c in candidates)

    def _open_columns(self, split: SplitBatch) -> list[Column]:
        return [c for c in split.columns if c.name not in self._cut]

    def _is_certain(self, c: Column) -> bool:
        return c.is_jagged or c.name in self._certain or not self._certain.isdisjoint(c.keys)

    def _say_once(self, differing: Sequence[Column], candidates: Sequence[Column]) -> None:
        cut = [c.name for c in differing if not self._is_certain(c)]
        shared = [c.name for c in candidates if self._alike[c.name] == ENOUGH]
        for names, what in (
            (cut, "splits these fields by sample, because of their first dimension: %s; override with "
                  "BalanceOptions(shared=[...])"),
            (shared, "does not split these fields by sample, because all ranks have the same values: %s; override with "
                     "BalanceOptions(per_sample=[...])"),
        ):  # fmt: skip
            if names:
                _warn_once(f"freescale: balance {what}", ", ".join(map(repr, names)))


def _rows_are_alike(c: Column) -> bool:
    """For a column with one tensor. Then a split makes no difference, if the number of samples does not change."""
    counts = c.counts()
    if c.samples < 2:
        return True
    if (counts != counts[0, 0]).any():
        return False
    (rows,) = batch_structure.to_host(c.rows)
    by_sample = as_bytes(rows).view(c.samples, -1)
    return bool(torch.eq(by_sample, by_sample[:1]).all())
