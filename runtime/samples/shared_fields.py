"""Which fields of a batch belong to samples, where their first size alone says so: class weights have one, too.

- Cut by sample are KeyedJaggedTensors, values with lengths, features that the model looks up, and what the user says is
  `per_sample`. What the user says is `shared` never gets here.
- A field that differs between two ranks is cut, from then on.
- A field that every rank has bit for bit the same may be either. While that is open no sample moves, which is right for
  both. When it was so in ENOUGH batches that were not the same otherwise, it is shared. If it differs after that, it is
  an error: batches may have been put together wrongly.
- Rows that are all alike may be cut: that changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples.sample_columns import Column, as_bytes
from freescale.runtime.samples.split_batch import SplitBatch

log = logging.getLogger(__name__)

ENOUGH = 3
_said: set[str] = set()


class SharedFields:
    """Of the batches of one loop. It follows from what all ranks know, so it is the same on all."""

    def __init__(self, certain: Sequence[str], says: bool = False) -> None:
        """`certain`: names of fields that are cut, and of features. `says`: what it finds goes to the log."""
        self._certain, self._says = set(certain), says
        self._cut: set[str] = set()  # have differed between ranks
        self._alike: Counter[str] = Counter()  # in how many batches they have not, while other fields have

    def is_shared(self, name: str) -> bool:
        return self._alike[name] >= ENOUGH

    def digests(self, split: SplitBatch) -> list[float]:
        """Of the columns that are not known to be cut. A float64 holds one as it is."""
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
                f"freescale: field {changed[0]!r} was the same on every rank in the first batches, so it was not cut "
                f"by sample, and differs in batch {number}. Say what it is: "
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
            (cut, "cuts by sample, as their first size says, the fields %s; BalanceOptions(shared=[...]) names others"),
            (shared, "does not cut by sample, since all ranks have the same, the fields %s; BalanceOptions(per_sample="
             "[...]) names others"),
        ):  # fmt: skip
            message = f"freescale: balance {what}" % ", ".join(map(repr, names))
            if names and message not in _said:
                _said.add(message)
                log.warning(message)


def _rows_are_alike(c: Column) -> bool:
    """Of a column with one tensor; then it makes no difference whether it is cut, if as many samples come as leave."""
    counts = c.counts()
    if c.samples < 2:
        return True
    if (counts != counts[0, 0]).any():
        return False
    (rows,) = batch_structure.to_host(c.rows)
    by_sample = as_bytes(rows).view(c.samples, -1)
    return bool(torch.eq(by_sample, by_sample[:1]).all())
