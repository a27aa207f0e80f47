"""The planning thread of one loop: plans one batch after another, ahead of the training thread.

It uses a connection of its own and never touches the training group. Plans stay in host memory, pinned for a GPU; the
training thread uploads them (plan_block.py). A batch that is on the device already is read on the default stream,
because the loader does not say which stream made it.

If loading a batch fails on one rank, all ranks learn it before their next collective, and each raises in its user's
loop. If planning fails later, between collectives, the rank posts the error in the store and closes its connections:
the collectives of the other ranks fail at once, and they find the error there. A group that ended this way is not used
by another loop (session.py).
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
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.native_plan import BatchPlan
from freescale.kernels.planning.owners import ExchangeTables, OwnerMap
from freescale.kernels.transports import launch_record
from freescale.runtime.agreement import first_reason
from freescale.runtime.lookahead.planning import BatchPlanning, EndOfPlanning, PlannedBatch
from freescale.runtime.meter import RankTimes
from freescale.runtime.samples.batch_balancer import BatchBalancer
from freescale.runtime.tables.table_exchange import Exchange
from freescale.views.records import LOADER, PLANNER

log = logging.getLogger(__name__)

_CHECK_SECONDS = 2.0  # the training thread checks the planning thread this often while it waits for a batch
_IDLE_SECONDS = 1.0  # an idle planning thread calls `when_idle` this often
_threads: dict[str, threading.Thread] = {}  # by group: the thread that plans over it


class _Order(Enum):
    PLAN, STOP = range(2)  # load and plan one more batch; or no more


class PlanningConnection:
    """What the planning threads of all ranks communicate over: a gloo group, and sockets that C uses without the GIL.
    Serves one loop at a time. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mesh = rank_mesh.open_mesh(group)

    def new_plan(self, exchanges: list[Exchange], whole: bool = False) -> BatchPlan:
        """`whole`: see BatchPlan."""
        tables = [
            ExchangeTables(x.row_offsets, x.table_sizes, OwnerMap(x.bounds, x.shifts, x.starts)) for x in exchanges
        ]
        mesh = self._mesh if self._mesh is not None else rank_mesh.GroupMesh(self.group)
        return BatchPlan(mesh, tables, distributed.timeout_of(self.group).total_seconds(), whole)

    def close(self) -> None:
        """Pending and later operations of the other ranks fail at once."""
        distributed.hang_up(self.group)
        if self._mesh is not None:
            self._mesh.hang_up()


