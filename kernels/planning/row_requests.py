"""The part of planning that needs the other ranks: who needs which rows, and which of them collide. On the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import exchange_plan


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
    _, (send_counts,) = exchange_headers(0, [own], owners.starts.shape[0] - 1, [table], group)
    assert isinstance(own, exchange_plan.OwnRequests)
    return send_requests(own, send_counts, group)


def exchange_headers(
    status: int,
    own: Sequence[exchange_plan.OwnRequests | exchange_plan.InvalidId],
    world: int,
    tables: Sequence[str],
    group: dist.ProcessGroup,
    check_status: Callable[[list[int]], None] = lambda statuses: None,
) -> tuple[list[int], list[torch.Tensor]]:
    """One small all-to-all: how it stands on each rank, and for each exchange how many rows each rank requests from
    this one. `check_status` may raise; after that an invalid id on any rank raises on every rank."""
    sent = np.zeros((world, 1 + 3 * len(tables)), dtype=np.int64)
    received = np.empty_like(sent)
    sent[:, 0] = status
    for i, requests in enumerate(own):
        if isinstance(requests, exchange_plan.InvalidId):
            sent[:, 3 * i + 2 : 3 * i + 4] = requests
        else:
            sent[:, 3 * i + 1], sent[:, 3 * i + 2] = requests.recv_counts.numpy(), -1
    all_to_all_cpu(torch.from_numpy(received), torch.from_numpy(sent), [1] * world, [1] * world, group)
    statuses = received[:, 0].tolist()
    check_status(statuses)
    for i, table in enumerate(tables):
        features, values = received[:, 3 * i + 2], received[:, 3 * i + 3]
        rank = int(np.argmax(features >= 0))
        if features[rank] >= 0:
            where = table_registry.get_table(table).describe(int(features[rank]))
            raise IdOutsideTable(f"freescale: rank {rank}: id {int(values[rank])} is outside {where}")
    return statuses, [torch.from_numpy(received[:, 3 * i + 1].copy()) for i in range(len(tables))]


def send_requests(
    own: exchange_plan.OwnRequests, send_counts: torch.Tensor, group: dist.ProcessGroup
) -> exchange_plan.Requests:
    """Tell each owner which rows. `send_counts`: how many each rank requests from this one."""
    send = send_counts.numpy().tolist()
    rows = torch.empty(sum(send), dtype=torch.int64)
    all_to_all_cpu(rows, own.rows, send, own.recv_counts.numpy().tolist(), group)
    return exchange_plan.Requests(own.needed, own.recv_counts, rows, send_counts, own.inverse)


def split_colliding(
    before: exchange_plan.Requests, after: exchange_plan.Requests, group: dist.ProcessGroup
) -> tuple[exchange_plan.GradientsPlan, exchange_plan.RowsPlan]:
    """Split two consecutive batches by the rows that both need: (gradients of `before`, rows of `after`).

    The owner finds them, since different ranks may need a row in the two batches, and tells each requester in one
    exchange.
    """
    collision = exchange_plan.collide(before, after)
    counts = ((after.recv_counts, before.recv_counts), (after.send_counts, before.send_counts))
    recv, send = ((x.numpy() + y.numpy()).tolist() for x, y in counts)
    received = torch.empty(sum(recv), dtype=torch.uint8)
    all_to_all_cpu(received, collision.message, recv, send, group)
    return exchange_plan.split_batches(received, collision, before, after)


def exchange_invalid_id(invalid: tuple[int, int] | None, table: str, group: dist.ProcessGroup) -> None:
    """An invalid id (feature, id) on any rank raises on every rank."""
    nothing = torch.zeros(group.size(), dtype=torch.int64)
    index = torch.empty(0, dtype=torch.int64)
    none = exchange_plan.OwnRequests(exchange_plan.Deduplicated(index, index, index), index, index, nothing)
    own = none if invalid is None else exchange_plan.InvalidId(*invalid)
    exchange_headers(0, [own], group.size(), [table], group)


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
