"""Simulate one workload on one cluster with several variants; and sweep one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from freescale.simulate import graphs, variants
from freescale.simulate.assignments import Assigner, Assignment
from freescale.simulate.cluster import Cluster
from freescale.simulate.collisions import CollisionCounter, Counts
from freescale.simulate.events import Program, Simulation
from freescale.simulate.variants import EVERYTHING, TORCHREC, Variant
from freescale.simulate.workload import Batch, Generated, Source, Workload

# If a batch has more ids than both, rows of a sample of owners are planned:
PLANNED_IDS = 800_000  # over all ranks
PLANNED_IDS_OF_A_RANK = 2500
WARM_UP, TAIL = 2, 1  # uncounted first and last steps, where look-ahead has no neighbor

SWEPT_STEPS = 3  # per point

AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "ranks": ("ranks", (8, 32, 64, 128, 256, 512)),
    "cap": ("history cap, tokens", (500, 1000, 2000, 4000, 8000, 12000, 21000)),
    "batch": ("samples per rank", (16, 32, 64, 128, 256)),
    "collision": ("share of rows that collide", (0.02, 0.06, 0.12, 0.3, 0.6)),
    "link": ("GB/s between hosts, per rank", (3.125, 6.25, 12.5, 25.0, 50.0, 100.0)),
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    variant: Variant
    program: Program
    step_ms: float
    compute_ms: float
    exposed_ms: float
    straggler_ms: float

    @property
    def exposed(self) -> float:
        """As a share of the step, like the next two."""
        return self.exposed_ms / self.step_ms

    @property
    def straggler(self) -> float:
        return self.straggler_ms / self.step_ms

    @property
    def bubbles(self) -> float:
        return self.exposed + self.straggler


@dataclass(frozen=True)
class _Batches:
    """Shared by all variants with, or all without, balancing."""

    assignments: list[Assignment]
    counts: list[Counts]


@cache
def _traced(layers: int, look_ahead: bool) -> dict[str, graphs.TracedGraph]:
    return graphs.trace(layers, look_ahead)


@dataclass
class Study:
    source: Source
    cluster: Cluster
    steps: int = 20
    progress: Progress = lambda _: None
    _made: dict[bool, _Batches] = field(default_factory=dict)
    _drawn: dict[int, Batch] = field(default_factory=dict)

    @property
    def owners(self) -> int:
        """Number of owners whose rows are planned."""
        w = self.source.workload
        values = int(self.source.lengths(0).sum()) + w.ranks * w.batch
        planned = max(PLANNED_IDS, PLANNED_IDS_OF_A_RANK * w.ranks)
        return max(1, min(w.ranks, w.ranks * planned // values))

    def batches(self, balanced: bool) -> _Batches:
        if balanced not in self._made:
            owners = self.owners
            counter, assigner = CollisionCounter(), Assigner(self.source, self.cluster, balanced)
            assignments, counts, total = [], [], WARM_UP + self.steps + TAIL
            for step in range(total):
                self.progress(f"planning {'balanced ' if balanced else ''}batch {step + 1} of {total}")
                assignments.append(assigner.assign(step))
                if step not in self._drawn:
                    self._drawn[step] = self.source.batch(step, owners)
                done = counter.count(self._drawn[step], assignments[-1].order, assignments[-1].per_rank)
                counts += [done] if done is not None else []
            self._made[balanced] = _Batches(assignments, [*counts, counter.last()])
        return self._made[balanced]

    def program(self, variant: Variant) -> Program:
        made = self.batches(variant.balance)
        return variants.program_of(variant, lambda look_ahead: self._schedule(made, look_ahead, variant.copies))

    def _schedule(self, made: _Batches, look_ahead: bool, copies: bool) -> Program:
        """The program that a rank with mean sizes compiles, at its first batch, whose rows are all urgent."""
        self.progress(f"tracing the model {'with' if look_ahead else 'without'} look-ahead")
        c, (first, second) = self.cluster, made.counts[:2]
        row = c.dim * c.row_element_bytes
        sizes = {
            "urgent rows": first.unique, "urgent gradients": first.urgent_gradients if look_ahead else first.unique,
            "early rows": second.unique - second.urgent, "late gradients": np.zeros(1),
        }  # fmt: skip
        per_token, per_square = np.mean([a.seconds.mean(0) for a in made.assignments], axis=0)
        link = variants.Traffic(c, len(first.unique), copies)
        gigabyte = float(link.seconds(np.array([1e9]))[0])
        traced = _traced(c.layers, look_ahead)
        return graphs.program_of(
            traced, per_token, per_square, {k: float(v.mean()) * row for k, v in sizes.items()}, 1e9 / gigabyte
        )

    def run(self, variant: Variant) -> Outcome:
        made, program = self.batches(variant.balance), self.program(variant)
        self.progress(f"simulating {variant.name}")
        moved = np.array([a.moved_bytes for a in made.assignments])
        transfers = variants.transfers_of(variant, made.counts, moved, self.cluster)
        times = Simulation(program, transfers, variants.work_of(variant, made.assignments, self.cluster)).run()
        counted = slice(WARM_UP, WARM_UP + self.steps)

        def mean_ms(x: np.ndarray) -> float:
            return float(x[counted].mean() * 1e3)

        means = map(mean_ms, (times.step(), times.compute, times.exposed, times.straggler))
        return Outcome(variant, program, *means)

    def run_all(self, chosen: Sequence[Variant]) -> list[Outcome]:
        return [self.run(v) for v in chosen]


@dataclass(frozen=True)
class Point:
    axis: str
    value: float
    outcomes: list[Outcome]


def changed(axis: str, value: float, w: Workload, c: Cluster) -> tuple[Workload, Cluster]:
    if axis == "link":
        return w, replace(c, between_gb_per_s=value)
    if axis == "cap":  # shorter histories overall, not only truncated long ones
        return replace(w, cap=int(value), median=w.median * value / w.cap if value < w.cap else w.median), c
    if axis == "collision":  # a low share needs a table that is large relative to a batch
        tokens = w.ranks * w.batch * w.median * math.exp(w.sigma**2 / 2)
        return replace(w, collision=value, rows=max(w.rows, int(2 * tokens / value))), c
    return replace(w, ranks=int(value)) if axis == "ranks" else replace(w, batch=int(value)), c


def points(axis: str, w: Workload, c: Cluster, progress: Progress) -> list[Point]:
    return [point(axis, value, w, c, progress) for value in AXES[axis][1]]


def point(
    axis: str,
    value: float,
    w: Workload,
    c: Cluster,
    progress: Progress,
    chosen: Sequence[Variant] = (*TORCHREC, EVERYTHING),
) -> Point:
    workload, cluster = changed(axis, value, w, c)
    study = Study(Generated(workload), cluster, SWEPT_STEPS, lambda words: progress(f"{axis} {value:g}: {words}"))
    return Point(axis, value, study.run_all(chosen))
