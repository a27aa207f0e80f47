"""An exchange as the model's forward sees it: ids in, embeddings out, gradients applied in backward.

Everything here is traced by Dynamo: tensors and ops only, no data-dependent Python.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import freescale.kernels  # noqa: F401  (registers the ops)
from freescale import compat
from freescale.kernels import plan, tables

_ops = torch.ops.freescale


class Exchange:
    """The rows of one group of tables on one process group.

    `entries` are the (feature, table) pairs that it serves, `table` the optimizer of the rows of this rank.
    """

    def __init__(
        self,
        name: str,
        table: tables.Table,
        shards: list[plan.Shard],
        table_rows: list[int],
        entries: list[tuple[str, int]],
        group: dist.ProcessGroup,
    ) -> None:
        self.name = tables.register(table, name)
        self.table = table  # keeps the registered name alive
        self.group_name = group.group_name
        self.features = [feature for feature, _ in entries]
        firsts = plan.table_firsts(table_rows)
        self.firsts = [firsts[t] for _, t in entries]
        self.sizes = [table_rows[t] for _, t in entries]
        owners = plan.owner_map(shards, table_rows, group.size())
        self.bounds, self.shifts, self.starts = (compat.mark_static(t) for t in owners)
        self.weight = compat.mark_static(table.weight)
        # An empty tensor that wants a gradient, so that autograd calls the exchange's backward.
        self.anchor = compat.mark_static(self.weight.new_empty(0).requires_grad_())

    def lookup(self, ids: list[torch.Tensor], divide_by: int) -> tuple[torch.Tensor, ...]:
        """The rows of each entry's ids, in the order of `entries`. Gradients are divided by `divide_by`."""
        made = _ops.plan_now(
            ids, self.firsts, self.sizes, self.bounds, self.shifts, self.starts, self.name, self.group_name
        )
        embedded = ExchangeRows.apply(
            self.anchor, self.weight, *made, divide_by, self.name, self.group_name
        )
        return torch.split(embedded, [i.shape[0] for i in ids])


class ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor, weight, *rest):  # type: ignore[override]
        inverse, order, ends, recv_counts, rows, send_counts, own_rows, own_order, own_ends = rest[:9]
        ctx.divide_by, ctx.table, ctx.group_name = rest[9:]
        ctx.save_for_backward(
            weight, order, ends, recv_counts, send_counts, own_rows, own_order, own_ends
        )
        n_recv = ends.shape[0]
        unique = _ops.exchange_forward(weight, rows, send_counts, recv_counts, n_recv, ctx.group_name)
        return unique.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        weight, order, ends, recv_counts, send_counts, own_rows, own_order, own_ends = ctx.saved_tensors
        unique = _ops.sum_rows(grad.contiguous(), order, ends)
        if ctx.divide_by != 1:
            unique = unique / ctx.divide_by
        _ops.exchange_backward(
            weight,
            unique,
            own_rows,
            own_order,
            own_ends,
            send_counts,
            recv_counts,
            ctx.table,
            ctx.group_name,
        )
        return (None,) * 14


class ReplicatedRows(torch.autograd.Function):
    """Lookup in a table that every rank holds whole; its gradient is averaged over the ranks, as by DDP."""

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
