"""The part of planning that needs the other ranks: who needs which rows, and which of them collide. On the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import exchange_plan


class OutsideTable(IndexError):
    """An id that its table does not have; raised on every rank at the same place."""


def ask(
    ids: Sequence[torch.Tensor],
    firsts: Sequence[int],
    sizes: Sequence[int],
    owners: exchange_plan.OwnerMap,
    table: str,
    group: dist.ProcessGroup,
) -> exchange_plan.Requests:
    """Tell each owner which of its rows this rank needs. A bad id on any rank raises on every rank."""
    bad = exchange_plan.first_outside(ids, sizes)
    mine = exchange_plan.group_by_key(_numbers(ids if bad is None else [i[:0] for i in ids], firsts, owners), owners)
    recv_counts = exchange_plan.counts_per_owner(mine.values, owners)
    send_counts = exchange_counts(recv_counts, bad, table, group)
    base = torch.repeat_interleave(owners.starts[:-1], recv_counts)
    rows = base.new_empty(int(send_counts.sum()))
    all_to_all_cpu(rows, mine.values - base, send_counts.tolist(), recv_counts.tolist(), group)
    return exchange_plan.Requests(mine, recv_counts, rows, send_counts)


def _numbers(ids: Sequence[torch.Tensor], firsts: Sequence[int], owners: exchange_plan.OwnerMap) -> torch.Tensor:
    dtype = torch.int32 if int(owners.starts[-1]) <= exchange_plan.INT32_MAX else torch.int64
    return torch.cat([i.to(dtype) + first for i, first in zip(ids, firsts, strict=True)])


def answer(
    before: exchange_plan.Requests, after: exchange_plan.Requests, group: dist.ProcessGroup
) -> tuple[exchange_plan.Split, exchange_plan.Split]:
    """Split two consecutive batches by the rows that both need: (gradients of `before`, rows of `after`).

    The owner finds them, since different ranks may need a row in the two batches, and tells each requester in one
    exchange: a byte per row of `after`, then a byte per row of `before`.
    """
    held_before, held_after = exchange_plan.shared(before.rows, after.rows)
    send = (after.send_counts, before.send_counts)
    recv = (after.recv_counts, before.recv_counts)
    flags = _interleave((held_after, held_before), send)
    heard = flags.new_empty(int(recv[0].sum() + recv[1].sum()))
    all_to_all_cpu(heard, flags, (recv[0] + recv[1]).tolist(), (send[0] + send[1]).tolist(), group)
    wanted_after, wanted_before = _deinterleave(heard, recv)
    return exchange_plan.split(before, wanted_before, held_before), exchange_plan.split(after, wanted_after, held_after)


def _first_part(counts: tuple[torch.Tensor, torch.Tensor]) -> np.ndarray:
    """Which entries of a message per peer (first part, second part) belong to the first part."""
    world = counts[0].shape[0]
    return np.repeat(np.tile([True, False], world), torch.stack(counts, 1).view(-1).numpy())


def _interleave(parts: tuple[torch.Tensor, torch.Tensor], counts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first = _first_part(counts)
    message = np.empty(first.shape[0], dtype=np.uint8)
    message[first], message[~first] = parts
    return torch.from_numpy(message)


def _deinterleave(
    message: torch.Tensor, counts: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    first, marks = _first_part(counts), message.numpy().astype(bool)
    return torch.from_numpy(marks[first]), torch.from_numpy(marks[~first])


def exchange_counts(
    recv_counts: torch.Tensor, bad: tuple[int, int] | None, table: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows that each rank wants from this one. A bad id on any rank raises here, on every rank."""
    feature, value = bad if bad is not None else (-1, 0)
    world = recv_counts.shape[0]
    said = torch.tensor([[feature, value]]).expand(world, 2)
    asked = torch.cat([recv_counts[:, None], said], 1)
    heard = torch.empty_like(asked)
    all_to_all_cpu(heard, asked.contiguous(), [1] * world, [1] * world, group)
    complaints = (heard[:, 1] >= 0).nonzero()
    if complaints.shape[0]:
        rank = int(complaints[0])
        where = table_registry.find(table).describe(int(heard[rank, 1]))
        raise OutsideTable(f"freescale: rank {rank}: id {int(heard[rank, 2])} is outside {where}")
    return heard[:, 0].contiguous()


def all_to_all_cpu(
    out: torch.Tensor, x: torch.Tensor, recv: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> None:
    """All-to-all of small CPU tensors over any group; one without CPU transport sends from its device."""
    devices = distributed.devices_of_group(group)
    if "cpu" in devices:
        dist.all_to_all_single(out, x, list(recv), list(send), group=group)
        return
    there = torch.empty_like(out, device=devices[0])
    dist.all_to_all_single(there, x.to(devices[0]), list(recv), list(send), group=group)
    out.copy_(there)
