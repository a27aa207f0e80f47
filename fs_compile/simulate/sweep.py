"""The same study with one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from freescale.simulate import findings
from freescale.simulate.cluster import Cluster
from freescale.simulate.study import Outcome, Study
from freescale.simulate.variants import EVERYTHING, TORCHREC, Variant
from freescale.simulate.workload import Generated, Workload

STEPS = 3  # of each point

AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "ranks": ("ranks", (8, 32, 64, 128, 256, 512)),
    "cap": ("history cap, tokens", (500, 1000, 2000, 4000, 8000, 12000, 21000)),
    "batch": ("samples per rank", (16, 32, 64, 128, 256)),
    "collision": ("share of rows that collide", (0.02, 0.06, 0.12, 0.3, 0.6)),
    "link": ("GB/s between hosts, per rank", (3.125, 6.25, 12.5, 25.0, 50.0, 100.0)),
}


@dataclass(frozen=True)
class Point:
    axis: str
    value: float
    outcomes: list[Outcome]

    def row(self) -> dict[str, Any]:
        found = [{k: v for k, v in findings.row(o).items() if k != "program"} for o in self.outcomes]
        return {"axis": self.axis, "value": self.value, "pays": findings.pays(self.outcomes), "rows": found} | (
            findings.headlines(self.outcomes)
        )


def changed(axis: str, value: float, w: Workload, c: Cluster) -> tuple[Workload, Cluster]:
    if axis == "link":
        return w, replace(c, between_gb_per_s=value)
    if axis == "cap":  # shorter histories, not only shorter long ones
        return replace(w, cap=int(value), median=w.median * value / w.cap if value < w.cap else w.median), c
    if axis == "collision":  # few collide in a table that is large beside a batch alone
        tokens = w.ranks * w.batch * w.median * math.exp(w.sigma**2 / 2)
        return replace(w, collision=value, rows=max(w.rows, int(2 * tokens / value))), c
    return replace(w, ranks=int(value)) if axis == "ranks" else replace(w, batch=int(value)), c


def points(axis: str, w: Workload, c: Cluster, progress: Callable[[str], None]) -> list[Point]:
    return [point(axis, value, w, c, progress) for value in AXES[axis][1]]


def point(
    axis: str,
    value: float,
    w: Workload,
    c: Cluster,
    progress: Callable[[str], None],
    chosen: Sequence[Variant] = (*TORCHREC, EVERYTHING),
) -> Point:
    workload, cluster = changed(axis, value, w, c)
    study = Study(Generated(workload), cluster, STEPS, lambda words: progress(f"{axis} {value:g}: {words}"))
    return Point(axis, value, study.run_all(chosen))
