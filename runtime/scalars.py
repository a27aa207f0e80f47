"""`freescale.log_to(writer)`: the meter's values as scalars, for TensorBoard or any writer with `add_scalar`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from freescale.runtime import meter
from freescale.views.records import PARTS


def log_to(writer: Any, every: int = 1, prefix: str = "freescale") -> Callable[[], None]:
    """Log the time breakdown of every `every`-th step of this rank. Return a function that stops it.

        end = freescale.log_to(SummaryWriter())

    Writes `<prefix>/step_seconds`, and `<prefix>/exposed_share` etc. for the parts of a step: see
    `freescale.meter.steps`. On a GPU, a step is written some steps later, once the device has its times. Steps without
    a number are counted from the first one.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        found = type(writer).__name__
        raise TypeError(f"freescale: log_to needs a writer with add_scalar(name, value, step), found {found}")
    if every < 1:
        raise ValueError(f"freescale: log_to expects `every` to be at least 1, found {every}")
    unwritten: deque[tuple[int, meter.FinishedStep]] = deque()
    seen = 0

    def write(number: int, step: meter.FinishedStep) -> None:
        summary = meter.summary(step)
        writer.add_scalar(f"{prefix}/step_seconds", summary["seconds"], number)
        for part in PARTS:
            writer.add_scalar(f"{prefix}/{part}_share", summary[part] / max(summary["seconds"], 1e-9), number)

    def listen(step: meter.FinishedStep) -> None:
        nonlocal seen
        if seen % every == 0:
            unwritten.append((step.name if isinstance(step.name, int) else seen, step))
        seen += 1
        while unwritten and meter.is_known(unwritten[0][1]):
            write(*unwritten.popleft())

    stop = meter.METER.listen(listen)

    def end() -> None:
        stop()
        while unwritten:
            write(*unwritten.popleft())

    return end
