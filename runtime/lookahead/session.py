"""The open loops over the same tables, one inside the other: how they begin and end, and their process groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels import background
from freescale.kernels.transports import launch_record, link_speed
from freescale.runtime.lookahead import rendezvous
from freescale.runtime.lookahead.planning import BatchPlanning, PlanningConnection
from freescale.runtime.lookahead.rendezvous import UNKNOWN_BATCH, Action, RankExits, RankStatus, RankSync
from freescale.runtime.lookahead.step import Loop
from freescale.runtime.lookahead.thread import PlanningThread
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

# If an exception leaves the loop on all ranks, they all arrive within this time.
_SECONDS_AFTER_EXCEPTION = 5.0


class Session:
    """One for all models that share a table. A model is trained under one loader at a time: nested loops only
    evaluate."""

    def __init__(self, exchanges: list[Exchange], link_gbps: float) -> None:
        training_group = distributed.group_by_name(exchanges[0].group_name)
        self.loops: list[Loop] = []
        self._timeout = distributed.timeout_of(training_group)
        # Groups of their own, so that nothing here comes between the training's collectives.
        self._connections = {0: PlanningConnection(self._new_cpu_group())}  # by depth of nesting
        self._sync = RankSync(self._new_cpu_group())
        self._failure: str | None = None  # why the ranks cannot synchronize any more
        self._opened = 0
        # For early rows and late gradients: of the same kind as the training's, so that urgent ones overtake them.
        self._background_group = cast(dist.ProcessGroup, dist.new_group(timeout=self._timeout))
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
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=self._timeout))

    # -- loops ---------------------------------------------------------------------------------------------------

    @property
    def innermost(self) -> Loop | None:
        return self.loops[-1] if self.loops else None

    def open(
        self, exchanges: list[Exchange], new_planning: Callable[[PlanningConnection], BatchPlanning], timeout: float
    ) -> Loop:
        """Begin a loop inside the innermost one, and its planning. `timeout`: seconds that its end waits for the user's
        loader. Collective."""
        if self._failure is not None:
            raise RuntimeError(f"freescale: {self._failure}")
        self.flush()
        self._opened += 1
        exits = RankExits(f"left/{self._background_group.group_name}/{self._opened}", dist.get_rank())
        thread = PlanningThread(new_planning(self._connection()), exits, timeout)
        loop = Loop(exchanges, self._opened, thread, exits)
        thread.start()
        self.loops.append(loop)
        self._explain_failed_waits()
        return loop

    def _connection(self) -> PlanningConnection:
        """For the next loop: each planning thread needs a connection of its own."""
        depth = len(self.loops)
        if depth not in self._connections:
            self._connections[depth] = PlanningConnection(self._new_cpu_group())
        return self._connections[depth]

    def require_innermost(self, loop: Loop) -> None:
        if self.innermost is not loop:
            raise RuntimeError(
                "freescale: a model is used under two LookaheadLoaders at once: one asks for its next batch while the "
                "other is still running; finish or close the inner one first"
            )

    def close_innermost(self, exception: str = "") -> RuntimeError | None:
        """End the innermost loop and its planning. Returns the error of this, if any. `exception`: why this rank leaves
        the loop. Other ranks may wait where this one cannot know, so it waits a few seconds for them; otherwise as long
        as in training."""
        loop, failure = self.loops[-1], None
        why = loop.exits.post(loop.batch_number, loop.thread.ordered, exception)
        try:
            self._agree_on_end(loop, _SECONDS_AFTER_EXCEPTION if exception else float("inf"))
        except RuntimeError as error:
            failure = error
        loop.refuse_further_backwards()
        background.wait_for_all()
        alone = loop.failure is not None and not loop.failure_known_to_all
        furthest = max((s.ordered for s in loop.statuses), default=0)
        loop.thread.stop(furthest - loop.thread.ordered, why if alone else "")
        self.loops.pop()
        self._explain_failed_waits()
        if any(s.planning_failed for s in loop.statuses):  # every rank knows: the next loop makes a new one
            del self._connections[len(self.loops)]
        return failure

    def _explain_failed_waits(self) -> None:
        launch_record.why_rank_left = self.loops[-1].exits.why_left if self.loops else str

    def _agree_on_end(self, loop: Loop, seconds: float) -> None:
        """All ranks agree on the end of a loop, and apply what is pending."""
        cause = None
        loop.end_forward()
        try:
            if loop.failure is None and not loop.exits.agreed:
                self.synchronize(Action.CLOSE, seconds=seconds)
        except RuntimeError as error:
            cause = error
        if loop.failure is None:
            loop.wait_for_unused_rows()
        elif lost := loop.describe_loss():
            raise RuntimeError(lost) from cause
        elif self._failure is not None:
            log.warning("freescale: a loop ended without the other ranks; no further one can run: %s", loop.failure)

    # -- steps ---------------------------------------------------------------------------------------------------

    def synchronize(
        self, action: Action, received: int = UNKNOWN_BATCH, seconds: float = float("inf")
    ) -> list[RankStatus]:
        """Returns if this rank may do `action` in the innermost loop, else raises. Applies pending gradients if some
        rank needs that. For a training step, every rank must have the expected batch. `seconds`: to wait for the
        others, at most the timeout of the training. Collective."""
        loop, may_go_on = self.loops[-1], False
        while not may_go_on:
            own = loop.status(action, received)
            limit = min(seconds, self._timeout.total_seconds())
            try:
                loop.statuses = self._sync.gather(own, limit)
            except Exception as error:
                loop.fail(f"the other ranks did not arrive within {limit:g} s, or have exited: {error}")
                self._failure = loop.failure
                raise RuntimeError(f"freescale: {self._failure}") from error
            may_go_on = self._may_go_on(loop, action)
        if action == Action.TRAIN:
            rendezvous.require_expected_batch(loop.statuses)
        return loop.statuses

    def _may_go_on(self, loop: Loop, action: Action) -> bool:
        """Raises if this rank may not do `action`. False if another rank only wanted the flush, now done: ask again."""
        statuses = loop.statuses
        if action == Action.TRAIN and rendezvous.all_fine(statuses):
            return True
        actions = {s.action for s in statuses}
        same_place = len({(s.loop, s.pending) for s in statuses}) == 1
        if Action.CLOSE in actions:
            loop.exits.agreed = True
            if not same_place:
                loop.fail(rendezvous.describe_difference(statuses), known_to_all=True)
        if reason := rendezvous.why_over(statuses):
            loop.fail(reason, known_to_all=True)
            raise RuntimeError(f"freescale: {reason}")
        if same_place and actions & {Action.FLUSH, Action.CLOSE}:
            loop.apply_pending()
        if not same_place or (len(actions) > 1 and Action.FLUSH not in actions):
            if action == Action.CLOSE and same_place:
                log.warning("freescale: %s", rendezvous.describe_difference(statuses))
                return True
            if same_place and any(s.planning_failed for s in statuses):
                connection = loop.thread.planning.connection
                raise RuntimeError(f"freescale: {connection.first_reason('a rank failed while it planned')}")
            why = loop.exits.why_left() if Action.CLOSE in actions else ""
            raise RuntimeError(f"freescale: {rendezvous.describe_difference(statuses)}{why and f' ({why})'}")
        return action == Action.FLUSH or Action.FLUSH not in actions

    def flush(self) -> None:
        """Apply what is pending before the tables are used outside of the planned order."""
        background.wait_for_all()
        loop = self.innermost
        if loop is not None and max(loop.pending, loop.incomplete) >= 0:
            self.synchronize(Action.FLUSH)
