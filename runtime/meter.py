"""The bubble meter: per step of this rank, what was waited for and for how long, what travelled, what was computed.

It is always on: a few microseconds per launch. A LookaheadLoader marks where a step ends; without one,
`freescale.meter.mark()` does.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from freescale.kernels.transports import launch_record

KEPT = 10_000


class FinishedStep(NamedTuple):
    name: Any
    seconds: float
    records: list[launch_record.LaunchRecord]  # of its launches


class Meter:
    """Steps of this rank. One for the process: `freescale.meter`."""

    def __init__(self) -> None:
        self._steps: deque[FinishedStep] = deque(maxlen=KEPT)
        self._began: float | None = None
        self._step_name: Any = None

    def mark(self, step: Any = None) -> FinishedStep | None:
        """A step ends here and the next one, called `step`, begins. Returns the one that ended, for `summary`."""
        now, records = time.perf_counter(), list(launch_record.records)
        # A launch that nobody has waited for yet belongs to the step that will wait.
        launch_record.records.clear()
        launch_record.records.extend(r for r in records if not r.wait_ended)
        finished = None
        if self._began is not None:
            finished = FinishedStep(self._step_name, now - self._began, [r for r in records if r.wait_ended])
            self._steps.append(finished)
        self._began, self._step_name = now, step
        return finished

    def pause(self) -> None:
        """A step ends here and no other begins: what follows is not training."""
        self.mark()
        self._began = None

    def clear(self) -> None:
        self._steps.clear()

    def steps(self) -> list[dict[str, Any]]:
        """One entry per step, oldest first, times in seconds.

        step      its name: the number of the batch under a LookaheadLoader
        seconds   from its begin to its end
        exposed   of those, this rank computed nothing because what it waited for was not there
        compute   the rest: seconds - exposed
        waits     exposed by what was waited for: "urgent rows", "late gradients", "meeting of the ranks", ...
        bytes     received, by the same names
        flight    from launch to arrival, by the same names; an upper bound where it arrived before it was waited for
        """
        return [summary(*s) for s in self._steps]


def summary(name: Any, seconds: float, records: list[launch_record.LaunchRecord]) -> dict[str, Any]:
    """One entry of `Meter.steps`."""
    waits: dict[str, float] = {}
    sizes: dict[str, int] = {}
    flight: dict[str, float] = {}
    for r in records:
        waits[r.label] = waits.get(r.label, 0.0) + r.exposed_seconds()
        sizes[r.label] = sizes.get(r.label, 0) + r.bytes
        flight[r.label] = flight.get(r.label, 0.0) + r.flight_seconds()
    exposed = sum(waits.values())
    return {
        "step": name,
        "seconds": seconds,
        "exposed": exposed,
        "compute": seconds - exposed,
        "waits": waits,
        "bytes": sizes,
        "flight": flight,
    }


METER = Meter()
