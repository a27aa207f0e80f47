"""What was launched, and how long somebody waited for it: the record that the meter reads.

A `RecordedWork` stands for the group's own Work. `_c10d_functional.wait_tensor` calls its `wait`, in the same graph or
in a later one, so every wait of ours is timed, labelled for the profiler, and fails with words that say what failed.

On a GPU a wait is put on the stream and the host goes on; then two events around it tell how long the stream waited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed, logs
from freescale.kernels.ops.schemas import PRIORITY_NAMES

MAX_RECORDS = 100_000


class LaunchRecord:
    """One launch, or one time that the host was blocked (`bytes` 0). Times are seconds of time.perf_counter()."""

    __slots__ = ("label", "bytes", "launched", "wait_began", "wait_ended", "arrived_before_wait", "events")

    def __init__(self, label: str, size: int) -> None:
        self.label, self.bytes = label, size
        self.launched = time.perf_counter()
        self.wait_began = self.wait_ended = 0.0  # 0.0: nobody has waited yet
        self.arrived_before_wait = False  # then the time on the wire is at most until the wait began
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def exposed_seconds(self) -> float:
        """How long compute stood still for it. With events: 0.0 until the device has got there."""
        if self.events is not None:
            began, ended = self.events
            return began.elapsed_time(ended) / 1e3 if ended.query() else 0.0
        return self.wait_ended - self.wait_began

    def flight_seconds(self) -> float:
        """From the launch until it was seen to have arrived; an upper bound if nobody was waiting then."""
        seen_arrived = self.wait_began if self.arrived_before_wait else self.wait_ended
        return max(seen_arrived - self.launched, 0.0)


records: deque[LaunchRecord] = deque(maxlen=MAX_RECORDS)
# C++ holds a Work but not its Python half: that is kept here until somebody waits for it.
_not_waited_for: dict[int, RecordedWork] = {}


class RecordedWork(dist.Work):
    """The work of a launch; a wait for it is recorded."""

    def __init__(self, work: Any, label: str, out: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.work, self.group, self.on_gpu = work, group, out.is_cuda
        self.record = LaunchRecord(label, out.numel() * out.element_size())
        records.append(self.record)
        _not_waited_for[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _not_waited_for.pop(id(self), None)
        r = self.record
        began = _event() if self.on_gpu else None
        r.arrived_before_wait = self.work.is_completed()
        r.wait_began = time.perf_counter()
        try:
            with profiler_range(f"wait for {r.label}"):
                self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"freescale: rank {self.group.rank()} waited for {r.label} ({r.bytes} bytes) in vain: a rank failed, "
                f"left or was too slow for the group's time-out. The group says: {error}"
            ) from error
        finally:
            r.wait_ended = time.perf_counter()
            if began is not None:
                r.events = (began, _event())
        return True


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def register_launch(
    work: Any, what: str, priority: int, out: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Register `work` for `out`, so that a wait for `out` waits for it, and record it."""
    distributed.register_work(out, RecordedWork(work, f"{PRIORITY_NAMES[priority]} {what}", out, group))
    return out


def profiler_range(name: str) -> Any:
    """A named range in the torch profiler's trace; nothing where no profiler is on."""
    return torch.profiler.record_function(f"freescale: {name}") if logs.profiling() else nullcontext()


@contextmanager
def record_host_wait(name: str) -> Iterator[None]:
    """Record a time in which the host talks to other ranks and can do nothing else."""
    record = LaunchRecord(name, 0)
    record.wait_began = record.launched
    try:
        with profiler_range(name):
            yield
    finally:
        record.wait_ended = time.perf_counter()
        records.append(record)
