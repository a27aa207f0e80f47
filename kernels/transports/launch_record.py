"""What was launched, and how long somebody waited for it: the record that the meter reads.

A `Launched` stands for the group's own Work. `_c10d_functional.wait_tensor` calls its `wait`, in the same graph or in a
later one, so every wait of ours is timed, labelled for the profiler, and fails with words that say what failed.

On a GPU a wait is put on the stream and the host goes on; then two events around it tell how long the stream stood.
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

KEPT = 100_000


class Record:
    """One launch, or one time that the host was blocked (`bytes` 0). Times are seconds of time.perf_counter()."""

    __slots__ = ("label", "bytes", "launched", "wait_began", "wait_ended", "there_before", "events")

    def __init__(self, label: str, size: int) -> None:
        self.label, self.bytes = label, size
        self.launched = time.perf_counter()
        self.wait_began = self.wait_ended = 0.0  # 0.0: nobody has waited yet
        self.there_before = False  # it had arrived when the wait began: the time on the wire is at most until then
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def exposed(self) -> float:
        """Seconds that compute stood still for it. With events: 0.0 until the device has got there."""
        if self.events is not None:
            began, ended = self.events
            return began.elapsed_time(ended) / 1e3 if ended.query() else 0.0
        return self.wait_ended - self.wait_began

    def flight(self) -> float:
        """Seconds from the launch until it was seen to have arrived; an upper bound if nobody was waiting then."""
        seen = self.wait_began if self.there_before else self.wait_ended
        return max(seen - self.launched, 0.0)


records: deque[Record] = deque(maxlen=KEPT)
_under_way: dict[int, Launched] = {}  # C++ holds the Work, not its Python half: it is kept here until it is waited for


class Launched(dist.Work):
    def __init__(self, work: Any, label: str, out: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.work, self.group, self.on_gpu = work, group, out.is_cuda
        self.record = Record(label, out.numel() * out.element_size())
        records.append(self.record)
        _under_way[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _under_way.pop(id(self), None)
        r = self.record
        began = _event() if self.on_gpu else None
        r.there_before = self.work.is_completed()
        r.wait_began = time.perf_counter()
        try:
            with label(f"wait for {r.label}"):
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


def started(
    work: Any, what: str, priority: int, out: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Register `work` for `out`, so that a wait for `out` waits for it, and note it."""
    distributed.register_work(out, Launched(work, f"{PRIORITY_NAMES[priority]} {what}", out, group))
    return out


def label(name: str) -> Any:
    """A name in the torch profiler's trace; nothing where no profiler is on."""
    return torch.profiler.record_function(f"freescale: {name}") if logs.profiling() else nullcontext()


@contextmanager
def blocked(name: str) -> Iterator[None]:
    """The host talks to other ranks and can do nothing else."""
    record = Record(name, 0)
    record.wait_began = record.launched
    try:
        with label(name):
            yield
    finally:
        record.wait_ended = time.perf_counter()
        records.append(record)
