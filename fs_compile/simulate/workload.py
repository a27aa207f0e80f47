"""Batches for many ranks: history lengths, and the ids that belong to the planned owners. A pure function of the seed.

Generated ids follow Zipf's law over one large table, with the exponent at which a given share of a rank's unique rows
was used by any rank in the previous batch. Planning every id of 256 ranks takes too long, so only ids of some owners'
rows are drawn, for all ranks and with their true frequency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from freescale.runtime.samples.sample_columns import spans
from freescale.simulate.cluster import InputError

_SCATTER = 2654435761  # a prime: rows of similar popularity have different owners
_HOT, _GRID = 4096, 512  # in `colliding_share`: rows counted individually, and intervals for the others


@dataclass(frozen=True)
class Workload:
    ranks: int = 256
    batch: int = 128  # samples per rank
    median: float = 1000.0  # of the lognormal history lengths
    sigma: float = 1.0
    cap: int = 21_000
    collision: float = 0.12
    rows: int = 1_000_000_000  # of the table
    seed: int = 0


class Batch(NamedTuple):
    """All ranks: samples ordered by rank, and the planned ids of each."""

    values: np.ndarray  # [ranks * batch] ids per sample
    counts: np.ndarray  # [ranks * batch] planned ids per sample
    ids: np.ndarray  # [sum of counts]


def _random(seed: int, step: int, what: int) -> np.random.Generator:
    return np.random.default_rng([seed, step, what])


class Generated:
    """Lognormal lengths, Zipf ids."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        candidates = workload.ranks * workload.batch
        values = candidates + float(np.mean([self.lengths(step).sum() for step in range(3)]))
        self.exponent = exponent_for(workload.collision, workload.rows, values / workload.ranks, values)

    def lengths(self, step: int) -> np.ndarray:
        w = self.workload
        drawn = _random(w.seed, step, 0).lognormal(math.log(w.median), w.sigma, w.ranks * w.batch)
        return np.clip(np.rint(drawn), 1, w.cap).astype(np.int64)

    def batch(self, step: int, owners: int) -> Batch:
        """With the ids of the first `owners` owners."""
        w, random, lengths = self.workload, _random(self.workload.seed, step, 1), self.lengths(step)
        values = lengths + 1  # a history and its candidate
        counts = values if owners == w.ranks else random.binomial(values, owners / w.ranks)
        popularity = zipf(random, int(counts.sum()), w.rows, self.exponent)
        block = -(-w.rows // w.ranks)
        mine = min(block * owners, w.rows)  # rows of these owners: every (ranks / owners)th by popularity
        ids = (popularity * owners // w.ranks) * _SCATTER % mine
        return Batch(values, counts, ids)


class Recorded:
    """Histories from a file: `lengths` of samples and their concatenated `ids`. Samples are drawn from it."""

    def __init__(self, workload: Workload, path: Path) -> None:
        self._lengths, ids = _read_histories(path)
        self._ends = np.cumsum(self._lengths)
        rows = int(ids.max(initial=0)) + 1
        self.workload = Workload(**{**workload.__dict__, "rows": rows, "collision": math.nan})
        # Spread over owners regardless of the file's row order.
        self._ids = np.random.default_rng([workload.seed, 7]).permutation(rows)[ids]

    def _samples(self, step: int) -> np.ndarray:
        w = self.workload
        return _random(w.seed, step, 0).integers(0, len(self._lengths), w.ranks * w.batch)

    def lengths(self, step: int) -> np.ndarray:
        return np.minimum(self._lengths[self._samples(step)], self.workload.cap)

    def batch(self, step: int, owners: int) -> Batch:
        samples, lengths = self._samples(step), self.lengths(step)
        ids = self._ids[spans(self._ends[samples] - lengths, lengths)]  # the end of a long history
        planned = ids < -(-self.workload.rows // self.workload.ranks) * owners
        sample = np.repeat(np.arange(len(lengths)), lengths)
        return Batch(lengths, np.bincount(sample[planned], minlength=len(lengths)), ids[planned])


Source = Generated | Recorded


def _read_histories(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path) as file:
            found = {name: file[name] for name in ("lengths", "ids") if name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: cannot read the histories as .npz: {error}") from None
    for name in ("lengths", "ids"):
        if name not in found:
            raise InputError(f"{path}: the array {name} is missing; histories consist of `lengths` and `ids`")
        array = found[name]
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array) or array.min() < 0:
            raise InputError(f"{path}: {name} must be a nonempty 1-D array of non-negative integers")
    if int(found["lengths"].sum()) != len(found["ids"]):
        total = int(found["lengths"].sum())
        raise InputError(f"{path}: lengths add up to {total}, but there are {len(found['ids'])} ids")
    return found["lengths"].astype(np.int64), found["ids"].astype(np.int64)


def zipf(random: np.random.Generator, count: int, rows: int, exponent: float) -> np.ndarray:
    """Popularity ranks from 0, by the inverse of the continuous distribution."""
    u, power = random.random(count), 1.0 - exponent
    x = float(rows) ** u if abs(power) < 1e-6 else ((float(rows) ** power - 1) * u + 1) ** (1 / power)
    return np.clip(x.astype(np.int64) - 1, 0, rows - 1)


def colliding_share(exponent: float, rows: int, mine: float, everyone: float) -> float:
    """Expected share of a rank's unique rows that any rank used in the previous batch; a rank looks up `mine`
    values."""
    edges = np.arange(min(_HOT, rows) + 1, dtype=np.float64)
    if rows > _HOT:
        edges = np.concatenate([edges[:-1], np.geomspace(_HOT, rows, _GRID)])
    power = 1.0 - exponent
    cumulative = np.log1p(edges) / math.log1p(rows) if abs(power) < 1e-6 else (
        ((edges + 1) ** power - 1) / ((rows + 1.0) ** power - 1)
    )
    n = np.diff(edges)
    p = np.diff(cumulative) / n
    unique = -np.expm1(-mine * p) * n
    return float((unique * -np.expm1(-everyone * p)).sum() / unique.sum())


def exponent_for(share: float, rows: int, mine: float, everyone: float) -> float:
    """The exponent at which `share` of the rows collide, or the closest possible."""
    low, high = 0.0, 2.0
    least, most = (colliding_share(e, rows, mine, everyone) for e in (low, high))
    if not least < share < most:
        return low if share <= least else high
    for _ in range(40):
        middle = (low + high) / 2
        if colliding_share(middle, rows, mine, everyone) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
