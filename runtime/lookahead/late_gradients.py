"""The late gradients of a step: collected in its backward pass, applied during the next step or before anything else.

They come out of the backward pass as the gradient of the plan's `late_slot`.
"""

from __future__ import annotations

import weakref

import torch

from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import LATE
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange


class LateGradientsHook:
    """On the slot of a step's late gradients: called when a backward pass hands them over.

    Each backward pass of a step is one update, as in TorchRec. So where a second one hands its late gradients over,
    those of the first are applied, by all ranks in this very place, instead of being added to."""

    def __init__(self, exchange: Exchange, plan: StepPlan) -> None:
        self._exchange, self._number = exchange, plan.number
        self._plan = weakref.ref(plan)  # the graph of a loss that the user keeps must not keep plans
        self._backwards_before = table_registry.backward_update_counts[exchange.name]
        self.refused_after = ""  # nobody will fetch them any more, since this

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
            apply(self._exchange, plan)
            table_registry.last_step_settings[name] = settings
        plan.settings = settings
        # A table that the loss does not depend on gets zeros, and no update.
        updates = table_registry.backward_update_counts[name]
        plan.backwards += updates > self._backwards_before + plan.backwards


def collect(exchange: Exchange, plan: StepPlan) -> None:
    """The forward pass of the step is over: its backward passes hand late gradients over."""
    assert plan.late_slot is not None
    plan.late_hook = LateGradientsHook(exchange, plan)
    plan.late_slot.register_hook(plan.late_hook)


def apply(exchange: Exchange, plan: StepPlan) -> None:
    """Send and apply the late gradients of a step, which has them. Every rank does so at the same place."""
    late = plan.late_gradients()
    torch.ops.freescale.exchange_backward(
        exchange.anchor.detach(), late.grad, *late.update, *late.counts, late.update.order.shape[0], LATE,
        exchange.name, exchange.group_name
    )  # fmt: skip
    assert plan.late_slot is not None
    plan.late_slot.grad = None


def refuse_backward(plan: StepPlan, after: str) -> None:
    """A backward pass of a step whose late gradients nobody will fetch any more must not go by in silence."""
    plan.late_hook.refused_after = after
    plan.late_slot = None