class PlanningThread:
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
        self._connection, self.timeout, self.balancer = connection, timeout, balancer
        self.group = group = connection.group
        self.group_timeout = distributed.timeout_of(group).total_seconds()
        self.times = RankTimes(group.size())
        plan = connection.new_plan(exchanges, whole=not overlap)
        self._planning = BatchPlanning(loader, exchanges, group, strict, balancer, plan, self.times)
        self.failed = False  # between collectives: the connection is closed
        self.error: BaseException | None = None  # raised in the training thread, on every rank
        self._finished = False  # every batch is planned, or planning has failed
        self._stopped = self._abandoned = False
        # A loader that is slow to end may still be at work for an earlier loop.
        self._earlier_thread = _threads.get(group.group_name)
        # What the loader puts on the current GPU goes where the user's thread would put it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[PlannedBatch | BaseException | None] = queue.SimpleQueue()
        self.when_idle: Callable[[], None] = lambda: None  # called in the planning thread
        self.why_unplanned: Callable[[int], str] = lambda number: ""  # why no rank will plan that batch
        # A batch is ready when the next one is known: two for the first, one more for each that is taken.
        self.ordered = 0  # batches
        self.plan_another()
        self.plan_another()
        self._thread = threading.Thread(target=self._run, name="freescale-lookahead", daemon=True)

    def start(self) -> None:
        _threads[self.group.group_name] = self._thread
        self._thread.start()

    # -- the training thread -------------------------------------------------------------------------------------

    def take(self) -> PlannedBatch | None:
        """The next batch; None at the end. Raises an error of loading or planning, of any rank.

        Waits for the user's loader without a limit, for anything else at most as long as the group's timeout allows.
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
        """Divide the wait between the loader and the planner. A batch is ready when the next one is planned, so the
        wait was for that one."""
        awaited = planned if planned is None or planned.next is None else planned.next
        load_began, load_ended = (0.0, 0.0) if awaited is None else awaited.loaded
        loading = max(min(ended, load_ended) - max(began, load_began), 0.0)
        launch_record.add_host_wait(LOADER, began, began + loading)
        launch_record.add_host_wait(PLANNER, began + loading, ended)

    def plan_another(self) -> None:
        """Call this once the batch taken last is on its way: until then the two threads would compete for the GIL."""
        self.ordered += 1
        self._orders.put(_Order.PLAN)

    def _check_thread(self) -> None:
        number, since = self._planning.number, self._planning.busy_since
        if not self._thread.is_alive() and self._ready.empty():
            raise RuntimeError(f"freescale: the planning thread exited unexpectedly while planning batch {number}")
        if why := self.why_unplanned(number):
            raise RuntimeError(f"freescale: {why}; batch {number} cannot be planned without it")
        # One timeout for a collective, which gives up by itself, and one for the rest.
        if since is not None and time.monotonic() - since > 2 * self.group_timeout:
            raise RuntimeError(
                f"freescale: rank {dist.get_rank()}: batch {number} is not planned after "
                f"{time.monotonic() - since:.0f} s; the process group's timeout is {self.group_timeout:g} s"
            )

    def why_failed(self) -> str:
        """Why some rank could not go on planning."""
        return _first_reason(self.group, "a rank failed while it planned")

    def stop(self, more: int, together: bool, reason: str) -> None:
        """End the thread. `more`: batches that other ranks have ordered beyond this one's. `reason`: why it ends, where
        the other ranks do not know that it does."""
        self._abandoned = not together  # do not wait for ranks that may not arrive
        if reason and not self._finished:
            _first_reason(self.group, reason)
            self._connection.close()
        for _ in range(more):
            self.plan_another()
        self._orders.put(_Order.STOP)
        limit = self.timeout if together else 1.0
        self._thread.join(limit)
        if self._thread.is_alive() and together:
            log.warning("freescale: the loop has ended, but its loader is still loading a batch after %g s", limit)

    # -- the planning thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            if self._earlier_thread is not None:
                self._earlier_thread.join(self.group_timeout)
            self._plan_batches()
        except BaseException as error:  # noqa: BLE001  (raised again in the user's loop)
            self._finished = True
            self._ready.put(self._fail(error))
        try:
            while not (self._stopped or self._abandoned):
                self._next_order()  # a rank may still leave the loop in the last steps while others wait for it
        finally:
            if _threads.get(self.group.group_name) is threading.current_thread():
                del _threads[self.group.group_name]

    def _plan_batches(self) -> None:
        try:
            while self._next_order() is not _Order.STOP and not self._abandoned:
                if (planned := self._planning.advance()) is not None:
                    self._ready.put(planned)
        except EndOfPlanning as end:
            self._finished = True
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

    def _fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks why this one plans no more. Returns what to raise in the user's loop."""
        rank = dist.get_rank() if dist.is_initialized() else self.group.rank()
        number = self._planning.number
        if isinstance(error, RuntimeError):  # of a collective, most likely
            reason = (
                f"rank {rank} could not plan batch {number} with the other ranks: one failed, left or exceeded "
                f"the process group's timeout of {self.group_timeout:g} s: {error}"
            )
        else:
            reason = f"rank {rank} failed while it planned batch {number}: {type(error).__name__}: {error}"
        self.failed = True
        first = _first_reason(self.group, reason)
        self._connection.close()
        if first == reason and not isinstance(error, RuntimeError):
            return error
        failure = RuntimeError(f"freescale: {first}")
        failure.__cause__ = error
        return failure


def _first_reason(group: dist.ProcessGroup, reason: str) -> str:
    """Why planning over the group has ended: `reason`, unless a rank has posted another one before."""
    return first_reason(f"planning/{group.group_name}", reason)
