"""An exchange as seen by the model's forward: ids in, embeddings out; backward applies gradients to the table.

Dynamo traces all of `lookup`: tensors and ops only, no data-dependent Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import freescale.kernels  # noqa: F401  (registers the ops)
from freescale.compat import dynamo
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import EARLY, LATE, URGENT
from freescale.kernels.planning.owners import Shard, first_row_of_each_table, owner_map
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.uncompiled_call import warn_of_uncompiled_call

_ops = torch.ops.freescale
_wait = torch.ops._c10d_functional.wait_tensor


class KeyedLengths(NamedTuple):
    """What the lookup ops check about the KeyedJaggedTensor whose ids are looked up, on the device."""

    lengths: torch.Tensor | None = None  # [keys, samples], if the counts are planned,
    planned_counts: torch.Tensor | None = None  # and the planned number of values per key
    fault: torch.Tensor | None = None  # if not planned: keyed_lengths.Fault encoded as numbers, on the host


NO_LENGTHS = KeyedLengths()


class Exchange:
    """The rows of one group of tables on one process group.

    `entries`: the (feature, table) pairs to look up. `table`: storage and optimizer of the rows that this rank owns.
    """

    def __init__(
        self,
        name: str,
        table: table_registry.ShardedTable,
        shards: list[Shard],
        table_rows: list[int],
        entries: list[tuple[str, int]],
        group: dist.ProcessGroup,
    ) -> None:
        self.name = table_registry.register(table, name)
        self.table = table  # keeps the registered name alive
        self.group_name = group.group_name
        # For non-blocking traffic. A LookaheadLoader gives it its own group so that it does not delay urgent traffic.
        self.background_group_name = group.group_name
        # For host-side messages of a step. A LookaheadLoader gives it a group that does not use the device.
        self.host_group_name = group.group_name
        self.features = [feature for feature, _ in entries]
        self.sequences: list[str] = []  # features of a KeyedJaggedTensor whose rows the model gets as sequences
        table_offsets = first_row_of_each_table(table_rows)
        self.row_offsets = [table_offsets[t] for _, t in entries]
        self.table_sizes = [table_rows[t] for _, t in entries]
        tables = {t: table.describe(feature) for feature, (_, t) in enumerate(entries)}
        owners = owner_map(shards, table_rows, group.size(), tables)
        self.bounds, self.shifts, self.starts = (dynamo.mark_static(t) for t in owners)
        self.update_anchor()
        # The plan of the last batch that a LookaheadLoader yielded; None without a loader. compat recognizes the plan's
        # tensors, whose sizes we control, by this attribute name.
        self.freescale_plan: StepPlan | None = None
        # True while a LookaheadLoader's loop runs but no step does. A lookup then calls this first.
        self.outside_step = False
        self.before_lookup_outside_step: Callable[[], None] = _nothing
        self.before_read: Callable[[], None] = _nothing  # called before the whole table is read

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy, which belongs to no loop."""
        alone = {"freescale_plan": None, "outside_step": False}
        groups = dict.fromkeys(("background_group_name", "host_group_name"), self.group_name)
        return {**self.__dict__, **alone, **groups, "before_lookup_outside_step": _nothing, "before_read": _nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A new name: with the old one, ops would find the original table. Ranks may make different copies.
        self.name = table_registry.register(self.table, f"{self.name} copy")

    def update_anchor(self) -> None:
        """Match the table's dtype and device, which `model.double()` etc. change."""
        weight = self.table.weight
        # The token through the graph. It requires grad so that autograd calls the exchange's backward.
        dtype = getattr(self.table, "row_dtype", weight.dtype)
        self.anchor = dynamo.mark_static(weight.new_empty((0, weight.shape[1]), dtype=dtype).requires_grad_())

    def lookup(
        self, ids: list[torch.Tensor], divide_by: int, sizes: list[int] | None = None, of_kjt: KeyedLengths = NO_LENGTHS
    ) -> tuple[torch.Tensor, ...]:
        """The rows of each entry's ids, in the order of `entries`. Gradients are divided by `divide_by`.

        `sizes`: number of ids per entry; with it, planned ids may be one concatenated tensor."""
        embedded = self._look_up(ids, divide_by, None, None, of_kjt)
        return torch.split(embedded, [i.shape[0] for i in ids] if sizes is None else sizes)

    def lookup_pooled(
        self, ids: list[torch.Tensor], divide_by: int, bag_ends: torch.Tensor, weights: torch.Tensor | None,
        of_kjt: KeyedLengths,
    ) -> torch.Tensor:  # fmt: skip
        """[bags, dim]: weighted sums of the rows of consecutive ids. Bag i ends before id `bag_ends[i]`.

        Duplicate rows are sent once and summed here, in order."""
        return self._look_up(ids, divide_by, bag_ends, weights, of_kjt)

    def _look_up(
        self, ids: list[torch.Tensor], divide_by: int, bag_ends: torch.Tensor | None, weights: torch.Tensor | None,
        of_kjt: KeyedLengths,
    ) -> torch.Tensor:  # fmt: skip
        if not torch.compiler.is_compiling():
            warn_of_uncompiled_call()
        elif self.outside_step:
            _call_before_lookup(self)  # outside torch.compile, a hook of the table's module calls it
        if self.freescale_plan is None:
            plan = _ops.plan_now(
                ids, self.row_offsets, self.table_sizes, self.bounds, self.shifts, self.starts,
                self.name, self.group_name, *(() if of_kjt.fault is None else (of_kjt.fault,))
            )  # fmt: skip
            return RowsOfOneStep.apply(
                self.anchor, None, *plan, bag_ends, weights, divide_by, self.name, self.group_name
            )
        return self._look_up_planned(self.freescale_plan, ids, divide_by, bag_ends, weights, of_kjt)

    def _look_up_planned(
        self, p: StepPlan, ids: list[torch.Tensor], divide_by: int, bag_ends: torch.Tensor | None,
        weights: torch.Tensor | None, of_kjt: KeyedLengths,
    ) -> torch.Tensor:  # fmt: skip
        if p.used:
            _refuse_second_lookup(self.name)
        p.used = True
        assert p.urgent_gradients is not None
        of_lengths = () if of_kjt.lengths is None and of_kjt.fault is None else of_kjt
        token = _ops.expect_ids(self.anchor.detach(), ids, p.ids, p.step, self.name, *of_lengths)
        if p.whole:
            urgent, own = p.urgent, p.urgent_gradients
            return RowsOfOneStep.apply(
                self.anchor, token, p.inverse, p.order, p.ends, urgent.recv_counts, urgent.rows, urgent.send_counts,
                own.rows, own.order, own.ends, bag_ends, weights, divide_by, self.name, self.group_name
            )  # fmt: skip
        embedded = PlannedRows.apply(
            self.anchor, p.late_slot, token, _wait(p.arrived), p.inverse, p.order, p.ends, *p.urgent,
            *p.urgent_gradients, p.late_index, bag_ends, weights, divide_by, self.name, self.group_name
        )  # fmt: skip
        # The previous step's gradients that this batch does not need, then rows for the next batch. Neither touches the
        # rows above, so both can be scheduled freely.
        late, following = p.before, p.next
        assert late is not None and following is not None
        names = (self.name, self.background_group_name)
        updated = _ops.exchange_backward(
            token, late.grad, *late.update, *late.counts, late.update.order.shape[0], LATE, *names
        )
        following.arrived = _ops.all_to_all_rows_launch(
            updated, following.early_rows, *following.early_counts, following.early_slots.shape[0], EARLY, *names
        )
        return embedded


def _nothing() -> None:
    pass


@dynamo.leave_graph(
    "freescale: a compiled function or module that is not managed by the LookaheadLoader looks up a table during its "
    "loop. Pending gradients must be applied before that, outside the graph: pass the LookaheadLoader the module whose "
    "call is compiled, or exit the loop first"
)
def _call_before_lookup(exchange: Exchange) -> None:
    exchange.before_lookup_outside_step()


@dynamo.assume_constant_result
def _refuse_second_lookup(name: str) -> None:
    # Dynamo runs this while tracing. An error raised in traced code would cause a graph break: TorchRec's own forward
    # would run the step, and a rank without samples would fail in it while the other ranks wait.
    raise RuntimeError(
        f"freescale: {name} is looked up twice in a step, which cannot be planned ahead: look up all ids in one call, "
        "or train without a LookaheadLoader"
    )


class RowsOfOneStep(torch.autograd.Function):
    """An exchange independent of the previous and next steps: all rows now, all gradients now."""

    @staticmethod
    def forward(ctx: Any, anchor, token, inverse, order, ends, recv_counts, rows, send_counts, *rest):  # type: ignore
        own_rows, own_order, own_ends, bag_ends, weights, ctx.divide_by, ctx.table, ctx.group_name = rest
        token = anchor.detach() if token is None else token
        ctx.save_for_backward(
            token, order, ends, recv_counts, send_counts, own_rows, own_order, own_ends, bag_ends, weights
        )
        unique = _ops.exchange_forward(
            token, rows, send_counts, recv_counts, ends.shape[0], URGENT, ctx.table, ctx.group_name
        )
        return _positions_or_bags(unique, inverse, bag_ends, weights)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        token, order, ends, recv_counts, send_counts, *own, bag_ends, weights = ctx.saved_tensors
        own_rows, own_order, own_ends = own
        unique = _unique_gradients(grad, order, ends, bag_ends, weights, ctx.divide_by)
        done = _ops.exchange_backward(
            token, unique, own_rows, own_order, own_ends,
            recv_counts, send_counts, own_order.shape[0], URGENT, ctx.table, ctx.group_name
        )  # fmt: skip
        return done, *(None,) * 15


class PlannedRows(torch.autograd.Function):
    """The blocking part of a planned exchange. Late gradients are returned as the gradient of `late_slot`."""

    @staticmethod
    def forward(ctx: Any, anchor, late_slot, token, early, inverse, order, ends, *rest):  # type: ignore[override]
        urgent_rows, urgent_send, urgent_recv = rest[:3]
        back_index, own_rows, own_order, own_ends, back_send, back_recv, late_index = rest[3:10]
        bag_ends, weights, ctx.divide_by, ctx.table, ctx.group_name = rest[10:]
        ctx.save_for_backward(
            token, order, ends, back_index, own_rows, own_order, own_ends, back_send, back_recv, late_index,
            bag_ends, weights
        )  # fmt: skip
        n_urgent = ends.shape[0] - early.shape[0]
        torch._check(n_urgent >= 0)
        urgent = _ops.exchange_forward(
            token, urgent_rows, urgent_send, urgent_recv, n_urgent, URGENT, ctx.table, ctx.group_name
        )
        return _positions_or_bags(torch.cat([early, urgent]), inverse, bag_ends, weights)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        token, order, ends, back_index, *own, send, recv, late_index, bag_ends, weights = ctx.saved_tensors
        own_rows, own_order, own_ends = own
        unique = _unique_gradients(grad, order, ends, bag_ends, weights, ctx.divide_by)
        done = _ops.exchange_backward(
            token, unique.index_select(0, back_index), own_rows, own_order, own_ends,
            send, recv, own_order.shape[0], URGENT, ctx.table, ctx.group_name
        )  # fmt: skip
        return done, unique.index_select(0, late_index), *(None,) * 20


def _positions_or_bags(
    unique: torch.Tensor, inverse: torch.Tensor, bag_ends: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Unique rows gathered to the positions of their ids, or summed by bag without materializing a row per position."""
    if bag_ends is None:
        return unique.index_select(0, inverse)
    if weights is None:
        return _ops.sum_rows(unique, inverse, bag_ends)
    weighted = unique.index_select(0, inverse) * weights[:, None]
    return _ops.sum_rows(weighted, torch.arange(inverse.shape[0], device=inverse.device), bag_ends)


def _unique_gradients(
    grad: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, bag_ends: torch.Tensor | None,
    weights: torch.Tensor | None, divide_by: int,
) -> torch.Tensor:  # fmt: skip
    """Backward of _positions_or_bags. `order`: the positions of each unique row."""
    grad = grad.contiguous()
    if bag_ends is not None and weights is None:
        order = torch.searchsorted(bag_ends, order, right=True)  # positions to bags
    elif bag_ends is not None:
        assert weights is not None
        positions = torch.arange(order.shape[0], device=order.device)
        grad = grad.index_select(0, torch.searchsorted(bag_ends, positions, right=True)) * weights[:, None]
    unique = _ops.sum_rows(grad, order, ends)
    return unique / divide_by if divide_by != 1 else unique


class ReplicatedRows(torch.autograd.Function):
    """Lookup in a replicated table; its gradient is averaged over the ranks, as in DDP."""

    @staticmethod
    def forward(ctx: Any, flat, dim, rows, world, group_name):  # type: ignore[override]
        ctx.save_for_backward(flat, rows)
        ctx.dim, ctx.world, ctx.group_name = dim, world, group_name
        return flat.view(-1, dim).index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        flat, rows = ctx.saved_tensors
        n_rows = flat.shape[0] // ctx.dim
        ordered, order = torch.sort(rows, stable=True)
        ends = torch.searchsorted(ordered, torch.arange(n_rows, device=rows.device), right=True)
        total = _ops.sum_rows(grad.contiguous(), order, ends) / ctx.world
        reduced = torch.ops._c10d_functional.all_reduce(total, "sum", ctx.group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced).view(-1), None, None, None, None
