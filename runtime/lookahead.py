"""`LookaheadLoader`: plans the exchange of the next batch while this one trains, and hands batches over in order.

A background thread with a gloo group of its own takes batches from the user's loader, exchanges their ids with the other
ranks, finds the rows that two consecutive batches share, and makes the tensors that the two steps need. It never touches
the training group or the device. What is pending between two steps is in the StepPlans (steps.py); `flush` applies it.

A model has one active loader. Another one may run while the first is between two batches (an evaluation); it is put on
top, and the first goes on when it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from freescale import config
from freescale.kernels import asking, plan
from freescale.runtime import batches, steps
from freescale.runtime.exchange import Exchange
from freescale.runtime.native import ShardedEmbedding

log = logging.getLogger(__name__)

_GOES_ON, _ENDED, _FAILED, _CLOSED = range(4)


@dataclass
class _Planned:
    """A batch and its plans, one per exchange."""

    number: int
    batch: Any
    plans: list[steps.StepPlan]


class LookaheadLoader:
    """Wrap any iterable of batches; iterate over this instead. See the module's docstring.

    model      what torch.compile(model, backend="freescale") returned
    strict     loaders of different length on different ranks are an error instead of a warning
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
        self.exchanges = exchanges_of(model)
        if not self.exchanges:
            raise ValueError("freescale: the model has no sharded table that a LookaheadLoader could plan for")
        self._tables = _guard_of(model, self.exchanges)
        # A group of its own: its collectives never come between those of the training.
        self._group = dist.new_group(backend="gloo")
        self._stats: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def stats(self) -> list[dict[str, Any]]:
        """Per step and exchange of the last iteration: rows, bytes urgent, early and late of this rank."""
        return [dict(s) for s in self._stats]

    def __iter__(self) -> Iterator[Any]:
        self._stats = []
        run = _Run(self)
        self._tables.enter(run)
        try:
            yield from run.batches()
        finally:
            self._tables.leave(run)


