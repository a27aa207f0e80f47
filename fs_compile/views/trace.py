"""Selected steps of a run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import Any

from freescale.views.records import RecordError, Run


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
