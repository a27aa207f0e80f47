"""The background thread of a loop over a LookaheadLoader: it plans one batch after the other, ahead of the loop.

It has a connection of its own (planning_connection.py) and never touches the training group. What it makes stays in
memory of the CPU, pinned for a GPU; the loop's thread brings it to the device (plan_block.py). A batch that is there
already it reads on the default stream, since nobody says on which other one the batch was made.

Whatever goes wrong on one rank while it loads a batch, all ranks hear of it before they do anything together, and each
raises in its user's loop. What goes wrong later, between the collectives of planning, a rank posts in the store before
it closes its connections: the others' collectives fail at once, and they find its error there. A group that ended so
serves no further loop (loop_stack.py).

How a batch is planned is in batch_planning.py, what is done with the plans in loop_state.py.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import launch_record
from freescale.runtime.agreement import first_reason
from freescale.runtime.lookahead.batch_planning import BatchPlanning, EndOfPlanning
from freescale.runtime.lookahead.planned_batch import PlannedBatch
from freescale.runtime.lookahead.planning_connection import PlanningConnection
from freescale.runtime.meter import RankTimes
from freescale.runtime.samples.batch_balancer import BatchBalancer
from freescale.runtime.tables.table_exchange import Exchange
from freescale.views.step_parts import LOADER, PLANNER

log = logging.getLogger(__name__)

_CHECK_SECONDS = 2.0  # that the user's thread waits for a batch before it looks after the background thread
_IDLE_SECONDS = 1.0  # until the background thread looks after the user's
_threads: dict[str, threading.Thread] = {}  # by group: the thread that plans over it


class _Order(Enum):
    PLAN, STOP = range(2)  # load and plan one more batch; or no more


class Planner:
    """The background thread of one loop."""

    def __init__(
        self,
        loader: Iterable[Any],
        exchanges: list[Exchange],
        connection: PlanningConnection,
        strict: bool,
        timeout: float,
        balancer: BatchBalancer | None,
        overlap: bool = True,
    ) -> None:
        self._connection, self.timeout = connection, timeout
        self.group = group = connection.group
        self.failed = False  # between collectives: the connection cannot be used any more
        self._has_ended = False  # all that will be planned is planned, or planning has failed
        self._stopped = False
        self.group_timeout = distributed.timeout_of(group).total_seconds()
        plan = connection.new_plan(exchanges, whole=not overlap)
        self.times = RankTimes(group.size())
        self._planning = BatchPlanning(loader, exchanges, group, strict, balancer, plan, self.times)
        self._abandoned = False
        # A loader that is slow to end may still be at work for a loop before this one.
        self._earlier_thread = _threads.get(group.group_name)
        # What the user's loader puts on "the" GPU goes where the user's thread would put it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[PlannedBatch | BaseException | None] = queue.SimpleQueue()
        self.when_idle: Callable[[], None] = lambda: None  # called by the background thread, now and then
        self.why_unplanned: Callable[[int], str] = lambda number: ""  # why no rank will plan that batch
        self.error: BaseException | None = None  # that planning has raised in the user's thread, on every rank
        # A batch is ready when the one after it is known: two for the first, one more for each that is taken.
        self.ordered = 0  # batches
        self.plan_another()
        self.plan_another()
        self._thread = threading.Thread(target=self._run, name="freescale-lookahead", daemon=True)
        _threads[group.group_name] = self._thread
        self._thread.start()

    # -- the user's thread ---------------------------------------------------------------------------------------

    def take(self) -> PlannedBatch | None:
        """The next batch; None at the end. Raises what went wrong while it was loaded, on any rank.

        Waits for the user's loader as long as it takes, for anything else no longer than the group's time-out allows.
        """
        began = time.perf_counter()
        item = self._next_item()
        self._record_wait(began, time.perf_counter(), item)
        return item

    def _next_item(self) -> PlannedBatch | None:
        while True:
            try:
                item = self._ready.get(timeout=min(self.group_timeout, _CHECK_SECONDS))
                break
            except queue.Empty:
                self._check_thread()
        if isinstance(item, BaseException):
            self.error = item
            raise item
        return item

    def _record_wait(self, began: float, ended: float, planned: PlannedBatch | None) -> None:
        """The training thread has waited for the loader, and for the rest of the time until a batch was planned. A
        batch is ready when the one after it is loaded and planned."""
        awaited = planned if planned is None or planned.next is None else planned.next
        at_work = (0.0, 0.0) if awaited is None else awaited.loaded
        loading = max(min(ended, at_work[1]) - max(began, at_work[0]), 0.0)
        launch_record.add_host_wait(LOADER, began, began + loading)
        launch_record.add_host_wait(PLANNER, began + loading, ended)

    def plan_another(self) -> None:
        """After a batch was taken, when the thread that took it is done with it: until then, the two threads would
        compete for the GIL."""
        self.ordered += 1
        self._orders.put(_Order.PLAN)

    def _check_thread(self) -> None:
        number, since = self._planning.number, self._planning.busy_since
        if not self._thread.is_alive() and self._ready.empty():
            raise RuntimeError(f"freescale: the thread that plans batch {number} has ended without a word")
        if why := self.why_unplanned(number):
            raise RuntimeError(f"freescale: {why}; batch {number} is not planned without it")
        # One time-out for an operation that gives up by itself, one more for what it has to do besides.
        if since is not None and time.monotonic() - since > 2 * self.group_timeout:
            raise RuntimeError(
                f"freescale: rank {dist.get_rank()}: batch {number} is not planned after "
                f"{time.monotonic() - since:.0f} s; the process group's time-out is {self.group_timeout:g} s"
            )

    def why_failed(self) -> str:
        """Why a rank could not go on planning, in its words."""
        return _first_reason(self.group, "a rank failed while it planned")

    def stop(self, more: int, together: bool, reason: str) -> None:
        """End the thread. `more`: batches that other ranks have ordered beyond this one's. `reason`: why, where the
        other ranks do not know that this one goes."""
        self._abandoned = not together  # do not wait for others that may not come
        if reason and not self._has_ended:
            _first_reason(self.group, reason)
            self._connection.hang_up()
        for _ in range(more):
            self.plan_another()
        self._orders.put(_Order.STOP)
        limit = self.timeout if together else 1.0
        self._thread.join(limit)
        if self._thread.is_alive() and together:
            log.warning("freescale: the loader of a loop that has ended is still loading a batch after %g s", limit)

    # -- the background thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            if self._earlier_thread is not None:
                self._earlier_thread.join(self.group_timeout)
            self._plan_batches()
        except BaseException as error:  # noqa: BLE001  (it is raised again in the user's loop)
            self._has_ended = True
            self._ready.put(self._give_up(error))
        try:
            while not (self._stopped or self._abandoned):
                self._next_order()  # in the steps that are left a rank may leave the loop, and others wait for it
        finally:
            if _threads.get(self.group.group_name) is threading.current_thread():
                del _threads[self.group.group_name]

    def _plan_batches(self) -> None:
        try:
            while self._next_order() is not _Order.STOP and not self._abandoned:
                if (planned := self._planning.advance()) is not None:
                    self._ready.put(planned)
        except EndOfPlanning as end:
            self._has_ended = True
            if (last := self._planning.finish()) is not None:
                self._ready.put(last)
            self._ready.put(end.error)

    def _next_order(self) -> _Order:
        while True:
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=_IDLE_SECONDS)
                self._stopped = order is _Order.STOP
                return order
            self.when_idle()

    def _give_up(self, error: BaseException) -> BaseException:
        """What to raise in the user's loop. The other ranks are not to wait for this one, and are to know why."""
        rank = dist.get_rank() if dist.is_initialized() else self.group.rank()
        number = self._planning.number
        if isinstance(error, RuntimeError):  # a collective, in all likelihood
            reason = (
                f"rank {rank} could not plan batch {number} with the other ranks: one failed, left or was too slow "
                f"for the process group's time-out of {self.group_timeout:g} s: {error}"
            )
        else:
            reason = f"rank {rank} failed while it planned batch {number}: {type(error).__name__}: {error}"
        self.failed = True
        first = _first_reason(self.group, reason)
        self._connection.hang_up()
        if first == reason and not isinstance(error, RuntimeError):
            return error
        failure = RuntimeError(f"freescale: {first}")
        failure.__cause__ = error
        return failure


def _first_reason(group: dist.ProcessGroup, reason: str) -> str:
    """Why planning over the group has ended: `reason`, unless a rank has posted another one before."""
    return first_reason(f"planning/{group.group_name}", reason)