class _Run:
    """One iteration over a loader."""

    def __init__(self, owner: LookaheadLoader) -> None:
        self.owner = owner
        self.exchanges = owner.exchanges
        self.device = owner.exchanges[0].anchor.device
        self.current: _Planned | None = None  # handed out last
        self._ready: queue.Queue[_Planned | BaseException | None] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._plan_all, name="freescale-lookahead", daemon=True)

    # -- the user's thread ---------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        self._thread.start()
        while True:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            self.owner._tables.must_be_on_top(self)
            yield self._hand_out(item)

    def _hand_out(self, item: _Planned) -> Any:
        before = self.current
        self.current = item
        for i, (exchange, p) in enumerate(zip(self.exchanges, item.plans, strict=True)):
            p.before = before.plans[i].late() if before is not None else steps.nothing_late(p.arrived, p.urgent[1])
            if before is not None:
                before.plans[i].late_slot = None  # its gradients belong to the next step now
            steps.place(p)
            assert p.next is not None
            steps.place(p.next)
            exchange.plan = p
            self.owner._stats.append({"step": item.number, "exchange": exchange.name, **p.stats})
        return batches.move(item.batch, self.device)

    def flush(self) -> None:
        """Send and apply what the last step left for the next one. Every rank must call it at the same step."""
        if self.current is None:
            return
        for exchange, p in zip(self.exchanges, self.current.plans, strict=True):
            # Before its forward a step still holds the gradients of the one before it; after it, perhaps its own.
            late = p.late() if p.used else p.before
            assert late is not None
            _apply(exchange, late, self.current.number - (not p.used))
            if p.used:
                p.late_slot = None
            else:
                p.before = steps.nothing_late(p.arrived, p.urgent[1])

    def close(self) -> None:
        """Apply what is pending, let go of what is under way, end the thread."""
        self._stop.set()
        try:
            self.flush()
            self._drop_arriving()
        finally:
            for exchange in self.exchanges:
                exchange.plan = None
            while self._thread.is_alive():  # it may be waiting for room in the queue
                try:
                    self._ready.get(timeout=0.05)
                except queue.Empty:
                    pass

    def _drop_arriving(self) -> None:
        """Rows that were fetched for a batch that will not come: nothing depends on them, but they must arrive."""
        if self.current is not None:
            for p in self.current.plans:
                if p.used and p.next is not None:
                    torch.ops._c10d_functional.wait_tensor(p.next.arrived)

    # -- the background thread -----------------------------------------------------------------------------------

    def _plan_all(self) -> None:
        try:
            self._plan_each()
        except BaseException as error:  # noqa: BLE001  (it is raised again in the user's loop)
            self._put(error)

    def _put(self, item: _Planned | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return
            except queue.Full:
                continue

    def _plan_each(self) -> None:
        source, number = iter(self.owner.loader), 0
        before: _Planned | None = None
        asked_before: list[plan.Requests] = []
        shape: str | None = None
        while True:
            batch, ids, status, error = None, [], _GOES_ON, None
            try:
                if self._stop.is_set():
                    status = _CLOSED
                else:
                    batch = next(source)
                    shape = _same_structure(batch, shape, number)
                    ids = self._ids(batch)
            except StopIteration:
                status = _ENDED
            except Exception as e:  # noqa: BLE001  (the other ranks must hear of it)
                status, error = _FAILED, e
            verdict = self._hear(status, error, number)
            if verdict is not _GOES_ON:
                self._put_last(before, asked_before)
                self._put(error if error is not None else verdict if isinstance(verdict, BaseException) else None)
                return
            try:
                asked = [self._ask(x, i) for x, i in zip(self.exchanges, ids, strict=True)]
            except IndexError as e:  # an id outside its table, on every rank alike
                self._put_last(before, asked_before)
                self._put(e)
                return
            after = self._make(number, batch, ids, asked, before, asked_before)
            if before is not None:
                self._put(before)
            before, asked_before, number = after, asked, number + 1

    def _ids(self, batch: Any) -> list[list[torch.Tensor]]:
        names = [f for x in self.exchanges for f in x.features]
        found = batches.features(batch, names)
        return [[found[f] for f in x.features] for x in self.exchanges]

    def _ask(self, exchange: Exchange, ids: list[torch.Tensor]) -> plan.Requests:
        owners = plan.OwnerMap(exchange.bounds, exchange.shifts, exchange.starts)
        return asking.ask(ids, exchange.firsts, exchange.sizes, owners, exchange.name, self.owner._group)

    def _make(
        self,
        number: int,
        batch: Any,
        ids: list[list[torch.Tensor]],
        asked: list[plan.Requests],
        before: _Planned | None,
        asked_before: list[plan.Requests],
    ) -> _Planned:
        """Plan a batch's rows, and the gradients of the batch before it, now that both are known."""
        plans = []
        for i, exchange in enumerate(self.exchanges):
            like = exchange.anchor.detach()
            flat = torch.cat([t.long() for t in ids[i]])
            if before is None:
                rows = plan.split(asked[i], *_all(asked[i]))
                plans.append(steps.make(number, flat, asked[i], rows, like))
            else:
                gradients, rows = asking.answer(asked_before[i], asked[i], self.owner._group)
                plans.append(steps.make(number, flat, asked[i], rows, like))
                steps.finish(before.plans[i], asked_before[i], gradients)
                before.plans[i].next = plans[i]
        return _Planned(number, batch, plans)

    def _put_last(self, last: _Planned | None, asked: list[plan.Requests]) -> None:
        """The last batch leaves nothing for later: all its gradients are urgent, and no rows are fetched for a next one."""
        if last is None:
            return
        for i, p in enumerate(last.plans):
            steps.finish(p, asked[i], plan.split(asked[i], *_all(asked[i])))
            p.next = steps.nothing_next(p)
        self._put(last)

    def _hear(self, status: int, error: BaseException | None, number: int) -> Any:
        """Does every rank go on? If not: None for a clean end, or what to raise in the user's loop."""
        mine = torch.tensor([status])
        heard = [torch.empty_like(mine) for _ in range(self.owner._group.size())]
        dist.all_gather(heard, mine, group=self.owner._group)
        said = [int(h) for h in heard]
        if set(said) == {_GOES_ON}:
            return _GOES_ON
        if _FAILED in said:
            return self._failure(said, error, number)
        if set(said) == {_ENDED} or status == _CLOSED:
            return None
        if _CLOSED in said:
            return RuntimeError(
                f"freescale: rank {said.index(_CLOSED)} left its loop before batch {number}, this rank did not"
            )
        words = (
            f"freescale: the loader of rank {said.index(_ENDED)} ended after {number} batches, others have more; "
            "all ranks end here"
        )
        if self.owner.strict:
            return RuntimeError(words)
        log.warning(words)
        return None

    def _failure(self, said: list[int], error: BaseException | None, number: int) -> RuntimeError:
        """Every rank learns which rank failed at which batch, and with what words."""
        words: list[Any] = [None] * len(said)
        dist.all_gather_object(words, None if error is None else f"{type(error).__name__}: {error}", self.owner._group)
        rank = said.index(_FAILED)
        return RuntimeError(f"freescale: rank {rank} failed while it loaded batch {number}: {words[rank]}")


def _all(asked: plan.Requests) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, held = asked.mine.values, asked.rows
    return torch.ones_like(wanted, dtype=torch.bool), torch.ones_like(held, dtype=torch.bool)


def _same_structure(batch: Any, shape: str | None, number: int) -> str:
    found = batches.structure(batch)
    if shape is not None and found != shape:
        raise ValueError(f"freescale: batch {number} is {found}; the batches before it were {shape}")
    return found


def _apply(exchange: Exchange, late: steps.Late, number: int) -> None:
    rows = late.own[0].shape[0]
    try:
        torch.ops.freescale.exchange_backward(
            exchange.anchor.detach(), late.grad, *late.own, *late.counts, late.own[1].shape[0], 0,
            exchange.name, exchange.group_name
        )  # fmt: skip
    except Exception as error:
        if rows == 0 and late.grad.shape[0] == 0:
            return
        raise RuntimeError(
            f"freescale: {rows} rows of {exchange.name} did not get their gradients of step {number}: {error}"
        ) from error


def exchanges_of(model: torch.nn.Module) -> list[Exchange]:
    """The exchanges of a model, in the order of its modules, the same on every rank."""
    found: list[Exchange] = []
    for module in model.modules():
        if isinstance(module, ShardedEmbedding):
            found.append(module._exchange)
        elif type(module).__name__ == "ShardedEmbeddingCollection":
            from freescale.runtime import torchrec_tables

            if torchrec_tables.why_not(module) is None:
                found += torchrec_tables.collection_of(module).exchanges
    return list(dict.fromkeys(found))


# ---- one model, several loaders ---------------------------------------------------------------------------------


class _Tables:
    """Who may use a model's tables: the loader on top. Uses outside its order are flushed for, or refused."""

    def __init__(self, model: torch.nn.Module, exchanges: list[Exchange]) -> None:
        self.exchanges = exchanges
        self.runs: list[_Run] = []
        model.register_forward_pre_hook(self._before_forward)
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before_state_dict)

    def enter(self, run: _Run) -> None:
        if self.runs:
            top = self.runs[-1]
            if top.current is not None and not all(p.used for p in top.current.plans):
                raise RuntimeError(
                    f"freescale: a second LookaheadLoader starts while batch {top.current.number} of the first has "
                    "not reached the model yet; a model works for one loader at a time"
                )
            top.flush()
        self.runs.append(run)

    def leave(self, run: _Run) -> None:
        if run in self.runs:
            while self.runs[-1] is not run:
                self.runs.pop().close()
            self.runs.pop()
            run.close()

    def must_be_on_top(self, run: _Run) -> None:
        if not self.runs or self.runs[-1] is not run:
            raise RuntimeError(
                "freescale: a model is used under two LookaheadLoaders at once: one asks for its next batch while the "
                "other is still running; finish or close the inner one first"
            )

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Runs before every call of the compiled model, outside the graph."""
        if not self.runs:
            return
        run = self.runs[-1]
        if all(x.plan is not None and not x.plan.used for x in self.exchanges):
            if len(self.runs) > 1 and torch.is_grad_enabled() and module.training:
                raise RuntimeError(
                    "freescale: a training step under a second LookaheadLoader while the first has not ended; rows "
                    "fetched ahead for the first would be out of date"
                )
            return
        if torch.is_grad_enabled():
            number = "no batch yet" if run.current is None else f"batch {run.current.number}, which was used already"
            raise RuntimeError(
                "freescale: a batch reached the model that did not come from its LookaheadLoader, or came twice: the "
                f"loader has handed out {number}. Take the next batch from the loader, or leave its loop first "
                "(evaluation under torch.no_grad() is fine)"
            )
        run.flush()
        for x in self.exchanges:
            x.plan = None

    def _before_state_dict(self, *args: Any) -> None:
        if self.runs:
            self.runs[-1].flush()


_guards: weakref.WeakKeyDictionary[torch.nn.Module, _Tables] = weakref.WeakKeyDictionary()


def _guard_of(model: torch.nn.Module, exchanges: list[Exchange]) -> _Tables:
    if model not in _guards:
        _guards[model] = _Tables(model, exchanges)
    return _guards[model]


