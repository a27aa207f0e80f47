"""Two ways to look into a step of benchmarks/step_gpu.py, on steps of their own, since looking costs time.

`DeviceProfile` says how busy the compute stream is: union of the kernels on it over the time of whole steps.
`HostProfile` says which functions of a thread take its time. (cProfile would do for one thread; since Python 3.12 it
mixes the threads of a process.)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

MARKER = "erfinv"  # a kernel that no model has, launched on the compute stream where a step begins
PACKING = ("_compress", "_expand")  # the kernels of compression_triton.py
STEPS, SETTLING = 16, 2  # that are profiled, at most; of those, the first ones do not count
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
PLACES = 4  # where the stream has nothing to do: so many are named


class DeviceProfile:
    """Of this rank's steps."""

    def __init__(self) -> None:
        self.marker = torch.zeros(1, device="cuda")
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def step_begins(self, number: int) -> None:
        if number == 0:
            torch.cuda.synchronize()
            self.profiler.start()
        torch.erfinv(self.marker)

    def figures(self) -> dict[str, Any]:
        """After the last step."""
        torch.cuda.synchronize()
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return {"busy_steps": busy_steps(events), "packing_ms": packing_ms(events), "idle_ms": idle_ms(events)}


def _kernels(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All of them, and the markers in order."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    return kernels, sorted((e for e in kernels if MARKER in e["name"]), key=lambda e: e["ts"])


def busy_steps(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of each step that counts: microseconds with a kernel on the stream of the markers, and microseconds. Empty where
    the profiler has not seen the kernels."""
    kernels, markers = _kernels(events)
    moments = [m["ts"] for m in markers[SETTLING:]]
    steps = zip(moments[:-1], moments[1:], strict=True)
    return [(busy_microseconds(kernels, markers[0]["args"]["stream"], *step), step[1] - step[0]) for step in steps]


def idle_ms(events: list[dict[str, Any]]) -> dict[str, float]:
    """Of a step: milliseconds in which the stream of the markers has nothing to do, by the kernels and copies around
    that time; the longest ones."""
    _, markers = _kernels(events)
    if len(markers) < SETTLING + 2:
        return {}
    stream, begin, end = markers[0]["args"]["stream"], markers[SETTLING]["ts"], markers[-1]["ts"]
    work = [e for e in events if e.get("cat") in WORK and e["args"]["stream"] == stream and begin <= e["ts"] <= end]
    ours = sorted(work, key=lambda e: e["ts"])
    idle: Counter[str] = Counter()
    for last, following in pairwise(ours):
        gap = following["ts"] - last["ts"] - last["dur"]
        if gap > 0:
            idle[f"{last['name'][:40]} - {following['name'][:40]}"] += gap
    return {place: us / 1e3 / (len(markers) - 1 - SETTLING) for place, us in idle.most_common(PLACES)}


def busy_shares(ranks: list[list[tuple[float, float]]]) -> dict[str, float | None]:
    """Of the `busy_steps` of all ranks. `compute_busy`: of the mean rank. `compute_busy_longest`: of the rank with the
    most to compute in each step, for which the others have to wait. None where a rank has none."""
    if not all(ranks):
        return {"compute_busy": None, "compute_busy_longest": None}
    busy, whole = np.array(ranks).transpose(2, 0, 1)  # of each: [rank, step]
    longest = busy.max(0).sum() / whole.mean(0).sum()
    return {"compute_busy": float(busy.sum() / whole.sum()), "compute_busy_longest": float(longest)}


def packing_ms(events: list[dict[str, Any]]) -> float | None:
    """Of a step: the kernels that pack and unpack what travels, on whatever stream."""
    kernels, markers = _kernels(events)
    if len(markers) < SETTLING + 2:
        return None
    begin, end = markers[SETTLING]["ts"], markers[-1]["ts"]
    took = sum(k["dur"] for k in kernels if k["name"] in PACKING and begin <= k["ts"] < end)
    return took / 1e3 / (len(markers) - 1 - SETTLING)


def busy_microseconds(kernels: list[dict[str, Any]], stream: int, begin: float, end: float) -> float:
    """In which some kernel ran on a stream."""
    busy, until = 0.0, begin
    for kernel in sorted((k for k in kernels if k["args"]["stream"] == stream), key=lambda e: e["ts"]):
        first, last = max(kernel["ts"], until), min(kernel["ts"] + kernel["dur"], end)
        busy += max(last - first, 0.0)
        until = max(until, last)
    return busy


class HostProfile:
    """Own time and calls of every function of the thread that starts it, C functions too. What it costs is in them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._stack: list[str] = []
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._stack:
            self.seconds[self._stack[-1]] += time.perf_counter() - self._since
        if event == "call":
            code = frame.f_code
            where = "/".join(Path(code.co_filename).parts[-3:])
            self._enter(f"{where}:{code.co_firstlineno} {getattr(code, 'co_qualname', code.co_name)}")
        elif event == "c_call":
            self._enter(f"{getattr(argument, '__module__', None) or ''} {argument.__qualname__}".strip())
        elif self._stack:
            self._stack.pop()
        self._since = time.perf_counter()

    def _enter(self, name: str) -> None:
        self.calls[name] += 1
        self._stack.append(name)

    def table(self, title: str, steps: int, most: int = 30) -> str:
        total = sum(self.seconds.values())
        lines = [f"{title}: {total / steps * 1e3:.2f} ms per step", f"{'own ms':>8} {'calls':>8}  function"]
        for name, seconds in self.seconds.most_common(most):
            lines.append(f"{seconds / steps * 1e3:>8.3f} {self.calls[name] / steps:>8.1f}  {name}")
        return "\n".join(lines)


class Watched:
    """Batches whose reader is profiled: under a LookaheadLoader that is its planning thread."""

    def __init__(self, batches: list[Any], profile: HostProfile) -> None:
        self.batches, self.profile = batches, profile

    def __iter__(self) -> Iterator[Any]:
        self.profile.start()
        try:
            yield from self.batches
        finally:
            self.profile.stop()


def tables(title: str, threads: dict[str, HostProfile], steps: int) -> str:
    return "\n\n".join(p.table(f"{title}, {name}", steps) for name, p in threads.items() if p.calls)


def append(path: str, texts: Iterable[str]) -> None:
    with Path(path).open("a") as file:
        file.writelines(text + "\n\n" for text in texts)
