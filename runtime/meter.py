"""The bubble meter: per step of this rank, where its time went and what was sent; and `freescale.log_to`, its scalars.
A LookaheadLoader marks the end of each step; without one, call `freescale.meter.mark()`.

On a GPU the host runs ahead of the device, so a step is the time between two events on the compute stream. A third
event right before the step's graph shows how long the stream was idle until then; the host's records show why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.transports import cuda_driver, launch_record
from freescale.views.records import BETWEEN_STEPS, LOADER, PARTS, PLANNER, RENDEZVOUS, straggling


def log_to(writer: Any, every: int = 1, prefix: str = "freescale") -> Callable[[], None]:
    """Log the time breakdown of every `every`-th step of this rank. Return a function that stops it.

        end = freescale.log_to(SummaryWriter())

    Writes `<prefix>/step_seconds`, and `<prefix>/exposed_share` etc. for the parts of a step: see
    `freescale.meter.steps`. On a GPU, a step is written some steps later. Steps without a number are counted from the
    first one.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        found = type(writer).__name__
        raise TypeError(f"freescale: log_to needs a writer with add_scalar(name, value, step), found {found}")
    if every < 1:
        raise ValueError(f"freescale: log_to expects `every` to be at least 1, found {every}")
    unwritten: deque[tuple[int, FinishedStep]] = deque()
    seen = 0

    def write(number: int, step: FinishedStep) -> None:
        found = summary(step)
        writer.add_scalar(f"{prefix}/step_seconds", found["seconds"], number)
        for part in PARTS:
            writer.add_scalar(f"{prefix}/{part}_share", found[part] / max(found["seconds"], 1e-9), number)

    def listen(step: FinishedStep) -> None:
        nonlocal seen
        if seen % every == 0:
            unwritten.append((step.name if isinstance(step.name, int) else seen, step))
        seen += 1
        while unwritten and is_known(unwritten[0][1]):
            write(*unwritten.popleft())

    stop = METER.listen(listen)

    def end() -> None:
        stop()
        while unwritten:
            write(*unwritten.popleft())

    return end


KEPT = 10_000
_MOST_UNTOLD = 64  # steps whose times may still be sent to other ranks


class DeviceStep:
    """A step on a GPU, timed on its compute stream: from its start to its graph's start, and to its end."""

    def __init__(self, device: torch.device, end_of_last: tuple[Any, int, Any] | None = None) -> None:
        """`end_of_last`: the return value of the previous step's `end`."""
        self._driver = cuda_driver.driver_of(device)
        self._stream = self._driver.current_stream()
        same_place = end_of_last is not None and end_of_last[:2] == (self._driver, self._stream)
        began = end_of_last[2] if end_of_last is not None and same_place else self._record()
        self._events: list[Any] = [began, None, None]  # its start, its graph's start, its end
        self._host_began = time.perf_counter()
        self.host_seconds = 0.0  # until the graph started
        self.gap_seconds = self.seconds = 0.0  # on the device, set by `read`

    def _record(self) -> Any:
        return self._driver.record_event(self._stream, timing=True)

    def graph_begins(self) -> None:
        if self._events and self._events[1] is None:
            self._events[1] = self._record()
            self.host_seconds = time.perf_counter() - self._host_began

    def end(self) -> tuple[Any, int, Any]:
        """Return the event, and the driver and stream that recorded it."""
        self._events[2] = self._record()
        return self._driver, self._stream, self._events[2]

    def read(self) -> bool:
        """Read the times if the device has reached the end; return whether it has."""
        events = self._events  # another thread may clear them concurrently
        if not events:
            return True
        began, graph_began, ended = events
        if ended is None or not self._driver.is_done(ended):
            return False
        self.seconds = self._driver.seconds_between(began, ended)
        if graph_began is not None:
            self.gap_seconds = self._driver.seconds_between(began, graph_began)
        self._events = []
        return True


@dataclass(eq=False, slots=True)
class FinishedStep:
    name: Any
    seconds: float
    records: list[launch_record.LaunchRecord]  # of its launches
    on_device: DeviceStep | None = None
    began: float = 0.0  # by time.perf_counter()
    longest_busy: float | None = None  # busy seconds of the busiest rank; None: unknown


