"""What the figures of docs/paper.md and docs/benchmarks.md show, as numbers: one function for each.

Simulated figures come from `freescale.simulate`, with the balancer and the passes of the package; measured ones from
 benchmarks/results/. Deterministic: a second run gives the same numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import movielens
import step_torchrec
from freescale.runtime.balance import solver
from freescale.simulate import findings
from freescale.simulate.cluster import PRESETS
from freescale.simulate.collisions import CollisionCounter
from freescale.simulate.study import Outcome, Study, changed
from freescale.simulate.variants import EVERYTHING, TORCHREC, Variant, freescale_variants
from freescale.simulate.workload import Batch, Generated, Recorded, Workload, zipf

RESULTS = Path(__file__).parent / "results"
SYNCHRONOUS, PEC = TORCHREC[0].name, TORCHREC[2].name
COMPARED = (TORCHREC[0], TORCHREC[2], EVERYTHING)
TABLE_ROWS = 50_000_000  # of the table whose collisions are counted
REQUESTERS = 8  # ranks that share a batch there


@dataclass(frozen=True)
class Settings:
    """The points of the simulated figures."""

    cluster: str = "h100"
    ranks: int = 256  # where they are not varied
    batch: int = 128
    cap: int = 21_000
    steps: int = 6  # of a point
    ablation_steps: int = 20
    all_ranks: tuple[int, ...] = (8, 32, 64, 128, 256)
    straggler_ranks: tuple[int, ...] = (8, 64, 256)
    caps: tuple[int, ...] = (1000, 2000, 4000, 8000, 12_000, 21_000)
    batches: tuple[int, ...] = (16, 32, 64, 128, 256)
    collisions: tuple[float, ...] = (0.02, 0.06, 0.12, 0.2, 0.3, 0.6)
    exponents: tuple[float, ...] = (0.0, 0.4, 0.8, 1.05)
    values: tuple[int, ...] = (100_000, 300_000, 1_000_000, 3_000_000)
    movielens_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # samples of each of REQUESTERS ranks


QUICK = Settings(
    ranks=16, batch=32, cap=8000, steps=1, ablation_steps=2, all_ranks=(8, 16), straggler_ranks=(8, 16),
    caps=(1000, 8000), batches=(16, 32), collisions=(0.06, 0.3), exponents=(0.0, 1.05), values=(10_000, 100_000),
    movielens_batches=(1, 4),
)  # fmt: skip


@dataclass
class Points:
    """Simulated points, each once."""

    settings: Settings
    progress: Callable[[str], None] = lambda _: None
    _found: dict[tuple[Workload, int, str], Outcome] = field(default_factory=dict)
    repeats: dict[Workload, float] = field(default_factory=dict)  # values per unique row of a rank's batch

    def workload(self, **changes: Any) -> Workload:
        s = self.settings
        return replace(Workload(ranks=s.ranks, batch=s.batch, cap=s.cap), **changes)

    def at(self, w: Workload, chosen: tuple[Variant, ...] = COMPARED, steps: int = 0) -> list[Outcome]:
        steps = steps or self.settings.steps
        missing = [v for v in chosen if (w, steps, v.name) not in self._found]
        if missing:
            where = f"{w.ranks} ranks, cap {w.cap}, batch {w.batch}, {w.collision:.0%} collide: "
            study = Study(
                Generated(w), PRESETS[self.settings.cluster], steps, lambda words: self.progress(where + words)
            )
            self._found |= {(w, steps, o.variant.name): o for o in study.run_all(missing)}
            counts = study.batches(missing[0].balance).counts[1]
            self.repeats[w] = float(counts.values.sum() / counts.unique.sum())
        return [self._found[w, steps, v.name] for v in chosen]


def short(x: float) -> float:
    """Six digits: what another build of NumPy rounds otherwise is not a change."""
    return float(f"{x:.6g}")


def row(o: Outcome) -> dict[str, Any]:
    kinds = {f"{k}_ms": short(getattr(o, f"{k}_ms")) for k in ("step", "compute", "exposed", "straggler")}
    return {"variant": o.variant.name, **kinds}


def stragglers(points: Points) -> dict[str, Any]:
    """Figure 2: the share of a synchronous step in which a rank waits for a slower one."""
    found = []
    for ranks in points.settings.straggler_ranks:
        for cap in points.settings.caps:
            (o,) = points.at(points.workload(ranks=ranks, cap=cap), COMPARED[:1])
            found.append({"ranks": ranks, "cap": cap, "straggler_share": short(o.straggler), **row(o)})
    return {"rows": found}


def collisions(points: Points) -> dict[str, Any]:
    """Figure 3: the share of a batch's unique rows, and of its values, that the batch before uses, too."""
    s, synthetic = points.settings, []
    for exponent in s.exponents:
        for values in s.values:
            points.progress(f"collisions: exponent {exponent}, {values} values")
            batches = [_zipf_batch(exponent, values, step) for step in range(3)]
            synthetic.append({"exponent": exponent, "values": values, **_colliding(batches)})
    path, real = movielens.histories(), None
    if path is not None:
        real = []
        for batch in s.movielens_batches:
            source = Recorded(Workload(ranks=REQUESTERS, batch=batch, cap=10**6), path)
            batches = [source.batch(step, REQUESTERS) for step in range(9)]
            found = _colliding(batches)
            real.append({"samples": REQUESTERS * batch, "items": source.workload.rows, **found})
    return {"synthetic": synthetic, "table_rows": TABLE_ROWS, "movielens": real}


