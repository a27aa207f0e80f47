"""Whether steps overlap their neighbours, where that is left to the loader: both ways are tried, the faster is kept.

Two batches that are kept apart have nothing early or late between them. The graphs are the same, and so are all
numbers: a choice changes the time that a step takes and nothing else. Rank 0 decides for all (BatchPlan.request).
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import deque

from freescale.runtime.meter import FinishedStep

log = logging.getLogger(__name__)

WARM_UP = 24  # batches before the first trial: graphs are compiled, memory is found
# A trial: batches one way, then as many the other way, and so on. What else runs on a host can slow it by a fifth for
# ten steps on end: so neighbours are compared, and there are many.
BLOCK = 6
BLOCKS = 20
SETTLING = 6  # batches behind a trial: its last steps are still under way when the next batches are planned
EVERY = 2000  # batches from a trial to the next one: batches change
DECIDED_AFTER = WARM_UP + BLOCKS * BLOCK + SETTLING + 1  # batches
# Steps are kept apart where that takes less than so much of the time. A trial shows a part only of what it saves: ranks
# that keep steps apart do not wait for each other before them (begun_step.py), but at the ends of a block they do.
WORTH = 1.0
_FEW = 3  # steps: of a block with fewer, nothing can be said


class OverlapChoice:
    """For one loader. The training thread tells it how long steps took, the planning thread asks for each batch."""

    def __init__(self) -> None:
        self.overlap = True
        self._asked = -WARM_UP  # batches since the trial began, or until it begins
        self._blocks: list[tuple[bool, list[float]]] = []  # of the trial: `apart`, and seconds of steps
        self._unread: deque[tuple[bool, FinishedStep]] = deque()  # the device has not told all of them yet

    def keep_apart(self) -> bool:
        """Whether to keep the next batch apart from the one before it."""
        number, self._asked = self._asked, self._asked + 1
        if number == 0:
            self._blocks = []
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
            if self._asked >= 0:
                self._add(apart, step.seconds if step.on_device is None else step.on_device.seconds)

    def _add(self, apart: bool, seconds: float) -> None:
        blocks = self._blocks  # the planning thread begins another list
        if not blocks or blocks[-1][0] != apart:
            blocks.append((apart, []))
        blocks[-1][1].append(seconds)

    def _decide(self) -> None:
        blocks = [(apart, _typical(seconds)) for apart, seconds in self._blocks if len(seconds) >= _FEW]
        pairs = [dict(pair) for pair in itertools.pairwise(blocks) if pair[0][0] != pair[1][0]]
        if len(pairs) < BLOCKS // 2:
            return  # most of the batches were not trained on
        ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
        self.overlap = ratio >= WORTH
        log.info(
            "a step that is kept apart takes %.3g of the time of one that overlaps its neighbours (%.3g ms): they %s",
            ratio, statistics.median(pair[False] for pair in pairs) * 1e3,
            "overlap" if self.overlap else "are kept apart"
        )  # fmt: skip


def _typical(seconds: list[float]) -> float:
    """The mean without the longest step: now and then there is one that writes a checkpoint."""
    return statistics.fmean(sorted(seconds)[:-1])
