"""The plan of one step of one exchange as tensors on the model's device, read inside the graph by Exchange.lookup, and
the only state between two steps: `arrived` (rows in flight) and `before.grad` (unsent gradients of the step before)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from freescale.compat import dynamo
from freescale.kernels.planning.native_plan import ExchangeCounts


class Counts(NamedTuple):
    send: torch.Tensor
    recv: torch.Tensor


@dataclass(eq=False)
class ValueCounts:
    """Number of values per key of the batch's KeyedJaggedTensors, on the host and on the device.

    slots: tensors whose sizes are cumulative over keys. In a graph, the total of consecutive keys is then a difference
        of two sizes rather than a sum of one size per key.
    free_slots: the same sizes, unbacked in a graph (compat/dynamo_settings.py).
    few: a sequence has zero values or one. torch.compile specializes on sizes 0 and 1, so N features could cause up to
        3^N graphs unless sizes are unbacked.
    """

    keys: tuple[str, ...]
    slots: tuple[torch.Tensor, ...]  # only the sizes matter
    free_slots: tuple[torch.Tensor, ...]
    on_device: torch.Tensor | None  # [keys]; None without keys
    few: bool

    def of_keys(self, keys: Sequence[str]) -> torch.Tensor:
        assert self.on_device is not None
        places = [self.keys.index(key) for key in keys]
        if places == list(range(places[0], places[0] + len(places))):
            return self.on_device[places[0] : places[0] + len(places)]
        return torch.stack([self.on_device[place] for place in places])


def count_values(by_key: dict[str, int], on_device: torch.Tensor | None, sequences: Iterable[str] = ()) -> ValueCounts:
    """`sequences`: keys whose rows the model gets as sequences."""
    ends = itertools.accumulate(by_key.values())
    slots = [torch.empty_strided((n,), (0,), dtype=torch.uint8) for n in ends]
    on_device = None if on_device is None else dynamo.mark_static(on_device)
    few = any(by_key.get(key, 2) < 2 for key in sequences)
    return ValueCounts(tuple(by_key), tuple(slots), tuple(slot.detach() for slot in slots), on_device, few)


class UrgentRows(NamedTuple):
    rows: torch.Tensor  # on the owner, by requester
    send_counts: torch.Tensor  # to requesters
    recv_counts: torch.Tensor  # from owners


class OwnerUpdate(NamedTuple):
    """The owner's unique rows, and the positions of each row's gradients among the received ones."""

    rows: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor


class UrgentGradients(NamedTuple):
    keys: torch.Tensor | None  # unique on the requester; None: all of them
    rows: torch.Tensor  # these three as in OwnerUpdate
    order: torch.Tensor
    ends: torch.Tensor
    send_counts: torch.Tensor  # to owners
    recv_counts: torch.Tensor  # from requesters


@dataclass
class LateGradients:
    grad: torch.Tensor  # [n, dim]
    update: OwnerUpdate
    counts: Counts  # to owners, from requesters

    def __post_init__(self) -> None:
        dynamo.mark_static(self.grad, 1)


@dataclass
class StepPlan:
    """The plan of one batch for one exchange: urgent and early rows; urgent and late gradients."""

    number: int  # batch number
    step: torch.Tensor  # [] the same as a tensor, for error messages of ops
    ids: torch.Tensor  # planned ids
    value_counts: ValueCounts  # of the batch
    inverse: torch.Tensor  # position -> index into (early rows, urgent rows)
    order: torch.Tensor  # the requester's positions, sorted by key
    ends: torch.Tensor
    urgent: UrgentRows
    early_rows: torch.Tensor
    early_counts: Counts  # to requesters, from owners
    early_slots: torch.Tensor  # [early rows]; only its length matters
    arrived: torch.Tensor  # [early rows, dim]; launched by the previous step, not waited for
    # Set after the next batch is planned:
    urgent_gradients: UrgentGradients | None = None
    late_index: torch.Tensor | None = None  # into the requester's unique keys
    late_slot: torch.Tensor | None = None  # the late gradients are the gradient of this slot
    late_hook: Any = None  # called with that gradient: late_gradients.py
    late_update: OwnerUpdate | None = None
    late_counts: Counts | None = None
    backwards: int = 0  # number of backward passes that produced late gradients
    settings: Any = None  # table settings at the backward pass whose late gradients are pending
    before: LateGradients | None = None
    next: StepPlan | None = None
    last: bool = False  # last step of the loop, on every rank: no late gradients
    whole: bool = False  # self-contained plan: no early rows, no late gradients
    used: bool = False
    stats: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for counts in (self.urgent.send_counts, self.urgent.recv_counts, *self.early_counts):
            dynamo.mark_static(counts)

    def late_gradients(self) -> LateGradients:
        """What this step defers to the next one; empty if it had no backward pass."""
        # Without an update of its own, the step's loss does not depend on the table and the gradient is zeros.
        grad = self.late_slot.grad if self.late_slot is not None and self.backwards else None
        if grad is None:
            return no_late_gradients(self)
        if grad.shape[0] == 0:  # autograd gave it the slot's strides
            grad = grad.new_empty(0, grad.shape[1])
        assert self.late_update is not None and self.late_counts is not None
        return LateGradients(grad.contiguous(), self.late_update, self.late_counts)


def no_late_gradients(p: StepPlan) -> LateGradients:
    """Late gradients of a step without a backward pass. `p`: any step of the exchange."""
    index = p.arrived.new_empty(0, dtype=torch.int64)
    zeros = Counts(*(dynamo.mark_static(torch.zeros_like(p.urgent.send_counts)) for _ in range(2)))
    update = OwnerUpdate(index, index.clone(), index.clone())
    return LateGradients(p.arrived.new_empty(0, p.arrived.shape[1]), update, zeros)


_NO_SLOTS = torch.empty(0, dtype=torch.uint8)


def plan_rows(
    number: int, arrays: Sequence[torch.Tensor], value_counts: ValueCounts, counts: ExchangeCounts, urgent_entries: int,
    anchor: torch.Tensor, whole: bool = False,
) -> StepPlan:  # fmt: skip
    """The forward half. `arrays`: as native_plan.ROWS_ARRAYS. `anchor`: of the table's dtype and device."""
    ids, inverse, order, ends, early_rows, urgent_rows = arrays
    n_urgent = sum(counts.urgent_recv.tolist())
    n_early = ends.shape[0] - n_urgent  # not from other_recv, which is zero if no rank sends early rows
    row_bytes = anchor.shape[1] * anchor.element_size()
    return StepPlan(
        number=number,
        step=torch.tensor(number, device="cpu"),
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
        whole=whole,
        stats={
            "values": ids.shape[0],
            "unique_rows": ends.shape[0],
            "colliding_rows": n_urgent,
            "bytes_urgent": n_urgent * row_bytes,
            "bytes_early": n_early * row_bytes,
            # urgent bytes of a split by looked-up values, without deduplication
            "bytes_urgent_per_value": urgent_entries * row_bytes,
        },
    )


