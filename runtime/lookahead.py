"""`LookaheadLoader`: plans the exchange of the next batch while this one trains, and hands batches over in order.

A background thread with a gloo group of its own takes batches from the user's loader, exchanges their ids with the
other ranks, finds the rows that two consecutive batches share, and makes the tensors that the two steps need. It never
touches the training group or the device. It does one batch for each one that the loop takes, so all ranks do as many.

What is pending between two steps, and every use of the model, is in order.py.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from freescale import compat, config
from freescale.kernels import asking, plan
from freescale.runtime import batches, order, steps
from freescale.runtime.exchange import Exchange
from freescale.runtime.meter import METER
from freescale.runtime.order import Planned

log = logging.getLogger(__name__)

_GOES_ON, _ENDED, _FAILED = range(3)
_STATS_KEPT = 10_000


class LookaheadLoader:
    """Wrap any iterable of batches and loop over this instead; the rest of the loop stays as it is.

        model = torch.compile(model, backend="freescale")
        for batch in freescale.LookaheadLoader(loader, model):
            loss = model(batch); loss.backward(); optimizer.step()

    loader     any iterable of batches: tensors, KeyedJaggedTensors, or dicts, lists, tuples, dataclasses of them, of
               one structure. A feature that the model looks up is a key of a KeyedJaggedTensor, or the dict key or
               field name of an integer tensor. Batches are handed out in order, on the model's device; they are loaded
               up to two steps ahead, so the loader must not write into a batch that it has given away
    model      what torch.compile(model, backend="freescale") returned
    strict     loaders of different length on different ranks are an error instead of a warning; None: FREESCALE_STRICT

    The numbers are those of the loop without the wrapper. What a step leaves for the next one is applied before
    anything else sees the tables: at the end of the loop, on `break`, when an exception leaves it, before
    `state_dict()`, and before a forward pass of another batch under torch.no_grad(), plain or from a second
    LookaheadLoader. A batch may be left out (`continue`). All ranks loop alike; where they do not, every rank gets an
    error that says who did what.

    What Python cannot raise where it happens (at `break` it prints it), the next use of the model raises.
    """

    def __init__(self, loader: Iterable[Any], model: torch.nn.Module, *, strict: bool | None = None) -> None:
        if not hasattr(model, "_orig_mod"):
            raise TypeError(
                "freescale: LookaheadLoader wants the compiled model, as in "
                'LookaheadLoader(loader, torch.compile(model, backend="freescale")); '
                f"found {type(model).__name__}"
            )
        self.loader, self.model = loader, model
        self.strict = config.load().strict if strict is None else strict
        self.exchanges = order.exchanges_of(model)
        if not self.exchanges:
            raise ValueError("freescale: the model has no sharded table that a LookaheadLoader could plan for")
        for x in self.exchanges:
            if compat.group_by_name(x.group_name).size() != dist.get_world_size():
                raise ValueError(
                    f"freescale: table {x.name} is sharded over a part of the ranks; a LookaheadLoader plans for "
                    "tables that are sharded over all of them"
                )
        self._tables = order.tables_of(self.exchanges)
        self._stats: deque[dict[str, Any]] = deque(maxlen=_STATS_KEPT)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def stats(self) -> list[dict[str, Any]]:
        """What this rank's exchanges were, one entry per step and exchange of the last loop (its last 10,000).

        step, exchange            number of the batch, name of the exchange
        values                    ids looked up
        unique_rows               different rows among them
        colliding_rows            of those, rows that some rank used in the batch before: urgent
        bytes_urgent, bytes_early         rows that the forward pass waits for, rows that came during the step before
        bytes_back_urgent, bytes_late     gradients sent at the end of the step, gradients sent during the next one
        bytes_urgent_per_value    what would be urgent if values were split without bringing duplicates together
        """
        return [dict(s) for s in self._stats]

    def __iter__(self) -> Iterator[Any]:
        self._stats.clear()
        run, unsaid = self._tables.enter(self.model, self.exchanges), False

        def close() -> None:
            self._tables.close(run, unsaid)

        # At exit, a loop that is still open somewhere is closed while threads can still run.
        atexit.register(close)
        try:
            planner = _Planner(self.loader, self.exchanges, self._tables.planning_group(), self.strict)
            run.stop_planning = planner.stop
            while (item := planner.take()) is not None:
                self._tables.must_be_on_top(run)
                yield self._hand_out(run, item)
        except GeneratorExit:  # `break`, or an exception in the loop
            unsaid = True
            raise
        finally:
            METER.pause()
            atexit.unregister(close)
            close()

    def _hand_out(self, run: order.Run, item: Planned) -> Any:
        batch = batches.move(item.batch, self.exchanges[0].anchor.device)
        run.hand_out(item, batch)
        METER.mark(item.number)
        for exchange, p in zip(self.exchanges, item.plans, strict=True):
            self._stats.append({"step": item.number, "exchange": exchange.name, **p.stats})
        return batch


class _Planner:
    """The background thread of one loop."""

    def __init__(
        self, loader: Iterable[Any], exchanges: list[Exchange], group: dist.ProcessGroup, strict: bool
    ) -> None:
        self.loader, self.exchanges, self.group, self.strict = loader, exchanges, group, strict
        self._abandoned = False
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # load one more batch, or stop
        self._ready: queue.SimpleQueue[Planned | BaseException | None] = queue.SimpleQueue()
        # A batch is ready when the one after it is known: two for the first, one more for each that is taken.
        self._orders.put(True)
        self._orders.put(True)
        self._thread = threading.Thread(target=self._plan_all, name="freescale-lookahead", daemon=True)
        self._thread.start()

    # -- the user's thread ---------------------------------------------------------------------------------------

    def take(self) -> Planned | None:
        """The next batch; None at the end. Raises what went wrong while it was loaded, on any rank."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        self._orders.put(True)
        return item

    def stop(self, more: int, together: bool) -> None:
        """End the thread. `more`: batches that other ranks have taken beyond this one's."""
        self._abandoned = not together  # do not wait for others that may not come
        for _ in range(more):
            self._orders.put(True)
        self._orders.put(False)
        limit = config.load().timeout if together else 1.0
        self._thread.join(limit)
        if self._thread.is_alive() and together:
            log.warning("freescale: the loader of a loop that has ended is still loading a batch after %g s", limit)

    # -- the background thread -----------------------------------------------------------------------------------

    def _plan_all(self) -> None:
        try:
            self._plan_each()
        except BaseException as error:  # noqa: BLE001  (it is raised again in the user's loop)
            self._ready.put(error)

    def _plan_each(self) -> None:
        source: Iterator[Any] | None = None
        before: Planned | None = None
        asked_before: list[plan.Requests] = []
        shape: str | None = None
        number = 0
        while self._orders.get() and not self._abandoned:
            batch, ids, status, error = None, [], _GOES_ON, None
            try:
                source = iter(self.loader) if source is None else source
                batch = next(source)
                shape = _same_structure(batch, shape, number)
                ids = self._ids(batch)
            except StopIteration:
                status = _ENDED
            except BaseException as e:  # noqa: BLE001  (the other ranks must hear of it)
                status, error = _FAILED, e
            goes_on, failure = self._hear(status, error, number)
            if goes_on:
                try:
                    asked = [self._ask(x, i) for x, i in zip(self.exchanges, ids, strict=True)]
                except IndexError as e:  # an id outside its table, on every rank alike
                    goes_on, failure = False, e
            if not goes_on:
                self._put_last(before, asked_before)
                self._ready.put(failure)
                return
            after = self._make(number, batch, ids, asked, before, asked_before)
            if before is not None:
                self._ready.put(before)
            before, asked_before, number = after, asked, number + 1

    def _ids(self, batch: Any) -> list[list[torch.Tensor]]:
        names = [f for x in self.exchanges for f in x.features]
        found = batches.features(batch, names)
        return [[found[f] for f in x.features] for x in self.exchanges]

    def _ask(self, exchange: Exchange, ids: list[torch.Tensor]) -> plan.Requests:
        owners = plan.OwnerMap(exchange.bounds, exchange.shifts, exchange.starts)
        return asking.ask(ids, exchange.firsts, exchange.sizes, owners, exchange.name, self.group)

    def _make(
        self,
        number: int,
        batch: Any,
        ids: list[list[torch.Tensor]],
        asked: list[plan.Requests],
        before: Planned | None,
        asked_before: list[plan.Requests],
    ) -> Planned:
        """Plan a batch's rows, and the gradients of the batch before it, now that both are known."""
        plans = []
        for i, exchange in enumerate(self.exchanges):
            like = exchange.anchor.detach()
            flat = torch.cat([t.long() for t in ids[i]])
            if before is None:
                rows = plan.split(asked[i], *_all(asked[i]))
                plans.append(steps.make(number, flat, asked[i], rows, like))
            else:
                gradients, rows = asking.answer(asked_before[i], asked[i], self.group)
                plans.append(steps.make(number, flat, asked[i], rows, like))
                steps.finish(before.plans[i], asked_before[i], gradients)
                before.plans[i].next = plans[i]
        return Planned(number, batch, plans)

    def _put_last(self, last: Planned | None, asked: list[plan.Requests]) -> None:
        """The last batch leaves nothing for later: its gradients are all urgent, and no rows are fetched for a next."""
        if last is None:
            return
        for i, p in enumerate(last.plans):
            steps.finish(p, asked[i], plan.split(asked[i], *_all(asked[i])))
            p.next = steps.nothing_next(p)
        self._ready.put(last)

    def _hear(self, status: int, error: BaseException | None, number: int) -> tuple[bool, BaseException | None]:
        """Does every rank go on? If not: what to raise in the user's loop, None for a clean end."""
        said = [s for (s,) in compat.gather_ints([status], self.group)]
        if set(said) == {_GOES_ON}:
            return True, None
        if _FAILED in said:
            return False, self._failure(said, error, number)
        if set(said) == {_ENDED}:
            return False, None
        words = (
            f"freescale: the loader of rank {said.index(_ENDED)} ended after {number} batches, others have more; "
            "all ranks end here"
        )
        if self.strict:
            return False, RuntimeError(words)
        log.warning(words)
        return False, None

    def _failure(self, said: list[int], error: BaseException | None, number: int) -> BaseException:
        """Every rank learns which rank failed at which batch, and with what words; that rank raises its own error."""
        words: list[Any] = [None] * len(said)
        dist.all_gather_object(words, None if error is None else f"{type(error).__name__}: {error}", self.group)
        rank = said.index(_FAILED)
        if error is not None:
            return error
        return RuntimeError(f"freescale: rank {rank} failed while it loaded batch {number}: {words[rank]}")


def _all(asked: plan.Requests) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, held = asked.mine.values, asked.rows
    return torch.ones_like(wanted, dtype=torch.bool), torch.ones_like(held, dtype=torch.bool)


def _same_structure(batch: Any, shape: str | None, number: int) -> str:
    found = batches.structure(batch)
    if shape is not None and found != shape:
        raise ValueError(f"freescale: batch {number} is {found}; the batches before it were {shape}")
    return found
