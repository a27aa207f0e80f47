"""The dialect: every op's schema and fake. What an op computes is in reference.py.

Counts (rows per peer) are CPU int64 tensors of length world, so a graph does not grow with the world.
`group_name` names a process group, `table` an entry of freescale.kernels.tables.

    plan_now            ids of this batch -> the plan of its exchange, everything urgent (collective)
    checked_rows        ids of this batch -> rows of tables that every rank holds whole (collective)
    exchange_forward    rows from their owners to the ranks that asked for them
    exchange_backward   their gradients back, summed and applied by the owner
    all_to_all_launch   start of an all-to-all; `_c10d_functional.wait_tensor` waits for it
    sum_rows            sums of rows in a fixed order
    update_             the owner's fused optimizer step on unique rows
"""

from __future__ import annotations

import torch

from freescale import compat

lib = torch.library.Library("freescale", "DEF")

lib.define(
    "plan_now(Tensor[] ids, int[] firsts, int[] sizes, Tensor bounds, Tensor shifts, Tensor starts, "
    "str table, str group_name) -> (Tensor inverse, Tensor order, Tensor ends, Tensor recv_counts, "
    "Tensor rows, Tensor send_counts, Tensor own_rows, Tensor own_order, Tensor own_ends)"
)
lib.define("checked_rows(Tensor[] ids, int[] firsts, int[] sizes, str table, str group_name) -> Tensor")
lib.define(
    "exchange_forward(Tensor weight, Tensor rows, Tensor send_counts, Tensor recv_counts, SymInt n_recv, "
    "str group_name) -> Tensor"
)
lib.define(
    "exchange_backward(Tensor(a!) weight, Tensor grad, Tensor own_rows, Tensor own_order, Tensor own_ends, "
    "Tensor send_counts, Tensor recv_counts, str table, str group_name) -> ()"
)
lib.define(
    "all_to_all_launch(Tensor x, Tensor send_counts, Tensor recv_counts, SymInt n_recv, int priority, "
    "str group_name) -> Tensor"
)
lib.define("sum_rows(Tensor x, Tensor order, Tensor ends) -> Tensor")
lib.define(
    "update_(Tensor(a!) weight, Tensor grad, Tensor rows, Tensor order, Tensor ends, str table) -> ()"
)


def _rows_like(x: torch.Tensor, n: int | torch.SymInt) -> torch.Tensor:
    return x.new_empty((n, *x.shape[1:]))


@torch.library.register_fake("freescale::plan_now", lib=lib)
def _plan_now(ids, firsts, sizes, bounds, shifts, starts, table, group_name):
    ctx = torch.library.get_ctx()
    positions = sum(i.shape[0] for i in ids)
    unique, sent, own = ctx.new_dynamic_size(), ctx.new_dynamic_size(), ctx.new_dynamic_size()
    torch._check(own <= sent)
    index = torch.empty(0, dtype=torch.int64, device=ids[0].device)
    counts = starts.new_empty(starts.shape[0] - 1)
    return (
        index.new_empty(positions),
        index.new_empty(positions),
        index.new_empty(unique),
        counts,
        index.new_empty(sent),
        counts.new_empty(counts.shape),
        index.new_empty(own),
        index.new_empty(sent),
        index.new_empty(own),
    )


@torch.library.register_fake("freescale::checked_rows", lib=lib)
def _checked_rows(ids, firsts, sizes, table, group_name):
    return ids[0].new_empty(sum(i.shape[0] for i in ids), dtype=torch.int64)


@torch.library.register_fake("freescale::exchange_forward", lib=lib)
def _exchange_forward(weight, rows, send_counts, recv_counts, n_recv, group_name):
    return _rows_like(weight, n_recv)


@torch.library.register_fake("freescale::exchange_backward", lib=lib)
def _exchange_backward(
    weight, grad, own_rows, own_order, own_ends, send_counts, recv_counts, table, group_name
):
    return None


@torch.library.register_fake("freescale::all_to_all_launch", lib=lib)
def _all_to_all_launch(x, send_counts, recv_counts, n_recv, priority, group_name):
    return _rows_like(x, n_recv)


@torch.library.register_fake("freescale::sum_rows", lib=lib)
def _sum_rows(x, order, ends):
    return _rows_like(x, ends.shape[0])


@torch.library.register_fake("freescale::update_", lib=lib)
def _update_(weight, grad, rows, order, ends, table):
    return None


compat.register_launch_lowering(torch.ops.freescale.all_to_all_launch)
