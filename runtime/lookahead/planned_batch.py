"""A batch and its plans, on their way from the planning thread to the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from freescale.runtime.batch_structure import BatchEvent
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.plan_block import PlanBlock
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange


@dataclass
class PlannedBatch:
    """The planning thread does not touch it any more, nor `next`, once it has given it away."""

    number: int
    batch: Any
    rows: PlanBlock  # also holds tensors of the batch
    value_counts: dict[str, int]  # of the keys of its KeyedJaggedTensors
    count_tensor: torch.Tensor | None  # the same; None without keys
    loader_state: Any = None  # of a loader that has one, when it had given this batch and not the next; or its error
    moved: BatchEvent | None = None  # what the planning thread has brought to the device
    loaded: tuple[float, float] = (0.0, 0.0)  # when the user's loader was at work on it, by time.perf_counter()
    whole: bool = False  # its plans are whole: no other batch has to do with them
    # When it is known which batch follows:
    next: PlannedBatch | None = None  # None: the last
    gradients: PlanBlock | None = None
    # On the device, one per exchange; empty until the rows are planned there.
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return any(plan.used for plan in self.plans)

    def complete(self, exchanges: list[Exchange]) -> None:
        """Make its plans, and those of the rows of the next batch. In the training thread, when it is handed out."""
        if self.gradients is None:
            return  # it was done before
        self._plan_rows(exchanges)
        if self.next is not None:
            self.next._plan_rows(exchanges)
        self.gradients.upload()
        for i, (plan, planned) in enumerate(zip(self.plans, self.gradients.exchanges, strict=True)):
            if self.whole:
                arrays = self.gradients.arrays(planned.gradients.first(step_plan.ARRAYS_OF_ALL_GRADIENTS))
                step_plan.plan_all_gradients(plan, arrays, planned.gradient_counts)
                continue
            step_plan.plan_gradients(plan, self.gradients.arrays(planned.gradients), planned.gradient_counts)
            plan.last = self.next is None
            plan.next = step_plan.plan_without_rows(plan) if self.next is None else self.next.plans[i]
        # What follows is the loop's affair; without this, every batch would keep all later ones.
        self.next = self.gradients = None

    def _plan_rows(self, exchanges: list[Exchange]) -> None:
        if self.plans:
            return
        if self.moved is not None:
            self.moved.wait()
        self.rows.upload()
        self.batch, counts = self.rows.unpack((self.batch, self.count_tensor))
        sequences = {f for x in exchanges for f in x.sequences}
        values = step_plan.count_values(self.value_counts, counts, sequences)
        for x, planned in zip(exchanges, self.rows.exchanges, strict=True):
            arrays = self.rows.arrays(planned.rows)
            counts, entries = planned.row_counts, planned.urgent_entries
            self.plans.append(step_plan.plan_rows(self.number, arrays, values, counts, entries, x.anchor, self.whole))