def _zipf_batch(exponent: float, values: int, step: int) -> Batch:
    ids = zipf(np.random.default_rng([1, step]), values, TABLE_ROWS, exponent)
    each = np.full(REQUESTERS, values // REQUESTERS)
    return Batch(each, each, ids[: each.sum()])


def _colliding(batches: list[Batch]) -> dict[str, float]:
    """As the planner counts: a row collides if any rank had it in the batch before."""
    counter, counts = CollisionCounter(), []
    for batch in batches:
        samples = len(batch.values)
        done = counter.count(batch, np.arange(samples), np.full(REQUESTERS, samples // REQUESTERS))
        counts += [done] if done is not None else []
    counts = [*counts, counter.last()][1:]  # the first has none before it

    def total(name: str) -> float:
        return float(sum(getattr(c, name).sum() for c in counts))

    return {
        "values_per_rank": short(total("values") / len(counts) / REQUESTERS),
        "rows_share": short(total("urgent") / total("unique")),
        "values_share": short(total("urgent_values") / total("values")),
    }


def dispatch(points: Points) -> dict[str, Any]:
    """Figure 7: packing samples for other ranks and putting them in order again, measured."""
    recorded, of = _recorded("dispatch"), {}
    for r in recorded["rows"]:
        line = of.setdefault(r["ranks"], {"ranks": r["ranks"]})
        line[f"{r['what']}_ms"] = short(r["ms"])
        line |= {"torch_loop_ms": short(r["torch_loop_ms"]), "torch_whole_ms": short(r["torch_whole_ms"])}
    return {"gpu": recorded["machine"]["gpu"], "from": "dispatch.json", "rows": list(of.values())}


def balance(points: Points) -> dict[str, Any]:
    """Figure 8: straggler time without and with freescale, over cap, batch and ranks; and with real lengths."""
    s, found = points.settings, {}
    axes: dict[str, tuple[int, ...]] = {"cap": s.caps, "batch": s.batches, "ranks": s.all_ranks}
    for axis, values in axes.items():
        found[axis] = []
        for value in values:
            outcomes = points.at(points.workload(**{axis: value}))
            before, after = findings.before_and_after(outcomes)
            line = {"before_ms": before.straggler_ms, "after_ms": after.straggler_ms}
            line |= {"before_share": before.straggler, "after_share": after.straggler}
            line |= {"reduction": findings.less(before.straggler_ms, after.straggler_ms)}
            found[axis].append({axis: value, **{k: short(v) for k, v in line.items()}})
    return {**found, "movielens": _real_lengths(s)}


def _real_lengths(s: Settings) -> list[dict[str, Any]] | None:
    """MovieLens histories are short: what a rank computes is taken to grow with their lengths, or their squares."""
    path = movielens.histories()
    if path is None:
        return None
    found = []
    for ranks in s.straggler_ranks:
        lengths = Recorded(Workload(ranks=ranks, batch=s.batch, cap=10**6), path).lengths(0).astype(np.float64)
        for cost, costs in (("L", lengths), ("L^2", lengths**2)):
            none, ours = (solver.balance(costs, ranks, method=m).straggler for m in ("none", "default"))
            found.append({"ranks": ranks, "cost": cost, "before": short(none), "after": short(ours)})
    return found


def exposed(points: Points) -> dict[str, Any]:
    """Figure 9: exposed time over the share of rows that collide; simulated, and as measured on two CPU ranks."""
    simulated = []
    for share in points.settings.collisions:
        w, _ = changed("collision", share, points.workload(), PRESETS[points.settings.cluster])
        ms = {o.variant.name: short(o.exposed_ms) for o in points.at(w)}
        simulated.append({"collision": share, "values_per_row": short(points.repeats[w]), "exposed_ms": ms})
    recorded = _recorded("overlap_fast_link")
    rows = [r for r in recorded["rows"] if r["link"] == "exchange/compute 0.5"]
    measured = [
        {"variant": r["variant"], "collision": short(r["collision"]), "exposed_ms": short(r["exposed_ms"])}
        for r in rows
    ]
    line = [(r["collision"], r["exposed_ms"][EVERYTHING.name]) for r in simulated if _alike(r)]
    return {
        "simulated": simulated,
        "simulated_r2": short(_r2(line)),
        "measured": measured,
        "measured_r2": short(recorded["linear_r2"]),
        "from": "overlap_fast_link.json",
    }


def _alike(r: dict[str, Any]) -> bool:
    """Whether ids hardly repeat within a batch, so that as many rows travel as at other collision rates."""
    return r["values_per_row"] < 1.1


def _r2(line: list[tuple[float, float]]) -> float:
    """Of a straight line through the points."""
    x, y = np.array(line).T
    left = y - np.polyval(np.polyfit(x, y, 1), x)
    return float(1 - left.var() / y.var()) if y.var() else 1.0


def contention(points: Points) -> dict[str, Any]:
    """Figure 10: the speed that a kernel keeps while a transfer is under way, measured."""
    recorded = _recorded("contention_quick")
    rows = [
        {"work": r["work"], "beside": r["beside"], "kept": short(r["kept"]), "gb_per_s": short(r["transfer_gb_per_s"])}
        for r in (*recorded["nccl"]["rows"], *recorded["rows"])
        if r["beside"] in ("NCCL, both ranks", "staged", "copy kernel, blocks: 32")
    ]
    once = {(r["work"], r["beside"]): r for r in reversed(rows)}  # beside NCCL's own run where there are two
    return {"gpu": recorded["machine"]["gpu"], "from": "contention_quick.json", "rows": list(once.values())[::-1]}


def ranks(points: Points) -> dict[str, Any]:
    """Figure 11: a step on 64 to 256 ranks."""
    many = [r for r in points.settings.all_ranks if r >= 64] or points.settings.all_ranks
    found = [{"ranks": r, **row(o)} for r in many for o in points.at(points.workload(ranks=r))]
    return {"rows": found}


def ablation(points: Points) -> dict[str, Any]:
    """Every combination of balance, look-ahead and SM-free copies; the same as `python -m freescale simulate`."""
    outcomes = points.at(points.workload(), (*TORCHREC, *freescale_variants()), points.settings.ablation_steps)
    parts = {n: {k: short(v) for k, v in p.items()} for n, p in findings.part_shares(outcomes).items()}
    headlines = {k: short(v) for k, v in findings.headlines(outcomes).items()}
    return {"rows": [row(o) for o in outcomes], "parts": parts, **headlines}


def gpu_steps(points: Points) -> dict[str, Any]:
    """Not in the paper: whole steps of real TorchRec on a GPU, measured."""
    files = [f"step_torchrec_{name}" for name in ("slow_8ms", "slow", "fast")]
    recorded = [_recorded(name) for name in files]
    rows = []
    for size in (s for r in recorded for s in r["sizes"]):
        of, ours = {r["variant"]: r for r in size["rows"]}, "balance" if size["cap"] else "default"
        line = {"size": size["size"], "link": size["link"], "ours": ours}
        line |= {"limit_ms": short(step_torchrec.limit_of(size, balanced=size["cap"] > 0))}
        line |= {"step_ms": {v: short(r["ms"]) for v, r in of.items()}}
        line |= {"exposed_ms": short(of[ours]["meter_ms"]["exposed"])}
        rows.append(line)
    return {"gpu": recorded[0]["machine"]["gpu"], "from": [f"{name}.json" for name in files], "rows": rows}


def _recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


FIGURES: dict[str, Callable[[Points], dict[str, Any]]] = {
    f.__name__: f for f in (stragglers, collisions, dispatch, balance, exposed, contention, ranks, ablation, gpu_steps)
}