class RankTimes:
    """Busy time of each rank in the steps of one loop. Ranks exchange these along with the plans of later batches."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._untold: deque[tuple[int, FinishedStep]] = deque(maxlen=_MOST_UNTOLD)  # of this rank, not sent yet
        self._steps: dict[int, FinishedStep] = {}  # not all ranks have reported these
        self._told: dict[int, tuple[int, int]] = {}  # for these: number of reports, and max nanoseconds

    def ended(self, number: int, step: FinishedStep | None) -> None:
        """Called by the training thread. `step`: None if no step preceded a batch."""
        if step is not None and number >= 0:
            self._untold.append((number, step))

    def tell(self) -> tuple[int, int]:
        """Number and nanoseconds of a finished step, or (-1, 0). In the planning thread, like `hear`."""
        if not self._untold or not is_known(self._untold[0][1]):
            return -1, 0
        number, step = self._untold.popleft()
        self._steps[number] = step
        return number, max(round(summary(step)["busy"] * 1e9), 0)

    def hear(self, of_ranks: Sequence[tuple[int, int]] | np.ndarray) -> None:
        numbers, times = np.asarray(of_ranks).T
        for number in np.unique(numbers[numbers >= 0]).tolist():
            of_step = times[numbers == number]
            reports, longest = self._told.pop(number, (0, 0))
            reports, longest = reports + len(of_step), max(longest, int(of_step.max()))
            if reports == self._world:
                self._steps.pop(number).longest_busy = longest / 1e9
            else:
                self._told[number] = reports, longest
        while len(self._told) > _MOST_UNTOLD:  # a rank that evaluates drops some
            self._steps.pop(oldest := next(iter(self._told)), None)
            del self._told[oldest]


class Meter:
    """Steps of this rank. There is one per process: `freescale.meter`."""

    def __init__(self) -> None:
        self._steps: deque[FinishedStep] = deque(maxlen=KEPT)
        self._unread: deque[DeviceStep] = deque()
        self._began: float | None = None
        self._step_name: Any = None
        self._on_device: DeviceStep | None = None
        self._listeners: list[Callable[[FinishedStep], None]] = []

    def mark(self, step: Any = None, device: torch.device | None = None) -> FinishedStep | None:
        """End the current step and start the next one, called `step`. Return the finished one, for `summary`. `device`:
        a GPU whose current stream runs the step, and then measures waits before the model call."""
        now, records = time.perf_counter(), list(launch_record.records)
        launch_record.records.clear()
        # A launch with a pending wait belongs to the step that will wait for it.
        launch_record.records.extend(r for r in records if not r.wait_ended)
        records = [r for r in records if r.wait_ended]
        finished = end_of_last = None
        if self._began is not None:
            if self._on_device is not None:
                end_of_last = self._on_device.end()
            finished = FinishedStep(self._step_name, now - self._began, records, self._on_device, self._began)
            self._steps.append(finished)
            for listener in self._listeners:
                listener(finished)
        self._began, self._step_name, self._on_device = now, step, None
        if device is not None and device.type == "cuda":
            self._on_device = DeviceStep(device, end_of_last)
            self._unread.append(self._on_device)
        while self._unread and self._unread[0].read():
            self._unread.popleft()
        return finished

    def graph_begins(self) -> None:
        """Mark the start of the model call of the current step."""
        if self._on_device is not None:
            self._on_device.graph_begins()

    def pause(self) -> None:
        """End the current step without starting another: what follows is not training."""
        self.mark()
        self._began = None

    def discard(self) -> None:
        if self._on_device is not None:
            self._unread.remove(self._on_device)
        self._began, self._on_device = None, None

    def clear(self) -> None:
        self._steps.clear()

    def host_bound_share(self, last: int = 100) -> float:
        """Share of the last steps in which the GPU was idle because of the host; 0.0 without a GPU."""
        known = [summary(s) for s in list(self._steps)[-last:] if is_known(s)]
        seconds = sum(s["seconds"] for s in known)
        return sum(s["host_bound"] for s in known) / seconds if seconds else 0.0

    def listen(self, listener: Callable[[FinishedStep], None]) -> Callable[[], None]:
        """Call `listener` with each finished step, in the training thread. Return a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def steps(self) -> list[dict[str, Any]]:
        """One entry per step, oldest first, times in seconds. Empty before the first step ends.

        step        its name: the batch number with a LookaheadLoader
        seconds     from its start to its end, on a GPU on its compute stream: the sum of the following five
        compute     the rest of the step
        exposed     this rank was idle because rows or gradients had not arrived, and no rank was busier
        loader      waiting for the data loader, or for the batch's plan
        straggler   waiting for a rank with more work in this step: at most the difference in busy time. With a
                    LookaheadLoader, ranks exchange busy times about three steps later. For a step without them, this is
                    the wait for the other ranks to start it, and the rest is in `exposed`
        host_bound  the GPU was idle while the host did other work before the model call. (Gaps between kernels of a
                    graph are in `compute`; use torch's profiler for these.)
        busy        compute and host_bound: this rank's own work
        waits       exposed, loader and straggler by cause: "urgent rows of item", "late gradients of item", "dense
                    gradients", "loader", "planner", "rendezvous", ...
        bytes       received, by the same names; for compressed rows, excluding a rank's messages to itself
        flight      from launch to arrival, by the same names; an upper bound if it arrived before the wait
        """
        return [summary(s) for s in self._steps]


