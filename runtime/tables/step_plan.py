"""The plan of one step of one exchange, as tensors on the model's device, and what it hands from step to step.

Made by the LookaheadLoader; read, inside the graph, by Exchange.lookup. The state that lives between two steps is
here and nowhere else: `arrived` (rows under way for the step) and `before.grad` (gradients of the step before, still to
be sent).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from freescale.compat import dynamo
from freescale.kernels.planning.batch_plan import ExchangeCounts


class Counts(NamedTuple):
    """Rows to and from each rank, [world] each."""

    send: torch.Tensor
    recv: torch.Tensor


@dataclass(eq=False)
class ValueCounts:
    """How many values the keys of the batch's KeyedJaggedTensors have, on the host and on the device.

    The sizes of `slots` are those of a key and all before it together. So in a graph, what keys in a row have together
    is a difference of two sizes, not a sum of as many as there are keys. `free_slots`: the same sizes, unbacked in a
    graph (compat/dynamo_settings.py). `few`: a sequence has no value or one. Torch compiles a graph for each of these
    sizes, so with N features for up to 3^N combinations, unless they are unbacked.
    """

    keys: tuple[str, ...]
    slots: tuple[torch.Tensor, ...]  # nothing but their sizes matters
    free_slots: tuple[torch.Tensor, ...]
    on_device: torch.Tensor | None  # [keys]; None without keys
    few: bool

    def of_keys(self, keys: Sequence[str]) -> torch.Tensor:
        """On the device."""
        assert self.on_device is not None
        places = [self.keys.index(key) for key in keys]
        if places == list(range(places[0], places[0] + len(places))):
            return self.on_device[places[0] : places[0] + len(places)]
        return torch.stack([self.on_device[place] for place in places])


def count_values(by_key: dict[str, int], on_device: torch.Tensor | None, sequences: Iterable[str] = ()) -> ValueCounts:
    """`sequences`: keys whose rows a model gets as a sequence."""
    ends = itertools.accumulate(by_key.values())
    slots = [torch.empty_strided((n,), (0,), dtype=torch.uint8) for n in ends]
    on_device = None if on_device is None else dynamo.mark_static(on_device)
    few = any(by_key.get(key, 2) < 2 for key in sequences)
    return ValueCounts(tuple(by_key), tuple(slots), tuple(slot.detach() for slot in slots), on_device, few)


class UrgentRows(NamedTuple):
    rows: torch.Tensor  # the owner's, by requester
    send_counts: torch.Tensor  # to requesters
    recv_counts: torch.Tensor  # from owners


class OwnerUpdate(NamedTuple):
    """The owner's unique rows, and where the gradients for each of them are among those that arrive."""

    rows: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor


class UrgentGradients(NamedTuple):
    keys: torch.Tensor  # the requester's unique ones
    rows: torch.Tensor  # these three as in OwnerUpdate
    order: torch.Tensor
    ends: torch.Tensor
    send_counts: torch.Tensor  # to owners
    recv_counts: torch.Tensor  # from requesters


@dataclass
class LateGradients:
    """Gradients that a step left for the next one: `grad` on the requester, the rest to apply them on the owner."""

    grad: torch.Tensor  # [n, dim]
    update: OwnerUpdate
    counts: Counts  # to owners, from requesters

    def __post_init__(self) -> None:
        dynamo.mark_static(self.grad, 1)


@dataclass
class StepPlan:
    """One batch of one exchange, in chunks: urgent and early rows; urgent and late gradients."""

    number: int  # of the batch
    step: torch.Tensor  # [] the same, for errors of ops
    ids: torch.Tensor  # the ids that were planned
    value_counts: ValueCounts  # of the batch
    inverse: torch.Tensor  # position -> place in (early rows, urgent rows)
    order: torch.Tensor  # the requester's duplicates, brought together by ascending key
    ends: torch.Tensor
    urgent: UrgentRows
    early_rows: torch.Tensor
    early_counts: Counts  # to requesters, from owners
    early_slots: torch.Tensor  # [rows that arrive early]; only its length matters
    arrived: torch.Tensor  # [same, dim]; launched, not waited for, by the step before
    # Known once the batch after it is known:
    urgent_gradients: UrgentGradients | None = None
    late_index: torch.Tensor | None = None  # requester's unique keys
    late_slot: torch.Tensor | None = None  # its gradient will be the late gradients
    late_hook: Any = None  # called with that gradient: late_gradients.py
    late_update: OwnerUpdate | None = None
    late_counts: Counts | None = None
    backwards: int = 0  # how many backward passes have handed late gradients over
    settings: Any = None  # of the table in the backward pass whose late gradients are pending
    before: LateGradients | None = None
    next: StepPlan | None = None
    last: bool = False  # of the loop, on every rank: no gradients are late
    whole: bool = False  # nothing is early or late: the step is alone
    used: bool = False
    stats: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for counts in (self.urgent.send_counts, self.urgent.recv_counts, *self.early_counts):
            dynamo.mark_static(counts)

    def late_gradients(self) -> LateGradients:
        """What this step leaves for the next one: nothing unless it had a backward pass."""
        # Without an update of the step's own its loss does not depend on the table: then what is there are zeros.
        grad = self.late_slot.grad if self.late_slot is not None and self.backwards else None
        if grad is None:
            return no_late_gradients(self)
        if grad.shape[0] == 0:  # autograd gave it the strides of the slot
            grad = grad.new_empty(0, grad.shape[1])
        assert self.late_update is not None and self.late_counts is not None
        return LateGradients(grad.contiguous(), self.late_update, self.late_counts)