def plan_gradients(p: StepPlan, arrays: Sequence[torch.Tensor], counts: ExchangeCounts) -> None:
    """The backward half. `arrays`: as native_plan.GRADIENT_ARRAYS; for a self-contained plan, the first of them."""
    keys, rows, order, ends, *late = arrays
    for c in counts:
        dynamo.mark_static(c)
    dim = p.arrived.shape[1]
    row_bytes = dim * p.arrived.element_size()
    # Gradients go back to the owners of the rows, so send and receive counts swap.
    all_keys = None if p.whole else keys
    p.urgent_gradients = UrgentGradients(all_keys, rows, order, ends, counts.urgent_recv, counts.urgent_send)
    p.stats["bytes_back_urgent"], p.stats["bytes_late"] = keys.shape[0] * row_bytes, 0
    if p.whole:
        p.last = True
        return
    p.late_index, p.late_update = late[0], OwnerUpdate(*late[1:])
    p.late_counts = Counts(counts.other_recv, counts.other_send)
    n = p.late_index.shape[0]
    # A shape-only tensor (all strides 0). Only its gradient is used.
    like = p.arrived
    p.late_slot = torch.empty_strided((n, dim), (0, 0), dtype=like.dtype, device=like.device).requires_grad_()
    p.stats["bytes_late"] = n * row_bytes


ARRAYS_OF_ALL_GRADIENTS = 4  # the first of native_plan.GRADIENT_ARRAYS


def plan_without_rows(p: StepPlan) -> StepPlan:
    """The empty plan that the last step uses as its next one."""
    index = p.ids.new_empty(0)
    counts = ExchangeCounts(*(torch.zeros_like(p.urgent.send_counts) for _ in ExchangeCounts._fields))
    return plan_rows(p.number + 1, [index] * 4 + [index.clone(), index], p.value_counts, counts, 0, p.arrived)
