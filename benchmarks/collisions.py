"""Batches whose collision rate is chosen: which rows consecutive batches share, and how often a batch repeats a row.

    python benchmarks/collisions.py [--quick] [--json FILE]

prints what the batches that the other benchmarks draw turn out to be.

All ranks' rows of a batch are drawn together, so a share of exactly `collision` of a batch's unique rows was used in
the batch before, by any rank, and no rank's rows are another's. Every row of a batch occurs at least once; the other
occurrences follow Zipf's law, until there are `duplication` values for each unique row. Samples, history lengths and
unique rows are the same on every rank, so no rank waits because another one has more to do.

Pure functions of their arguments; NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from command_line import parser


@dataclass(frozen=True)
class Shape:
    """What a batch of one rank looks like."""

    samples: int
    length: int  # of every history; a sample has one candidate on top
    table_rows: int
    duplication: float = 2.0  # values per unique row
    zipf: float = 0.8

    @property
    def values(self) -> int:
        return self.samples * (self.length + 1)

    @property
    def unique(self) -> int:
        return round(self.values / self.duplication)


def unique_rows(shape: Shape, ranks: int, collision: float, batches: int, seed: int) -> Iterator[np.ndarray]:
    """For each batch the rows of every rank, [ranks, unique]: all different, `collision` of them in the one before."""
    need = ranks * shape.unique
    if 2 * need > shape.table_rows:
        raise ValueError(
            f"freescale: two batches of {need} unique rows do not fit into a table of {shape.table_rows} rows"
        )
    rng = np.random.default_rng([seed, round(collision * 1e6)])
    before = rng.choice(shape.table_rows, need, replace=False)
    for _ in range(batches):
        again = round(collision * need)
        old = rng.choice(before, again, replace=False)
        unused = np.ones(shape.table_rows, dtype=bool)
        unused[before] = False
        new = rng.choice(np.flatnonzero(unused), need - again, replace=False)
        rows = rng.permutation(np.concatenate([old, new]))
        yield rows.reshape(ranks, shape.unique)
        before = rows


def values_of(rows: np.ndarray, shape: Shape, seed: int) -> np.ndarray:
    """The ids of one rank's batch, [values]: each of `rows` once, and again by Zipf's law, in random order."""
    rng = np.random.default_rng([seed, 1])
    weight = np.arange(1, rows.shape[0] + 1, dtype=np.float64) ** -shape.zipf
    more = rng.choice(rows, shape.values - rows.shape[0], p=weight / weight.sum())
    return rng.permutation(np.concatenate([rows, more]))


@dataclass(frozen=True)
class Measured:
    """What a sequence of batches turned out to be, and what of it is urgent on the wire."""

    collision: float  # share of a batch's unique rows that the batch before has
    duplication: float  # values per unique row
    urgent_rows: float  # per step and direction, that the busiest rank sends to others and that must be waited for
    all_rows: float  # the same without splitting
    all_values: float  # the same without bringing duplicates together


def measure(batches: list[np.ndarray], block: int) -> Measured:
    """`batches[t][rank]` are the ids, [ranks, values]; row r belongs to rank r // block. The first batch only starts.

    Rows travel from owner to requester and gradients back, so what one rank sends in forward and backward together is
    what it owns for others and what it asks of others.
    """
    ranks = batches[0].shape[0]
    sets = [[np.unique(ids) for ids in batch] for batch in batches]
    union = [np.unique(np.concatenate(s)) for s in sets]
    rates, urgent, rows, values = [], [], [], []
    for t in range(1, len(batches)):
        hit = np.intersect1d(union[t - 1], union[t])
        rates.append(hit.shape[0] / union[t].shape[0])
        urgent.append(_sent([np.intersect1d(s, hit) for s in sets[t]], block, ranks))
        rows.append(_sent(sets[t], block, ranks))
        values.append(_sent(list(batches[t]), block, ranks))
    unique = np.mean([s.shape[0] for batch in sets for s in batch])
    return Measured(
        collision=float(np.mean(rates)),
        duplication=float(batches[0].shape[1] / unique),
        urgent_rows=float(np.mean(urgent)),
        all_rows=float(np.mean(rows)),
        all_values=float(np.mean(values)),
    )


def _sent(per_rank: list[np.ndarray], block: int, ranks: int) -> float:
    """Entries that cross the wire in one direction, for the rank that sends most; mean of the two directions."""
    asks = np.stack([np.bincount(ids // block, minlength=ranks)[:ranks] for ids in per_rank])
    np.fill_diagonal(asks, 0)
    return float((asks.sum(0).max() + asks.sum(1).max()) / 2)


def main() -> None:
    args = parser(__doc__, "4 batches instead of 12").parse_args()
    shape, ranks, found = Shape(samples=32, length=64, table_rows=40_000), 4, {}
    print(f"{ranks} ranks with {shape.values} values each, {shape.duplication:g} per unique row wanted")
    print(f"{'wanted':>8}{'colliding':>11}{'per row':>9}{'urgent rows':>13}{'all rows':>10}{'all values':>12}")
    for wanted in (0.0, 0.03, 0.12, 0.3, 0.6):
        rows = unique_rows(shape, ranks, wanted, 4 if args.quick else 12, seed=0)
        batches = [np.stack([values_of(r, shape, seed) for seed, r in enumerate(batch)]) for batch in rows]
        m = measure(batches, block=-(-shape.table_rows // ranks))
        found[str(wanted)] = asdict(m)
        print(
            f"{wanted:>8.0%}{m.collision:>11.1%}{m.duplication:>9.2f}{m.urgent_rows:>13.0f}{m.all_rows:>10.0f}"
            f"{m.all_values:>12.0f}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
