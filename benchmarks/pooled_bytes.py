"""Bytes of pooled features: unique rows, which freescale sends, beside pooled sums, which TorchRec sends.

    python benchmarks/pooled_bytes.py [--quick] [--json FILE]

Computed, not timed: for one feature, what one rank receives in the forward pass, in rows of the table's width (the
backward pass sends as much). Ids follow Zipf's law. `urgent` are rows that any rank used in the batch before, which
alone are waited for under a LookaheadLoader.

Pure functions of their arguments; NumPy only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from command_line import parser


@dataclass(frozen=True)
class Bags:
    ranks: int
    samples: int  # of a rank
    length: int  # of every bag
    table_rows: int
    zipf: float


@dataclass(frozen=True)
class Received:
    """Rows that the average rank receives."""

    unique: float
    urgent: float
    table_wise: int  # sums: from one owner
    row_wise: int  # partial sums: from every rank


def received(bags: Bags, seed: int = 0) -> Received:
    rng = np.random.default_rng(seed)
    chances = np.arange(1, bags.table_rows + 1) ** -bags.zipf
    ends = np.cumsum(chances / chances.sum())
    before, after = (
        [np.unique(np.searchsorted(ends, rng.random(bags.samples * bags.length))) for _ in range(bags.ranks)]
        for _ in range(2)
    )
    used = np.unique(np.concatenate(before))
    unique = float(np.mean([len(rows) for rows in after]))
    urgent = float(np.mean([np.isin(rows, used, assume_unique=True).sum() for rows in after]))
    return Received(unique, urgent, bags.samples, bags.samples * bags.ranks)


def main() -> None:
    args = parser(__doc__, "smaller batches and tables").parse_args()
    samples, table_rows = (256, 20_000) if args.quick else (4096, 1_000_000)
    rows = []
    print(f"{samples} samples a rank, a table of {table_rows} rows; rows that a rank receives")
    print("| ranks | bag | Zipf | unique rows | of them urgent | sums, table-wise | partial sums, row-wise |")
    print("|---|---|---|---|---|---|---|")
    for ranks in (2, 8):
        for length in (2, 10, 50):
            for zipf in (0.8, 1.05, 1.3):
                bags = Bags(ranks, samples, length, table_rows, zipf)
                r = received(bags)
                counts = f"{r.unique:.0f} | {r.urgent:.0f} | {r.table_wise} | {r.row_wise}"
                print(f"| {ranks} | {length} | {zipf} | {counts} |")
                rows.append({**asdict(bags), **asdict(r)})
    if args.json is not None:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
