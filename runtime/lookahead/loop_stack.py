"""The loops over LookaheadLoaders that are open on the same tables, one inside the other: their begin and their end."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from freescale.kernels.transports import launch_record
from freescale.runtime.lookahead.loop_state import UNKNOWN_BATCH, LoopState
from freescale.runtime.lookahead.planner import Planner
from freescale.runtime.lookahead.planning_connection import PlanningConnection
from freescale.runtime.lookahead.rank_status import Action, RankStatus, RankSync, require_expected_batch
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

# Ranks that an exception leaves together come within that; one that waits for this rank does not come at all.
_SECONDS_AFTER_EXCEPTION = 5.0


class LoopStack:
    """The innermost loop is the last. Nested ones only evaluate: a model is trained under one loader at a time."""

    def __init__(self, timeout: timedelta) -> None:
        self.loops: list[LoopState] = []
        # Groups of their own: nothing here comes between the collectives of the training. A rank may be as slow as in
        # training.
        self.timeout = timeout
        self._planning: list[PlanningConnection | None] = []  # one per depth of the stack
        self._sync = RankSync(self.planning_connection(1).group, self.new_cpu_group, timeout)
        self._opened = 0
        self._deferred_error: RuntimeError | None = None  # what Python did not raise where it happened

    def new_cpu_group(self) -> dist.ProcessGroup:
        """Of all ranks, waiting for a slow one as long as the training does. Collective."""
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def innermost(self) -> LoopState | None:
        return self.loops[-1] if self.loops else None

    @property
    def idle(self) -> bool:
        """No loop is open, and none has left an error to raise."""
        return not self.loops and self._deferred_error is None

    def open(self, exchanges: list[Exchange]) -> LoopState:
        if self._sync.failure is not None:
            raise RuntimeError(f"freescale: {self._sync.failure}")
        self.flush()
        self._opened += 1
        loop = LoopState(exchanges, self._opened)
        self.loops.append(loop)
        self._explain_failed_waits()
        return loop

    def planning_connection(self, depth: int) -> PlanningConnection:
        """For the innermost of so many loops: a thread of its own needs a connection of its own."""
        self._planning += [None] * (depth - len(self._planning))
        connection = self._planning[depth - 1]
        if connection is None:
            connection = self._planning[depth - 1] = PlanningConnection(self.new_cpu_group())
        return connection

    def require_innermost(self, loop: LoopState) -> None:
        if self.innermost is not loop:
            raise RuntimeError(
                "freescale: a model is used under two LookaheadLoaders at once: one asks for its next batch while the "
                "other is still running; finish or close the inner one first"
            )

    def close_innermost(self, exception: str = "") -> RuntimeError | None:
        """End the innermost loop and its planning. Returns what went wrong. `exception`: why this rank leaves
        the loop. Then others may be waiting for it where it cannot know, so it waits for them no longer than seconds.
        Otherwise as long as in training: one that waits for this rank finds in the store that it need not."""
        loop, failure = self.loops[-1], None
        why = self._sync.post_left(loop, exception)
        limit = _SECONDS_AFTER_EXCEPTION if exception else self.timeout.total_seconds()
        try:
            with self._sync.waiting_at_most(limit):
                self._agree_on_end(loop)
        except RuntimeError as error:
            failure = error
        loop.refuse_further_backwards()
        together = loop.failure is None or loop.failure_known_to_all
        loop.stop_planning(loop.batches_behind, together, "" if together else why)
        self.loops.pop()
        self._explain_failed_waits()
        if loop.planning_group_failed:  # every rank knows: the next loop makes a new one
            self._planning[len(self.loops)] = None
        return failure

    def watch(self, loop: LoopState, planner: Planner) -> None:
        """Neither the training nor a thread that plans for it waits for a rank that has left the loop."""
        planner.when_idle = partial(self._sync.release_wait, loop)
        planner.why_unplanned = partial(self._sync.why_unplanned, loop)

    def _explain_failed_waits(self) -> None:
        launch_record.why_rank_left = partial(self._sync.why_left, self.loops[-1]) if self.loops else str

    def _agree_on_end(self, loop: LoopState) -> None:
        """All ranks agree on the end of a loop, and apply what is pending."""
        cause = None
        loop.end_forward()
        try:
            if loop.failure is None and not loop.closed:
                self.synchronize(Action.CLOSE)
        except RuntimeError as error:
            cause = error
        if loop.failure is None:
            loop.wait_for_unused_rows()
        elif lost := loop.describe_loss():
            raise RuntimeError(lost) from cause
        elif self._sync.failure is not None:
            log.warning("freescale: a loop has ended without the other ranks, and it was the last: %s", loop.failure)

    def synchronize(self, action: Action, received: int = UNKNOWN_BATCH) -> list[RankStatus]:
        """In the innermost loop: see RankSync. Who trains has the batch that is expected, on every rank."""
        statuses = self._sync.synchronize(self.loops[-1], action, received)
        if action == Action.TRAIN:
            require_expected_batch(statuses)
        return statuses

    def flush(self) -> None:
        """Apply what is pending before the tables are used outside the planned order."""
        loop = self.innermost
        if loop is not None and max(loop.pending, loop.incomplete) >= 0:
            self.synchronize(Action.FLUSH)

    def defer(self, error: RuntimeError) -> None:
        """Python will not raise it where it happened; the next use of the tables will."""
        self._deferred_error = error

    def raise_deferred(self) -> None:
        if self._deferred_error is not None:
            error, self._deferred_error = self._deferred_error, None
            raise error
