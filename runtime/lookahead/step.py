"""State of one loop between two steps: early rows in flight, and late gradients that the next step applies. These leave
the backward pass as the gradient of the plan's `late_slot`; a hook on it collects them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import dynamo
from freescale.kernels import background
from freescale.kernels.ops import table_registry
from freescale.kernels.transports import open_transports
from freescale.runtime import batch_structure
from freescale.runtime.lookahead.planning import PlannedBatch
from freescale.runtime.lookahead.rendezvous import (
    BESIDE_UPDATE,
    CHANGED_BATCH,
    FOREIGN_BATCH,
    UNKNOWN_BATCH,
    RankExits,
    RankStatus,
)
from freescale.runtime.lookahead.thread import PlanningThread
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

_wait = torch.ops._c10d_functional.wait_tensor


class LateGradientsHook:
    """On the late slot of a step: runs when a backward pass produces late gradients. Each backward pass of a step is
    one update, as in TorchRec, so before a second one adds its own, all ranks apply those of the first."""

    def __init__(self, exchange: Exchange, plan: StepPlan) -> None:
        self._exchange, self._number = exchange, plan.number
        self._plan = weakref.ref(plan)  # a loss that the user keeps must not keep plans alive
        self._backwards_before = table_registry.backward_update_counts[exchange.name]
        self.refused_after = ""  # the event after which no rank takes late gradients of this step

    def __call__(self, grad: torch.Tensor) -> None:
        if self.refused_after:
            raise RuntimeError(
                f"freescale: backward of step {self._number} after {self.refused_after}: {grad.shape[0]} rows of its "
                "gradients have missed their step. Call backward before the next batch goes through the model"
            )
        plan, name = self._plan(), self._exchange.name
        if plan is None or plan.late_slot is None:
            return
        settings = table_registry.last_step_settings.get(name)
        if plan.late_slot.grad is not None:
            table_registry.last_step_settings[name] = plan.settings
            apply_late_gradients(self._exchange, plan)
            table_registry.last_step_settings[name] = settings
        plan.settings = settings
        # A table that the loss does not depend on gets zeros and no update.
        plan.backwards += self.is_incomplete(plan)

    def is_incomplete(self, plan: StepPlan) -> bool:
        """Whether a backward pass has applied the urgent gradients but not produced the late ones: it raised in
        between, was asked for the gradients of some tensors only, or belonged to another step."""
        updates = table_registry.backward_update_counts[self._exchange.name]
        return updates > self._backwards_before + plan.backwards


def apply_late_gradients(exchange: Exchange, plan: StepPlan) -> None:
    """Send and apply the late gradients of a step that has some. Collective."""
    exchange.apply_late_gradients(exchange.anchor.detach(), plan.late_gradients(), exchange.group_name)
    assert plan.late_slot is not None
    plan.late_slot.grad = None


def _is_pending(plan: StepPlan) -> bool:
    return plan.backwards > 0 and plan.late_slot is not None and plan.late_slot.grad is not None


def _refuse_backward(plan: StepPlan, after: str) -> None:
    """A later backward pass of this step raises: its late gradients would be lost."""
    plan.late_hook.refused_after = after
    plan.late_slot = None


class Loop:
    """One loop over a LookaheadLoader: the batch yielded last, and what the last step left for the next."""

    def __init__(self, exchanges: list[Exchange], number: int, thread: PlanningThread, exits: RankExits) -> None:
        self.exchanges, self.number, self.thread, self.exits = exchanges, number, thread, exits
        self._features = [f for x in exchanges for f in x.features]
        self.current: PlannedBatch | None = None  # the batch yielded last
        self.statuses: list[RankStatus] = []  # of all ranks at the last rendezvous
        self.failure: str | None = None  # why the ranks cannot synchronize any more
        self.failure_known_to_all = False  # every rank has received it from all others
        # Per exchange the last step that ran; its late gradients are pending until the next step takes them.
        self._previous: list[StepPlan | None] = [None] * len(exchanges)
        self._updates_before: list[int] | None = None  # of each table when the step began; None outside a step
        self._watched = [table_registry.watch(x.name) for x in exchanges]
        self._other_writes: list[int] | None = None  # to each table when the last step began
        # The tensors that hold the ids of the last batches, to recognize a batch that is used again.
        self._yielded: deque[tuple[int, list[weakref.ref[Any]]]] = deque(maxlen=4)
        self._versions: list[int] = []  # of the tensors of the last one; each in-place write increments one

    def fail(self, reason: str, known_to_all: bool = False) -> None:
        why = self.exits.why_left()
        self.failure = f"{reason} ({why})" if why and why not in reason else reason
        self.failure_known_to_all = known_to_all

    def status(self, action: int, received: int) -> RankStatus:
        """Where this rank is. Raises if the loop has ended or failed."""
        if self.exits.agreed:
            raise RuntimeError("freescale: this LookaheadLoader's loop has ended: ranks were out of step")
        if self.failure is None and not dist.is_initialized():
            self.fail("the process group is gone")
        if self.failure is not None:
            raise RuntimeError(f"freescale: {self.failure}")
        return RankStatus(
            action=action,
            loop=self.number,
            batch=self.batch_number,
            used=self.used,
            pending=self.pending,
            incomplete=self.incomplete,
            received=received,
            planning_failed=self.thread.failed,
            ordered=self.thread.ordered,
            written=self._written(),
        )

    def _written(self) -> int:
        if self._other_writes is None or self._other_writes == self._count_other_writes():
            return 0
        return BESIDE_UPDATE if background.is_pending(x.name for x in self.exchanges) else 1

    def _count_other_writes(self) -> list[int]:
        """Writes to each table that are not updates."""
        return [watched.other_writes() for watched in self._watched]

    # -- batches -------------------------------------------------------------------------------------------------

    @property
    def batch_number(self) -> int:
        return -1 if self.current is None else self.current.number

    @property
    def used(self) -> bool:
        """The batch yielded last has been through the model."""
        return self.current is not None and self.current.used

    @dynamo.runs_outside_inference_mode
    def take(self, planned: PlannedBatch) -> None:
        """The next batch to yield."""
        planned.complete(self.exchanges)
        self.current = planned
        holders = batch_structure.id_holders(planned.batch, self._features)
        self._yielded.appendleft((planned.number, [weakref.ref(t) for t in holders]))
        self._versions = batch_structure.versions(holders)

    def identify_batch(self, inputs: Any) -> int:
        """Which batch the inputs of the model belong to. Waits for a GPU only if something has written to the ids of
        the batch yielded last."""
        input_ids = {id(t) for t in batch_structure.leaves(inputs)}
        on_device = self.exchanges[0].anchor.device.type != "cpu"
        for number, refs in self._yielded:
            holders = [r() for r in refs]
            if self.current is not None and refs and all(id(t) in input_ids for t in holders):
                if number != self.current.number or (on_device and batch_structure.versions(holders) == self._versions):
                    return number
                return number if self._has_planned_ids(self.current.batch) else CHANGED_BATCH
        if self.current is None:
            return FOREIGN_BATCH
        if on_device:
            return UNKNOWN_BATCH  # a comparison here would wait for the device; the graph compares
        matches = self._has_planned_ids(inputs)
        return UNKNOWN_BATCH if matches is None else self.current.number if matches else FOREIGN_BATCH

    def _has_planned_ids(self, batch: Any) -> bool | None:
        """Whether `batch` has the ids and lengths planned for the batch yielded last; None if it has none."""
        assert self.current is not None
        try:
            by_feature, counts = batch_structure.feature_ids_and_counts(batch, self._features)
        except ValueError:
            return None
        planned = self.current.value_counts
        if any(planned.get(key, n) != n for key, n in counts.items()):
            return False
        return all(
            torch.equal(torch.cat([by_feature[f].long().view(-1) for f in x.features]), plan.ids.cpu())
            for x, plan in zip(self.exchanges, self.current.plans, strict=True)
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    @dynamo.runs_outside_inference_mode
    def begin_step(self) -> None:
        """The batch yielded last is about to go through the model, on every rank."""
        assert self.current is not None
        open_transports.check()
        for x, plan in zip(self.exchanges, self.current.plans, strict=True):
            planned, now = plan.arrived, x.anchor
            if (planned.dtype, planned.device) != (now.dtype, now.device):
                raise RuntimeError(
                    f"freescale: {x.name} was {planned.dtype} on {planned.device} when its LookaheadLoader's loop "
                    f"began and is {now.dtype} on {now.device} now; change a model outside the loop"
                )
        pairs = list(zip(self._previous, self.current.plans, strict=True))
        # If the step before this one did not run, nothing has fetched early rows for this one.
        skipped = [self.current.number > 0 and (before is None or before.next is not plan) for before, plan in pairs]
        if any(skipped) and not self.current.whole:
            self.apply_pending()
        outdated = any(s.written for s in self.statuses)
        self._other_writes = self._count_other_writes()
        for x, (before, plan), fetch in zip(self.exchanges, pairs, skipped, strict=True):
            x.freescale_plan = plan
            x.anchor.grad = None  # otherwise autograd adds an empty gradient, as expensive as a launch
            if plan.whole:
                continue
            plan.before = step_plan.no_late_gradients(plan) if before is None else before.late_gradients()
            if fetch or outdated:
                _wait(plan.arrived)
                x.launch_early_rows(x.anchor.detach(), plan, x.group_name)
        self._updates_before = [table_registry.update_counts[x.name] for x in self.exchanges]

    @dynamo.runs_outside_inference_mode
    def end_forward(self) -> None:
        """The forward pass of the step is over, or has failed. No-op outside a step."""
        if self._updates_before is None or self.current is None:
            return
        for i, (x, plan) in enumerate(zip(self.exchanges, self.current.plans, strict=True)):
            before, x.freescale_plan, plan.before = self._previous[i], None, None
            applied_late = plan.used or table_registry.update_counts[x.name] != self._updates_before[i]
            if applied_late and before is not None and before.late_slot is not None:
                _refuse_backward(before, "the forward pass of a later batch")
            if plan.used:
                self._previous[i] = plan
                if not plan.whole:
                    assert plan.late_slot is not None
                    plan.late_hook = LateGradientsHook(x, plan)
                    plan.late_slot.register_hook(plan.late_hook)
                if plan.next is not None and plan.next.arrived.is_inference():  # a training step could not use it
                    plan.next.arrived = _wait(plan.next.arrived).clone()
        self._updates_before = None

    # -- pending gradients ---------------------------------------------------------------------------------------

    def _late(self) -> Iterator[tuple[Exchange, StepPlan]]:
        """The last step of each exchange that takes late gradients."""
        for x, plan in zip(self.exchanges, self._previous, strict=True):
            if plan is not None and not plan.last and plan.late_slot is not None:
                yield x, plan

    @property
    def pending(self) -> int:
        """The step whose gradients are pending, or -1; the same on all ranks at the same place."""
        return max((plan.number for _, plan in self._late() if _is_pending(plan)), default=-1)

    @property
    def incomplete(self) -> int:
        """The step whose backward pass is incomplete, or -1; ranks may differ."""
        return max((plan.number for _, plan in self._late() if plan.late_hook.is_incomplete(plan)), default=-1)

    @dynamo.runs_outside_inference_mode
    def apply_pending(self) -> None:
        """Send and apply what is pending. Collective."""
        open_transports.check()
        try:
            for x, plan in self._late():
                if _is_pending(plan):
                    apply_late_gradients(x, plan)
        except Exception as error:
            self.fail(str(error))
            raise RuntimeError(self.describe_loss()) from error

    def describe_loss(self) -> str:
        """The gradients that will not be applied, in words; "" if there are none."""
        tables = []
        for x, plan in self._late():
            if not _is_pending(plan) and not plan.late_hook.is_incomplete(plan):
                continue
            assert plan.late_index is not None and plan.late_update is not None
            computed, owned = plan.late_index.shape[0], plan.late_update.rows.shape[0]
            if computed or owned:
                tables.append(
                    f"gradients of step {plan.number} for table {x.name} were not applied: {computed} rows that "
                    f"this rank computed, {owned} rows that it owns"
                )
        if tables:
            return f"freescale: {'; '.join(tables)} ({self.failure})"
        return f"freescale: {self.failure}" if self.failure_known_to_all else ""

    def refuse_further_backwards(self) -> None:
        for _, plan in self._late():
            _refuse_backward(plan, "its loop has ended")

    def wait_for_unused_rows(self) -> None:
        """Early rows for a batch that will not be used: no step needs them, but they must arrive."""
        for plan in self._previous:
            if plan is not None and plan.next is not None:
                _wait(plan.next.arrived)
