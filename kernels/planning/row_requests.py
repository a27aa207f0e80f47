"""The part of planning that needs the other ranks: who needs which rows, and which of them collide. On the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import exchange_plan
from freescale.kernels.planning.keyed_lengths import NO_FAULT, Fault

_FIRST = 4  # place in a header of the first exchange's number
_FAULTS = 1 << 32  # more than any number of a feature


class IdOutsideTable(IndexError):
    """An id that its table does not have; raised on every rank at the same place."""


class MalformedKeyedJaggedTensor(ValueError):
    """Raised on every rank at the same place."""


def request_rows(
    ids: Sequence[torch.Tensor],
    first_row_of_feature: Sequence[int],
    table_sizes: Sequence[int],
    owners: exchange_plan.OwnerMap,
    table: str,
    group: dist.ProcessGroup,
    fault: Fault = NO_FAULT,
) -> exchange_plan.Requests:
    """Tell each owner which of its rows this rank needs. An invalid id on any rank raises on every rank, and so does a
    fault of what the ids are from."""
    own = fault if fault.kind else exchange_plan.own_requests(ids, first_row_of_feature, table_sizes, owners)
    headers = exchange_headers(0, [own], 1, owners.starts.shape[0] - 1, group)
    require_valid_ids(headers, [table])
    assert isinstance(own, exchange_plan.OwnRequests)
    return send_requests(own, headers.send_counts[0], group)


class Headers(NamedTuple):
    """What all ranks have told this one about a batch."""

    statuses: list[int]  # of each rank: a number of the caller's
    send_counts: list[torch.Tensor]  # of each exchange, [world]: how many rows each rank requests from this one
    invalid_ids: list[tuple[int, exchange_plan.InvalidId | Fault] | None]  # of each exchange: rank, and the first there
    apart: bool  # rank 0 wants the batch kept apart from the one before it
    told: np.ndarray  # [ranks, 2]: two numbers of the caller's


def header_width(exchanges: int) -> int:
    """Status; apart or not; two numbers of the caller's; per exchange how many rows, feature and value of an invalid id
    (or -1). In their place, of a Fault what was found, its kind, and what was wanted."""
    return _FIRST + 3 * exchanges


def kept_apart(received: np.ndarray) -> bool:
    return bool(received[0, 1])


def told(received: np.ndarray) -> np.ndarray:
    return received[:, 2:_FIRST].copy()


def exchange_headers(
    status: int,
    own: Sequence[exchange_plan.OwnRequests | exchange_plan.InvalidId | Fault],
    exchanges: int,
    world: int,
    group: dist.ProcessGroup,
    apart: bool = False,
    tell: tuple[int, int] = (-1, 0),
) -> Headers:
    """One small all-to-all. A rank that has nothing to request, since it will not go on, gives no `own`."""
    sent = np.zeros((world, header_width(exchanges)), dtype=np.int64)
    received = np.empty_like(sent)
    sent[:, 0], sent[:, 1], sent[:, 2:_FIRST], sent[:, _FIRST + 1 :: 3] = status, apart, tell, -1
    for i, requests in enumerate(own):
        of_exchange = sent[:, _FIRST + 3 * i : _FIRST + 3 * i + 3]
        if isinstance(requests, exchange_plan.InvalidId):
            of_exchange[:, 1:] = requests
        elif isinstance(requests, Fault):
            of_exchange[:] = requests.found, _FAULTS + requests.kind, requests.wanted
        else:
            of_exchange[:, 0] = requests.recv_counts.numpy()
    all_to_all_cpu(torch.from_numpy(received), torch.from_numpy(sent), [1] * world, [1] * world, group)
    return read_headers(received, exchanges)


def read_headers(received: np.ndarray, exchanges: int) -> Headers:
    """[world, header_width]"""
    invalid: list[tuple[int, exchange_plan.InvalidId | Fault] | None] = []
    of_exchanges = [received[:, _FIRST + 3 * i : _FIRST + 3 * i + 3] for i in range(exchanges)]
    for of_exchange in of_exchanges:
        rank = int(np.argmax(of_exchange[:, 1] >= 0))
        count, feature, value = of_exchange[rank].tolist()
        if feature >= _FAULTS:
            invalid.append((rank, Fault(feature - _FAULTS, count, value)))
        else:
            invalid.append((rank, exchange_plan.InvalidId(feature, value)) if feature >= 0 else None)
    counts = [torch.from_numpy(of_exchange[:, 0].copy()) for of_exchange in of_exchanges]
    return Headers(received[:, 0].tolist(), counts, invalid, kept_apart(received), told(received))


def require_valid_ids(headers: Headers, tables: Sequence[str]) -> None:
    """Raises on every rank alike."""
    for table, invalid in zip(tables, headers.invalid_ids, strict=True):
        if invalid is None:
            continue
        rank, what = invalid
        if isinstance(what, Fault):
            raise MalformedKeyedJaggedTensor(f"freescale: rank {rank}: {table}: {what.describe()}")
        where = table_registry.get_table(table).describe(what.feature)
        raise IdOutsideTable(f"freescale: rank {rank}: id {what.id} is outside {where}")


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


def compare_invalid_ids(
    invalid: tuple[int, int] | None, table: str, group: dist.ProcessGroup, fault: Fault = NO_FAULT
) -> None:
    """An invalid (feature, id) or a fault on any rank raises on every rank; for a lookup that requests nothing."""
    own = [fault] if fault.kind else [] if invalid is None else [exchange_plan.InvalidId(*invalid)]
    require_valid_ids(exchange_headers(0, own, 1, group.size(), group), [table])


def compare_weights(weights: int, ids: int, features: str, group: dist.ProcessGroup) -> None:
    """Another number of weights than of ids on any rank raises on every rank."""
    world = group.size()
    sent = torch.tensor([[weights, ids]] * world)
    received = torch.empty_like(sent)
    all_to_all_cpu(received, sent, [1] * world, [1] * world, group)
    for rank, (n_weights, n_ids) in enumerate(received.tolist()):
        if n_weights != n_ids:
            said = f"{n_weights} weights for {n_ids} ids of the features of {features}"
            raise ValueError(f"freescale: rank {rank}: {said}")


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
