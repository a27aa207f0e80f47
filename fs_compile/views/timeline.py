"""The predicted timeline of a compilation, and steps as a trace for Perfetto or chrome://tracing. Urgent messages and
dense gradients use the training group's wire, early and late ones the background group's; a wire is serial."""

from __future__ import annotations

from typing import Any

from freescale.views.records import RecordError, Run, compilations, lacks_late_gradients
from freescale.views.summary import exchanges_in_words

LANES = ("compute", "urgent", "dense", "late", "early")
Blocks = dict[str, list[tuple[float, float, str, str]]]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.wire_free = {"urgent": 0.0, "background": 0.0}
        self.arrival: dict[str, float] = {}
        self.exposed = 0.0
        self.blocks: Blocks = {lane: [] for lane in LANES}

    def replay(self, timeline: list[dict[str, Any]], of: str) -> None:
        for entry in timeline:
            if entry["do"] == "compute":
                begin, self.now = self.now, self.now + entry["seconds"]
                self.blocks["compute"].append((begin, self.now, "compute", f"{of}: {entry['what']}"))
            elif entry["do"] == "launch":
                wire = "urgent" if entry["priority"] in ("urgent", "dense") else "background"
                begin = max(self.now, self.wire_free[wire])
                end = self.wire_free[wire] = self.arrival[entry["what"]] = begin + entry["seconds"]
                self.blocks[entry["priority"]].append((begin, end, entry["priority"], f"{of}: {entry['what']}"))
            else:
                arrival = self.arrival.pop(entry["what"], self.now)
                self.exposed += max(arrival - self.now, 0.0)
                self.now = max(self.now, arrival)


def predict(graphs: list[dict[str, Any]], steps: int = 2) -> tuple[Blocks, float, float]:
    """Blocks by lane, total seconds and exposed seconds of `steps` steps of one compilation's graphs."""
    by_direction = {g["direction"]: g["timeline"] for g in graphs if g.get("timeline")}
    clock = _Clock()
    for step in range(steps if by_direction else 0):
        for direction in ("forward", "backward"):
            clock.replay(by_direction.get(direction, []), f"step {step}, {direction}")
    return clock.blocks, clock.now, clock.exposed


def lanes_of_graphs(graphs: list[dict[str, Any]]) -> list[tuple[str, list[tuple[float, float, str, str]]]]:
    """Lanes of one compilation in milliseconds, for a plot; empty if no graph has a timeline."""
    blocks, _, _ = predict(graphs)
    if not any(blocks.values()):
        return []
    shown = [lane for lane in LANES if lane != "dense" or blocks[lane]]
    return [(lane, [(b * 1e3, e * 1e3, kind, label) for b, e, kind, label in blocks[lane]]) for lane in shown]


def text_timeline(graphs: list[dict[str, Any]]) -> str:
    """Each graph's order as text, and the prediction for each compilation."""
    return "\n".join(line for name, of_one in compilations(graphs).items() for line in _text_lines(name, of_one))


def _text_lines(name: str, graphs: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for g in graphs:
        lines.append(f"{name}, {g['direction']} graph: {exchanges_in_words(g)}")
        for e in g.get("timeline", []):
            if e["do"] == "launch":
                what = f"launch {e['what']} ({e['kind']}): {e['bytes']} bytes, {e['seconds'] * 1e3:.4f} ms on the wire"
            elif e["do"] == "wait":
                what = f"wait for {e['what']}"
            else:
                nodes = f"{e['nodes']} node{'s' * (e['nodes'] != 1)}"
                what = f"  compute {e['seconds'] * 1e3:.4f} ms: {nodes}, longest {e['what']}"
            lines.append(f"  {what}")
        lines += [f"  {why}" for why in g["refused"]]
    _, seconds, exposed = predict(graphs, 1)
    if seconds:
        if any(lacks_late_gradients(g.get("timeline", [])) for g in graphs):
            lines.append("(the traced first step has no late gradients; later steps have some)")
        times = f"{seconds * 1e3:.4g} ms per step, {exposed * 1e3:.4g} ms exposed"
        lines.append(f"{name}, predicted for the traced batch: {times}")
    return lines


def trace(run: Run, first: int, last: int) -> dict[str, Any]:
    """One process per rank, with a thread for steps, one for waits, and one per message class."""
    events: list[dict[str, Any]] = []
    zero = min((s["at"] for s in run.steps()), default=0.0)
    found = False
    for rank, record in sorted(run.ranks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        threads: dict[str, int] = {}
        for step in record.step:
            if isinstance(step["step"], int) and first <= step["step"] <= last:
                found = True
                _add_step(events, threads, rank, step, zero)
        for name, number in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
    if not found:
        known = [s["step"] for s in run.steps() if isinstance(s["step"], int)]
        has = f"it has {min(known)} to {max(known)}" if known else "it has none"
        raise RecordError(f"run {run.name} has no step {first if first == last else f'{first} to {last}'}; {has}")
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _add_step(
    events: list[dict[str, Any]], threads: dict[str, int], rank: int, step: dict[str, Any], zero: float
) -> None:
    begin = step["at"] - zero

    def add(thread: str, name: str, since: float, seconds: float, **args: Any) -> None:
        number = threads.setdefault(thread, len(threads))
        event = {"ph": "X", "name": name, "pid": rank, "tid": number, "ts": (begin + since) * 1e6, "dur": seconds * 1e6}
        events.append({**event, "args": args})

    add("step", f"step {step['step']}", 0.0, step["seconds"], **{k: step[k] for k in ("compute", "exposed", "loader")})
    for label, launched, wait_began, wait_ended, size, exposed in step["launches"]:
        if size == 0 and launched == wait_began:
            add("waiting", label, wait_began, wait_ended - wait_began)
            continue
        add(label.split(" ")[0], label, launched, wait_ended - launched, bytes=size, exposed_ms=exposed * 1e3)
        add("waiting", f"wait for {label}", wait_began, wait_ended - wait_began)
