"""What every op computes, in the clearest torch that is exact. These definitions decide what is correct.

The two exchange composites are written with the small ops below them: a pass that opens a composite puts the
same calls into the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from freescale import compat
from freescale.kernels import plan, tables
from freescale.kernels.ops import lib

_ops = torch.ops.freescale
_wait = torch.ops._c10d_functional.wait_tensor


def exchange_forward(weight, rows, send_counts, recv_counts, n_recv, group_name):
    launched = _ops.all_to_all_launch(
        weight.index_select(0, rows), send_counts, recv_counts, n_recv, 0, group_name
    )
    return _wait(launched)


def exchange_backward(
    weight, grad, own_rows, own_order, own_ends, send_counts, recv_counts, table, group_name
):
    n_recv = own_order.shape[0]
    launched = _ops.all_to_all_launch(grad, recv_counts, send_counts, n_recv, 0, group_name)
    _ops.update_(weight, _wait(launched), own_rows, own_order, own_ends, table)


def all_to_all_launch(x, send_counts, recv_counts, n_recv, priority, group_name):
    out = x.new_empty((n_recv, *x.shape[1:]))
    group = compat.group_by_name(group_name)
    work = dist.all_to_all_single(
        out, x.contiguous(), recv_counts.tolist(), send_counts.tolist(), group=group, async_op=True
    )
    compat.register_work(out, work)
    return out


def sum_rows(x, order, ends):
    """out[i] = x[order[ends[i-1]]] + ... + x[order[ends[i]-1]], from left to right, in at least float32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    # segment_reduce walks each segment from left to right on every device
    out = torch.segment_reduce(wide.index_select(0, order), "sum", lengths=plan.sizes_of(ends), unsafe=True)
    return out.to(x.dtype)


def update_(weight, grad, rows, order, ends, table):
    tables.find(table).apply_update(weight, rows, sum_rows(grad, order, ends))


def plan_now(ids, firsts, sizes, bounds, shifts, starts, table, group_name):
    device = ids[0].device
    owners = plan.OwnerMap(bounds, shifts, starts)
    ids = [i.cpu().long() for i in ids]
    group = compat.group_by_name(group_name)
    bad = plan.first_outside(ids, sizes)
    if bad is None:
        numbers = torch.cat([i + first for i, first in zip(ids, firsts, strict=True)])
        mine = plan.group(plan.keys_of(numbers, owners))
        recv_counts = plan.counts_per_owner(mine.values, owners)
    else:
        recv_counts = starts.new_zeros(starts.shape[0] - 1)
    send_counts = _exchange_counts(recv_counts, bad, table, group)
    base = torch.repeat_interleave(starts[:-1], recv_counts)
    rows = starts.new_empty(int(send_counts.sum()))
    _all_to_all_cpu(rows, mine.values - base, send_counts.tolist(), recv_counts.tolist(), group)
    own = plan.group(rows)
    on_device = [t.to(device) for t in (plan.inverse_of(mine), mine.order, mine.ends)]
    own_side = [t.to(device) for t in (own.values, own.order, own.ends)]
    return (*on_device, recv_counts, rows.to(device), send_counts, *own_side)


def checked_rows(ids, firsts, sizes, table, group_name):
    group = compat.group_by_name(group_name)
    bad = plan.first_outside(ids, sizes)
    _exchange_counts(torch.zeros(group.size(), dtype=torch.int64), bad, table, group)
    return torch.cat([i.long() + first for i, first in zip(ids, firsts, strict=True)])


def _exchange_counts(
    recv_counts: torch.Tensor, bad: tuple[int, int] | None, table: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows that each rank wants from this one. A bad id on any rank raises here, on every rank."""
    feature, value = bad if bad is not None else (-1, 0)
    world = recv_counts.shape[0]
    said = torch.tensor([[feature, value]]).expand(world, 2)
    asked = torch.cat([recv_counts[:, None], said], 1)
    heard = torch.empty_like(asked)
    _all_to_all_cpu(heard, asked.contiguous(), [1] * world, [1] * world, group)
    for rank, (_, feature, value) in enumerate(heard.tolist()):
        if feature >= 0:
            where = tables.find(table).describe(feature)
            raise IndexError(f"freescale: rank {rank}: id {value} is outside {where}")
    return heard[:, 0].contiguous()


def _all_to_all_cpu(
    out: torch.Tensor, x: torch.Tensor, recv: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> None:
    """All-to-all of small CPU tensors over any group; one without CPU transport sends from its device."""
    devices = compat.devices_of_group(group)
    if "cpu" in devices:
        dist.all_to_all_single(out, x, list(recv), list(send), group=group)
        return
    there = torch.empty_like(out, device=devices[0])
    dist.all_to_all_single(there, x.to(devices[0]), list(recv), list(send), group=group)
    out.copy_(there)


for _fn in (
    exchange_forward,
    exchange_backward,
    all_to_all_launch,
    sum_rows,
    update_,
    plan_now,
    checked_rows,
):
    # disable: where a user's graph breaks, Dynamo must not try to compile the inside of an op
    lib.impl(_fn.__name__, torch.compiler.disable(_fn), "CompositeExplicitAutograd")
