"""What ranks tell each other of a batch before they plan it, and the errors that come of it. On the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.ops import table_registry
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.keyed_lengths import NO_FAULT, Fault
from freescale.kernels.planning.owners import InvalidId

_FIRST = 3  # place in a header of the first exchange's number
_INVALID_ID, _NO_LIBRARY = -1, -2  # in place of the kind of a Fault


class IdOutsideTable(IndexError):
    """An id that its table does not have; raised on every rank at the same place."""


class MalformedKeyedJaggedTensor(ValueError):
    """Raised on every rank at the same place."""


class Headers(NamedTuple):
    """What all ranks have told this one about a batch."""

    statuses: list[int]  # of each rank: a number of the caller's
    send_counts: list[torch.Tensor]  # of each exchange, [world]: how many rows each rank requests from this one
    invalid_ids: list[tuple[int, InvalidId] | None]  # of each exchange: rank, and the first there
    told: np.ndarray  # [ranks, 2]: two numbers of the caller's


def header_width(exchanges: int) -> int:
    """Status; two numbers of the caller's; per exchange how many rows, feature and value of an invalid id
    (or -1)."""
    return _FIRST + 3 * exchanges


def told(received: np.ndarray) -> np.ndarray:
    return received[:, 1:_FIRST].copy()


def read_headers(received: np.ndarray, exchanges: int) -> Headers:
    """[world, header_width]"""
    invalid: list[tuple[int, InvalidId] | None] = []
    of_exchanges = [received[:, _FIRST + 3 * i : _FIRST + 3 * i + 3] for i in range(exchanges)]
    for of_exchange in of_exchanges:
        rank = int(np.argmax(of_exchange[:, 1] >= 0))
        _, feature, value = of_exchange[rank].tolist()
        invalid.append((rank, InvalidId(feature, value)) if feature >= 0 else None)
    counts = [torch.from_numpy(of_exchange[:, 0].copy()) for of_exchange in of_exchanges]
    return Headers(received[:, 0].tolist(), counts, invalid, told(received))


def tell_missing_library(group: dist.ProcessGroup) -> None:
    """To ranks that plan a batch of one exchange: instead of a header that C would send."""
    world = group.size()
    sent = torch.full((world, header_width(1)), _NO_LIBRARY).view(torch.uint8)
    rank_mesh.all_to_all_cpu(torch.empty_like(sent), sent, [1] * world, [1] * world, group)


def require_valid_ids(headers: Headers, tables: Sequence[str]) -> None:
    """Raises on every rank alike."""
    for table, invalid in zip(tables, headers.invalid_ids, strict=True):
        if invalid is not None:
            _raise(invalid[0], _INVALID_ID, *invalid[1], table)


def require_fine(headers: Headers, table: str) -> None:
    """The same of one exchange, where the status is the kind of a Fault, whose numbers are told."""
    problems = [(kind, *numbers) for kind, numbers in zip(headers.statuses, headers.told.tolist(), strict=True)]
    if headers.invalid_ids[0] is not None:
        rank, invalid = headers.invalid_ids[0]
        problems[rank] = (_INVALID_ID, *invalid)
    _raise_first(problems, table)


def compare_invalid_ids(
    invalid: tuple[int, int] | None, table: str, group: dist.ProcessGroup, fault: Fault = NO_FAULT
) -> None:
    """An invalid (feature, id) or a fault on any rank raises on every rank; for a lookup that requests nothing."""
    own = fault if fault.kind or invalid is None else (_INVALID_ID, *invalid)
    _raise_first(_from_all(own, group), table)


def compare_weights(weights: int, ids: int, features: str, group: dist.ProcessGroup) -> None:
    """Another number of weights than of ids on any rank raises on every rank."""
    for rank, (n_weights, n_ids) in enumerate(_from_all((weights, ids), group)):
        if n_weights != n_ids:
            said = f"{n_weights} weights for {n_ids} ids of the features of {features}"
            raise ValueError(f"freescale: rank {rank}: {said}")


def _from_all(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    world = group.size()
    sent = torch.tensor([[*numbers]] * world)
    received = torch.empty_like(sent)
    rank_mesh.all_to_all_cpu(received, sent, [1] * world, [1] * world, group)
    return received.tolist()


def _raise_first(problems: Iterable[Sequence[int]], table: str) -> None:
    for rank, (kind, found, wanted) in enumerate(problems):
        if kind:
            _raise(rank, kind, found, wanted, table)


def _raise(rank: int, kind: int, found: int, wanted: int, table: str) -> None:
    """`found`, `wanted`: the numbers of a Fault; the feature and value of an invalid id."""
    if kind == _NO_LIBRARY:
        remedy = f"`python -m freescale doctor` on rank {rank} says what to do"
        raise RuntimeError(f"freescale: rank {rank} cannot plan batches, because its C library is missing: {remedy}")
    if kind == _INVALID_ID:
        where = table_registry.get_table(table).describe(found)
        raise IdOutsideTable(f"freescale: rank {rank}: id {wanted} is outside {where}")
    raise MalformedKeyedJaggedTensor(f"freescale: rank {rank}: {table}: {Fault(kind, found, wanted).describe()}")
