"""Whether steps overlap their neighbours, where that is left to the loader: both ways are tried, the faster is kept.

Two batches that are kept apart have nothing early or late between them. The graphs are the same, and so are all
numbers: a choice changes the time that a step takes and nothing else. Rank 0 decides for all (BatchPlan.request).
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

from freescale.runtime.meter import FinishedStep

log = logging.getLogger(__name__)

WARM_UP = 24  # batches before the first trial: graphs are compiled, memory is found
BLOCK = 10  # batches one way, then as many the other way
BLOCKS = 4
SETTLING = 6  # batches behind a trial: its last steps are still under way when the next batches are planned
EVERY = 1000  # batches from a trial to the next one: batches change
DECIDED_AFTER = WARM_UP + BLOCKS * BLOCK + SETTLING + 1  # batches
WORTH = 0.99  # steps are kept apart where that takes less than so much of the time


class OverlapChoice:
    """For one loader. The training thread tells it how long steps took, the planning thread asks for each batch."""

    def __init__(self) -> None:
        self.overlap = True
        self._asked = -WARM_UP  # batches since the trial began, or until it begins
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of steps of the trial, by `apart`
        self._unread: deque[tuple[bool, FinishedStep]] = deque()  # the device has not told all of them yet

    def keep_apart(self) -> bool:
        """Whether to keep the next batch apart from the one before it."""
        number, self._asked = self._asked, self._asked + 1
        if number == 0:
            self._seconds = {True: [], False: []}
        if 0 <= number < BLOCKS * BLOCK:
            return number // BLOCK % 2 == 1
        if number == BLOCKS * BLOCK + SETTLING:
            self._decide()
            self._asked -= EVERY
        return not self.overlap

    def step_finished(self, apart: bool, step: FinishedStep) -> None:
        """`apart`: from both neighbours; steps that overlap one of them do not count."""
        self._unread.append((apart, step))
        while self._unread:
            apart, step = self._unread[0]
            if step.on_device is not None and not step.on_device.read():
                break
            self._unread.popleft()
            self._seconds[apart].append(step.seconds if step.on_device is None else step.on_device.seconds)

    def _decide(self) -> None:
        if any(len(s) < BLOCK for s in self._seconds.values()):
            return  # most of the batches were not trained on
        overlapping, apart = (statistics.median(self._seconds[way]) * 1e3 for way in (False, True))
        self.overlap = apart >= WORTH * overlapping
        log.info(
            "steps take %.3g ms if they overlap and %.3g ms if they are kept apart: they %s",
            overlapping, apart, "overlap" if self.overlap else "are kept apart"
        )  # fmt: skip