def no_late_gradients(p: StepPlan) -> LateGradients:
    """What a step without a backward pass leaves. `p`: any step of the exchange."""
    index = p.arrived.new_empty(0, dtype=torch.int64)
    zeros = Counts(*(dynamo.mark_static(torch.zeros_like(p.urgent.send_counts)) for _ in range(2)))
    update = OwnerUpdate(index, index.clone(), index.clone())
    return LateGradients(p.arrived.new_empty(0, p.arrived.shape[1]), update, zeros)


_NO_SLOTS = torch.empty(0, dtype=torch.uint8)


def plan_rows(
    number: int, arrays: Sequence[torch.Tensor], value_counts: ValueCounts, counts: ExchangeCounts, urgent_entries: int,
    anchor: torch.Tensor, whole: bool = False,
) -> StepPlan:  # fmt: skip
    """The forward half. `arrays`: as batch_plan.ROWS_ARRAYS, `anchor`: of the table's type and device. `whole`: nothing
    is early, and no graph sees the tensors of what is."""
    ids, inverse, order, ends, early_rows, urgent_rows = arrays
    n_urgent = sum(counts.urgent_recv.tolist())
    n_early = ends.shape[0] - n_urgent  # the other counts may say that nobody sends anything
    row_bytes = anchor.shape[1] * anchor.element_size()
    return StepPlan(
        number=number,
        step=torch.from_numpy(np.array(number)),
        ids=ids,
        value_counts=value_counts,
        inverse=inverse,
        order=order,
        ends=ends,
        urgent=UrgentRows(urgent_rows, counts.urgent_send, counts.urgent_recv),
        early_rows=early_rows,
        early_counts=Counts(counts.other_send, counts.other_recv),
        early_slots=_NO_SLOTS if whole else torch.empty(n_early, dtype=torch.uint8),
        arrived=anchor if whole else anchor.new_empty(0, anchor.shape[1]),
        stats={
            "values": ids.shape[0],
            "unique_rows": ends.shape[0],
            "colliding_rows": n_urgent,
            "bytes_urgent": n_urgent * row_bytes,
            "bytes_early": n_early * row_bytes,
            # what a split of looked-up values, without bringing duplicates together, would leave urgent
            "bytes_urgent_per_value": urgent_entries * row_bytes,
        },
    )


def plan_gradients(p: StepPlan, arrays: Sequence[torch.Tensor], counts: ExchangeCounts) -> None:
    """The backward half. `arrays`: as batch_plan.GRADIENT_ARRAYS."""
    keys, rows, order, ends, late_index, *late_update = arrays
    # Gradients go to owners, where rows come from.
    p.urgent_gradients = UrgentGradients(keys, rows, order, ends, counts.urgent_recv, counts.urgent_send)
    p.late_index, p.late_update = late_index, OwnerUpdate(*late_update)
    p.late_counts = Counts(counts.other_recv, counts.other_send)
    for c in counts:
        dynamo.mark_static(c)
    n, dim = late_index.shape[0], p.arrived.shape[1]
    # A tensor that only has a shape: all its elements are the same one. Its gradient is what is wanted.
    like = p.arrived
    p.late_slot = torch.empty_strided((n, dim), (0, 0), dtype=like.dtype, device=like.device).requires_grad_()
    row_bytes = dim * p.arrived.element_size()
    p.stats["bytes_back_urgent"], p.stats["bytes_late"] = keys.shape[0] * row_bytes, n * row_bytes


ARRAYS_OF_ALL_GRADIENTS = 4  # of batch_plan.GRADIENT_ARRAYS, the first ones


def plan_all_gradients(p: StepPlan, arrays: Sequence[torch.Tensor], counts: ExchangeCounts) -> None:
    """The backward half of a whole plan: no gradients are left for the next step."""
    keys, rows, order, ends = arrays
    p.urgent_gradients = UrgentGradients(keys, rows, order, ends, counts.urgent_recv, counts.urgent_send)
    p.last = p.whole = True
    row_bytes = p.arrived.shape[1] * p.arrived.element_size()
    p.stats["bytes_back_urgent"], p.stats["bytes_late"] = keys.shape[0] * row_bytes, 0


def plan_without_rows(p: StepPlan) -> StepPlan:
    """What the last step fetches for the batch after it: no rows."""
    index = p.ids.new_empty(0)
    zero = torch.zeros_like(p.urgent.send_counts)
    return StepPlan(
        number=p.number + 1,
        step=p.step + 1,
        ids=index,
        value_counts=p.value_counts,
        inverse=index,
        order=index,
        ends=index,
        urgent=UrgentRows(index, zero, zero.clone()),
        early_rows=index.clone(),
        early_counts=Counts(zero.clone(), zero.clone()),
        early_slots=torch.empty(0, dtype=torch.uint8),
        arrived=p.arrived.new_empty(0, p.arrived.shape[1]),
    )
