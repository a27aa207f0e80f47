"""The open loops over the same tables, one inside the other: how they begin and end, and their process groups."""

from __future__ import annotations

import logging
from functools import partial
from typing import cast

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import launch_record, link_speed
from freescale.runtime.lookahead.rendezvous import Action, RankStatus, RankSync, require_expected_batch
from freescale.runtime.lookahead.step import UNKNOWN_BATCH, Loop
from freescale.runtime.lookahead.thread import PlanningConnection, PlanningThread
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

# If an exception leaves the loop on all ranks, they all arrive within this time.
_SECONDS_AFTER_EXCEPTION = 5.0


class Session:
    """One for all models that share a table. The innermost loop is the last; nested ones only evaluate, because a model
    is trained under one loader at a time."""

    def __init__(self, exchanges: list[Exchange], link_gbps: float) -> None:
        """Collective."""
        training_group = distributed.group_by_name(exchanges[0].group_name)
        self.loops: list[Loop] = []
        self.timeout = distributed.timeout_of(training_group)
        # Groups of their own, so that nothing here comes between the training's collectives.
        self._connections: list[PlanningConnection | None] = []  # one per depth of nesting
        self._sync = RankSync(self._connection(1).group, self._new_cpu_group, self.timeout)
        self._opened = 0
        self._deferred_error: RuntimeError | None = None  # one that Python could not raise where it happened
        # For early rows and late gradients: of the same kind as the training's, so that urgent ones overtake them.
        self._background_group = cast(dist.ProcessGroup, dist.new_group(timeout=self.timeout))
        reaches_hosts = "cpu" in distributed.devices_of_group(training_group)
        self._host_group = training_group if reaches_hosts else self._new_cpu_group()
        self._restore_group: dist.ProcessGroup | None = None
        bytes_per_second = link_speed.measure(self._background_group, exchanges[0].anchor.device, link_gbps)
        log.info("the link carries %.3g Gbit/s per rank", bytes_per_second * 8 / 1e9)

    def add(self, exchange: Exchange) -> None:
        exchange.background_group_name = self._background_group.group_name
        exchange.host_group_name = self._host_group.group_name
        speeds = link_speed.bytes_per_second
        speeds[exchange.group_name] = speeds[self._background_group.group_name]

    def restore_group(self) -> dist.ProcessGroup:
        """For LookaheadLoader.restore, in the user's thread: a group of its own. Collective the first time."""
        if self._restore_group is None:
            self._restore_group = self._new_cpu_group()
        return self._restore_group

    def _new_cpu_group(self) -> dist.ProcessGroup:
        """All ranks, with the timeout of the training. Collective."""
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=self.timeout))

    def _connection(self, depth: int) -> PlanningConnection:
        """For the loop at that depth: each planning thread needs a connection of its own."""
        self._connections += [None] * (depth - len(self._connections))
        connection = self._connections[depth - 1]
        if connection is None:
            connection = self._connections[depth - 1] = PlanningConnection(self._new_cpu_group())
        return connection

    # -- loops ---------------------------------------------------------------------------------------------------

    @property
    def innermost(self) -> Loop | None:
        return self.loops[-1] if self.loops else None

    @property
    def idle(self) -> bool:
        """No loop is open, and no error is deferred."""
        return not self.loops and self._deferred_error is None

    def open(self, exchanges: list[Exchange]) -> Loop:
        if self._sync.failure is not None:
            raise RuntimeError(f"freescale: {self._sync.failure}")
        self.flush()
        self._opened += 1
        loop = Loop(exchanges, self._opened)
        self.loops.append(loop)
        self._explain_failed_waits()
        return loop

    def connection(self) -> PlanningConnection:
        """For the planning thread of the innermost loop."""
        return self._connection(len(self.loops))

    def start_planning(self, loop: Loop, thread: PlanningThread) -> None:
        """Neither the training nor the planning thread will wait for a rank that has left the loop."""
        loop.thread = thread
        thread.when_idle = partial(self._sync.release_wait, loop)
        thread.why_unplanned = partial(self._sync.why_unplanned, loop)
        thread.start()

    def require_innermost(self, loop: Loop) -> None:
        if self.innermost is not loop:
            raise RuntimeError(
                "freescale: a model is used under two LookaheadLoaders at once: one asks for its next batch while the "
                "other is still running; finish or close the inner one first"
            )

    def close_innermost(self, exception: str = "") -> RuntimeError | None:
        """End the innermost loop and its planning. Returns the error of this, if any.

        `exception`: why this rank leaves the loop. Other ranks may wait where this one cannot know, so it waits a few
        seconds for them; otherwise as long as in training. A rank that waits for this one finds why in the store.
        """
        loop, failure = self.loops[-1], None
        why = self._sync.post_left(loop, exception)
        limit = _SECONDS_AFTER_EXCEPTION if exception else self.timeout.total_seconds()
        try:
            with self._sync.waiting_at_most(limit):
                self._agree_on_end(loop)
        except RuntimeError as error:
            failure = error
        loop.refuse_further_backwards()
        if loop.thread is not None:
            together = loop.failure is None or loop.failure_known_to_all
            loop.thread.stop(loop.batches_behind, together, "" if together else why)
        self.loops.pop()
        self._explain_failed_waits()
        if loop.planning_group_failed:  # every rank knows: the next loop makes a new one
            self._connections[len(self.loops)] = None
        return failure

    def _explain_failed_waits(self) -> None:
        launch_record.why_rank_left = partial(self._sync.why_left, self.loops[-1]) if self.loops else str

    def _agree_on_end(self, loop: Loop) -> None:
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
            log.warning("freescale: a loop ended without the other ranks; no further one can run: %s", loop.failure)

    # -- steps ---------------------------------------------------------------------------------------------------

    def synchronize(self, action: Action, received: int = UNKNOWN_BATCH) -> list[RankStatus]:
        """In the innermost loop: see RankSync. For a training step, every rank must have the expected batch."""
        statuses = self._sync.synchronize(self.loops[-1], action, received)
        if action == Action.TRAIN:
            require_expected_batch(statuses)
        return statuses

    def flush(self) -> None:
        """Apply what is pending before the tables are used outside of the planned order."""
        loop = self.innermost
        if loop is not None and max(loop.pending, loop.incomplete) >= 0:
            self.synchronize(Action.FLUSH)

    def defer(self, error: RuntimeError) -> None:
        """Python cannot raise it here; the next use of the tables will."""
        self._deferred_error = error

    def raise_deferred(self) -> None:
        if self._deferred_error is not None:
            error, self._deferred_error = self._deferred_error, None
            raise error
