"""The bubble meter: per step of this rank, where its time went and what travelled.

It is always on: a few microseconds per launch. A LookaheadLoader marks where a step ends; without one,
`freescale.meter.mark()` does.

On a GPU the host runs ahead of the device, so that a time in which the host waited need not be one in which the device
had nothing to do. There, a step is what lies between two events on the compute stream; a third one in front of its
graph tells how long the stream stood still until then, and what the host did meanwhile says why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from freescale.kernels.transports import cuda_driver, launch_record

KEPT = 10_000
LOADER, PLANNER, MEETING = "loader", "planner", "meeting of the ranks"  # what the host waits for between two steps
BETWEEN_STEPS = (LOADER, PLANNER, MEETING)


class DeviceStep:
    """A step on a GPU, as its compute stream sees it: from where it begins until its graph begins, and to its end."""

    def __init__(self, device: torch.device, end_of_last: tuple[Any, int, Any] | None = None) -> None:
        """`end_of_last`: what `end` of the step before has just returned."""
        self._driver = cuda_driver.driver_of(device)
        self._stream = self._driver.current_stream()
        same_place = end_of_last is not None and end_of_last[:2] == (self._driver, self._stream)
        began = end_of_last[2] if end_of_last is not None and same_place else self._record()
        self._events: list[Any] = [began, None, None]  # its begin, its graph's, its end
        self._host_began = time.perf_counter()
        self.host_seconds = 0.0  # until the graph began
        self.gap_seconds = self.seconds = 0.0  # until the device has got there

    def _record(self) -> Any:
        return self._driver.record_event(self._stream, timing=True)

    def graph_begins(self) -> None:
        if self._events and self._events[1] is None:
            self._events[1] = self._record()
            self.host_seconds = time.perf_counter() - self._host_began

    def end(self) -> tuple[Any, int, Any]:
        """The event, and what it was recorded with and on."""
        self._events[2] = self._record()
        return self._driver, self._stream, self._events[2]

    def read(self) -> bool:
        """Whether the device has told all there is to tell."""
        events = self._events  # another thread may have read them in between
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


class FinishedStep(NamedTuple):
    name: Any
    seconds: float
    records: list[launch_record.LaunchRecord]  # of its launches
    on_device: DeviceStep | None = None
    began: float = 0.0  # by time.perf_counter()


class Meter:
    """Steps of this rank. One for the process: `freescale.meter`."""

    def __init__(self) -> None:
        self._steps: deque[FinishedStep] = deque(maxlen=KEPT)
        self._unread: deque[DeviceStep] = deque()
        self._began: float | None = None
        self._step_name: Any = None
        self._on_device: DeviceStep | None = None
        self._listeners: list[Callable[[FinishedStep], None]] = []

    def mark(self, step: Any = None, device: torch.device | None = None) -> FinishedStep | None:
        """A step ends here and the next one, called `step`, begins. Returns the one that ended, for `summary`.

        `device`: a GPU whose current stream the step computes on; then what it waits for before the model is called is
        told by that stream.
        """
        now, records = time.perf_counter(), list(launch_record.records)
        launch_record.records.clear()
        if not all(r.wait_ended for r in records):
            # A launch that nobody has waited for yet belongs to the step that will wait.
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

    def name_step(self, step: Any) -> None:
        """The step that is under way has this name."""
        self._step_name = step

    def graph_begins(self) -> None:
        """The model of the step that is under way is called now."""
        if self._on_device is not None:
            self._on_device.graph_begins()

    def pause(self) -> None:
        """A step ends here and no other begins: what follows is not training."""
        self.mark()
        self._began = None

    def discard(self) -> None:
        """There will be no such step as the one that has begun."""
        if self._on_device is not None:
            self._unread.remove(self._on_device)
        self._began, self._on_device = None, None

    def clear(self) -> None:
        self._steps.clear()

    def listen(self, listener: Callable[[FinishedStep], None]) -> Callable[[], None]:
        """Call `listener` with every step that ends, in the training thread. Returns a function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def steps(self) -> list[dict[str, Any]]:
        """One entry per step, oldest first, times in seconds. Empty where no step has ended.

        step        its name: the number of the batch under a LookaheadLoader
        seconds     from its begin to its end, on a GPU by its compute stream: the sum of the following five
        compute     the rest of the step
        exposed     this rank computed nothing because rows or gradients were not there
        loader      it waited for the loader to give a batch, or for the batch to be planned
        straggler   it waited for the other ranks to begin the step. (Where it begins before them, it waits for their
                    rows instead: `exposed`)
        host_bound  the GPU had no work while the host did something else before it called the model. (What a GPU waits
                    for between two kernels of a graph is in `compute`; a profile of torch tells.)
        waits       exposed, loader and straggler by what was waited for: "urgent rows of item", "late gradients of
                    item", "loader", "planner", "meeting of the ranks", ...
        bytes       received, by the same names; where rows are compressed, without what a rank has from itself
        flight      from launch to arrival, by the same names; an upper bound where it arrived before it was waited for
        """
        return [summary(*s[:4]) for s in self._steps]


def summary(
    name: Any, seconds: float, records: list[launch_record.LaunchRecord], on_device: DeviceStep | None = None
) -> dict[str, Any]:
    """One entry of `Meter.steps`."""
    waits: dict[str, float] = {}
    sizes: dict[str, int] = {}
    flight: dict[str, float] = {}
    for r in records:
        waits[r.label] = waits.get(r.label, 0.0) + r.exposed_seconds()
        sizes[r.label] = sizes.get(r.label, 0) + r.bytes
        flight[r.label] = flight.get(r.label, 0.0) + r.flight_seconds()
    host_bound = 0.0
    if on_device is not None:
        # What the host waited for counts as far as the stream stood still meanwhile.
        known = on_device.read()
        seconds = on_device.seconds if known else seconds
        idle = on_device.gap_seconds / on_device.host_seconds if on_device.host_seconds else 0.0
        for label in BETWEEN_STEPS:
            if label in waits:
                waits[label] *= min(idle, 1.0)
        host_bound = max(on_device.gap_seconds - sum(waits.get(label, 0.0) for label in BETWEEN_STEPS), 0.0)
    loader, straggler = waits.get(LOADER, 0.0) + waits.get(PLANNER, 0.0), waits.get(MEETING, 0.0)
    exposed = sum(waits.values()) - loader - straggler
    return {
        "step": name,
        "seconds": seconds,
        "compute": seconds - exposed - loader - straggler - host_bound,
        "exposed": exposed,
        "loader": loader,
        "straggler": straggler,
        "host_bound": host_bound,
        "waits": waits,
        "bytes": sizes,
        "flight": flight,
    }


def is_known(step: FinishedStep) -> bool:
    """Whether a GPU has told all its times."""
    return all(r.read_events() for r in step.records) and (step.on_device is None or step.on_device.read())


METER = Meter()
