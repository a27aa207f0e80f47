"""What is pending between two steps of one loop: rows on their way, and gradients that the next step is to apply.

A `Run` is one loop over a LookaheadLoader: the batch that it handed out last, and what the last step left. It decides
nothing; who may do what, and whether all ranks are at the same place, is in rank_meetings.py.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from freescale.compat import dynamo
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import EARLY, LATE
from freescale.kernels.transports import open_transports
from freescale.runtime import batch_structure
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.table_exchange import Exchange

_wait = torch.ops._c10d_functional.wait_tensor

# What reached the model: the number of a batch of the loader, or
UNKNOWN, FOREIGN = -1, -2


@dataclass
class Planned:
    """A batch and its plans, one per exchange."""

    number: int
    batch: Any
    plans: list[step_plan.StepPlan]
    loader_state: Any = None  # of a loader that has one, when it had given this batch and not the next

    @property
    def used(self) -> bool:
        return any(p.used for p in self.plans)


class Run:
    """The state of one loop."""

    def __init__(self, exchanges: list[Exchange], loop: int) -> None:
        self.exchanges, self.loop = exchanges, loop
        self.current: Planned | None = None  # handed out last
        self.closed = False  # all ranks have agreed that it ends
        self.broken: str | None = None  # why the ranks can agree on nothing any more
        self.all_know = False  # the ranks have met, and every rank has heard it
        self.stop_planning: Callable[[int, bool], None] = lambda more, together: None
        self.planning_failed: Callable[[], bool] = lambda: False  # on this rank, and its group with it
        self.why_planning_failed: Callable[[], str] = lambda: ""
        self.behind = 0  # how many batches fewer than the furthest rank this one had taken when the ranks last met
        # Per exchange the last step that ran: its late gradients are pending until the next step has taken them.
        self._last: list[step_plan.StepPlan | None] = [None] * len(exchanges)
        self._updates: list[int] | None = None  # of each table when the step began; None outside a step
        self._after: list[int] = [0] * len(exchanges)  # tables.backwards at the end of the last forward pass
        # The tensors with ids of the last batches, to recognise a batch that comes again.
        self._handed: deque[tuple[int, list[weakref.ref[Any]]]] = deque(maxlen=4)

    # -- batches -------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        return -1 if self.current is None else self.current.number

    @dynamo.outside_inference_mode()
    def hand_out(self, item: Planned, batch: Any) -> None:
        """`batch`, on the device, goes to the user."""
        self.current = item
        wanted = [f for x in self.exchanges for f in x.features]
        self._handed.appendleft((item.number, [weakref.ref(t) for t in batch_structure.holders(batch, wanted)]))
        for p in item.plans:
            step_plan.place_rows(p)
            step_plan.place_gradients(p)
            assert p.next is not None
            step_plan.place_rows(p.next)

    def what_came(self, args: Any) -> int:
        """Which batch the arguments of the model are made of."""
        got = {id(t) for t in batch_structure.leaves(args)}
        for number, refs in self._handed:
            if refs and all(id(r()) in got for r in refs):
                return number
        if self.current is None:
            return FOREIGN
        for x, p in zip(self.exchanges, self.current.plans, strict=True):
            try:
                found = batch_structure.features(args, x.features)
            except ValueError:
                return UNKNOWN
            if p.ids.device.type != "cpu":
                return UNKNOWN  # comparing would wait for the device; the graph compares
            if not torch.equal(torch.cat([found[f].long().view(-1) for f in x.features]), p.ids):
                return FOREIGN
        return self.current.number

    # -- steps ---------------------------------------------------------------------------------------------------

    @dynamo.outside_inference_mode()
    def begin(self) -> None:
        """The batch handed out last is about to go through the model, on every rank."""
        assert self.current is not None
        open_transports.check()
        for x, p in zip(self.exchanges, self.current.plans, strict=True):
            if (p.arrived.dtype, p.arrived.device) != (x.anchor.dtype, x.anchor.device):
                raise RuntimeError(
                    f"freescale: {x.name} was {p.arrived.dtype} on {p.arrived.device} when its LookaheadLoader's loop "
                    f"began and is {x.anchor.dtype} on {x.anchor.device} now; change a model outside the loop"
                )
        pairs = list(zip(self._last, self.current.plans, strict=True))
        # Where the step before this one did not run, nobody has fetched rows for this one.
        skipped = [self.current.number > 0 and (q is None or q.next is not p) for q, p in pairs]
        if any(skipped):
            self.apply()
        for x, (q, p), fetch in zip(self.exchanges, pairs, skipped, strict=True):
            p.before = step_plan.nothing_late(p.arrived, p.urgent[1]) if q is None else q.late()
            if fetch:
                _wait(p.arrived)
                p.arrived = torch.ops.freescale.all_to_all_rows_launch(
                    x.anchor.detach(), p.early_rows, *p.early_counts, p.early_slots.shape[0], EARLY,
                    x.name, x.group_name
                )  # fmt: skip
            x.freescale_plan = p
        self._updates = [table_registry.update_counts[x.name] for x in self.exchanges]

    @dynamo.outside_inference_mode()
    def end(self) -> None:
        """The forward pass is over, or has failed."""
        if self._updates is None or self.current is None:
            return
        for i, (x, p) in enumerate(zip(self.exchanges, self.current.plans, strict=True)):
            q, x.freescale_plan, p.before = self._last[i], None, None
            # applied: the gradients of the step before
            if p.used or table_registry.update_counts[x.name] != self._updates[i]:
                if q is not None and q.late_slot is not None:
                    _refuse_backward(q, "the forward pass of a later batch")
            if p.used:
                self._last[i], self._after[i] = p, table_registry.backward_update_counts[x.name]
                _take_late_gradients(x, p)
                if p.next is not None and p.next.arrived.is_inference():  # a training step could not use it
                    p.next.arrived = _wait(p.next.arrived).clone()
        self._updates = None

    # -- pending gradients ---------------------------------------------------------------------------------------

    def _left(self) -> Iterator[tuple[Exchange, step_plan.StepPlan]]:
        for x, q in zip(self.exchanges, self._last, strict=True):
            slot = None if q is None or q.last or not q.backwards else q.late_slot
            if q is not None and slot is not None and slot.grad is not None:
                yield x, q

    def _torn(self) -> Iterator[tuple[Exchange, step_plan.StepPlan]]:
        """Where a backward pass has applied the urgent gradients but never handed over the late ones: it raised in
        between, was asked for the gradients of some tensors alone, or was that of another step."""
        for x, q, after in zip(self.exchanges, self._last, self._after, strict=True):
            if q is not None and not q.last and q.late_slot is not None:
                if table_registry.backward_update_counts[x.name] != after + q.backwards:
                    yield x, q

    @property
    def pending(self) -> int:
        """The step whose gradients are pending, -1 if none are; the same on every rank at the same place."""
        return max((int(q.step) for _, q in self._left()), default=-1)

    @property
    def torn(self) -> int:
        """The step whose backward pass was torn, -1 if none was; the ranks may differ."""
        return max((int(q.step) for _, q in self._torn()), default=-1)

    @dynamo.outside_inference_mode()
    def apply(self) -> None:
        """Send and apply what is pending. Every rank does so at the same place."""
        open_transports.check()
        for x, q in self._left():
            try:
                _apply_late(x, q)
            except Exception as error:
                self.broken = str(error)
                raise RuntimeError(self.lost()) from error

    def lost(self) -> str:
        """What will not be applied, in words; empty if it is nothing."""
        parts = []
        left = {x: q for x, q in (*self._left(), *self._torn())}
        for x, q in left.items():
            assert q.late_index is not None
            held, owned = q.late_index.shape[0], q.late_own[0].shape[0]
            if held or owned:
                parts.append(
                    f"gradients of step {int(q.step)} for table {x.name} were not applied: {held} rows that this rank "
                    f"computed, {owned} rows that it owns"
                )
        if parts:
            return f"freescale: {'; '.join(parts)} ({self.broken})"
        return f"freescale: {self.broken}" if self.all_know else ""

    def over(self) -> None:
        """Nobody will fetch late gradients any more. (The last step has none.)"""
        for q in self._last:
            if q is not None and not q.last and q.late_slot is not None:
                _refuse_backward(q, "its loop has ended")

    def drop_arriving(self) -> None:
        """Rows that were fetched for a batch that will not come: nothing depends on them, but they must arrive."""
        for q in self._last:
            if q is not None and q.next is not None:
                _wait(q.next.arrived)


def _take_late_gradients(x: Exchange, p: step_plan.StepPlan) -> None:
    """Each backward pass of a step is one update, as in TorchRec. So where a second one hands its late gradients over,
    those of the first are applied, by all ranks in this very place, instead of being added to."""
    step = weakref.ref(p)  # the graph of a loss that the user keeps must not keep plans
    before = table_registry.backward_update_counts[x.name]

    def take(grad: torch.Tensor) -> None:
        q = step()
        if q is None or q.late_slot is None:
            return
        now = table_registry.last_step_settings.get(x.name)
        if q.late_slot.grad is not None:
            table_registry.last_step_settings[x.name] = q.settings
            _apply_late(x, q)
            table_registry.last_step_settings[x.name] = now
        q.settings = now
        # A table that the loss does not depend on gets zeros, and no update.
        q.backwards += table_registry.backward_update_counts[x.name] > before + q.backwards

    assert p.late_slot is not None
    p.late_slot.register_hook(take)


def _apply_late(x: Exchange, p: step_plan.StepPlan) -> None:
    """Send and apply the late gradients of a step, which has them. Every rank does so at the same place."""
    late = p.late()
    torch.ops.freescale.exchange_backward(
        x.anchor.detach(), late.grad, *late.own, *late.counts, late.own[1].shape[0], LATE, x.name, x.group_name
    )
    assert p.late_slot is not None
    p.late_slot.grad = None


def _refuse_backward(p: step_plan.StepPlan, after: str) -> None:
    """A backward pass of a step whose late gradients nobody will fetch any more must not go by in silence."""
    number, slot = int(p.step), p.late_slot

    def refuse(grad: torch.Tensor) -> None:
        raise RuntimeError(
            f"freescale: backward of step {number} after {after}: {grad.shape[0]} rows of its gradients have missed "
            "their step. Call backward before the next batch goes through the model"
        )

    assert slot is not None
    slot.register_hook(refuse)
    p.late_slot = None
