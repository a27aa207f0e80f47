"""The part of planning that needs the other ranks: who needs which rows, and which of them collide. On the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import exchange_plan, native_plan


class IdOutsideTable(IndexError):
    """An id that its table does not have; raised on every rank at the same place."""


def request_rows(
    ids: Sequence[torch.Tensor],
    first_row_of_feature: Sequence[int],
    table_sizes: Sequence[int],
    owners: exchange_plan.OwnerMap,
    table: str,
    group: dist.ProcessGroup,
) -> exchange_plan.Requests:
    """Tell each owner which of its rows this rank needs. An invalid id on any rank raises on every rank."""
    own = exchange_plan.own_requests(ids, first_row_of_feature, table_sizes, owners)
    invalid = None
    if isinstance(own, exchange_plan.InvalidId):
        invalid, own = own, exchange_plan.own_requests([i[:0] for i in ids], first_row_of_feature, table_sizes, owners)
    assert isinstance(own, exchange_plan.OwnRequests)
    send_counts = exchange_request_counts(own.recv_counts, invalid, table, group)
    send = send_counts.numpy().tolist()
    rows = torch.empty(sum(send), dtype=torch.int64)
    all_to_all_cpu(rows, own.rows, send, own.recv_counts.numpy().tolist(), group)
    return exchange_plan.Requests(own.needed, own.recv_counts, rows, send_counts, own.inverse)


def split_colliding(
    before: exchange_plan.Requests, after: exchange_plan.Requests, group: dist.ProcessGroup
) -> tuple[exchange_plan.Split, exchange_plan.Split]:
    """Split two consecutive batches by the rows that both need: (gradients of `before`, rows of `after`).

    The owner finds them, since different ranks may need a row in the two batches, and tells each requester in one
    exchange: a byte per row of `after`, then a byte per row of `before`.
    """
    rows_before, rows_after = exchange_plan.intersection_masks(before.rows, after.rows)
    send = (after.send_counts, before.send_counts)
    recv = (after.recv_counts, before.recv_counts)
    flags = _interleave((rows_after, rows_before), send)
    recv_sizes, send_sizes = ((after.numpy() + before.numpy()).tolist() for after, before in (recv, send))
    received = torch.empty(sum(recv_sizes), dtype=torch.uint8)
    all_to_all_cpu(received, flags, recv_sizes, send_sizes, group)
    keys_after, keys_before = _deinterleave(received, recv)
    return (
        exchange_plan.split_requests(before, keys_before, rows_before),
        exchange_plan.split_requests(after, keys_after, rows_after),
    )


def _first_part(counts: tuple[torch.Tensor, torch.Tensor]) -> np.ndarray:
    """Which entries of a message per peer (first part, second part) belong to the first part."""
    world = counts[0].shape[0]
    return np.repeat(np.tile([True, False], world), torch.stack(counts, 1).view(-1).numpy())


def _interleave(parts: tuple[torch.Tensor, torch.Tensor], counts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if native_plan.library() is not None:
        return native_plan.interleave(parts, counts)
    first = _first_part(counts)
    message = np.empty(first.shape[0], dtype=np.uint8)
    message[first], message[~first] = parts
    return torch.from_numpy(message)


def _deinterleave(
    message: torch.Tensor, counts: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    if native_plan.library() is not None:
        return native_plan.deinterleave(message, counts)
    first, flags = _first_part(counts), message.numpy().astype(bool)
    return torch.from_numpy(flags[first]), torch.from_numpy(flags[~first])


def exchange_request_counts(
    recv_counts: torch.Tensor, invalid: tuple[int, int] | None, table: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """How many rows each rank requests from this one. `invalid` (feature, id) on any rank raises on every rank."""
    world = recv_counts.shape[0]
    sent, received = np.empty((world, 3), dtype=np.int64), np.empty((world, 3), dtype=np.int64)
    sent[:, 0] = recv_counts.numpy()
    sent[:, 1:] = invalid if invalid is not None else (-1, 0)
    all_to_all_cpu(torch.from_numpy(received), torch.from_numpy(sent), [1] * world, [1] * world, group)
    rank = int(np.argmax(received[:, 1] >= 0))
    if received[rank, 1] >= 0:
        where = table_registry.get_table(table).describe(int(received[rank, 1]))
        raise IdOutsideTable(f"freescale: rank {rank}: id {int(received[rank, 2])} is outside {where}")
    return torch.from_numpy(received[:, 0].copy())


def all_to_all_cpu(
    out: torch.Tensor, x: torch.Tensor, recv: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> None:
    """All-to-all of small CPU tensors over any group; one without CPU transport sends from its device."""
    devices = distributed.devices_of_group(group)
    if "cpu" in devices:
        distributed.all_to_all(out, x, list(recv), list(send), group)
        return
    out_on_device = torch.empty_like(out, device=devices[0])
    dist.all_to_all_single(out_on_device, x.to(devices[0]), list(recv), list(send), group=group)
    out.copy_(out_on_device)
