"""The background thread of a loop over a LookaheadLoader: load, balance and plan one batch after the other.

It has a gloo group of its own and never touches the training group; the device only to read a batch that is there, on
the default stream, since nobody says on which other one the batch was made.

Whatever goes wrong on one rank while it loads a batch, all ranks hear of it before they do anything together, and each
raises in its user's loop. What goes wrong later, between the collectives of planning, a rank posts in the store before
it closes its connections: the others' collectives fail at once, and they find its words there. A group that ended so
serves no further loop (rank_meetings.py).

What is done with the plans is in loop_state.py, how a batch is balanced in batch_balancer.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import exchange_plan, row_requests
from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.lookahead.loop_state import Planned
from freescale.runtime.samples.batch_balancer import BatchBalancer
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.fbgemm_table import FbgemmTable
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_GOES_ON, _ENDED, _FAILED = range(3)
_NOT_BALANCED = [-1, 0]  # in place of what a BatchBalancer says
_LOOK_EVERY = 60.0  # seconds that the user's thread waits for a batch before it looks after the background thread
_STORE_ANSWERS = 5.0  # seconds; a rank that keeps the store may be the one that is gone
_running: dict[str, threading.Thread] = {}  # by group: the thread that plans over it


class Planner:
    """The background thread of one loop."""

    def __init__(
        self,
        loader: Iterable[Any],
        exchanges: list[Exchange],
        group: dist.ProcessGroup,
        strict: bool,
        timeout: float,
        balancer: BatchBalancer | None,
    ) -> None:
        self.loader, self.exchanges, self.group, self.strict = loader, exchanges, group, strict
        self.timeout, self.balancer = timeout, balancer
        self.failed = False  # between collectives: the group cannot be used any more
        self.limit = distributed.timeout_of(group).total_seconds()
        self._abandoned = False
        self._number = 0  # of the batch that is being loaded or planned
        self._since: float | None = None  # the thread is busy with something that ends within the time-out
        # A loader that is slow to end may still be at work for a loop before this one.
        self._earlier = _running.get(group.group_name)
        # What the user's loader puts on "the" GPU goes where the user's thread would put it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # load one more batch, or stop
        self._ready: queue.SimpleQueue[Planned | BaseException | None] = queue.SimpleQueue()
        # A batch is ready when the one after it is known: two for the first, one more for each that is taken.
        self._orders.put(True)
        self._orders.put(True)
        self._thread = threading.Thread(target=self._plan_all, name="freescale-lookahead", daemon=True)
        _running[group.group_name] = self._thread
        self._thread.start()

    # -- the user's thread ---------------------------------------------------------------------------------------

    def take(self) -> Planned | None:
        """The next batch; None at the end. Raises what went wrong while it was loaded, on any rank.

        Waits for the user's loader as long as it takes, for anything else no longer than the group's time-out allows.
        """
        while True:
            try:
                item = self._ready.get(timeout=min(self.limit, _LOOK_EVERY))
                break
            except queue.Empty:
                self._look_after()
        if isinstance(item, BaseException):
            raise item
        self._orders.put(True)
        return item

    def _look_after(self) -> None:
        since = self._since
        if not self._thread.is_alive() and self._ready.empty():
            raise RuntimeError(f"freescale: the thread that plans batch {self._number} has ended without a word")
        # One limit for an operation that gives up by itself, one more for what it has to do besides.
        if since is not None and time.monotonic() - since > 2 * self.limit:
            raise RuntimeError(
                f"freescale: rank {dist.get_rank()}: batch {self._number} is not planned after "
                f"{time.monotonic() - since:.0f} s; the process group's time-out is {self.limit:g} s"
            )

    def why_failed(self) -> str:
        """Why a rank could not go on planning, in its words."""
        return _said_first(self.group, "a rank failed while it planned")

    def stop(self, more: int, together: bool) -> None:
        """End the thread. `more`: batches that other ranks have taken beyond this one's."""
        self._abandoned = not together  # do not wait for others that may not come
        for _ in range(more):
            self._orders.put(True)
        self._orders.put(False)
        limit = self.timeout if together else 1.0
        self._thread.join(limit)
        if self._thread.is_alive() and together:
            log.warning("freescale: the loader of a loop that has ended is still loading a batch after %g s", limit)

    # -- the background thread -----------------------------------------------------------------------------------

    def _plan_all(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            if self._earlier is not None:
                self._earlier.join(self.limit)
            self._plan_each()
        except BaseException as error:  # noqa: BLE001  (it is raised again in the user's loop)
            self._ready.put(self._give_up(error))
        finally:
            if _running.get(self.group.group_name) is threading.current_thread():
                del _running[self.group.group_name]

    def _give_up(self, error: BaseException) -> BaseException:
        """What to raise in the user's loop. The other ranks are not to wait for this one, and are to know why."""
        me = dist.get_rank() if dist.is_initialized() else self.group.rank()
        if isinstance(error, RuntimeError):  # a collective, in all likelihood
            words = (
                f"rank {me} could not plan batch {self._number} with the other ranks: one failed, left or was too slow "
                f"for the process group's time-out of {self.limit:g} s: {error}"
            )
        else:
            words = f"rank {me} failed while it planned batch {self._number}: {type(error).__name__}: {error}"
        self.failed = True
        first = _said_first(self.group, words)
        distributed.hang_up(self.group)
        if first == words and not isinstance(error, RuntimeError):
            return error
        failure = RuntimeError(f"freescale: {first}")
        failure.__cause__ = error
        return failure

    def _plan_each(self) -> None:
        source: Iterator[Any] | None = None
        before: Planned | None = None
        asked_before: list[exchange_plan.Requests] = []
        shape: str | None = None
        while self._orders.get() and not self._abandoned:
            batch, ids, says, status, error, state = None, [], _NOT_BALANCED, _GOES_ON, None, None
            number = self._number
            try:
                source = iter(self.loader) if source is None else source
                batch = next(source)
                if hasattr(self.loader, "state_dict"):
                    state = copy.deepcopy(self.loader.state_dict())
                shape = _same_structure(batch, shape, number)
                self._must_be_plannable(batch, number)
                if self.balancer is None:
                    ids = self._ids(batch)
                else:
                    says = self.balancer.prepare(number, batch)
            except StopIteration:
                status = _ENDED
            except BaseException as e:  # noqa: BLE001  (the other ranks must hear of it)
                status, error = _FAILED, e
            goes_on, failure, heard = self._hear(status, error, number, says)
            if goes_on and self.balancer is not None:
                goes_on, failure, batch, ids = self._move(self.balancer, number, heard)
            if goes_on:
                try:
                    asked = [self._ask(x, i) for x, i in zip(self.exchanges, ids, strict=True)]
                except row_requests.IdOutsideTable as e:  # on every rank alike
                    goes_on, failure = False, e
            if not goes_on:
                self._put_last(before, asked_before)
                self._ready.put(failure)
                return
            after = self._make(number, batch, ids, asked, before, asked_before)
            after.loader_state = state
            if before is not None:
                self._ready.put(before)
            before, asked_before, self._number, self._since = after, asked, number + 1, None

    def _move(
        self, balancer: BatchBalancer, number: int, heard: list[list[int]]
    ) -> tuple[bool, BaseException | None, Any, list[list[torch.Tensor]]]:
        """The balanced batch and its ids. Does every rank go on?"""
        batch, ids, status, error = None, [], _GOES_ON, None
        try:
            batch = balancer.balance(heard)
        except BalanceError as e:  # on every rank alike; anything else may have come between its collectives
            status, error = _FAILED, e
        else:
            try:
                ids = self._ids(batch)
            except BaseException as e:  # noqa: BLE001  (the other ranks must hear of it)
                status, error = _FAILED, e
        goes_on, failure, _ = self._hear(status, error, number, _NOT_BALANCED)
        return goes_on, failure, batch, ids

    def _must_be_plannable(self, batch: Any, number: int) -> None:
        """Such a batch the compiled model leaves to TorchRec's own code, whose lookups are not planned."""
        served = {f: isinstance(x.table, FbgemmTable) for x in self.exchanges for f in x.features}
        for x in batch_structure.holders(batch, list(served)):
            if not batch_structure.is_kjt(x):
                continue
            words = None
            if x.variable_stride_per_key():
                samples = dict(zip(x.keys(), x.stride_per_key(), strict=True))
                most = max(samples, key=lambda key: samples[key])
                other = next((key for key in samples if samples[key] != samples[most]), most)
                words = (
                    f"the number of samples differs by feature ({most!r} has {samples[most]}, {other!r} has "
                    f"{samples[other]}; stride_per_key_per_rank). Give all features equally many"
                )
            elif x.weights_or_none() is not None and any(served.get(key) for key in x.keys()):
                words = f"the features {', '.join(map(repr, x.keys()))} are weighted. Leave the weights out"
            if words is not None:
                raise ValueError(
                    f"freescale: batch {number}: {words}, or loop over such batches without a LookaheadLoader, where "
                    "TorchRec's own code serves them"
                )

    def _ids(self, batch: Any) -> list[list[torch.Tensor]]:
        names = [f for x in self.exchanges for f in x.features]
        found = batch_structure.features(batch, names)
        return [[found[f] for f in x.features] for x in self.exchanges]

    def _ask(self, exchange: Exchange, ids: list[torch.Tensor]) -> exchange_plan.Requests:
        self._since = time.monotonic()
        owners = exchange_plan.OwnerMap(exchange.bounds, exchange.shifts, exchange.starts)
        return row_requests.request_rows(ids, exchange.firsts, exchange.sizes, owners, exchange.name, self.group)

    def _make(
        self,
        number: int,
        batch: Any,
        ids: list[list[torch.Tensor]],
        asked: list[exchange_plan.Requests],
        before: Planned | None,
        asked_before: list[exchange_plan.Requests],
    ) -> Planned:
        """Plan a batch's rows, and the gradients of the batch before it, now that both are known."""
        plans = []
        for i, exchange in enumerate(self.exchanges):
            like = exchange.anchor.detach()
            flat = torch.cat([t.long() for t in ids[i]])
            if before is None:
                rows = exchange_plan.split_requests(asked[i], *_all(asked[i]))
                plans.append(step_plan.make(number, flat, asked[i], rows, like))
            else:
                self._since = time.monotonic()
                gradients, rows = row_requests.split_colliding(asked_before[i], asked[i], self.group)
                plans.append(step_plan.make(number, flat, asked[i], rows, like))
                step_plan.finish(before.plans[i], asked_before[i], gradients)
                before.plans[i].next = plans[i]
        return Planned(number, batch, plans)

    def _put_last(self, last: Planned | None, asked: list[exchange_plan.Requests]) -> None:
        """The last batch leaves nothing for later: its gradients are all urgent, and no rows are fetched for a next."""
        if last is None:
            return
        for i, p in enumerate(last.plans):
            step_plan.finish(p, asked[i], exchange_plan.split_requests(asked[i], *_all(asked[i])))
            p.next, p.last = step_plan.nothing_next(p), True
        self._ready.put(last)

    def _hear(
        self, status: int, error: BaseException | None, number: int, says: list[int]
    ) -> tuple[bool, BaseException | None, list[list[int]]]:
        """Does every rank go on? If not: what to raise in the user's loop, None for a clean end. And what each says."""
        self._since = time.monotonic()
        heard = distributed.gather_ints([status, *says], self.group)
        self._since = time.monotonic()
        said, rest = [s for s, *_ in heard], [r for _, *r in heard]
        if set(said) == {_GOES_ON}:
            if len({r[0] == _NOT_BALANCED[0] for r in rest}) > 1:
                words = "freescale: some ranks balance and others do not; give every LookaheadLoader the same `balance`"
                return False, ValueError(words), rest
            return True, None, rest
        if _FAILED in said:
            return False, self._failure(said, error, number), rest
        if set(said) == {_ENDED}:
            return False, None, rest
        words = (
            f"freescale: the loader of rank {said.index(_ENDED)} ended after {number} batches, others have more; "
            "all ranks end here"
        )
        if self.strict:
            return False, RuntimeError(words), rest
        log.warning(words)
        return False, None, rest

    def _failure(self, said: list[int], error: BaseException | None, number: int) -> BaseException:
        """Every rank learns which rank failed at which batch, and with what words; that rank raises its own error."""
        words: list[Any] = [None] * len(said)
        dist.all_gather_object(words, None if error is None else f"{type(error).__name__}: {error}", self.group)
        rank = said.index(_FAILED)
        if error is not None:
            return error
        return RuntimeError(f"freescale: rank {rank} failed while it loaded batch {number}: {words[rank]}")


def _said_first(group: dist.ProcessGroup, words: str) -> str:
    """Why planning over the group has ended: `words`, unless a rank has said something before."""
    heard: list[str] = []
    key = f"freescale/planning/{group.group_name}"

    def say() -> None:
        with contextlib.suppress(Exception):
            heard.append(distributed.default_store().compare_set(key, "", words).decode())

    thread = threading.Thread(target=say, name="freescale-store", daemon=True)
    thread.start()
    thread.join(_STORE_ANSWERS)
    return heard[0] if heard else words


def _all(asked: exchange_plan.Requests) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, held = asked.needed.values, asked.rows
    return torch.ones_like(wanted, dtype=torch.bool), torch.ones_like(held, dtype=torch.bool)


def _same_structure(batch: Any, shape: str | None, number: int) -> str:
    found = batch_structure.structure(batch)
    if shape is not None and found != shape:
        raise ValueError(f"freescale: batch {number} is {found}; the batches before it were {shape}")
    return found
