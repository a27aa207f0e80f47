"""The planning thread of one loop: plans one batch after another, ahead of the training thread, over a connection of
its own. The training thread uploads the plans (plan_block.py). A batch that is on the device already is read on the
default stream, because the loader does not say which stream made it.

If loading a batch fails on one rank, all ranks learn it before their next collective. If planning fails later, the rank
posts the error in the store and closes its connections: the collectives of the other ranks fail at once, and they find
the error there. A group that ended this way is not used by another loop (session.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref

import torch
import torch.distributed as dist

from freescale.kernels.transports import launch_record
from freescale.runtime.lookahead.planning import BatchPlanning, EndOfPlanning, PlannedBatch
from freescale.runtime.lookahead.rendezvous import RankExits
from freescale.views.records import LOADER, PLANNER

log = logging.getLogger(__name__)

_CHECK_SECONDS = 2.0  # the training thread checks the planning thread this often while it waits for a batch
_IDLE_SECONDS = 1.0  # an idle planning thread checks this often whether a rank has left the loop


class PlanningThread(threading.Thread):
    def __init__(self, planning: BatchPlanning, exits: RankExits, timeout: float) -> None:
        super().__init__(name="freescale-lookahead", daemon=True)
        self.planning, self._exits, self._timeout = planning, exits, timeout
        self._connection = planning.connection
        self.failed = False  # between collectives: the connection is closed
        self.error: BaseException | None = None  # raised in the training thread, on every rank
        self._finished = False  # every batch is planned, or planning has failed
        self._stopped = False
        self._unfinished, self._connection.unfinished = self._connection.unfinished, None  # of an earlier loop
        # What the loader puts on the current GPU goes where the user's thread would put it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # load and plan one more batch; False: stop
        self._ready: queue.SimpleQueue[PlannedBatch | BaseException | None] = queue.SimpleQueue()
        # A batch is ready when the next one is known: two for the first, one more for each that is taken.
        self.ordered = 0  # batches
        self.plan_another()
        self.plan_another()

    # -- the training thread -------------------------------------------------------------------------------------

    def take(self) -> PlannedBatch | None:
        """The next batch; None at the end. Raises an error of loading or planning, of any rank. Waits for the user's
        loader without a limit, for anything else at most as long as the group's timeout allows."""
        began, item = time.perf_counter(), self._next_item()
        if isinstance(item, BaseException):
            self.error = item
            raise item
        self._record_wait(began, time.perf_counter(), item)
        return item

    def _next_item(self) -> PlannedBatch | BaseException | None:
        while True:
            try:
                return self._ready.get(timeout=min(self._connection.timeout, _CHECK_SECONDS))
            except queue.Empty:
                self._check()

    def _check(self) -> None:
        """Raises if no batch will become ready."""
        number, since, limit = self.planning.number, self.planning.busy_since, self._connection.timeout
        if not self.is_alive() and self._ready.empty():
            raise RuntimeError(f"freescale: the planning thread exited unexpectedly while planning batch {number}")
        if why := self._exits.why_unplanned(number):
            raise RuntimeError(f"freescale: {why}; batch {number} cannot be planned without it")
        # One timeout for a collective, which gives up by itself, and one for the rest.
        if since is not None and time.monotonic() - since > 2 * limit:
            raise RuntimeError(
                f"freescale: rank {dist.get_rank()}: batch {number} is not planned after "
                f"{time.monotonic() - since:.0f} s; the process group's timeout is {limit:g} s"
            )

    def _record_wait(self, began: float, ended: float, planned: PlannedBatch | None) -> None:
        """Divide the wait between the loader and the planner. It was for the next batch, which makes this one ready."""
        awaited = planned if planned is None or planned.next is None else planned.next
        load_began, load_ended = (0.0, 0.0) if awaited is None else awaited.loaded
        loading = max(min(ended, load_ended) - max(began, load_began), 0.0)
        launch_record.add_host_wait(LOADER, began, began + loading)
        launch_record.add_host_wait(PLANNER, began + loading, ended)

    def plan_another(self) -> None:
        """Call this once the batch taken last is on its way: until then the two threads would compete for the GIL."""
        self.ordered += 1
        self._orders.put(True)

    def stop(self, more: int, why_alone: str) -> None:
        """End the thread. `more`: batches that other ranks have ordered beyond this one's. `why_alone`: why this rank
        stops, if the other ranks do not know; "" if they stop too."""
        if why_alone:
            self._stopped = True  # do not wait for ranks that may not arrive
            if not self._finished:
                self._connection.close(why_alone)
        for _ in range(more):
            self.plan_another()
        self._orders.put(False)
        self.join(1.0 if why_alone else self._timeout)
        if self.is_alive():
            self._connection.unfinished = weakref.ref(self)
            if not why_alone:
                words = "freescale: the loop has ended, but its loader is still loading a batch after %g s"
                log.warning(words, self._timeout)

    # -- the planning thread -------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            if self._unfinished is not None and (thread := self._unfinished()) is not None:
                thread.join(self._connection.timeout)
                del thread  # it would keep its loader
            while not self._finished and self._next_order():
                self._plan_batch()
        except BaseException as error:  # noqa: BLE001  (raised again in the user's loop)
            self._finished = True
            self._ready.put(self._fail(error))
        while self._next_order():
            pass  # a rank may still leave the loop in the last steps while others wait for it

    def _plan_batch(self) -> None:
        try:
            if (planned := self.planning.advance()) is not None:
                self._ready.put(planned)
        except EndOfPlanning as end:
            self._finished = True
            if (last := self.planning.finish()) is not None:
                self._ready.put(last)
            self._ready.put(end.error)

    def _next_order(self) -> bool:
        """Wait for an order. False once there are no more."""
        while not self._stopped:
            try:
                if self._orders.get(timeout=_IDLE_SECONDS):
                    return not self._stopped
                self._stopped = True
            except queue.Empty:
                self._exits.release_wait()
        return False

    def _fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks why this one plans no more. Returns what to raise in the user's loop."""
        rank = dist.get_rank() if dist.is_initialized() else self.planning.group.rank()
        number = self.planning.number
        if isinstance(error, RuntimeError):  # of a collective, most likely
            reason = (
                f"rank {rank} could not plan batch {number} with the other ranks: one failed, left or exceeded "
                f"the process group's timeout of {self._connection.timeout:g} s: {error}"
            )
        else:
            reason = f"rank {rank} failed while it planned batch {number}: {type(error).__name__}: {error}"
        self.failed = True
        first = self._connection.close(reason)
        if first == reason and not isinstance(error, RuntimeError):
            return error
        failure = RuntimeError(f"freescale: {first}")
        failure.__cause__ = error
        return failure