def summary(step: FinishedStep) -> dict[str, Any]:
    """One entry of `Meter.steps`."""
    seconds, on_device = step.seconds, step.on_device
    waits: dict[str, float] = {}
    sizes: dict[str, int] = {}
    flight: dict[str, float] = {}
    for r in step.records:
        waits[r.label] = waits.get(r.label, 0.0) + r.exposed_seconds()
        sizes[r.label] = sizes.get(r.label, 0) + r.bytes
        flight[r.label] = flight.get(r.label, 0.0) + r.flight_seconds()
    host_bound = 0.0
    if on_device is not None:
        # Host waits count to the extent that the stream was idle meanwhile.
        known = on_device.read()
        seconds = on_device.seconds if known else seconds
        idle = on_device.gap_seconds / on_device.host_seconds if on_device.host_seconds else 0.0
        for label in BETWEEN_STEPS:
            if label in waits:
                waits[label] *= min(idle, 1.0)
        host_bound = max(on_device.gap_seconds - sum(waits.get(label, 0.0) for label in BETWEEN_STEPS), 0.0)
    loader = waits.get(LOADER, 0.0) + waits.get(PLANNER, 0.0)
    for_ranks = sum(waits.values()) - loader
    busy = seconds - loader - for_ranks
    straggler = straggling(busy, for_ranks, waits.get(RENDEZVOUS, 0.0), step.longest_busy)
    return {
        "step": step.name,
        "seconds": seconds,
        "compute": busy - host_bound,
        "exposed": for_ranks - straggler,
        "loader": loader,
        "straggler": straggler,
        "host_bound": host_bound,
        "busy": busy,
        "waits": waits,
        "bytes": sizes,
        "flight": flight,
    }


def is_known(step: FinishedStep) -> bool:
    """Whether all times of the step have been read from the GPU."""
    return all(r.read_events() for r in step.records) and (step.on_device is None or step.on_device.read())


def record_averages(model: torch.nn.Module, tables: Sequence[str], device: torch.device) -> Callable[[], None]:
    """With DDP, attribute the wait for its gradient averaging to dense gradients: the wait at the end of a backward
    pass that updates the `tables`. Return a function that undoes this."""
    if not any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        return lambda: None
    updated = 0

    def table_updated() -> None:
        nonlocal updated
        updated = (updated + 1) % len(tables)
        if updated == 0:
            distributed.around_end_of_backward(lambda: launch_record.begin_wait(launch_record.DENSE, device))

    return table_registry.call_after_backward(tables, table_updated)


METER = Meter()
