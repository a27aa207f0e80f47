"""Reads FREESCALE_RECORD files, without torch, so that the report starts fast. A killed process may leave a truncated
last line, which is skipped; any other invalid line is an error that names file and line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("compute", "exposed", "loader", "straggler", "host_bound")  # of a step's seconds
LOADER, PLANNER, RENDEZVOUS = "loader", "planner", "rendezvous"  # host waits between two steps
BETWEEN_STEPS = (LOADER, PLANNER, RENDEZVOUS)
_FORMER_RENDEZVOUS = "meeting of the ranks"  # in records of 0.1


def straggling(busy: float, waited: float, at_begin: float, longest_busy: float | None) -> float:
    """The part of the seconds `waited` for other ranks that is due to a rank with more work: `longest_busy`, None if
    unknown, against this rank's `busy`. `at_begin`, the time until all ranks had started the step, always is."""
    more = 0.0 if longest_busy is None else longest_busy - busy
    return max(at_begin, min(more, waited))


TICK = 1e-7  # seconds per unit of a step's times
_NEEDED = {  # by kind of line
    "start": ("run", "rank", "world", "at"),
    "graph": ("compilation", "direction", "exchanges", "sites", "refused", "seconds", "from_cache"),
    "step": ("step", "seconds", "at", "launches", *PARTS),
    "plan": ("step", "exchange"),
    "balance": ("step", "predicted_before", "predicted_after"),
    "end": ("at",),
}


class RecordError(ValueError):
    """A record is missing or cannot be read."""


@dataclass
class RankRecord:
    """The lines of one rank by kind, in file order."""

    path: Path
    start: dict[str, Any]
    graph: list[dict[str, Any]] = field(default_factory=list)
    step: list[dict[str, Any]] = field(default_factory=list)
    plan: list[dict[str, Any]] = field(default_factory=list)
    balance: list[dict[str, Any]] = field(default_factory=list)
    end: list[dict[str, Any]] = field(default_factory=list)  # empty: the process was killed or is still running
    cut_off: bool = False  # the last line is truncated: the process was killed while writing


@dataclass
class Run:
    name: str
    world: int
    ranks: dict[int, RankRecord]

    @property
    def missing(self) -> list[int]:
        return [r for r in range(self.world) if r not in self.ranks]

    def steps(self) -> list[dict[str, Any]]:
        return [s for rank in self.ranks.values() for s in rank.step]

    def shared_steps(self) -> list[tuple[dict[str, Any], ...]]:
        """For each step that all ranks have recorded, that step of each rank. Each loop counts its steps from 0."""
        if self.missing:
            return []
        by_rank: list[dict[tuple[Any, int], dict[str, Any]]] = []
        for rank in self.ranks.values():
            seen: Counter[Any] = Counter()
            by_rank.append({})
            for s in rank.step:
                by_rank[-1][s["step"], seen[s["step"]]] = s
                seen[s["step"]] += 1
        first, *others = by_rank
        return [(s, *(o[key] for o in others)) for key, s in first.items() if all(key in o for o in others)]

    def saved_by_balance(self) -> float:
        """Mean excess busy time of the busiest rank over the mean rank, as a share of the step."""
        shared = self.shared_steps()
        shared = shared[len(shared) - len(settled([steps[0] for steps in shared])) :]
        busy = [[_busy(s) for s in steps] for steps in shared]
        seconds = mean(s["seconds"] for steps in shared for s in steps)
        return mean(max(of_ranks) - mean(of_ranks) for of_ranks in busy) / seconds if seconds else 0.0


def read(folder: str | Path, run: str | None = None) -> Run:
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder")
    files = sorted(folder.glob("*-rank*.jsonl"))
    if not files:
        raise RecordError(f"{folder} has no records (*-rank*.jsonl); train with FREESCALE_RECORD={folder}")
    runs: dict[str, list[Path]] = {}
    for path in files:
        runs.setdefault(path.name.rpartition("-rank")[0], []).append(path)
    if run is None and len(runs) > 1:
        raise RecordError(f"{folder} has records of {len(runs)} runs: {', '.join(runs)}; choose one with --run")
    name = run if run is not None else next(iter(runs))
    if name not in runs:
        raise RecordError(f"{folder} has no run {name!r}; it has {', '.join(runs)}")
    ranks = [read_rank(path) for path in runs[name]]
    worlds = {r.start["world"] for r in ranks}
    if len(worlds) > 1:
        raise RecordError(f"{folder}: field 'world' of run {name} differs between its files: {sorted(worlds)}")
    found = Run(name, worlds.pop(), {r.start["rank"]: r for r in ranks})
    _tell_straggling(found)
    return found


