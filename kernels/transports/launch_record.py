"""Records of launches and of the waits for them, read by the meter.

`_c10d_functional.wait_tensor`, in the same graph or a later one, calls the `wait` of a `RecordedWork` around the
group's Work or a transport's message. So every wait is timed, labeled for the profiler, and fails with a message that
names what failed. On a GPU the host proceeds; two events around the wait measure it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed, logs
from freescale.kernels.ops.schemas import PRIORITY_NAMES
from freescale.kernels.transports import cuda_driver

MAX_RECORDS = 100_000
DENSE = "dense gradients"  # the label of all dense gradients


@dataclass(slots=True, eq=False)
class LaunchRecord:
    """One launch, or one period in which the host was blocked (`bytes` 0). Times are seconds of time.perf_counter()."""

    label: str
    bytes: int
    launched: float = field(default_factory=time.perf_counter)
    wait_began: float = 0.0  # 0.0: not waited for yet
    wait_ended: float = 0.0
    arrived_before_wait: bool = False  # if so, the flight time is only known to end before the wait began
    stream_seconds: float | None = None  # the stream's wait, if the host did not wait
    events: tuple[cuda_driver.CudaDriver, Any, Any] | None = None  # around that wait, until they are read

    def exposed_seconds(self) -> float:
        """Seconds that compute was stalled. On a GPU 0.0 until the device has reached the wait."""
        self.read_events()
        return self.wait_ended - self.wait_began if self.stream_seconds is None else self.stream_seconds

    def read_events(self) -> bool:
        """Read the events if the device has reached them; whether none are left."""
        if (events := self.events) is not None:
            driver, began, ended = events
            if not driver.is_done(ended):
                return False
            self.stream_seconds, self.events = driver.seconds_between(began, ended), None
        return True

    def flight_seconds(self) -> float:
        """Seconds from the launch to the observed arrival; an upper bound if no one was waiting then."""
        seen_arrived = self.wait_began if self.arrived_before_wait else self.wait_ended
        return max(seen_arrived - self.launched, 0.0)


records: deque[LaunchRecord] = deque(maxlen=MAX_RECORDS)


# Describes how a rank left the open loop; "" if none left.
why_rank_left: Callable[[], str] = str
launched = 0  # launches so far; all ranks make the same ones in the same order
awaited: RecordedWork | None = None  # the work that the host is blocked on
_beside_compute = False  # the current stream is not the one that computes
# C++ holds a Work but not its Python half, which is kept here until the wait.
_not_waited_for: dict[int, RecordedWork] = {}


class StreamWaits:
    """Waits on the streams of one device. Their events are read and recycled as later waits are recorded."""

    def __init__(self, device: torch.device) -> None:
        self.driver = cuda_driver.driver_of(device)
        self._unread: deque[LaunchRecord] = deque()

    def event(self) -> Any:
        """Record an event on the current stream."""
        return self.driver.record_event(self.driver.current_stream(), timing=True)

    def add(self, record: LaunchRecord, began: Any) -> None:
        """Record the end of a wait that started at `began`."""
        record.stream_seconds, record.events = 0.0, (self.driver, began, self.event())
        self._unread.append(record)

    def read_oldest(self) -> None:
        if self._unread and self._unread[0].read_events():
            self._unread.popleft()


_stream_waits = cache(StreamWaits)


class RecordedWork(dist.Work):
    """Records the wait for a launch's Work. `size`: bytes received, if not those of `out`. `then`: called after the
    wait, on a GPU for work that must follow on the same stream."""

    def __init__(
        self, work: Any, label: str, out: torch.Tensor, group: dist.ProcessGroup, size: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.work, self.group, self.then = work, group, then
        self.stream_waits = _stream_waits(out.device) if out.is_cuda else None
        self.record = LaunchRecord(label, out.nbytes if size is None else size)
        records.append(self.record)
        global launched
        self.number = launched = launched + 1
        _not_waited_for[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _not_waited_for.pop(id(self), None)
        r = self.record
        r.wait_began = time.perf_counter()
        try:
            with profiler_range("wait for", r.label):
                self._wait(r)
        except RuntimeError as error:
            why = why_rank_left()
            raise RuntimeError(
                f"freescale: {why and f'{why}; '}rank {self.group.rank()} waited for {r.label} ({r.bytes} bytes), "
                f"which did not arrive: a rank failed, left or exceeded the group's timeout. The group reports: {error}"
            ) from error
        finally:
            r.wait_ended = time.perf_counter()
        if (then := self.then) is not None:
            self.then = None  # may hold tensors
            then()
        return True

    def _wait(self, record: LaunchRecord) -> None:
        record.arrived_before_wait = self.work.is_completed()
        if (waits := self.stream_waits) is None:
            global awaited
            awaited = self
            try:
                self.work.wait()
            finally:
                awaited = None
            return
        if record.arrived_before_wait or _beside_compute:
            self.work.wait()
            record.stream_seconds = 0.0
        else:
            began = waits.event()
            self.work.wait()
            waits.add(record, began)
        waits.read_oldest()


@cache
def launch_label(what: str, priority: int, table: str) -> str:
    return f"{PRIORITY_NAMES[priority]} {what} of {table}"


def register_launch(
    work: Any, label: str, out: torch.Tensor, group: dist.ProcessGroup, size: int | None = None,
    then: Callable[[], None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Register `work` for `out`, so that a wait for `out` waits for it, and record it. Arguments as of RecordedWork."""
    distributed.register_work(out, RecordedWork(work, label, out, group, size, then))
    return out


_NO_PROFILER = nullcontext()


def profiler_range(what: str, label: str = "") -> Any:
    """A named range in torch profiler traces; a no-op if no profiler is on."""
    if not logs.profiling():
        return _NO_PROFILER
    return torch.profiler.record_function(f"freescale: {what} {label}".rstrip())


@contextmanager
def beside_compute() -> Iterator[None]:
    """Waits of the current stream do not stall compute."""
    global _beside_compute
    _beside_compute = True
    try:
        yield
    finally:
        _beside_compute = False


def add_host_wait(label: str, began: float, ended: float) -> None:
    """Record a period in which the host waited, in seconds of time.perf_counter()."""
    records.append(LaunchRecord(label, 0, began, began, ended))


def begin_wait(label: str, device: torch.device) -> Callable[[], None]:
    """Record a wait of the current GPU stream, or of the host, until the returned function is called."""
    record = LaunchRecord(label, 0)
    record.wait_began = record.launched
    waits = _stream_waits(device) if device.type == "cuda" else None
    began = None if waits is None else waits.event()

    def end() -> None:
        if waits is not None:
            waits.add(record, began)
        record.wait_ended = time.perf_counter()
        records.append(record)

    return end


@contextmanager
def record_host_wait(label: str) -> Iterator[None]:
    """Record a period in which the host communicates with other ranks and is blocked."""
    began = time.perf_counter()
    try:
        with profiler_range(label):
            yield
    finally:
        add_host_wait(label, began, time.perf_counter())
