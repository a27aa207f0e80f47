"""What is pending between two steps of one loop: rows on their way, and gradients that the next step is to apply.

A `LoopState` decides nothing: whether all ranks are at the same place is in rank_status.py, what a use of the model may
do in model_hooks.py.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from freescale.compat import dynamo
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import EARLY
from freescale.kernels.transports import launch_record, open_transports
from freescale.runtime import batch_structure
from freescale.runtime.lookahead import late_gradients
from freescale.runtime.lookahead.planned_batch import PlannedBatch
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

_wait = torch.ops._c10d_functional.wait_tensor

# Which batch reached the model: the number of one of the loader's, or
UNKNOWN_BATCH, FOREIGN_BATCH, CHANGED_BATCH = -1, -2, -3


class LoopState:
    """One loop over a LookaheadLoader: the batch that it handed out last, and what the last step left."""

    def __init__(self, exchanges: list[Exchange], number: int) -> None:
        self.exchanges, self.number = exchanges, number
        self._launched_before = launch_record.launched
        self.current: PlannedBatch | None = None  # handed out last
        self.closed = False  # all ranks have agreed that it ends
        self.failure: str | None = None  # why the ranks can agree on nothing any more
        self.failure_known_to_all = False  # every rank has heard it from all others
        self.stop_planning: Callable[[int, bool, str], None] = lambda more, together, reason: None
        self.planning_failed: Callable[[], bool] = lambda: False  # on this rank, and its group with it
        self.why_planning_failed: Callable[[], str] = lambda: ""
        self.planning_group_failed = False  # on some rank, and every rank knows
        self.batches_ordered: Callable[[], int] = lambda: 0  # of the planning thread
        # How many fewer than the furthest rank this one had ordered when the ranks last compared.
        self.batches_behind = 0
        # Per exchange the last step that ran: its late gradients are pending until the next step has taken them.
        self._previous: list[StepPlan | None] = [None] * len(exchanges)
        self._updates_before: list[int] | None = None  # of each table when the step began; None outside a step
        self._backwards_before: list[int] = [0] * len(exchanges)  # of each table when the last forward pass ended
        self._watched = [table_registry.watch(x.name) for x in exchanges]
        self._other_writes: list[int] | None = None  # to each table when the last step began
        self.early_rows_outdated = False  # on some rank, and every rank knows: tables were written since
        # What holds the ids of the last batches, to recognize a batch that comes again.
        self._handed_out: deque[tuple[int, list[weakref.ref[Any]]]] = deque(maxlen=4)
        self._versions: list[int] = []  # of the tensors in the last one: each in-place write counts one up

    def fail(self, reason: str, known_to_all: bool = False) -> None:
        why = launch_record.why_rank_left()
        self.failure = f"{reason} ({why})" if why and why not in reason else reason
        self.failure_known_to_all = known_to_all

    def launched(self, until: int | None = None) -> int:
        """Launches in this loop so far, or up to the one of that number."""
        return (launch_record.launched if until is None else until) - self._launched_before

    # -- batches -------------------------------------------------------------------------------------------------

    @property
    def batch_number(self) -> int:
        return -1 if self.current is None else self.current.number

    @dynamo.runs_outside_inference_mode
    def hand_out(self, planned: PlannedBatch) -> None:
        """Its batch goes to the user."""
        planned.complete(self.exchanges)
        self.current = planned
        features = [f for x in self.exchanges for f in x.features]
        holders = batch_structure.id_holders(planned.batch, features)
        self._handed_out.appendleft((planned.number, [weakref.ref(t) for t in holders]))
        self._versions = batch_structure.versions(holders)

    def identify_batch(self, inputs: Any) -> int:
        """Which batch the inputs of the model are made of."""
        input_ids = {id(t) for t in batch_structure.leaves(inputs)}
        for number, refs in self._handed_out:
            if refs and all(id(r()) in input_ids for r in refs):
                unchanged = number != self.batch_number or self._is_unchanged([r() for r in refs])
                return number if unchanged else CHANGED_BATCH
        if self.current is None:
            return FOREIGN_BATCH
        if self._on_device:
            return UNKNOWN_BATCH  # comparing would wait for the device; the graph compares
        try:
            return self.current.number if self._is_planned(inputs) else FOREIGN_BATCH
        except ValueError:
            return UNKNOWN_BATCH

    @property
    def _on_device(self) -> bool:
        return self.exchanges[0].anchor.device.type != "cpu"

    def _is_unchanged(self, holders: list[Any]) -> bool:
        """The batch handed out last. A GPU is waited for only where something has written into `holders` of its ids."""
        assert self.current is not None
        if self._on_device and batch_structure.versions(holders) == self._versions:
            return True
        try:
            return self._is_planned(self.current.batch)
        except ValueError:
            return False

    def _is_planned(self, batch: Any) -> bool:
        """Whether it has the ids that were planned for the batch handed out last, and as many of each key."""
        assert self.current is not None
        features = [f for x in self.exchanges for f in x.features]
        by_feature, counts = batch_structure.feature_ids_and_counts(batch, features)
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
        """The batch handed out last is about to go through the model, on every rank."""
        assert self.current is not None
        open_transports.check()
        for x, plan in zip(self.exchanges, self.current.plans, strict=True):
            _require_same_table(x, plan)
        pairs = list(zip(self._previous, self.current.plans, strict=True))
        # Where the step before this one did not run, nobody has fetched rows for this one.
        skipped = [self.current.number > 0 and (before is None or before.next is not plan) for before, plan in pairs]
        if any(skipped) and not self.current.whole:
            self.apply_pending()
        skipped = [fetch or self.early_rows_outdated for fetch in skipped]
        self.early_rows_outdated, self._other_writes = False, [w.other_writes() for w in self._watched]
        for x, (before, plan), fetch in zip(self.exchanges, pairs, skipped, strict=True):
            x.freescale_plan = plan
            x.anchor.grad = None  # else autograd adds nothing to nothing, which takes the host as long as a launch
            if plan.whole:
                continue
            plan.before = step_plan.no_late_gradients(plan) if before is None else before.late_gradients()
            if fetch:
                _wait(plan.arrived)
                plan.arrived = torch.ops.freescale.all_to_all_rows_launch(
                    x.anchor.detach(), plan.early_rows, *plan.early_counts, plan.early_slots.shape[0], EARLY,
                    x.name, x.group_name
                )  # fmt: skip
        self._updates_before = [table_registry.update_counts[x.name] for x in self.exchanges]

    @dynamo.runs_outside_inference_mode
    def end_forward(self) -> None:
        """The forward pass of the step is over, or has failed. Nothing where no step has begun."""
        if self._updates_before is None or self.current is None:
            return
        for i, (x, plan) in enumerate(zip(self.exchanges, self.current.plans, strict=True)):
            before, x.freescale_plan, plan.before = self._previous[i], None, None
            applied_late = plan.used or table_registry.update_counts[x.name] != self._updates_before[i]
            if applied_late and before is not None and before.late_slot is not None:
                late_gradients.refuse_backward(before, "the forward pass of a later batch")
            if plan.used:
                self._previous[i], self._backwards_before[i] = plan, table_registry.backward_update_counts[x.name]
                if not plan.whole:
                    late_gradients.collect(x, plan)
                if plan.next is not None and plan.next.arrived.is_inference():  # a training step could not use it
                    plan.next.arrived = _wait(plan.next.arrived).clone()
        self._updates_before = None

    @property
    def tables_written(self) -> bool:
        """By anything but an update, since the last step began."""
        before = self._other_writes
        return before is not None and before != [w.other_writes() for w in self._watched]

    # -- pending gradients ---------------------------------------------------------------------------------------

    def _pending(self) -> Iterator[tuple[Exchange, StepPlan]]:
        for x, plan in zip(self.exchanges, self._previous, strict=True):
            slot = None if plan is None or plan.last or not plan.backwards else plan.late_slot
            if plan is not None and slot is not None and slot.grad is not None:
                yield x, plan

    def _incomplete(self) -> Iterator[tuple[Exchange, StepPlan]]:
        """Where a backward pass has applied the urgent gradients but never handed over the late ones: it raised in
        between, was asked for the gradients of some tensors alone, or was that of another step."""
        for x, plan, backwards in zip(self.exchanges, self._previous, self._backwards_before, strict=True):
            if plan is not None and not plan.last and plan.late_slot is not None:
                if table_registry.backward_update_counts[x.name] != backwards + plan.backwards:
                    yield x, plan

    @property
    def pending(self) -> int:
        """The step whose gradients are pending, -1 if none are; the same on every rank at the same place."""
        return max((plan.number for _, plan in self._pending()), default=-1)

    @property
    def incomplete(self) -> int:
        """The step whose backward pass is incomplete, -1 if none is; the ranks may differ."""
        return max((plan.number for _, plan in self._incomplete()), default=-1)

    @dynamo.runs_outside_inference_mode
    def apply_pending(self) -> None:
        """Send and apply what is pending. Every rank does so at the same place."""
        open_transports.check()
        for x, plan in self._pending():
            try:
                late_gradients.apply(x, plan)
            except Exception as error:
                self.fail(str(error))
                raise RuntimeError(self.describe_loss()) from error

    def describe_loss(self) -> str:
        """The gradients that will not be applied, in words; empty if it is nothing."""
        tables = []
        for x, plan in dict((*self._pending(), *self._incomplete())).items():
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

    # -- the end -------------------------------------------------------------------------------------------------

    def refuse_further_backwards(self) -> None:
        """Nobody will fetch late gradients any more. (The last step has none.)"""
        for plan in self._previous:
            if plan is not None and not plan.last and plan.late_slot is not None:
                late_gradients.refuse_backward(plan, "its loop has ended")

    def wait_for_unused_rows(self) -> None:
        """Rows that were fetched for a batch that will not come: nothing depends on them, but they must arrive."""
        for plan in self._previous:
            if plan is not None and plan.next is not None:
                _wait(plan.next.arrived)


def _require_same_table(x: Exchange, plan: StepPlan) -> None:
    if (plan.arrived.dtype, plan.arrived.device) != (x.anchor.dtype, x.anchor.device):
        raise RuntimeError(
            f"freescale: {x.name} was {plan.arrived.dtype} on {plan.arrived.device} when its LookaheadLoader's loop "
            f"began and is {x.anchor.dtype} on {x.anchor.device} now; change a model outside the loop"
        )