def _tell_straggling(run: Run) -> None:
    """Split each rank's waits for others into straggler and exposed time. Steps that some rank has not recorded keep
    the values of their rank."""
    for steps in run.shared_steps():
        longest = max(_busy(s) for s in steps)
        for s in steps:
            waited = s["exposed"] + s["straggler"]
            s["straggler"] = straggling(_busy(s), waited, s["waits"].get(RENDEZVOUS, 0.0), longest)
            s["exposed"] = waited - s["straggler"]


def _busy(step: dict[str, Any]) -> float:
    return step["compute"] + step["host_bound"]


def read_rank(path: Path) -> RankRecord:
    record: RankRecord | None = None
    text = path.read_text(errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError
        except ValueError:
            if number == len(lines) and record is not None:  # without a trailing newline
                record.cut_off = True
                break
            raise RecordError(f"{path}, line {number}: not a line of a record: {line[:60]!r}") from None
        _check(path, number, entry)
        kind = entry.pop("kind")
        if kind == "start":
            record = record or RankRecord(path, entry)
        elif record is None:
            raise RecordError(f"{path}, line {number}: the first line must be of kind 'start', found {kind!r}")
        else:
            getattr(record, kind).append(_unpacked(path, number, entry) if kind == "step" else entry)
    if record is None:
        raise RecordError(f"{path} is empty")
    return record


def _check(path: Path, number: int, entry: dict[str, Any]) -> None:
    kind = entry.get("kind")
    if kind not in _NEEDED:
        raise RecordError(f"{path}, line {number}: field 'kind' is {kind!r}; expected one of {', '.join(_NEEDED)}")
    for name in _NEEDED[kind]:
        if name not in entry:
            raise RecordError(f"{path}, line {number}: a line of kind {kind!r} is missing the field {name!r}")


def _unpacked(path: Path, number: int, step: dict[str, Any]) -> dict[str, Any]:
    """The step as in `freescale.meter.steps`, with `launches` in seconds: (label, launched, wait began, wait ended,
    bytes, exposed)."""
    launches: list[tuple[Any, ...]] = []
    waits: dict[str, float] = {}
    sizes: dict[str, int] = {}
    flight: dict[str, float] = {}
    for launch in step["launches"]:
        if len(launch) != 7:
            raise RecordError(f"{path}, line {number}: its launches were written by another version of freescale")
        label, *when, size, exposed, flew = launch
        launches.append((label, *(t * TICK for t in when), size, exposed * TICK))
        waits[label] = waits.get(label, 0.0) + exposed * TICK
        sizes[label] = sizes.get(label, 0) + size
        flight[label] = flight.get(label, 0.0) + flew * TICK
    waits |= step.get("waits", {})  # on a GPU, scaled to the stream's idle time
    if _FORMER_RENDEZVOUS in waits:
        waits[RENDEZVOUS] = waits.get(RENDEZVOUS, 0.0) + waits.pop(_FORMER_RENDEZVOUS)
    return {**step, "launches": launches, "waits": waits, "bytes": sizes, "flight": flight}


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def settled(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(steps) < 3:
        return steps
    typical = median(s["seconds"] for s in steps)
    first = next((i for i, s in enumerate(steps) if s["seconds"] <= 3 * typical), 0)
    return steps[first:] if first < len(steps) // 2 else steps


def compilations(graphs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The graphs of each compilation: a forward graph and its backward graph (train, train 2, ...), or a forward graph
    alone (eval)."""
    together: dict[str, list[dict[str, Any]]] = {}
    for graph in graphs:
        together.setdefault(graph["compilation"], []).append(graph)
    named: dict[str, list[dict[str, Any]]] = {}
    count = {"train": 0, "eval": 0}
    for of_one in together.values():
        kind = "train" if any(g["direction"] == "backward" for g in of_one) else "eval"
        count[kind] += 1
        named[kind if count[kind] == 1 else f"{kind} {count[kind]}"] = of_one
    return named


def named_graphs(graphs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each graph with the name of its compilation, grouped by compilation."""
    return [(name, graph) for name, of_one in compilations(graphs).items() for graph in of_one]


def lacks_late_gradients(timeline: list[dict[str, Any]]) -> bool:
    """Whether the traced batch has none; later batches send some."""
    return any(e["do"] == "launch" and e["priority"] == "late" and not e["bytes"] for e in timeline)
