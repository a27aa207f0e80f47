"""An exchange as seen by the model's forward: ids in, embeddings out; backward applies gradients to the table. Dynamo
traces all of `lookup`: tensors and ops only, no data-dependent Python."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import freescale.kernels  # noqa: F401  (registers the ops)
from freescale.compat import dynamo, nn_modules
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import EARLY, LATE, URGENT
from freescale.kernels.planning.owners import Shard, first_row_of_each_table, owner_map
from freescale.runtime.batch_structure import not_flat
from freescale.runtime.tables.step_plan import LateGradients, StepPlan, UrgentGradients, UrgentRows

log = logging.getLogger(__name__)

_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def warn_of_uncompiled_call() -> None:
    """Called by each lookup outside torch.compile. Warns once per model."""
    module = nn_modules.called_past_compile()
    if module is not None and module not in _warned:
        _warned.add(module)
        log.warning(
            "freescale: %s.forward(...) was called, which model.compile does not compile, so it runs eagerly. Call the "
            "model itself: model(batch)",
            type(module).__name__,
        )


_ops = torch.ops.freescale
_wait = torch.ops._c10d_functional.wait_tensor


class KeyedLengths(NamedTuple):
    """What the lookup ops check about the KeyedJaggedTensor whose ids are looked up, on the device."""

    lengths: torch.Tensor | None = None  # [keys, samples], if the counts are planned,
    planned_counts: torch.Tensor | None = None  # and the planned number of values per key
    fault: torch.Tensor | None = None  # if not planned: keyed_lengths.Fault encoded as numbers, on the host


class Bags(NamedTuple):
    """Sums of the rows of consecutive ids. Duplicate rows are sent once and summed by the requester, in order."""

    ends: torch.Tensor | None = None  # bag i ends before id ends[i]; None: rows are not summed
    weights: torch.Tensor | None = None  # per id


NO_LENGTHS, NO_BAGS = KeyedLengths(), Bags()


class Exchange:
    """The rows of one group of tables on one process group. `entries`: the (feature, table) pairs to look up. `table`:
    storage and optimizer of the rows that this rank owns."""

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
        self.row_packing = self.gradient_packing = ""  # how rows and gradients are sent: compression.py
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
        self, ids: list[torch.Tensor], divide_by: int, of_kjt: KeyedLengths = NO_LENGTHS, bags: Bags = NO_BAGS
    ) -> torch.Tensor:
        """The rows of the ids, which are in the order of `entries`; or with `bags` their sums, [bags, dim]. Gradients
        are divided by `divide_by`. Planned ids may be one concatenated tensor."""
        for feature, of_feature in zip(self.features, ids, strict=False):
            if of_feature.dim() != 1:
                raise not_flat(feature, of_feature)
        if not torch.compiler.is_compiling():
            warn_of_uncompiled_call()
        elif self.outside_step:
            _call_before_lookup(self)  # outside torch.compile, a hook of the table's module calls it
        if self.freescale_plan is None:
            inverse, order, ends, recv, rows, send, own_rows, own_order, own_ends = _ops.plan_now(
                ids, self.row_offsets, self.table_sizes, self.bounds, self.shifts, self.starts,
                self.name, self.group_name, of_kjt.fault
            )  # fmt: skip
            return ExchangedRows.apply(
                self.anchor, None, self.anchor.detach(), None, Positions(inverse, order, ends, *bags),
                UrgentRows(rows, send, recv), UrgentGradients(None, own_rows, own_order, own_ends, recv, send), None,
                divide_by, self._names()
            )  # fmt: skip
        return self._look_up_planned(self.freescale_plan, ids, divide_by, of_kjt, bags)

    def _look_up_planned(
        self, p: StepPlan, ids: list[torch.Tensor], divide_by: int, of_kjt: KeyedLengths, bags: Bags
    ) -> torch.Tensor:
        if p.used:
            _refuse_second_lookup(self.name)
        p.used = True
        token = _ops.expect_ids(self.anchor.detach(), ids, p.ids, p.step, self.name, *of_kjt)
        embedded = ExchangedRows.apply(
            self.anchor, p.late_slot, token, None if p.whole else _wait(p.arrived),
            Positions(p.inverse, p.order, p.ends, *bags), p.urgent, p.urgent_gradients, p.late_index,
            divide_by, self._names()
        )  # fmt: skip
        if p.whole:
            return embedded
        # The previous step's gradients that this batch does not need, then rows for the next batch. Neither touches the
        # rows above, so both can be scheduled freely.
        assert p.before is not None and p.next is not None
        updated = self.apply_late_gradients(token, p.before, self.background_group_name)
        self.launch_early_rows(updated, p.next, self.background_group_name)
        return embedded

    def apply_late_gradients(self, token: torch.Tensor, late: LateGradients, group_name: str) -> torch.Tensor:
        """Send them and update the table. Collective."""
        return _ops.exchange_backward(
            token, late.grad, *late.update, *late.counts, late.update.order.shape[0], LATE, self.name, group_name,
            self.gradient_packing
        )  # fmt: skip

    def launch_early_rows(self, token: torch.Tensor, plan: StepPlan, group_name: str) -> None:
        """Start the transfer of the early rows of `plan`. Collective."""
        plan.arrived = _ops.all_to_all_rows_launch(
            token, plan.early_rows, *plan.early_counts, plan.early_slots.shape[0], EARLY, self.name, group_name,
            packing=self.row_packing
        )  # fmt: skip

    def _names(self) -> Names:
        return Names(self.name, self.group_name, self.row_packing, self.gradient_packing)


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


class Positions(NamedTuple):
    """Where unique rows go: to the positions of their ids, or summed into bags."""

    inverse: Any  # position -> unique row; None in the backward pass
    order: torch.Tensor  # the positions of each unique row,
    ends: torch.Tensor  # up to here
    bag_ends: torch.Tensor | None
    weights: torch.Tensor | None


class Names(NamedTuple):
    table: str
    group_name: str
    row_packing: str
    gradient_packing: str


class ExchangedRows(torch.autograd.Function):
    """The blocking part of an exchange. `early`: rows that arrived during the previous step. Late gradients become the
    gradient of `late_slot`. These and `late_index` are None if all rows and gradients are urgent."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, anchor, late_slot, token, early, positions, urgent, own, late_index, divide_by, names
    ):
        ctx.save_for_backward(token, *positions[1:], *own, late_index)
        ctx.divide_by, ctx.names = divide_by, names
        n_urgent = positions.ends.shape[0]
        if early is not None:
            n_urgent -= early.shape[0]
            torch._check(n_urgent >= 0)
        rows = _ops.exchange_forward(
            token, *urgent, n_urgent, URGENT, names.table, names.group_name, names.row_packing
        )
        return _positions_or_bags(rows if early is None else torch.cat([early, rows]), positions)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        token, order, ends, bag_ends, weights, *own, late_index = ctx.saved_tensors
        unique = _unique_gradients(grad, Positions(None, order, ends, bag_ends, weights), ctx.divide_by)
        keys, *update, send_counts, recv_counts = own
        done = _ops.exchange_backward(
            token, unique if keys is None else unique.index_select(0, keys), *update,
            send_counts, recv_counts, update[1].shape[0], URGENT, ctx.names.table, ctx.names.group_name,
            ctx.names.gradient_packing
        )  # fmt: skip
        return done, None if late_index is None else unique.index_select(0, late_index), *(None,) * 8


def _positions_or_bags(unique: torch.Tensor, p: Positions) -> torch.Tensor:
    """Unique rows gathered to the positions of their ids, or summed by bag without materializing a row per position."""
    if p.bag_ends is None:
        return unique.index_select(0, p.inverse)
    if p.weights is None:
        return _ops.sum_rows(unique, p.inverse, p.bag_ends)
    weighted = unique.index_select(0, p.inverse) * p.weights[:, None]
    return _ops.sum_rows(weighted, torch.arange(p.inverse.shape[0], device=p.inverse.device), p.bag_ends)


def _unique_gradients(grad: torch.Tensor, p: Positions, divide_by: int) -> torch.Tensor:
    grad, order = grad.contiguous(), p.order
    if p.bag_ends is not None and p.weights is None:
        order = torch.searchsorted(p.bag_ends, order, right=True)  # positions to bags
    elif p.bag_ends is not None:
        assert p.weights is not None
        positions = torch.arange(order.shape[0], device=order.device)
        grad = grad.index_select(0, torch.searchsorted(p.bag_ends, positions, right=True)) * p.weights[:, None]
    unique = _ops.sum_rows(grad, order, p.ends)
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
